"""``bisect commits`` on repositories made here: one planted cause, unbuildable commits, ends that cannot be used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from zkl_debug.bisect.commit_step import CommitRun, git
from zkl_debug.bisect.commits import CommitOptions, CommitStatus, bisect_commits
from zkl_debug.bisect.outcome import Outcome
from zkl_debug.errors import UsageError

UNBUILDABLE = (5, 13, 20, 21, 27, 33)
PYTHON = sys.executable


@dataclass(frozen=True)
class Repository:
    path: Path
    commits: tuple[str, ...]

    def state(self) -> tuple[str, ...]:
        """Everything of the user's that must stay as it is."""
        status = git(self.path, "status", "--porcelain=v2", "--branch", "--ignored").stdout
        return (
            git(self.path, "rev-parse", "HEAD").stdout,
            git(self.path, "for-each-ref").stdout,
            git(self.path, "worktree", "list").stdout,
            status,
            *sorted(p.name for p in (self.path / ".git").iterdir() if p.name != "packed-refs"),
        )


def make_repository(path: Path, contents: list[str]) -> Repository:
    """One commit per content of ``kernel.py``."""
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    git(path, "config", "user.name", "t")
    git(path, "config", "user.email", "t@t")
    stream = []
    for number, content in enumerate(contents):
        text, subject = f"# {number}\n{content}\n", f"change {number}"
        stream.append(f"commit refs/heads/main\ncommitter t <t@t> {number} +0000\ndata {len(subject)}\n{subject}\n")
        stream.append(f"M 644 inline kernel.py\ndata {len(text)}\n{text}\n")
    argv = ["git", "-C", str(path), "fast-import", "--quiet"]
    subprocess.run(argv, input="".join(stream), text=True, check=True)
    git(path, "checkout", "-q", "-f", "main")
    return Repository(path, tuple(git(path, "rev-list", "--reverse", "main").stdout.split()))


def history(cause: int, unbuildable: tuple[int, ...] = UNBUILDABLE, n: int = 40) -> list[str]:
    return ["def broken(:" if i in unbuildable else f"ERROR = {int(i >= cause)}" for i in range(n)]


CHECK = "import sys; sys.path.insert(0, '.'); import kernel; raise SystemExit(kernel.ERROR)"
COMMAND = [PYTHON, "-S", "-c", CHECK]
BUILD = f"{PYTHON} -S -m py_compile kernel.py"


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return make_repository(tmp_path_factory.mktemp("repo") / "r", history(23))


@pytest.mark.parametrize("build", [BUILD, ""])
def test_forty_commits_six_unbuildable(forty: Repository, build: str) -> None:
    (forty.path / "notes.txt").write_text("the user's own\n")
    (forty.path / "kernel.py").write_text("edited\n")
    before = forty.state()
    seen: list[CommitRun] = []
    options = CommitOptions(build=build)
    result = bisect_commits(forty.path, forty.commits[0], "main", COMMAND, options=options, progress=seen.append)
    assert result.status is CommitStatus.FOUND
    assert result.exit_code == 0
    assert result.culprit is not None
    assert result.culprit.sha == forty.commits[23]
    assert result.culprit.subject == "change 23"
    assert result.span == 39
    assert tuple(seen) == result.runs
    assert [r.purpose for r in result.runs[:2]] == ["endpoints"] * 2
    assert [(r.commit, r.outcome) for r in result.runs[-2:]] == [
        (forty.commits[23], Outcome.MISMATCH),
        (forty.commits[22], Outcome.ZERO),
    ]
    assert len(result.runs) <= 14
    for run in result.untestable:
        assert forty.commits.index(run.commit) in UNBUILDABLE
        assert run.outcome is (Outcome.UNTESTABLE if build else Outcome.ERROR)
        assert "SyntaxError" in run.reason
    body = result.to_json()
    assert (body["format"], body["axis"], body["confirmed"]) == ("zkl-bisect", "commits", True)
    assert forty.state() == before
    assert (forty.path / "kernel.py").read_text() == "edited\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_causes_of_the_forty(tmp_path: Path) -> None:
    for cause in (1, 2, 5, 6, 7, 13, 14, 19, 20, 21, 22, 28, 32, 33, 34, 38, 39):
        repository = make_repository(tmp_path / f"r{cause}", history(cause))
        result = bisect_commits(repository.path, repository.commits[0], "main", COMMAND)
        if cause in UNBUILDABLE or cause - 1 in UNBUILDABLE:
            assert result.status is CommitStatus.RANGE
            assert repository.commits[cause] in {c.sha for c in result.candidates}
        else:
            assert result.culprit is not None
            assert result.culprit.sha == repository.commits[cause]


def test_only_skipped_commits_left_gives_the_range(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "r", history(5, unbuildable=(4, 5, 6), n=9))
    result = bisect_commits(repository.path, repository.commits[0], "main", COMMAND)
    assert result.status is CommitStatus.RANGE
    assert result.exit_code == 4
    assert [repository.commits.index(c.sha) for c in result.candidates] == [4, 5, 6, 7]
    assert result.culprit is None


