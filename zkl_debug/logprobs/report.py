"""From a table to the answer: verdict, onset, affected rows, metrics, explanations, what to capture next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from zkl_debug.errors import ExitCode, Refused
from zkl_debug.logprobs import noise, placement, shapes
from zkl_debug.logprobs.affected import Affected, Onset, find_affected, find_onset
from zkl_debug.logprobs.finding import Finding, ulp32
from zkl_debug.logprobs.metrics import Metrics, compute
from zkl_debug.logprobs.table import LogprobTable, Skip
from zkl_debug.logprobs.view import View, take, view_of
from zkl_debug.schema import Json

FORMAT = "zkl-logprobs"
VERSION = 1
_TEMPERATURE = (
    "a temperature cannot be fitted from log-probs of single tokens (the normaliser changes too): it needs logits, "
    "site output_layer:out"
)


@dataclass(frozen=True)
class Report:
    """Everything ``zkl-debug logprobs`` says.

    Attributes:
        verdict: ``identical``, ``diverged`` or ``refused`` (no difference seen, but the file is damaged).
        reason: why it is refused.
        compared, masked, masked_differ: valid rows, rows the loss ignores, and how many of those differ.
        per_step: (step, metrics) of every step compared.
        total: metrics over all steps.
        view: the rows that were compared.
    """

    verdict: str
    reason: str
    sides: tuple[str, str]
    equality: str
    compared: int
    masked: int
    masked_differ: int
    skipped: tuple[Skip, ...]
    notes: tuple[str, ...]
    per_step: tuple[tuple[int, Metrics], ...]
    total: Metrics
    onset: Onset | None
    affected: Affected
    findings: tuple[Finding, ...]
    limits: tuple[str, ...]
    next: tuple[str, ...]
    view: View

    @property
    def exit_code(self) -> ExitCode:
        """0 bit-identical, 1 diverged, 3 refused."""
        return {"identical": ExitCode.OK, "diverged": ExitCode.DIVERGED}.get(self.verdict, ExitCode.REFUSED)

    def to_json(self) -> Json:
        """The document of ``--json``, shaped like a ``zkl-verdict``."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "verdict": self.verdict,
            "reason": self.reason,
            "claim": {"equality": self.equality, "scope": "valid-tokens", "repeats": 1},
            "sides": list(self.sides),
            "coverage": {
                "rows": {"compared": self.compared, "masked": self.masked, "masked_differing": self.masked_differ},
                "skipped": [skip.to_json() for skip in self.skipped],
            },
            "metrics": self.total.to_json(),
            "steps": [{"step": step, **metrics.to_json()} for step, metrics in self.per_step],
            "onset": None if self.onset is None else self.onset.to_json(),
            "first": first_row(self.view),
            "affected": self.affected.to_json(),
            "explanations": [finding.to_json(self.view.differs) for finding in self.findings],
            "limits": list(self.limits),
            "notes": list(self.notes),
            "next": list(self.next),
        }


def analyse(
    table: LogprobTable, *, step: int | None = None, valid_only: bool = False, commands: Collection[str] = ()
) -> Report:
    """Compare the two sides of a table bit by bit on its valid rows and explain what differs.

    Args:
        table: a table with both sides.
        step: look at this step only.
        valid_only: leave rows the loss ignores out altogether, also of the check that a side agrees with itself.
        commands: names of the ``zkl-debug`` commands that exist, for :attr:`Report.next`.

    Raises:
        Refused: when no valid row is left to compare, or a side was never computed.
    """
    assert table.train is not None
    if step is not None:
        table = _one_step(table, step)
    if valid_only:
        left_out = int((~table.valid).sum())
        skipped = [Skip("masked rows", "--valid-only", left_out)] if left_out else []
        table = table.select(table.valid).with_notes(skipped=skipped)
    view = view_of(table)
    _refuse_empty(table, view)
    _refuse_unfilled(view)
    hidden = view_of(table, ~table.valid)
    onset = find_onset(view.step, view.differs)
    findings = explain(view, table)
    verdict, reason = _verdict(view, table)
    steps = np.unique(table.step).tolist()
    return Report(
        verdict=verdict,
        reason=reason,
        sides=table.sides,
        equality="float32-bits" if _is_full_precision(view) else "as-written",
        compared=len(view),
        masked=len(hidden),
        masked_differ=int(hidden.differs.sum()),
        skipped=table.skipped,
        notes=(*table.notes, *_mask_notes(table), *_filler_notes(hidden), *_precision_notes(view)),
        per_step=tuple((s, compute(table.select(table.step == s))) for s in steps),
        total=compute(table),
        onset=onset,
        affected=find_affected(view),
        findings=findings,
        limits=_limits(view, findings),
        next=advise(view, onset, findings, commands),
        view=view,
    )


