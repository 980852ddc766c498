"""``zkl-debug capture -- PROGRAM``: programs over transformers that know nothing of it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from zkl_debug.diff import diff_captures
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the hf extra")

PROGRAM = str(Path(__file__).parent / "programs/hf_tiny.py")
Run = subprocess.CompletedProcess[str]


def run(*command: str, env: dict[str, str] | None = None) -> Run:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | (env or {}))


def attached(out: Path, side: str, *command: str, options: tuple[str, ...] = ()) -> Run:
    cli = [sys.executable, "-m", "zkl_debug.cli.main", "capture", "--side", side, "--out", str(out), *options, "--"]
    return run(*cli, *command)


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``gen`` and ``train`` of one program run twice, and the generated ``sequences.json``."""
    root = tmp_path_factory.mktemp(request.param)
    words = [sys.executable, PROGRAM]
    more = ["--family", request.param]
    plain = run(*words, "gen", str(root / "plain.json"), *more)
    seen = attached(root / "gen", "gen", *words, "gen", str(root / "sequences.json"), *more)
    assert (seen.returncode, seen.stdout, seen.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert seen.returncode == 5
    assert (root / "plain.json").read_text() == (root / "sequences.json").read_text(), "the probe changed the result"
    scored = attached(root / "train", "train", *words, "score", str(root / "sequences.json"), *more)
    assert scored.returncode == 0, scored.stderr
    return root


def test_phases_and_rows_are_found(captured: Path) -> None:
    sequences = json.loads((captured / "sequences.json").read_text())
    with open_capture(captured / "gen") as gen, open_capture(captured / "train") as train:
        assert list(gen.frames["phase"]) == [Phase.PREFILL, *[Phase.DECODE] * 7]
        assert list(train.frames["phase"]) == [Phase.SCORE]
        for sample, tokens in enumerate(sequences):
            mine = gen.rows[gen.rows["sample"] == sample]
            assert list(mine["token"]) == tokens[:-1], "the last token is never run"
            assert list(mine["position"]) == list(range(len(tokens) - 1))
        assert gen.meta["engine"] == "transformers"
        assert gen.manifest["probe"]["ok"]
        assert not gen.manifest["left_patched"]


def test_the_first_site_is_attention_with_equal_inputs(captured: Path) -> None:
    verdict = diff_captures(captured / "train", captured / "gen")
    assert verdict.verdict == "diverged"
    assert verdict.first is not None
    assert verdict.first.site == "model.layers.0.self_attn/core_attention:out.0"
    assert verdict.first.kind.label == "own"
    assert verdict.first.inputs == "equal"
    assert verdict.coverage.matched == verdict.coverage.expected
    assert verdict.edges["score-decode"].compared == 21


def test_wrong_positions_under_left_padding_are_refused(captured: Path, tmp_path: Path) -> None:
    family = captured.name.rstrip("0123456789")
    words = (sys.executable, PROGRAM, "score", str(captured / "sequences.json"), "--family", family, "--shift")
    assert attached(tmp_path / "train", "train", *words).returncode == 0
    verdict = diff_captures(tmp_path / "train", captured / "gen")
    assert verdict.exit_code == 3
    assert verdict.refusal is not None
    assert "position" in verdict.refusal.text


def test_a_static_cache_gives_the_same_rows(captured: Path, tmp_path: Path) -> None:
    family = captured.name.rstrip("0123456789")
    words = (sys.executable, PROGRAM, "gen", str(tmp_path / "s.json"), "--family", family, "--cache", "static")
    attached(tmp_path / "gen", "gen", *words)
    with open_capture(captured / "gen") as dynamic, open_capture(tmp_path / "gen") as static:
        key = ["sample", "position", "token", "prefix"]
        assert np.array_equal(np.sort(dynamic.rows[key]), np.sort(static.rows[key]))
    verdict = diff_captures(captured / "gen", tmp_path / "gen")
    assert verdict.coverage.compared > 0


def test_recurrent_models_are_keyed_through_their_state(tmp_path: Path) -> None:
    """A cache of recurrent layers alone has no length; forward and generate of Mamba, in one batch without padding."""
    code = (
        "import sys, torch, zkl_debug\nfrom transformers import MambaConfig, MambaForCausalLM\n"
        "torch.manual_seed(0); torch.set_num_threads(1)\n"
        "config = MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2, state_size=8)\n"
        "model = MambaForCausalLM(config).eval()\n"
        "ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])\n"
        "with torch.no_grad():\n"
        "    with zkl_debug.capture(model, sys.argv[1] + '/gen', side='gen', level='payload'):\n"
        "        out = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)\n"
        "        model.generate(out, max_new_tokens=2, do_sample=False, pad_token_id=0)\n"
        "    with zkl_debug.capture(model, sys.argv[1] + '/train', side='train', level='payload'):\n"
        "        model(out, use_cache=False)\n"
    )
    done = run(sys.executable, "-c", code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    with open_capture(tmp_path / "gen") as gen:
        assert list(gen.frames["phase"]) == [Phase.PREFILL, *[Phase.DECODE] * 4, Phase.PREFILL, Phase.DECODE]
        assert gen.manifest["probe"]["ok"]
        first = gen.rows[gen.rows["sample"] == 0]
        assert list(first["position"]) == list(range(8))
    verdict = diff_captures(tmp_path / "train", tmp_path / "gen")
    assert verdict.refusal is None
    assert verdict.edges["prefill-decode"].compared == 8
    assert verdict.edges["score-decode"].compared == 8
    own = diff_captures(tmp_path / "gen")
    assert own.edges["prefill-decode"].compared == 8


def test_steps_are_counted_and_bounded(tmp_path: Path) -> None:
    sequences = tmp_path / "s.json"
    sequences.write_text(json.dumps([[1, 2, 3, 4], [5, 6, 7]]))
    words = (sys.executable, PROGRAM, "score", str(sequences), "--train", "4")
    assert attached(tmp_path / "all", "train", *words).returncode == 0
    assert attached(tmp_path / "two", "train", *words, options=("--steps", "2")).returncode == 0
    with open_capture(tmp_path / "all") as every, open_capture(tmp_path / "two") as two:
        assert list(every.frames["step"]) == [0, 0, 1, 2, 3]
        assert list(every.frames["weight_version"]) == [0, 0, 1, 2, 3]
        assert list(two.frames["step"]) == [0, 0, 1]


def test_ranks_of_a_job_write_one_capture(tmp_path: Path) -> None:
    sequences = tmp_path / "s.json"
    sequences.write_text(json.dumps([[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]]))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = attached(tmp_path / "two", "train", sys.executable, *torchrun, PROGRAM, "score", str(sequences))
    assert done.returncode == 0, done.stderr
    alone = attached(tmp_path / "one", "train", sys.executable, PROGRAM, "score", str(sequences))
    assert alone.returncode == 0
    with open_capture(tmp_path / "two") as two, open_capture(tmp_path / "one") as one:
        assert two.manifest["world"] == 2
        assert sorted(map(tuple, two.rows["prefix"])) == sorted(map(tuple, one.rows["prefix"]))


def test_an_interrupt_leaves_a_readable_capture(tmp_path: Path) -> None:
    sequences = tmp_path / "s.json"
    sequences.write_text(json.dumps([[1, 2, 3, 4]]))
    words = [sys.executable, "-m", "zkl_debug.cli.main", "capture", "--side", "train", "--out", str(tmp_path / "c")]
    words += ["--", sys.executable, PROGRAM, "score", str(sequences), "--train", "100000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 120
    while not any((tmp_path / "c").glob("*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    with open_capture(tmp_path / "c", partial=True) as capture:
        assert len(capture.frames) > 1
        assert not capture.manifest["complete"]
        assert "KeyboardInterrupt" in capture.manifest["reason"]


def test_programs_it_cannot_attach_to_are_said_and_keep_their_status(tmp_path: Path) -> None:
    isolated = attached(tmp_path / "a", "train", sys.executable, "-I", "-c", "print('x')")
    assert isolated.returncode == 3
    assert isolated.stdout == "x\n"
    assert "nothing was captured" in isolated.stderr
    assert attached(tmp_path / "b", "train", sys.executable, "-c", "raise SystemExit(9)").returncode == 9
    missing = attached(tmp_path / "c", "train", str(tmp_path / "no-such-program"))
    assert missing.returncode == 2
    assert "cannot start" in missing.stderr
    (tmp_path / "d").mkdir()
    assert attached(tmp_path / "d", "train", sys.executable, "-c", "").returncode == 2


def of_class(module: str, name: str) -> tuple[str, ...]:
    return ("--model", f"{module}:{name}")


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        ((), "-I", "python -I leaves the start-up hook out"),
        ((), "import json", "no model that is known was imported"),
        ((), "import transformers.modeling_utils", "transformers was imported, but no model of it was called"),
        (of_class("nope", "Nope"), "import json", "--model nope:Nope: the program never imported a module nope"),
        (of_class("json", "Nope"), "import json", "--model json:Nope: module json has no class Nope"),
        (of_class("json", "JSONEncoder"), "import json", "no json:JSONEncoder was called"),
    ],
)
def test_the_reason_that_is_known_is_the_one_that_is_told(
    options: tuple[str, ...], code: str, why: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-I", "-c", ""] if code == "-I" else [sys.executable, "-c", code]
    done = attached(tmp_path / "c", "train", *words, options=options)
    assert done.returncode == 3
    assert f"nothing was captured: {why}" in done.stderr
    assert ("-I or -S" in done.stderr) is (code == "-I")


def test_a_model_that_is_not_found_is_refused_though_another_was_captured(tmp_path: Path) -> None:
    sequences = tmp_path / "s.json"
    sequences.write_text(json.dumps([[1, 2, 3, 4]]))
    words = (sys.executable, PROGRAM, "score", str(sequences))
    done = attached(tmp_path / "c", "train", *words, options=of_class("nope", "Nope"))
    assert done.returncode == 3
    assert "never imported a module nope" in done.stderr
    assert (tmp_path / "c" / "manifest.json").exists()
    for wrong in ("nope", "a b:C", "__main__:Net"):
        done = attached(tmp_path / "d", "train", *words, options=("--model", wrong))
        assert (done.returncode, done.stdout) == (2, ""), "before the program is started"
        assert "MODULE:CLASS" in done.stderr


def test_patterns_that_fit_nothing_are_no_silent_capture(tmp_path: Path) -> None:
    sequences = tmp_path / "s.json"
    sequences.write_text(json.dumps([[1, 2, 3, 4]]))
    words = (sys.executable, PROGRAM, "score", str(sequences))
    nothing = attached(tmp_path / "c", "train", *words, options=("--sites", "zzz*"))
    assert nothing.returncode == 3
    assert "holds no site: no --sites pattern" in nothing.stderr
    no_layer = attached(tmp_path / "d", "train", *words, options=("--layers", "7-9"))
    assert no_layer.returncode == 3
    assert "holds no site of a layer" in no_layer.stderr
    some = attached(tmp_path / "e", "train", *words, options=("--sites", "*mlp*", "--layers", "0"))
    assert (some.returncode, "zkl-debug" in some.stderr) == (0, False)


def test_a_hidden_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    cli = [sys.executable, "-m", "zkl_debug.cli.main", "capture", "--side", "x", "--out", str(tmp_path / "o"), "--"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run(*cli, sys.executable, "-c", "print('program')", env={"PYTHONPATH": path})
    assert done.stdout.splitlines()[-2:] == ["mine", "program"]
