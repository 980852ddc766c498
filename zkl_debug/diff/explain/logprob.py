"""log-softmax and the labels behind it: temperature, formula of each side, support, and which label was used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import F64, ulp_distance
from zkl_debug.diff.explain.model import Evidence, Finding, Labels, Port, Strength, Values
from zkl_debug.diff.explain.numeric import common, finite_rows, ratio_bounds, rounded, shortest, shown, spacing
from zkl_debug.diff.model import Bools
from zkl_debug.schema import Json

_BENIGN_ULP = 2
_MOST = 0.99
_ELEMENTS = 1 << 22  # elements looked at


def _ready(e: Evidence) -> tuple[Port, Values] | None:
    """(outputs, equal logits) of a log-softmax."""
    pair, x = e.pair(), e.equal_input()
    if pair is None or x is None or "log_softmax" not in (e.semantic, e.site.operator.split("#")[0]):
        return None
    if x.bits.shape != pair.left.bits.shape or x.bits.shape[1] < 3:
        return None
    keep = max(1, _ELEMENTS // x.bits.shape[1])
    if len(x) > keep:
        x = Values(x.bits[:keep], x.dtype, x.shape)
        pair = Port(*(Values(side.bits[:keep], side.dtype, side.shape) for side in (pair.left, pair.right)))
    return pair, x


def temperature(e: Evidence) -> Finding | None:
    """Both sides are log-softmax of the same logits, divided by different temperatures."""
    ready = _ready(e)
    if ready is None:
        return None
    pair, x = ready
    fits = [_temperature(x.real, side) for side in (pair.left, pair.right)]
    if fits[0] is None or fits[1] is None:
        return None
    (low, high), (low_right, high_right) = fits[0], fits[1]
    if low <= high_right and low_right <= high:
        return None
    left, right = shortest(low, high), shortest(low_right, high_right)
    evidence: dict[str, Json] = {
        "left": left,
        "right": right,
        "left_allowed": [shown(low), shown(high)],
        "right_allowed": [shown(low_right), shown(high_right)],
        "rows": len(x),
    }
    text = (
        f"the logits are equal; {e.side(False)} is their log-softmax at temperature {left:g}, {e.side(True)} at "
        f"temperature {right:g}, in all {len(x)} rows"
    )
    replaces = ("constant-ratio", "constant-offset", "reduction-order", "softmax-support")
    return Finding("temperature", text, evidence, Strength.FITTED, replaces)


def _temperature(x: F64, out: Values) -> tuple[float, float] | None:
    """Temperatures T with out_i - out_j = (x_i - x_j) / T for all i, j; None when there are none."""
    y = out.real
    if not finite_rows(x, y).all():
        return None
    rows = np.arange(len(x))
    top = x.argmax(axis=1)
    gap_x = x[rows, top][:, None] - x
    gap_y = y[rows, top][:, None] - y
    # Two roundings in out, one in x / T, one in the shift by the maximum.
    error = 1.5 * spacing(y, out.dtype) + 1.5 * spacing(y[rows, top], out.dtype)[:, None]
    error = error + 2 * spacing(np.maximum(np.abs(x), np.abs(x[rows, top])[:, None]), out.dtype)
    use = gap_x > 0.2 * gap_x.max(axis=1, keepdims=True)
    use &= gap_x > 0
    low, high = ratio_bounds(gap_y, error, gap_x, np.zeros_like(gap_x))
    lowest, highest = common(np.where(use, low, -np.inf), np.where(use, high, np.inf), None)
    if not use.any() or lowest > highest or not np.isfinite(lowest) or lowest <= 0:
        return None
    mass = np.exp(y).sum(axis=1)
    return (float(lowest), float(highest)) if bool((np.abs(mass - 1) < 1e-3).all()) else None


FORMULAS = {"two-pass": "(x - max) - log(sum)", "one-pass": "x - logsumexp(x)"}


def formula_matches(x: Values, out: Values) -> dict[str, tuple[Bools, NDArray[np.float32]]]:
    """Rows that a formula gives bit for bit in float32, with the row's own constant: {formula: (rows, constant)}.

    The log of the sum is left free (how it is added up is another question): a row matches when one float32 constant
    gives every element.
    """
    logits, target = x.real.astype(np.float32), out.real.astype(np.float32)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return {"two-pass": _one_constant(shifted, target), "one-pass": _one_constant(logits, target)}


def _one_constant(x: NDArray[np.float32], out: NDArray[np.float32]) -> tuple[Bools, NDArray[np.float32]]:
    half = 0.5 * spacing(out.astype(np.float64), "float32")
    middle = x.astype(np.float64) - out.astype(np.float64)
    low, high = (middle - half).max(axis=1), (middle + half).min(axis=1)
    guess = ((low + high) / 2).astype(np.float32)
    best, constant = np.zeros(len(x), np.bool_), guess.copy()
    for step in (0, 1, -1, 2, -2, 3, -3):
        value = guess if step == 0 else (guess + step * np.spacing(np.abs(guess))).astype(np.float32)
        equal = (x - value[:, None]).view(np.uint32) == out.view(np.uint32)
        good = equal.all(axis=1) & ~best
        constant[good] = value[good]
        best |= good
    return best, constant


def log_softmax_formula(e: Evidence) -> Finding | None:
    """Each side is bit for bit one formula, another one; or the same one with another sum."""
    ready = _ready(e)
    if ready is None or ready[0].left.dtype != "float32" or ready[1].dtype != "float32":
        return None
    pair, x = ready
    if not finite_rows(x.real, pair.left.real, pair.right.real).all():
        return None
    match = [formula_matches(x, side) for side in (pair.left, pair.right)]
    ulp = int(ulp_distance(pair.left.bits, pair.right.bits, "float32").max())
    share = {f"{e.side(bool(s))}: {name}": float(match[s][name][0].mean()) for s in (0, 1) for name in FORMULAS}
    evidence: dict[str, Json] = {"rows_matched": share, "max_ulp": ulp, "rows": len(x)}
    # What is x - M in every row is also (x - max) - (M - max); only the reverse tells the formulas apart.
    names = ["one-pass" if match[s]["one-pass"][0].mean() >= _MOST else "two-pass" for s in (0, 1)]
    shares = [float(match[s][names[s]][0].mean()) for s in (0, 1)]
    if min(shares) < _MOST:
        return _rounded_logits(e, x, pair, shares)
    if names[0] == names[1]:
        return _same_formula(names[0], match[0][names[0]], match[1][names[1]], evidence)
    plain = names.index("two-pass")
    if match[plain]["one-pass"][0].mean() > 0.9:
        return None
    evidence["apart"] = shown(_apart(x, pair))
    return _two_formulas(e, (names[0], names[1]), (shares[0], shares[1]), evidence)


def _rounded_logits(e: Evidence, x: Values, pair: Port, shares: list[float]) -> Finding | None:
    """One side computes a formula of the logits, the other one of the logits rounded to a narrower format first."""
    side = int(np.argmin(shares))
    if shares[1 - side] < _MOST:
        return None
    out = (pair.left, pair.right)[side]
    for name in ("bfloat16", "float16"):
        coarse = rounded(x.real, name).astype(np.float32)
        match = formula_matches(Values(coarse.view(np.uint32), "float32", x.shape), out)
        share = max(float(rows.mean()) for rows, _ in match.values())
        if share >= _MOST:
            evidence: dict[str, Json] = {"side": e.side(bool(side)), "dtype": name, "what": "logits", "rows": len(x)}
            text = (
                f"{e.side(bool(side))} is the log-softmax of the logits rounded to {name} first, bit for bit in "
                f"{share:.1%} of {len(x)} rows; the other side of the logits as they are"
            )
            return Finding("extra-rounding", text, evidence, Strength.EXACT, ("constant-offset", "reduction-order"))
    return None


def _apart(x: Values, pair: Port) -> float:
    """Largest difference in spacings of float32 at the row's largest number: the ones that are rounded."""
    largest = np.maximum(np.abs(x.real).max(axis=1), np.abs(pair.left.real).max(axis=1))
    return float((np.abs(pair.left.real - pair.right.real).max(axis=1) / spacing(largest, "float32")).max())


