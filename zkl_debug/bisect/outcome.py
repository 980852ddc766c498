"""Outcomes of runs, and the records that travel between the search, the journal and the oracles."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol

from zkl_debug.bisect.space import Config

#: Exit codes of a command besides 0 (zero) and 1 (mismatch).
EXIT_INCONCLUSIVE = 4
EXIT_UNTESTABLE = 125


class Cancelled(Exception):  # noqa: N818 - not an error of the run
    """The oracle was closed while the run was going on; its result is not wanted any more."""


class Outcome(StrEnum):
    """What one run says about a configuration. Never folded into each other."""

    ZERO = "zero"  # bitwise equal
    MISMATCH = "mismatch"  # not equal
    UNTESTABLE = "untestable"  # this configuration cannot be judged here
    ERROR = "error"  # the run itself failed: crash, timeout, out of memory, import error


class Purpose(StrEnum):
    """Why a run was made."""

    CALIBRATION = "calibration"
    ENDPOINTS = "endpoints"
    SEARCH = "search"
    MINIMALITY = "minimality"
    CONFIRMATION = "confirmation"
    NECESSITY = "necessity"
    WITNESS = "witness"


@dataclass(frozen=True)
class Observation:
    """The judged outcome of one run.

    Attributes:
        outcome: one of the four.
        signature: operator-level signature of a mismatch (first site and edge), or empty.
        reason: why a run is untestable or an error.
        retry: the run did not repeat itself; worth another attempt before it is called untestable.
    """

    outcome: Outcome
    signature: str = ""
    reason: str = ""
    retry: bool = False


@dataclass(frozen=True)
class Request:
    """One run the search asks for.

    Attributes:
        config: the switches that are on.
        repeat: index of the repeat of this configuration, 0 first.
        wide: whether the wider probe must be used.
        purpose: why (of the first phase that asked).
    """

    config: Config
    repeat: int = 0
    wide: bool = False
    purpose: Purpose = field(default=Purpose.SEARCH, compare=False)

    @property
    def key(self) -> RunKey:
        """What identifies the run in the search's memory."""
        return (self.config, self.wide, self.repeat)


RunKey = tuple[Config, bool, int]


@dataclass(frozen=True)
class Trial:
    """One execution of a request; ``attempt`` counts retries of a run that did not repeat itself."""

    request: Request
    attempt: int = 0


@dataclass(frozen=True)
class RawRun:
    """What a run left behind, before any criterion judged it. Stored in the journal as it is.

    Attributes:
        exit_code: exit code of the command, or None when it did not exit by itself or there was no command.
        signal: number of the signal that ended it, 0 for none.
        timed_out: whether the time limit ended it.
        out_of_memory: whether the memory cap ended it (or it said so itself).
        seconds: wall time.
        peak_bytes: highest resident size seen, 0 when unknown.
        document: the JSON object the run reported (a zkl-verdict, or any result document), or None.
        failure: what went wrong outside the judgement (command not found, Python exception ...), or empty.
        folder: where its output lies.
        outcome: set by oracles that judge for themselves; the other fields are then informative.
        signature: signature given by such an oracle.
        reason: reason given by such an oracle.
    """

    exit_code: int | None = None
    signal: int = 0
    timed_out: bool = False
    out_of_memory: bool = False
    seconds: float = 0.0
    peak_bytes: int = 0
    document: dict[str, Any] | None = None
    failure: str = ""
    folder: str = ""
    outcome: Outcome | None = None
    signature: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` restores the record."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> RawRun:
        """The record of a JSON object; unknown fields are ignored.

        Raises:
            ValueError: ``outcome`` is not an outcome.
        """
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in body.items() if k in known}
        if values.get("outcome") is not None:
            values["outcome"] = Outcome(values["outcome"])
        return cls(**values)


class Oracle(Protocol):
    """Runs configurations. Beds, commands and synthetic spaces all look like this to the search."""

    @property
    def probe_hash(self) -> str:
        """Identifies the workload and how it is judged bitwise; part of every journal key."""

    @property
    def environment_hash(self) -> str:
        """Identifies machine and software; part of every journal key."""

    def run(self, trial: Trial) -> RawRun:
        """Run one configuration; may be called from several threads at once.

        A failed run is a result, not an exception (whatever is raised is recorded as an error of the run).

        Raises:
            Cancelled: the oracle was closed meanwhile.
        """

    def close(self) -> None:
        """End whatever is still running."""
