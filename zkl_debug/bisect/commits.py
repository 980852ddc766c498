"""Which commit brought it: ``git bisect run`` in a work tree of its own, with both ends and the answer checked.

The user's work tree, index, HEAD and bisect state are never touched: everything happens in a temporary detached work
tree (git keeps bisect refs per work tree), which is removed at the end.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import zkl_debug
from zkl_debug.bisect.commit_step import (
    CommitRun,
    StepPlan,
    git,
    git_command,
    git_environment,
    plain_environment,
    test_commit,
)
from zkl_debug.bisect.noise import repeats_for
from zkl_debug.bisect.oracle import check_command
from zkl_debug.bisect.outcome import Outcome
from zkl_debug.bisect.result import RESULT_FORMAT, RESULT_VERSION
from zkl_debug.errors import ExitCode, UsageError, ZklError

_FIRST_RE = re.compile(r"^# first bad commit: \[([0-9a-f]{40,64})\]", re.MULTILINE)
_POSSIBLE_RE = re.compile(r"^# possible first bad commit: \[([0-9a-f]{40,64})\]", re.MULTILINE)

Progress = Callable[[CommitRun], None]


class CommitStatus(StrEnum):
    """How a bisection over commits ended."""

    FOUND = "found"
    RANGE = "range"  # only commits that cannot be tested are left
    ALWAYS_BAD = "always-bad"  # the good end mismatches
    ALWAYS_GOOD = "always-good"  # the bad end is zero
    UNTESTABLE = "untestable"  # an end cannot be judged
    ERROR = "error"  # an end, or git itself, failed
    UNCONFIRMED = "unconfirmed"  # the culprit or its parent came out differently when run again


@dataclass(frozen=True)
class Commit:
    """A commit that is named in the answer."""

    sha: str
    subject: str
    author: str = ""
    date: str = ""


@dataclass(frozen=True)
class CommitResult:
    """The answer of a bisection over commits.

    Attributes:
        culprit: the first commit that mismatches; None unless found (or found but unconfirmed).
        candidates: commits among which it is, oldest first; more than one for a range.
        runs: every tested commit in order.
        span: number of commits between the ends.
    """

    status: CommitStatus
    good: Commit
    bad: Commit
    culprit: Commit | None = None
    candidates: tuple[Commit, ...] = ()
    runs: tuple[CommitRun, ...] = ()
    span: int = 0
    signature: str = ""
    reason: str = ""

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the command that prints this result."""
        if self.status is CommitStatus.FOUND:
            return ExitCode.OK
        unsure = (CommitStatus.RANGE, CommitStatus.UNCONFIRMED)
        return ExitCode.INCONCLUSIVE if self.status in unsure else ExitCode.REFUSED

    @property
    def slippage(self) -> tuple[CommitRun, ...]:
        """Commits that mismatch in another way than the bad end."""
        return tuple(r for r in self.runs if r.slipped)

    @property
    def untestable(self) -> tuple[CommitRun, ...]:
        """Commits that could not be judged."""
        return tuple(r for r in self.runs if r.outcome in (Outcome.UNTESTABLE, Outcome.ERROR))

    def to_json(self) -> dict[str, Any]:
        """The document ``bisect commits --json`` prints."""
        purposes = [r.purpose for r in self.runs]
        return {
            "format": RESULT_FORMAT,
            "version": RESULT_VERSION,
            "axis": "commits",
            "status": self.status.value,
            "culprit": _commit_json(self.culprit) if self.culprit else None,
            "candidates": [_commit_json(c) for c in self.candidates],
            "confirmed": self.status is CommitStatus.FOUND,
            "good": _commit_json(self.good),
            "bad": _commit_json(self.bad),
            "span": self.span,
            "signature": self.signature,
            "slippage": [r.to_json() for r in self.slippage],
            "skipped": [r.to_json() for r in self.untestable],
            "tested": [r.to_json() for r in self.runs],
            "runs": {**{p: purposes.count(p) for p in dict.fromkeys(purposes)}, "total": len(purposes)},
            "reason": self.reason,
        }


def _commit_json(commit: Commit) -> dict[str, str]:
    return {"sha": commit.sha, "subject": commit.subject, "author": commit.author, "date": commit.date}


@dataclass(frozen=True)
class CommitOptions:
    """How commits are tested; see :class:`~zkl_debug.bisect.commit_step.StepPlan`."""

    build: str = ""
    criterion: str = "auto"
    timeout: float | None = None
    memory: int | None = None
    visibility: float = 1.0
    first_parent: bool = False
    keep_files: bool = False
    stop_on_error: bool = False


