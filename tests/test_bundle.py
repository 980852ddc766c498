"""A bundle replays a mismatch with torch alone, shows the same elements, and tells nothing of the machine."""

from __future__ import annotations

import getpass
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from zkl_debug.beds import BedOptions
from zkl_debug.beds.bundle import write_bundle
from zkl_debug.beds.bundle_script import load
from zkl_debug.beds.bundle_tensors import Stored, cut_linear, safetensors
from zkl_debug.beds.record import RecordOptions, record_bed
from zkl_debug.beds.replay import replay_first
from zkl_debug.beds.ruling import rule_first
from zkl_debug.cli.main import main
from zkl_debug.diff import diff_captures
from zkl_debug.errors import Refused, UsageError
from zkl_debug.store.reader import Capture, open_capture

PAYLOAD = RecordOptions(level="payload", certify=False, strict=True)
COMBINE = "decoder.layers.1.mlp/unpermute:out.0"
_LINE = re.compile(r"  row (\d+) \(sample (\d+) position (\d+)\) element (\d+): a \S+ 0x(\w+)  b \S+ 0x(\w+)")


@pytest.fixture(scope="module")
def combine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-moe bf16 with the combine in another order on the generation side, payload level."""
    out = tmp_path_factory.mktemp("combine") / "run"
    record_bed(BedOptions(bed="tiny-moe", fault="K7", reprefill=False), out, PAYLOAD)
    return out


def run_alone(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """The script in an interpreter of its own: isolated, without an environment, elsewhere."""
    return subprocess.run(
        [sys.executable, "-I", str(folder / "replay.py"), *args],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ""},
        cwd="/",
        timeout=120,
        check=False,
    )


def captured_rows(capture: Capture, site: str) -> dict[bytes, NDArray[np.uint16]]:
    """Raw bits by prefix digest: rows of equal tokens so far are equal on one side, whatever the sample."""
    entry = capture.sites[site]
    bits = entry.payload(slice(None))
    return {row["prefix"].tobytes(): bits[i] for i, row in enumerate(capture.rows[entry.rows])}


def test_bundle_shows_the_captured_mismatch_in_a_bare_interpreter(
    combine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    with pytest.raises(SystemExit) as stop:
        main(["bundle", str(combine / "train"), str(combine / "gen"), "--site", COMBINE, "--out", str(out), "--json"])
    document = json.loads(capfd.readouterr().out)
    assert stop.value.code == 0
    assert (document["site"], document["formula"]) == (COMBINE, "combine")
    assert document["bytes"] == sum(f.stat().st_size for f in out.iterdir()) < 4 << 20
    assert sorted(f.name for f in out.iterdir()) == ["metadata.json", "replay.py", "tensors.safetensors"]

    done = run_alone(out, "--elements", "1000000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a: bit for bit as recorded with: ascending expert order, added in bfloat16" in done.stdout
    assert "b: bit for bit as recorded with: descending expert order, added in bfloat16" in done.stdout
    assert "the same elements as recorded" in done.stdout
    assert "not the same elements" not in done.stdout
    printed = {
        tuple(map(int, m.groups()[1:4])): m.groups()[4:] for m in map(_LINE.match, done.stdout.splitlines()) if m
    }
    rows = json.loads((out / "metadata.json").read_text())["rows"]
    expected = {}
    with open_capture(combine / "train") as a, open_capture(combine / "gen") as b:
        left, right = captured_rows(a, COMBINE), captured_rows(b, COMBINE)
        prefix = {(int(r["sample"]), int(r["position"])): r["prefix"].tobytes() for r in a.rows}
        for row in rows:
            at = row["sample"], row["position"]
            x, y = left[prefix[at]], right[prefix[at]]
            for element in np.flatnonzero(x != y).tolist():
                expected[(*at, element)] = (f"{x[element]:04x}", f"{y[element]:04x}")
    assert len(expected) > 100
    assert printed == expected


def test_bundle_tells_nothing_of_the_machine(combine: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    write_bundle(combine / "train", combine / "gen", out, COMBINE)
    everything = b"\n".join(f.name.encode() + f.read_bytes() for f in out.iterdir()).lower()
    secrets = {str(Path.home()), socket.gethostname(), str(combine), str(tmp_path), str(Path.cwd()), sys.prefix}
    for secret in {*secrets, "/tmp/", "/home/", "site-packages"}:
        assert secret.lower().encode() not in everything, secret
    user = getpass.getuser()
    assert len(user) < 5 or user.lower().encode() not in everything
    script = (out / "replay.py").read_text()
    assert "zkl_debug" not in script
    assert set(re.findall(r"^(?:import|from) (\w+)", script, re.MULTILINE)) <= {*sys.stdlib_module_names, "torch"}
    meta = json.loads((out / "metadata.json").read_text())
    assert set(meta["versions"]) <= {"torch", "megatron-core"}
    names = set(load(out / "tensors.safetensors"))
    assert names == {"in", "out/a", "out/b", "positions"}  # no token ids beside those of the rows
    assert len(meta["rows"]) == 32


def test_site_that_inherits_has_both_inputs(combine: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    done = write_bundle(combine / "train", combine / "gen", out, "decoder.layers.3.mlp/unpermute", rows=4)
    assert (done.site, done.rows) == ("decoder.layers.3.mlp/unpermute:out.0", 4)
    assert {"in/a", "in/b"} <= set(load(out / "tensors.safetensors"))
    assert run_alone(out).returncode == 0


def test_combine_called_again_stays_own(combine: Path) -> None:
    verdict = diff_captures(combine / "train", combine / "gen")
    answer = replay_first(verdict, combine / "train", combine / "gen")
    assert (answer.site, answer.status, answer.kind) == (COMBINE, "reproduces", "own")


def test_captures_without_their_bed_are_judged_and_bundled_but_not_replayed(combine: Path, tmp_path: Path) -> None:
    a, b = (Path(shutil.copytree(combine / side, tmp_path / side)) for side in ("train", "gen"))
    verdict = diff_captures(a, b)
    assert replay_first(verdict, a, b).status == "not possible"
    ruling = rule_first(verdict, a, b)
    assert (ruling.formula, ruling.verdict) == ("combine", "rounding"), ruling.text
    done = write_bundle(a, b, tmp_path / "bundle")
    assert "weights are not in the bundle" in " ".join(done.notes)
    assert run_alone(done.folder).returncode == 0  # a combine has none


def test_what_cannot_be_bundled_is_refused(combine: Path, tmp_path: Path) -> None:
    a, b = combine / "train", combine / "gen"
    with pytest.raises(UsageError, match=r"unpermute:out\.0"):
        write_bundle(a, b, tmp_path / "x", "decoder.layers.1.mlp/unpermut:out.0")
    with pytest.raises(Refused, match="does not differ"):
        write_bundle(a, b, tmp_path / "x", "decoder.layers.0.mlp.linear_fc1:out")
    with pytest.raises(Refused, match="nothing to bundle"):
        write_bundle(a, a, tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        write_bundle(a, b, tmp_path / "full")
    assert not (tmp_path / "x").exists()


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    bits = np.array([[0x7FC1, 0x8000], [0x3F80, 0x0001]], np.uint16)
    scalar = np.array([1.5]).view(np.uint64)
    stored = {"x": Stored(bits, "bfloat16", (2, 2)), "none": Stored(bits[:0], "bfloat16", (0, 2))}
    (tmp_path / "t").write_bytes(safetensors({**stored, "s": Stored(scalar, "float64", ())}))
    found = load(tmp_path / "t")
    assert np.array_equal(found["x"].view(torch.int16).numpy().view(np.uint16), bits)
    assert found["none"].shape == (0, 2)
    assert float(found["s"]) == 1.5
    with pytest.raises(UsageError, match="complex64"):
        safetensors({"x": Stored(bits, "complex64", (1,))})


def test_large_weights_are_cut_to_the_outputs_that_differ() -> None:
    weight = np.arange(6 * 4, dtype=np.uint32).reshape(6, 4)
    a = np.zeros((3, 6), np.uint32)
    b = a.copy()
    b[:, 4], b[0, 1] = 1, 1
    tensors = {
        "in": Stored(np.zeros((3, 4), np.uint32), "float32", (3, 4)),
        "out/a": Stored(a, "float32", (3, 6)),
        "out/b": Stored(b, "float32", (3, 6)),
        "weight/weight": Stored(weight, "float32", (6, 4)),
        "weight/bias": Stored(weight[:, :1].copy(), "float32", (6,)),
    }
    same, kept = cut_linear(tensors, weight.nbytes)
    assert kept is None
    assert same == tensors
    cut, kept = cut_linear(tensors, 2 * 16)
    assert kept is not None
    assert kept.tolist() == [1, 4]
    assert cut["out/b"].bits.tolist() == [[1, 1], [0, 1], [0, 1]]
    assert np.array_equal(cut["weight/weight"].bits, weight[[1, 4]])
    assert (cut["weight/weight"].shape, cut["weight/bias"].shape) == ((2, 4), (2,))
    assert cut["in"] is tensors["in"]


@pytest.mark.slow
def test_rows_of_one_side_may_be_computed_in_several_ways(tmp_path: Path) -> None:
    """The tile depends on another request: both sides of the edge are the same engine."""
    run = tmp_path / "run"
    record_bed(BedOptions(bed="tiny-gpt", fault="K5"), run, PAYLOAD)
    done = write_bundle(run / "train", run / "gen", tmp_path / "bundle")
    assert done.reproduced, done.notes
    told = [str(done.replayed[side]["with"]) for side in ("a", "b")]
    assert "tiles of 8 keys" in told[0]
    assert "tiles of 4 keys" in told[1]
    assert run_alone(done.folder).returncode == 0


def test_what_each_side_is_given_goes_along(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "bundle"
    options = BedOptions(bed="tiny-gpt", fault="P5", reprefill=False)
    record_bed(options, run, RecordOptions(level="payload", layers=(0, 0), certify=False))
    with pytest.raises(SystemExit) as stop:
        main(["bundle", str(run / "train"), str(run / "gen"), "--out", str(out)])
    assert stop.value.code == 0
    told = " ".join(capfd.readouterr().out.split())
    assert "eps: a 1e-05, b 1e-06, from the operator as each side runs it" in told
    assert "replay.py gives a bit for bit" in told
    assert "replay.py gives b bit for bit" in told
    assert {"weight/eps/a", "weight/eps/b", "weight/weight"} <= set(load(out / "tensors.safetensors"))
    done = run_alone(out)
    assert done.returncode == 0, done.stdout
    assert "eps: a 1e-05, b 1e-06" in done.stdout
    assert "the same elements as recorded" in done.stdout


def test_a_bundle_says_itself_what_it_cannot_replay(
    combine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = (str(shutil.copytree(combine / side, tmp_path / side)) for side in ("train", "gen"))
    site, out = "decoder.layers.2.input_layernorm:out", str(tmp_path / "bundle")
    with pytest.raises(SystemExit) as stop:
        main(["bundle", a, b, "--site", site, "--out", out, "--json"])
    assert stop.value.code == 0
    document = json.loads(capfd.readouterr().out)
    assert document["reproduced"] is False
    assert "replay.py has nothing to replay b with: weight/weight is not in the bundle" in document["notes"]
    assert "nothing to replay" in run_alone(tmp_path / "bundle").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "bed", "dtype", "right"),
    [
        ("K1", "tiny-gpt", "fp32", "8 partial sums, rounded once after gamma"),
        ("K2", "tiny-gpt", "bf16", "inner axis in 2 chunks"),
        ("K4", "tiny-gpt", "bf16", "two halves of the keys merged by log-sum-exp"),
        ("K12", "tiny-gpt", "fp32", "shift, exp, sum by halves, log"),
        ("P1", "tiny-gpt", "fp32", "one product, rounded to bfloat16"),
        ("P4", "tiny-gpt", "bf16", "rounded before gamma"),
        ("P7", "tiny-gpt", "bf16", "pairs are halves, in bfloat16"),
        ("X2", "tiny-gpt", "bf16", "pairs are neighbours"),
        ("P5", "tiny-gpt", "fp32", "a sum by halves, rounded once after gamma"),
        ("L1", "tiny-gpt", "bf16", "shift, exp, sum by halves, log"),
        ("X1", "tiny-gpt", "bf16", "pairs are halves"),
        ("K8", "tiny-gpt", "fp32", "shift, exp, sum by halves, log"),
        ("W2", "tiny-gpt", "bf16", "one product"),
    ],
)
def test_known_arithmetic_is_named_for_both_sides(fault: str, bed: str, dtype: str, right: str, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "bundle"
    record_bed(BedOptions(bed=bed, dtype=dtype, fault=fault, reprefill=False), run, PAYLOAD)
    write_bundle(run / "train", run / "gen", out)
    done = run_alone(out)
    assert done.returncode == 0, done.stdout
    assert "the same elements as recorded" in done.stdout
    line = next(text for text in done.stdout.splitlines() if text.startswith("b: "))
    assert line.startswith("b: bit for bit")
    assert right in line
