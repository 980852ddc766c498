"""One commit, tested: what ``git bisect run`` calls, and what runs the endpoints and the confirmation.

Exit codes for git: 0 zero, 1 mismatch, 125 cannot be tested (skip), 128 stop the bisection.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zkl_debug.bisect.criterion import judge, parse_criterion
from zkl_debug.bisect.oracle import run_command
from zkl_debug.bisect.outcome import Observation, Outcome
from zkl_debug.bisect.process import Limits
from zkl_debug.errors import ZklError

GIT_ZERO, GIT_MISMATCH, GIT_SKIP, GIT_STOP = 0, 1, 125, 128
#: Variables by which git tells a program which repository it is in; a tested command must not see them.
_GIT_LOCAL = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"),
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CONFIG", "GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT", "GIT_NAMESPACE"),
    *("GIT_GRAFT_FILE", "GIT_NO_REPLACE_OBJECTS", "GIT_REPLACE_REF_BASE", "GIT_SHALLOW_FILE"),
)


@dataclass(frozen=True)
class StepPlan:
    """How a commit is tested; travels to the step process as JSON.

    Attributes:
        command: what judges the commit, run in the work tree.
        build: shell command run before it; when it fails, the commit cannot be tested. Empty for none.
        worktree: the work tree.
        out: folder under which every run gets a folder of its own.
        records: file of one JSON line per tested commit.
        criterion: how runs are judged.
        timeout: seconds for build and command each, or None.
        memory: memory cap in bytes, or None.
        repeats: passes a commit needs to count as zero.
        attempts: tries of a run that does not repeat itself.
        keep_files: do not remove untracked files between commits.
        stop_on_error: an error of the run stops the bisection instead of skipping the commit.
        target: signature of the mismatch under bisection; another one is skipped. Empty until it is known.
    """

    command: tuple[str, ...]
    worktree: str
    out: str
    records: str
    build: str = ""
    criterion: str = "auto"
    timeout: float | None = None
    memory: int | None = None
    repeats: int = 1
    attempts: int = 2
    keep_files: bool = False
    stop_on_error: bool = False
    target: str = ""

    def to_json(self) -> str:
        """The plan as one JSON document."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        """The plan of :meth:`to_json`."""
        body = json.loads(text)
        return cls(**{**body, "command": tuple(body["command"])})


@dataclass(frozen=True)
class CommitRun:
    """What testing one commit gave."""

    commit: str
    outcome: Outcome
    purpose: str
    signature: str = ""
    reason: str = ""
    slipped: bool = False
    seconds: float = 0.0
    folder: str = ""

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> CommitRun:
        """The record of :meth:`to_json`."""
        return cls(**{**body, "outcome": Outcome(body["outcome"])})


def plain_environment() -> dict[str, str]:
    """This process's environment without git's own variables."""
    skip = ("GIT_CONFIG_KEY_", "GIT_CONFIG_VALUE_")
    return {k: v for k, v in os.environ.items() if k not in _GIT_LOCAL and not k.startswith(skip)}


def git_command(where: str | Path) -> list[str]:
    """The beginning of a git command in a folder: without the user's hooks."""
    return ["git", "-C", str(where), "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false"]


def git_environment() -> dict[str, str]:
    """Environment for git itself."""
    return {**plain_environment(), "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}


def git(where: str | Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git in a folder, without hooks.

    Raises:
        ZklError: it failed and ``check`` is set.
    """
    argv = [*git_command(where), *words]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", env=git_environment(), check=False)
    if check and done.returncode != 0:
        raise ZklError(f"git {' '.join(words[:3])} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done


def test_commit(plan: StepPlan, purpose: str) -> CommitRun:
    """Test the commit that is checked out in the work tree, and record it."""
    commit = git(plan.worktree, "rev-parse", "HEAD").stdout.strip()
    if not plan.keep_files:
        git(plan.worktree, "clean", "-ffdxq")
    env = {**plain_environment(), "ZKL_COMMIT": commit, "ZKL_PURPOSE": purpose}
    run = CommitRun(commit, Outcome.ZERO, purpose)
    if plan.build:
        build, folder, seconds = _once(plan, ("sh", "-c", plan.build), env, "exit")
        run = replace(run, seconds=seconds, folder=folder)
        if build.outcome is not Outcome.ZERO:
            reason = build.reason or f"exit code {1 if build.outcome is Outcome.MISMATCH else 'unknown'}"
            run = replace(run, outcome=Outcome.UNTESTABLE, reason=f"the build fails: {reason}")
    if run.outcome is Outcome.ZERO:
        run = _judged(plan, run, env)
    with Path(plan.records).open("a") as file:
        file.write(json.dumps(run.to_json()) + "\n")
    return run


test_commit.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest thinks of its name


def _judged(plan: StepPlan, run: CommitRun, env: Mapping[str, str]) -> CommitRun:
    """``run`` with the outcome of the command: zero only when every repeat passes."""
    for repeat in range(plan.repeats):
        for attempt in range(plan.attempts):
            states = {**env, "ZKL_REPEAT": str(repeat), "ZKL_ATTEMPT": str(attempt)}
            seen, folder, seconds = _once(plan, plan.command, states, plan.criterion)
            run = replace(run, seconds=run.seconds + seconds, folder=folder)
            if not seen.retry:
                break
        if seen.outcome is not Outcome.ZERO:
            slipped = bool(plan.target and seen.signature and seen.signature != plan.target)
            return replace(run, outcome=seen.outcome, signature=seen.signature, reason=seen.reason, slipped=slipped)
    return run


def _once(
    plan: StepPlan, command: tuple[str, ...], env: Mapping[str, str], criterion: str
) -> tuple[Observation, str, float]:
    folder = _new_folder(Path(plan.out))
    limits = Limits(plan.timeout, plan.memory)
    raw = run_command(command, env, Path(plan.worktree), folder, limits)
    return judge(raw, parse_criterion(criterion)), str(folder), raw.seconds


def _new_folder(out: Path) -> Path:
    number = 1
    while True:
        folder = out / f"run{number:04d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder.resolve()


def git_code(plan: StepPlan, run: CommitRun) -> int:
    """What to tell ``git bisect run``."""
    if run.outcome is Outcome.ZERO:
        return GIT_ZERO
    if run.outcome is Outcome.MISMATCH:
        return GIT_SKIP if run.slipped else GIT_MISMATCH
    return GIT_STOP if run.outcome is Outcome.ERROR and plan.stop_on_error else GIT_SKIP


def main(path: str) -> None:
    """Entry point of the step process: test the checked-out commit and exit for git."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(GIT_STOP))  # unwinds, so that what runs is ended
    try:
        plan = StepPlan.from_json(Path(path).read_text())
        code = git_code(plan, test_commit(plan, "search"))
    except Exception as error:
        sys.stderr.write(f"zkl-debug: {type(error).__name__}: {error}\n")
        code = GIT_STOP
    sys.exit(code)
