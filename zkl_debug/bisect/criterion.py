"""From what a run left behind to one of the four outcomes. Pure: the same raw result can be judged again."""

from __future__ import annotations

import math
import operator
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zkl_debug.bisect.outcome import EXIT_INCONCLUSIVE, EXIT_UNTESTABLE, Observation, Outcome, RawRun
from zkl_debug.errors import ExitCode, UsageError

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_RULE_RE = re.compile(r"^\s*([A-Za-z_][\w.\-]*)\s*(==|!=|<=|>=|<|>)\s*(\S+)\s*$")


@dataclass(frozen=True)
class Criterion:
    """How runs are judged.

    Attributes:
        text: as the user wrote it: ``auto`` (the document when there is one, else the exit code), ``exit``,
            ``verdict`` (a zkl-verdict is required), or a rule such as ``metrics.gen_kl_error <= 1e-6`` over the
            document the run reported: true is zero, false is a mismatch.
        rule: path, comparison and number of a rule.
    """

    text: str = "auto"
    rule: tuple[str, str, float] | None = None


AUTO = Criterion()


def parse_criterion(text: str) -> Criterion:
    """Read a criterion.

    Raises:
        UsageError: it is neither a known word nor a rule.
    """
    if text in ("auto", "exit", "verdict"):
        return Criterion(text)
    match = _RULE_RE.match(text)
    expected = "auto, exit, verdict, or a rule such as 'metrics.gen_kl_error <= 1e-6'"
    if match is None:
        raise UsageError(f"criterion {text!r} cannot be read", expected)
    try:
        limit = float(match.group(3))
    except ValueError as error:
        raise UsageError(f"criterion {text!r}: {match.group(3)!r} is not a number", expected) from error
    if math.isnan(limit):
        raise UsageError(f"criterion {text!r} compares with nan", expected)
    return Criterion(text, (match.group(1), match.group(2), limit))


def judge(raw: RawRun, criterion: Criterion = AUTO) -> Observation:
    """The outcome of a run. What broke the run is an error whatever the criterion."""
    broken = _broken(raw)
    if broken is not None:
        return broken
    if criterion.rule is not None:
        return _by_rule(raw, *criterion.rule)
    if criterion.text == "auto" and raw.outcome is not None:
        return Observation(raw.outcome, raw.signature, raw.reason)
    if raw.exit_code == EXIT_UNTESTABLE:
        return Observation(Outcome.UNTESTABLE, reason=_code(raw))
    if criterion.text != "exit" and _is_verdict(raw.document):
        return _by_verdict(raw)
    if criterion.text == "verdict":
        return Observation(Outcome.UNTESTABLE, reason="the run reported no zkl-verdict")
    return _by_exit_code(raw)


def _broken(raw: RawRun) -> Observation | None:
    if raw.timed_out:
        return Observation(Outcome.ERROR, reason=f"timed out after {raw.seconds:.0f} s")
    if raw.out_of_memory:
        return Observation(Outcome.ERROR, reason="out of memory")
    if raw.signal:
        return Observation(Outcome.ERROR, reason=f"ended by {_signal_name(raw.signal)}")
    if raw.failure and not (raw.failure.startswith("Python exception") and _is_verdict(raw.document)):
        return Observation(Outcome.ERROR, reason=raw.failure)
    return None


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _by_exit_code(raw: RawRun) -> Observation:
    code = raw.exit_code
    if code == ExitCode.OK:
        return Observation(Outcome.ZERO)
    if code == ExitCode.DIVERGED:
        return Observation(Outcome.MISMATCH, raw.signature or signature_of(raw.document))
    if code == EXIT_INCONCLUSIVE:
        return Observation(Outcome.UNTESTABLE, reason="inconclusive: it does not repeat itself", retry=True)
    return Observation(Outcome.ERROR, reason=_code(raw))


def _code(raw: RawRun) -> str:
    code = "no exit code" if raw.exit_code is None else f"exit code {raw.exit_code}"
    return f"{code}: {raw.reason}" if raw.reason else code


def _is_verdict(document: dict[str, Any] | None) -> bool:
    return document is not None and document.get("format") == "zkl-verdict"


def _by_verdict(raw: RawRun) -> Observation:
    document = raw.document or {}
    verdict = document.get("verdict")
    if document.get("version") != 1:
        return Observation(Outcome.ERROR, reason=f"zkl-verdict of unknown version {document.get('version')!r}")
    if verdict == "refused":
        return Observation(Outcome.UNTESTABLE, reason=f"refused: {_why(document)}")
    if verdict == "inconclusive":
        return Observation(Outcome.UNTESTABLE, reason="inconclusive: it does not repeat itself", retry=True)
    if raw.exit_code not in (None, ExitCode.OK, ExitCode.DIVERGED):
        return _by_exit_code(raw)
    if verdict == "diverged":
        return Observation(Outcome.MISMATCH, signature_of(document))
    if verdict == "identical":
        if raw.exit_code == ExitCode.DIVERGED:
            return Observation(Outcome.ERROR, reason="exit code 1 contradicts the verdict 'identical'")
        if _look_up(document, "coverage.rows.compared") == 0:
            return Observation(Outcome.UNTESTABLE, reason="the verdict compared nothing")
        return Observation(Outcome.ZERO)
    return Observation(Outcome.ERROR, reason=f"zkl-verdict says {verdict!r}")


def signature_of(document: dict[str, Any] | None) -> str:
    """Operator-level signature of a document: first site and edge of a zkl-verdict, or its ``signature``."""
    if document is None:
        return ""
    if isinstance(document.get("signature"), str):
        return str(document["signature"])
    site = _look_up(document, "first.site") or _look_up(document, "first.operator")
    edge = document.get("edge")
    parts = [p for p in (site, edge) if isinstance(p, str) and p]
    return " @ ".join(parts)


def _why(document: dict[str, Any]) -> str:
    skipped = _look_up(document, "coverage.skipped")
    for value in (document.get("reason"), skipped[0].get("reason") if _has_mapping(skipped) else None):
        if isinstance(value, str) and value:
            return value
    return "inputs are not comparable"


def _has_mapping(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _by_rule(raw: RawRun, path: str, comparison: str, limit: float) -> Observation:
    if raw.exit_code == EXIT_UNTESTABLE:
        return Observation(Outcome.UNTESTABLE, reason=_code(raw))
    value = _look_up(raw.document or {}, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        found = "no document" if raw.document is None else f"no number at {path!r} in the document"
        code = raw.exit_code
        if code not in (None, ExitCode.OK, ExitCode.DIVERGED):
            return Observation(Outcome.ERROR, reason=f"exit code {code} and {found}")
        return Observation(Outcome.UNTESTABLE, reason=f"the run left {found}")
    if _COMPARE[comparison](value, limit):
        return Observation(Outcome.ZERO)
    return Observation(Outcome.MISMATCH, raw.signature or signature_of(raw.document))


def _look_up(document: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(document, dict):
            return None
        document = document.get(key)
    return document