def _two_formulas(
    e: Evidence, names: tuple[str, str], shares: tuple[float, float], evidence: dict[str, Json]
) -> Finding:
    apart = float(evidence["apart"])
    evidence["benign"] = apart <= _BENIGN_ULP
    text = (
        f"{e.side(False)} computes {FORMULAS[names[0]]} ({shares[0]:.1%} of the rows bit for bit), {e.side(True)} "
        f"computes {FORMULAS[names[1]]} ({shares[1]:.1%}); at most {apart:.2g} ulp of the row's largest number apart"
        + (": a benign mismatch of functions (<= 2 ulp)" if apart <= _BENIGN_ULP else "")
    )
    evidence["formulas"] = list(names)
    replaces = ("constant-offset", "reduction-order", "constant-ratio")
    return Finding("log-softmax-formula", text, evidence, Strength.EXACT, replaces)


def _same_formula(
    name: str,
    left: tuple[Bools, NDArray[np.float32]],
    right: tuple[Bools, NDArray[np.float32]],
    evidence: dict[str, Json],
) -> Finding | None:
    both = left[0] & right[0]
    gap = np.abs(left[1].astype(np.float64) - right[1].astype(np.float64))[both]
    ulps = gap / np.spacing(np.maximum(np.abs(left[1]), np.abs(right[1])))[both]
    if not len(ulps) or ulps.max() > 64:
        return None
    evidence |= {"formula": name, "log_sum_ulp": shown(float(ulps.max()))}
    text = (
        f"both sides compute {FORMULAS[name]}, bit for bit; only the row's log-sum differs, by up to "
        f"{ulps.max():.0f} ulp: the sum over the vocabulary is added in another order"
    )
    return Finding("reduction-order", text, evidence, Strength.EXACT, ("constant-offset", "constant-ratio"))


