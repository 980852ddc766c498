"""Rows that hold other rows: shifted, permuted, another sample's, or nothing. By digest: no payload needed."""

from __future__ import annotations

from collections import Counter

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Evidence, Finding, Source, Strength
from zkl_debug.diff.model import Bools
from zkl_debug.schema import Json

_LEAST = 3
_SHARE = 0.9  # of the rows whose source was captured
_SOME = 0.5  # of all rows: others may hold rows that were not captured, such as padding


def _each(e: Evidence) -> list[tuple[bool, Source]]:
    """(which side holds other rows, where they come from)."""
    if e.sources is None:
        return []
    return [(True, e.sources[0]), (False, e.sources[1])]


def row_shift(e: Evidence) -> Finding | None:
    """Each row holds the bits of the row k positions away in the same sequence."""
    best: Finding | None = None
    for right, source in _each(e):
        at = source.found & source.same_chain & (source.shift != 0)
        if at.sum() < _LEAST:
            continue
        shift, count = Counter(source.shift[at].tolist()).most_common(1)[0]
        if count < _SHARE * source.found.sum():
            continue
        there, equal = source.at(shift)
        hits, known = int(equal.sum()), int(there.sum())
        if hits < _LEAST or hits < known:
            continue
        lag = shift if right else -shift
        evidence: dict[str, Json] = {
            "lag_of_left": lag,
            "rows": hits,
            "of": known,
            "source_not_captured": len(there) - known,
        }
        text = (
            f"each row of {e.side(right)} holds, bit for bit, what {e.side(not right)} has {abs(shift)} position(s) "
            f"{'on' if shift > 0 else 'back'}, in all {hits} rows whose source was captured: {e.side(False)} is "
            f"shifted against {e.side(True)}, best lag {lag:+d}"
        )
        found = Finding("row-shift", text, evidence, Strength.EXACT, ("row-permutation", "equals-other-sample", *_WEAK))
        if best is None or hits > int(best.evidence["rows"]):
            best = found
    return best


_WEAK = ("reduction-order", "constant-ratio", "constant-offset")


def equals_other_sample(e: Evidence) -> Finding | None:
    """Rows hold the bits of another sample's rows."""
    for right, source in _each(e):
        at = source.found & ~source.same_chain
        hits = int(at.sum())
        if hits < _LEAST or hits < _SOME * len(source.found) or hits < _SHARE * int(source.found.sum()):
            continue
        pairs = Counter(zip(source.row_sample[at].tolist(), source.sample[at].tolist(), strict=True))
        fixed = len({one for one, _ in pairs}) == len(pairs)
        if not fixed:
            continue
        shifts = Counter(source.shift[at].tolist())
        shift, same = shifts.most_common(1)[0]
        evidence: dict[str, Json] = {
            "side": e.side(right),
            "rows": hits,
            "of": len(source.found),
            "from": {str(one): other for (one, other) in pairs},
            "position_shift": shift if same == hits else None,
        }
        one, other = next(iter(pairs))
        text = (
            f"{hits} of {len(source.found)} rows of {e.side(right)} hold, bit for bit, rows of another sample of "
            f"{e.side(not right)} (sample {one} those of sample {other}"
            + (f", at position {shift:+d})" if same == hits and shift else ")")
        )
        return Finding("equals-other-sample", text, evidence, Strength.EXACT, ("row-permutation", *_WEAK))
    return None


def row_permutation(e: Evidence) -> Finding | None:
    """The rows of a call are those of the other side in another order."""
    for right, source in _each(e):
        at = source.found & source.same_call
        hits = int(at.sum())
        if hits < _LEAST or hits < _SOME * len(source.found) or hits < _SHARE * int(source.found.sum()):
            continue
        places = list(zip(source.sample[at].tolist(), source.position[at].tolist(), strict=True))
        if len(set(places)) < 0.9 * hits:
            continue
        examples = [
            {"sample": int(s), "position": int(p), "holds": list(other)}
            for s, p, other in zip(source.row_sample[at][:8], source.row_position[at][:8], places[:8], strict=True)
        ]
        evidence: dict[str, Json] = {"side": e.side(right), "rows": hits, "of": len(source.found), "examples": examples}
        first = examples[0]
        text = (
            f"{hits} of {len(source.found)} rows of {e.side(right)} hold, bit for bit, another row of the same call on "
            f"{e.side(not right)}: sample {first['sample']} position {first['position']} holds that of sample "
            f"{places[0][0]} position {places[0][1]}"
        )
        return Finding("row-permutation", text, evidence, Strength.EXACT, _WEAK)
    return None


def uninitialised(e: Evidence) -> Finding | None:
    """Rows of one side are NaN, zero, or one constant where the other side's are ordinary numbers."""
    pair = e.pair()
    if pair is None or pair.left.bits.shape[1] < 4:
        return None
    for right in (True, False):
        bad, good = (pair.right, pair.left) if right else (pair.left, pair.right)
        ordinary = np.isfinite(good.real).all(axis=1) & (good.real != good.real[:, :1]).any(axis=1)
        nan = ~np.isfinite(bad.real) & ~(np.isneginf(bad.real) & _masked(bad.real))
        flat = (bad.bits == bad.bits[:, :1]).all(axis=1) & ~nan.any(axis=1)
        zero = (bad.real == 0).all(axis=1)
        huge = _huge(bad.real, good.real)
        forms = {
            "zero": (zero, "is zero in every element"),
            "nan": (nan.all(axis=1), "is NaN or infinite in every element"),
            "some-nan": (nan.any(axis=1) & ~nan.all(axis=1), "holds NaN or infinity"),
            "constant": (flat & ~zero, "holds one constant in every element"),
            "out-of-range": (huge & ~nan.any(axis=1), "holds values a million times those of the other side"),
        }
        for form, (rows, words) in forms.items():
            hits = int((rows & ordinary).sum())
            if hits == 0:
                continue
            most = hits >= _SHARE * len(rows)
            text = (
                f"{e.side(right)} {words} where {e.side(not right)} holds ordinary numbers, in {hits} of {len(rows)} "
                f"rows: never written, or a division by nothing"
            )
            evidence: dict[str, Json] = {"form": form, "side": e.side(right), "rows": hits, "of": len(rows)}
            # A few rows of zeros among rows that differ otherwise explain those few only; NaN never is by chance.
            told = hits > len(rows) // 2 or "nan" in form
            strength = Strength.FITTED if most else Strength.CLASS if told else Strength.FOLLOWS
            return Finding("uninitialised", text, evidence, strength, _WEAK if most else ())
    return None


def _masked(values: F64) -> Bools:
    """Rows whose minus infinities may be a mask: not all of the row."""
    return np.asarray(~np.isneginf(values).all(axis=1, keepdims=True))


def _huge(bad: F64, good: F64) -> Bools:
    with np.errstate(invalid="ignore"):
        size = np.where(np.isfinite(bad), np.abs(bad), 0.0).max(axis=1)
        return np.asarray(size > 1e6 * np.abs(good).max(axis=1))
