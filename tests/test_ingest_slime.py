"""Log-prob dumps of slime and miles, and logs of DebugMode: what is read, and what they cannot say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zkl_debug.cli import main as cli
from zkl_debug.errors import Refused
from zkl_debug.ingest import load_logprobs, slime, tracelog
from zkl_debug.logprobs.table import bits

LENGTHS = ((9, 4), (12, 7), (6, 1))


def cli_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--json"])
    return int(stop.value.code or 0), json.loads(capsys.readouterr().out)


def sequence(number: int) -> tuple[list[int], np.ndarray[Any, Any]]:
    """(tokens, log-probs of the response) of one sample."""
    total, response = LENGTHS[number]
    rng = np.random.default_rng(number)
    return rng.integers(0, 900, total).tolist(), -rng.exponential(2, response).astype(np.float32)


def rollout(path: Path, numbers: tuple[int, ...] = (0, 1, 2), **change: Any) -> Path:
    """A rollout dump, its samples as slime's ``Sample.to_dict`` gives them."""
    samples = []
    for number in numbers:
        tokens, logs = sequence(number)
        sample = {
            "group_index": 0,
            "index": number,
            "prompt": [{"role": "user", "content": "say it"}],
            "tokens": tokens,
            "response": "text",
            "response_length": len(logs),
            "reward": {"score": 1.0},
            "loss_mask": [1] * len(logs),
            "rollout_log_probs": logs.tolist(),
            "status": "completed",
            "metadata": {"round_number": 0},
            "remove_sample": False,
        }
        samples.append(sample | change)
    torch.save({"rollout_id": 3, "samples": samples}, path)
    return path


def train(
    path: Path, numbers: tuple[int, ...], rank: int = 0, *, both: bool = True, ulp: int = -1, **change: Any
) -> Path:
    """A train dump of one rank."""
    pairs = [sequence(number) for number in numbers]
    logs = [torch.from_numpy(values.copy()) for _, values in pairs]
    if ulp >= 0:
        logs[ulp][-1] = torch.nextafter(logs[ulp][-1], torch.tensor(0.0))
    data: dict[str, Any] = {
        "tokens": [torch.tensor(tokens) for tokens, _ in pairs],
        "response_lengths": [len(values) for _, values in pairs],
        "loss_masks": [torch.ones(len(values), dtype=torch.int) for _, values in pairs],
        "sample_indices": list(numbers),
        "total_lengths": [len(tokens) for tokens, _ in pairs],
        "log_probs": logs,
    }
    if both:
        data["rollout_log_probs"] = [torch.from_numpy(values) for _, values in pairs]
    torch.save({"rollout_id": 3, "rank": rank, "rollout_data": data | change}, path)
    return path


def test_a_rollout_dump_is_one_side_with_every_bit(tmp_path: Path) -> None:
    table = load_logprobs(rollout(tmp_path / "rollout_3.pt"))
    assert table.train is None
    assert set(table.step.tolist()) == {3}
    tokens, logs = sequence(1)
    mine = table.sample == 1
    assert table.position[mine].tolist() == list(range(5, 12))
    assert table.token[mine].tolist() == tokens[5:]
    assert (bits(table.gen[mine]) == bits(logs)).all()
    assert table.prefix.any(axis=1).all()


def test_rollout_against_train_and_the_ranks_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gen = rollout(tmp_path / "rollout_3.pt")
    (tmp_path / "ranks").mkdir()
    train(tmp_path / "ranks/3_0.pt", (0, 2), 0)
    train(tmp_path / "ranks/3_1.pt", (0, 2), 1)  # a tensor-parallel replica
    train(tmp_path / "ranks/3_2.pt", (1,), 2, ulp=0)
    table = load_logprobs(tmp_path / "ranks")
    assert len(table) == 12
    assert any("several ranks" in note for note in table.notes)
    code, document = cli_run(capsys, "logprobs", str(tmp_path / "ranks"))
    assert code == 1
    assert document["affected"]["rows"] == 1
    assert document["first"]["sample"] == 1
    only = train(tmp_path / "3_0.pt", (0, 1, 2), both=False, ulp=2)
    code, document = cli_run(capsys, "logprobs", str(gen), str(only))
    assert (code, document["first"]["sample"], document["first"]["position"]) == (1, 2, 5)