def explain(view: View, table: LogprobTable) -> tuple[Finding, ...]:
    """All findings that hold, from the exact forms to the broad classes; a broad one only where no exact one fits."""
    found = noise.not_finite(view)
    check = noise.self_finding(noise.self_check(table), view.sides)
    found += [check] if check is not None else []
    if not view.differs.any():
        return tuple(found)
    benign = noise.rounding(view)
    if benign is not None:
        return (*found, benign)
    tests = (shapes.copied, shapes.constant, shapes.shift, shapes.offset, shapes.ratio, shapes.extra_rounding)
    forms = [form for test in tests if (form := test(view)) is not None]
    found += forms
    if any(bool(form.rows[view.differs].all()) for form in forms):
        return tuple(found)
    label = placement.label_fault(view) or placement.isolated(view)
    carried = placement.carried_forward(view) if label is None else None
    broad = noise.throughout(view, placement.gross_rows(view)) if carried is None else None
    return (*found, *(finding for finding in (label, carried, broad) if finding is not None))


def advise(
    view: View, onset: Onset | None, findings: Sequence[Finding], commands: Collection[str] = ()
) -> tuple[str, ...]:
    """Commands to run next; only ones that exist, apart from ``capture`` which is the tool's own next step."""
    if onset is None:
        return ()
    out = []
    if onset.clean_before and "bisect" in commands:
        out.append(f"zkl-debug bisect steps ...   # last good step {onset.last_clean}, first bad step {onset.step}")
    sites = list(dict.fromkeys(site for finding in findings for site in finding.capture))
    options = " ".join(f"--sites '{site}'" for site in sites) or "--level digest"
    if "capture" not in commands:
        options = "..."
    moment = f"   # at step {onset.step}" if np.unique(view.step).shape[0] > 1 else ""
    out += [f"zkl-debug capture --side {side} {options} --out captures/{side} -- CMD{moment}" for side in _labels(view)]
    if "diff" in commands:
        out.append("zkl-debug diff " + " ".join(f"captures/{side}" for side in _labels(view)))
    return tuple(out)


def first_row(view: View) -> Json:
    """The earliest differing row: by step, then position, then sample; None when nothing differs."""
    rows = np.flatnonzero(view.differs)
    if rows.shape[0] == 0:
        return None
    row = int(rows[np.lexsort((view.sample[rows], view.position[rows], view.step[rows]))[0]])
    only = take(view, np.arange(len(view)) == row)
    spacing = float(ulp32(only.a, only.b)[0])
    gap = float(view.gap[row])
    return {
        "step": int(view.step[row]),
        "sample": int(view.sample[row]),
        "position": int(view.position[row]),
        "token": int(view.token[row]),
        "generated": bool(view.generated[row]),
        view.sides[0]: float(view.a[row]),
        view.sides[1]: float(view.b[row]),
        "abs": gap,
        "ulp": gap / spacing if np.isfinite(gap) and spacing > 0 else None,
    }


def _labels(view: View) -> tuple[str, str]:
    return (view.sides[0].lower(), view.sides[1].lower())


