"""Errors a user can act on, and the exit codes every command shares."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, the same for every command."""

    OK = 0  # identical, found and confirmed, or valid
    DIVERGED = 1  # diverged or invalid
    USAGE = 2  # the command line or an input file cannot be used
    REFUSED = 3  # not comparable, incomplete or unreadable
    INCONCLUSIVE = 4  # a side does not repeat itself
    BUDGET = 5  # a budget was reached or a capture is incomplete: the result is partial


class ZklError(Exception):
    """A failure that is explained to the user instead of shown as a traceback.

    Args:
        found: what was seen.
        expected: what would have been right, or an empty string where nothing else is possible.
        next_step: the command or action to try next, or an empty string.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, found: str, expected: str = "", next_step: str = "") -> None:
        self.found = found
        self.expected = expected
        self.next_step = next_step
        lines = [found]
        if expected:
            lines.append(f"expected: {expected}")
        if next_step:
            lines.append(f"next: {next_step}")
        super().__init__("\n".join(lines))


class UsageError(ZklError):
    """The request itself cannot be carried out as written."""

    exit_code = ExitCode.USAGE


class Refused(ZklError):  # noqa: N818 - a refusal is a verdict as much as an error
    """The inputs must not be compared or cannot be trusted."""

    exit_code = ExitCode.REFUSED


class CaptureInvalid(Refused):
    """A capture folder is incomplete, damaged or not a capture."""


class ProbeError(ZklError):
    """The probe itself failed (raised only in strict mode)."""

    exit_code = ExitCode.REFUSED


class Ended(SystemExit):
    """A signal asked this process to end: unwinds, so that what runs is ended and cleaned up.

    Args:
        number: of the signal; the exit status is 128 more, as a shell gives it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name