@pytest.mark.parametrize(
    ("contents", "status", "text"),
    [
        (["ERROR = 1"] * 4, CommitStatus.ALWAYS_BAD, "the good end"),
        (["ERROR = 0"] * 4, CommitStatus.ALWAYS_GOOD, "may not test the work tree"),
        (["ERROR = 125", *["ERROR = 1"] * 3], CommitStatus.UNTESTABLE, "exit code 125"),
        (["ERROR = 0", *["import nothing_here"] * 3], CommitStatus.ERROR, "ModuleNotFoundError"),
    ],
)
def test_ends_that_cannot_be_used_are_refused(
    tmp_path: Path, contents: list[str], status: CommitStatus, text: str
) -> None:
    repository = make_repository(tmp_path / "r", contents)
    before = repository.state()
    result = bisect_commits(repository.path, repository.commits[0], "HEAD", COMMAND)
    assert result.status is status
    assert text in result.reason
    assert result.exit_code == 3
    assert len(result.runs) <= 2
    assert repository.state() == before


def test_usage_errors(forty: Repository, tmp_path: Path) -> None:
    first, last = forty.commits[0], forty.commits[-1]
    for good, bad, text in ((first, "nope", "not a commit"), (first, first, "same commit"), (last, first, "ancestor")):
        with pytest.raises(UsageError, match=text):
            bisect_commits(forty.path, good, bad, COMMAND)
    with pytest.raises(UsageError, match="not a git repository"):
        bisect_commits(tmp_path, first, last, COMMAND)
    before = forty.state()
    with pytest.raises(UsageError, match="not found"):
        bisect_commits(forty.path, first, last, ["no-such-command-here"])
    with pytest.raises(UsageError, match="not a commit"):
        bisect_commits(forty.path, "--help", last, COMMAND)
    assert forty.state() == before


def test_another_mismatch_is_slippage_not_the_answer(tmp_path: Path) -> None:
    """Commits 3..5 mismatch in the attention; the bad end mismatches in the router, since commit 8."""
    sites = ["attention" if 3 <= i <= 5 else "router" if i >= 8 else "" for i in range(12)]
    repository = make_repository(tmp_path / "r", [f"SITE = {s!r}" for s in sites])
    code = (
        "import sys, json; sys.path.insert(0, '.'); import kernel\n"
        "print(json.dumps({'format': 'zkl-verdict', 'version': 1, 'edge': 'score-prefill',\n"
        " 'verdict': 'diverged' if kernel.SITE else 'identical', 'first': {'site': kernel.SITE}}))\n"
    )
    result = bisect_commits(repository.path, repository.commits[0], "main", [PYTHON, "-S", "-c", code])
    assert result.culprit is not None
    assert result.culprit.sha == repository.commits[8]
    assert result.signature == "router @ score-prefill"
    assert {r.signature for r in result.slippage} <= {"attention @ score-prefill"}
    assert result.slippage


def test_a_culprit_that_does_not_repeat_is_not_confirmed(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "r", history(4, unbuildable=(), n=8))
    code = CHECK.replace("raise", "import os; kernel.ERROR *= os.environ['ZKL_PURPOSE'] != 'confirmation'; raise")
    result = bisect_commits(repository.path, repository.commits[0], "main", [PYTHON, "-S", "-c", code])
    assert result.status is CommitStatus.UNCONFIRMED
    assert result.exit_code == 4
    assert "when it was run again" in result.reason
    assert result.culprit is not None


def test_stop_on_error_and_merges(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "r", history(6, unbuildable=(4,), n=9))
    options = CommitOptions(stop_on_error=True)
    result = bisect_commits(repository.path, repository.commits[0], "main", COMMAND, options=options)
    assert result.status is CommitStatus.ERROR
    assert "SyntaxError" in result.reason
    path = repository.path
    git(path, "checkout", "-q", "-b", "side", repository.commits[2])
    (path / "other.txt").write_text("x")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "side")
    git(path, "checkout", "-q", "main")
    git(path, "merge", "-q", "--no-edit", "side")
    for first_parent in (False, True):
        options = CommitOptions(first_parent=first_parent)
        result = bisect_commits(path, repository.commits[0], "main", COMMAND, options=options)
        assert result.culprit is not None
        assert result.culprit.sha == repository.commits[6]


def test_interrupting_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGINT in the middle of a search: the work tree is removed and no process stays."""
    repository = make_repository(tmp_path / "r", history(6, unbuildable=(), n=20))
    pids = tmp_path / "pids"
    code = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); {CHECK}".replace(
        "raise", "time.sleep(30 * (os.environ['ZKL_PURPOSE'] == 'search')); raise"
    )
    driver = (
        "from pathlib import Path; from zkl_debug.bisect.commits import bisect_commits\n"
        f"bisect_commits(Path({str(repository.path)!r}), {repository.commits[0]!r}, 'main',\n"
        f" {[PYTHON, '-S', '-c', code]!r})"
    )
    before = repository.state()
    process = subprocess.Popen([PYTHON, "-c", driver], stderr=subprocess.DEVNULL, env=dict(os.environ))
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().splitlines()) >= 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:  # Python drops an interrupt that comes while a destructor runs: once more
        process.send_signal(signal.SIGINT)
        process.wait(15)
    assert repository.state() == before
    for pid in pids.read_text().split():
        assert not Path(f"/proc/{pid}").exists()