def softmax_support(e: Evidence) -> Finding | None:
    """The sides normalise over different columns: a constant a row, and the columns that were left out."""
    ready = _ready(e)
    if ready is None:
        return None
    pair, x = ready
    for right in (True, False):
        odd, plain = (pair.right, pair.left) if right else (pair.left, pair.right)
        mass = np.exp(np.where(np.isneginf(odd.real), -np.inf, odd.real)).sum(axis=1)
        if not np.isfinite(plain.real).all() or np.isnan(odd.real).any():
            continue
        if not bool((np.abs(np.exp(plain.real).sum(axis=1) - 1) < 1e-3).all()):
            continue
        hidden = np.isneginf(odd.real)
        if hidden.any() and bool((np.abs(mass - 1) < 1e-3).all()):
            return _hidden(e, right, x.real, hidden)
        if bool((mass > 1 + 1e-4).all()):
            found = _left_out(e, right, x.real, odd.real)
            if found is not None:
                return found
    return None


def _hidden(e: Evidence, right: bool, x: F64, hidden: Bools) -> Finding | None:
    """Columns at minus infinity: the top k, or a set that is the same in every row."""
    kept = (~hidden).sum(axis=1)
    lowest_kept = np.where(hidden, np.inf, x).min(axis=1)
    highest_hidden = np.where(hidden, x, -np.inf).max(axis=1)
    evidence: dict[str, Json] = {"side": e.side(right), "kept": [int(kept.min()), int(kept.max())], "of": x.shape[1]}
    if bool((hidden == hidden[0]).all()):
        form, words = "columns", f"the same {int(kept[0])} of {x.shape[1]} columns in every row"
    elif bool((lowest_kept >= highest_hidden).all()) and int(kept.min()) == int(kept.max()):
        form, words = "top-k", f"the {int(kept[0])} largest logits (top-k)"
    elif bool((lowest_kept >= highest_hidden).all()):
        form, words = "top-p", f"the largest logits, {int(kept.min())} to {int(kept.max())} of them a row (top-p)"
    else:
        return None
    evidence["form"] = form
    text = f"{e.side(right)} takes its log-softmax over {words}, {e.side(not right)} over all columns"
    return Finding("softmax-support", text, evidence, Strength.FITTED, ("constant-offset", "reduction-order"))


def _left_out(e: Evidence, right: bool, x: F64, odd: F64) -> Finding | None:
    """The sum leaves columns out that the output still has: those behind a column, or all but the top k."""
    probability = np.exp(odd)
    order = np.argsort(-x, axis=1, kind="stable")
    sums = {
        "first columns": np.cumsum(probability, axis=1),
        "largest logits": np.cumsum(np.take_along_axis(probability, order, axis=1), axis=1),
    }
    for form, total in sums.items():
        count = np.abs(total - 1).argmin(axis=1)
        near = np.abs(np.take_along_axis(total, count[:, None], axis=1)[:, 0] - 1)
        if int(count.min()) == int(count.max()) and bool((near < 1e-5).all()) and int(count[0]) + 1 < x.shape[1]:
            used = int(count[0]) + 1
            evidence: dict[str, Json] = {"side": e.side(right), "form": form, "used": used, "of": x.shape[1]}
            text = f"{e.side(right)} normalises over the {used} {form} of {x.shape[1]}, {e.side(not right)} over all"
            return Finding("softmax-support", text, evidence, Strength.FITTED, ("constant-offset", "reduction-order"))
    return None