def _one_step(table: LogprobTable, step: int) -> LogprobTable:
    rows = table.step == step
    if not rows.any():
        have = np.unique(table.step).tolist()
        raise Refused(f"no rows of step {step}", f"one of the steps {', '.join(map(str, have[:20])) or '(none)'}")
    left = int((~rows).sum())
    part = table.select(rows)
    return part.with_notes(skipped=[Skip("rows of other steps", f"--step {step}", left)]) if left else part


def _refuse_empty(table: LogprobTable, view: View) -> None:
    if len(view):
        return
    lost = "; ".join(f"{skip.count} {skip.what}: {skip.reason}" for skip in table.skipped)
    raise Refused(
        f"nothing to compare: {len(table)} rows were read, the mask leaves none of them"
        + (f" ({lost})" if lost else ""),
        "at least one token with a mask that is not 0",
        "check token_loss_mask and sample_loss_mask; a batch that is masked out entirely trains on nothing",
    )


def _refuse_unfilled(view: View) -> None:
    """Refuse a column that was never computed: all zeros on several tokens."""
    if len(view) < 2:
        return
    for label, values in zip(view.sides, (view.a, view.b), strict=True):
        if not values.any():
            raise Refused(
                f"the {label} log-probs are 0 on all {len(view)} valid tokens: they were never computed",
                "log-probs of both sides",
                "with force_on_policy_ratio NeMo-RL skips prev_logprobs: switch it off for the step you dump",
            )


def _verdict(view: View, table: LogprobTable) -> tuple[str, str]:
    if view.differs.any():
        return "diverged", ""
    if table.is_damaged:
        lost = "; ".join(f"{skip.count} {skip.what}: {skip.reason}" for skip in table.skipped if skip.damage)
        return "refused", f"what could be read is bit-equal, but not all could be read ({lost})"
    broken = int((~np.isfinite(view.a) | ~np.isfinite(view.b) | (view.a > 0) | (view.b > 0)).sum())
    if broken:  # equal bits, but a gate on the exit code must not pass where the metrics are no numbers
        return "refused", f"equal on both sides, but {broken} values are no log-probs (NaN, infinite or above 0)"
    return "identical", ""


def _is_full_precision(view: View) -> bool:
    """Whether the values look like written float32 numbers, not like numbers rounded to a few decimals."""
    values = np.concatenate([view.a, view.b]).astype(np.float64)
    values = values[np.isfinite(values) & (values != np.round(values, 1))]
    if values.shape[0] < 8:
        return True
    near = np.abs(values - np.round(values, 5)) <= np.abs(values) * 2.0**-24
    return not bool(near.all())


def _precision_notes(view: View) -> tuple[str, ...]:
    if _is_full_precision(view):
        return ()
    return ("all values have at most 5 decimals: they were rounded when written, so equal does not mean bitwise equal",)


def _mask_notes(table: LogprobTable) -> tuple[str, ...]:
    other = int(((table.mask != 0) & (table.mask != 1)).sum())
    return (f"{other} mask values are neither 0 nor 1; they weigh the metrics as NeMo-RL does",) if other else ()


def _filler_notes(hidden: View) -> tuple[str, ...]:
    """Why masked rows differ when one side simply has no values there."""
    if not hidden.differs.any():
        return ()
    empty = [side for side, values in zip(hidden.sides, (hidden.a, hidden.b), strict=True) if not values.any()]
    return tuple(f"{side} holds 0 on all masked rows (prompt log-probs that were not filled)" for side in empty)


def _limits(view: View, findings: Sequence[Finding]) -> tuple[str, ...]:
    if not view.differs.any():
        return ()
    is_general = float(view.differs.mean()) > 0.5 and not any(finding.is_benign for finding in findings)
    out = [_TEMPERATURE] if is_general else []  # a temperature leaves next to no row as it was
    if not findings:
        out.append("no form, place or class fits: not localised at the log-prob level")
    return tuple(out)