def test_a_table_that_is_written_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = train(tmp_path / "3_0.pt", (0, 1, 2), ulp=0)
    code, document = cli_run(capsys, "ingest", str(source), "--out", str(tmp_path / "t.npz"))
    assert (code, document["rows"], document["sides"]) == (0, 12, 2)
    one, two = load_logprobs(source), load_logprobs(tmp_path / "t.npz")
    assert one.train is not None
    assert two.train is not None
    assert (bits(one.gen) == bits(two.gen)).all()
    assert (bits(one.train) == bits(two.train)).all()
    assert (one.token == two.token).all()
    assert cli_run(capsys, "ingest", str(source), "--out", str(tmp_path / "t.npz"))[0] == 2, "it is there already"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"log_probs": [torch.zeros(2), torch.zeros(7), torch.zeros(1)]}, "context parallelism"),
        ({"log_probs": [torch.zeros(4)]}, "lists of one length"),
        ({"tokens": [torch.zeros(9), torch.full((12,), 2**40), torch.full((6,), -3)]}, "no token id"),
        ({"tokens": None}, "no tokens"),
        ({"loss_masks": [torch.ones(3)] * 3}, "does not fit the response"),
        ({"response_lengths": [40, 40, 40]}, "a response of 40"),
        ({"log_probs": None, "rollout_log_probs": None}, "no log-probs"),
    ],
)
def test_batches_that_do_not_fit_together(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = train(tmp_path / "3_0.pt", (0, 1, 2), **change)
    found = []
    try:
        table = load_logprobs(path)
    except Refused as error:
        found.append(str(error))
    else:
        assert table.is_damaged
        found += [skip.reason for skip in table.skipped]
    assert any(why in reason for reason in found)


def test_replicas_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    one, two = train(tmp_path / "a.pt", (0, 1)), train(tmp_path / "b.pt", (1, 2), 1, ulp=0)
    with pytest.raises(Refused, match="do not agree"):
        slime.read([one, two])


def test_objects_in_a_dump_are_not_loaded(tmp_path: Path) -> None:
    path = rollout(tmp_path / "r.pt", metadata={"where": Path("/")})
    with pytest.raises(Refused, match=r"pathlib|plain") as refusal:
        load_logprobs(path)
    assert "nothing in it was run" in str(refusal.value)


# logs -----------------------------------------------------------------------------------------------------------------


def debug_log(path: Path, scale: float) -> Path:
    """A log of torch's own DebugMode with tensor hashes."""
    from torch.utils._debug_mode import DebugMode

    x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    with DebugMode() as mode, DebugMode.log_tensor_hashes():
        y = torch.relu(x @ x.T)
        (y * scale).sum()
    path.write_text(mode.debug_string())
    return path


def test_debug_logs_give_a_hint_and_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = debug_log(tmp_path / "a.log", 1.0), debug_log(tmp_path / "b.log", 2.0)
    code, document = cli_run(capsys, "ingest", str(a), str(b))
    assert (code, document["verdict"]) == (4, "inconclusive")
    assert "mul" in document["a"]["operator"]
    assert document["operators_before"] >= 2
    code, document = cli_run(capsys, "ingest", str(a), str(a))
    assert (code, document["verdict"], document["differs"]) == (4, "inconclusive", "")
    with pytest.raises(SystemExit) as stop:
        cli.main(["ingest", str(a), str(b)])
    assert stop.value.code == 4
    assert "no verdict" in capsys.readouterr().out


def test_activation_traces_are_read_block_by_block(tmp_path: Path) -> None:
    block = "[layers.{n}.attention.wq/op_0_mm]\n  Shape: torch.Size([4, 8]), Dtype: torch.float32\n  L1 norm:  {v}\n\n"
    for name, value in (("a", "1.5e+00"), ("b", "1.6e+00")):
        text = block.format(n=0, v="9e+00") + block.format(n=1, v=value)
        (tmp_path / f"{name}.log").write_text(text)
    assert tracelog.looks_like(tmp_path / "a.log")
    logs = [tracelog.read(tmp_path / f"{name}.log") for name in "ab"]
    found = tracelog.compare(*logs)
    assert (found["operators_before"], found["a"]["operator"]) == (1, "layers.1.attention.wq/op_0_mm")
    (tmp_path / "c.log").write_text("nothing of the kind\n")
    assert not tracelog.looks_like(tmp_path / "c.log")
    with pytest.raises(Refused, match="no operator"):
        tracelog.read(tmp_path / "c.log")
