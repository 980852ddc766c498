"""``ZKL_DEBUG=config.yaml`` without the command; workers of Ray; what a file of settings may say."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from zkl_debug.attach import ray_tasks
from zkl_debug.attach.settings import STARTUP, Settings, from_file, from_mapping
from zkl_debug.cli import main as cli
from zkl_debug.diff import diff_captures
from zkl_debug.schema import Phase
from zkl_debug.store.reader import open_capture

PROGRAMS = Path(__file__).parent / "programs"
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the hf extra")

CONFIG = """
out: {out}
side: train
level: payload
sites: ["*mlp*", "inputs/*"]
layers: 0-1
budget: 1GiB
steps: 2
"""


def test_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG.format(out="x"))
    settings = from_file(tmp_path / "c.yaml")
    assert settings == Settings("x", "train", "payload", ("*mlp*", "inputs/*"), (0, 1), 1 << 30, 2)
    assert from_mapping(json.loads(json.dumps(vars(settings)))) == settings
    (tmp_path / "c.json").write_text(json.dumps({"out": "x", "side": "gen", "layers": 3, "sites": "a*"}))
    assert from_file(tmp_path / "c.json") == Settings("x", "gen", layers=(3, 3), sites=("a*",))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("out: x", "no side"),
        ("out: x\nside: a\nstep: 3", "no setting step"),
        ("out: x\nside: a\nlevel: bytes", "level"),
        ("out: x\nside: a\nbudget: much", "budget"),
        ("out: x\nside: a\nlayers: 3-a", "layers"),
        ("out: x\nside: a\nsteps: -1", "steps"),
        ("out: x\nside: a\nstrict: 3", "strict"),
        ("out: [", "not YAML"),
        ("- out", "not a mapping"),
        ("out: !!python/object/apply:os.system ['touch ran']\nside: a", "not YAML"),
    ],
)
def test_settings_that_cannot_be_used(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=why):
        from_file(tmp_path / "c.yaml")
    with pytest.raises(SystemExit) as stop:
        cli.main(["env", str(tmp_path / "c.yaml")])
    assert stop.value.code == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@needs_transformers
def test_the_variables_do_what_the_command_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.yaml").write_text(CONFIG.format(out=tmp_path / "train"))
    with pytest.raises(SystemExit):
        cli.main(["env", str(tmp_path / "train.yaml")])
    lines = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["PYTHONPATH"].startswith(str(STARTUP))
    (tmp_path / "s.json").write_text(json.dumps([[1, 2, 3, 4], [5, 6, 7]]))
    words = [sys.executable, str(PROGRAMS / "hf_tiny.py"), "score", str(tmp_path / "s.json"), "--train", "3"]
    done = subprocess.run(words, env=os.environ | lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the program's own words\n"
    with open_capture(tmp_path / "train") as capture:
        assert list(capture.frames["step"]) == [0, 0, 1], "bounded by steps"
        assert {site.meta.layer for site in capture.sites.values()} <= {-1, 0, 1}
        assert all("mlp" in name or name.startswith("inputs/") for name in capture.sites)
        assert any(site.payload_rows for site in capture.sites.values())


@needs_transformers
def test_a_file_that_is_not_there_does_not_stop_the_program(tmp_path: Path) -> None:
    variables = {
        "ZKL_DEBUG": str(tmp_path / "none.yaml"),
        "PYTHONPATH": f"{STARTUP}:{os.environ.get('PYTHONPATH', '')}",
    }
    words = [sys.executable, "-c", "print('own')"]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "own\n")
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


# Ray ------------------------------------------------------------------------------------------------------------------


class Info(NamedTuple):
    """As Ray's, by the fields that are used."""

    function: Any
    max_calls: int


class Rests:
    """Counts the rests of a program."""

    def __init__(self) -> None:
        self.count = 0

    def rest(self) -> None:
        self.count += 1


def fake_ray() -> Any:
    """A module with the seams of Ray's that are used."""

    class FunctionActorManager:
        def _make_actor_method_executor(self, method_name: str, method: Any) -> Any:
            def executor(actor: Any, *args: Any) -> Any:
                return method(actor, *args)

            executor.name = method_name  # type: ignore[attr-defined]
            executor.method = method  # type: ignore[attr-defined]
            return executor

        def get_execution_info(self, function: Any) -> Any:
            return Info(function, 0)

    module = ModuleType("function_manager")
    module.FunctionActorManager = FunctionActorManager  # type: ignore[attr-defined]
    return module


def test_captures_rest_after_every_piece_of_work() -> None:
    module, program = fake_ray(), Rests()
    ray_tasks.watch(module, program)
    manager = module.FunctionActorManager()

    def method(_: Any, value: int) -> int:
        return 10 // value

    async def later(_: Any, value: int) -> int:
        return value + 1

    run = manager._make_actor_method_executor("method", method)
    assert (run(None, 5), program.count) == (2, 1)
    assert (run.name, run.method) == ("method", method)
    with pytest.raises(ZeroDivisionError):
        run(None, 0)
    assert program.count == 2
    wait = manager._make_actor_method_executor("later", later)
    assert asyncio.run(wait(None, 1)) == 2
    assert program.count == 3
    task = manager.get_execution_info(lambda value: value * 2)
    assert (task.function(4), program.count, task.max_calls) == (8, 4, 0)


@needs_transformers
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the ray extra")
def test_models_in_ray_actors_are_captured(tmp_path: Path) -> None:
    cli_words = [sys.executable, "-m", "zkl_debug.cli.main", "capture", "--side", "ray", "--out", str(tmp_path / "c")]
    words = [sys.executable, str(PROGRAMS / "ray_hf.py")]
    plain = subprocess.run([*words, str(tmp_path / "plain.json")], capture_output=True, text=True, timeout=300)
    seen = subprocess.run(
        [*cli_words, "--", *words, str(tmp_path / "seen.json")], capture_output=True, text=True, timeout=300
    )
    assert (seen.returncode, seen.stdout) == (plain.returncode, plain.stdout) == (0, "done\n"), seen.stderr
    assert (tmp_path / "plain.json").read_text() == (tmp_path / "seen.json").read_text()
    with open_capture(tmp_path / "c") as gen, open_capture(tmp_path / "c.process2") as train:
        assert list(gen.frames["phase"]) == [Phase.PREFILL, *[Phase.DECODE] * 4]
        assert list(train.frames["phase"]) == [Phase.SCORE]
    assert diff_captures(tmp_path / "c.process2", tmp_path / "c").coverage.compared == 16
