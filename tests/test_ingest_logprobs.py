"""NeMo-RL step dumps, Megatron golden files, CSV and NPZ: what is read, what is refused, and hostile bytes."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zkl_debug.errors import Refused, UsageError, ZklError
from zkl_debug.ingest import detect, golden, load_logprobs, nemo_rl
from zkl_debug.logprobs.report import analyse
from zkl_debug.logprobs.table import bits

GOLDEN = Path(__file__).resolve().parent / "data/megatron_golden"


def line(seed: int = 0, length: int = 12, prompt: int = 5, **changed: Any) -> dict[str, Any]:
    """One line as NeMo-RL writes it: every value wrapped in a list of length one."""
    rng = np.random.default_rng(seed)
    train = -rng.exponential(2, length).astype(np.float32)
    train[0] = 0
    gen = train.copy()
    gen[:prompt] = 0  # NeMo-RL has no generation log-probs of the prompt
    row: dict[str, Any] = {
        "content": ["text"],
        "rewards": [1.0],
        "input_lengths": [length],
        "token_ids": [rng.integers(0, 1000, length).tolist()],
        "token_loss_mask": [[0] * prompt + [1] * (length - prompt)],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * length],
        "generation_logprobs": [gen.tolist()],
        "prev_logprobs": [train.tolist()],
        "idx": seed,
    }
    row.update(changed)
    return {key: value for key, value in row.items() if value is not None}


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# NeMo-RL ----------------------------------------------------------------------------------------------------------


def test_a_step_dump_keeps_bits_positions_and_masks(tmp_path: Path) -> None:
    path = write(tmp_path / "train_data_step7.jsonl", [line(0), line(1, sample_loss_mask=[0.0])])
    table = load_logprobs(path)
    assert detect(path) == "nemo-rl"
    assert set(table.step.tolist()) == {7}
    assert table.position[:11].tolist() == list(range(1, 12))  # position 0 has no log-prob
    assert table.valid.tolist() == [False] * 4 + [True] * 7 + [False] * 11
    assert table.train is not None
    expected = np.asarray(line(0)["prev_logprobs"][0][1:], np.float32)
    assert (bits(table.train[:11]) == bits(expected)).all()
    assert table.prefix.any(axis=1).all()
    report = analyse(table)
    assert report.verdict == "identical"
    assert (report.compared, report.masked, report.masked_differ) == (7, 15, 8)
    assert analyse(table, valid_only=True).total.tokens == 7


def test_flat_values_are_read_too(tmp_path: Path) -> None:
    row = {key: value[0] if isinstance(value, list) else value for key, value in line(0).items()}
    assert len(load_logprobs(write(tmp_path / "x.jsonl", [row]))) == 11


def test_a_folder_is_read_in_step_order(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        write(tmp_path / f"train_data_step{step}.jsonl", [line(step), line(step + 100)])
    write(tmp_path / "val_data_step1.jsonl", [{}])
    assert sorted(set(load_logprobs(tmp_path).step.tolist())) == [1, 2, 10]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    write(outside / "train_data_step2.jsonl", [line()])
    (inside / "train_data_step2.jsonl").symlink_to(outside / "train_data_step2.jsonl")
    write(inside / "train_data_step1.jsonl", [line()])
    assert set(load_logprobs(inside).step.tolist()) == {1}


def test_nan_infinity_and_null(tmp_path: Path) -> None:
    row = line(0)
    row["prev_logprobs"][0][6] = float("nan")
    row["prev_logprobs"][0][7] = float("-inf")
    row["generation_logprobs"][0][8] = "NaN"
    row["generation_logprobs"][0][9] = None
    table = load_logprobs(write(tmp_path / "train_data_step1.jsonl", [row]))
    assert table.train is not None
    assert np.isnan(table.train[5])
    assert np.isneginf(table.train[6])
    assert np.isnan(table.gen[[7, 8]]).all()
    assert "null log-probs were read as NaN" in table.notes
    assert analyse(table).affected.rows == 4


def test_an_old_dump_without_mask_and_tokens(tmp_path: Path) -> None:
    row = line(0, token_ids=None, token_loss_mask=None, sample_loss_mask=None, advantages=None)
    table = load_logprobs(write(tmp_path / "train_data_step1.jsonl", [row]))
    assert int(table.valid.sum()) == 7
    assert any("no token_loss_mask" in note for note in table.notes)
    assert not table.prefix.any()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "a JSON list"),
        ("null", "a JSON NoneType"),
        (json.dumps(line(0, prev_logprobs=None)), "no prev_logprobs"),
        (json.dumps(line(0, token_ids=[[1, 2, 3]])), "lengths differ"),
        (json.dumps(line(0, generation_logprobs=[["x"] * 12])), "not a list of numbers"),
        (json.dumps(line(0, generation_logprobs=[[[1.0], [2.0, 3.0]]])), "generation_logprobs"),
        (json.dumps(line(0, generation_logprobs=7)), "where a list belongs"),
        (json.dumps(line(0, token_ids=[[-1.5] * 12])), "no token id"),
        (json.dumps(line(0, token_loss_mask=[[float("nan")] * 12])), "not finite"),
        (json.dumps(line(0, sample_loss_mask="yes")), "sample_loss_mask"),
        (json.dumps(line(0, token_ids=[[10**400] * 12])), "token_ids"),
        ("[" * 100_000, "nested too deeply"),
        ('{"generation_logprobs": ' + "1" * 10_000 + "}", "not JSON"),
        (json.dumps(line(0))[:-40], "cut off"),
    ],
)
def test_a_bad_line_is_named_and_forbids_identical(tmp_path: Path, bad: str, why: str) -> None:
    path = tmp_path / "train_data_step1.jsonl"
    path.write_text(json.dumps(line(1)) + "\n" + bad + "\n")
    table = load_logprobs(path)
    assert len(table) == 11
    assert table.is_damaged
    assert why in table.skipped[0].reason
    assert "line 2" in table.skipped[0].reason
    report = analyse(table)
    assert report.verdict == "refused"
    assert int(report.exit_code) == 3
    path.write_text(bad + "\n")
    with pytest.raises(Refused, match="no sequence with both log-probs"):
        load_logprobs(path)


def test_a_bad_line_does_not_hide_a_difference(tmp_path: Path) -> None:
    row = line(1)
    row["generation_logprobs"][0][8] -= 1
    path = tmp_path / "train_data_step1.jsonl"
    path.write_text(json.dumps(row) + "\n{\n")
    assert analyse(load_logprobs(path)).verdict == "diverged"


def test_limits(tmp_path: Path) -> None:
    path = write(tmp_path / "train_data_step1.jsonl", [line(0), line(1)])
    with pytest.raises(Refused, match="beyond 11 rows"):
        nemo_rl.read([path], nemo_rl.Limits(rows=11))
    long = len(json.dumps(line(0))) + 5
    path.write_text(json.dumps(line(0)) + "\n" + "x" * 5000)
    assert "longer than" in nemo_rl.read([path], nemo_rl.Limits(line_bytes=long)).skipped[0].reason


def test_samples_without_an_index_are_numbered_by_line(tmp_path: Path) -> None:
    table = load_logprobs(write(tmp_path / "train_data_step1.jsonl", [line(3, idx=4), line(4, idx=4)]))
    assert sorted(set(table.sample.tolist())) == [0, 1]
    assert any("numbered by line" in note for note in table.notes)


def test_everything_masked_or_never_computed_is_refused(tmp_path: Path) -> None:
    masked = load_logprobs(write(tmp_path / "train_data_step1.jsonl", [line(0, sample_loss_mask=[0])]))
    with pytest.raises(Refused, match="nothing to compare"):
        analyse(masked)
    unfilled = load_logprobs(write(tmp_path / "train_data_step2.jsonl", [line(0, prev_logprobs=[[0.0] * 12])]))
    with pytest.raises(Refused, match="never computed"):
        analyse(unfilled)
    with pytest.raises(Refused, match="no rows of step 9"):
        analyse(unfilled, step=9)


def test_two_files_of_one_step_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    paths = [write(p / "train_data_step1.jsonl", [line()]) for p in (tmp_path, tmp_path / "b")]
    with pytest.raises(Refused, match="two files of step 1"):
        nemo_rl.read(paths)


# golden -----------------------------------------------------------------------------------------------------------


def test_a_golden_file_has_one_side_and_no_prompt_tokens() -> None:
    path = GOLDEN / "tp1_pp1_583m_chunked_prefill.json"
    table = load_logprobs(path)
    assert detect(path) == "golden"
    assert table.train is None
    assert len(table) == 117
    assert table.position.tolist() == list(range(1, 118))
    assert int(table.generated.sum()) == 30
    assert table.token[:87].tolist() == [-1] * 87
    assert table.token[87] == 3060
    assert table.meta["prompt_tokens"] == {"0": 88}
    raw = json.loads(path.read_text())["0"]["prompt_logprobs"]
    assert table.gen[63] == np.float32(raw[63])  # exact: the file holds float32 values
    assert float(table.gen[63]) == raw[63]


def test_golden_requests_that_do_not_add_up(tmp_path: Path) -> None:
    good = {"generated_tokens": [1, 2], "generated_logprobs": [-1.0, -2.0]}
    path = tmp_path / "g.json"
    path.write_text(json.dumps({"0": good, "1": {**good, "generated_tokens": [1]}, "throughput": [1]}))
    table = load_logprobs(path)
    assert len(table) == 2
    assert table.is_damaged
    path.write_text(json.dumps({"0": {**good, "prompt_logprobs": [-1.0] * 4}, "lifetime_prefill_token_count": 3}))
    assert any("prefix caching" in note for note in load_logprobs(path).notes)
    for bad in ({}, {"0": {"generated_logprobs": "x"}}, {"0": {"generated_logprobs": [[1]]}}, [1]):
        path.write_text(json.dumps(bad))
        with pytest.raises(Refused):
            golden.read(path)


def test_golden_size_limit() -> None:
    with pytest.raises(Refused, match="larger than"):
        golden.read(GOLDEN / "tp1_pp1_583m_flashinfer.json", max_bytes=100)


# csv and npz ------------------------------------------------------------------------------------------------------


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("Sample,position,token,gen,prev_logprobs,mask\n0,2,7,-0.1,-0.1,1\n0,1,5,-0.5,-0.25,0\n\n")
    table = load_logprobs(path)
    assert table.position.tolist() == [1, 2]
    assert table.token.tolist() == [5, 7]
    assert analyse(table).verdict == "identical"
    path.write_text("position,gen,train\n1,-1,-1\n2,nan,-inf\n3,,-2\n")
    assert analyse(load_logprobs(path)).affected.rows == 2


def test_npz_and_float32_bits(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    gen = -np.random.default_rng(0).exponential(2, 50).astype(np.float32)
    train = gen.copy()
    train[3] = np.nextafter(train[3], np.float32(0))
    np.savez_compressed(path, position=np.arange(50), gen=gen, train=train, junk=np.array(["x"]))
    report = analyse(load_logprobs(path))
    assert (report.affected.rows, report.findings[0].name) == (1, "fp32-rounding")
    np.savez(path, position=np.arange(50), gen=gen.astype(np.float64) * 1.00000001, train=train)
    assert any("no float32 numbers" in note for note in load_logprobs(path).notes)


def test_retokenised_responses_are_refused_at_sample_and_position(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("sample,position,token,token_train,gen,train\n3,1,5,5,-1,-1\n3,2,7,8,-1,-1\n3,3,9,1,-1,-1\n")
    with pytest.raises(Refused, match="sample 3, position 2: 7 against 8 \\(2 position"):
        load_logprobs(path)


def test_values_rounded_by_the_writer_are_said_to_be(tmp_path: Path) -> None:
    values = -np.random.default_rng(0).exponential(2, 30)
    rows = "".join(f"{i},{v:.4f},{v:.4f}\n" for i, v in enumerate(values))
    path = tmp_path / "t.csv"
    path.write_text("position,gen,train\n" + rows)
    report = analyse(load_logprobs(path))
    assert report.equality == "as-written"
    assert any("rounded when written" in note for note in report.notes)
    rows = "".join(f"{i},{np.float32(v)!s},{np.float32(v)!s}\n" for i, v in enumerate(values))
    path.write_text("position,gen,train\n" + rows)
    assert analyse(load_logprobs(path)).equality == "float32-bits"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "position,gen,train\n",
        "a,b\n1,2\n",
        "position,gen,train\n1,2\n",
        "position,gen,train\nx,1,1\n",
        "position,gen,train\n-1,-1,-1\n",
        "position,gen,train\n1e300,-1,-1\n",
        "position,gen,train\n1.5,-1,-1\n",
        "position,gen,train\n1,-1,-1\n1,-1,-1\n",
        "position,gen,train\n1,-1,import os\n",
        "position,gen,train,mask\n1,-1,-1,\n",
        "position,gen,train,token\n1,-1,-1,1e18\n",
        'position,gen,train\n"' + "x" * 200_000,
    ],
)
def test_csv_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ZklError):
        analyse(load_logprobs(path))


def _npy(header: str, body: bytes) -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


@pytest.mark.parametrize(
    "member",
    [
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000,), }\n", b"\0" * 8),
        _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", b"cos\nsystem\n(S'touch /tmp/owned'\ntR."),
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }\n", b"\0" * 16),
        _npy("__import__('os').system('true')\n", b""),
        b"not an array",
        b"",
    ],
)
def test_npz_that_lies_about_itself(tmp_path: Path, member: bytes) -> None:
    path = tmp_path / "t.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("position", "gen", "train"):
            archive.writestr(f"{name}.npy", member)
    with pytest.raises(Refused):
        load_logprobs(path)


def test_zip_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zkl_debug.logprobs.files.MAX_BYTES", 1 << 20)
    path = tmp_path / "t.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("position.npy", b"\0" * (8 << 20))
    assert path.stat().st_size < 100_000
    with pytest.raises(Refused, match="unpacks to more"):
        load_logprobs(path)


def test_what_it_is_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        load_logprobs(tmp_path / "absent")
    with pytest.raises(UsageError, match="holds no train_data"):
        load_logprobs(tmp_path)
    path = tmp_path / "blob"
    path.write_bytes(b"\x80\x04\x95 pickle")
    with pytest.raises(UsageError, match="cannot tell"):
        load_logprobs(path)


def _samples() -> list[tuple[str, bytes]]:
    archive = io.BytesIO()
    np.savez(archive, position=np.arange(9), gen=-np.ones(9, np.float32), train=-np.ones(9, np.float32))
    dump = "".join(json.dumps(line(i)) + "\n" for i in range(2)).encode()
    return [
        ("train_data_step1.jsonl", dump),
        ("g.json", (GOLDEN / "tp1_pp1_583m_flashinfer.json").read_bytes()),
        ("t.npz", archive.getvalue()),
        ("t.csv", b"sample,position,token,gen,train,mask\n" + b"".join(b"0,%d,5,-1,-1,1\n" % i for i in range(9))),
    ]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 3), st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=6)), max_size=4), st.floats(0, 1))
def test_mutated_files_end_in_an_answer_or_a_refusal(
    tmp_path: Path, which: int, edits: list[tuple[float, bytes]], cut: float
) -> None:
    """Overwritten bytes and a cut end: no exception but ours."""
    name, data = _samples()[which]
    raw = bytearray(data)
    for place, patch in edits:
        at = int(place * len(raw))
        raw[at : at + len(patch)] = patch
    if cut < 0.5:
        del raw[int(cut * 2 * len(raw)) :]
    path = tmp_path / name
    path.write_bytes(bytes(raw))
    try:
        table = load_logprobs(path)
        if table.train is not None:
            assert analyse(table).verdict in ("identical", "diverged", "refused")
    except ZklError:
        pass