def bisect_commits(
    repo: Path,
    good: str,
    bad: str,
    command: Sequence[str],
    *,
    options: CommitOptions | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> CommitResult:
    """Find the first commit that mismatches.

    Args:
        repo: a folder of the repository.
        good: revision known zero, an ancestor of ``bad``.
        bad: revision known to mismatch.
        command: judges a commit, run in the work tree; see DESIGN 8 for its exit codes.
        options: how commits are tested.
        out: folder for the outputs of the runs, default a temporary one that is removed.
        progress: called after every run.

    Raises:
        UsageError: not a repository, unknown revisions, ``good`` no ancestor of ``bad``, or no such command.
        ZklError: git failed.
    """
    how = options or CommitOptions()
    top = _repository(repo)
    ends = _resolve(top, good), _resolve(top, bad)
    span = _span(top, *ends)
    with tempfile.TemporaryDirectory(prefix="zkl-bisect-commits-") as scratch:
        tree = Path(scratch).resolve() / "tree"
        plan = StepPlan(
            command=tuple(command),
            build=how.build,
            worktree=str(tree),
            out=str(out.resolve() if out is not None else Path(scratch) / "runs"),
            records=str(Path(scratch) / "records.jsonl"),
            criterion=how.criterion,
            timeout=how.timeout,
            memory=how.memory,
            repeats=repeats_for(how.visibility, 0.01, math.ceil(math.log2(span + 1)) + 4),
            keep_files=how.keep_files,
            stop_on_error=how.stop_on_error,
        )
        try:
            git(top, "worktree", "add", "-f", "--detach", str(tree), ends[1])
            check_command(plan.command, tree, plain_environment())
            return _Bisection(top, plan, how, progress).run(*ends, span)
        finally:
            git(top, "worktree", "remove", "--force", "--force", str(tree), check=False)
            shutil.rmtree(tree, ignore_errors=True)
            git(top, "worktree", "prune", check=False)


class _Bisection:
    """The steps of one bisection inside its work tree."""

    def __init__(self, repo: Path, plan: StepPlan, options: CommitOptions, progress: Progress | None) -> None:
        self.repo = repo
        self.plan = plan
        self.options = options
        self.progress = progress
        self.runs: list[CommitRun] = []

    def run(self, good: str, bad: str, span: int) -> CommitResult:
        """Both ends, the search, the confirmation."""
        base = CommitResult(CommitStatus.ERROR, _describe(self.repo, good), _describe(self.repo, bad), span=span)
        first = self.test(good, "endpoints")
        refusal = _wrong_end(first, Outcome.ZERO, CommitStatus.ALWAYS_BAD, "the good end")
        if refusal is None:
            last = self.test(bad, "endpoints")
            refusal = _wrong_end(last, Outcome.MISMATCH, CommitStatus.ALWAYS_GOOD, "the bad end")
        if refusal is not None:
            return replace(base, status=refusal[0], reason=refusal[1], runs=tuple(self.runs))
        self.plan = replace(self.plan, target=last.signature)
        base = replace(base, signature=last.signature)
        log, trouble = self.search(good, bad)
        found = _FIRST_RE.search(log)
        if found is None:
            possible = tuple(_describe(self.repo, s) for s in _oldest_first(self.repo, _POSSIBLE_RE.findall(log)))
            status = CommitStatus.RANGE if possible else CommitStatus.ERROR
            reason = "the commits between could not be tested" if possible else f"git bisect stopped: {trouble}"
            return replace(base, status=status, candidates=possible, reason=reason, runs=tuple(self.runs))
        culprit = _describe(self.repo, found.group(1))
        doubt = self.confirm(culprit.sha)
        status = CommitStatus.UNCONFIRMED if doubt else CommitStatus.FOUND
        runs = tuple(self.runs)
        return replace(base, status=status, culprit=culprit, candidates=(culprit,), reason=doubt, runs=runs)

    def test(self, commit: str, purpose: str) -> CommitRun:
        """Check a commit out and test it."""
        git(self.plan.worktree, "checkout", "-q", "-f", "--detach", commit)
        run = test_commit(self.plan, purpose)
        self.runs.append(run)
        if self.progress is not None:
            self.progress(run)
        return run

    def search(self, good: str, bad: str) -> tuple[str, str]:
        """``git bisect run``; returns git's log and what it complained about."""
        tree = self.plan.worktree
        flags = ["--first-parent"] if self.options.first_parent else []
        git(tree, "bisect", "start", *flags, bad, good)
        complaint = self.git_bisect_run(_step_script(self.plan))
        said = git(tree, "bisect", "log", check=False).stdout
        git(tree, "bisect", "reset", "HEAD", check=False)
        last = self.runs[-1]
        return said, last.reason if last.outcome is Outcome.ERROR and self.plan.stop_on_error else complaint

    def git_bisect_run(self, script: Path) -> str:
        """Run git over the step script, following its records; returns what git wrote to stderr."""
        complaints = Path(self.plan.records).parent / "git-stderr.txt"
        argv = [*git_command(self.plan.worktree), "bisect", "run", str(script)]
        with complaints.open("wb") as err:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=git_environment(),
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    self.follow()
                    time.sleep(0.05)
            finally:
                _end_group(process)
        self.follow()
        return complaints.read_text(errors="replace").strip()[-500:]

    def follow(self) -> None:
        """Take in the runs the step processes recorded meanwhile."""
        lines = Path(self.plan.records).read_text().splitlines(keepends=True)
        for line in lines[len(self.runs) :]:
            if line.endswith("\n"):
                self.runs.append(CommitRun.from_json(json.loads(line)))
                if self.progress is not None:
                    self.progress(self.runs[-1])

    def confirm(self, culprit: str) -> str:
        """Run the culprit and its parents again; returns what came out differently, or ""."""
        again = self.test(culprit, "confirmation")
        if again.outcome is not Outcome.MISMATCH or again.slipped:
            seen = f"another mismatch ({again.signature})" if again.slipped else again.outcome.value
            return f"the culprit gave {seen} when it was run again"
        parents = git(self.repo, "rev-list", "--parents", "-n", "1", culprit).stdout.split()[1:]
        for parent in parents[:1] if self.options.first_parent else parents:
            before = self.test(parent, "confirmation")
            if before.outcome is not Outcome.ZERO:
                return f"its parent {parent[:12]} gave {before.outcome.value} when it was run again"
        return ""


def _step_script(plan: StepPlan) -> Path:
    """The script ``git bisect run`` calls; it imports this package, never the one in the work tree."""
    scratch = Path(plan.records).parent
    (scratch / "plan.json").write_text(plan.to_json())
    root = str(Path(zkl_debug.__file__).resolve().parents[1])
    lines = [
        f"import sys; sys.path.insert(0, {root!r})",
        "from zkl_debug.bisect.commit_step import main",
        f"main({str(scratch / 'plan.json')!r})",
    ]
    script = scratch / "step"
    script.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -c {shlex.quote('; '.join(lines))}\n")
    script.chmod(0o755)
    return script


def _end_group(process: subprocess.Popen[bytes], grace: float = 10.0) -> None:
    """End git and its step process when the bisection is interrupted; the step ends what it runs."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
            return


def _wrong_end(run: CommitRun, wanted: Outcome, status: CommitStatus, what: str) -> tuple[CommitStatus, str] | None:
    """Why an end cannot be used, or None when it came out as it must."""
    if run.outcome is wanted:
        return None
    if run.outcome in (Outcome.ZERO, Outcome.MISMATCH):
        hint = "the command may not test the work tree it runs in" if wanted is Outcome.MISMATCH else "go further back"
        return status, f"{what} {run.commit[:12]} gives {run.outcome.value}; {hint}"
    failed = CommitStatus.ERROR if run.outcome is Outcome.ERROR else CommitStatus.UNTESTABLE
    return failed, f"{what} {run.commit[:12]} gives {run.outcome.value}: {run.reason}"


def _repository(repo: Path) -> Path:
    if shutil.which("git") is None:
        raise UsageError("git is not installed", "git on PATH")
    done = git(repo, "rev-parse", "--git-common-dir", check=False)
    if done.returncode != 0:
        raise UsageError(f"{repo} is not a git repository", "--repo DIR inside one")
    return repo.resolve()


def _resolve(repo: Path, revision: str) -> str:
    done = git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", check=False)
    if done.returncode != 0:
        raise UsageError(f"{revision!r} is not a commit of {repo}", "a commit, tag or branch")
    return done.stdout.split()[-1]


def _span(repo: Path, good: str, bad: str) -> int:
    if good == bad:
        raise UsageError("the good and the bad end are the same commit", "two commits")
    if git(repo, "merge-base", "--is-ancestor", good, bad, check=False).returncode != 0:
        raise UsageError(
            f"the good end {good[:12]} is not an ancestor of the bad end {bad[:12]}",
            "a good end that the bad end descends from",
            f"git -C {repo} merge-base {good[:12]} {bad[:12]}",
        )
    return int(git(repo, "rev-list", "--count", f"{good}..{bad}").stdout)


def _describe(repo: Path, sha: str) -> Commit:
    text = git(repo, "show", "-s", "--format=%H%x00%s%x00%an%x00%aI", sha, "--").stdout.rstrip("\n")
    with suppress(ValueError):
        full, subject, author, date = text.split("\0")
        return Commit(full, subject, author, date)
    raise ZklError(f"git describes {sha} in an unknown way: {text!r}")


def _oldest_first(repo: Path, shas: Sequence[str]) -> list[str]:
    if not shas:
        return []
    return git(repo, "rev-list", "--no-walk", "--topo-order", "--reverse", *dict.fromkeys(shas)).stdout.split()
