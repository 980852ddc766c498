"""``zkl-debug bisect`` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from zkl_debug.bisect.commit_step import git
from zkl_debug.cli.main import main

SPACE = """
switches:
  - base
  - {name: te, alternatives: [math]}
  - {name: hopper_only, untestable: needs SM90}
  - useless
  - math
  - {name: top, requires: [base]}
"""
PROBE = """
[ "$ZKL_SWITCH_TOP" = 1 ] && { [ "$ZKL_SWITCH_TE" = 1 ] || [ "$ZKL_SWITCH_MATH" = 1 ]; } && exit 0
[ "$ZKL_SWITCH_TOP" = 1 ] && echo '{"signature": "router", "metrics": {"kl": 0.5}}' && exit 1
echo '{"signature": "attention", "metrics": {"kl": 2}}'
exit 1
"""


def zkl(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(w) for w in words])
    return int(stop.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "probe.sh").write_text(PROBE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def document(text: str) -> dict[str, Any]:
    body = json.loads(text)
    assert isinstance(body, dict)
    return body


def test_switches_text_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bisect", "switches", "--space", "space.yaml", "--journal", "j.jsonl", "--jobs", "2")
    assert zkl(*words, "--", "sh", "probe.sh") == 0
    text = capsys.readouterr()
    assert "found and confirmed: 3 of 6 switches are enough" in text.out
    assert "needs SM90" in text.out
    assert "te or math: either makes it zero" in text.out
    assert "router" in text.out
    assert "required by top" in " ".join(text.out.split())
    assert "endpoints" in text.err
    runs = len(list((folder / "j.jsonl.runs").iterdir()))
    assert zkl(*words, "--json", "--", "sh", "probe.sh") == 0
    text = capsys.readouterr()
    body = document(text.out)
    assert (body["format"], body["version"], body["axis"], body["status"]) == ("zkl-bisect", 1, "switches", "found")
    assert body["minimal"] == ["base", "te", "top"]
    roles = {s["name"]: s["role"] for s in body["switches"]}
    assert roles == {
        "base": "core",
        "te": "replaceable",
        "hopper_only": "untested",
        "useless": "removable",
        "math": "replaceable",
        "top": "core",
    }
    assert body["runs"]["total"] == sum(v for k, v in body["runs"].items() if k != "total")
    assert len(list((folder / "j.jsonl.runs").iterdir())) == runs
    assert "journal" in text.err


def test_rejudge_and_refusals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bisect", "switches", "--space", "space.yaml", "--journal", "j.jsonl")
    assert zkl(*words, "--", "sh", "probe.sh") == 0
    capsys.readouterr()
    assert zkl(*words, "--rejudge", "exit") == 0
    assert "found and confirmed" in capsys.readouterr().out
    assert zkl(*words, "--rejudge", "metrics.kl > 9", "--json") == 3
    body = document(capsys.readouterr().out)
    assert body["status"] == "stack-insufficient"
    assert "not tested: hopper_only, top" in body["reason"]
    assert (folder / "j.jsonl").exists()
    assert zkl(*words, "--", "sh", "-c", "exit 0") == 3
    assert "belongs to another probe" in capsys.readouterr().err
    assert zkl("bisect", "switches", "--space", "space.yaml", "--", "sh", "-c", "exit 0") == 3
    assert "nothing to explain" in capsys.readouterr().out
    assert zkl("bisect", "switches", "--space", "space.yaml", "--max-runs", "3", "--", "sh", "probe.sh") == 5
    assert "next: needs a run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--space", "missing.yaml", "--", "true"), "cannot read the space file"),
        (("--space", "bad.yaml", "--", "true"), "did you mean 'switches'?"),
        (("--space", "space.yaml"), "no command to run"),
        (("--space", "space.yaml", "--", "no-such-command-here"), "not found"),
        (("--space", "space.yaml", "--rejudge", "exit"), "no journal to judge"),
        (("--space", "space.yaml", "--criterion", "nonsense", "--", "true"), "cannot be read"),
        (("--space", "space.yaml", "--visibility", "0", "--", "true"), "visibility"),
        (("--", "true"), "--space"),
    ],
)
def test_usage_errors(folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    (folder / "bad.yaml").write_text("switchs: [a]\n")
    assert zkl("bisect", "switches", *words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_commits_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = folder / "repo"
    repo.mkdir()
    git(repo, "init", "-q", "-b", "main")
    for number in range(6):
        (repo / "value").write_text(str(int(number >= 4)) + f"\n{number}\n")
        git(repo, "add", "-A")
        git(repo, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", f"change [{number}]")
    words = ("bisect", "commits", "--repo", repo, "--good", "main~5", "--bad", "main")
    command = ("--", "sh", "-c", "exit $(head -n1 value)")
    assert zkl(*words, *command) == 0
    captured = capsys.readouterr()
    assert "change [4]" in captured.out
    assert "confirmation" in captured.err
    assert zkl(*words, "--json", *command) == 0
    body = document(capsys.readouterr().out)
    assert body["culprit"]["subject"] == "change [4]"
    assert body["confirmed"] is True
    assert zkl(*words, "--", "true") == 3
    assert "the bad end is zero" in capsys.readouterr().out
    assert zkl(*words, "--", "false") == 3
    assert "the good end mismatches" in capsys.readouterr().out
    assert zkl("bisect", "commits", "--repo", repo, "--good", "nope", "--bad", "main", "--", "true") == 2


def test_sigterm_ends_what_runs(folder: Path) -> None:
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    words = ["bisect", "switches", "--space", "space.yaml", "--", sys.executable, "-S", "-c", code]
    argv = [sys.executable, "-m", "zkl_debug.cli.main", *words]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=dict(os.environ))
    deadline = time.monotonic() + 60
    pid = folder / "pid"
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    assert not Path(f"/proc/{pid.read_text()}").exists()