def label_fault(e: Evidence) -> Finding | None:
    """Another label was scored than the token of the row: which one."""
    labels = e.parents
    if labels is None or labels.used is None:
        return None
    for right in (False, True):
        used = labels.used[int(right)]
        wrong = (used != labels.intended) & (used >= 0)
        if wrong.any():
            return _wrong_label(e, labels, right, wrong)
    return _read_elsewhere(e, labels)


def _read_elsewhere(e: Evidence, labels: Labels) -> Finding | None:
    """The label is right, and yet the log-prob is that of another token of the same row, bit for bit."""
    pair = e.pair()
    if pair is None or e.site.op.split("#")[0] != "selected":
        return None
    found = []
    for side, table in ((pair.left, labels.table_left), (pair.right, labels.table)):
        if table is None or len(table) != len(side) or len(labels.intended) != len(side):
            return None
        found.append(_column_of(side.real[:, 0], table, labels.intended))
    for right in (False, True):
        used = found[int(right)]
        wrong = (used != labels.intended) & (used >= 0)
        if int(wrong.sum()) >= _SHARE_OF_LABELS * len(used) and not (found[int(not right)] != labels.intended).any():
            return _wrong_label(e, replace(labels, used=(found[0], found[1])), right, wrong)
    return None


_SHARE_OF_LABELS = 0.9


def _column_of(value: F64, table: F64, intended: NDArray[np.int64]) -> NDArray[np.int64]:
    """Token of the row whose log-prob is ``value``, [m]: the intended one if it fits, -1 where no single one does."""
    same = table == value[:, None]
    one = np.where(same.sum(axis=1) == 1, same.argmax(axis=1), -1)
    inside = np.clip(intended, 0, table.shape[1] - 1)
    return np.asarray(np.where(same[np.arange(len(same)), inside] & (inside == intended), intended, one))


def _wrong_label(e: Evidence, labels: Labels, right: bool, wrong: Bools) -> Finding:
    assert labels.used is not None
    used, side = labels.used[int(right)], e.side(right)
    count = int(wrong.sum())
    forms = _label_forms(labels, right, wrong, used)
    evidence: dict[str, Json] = {"side": side, "rows": count, "of": len(used), "matches": forms}
    at = int(wrong.argmax())
    evidence["example"] = {"used": int(used[at]), "intended": int(labels.intended[at])}
    evidence["positions"] = sorted({int(p) for p in e.position[wrong]})[:16] if len(e.position) == len(used) else []
    text = (
        f"{side} scores another label than the row's token in {count} of {len(used)} rows (first: {int(used[at])} "
        f"instead of {int(labels.intended[at])})"
    )
    whole = [name for name, hits in forms.items() if hits == count]
    if whole:
        text += f"; it is {_LABEL_WORDS.get(whole[0], whole[0])} in all of them"
    if labels.last is not None and bool(labels.last[wrong].all()):
        text += "; all of them are the last label of their sequence in the call"
    text += ": a label fault, not numerics"
    name = "label-shift" if whole and whole[0].startswith("token at position") else "label-fault"
    return Finding(name, text, evidence, Strength.EXACT, ("reduction-order", "row-shift", "equals-other-sample"))


_LABEL_WORDS = {
    "argmax": "the most likely token (what was sampled greedily)",
    "first token of another sequence": "the first token of another sequence of the call",
    "zero": "token 0 (padding)",
    "constant": "one and the same token",
}


def _label_forms(labels: Labels, right: bool, wrong: Bools, used: NDArray[np.int64]) -> dict[str, int]:
    """How many wrong labels each form explains."""
    forms: dict[str, int] = {}
    for shift, tokens in labels.shifted.items():
        forms[f"token at position {shift:+d}"] = int((tokens[wrong] == used[wrong]).sum())
    if labels.following is not None:
        sets = labels.following[int(right)]
        hits = [int(used[i]) in sets[i] for i in np.flatnonzero(wrong)]
        forms["first token of another sequence"] = int(np.sum(hits))
    table = labels.table if right else labels.table_left
    if table is not None:
        forms["argmax"] = int((table.argmax(axis=1)[wrong] == used[wrong]).sum())
    if wrong.sum() >= 3 and len(np.unique(used[wrong])) == 1:
        forms["constant"] = int(wrong.sum())
    forms["zero"] = int((used[wrong] == 0).sum())
    return {name: hits for name, hits in forms.items() if hits}
