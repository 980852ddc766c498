"""Where the gross differences sit: single rows at an edge (a label fault), or everything from a row on (state).

A wrong label leaves the logits alone: exactly one row is grossly off, its neighbours agree as well as all others do,
and the two values can be the log-probs of two different tokens under one distribution. Wrong state does not stop: what
follows in the sequence is off too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zkl_debug.logprobs.finding import Finding, listing
from zkl_debug.logprobs.noise import is_rounding
from zkl_debug.logprobs.table import I64, Bools
from zkl_debug.logprobs.view import View
from zkl_debug.schema import Json

#: A row is gross when it is this many times further off than any row that is not.
GAP = 8.0
#: ... and at least this far off, in nats, unless every other row is bit-equal or equal to rounding.
FLOOR = 0.05
#: At most this share of the rows can be gross: more are not outliers.
MAX_SHARE = 0.25
#: An edge that does not stand out is allowed where the other side gives its token at least this probability: there the
#: sampled token can have been the prompt's token.
PLAUSIBLE = 0.1
#: Prefill chunks that are seen at one edge only must be a multiple of this many tokens (or be seen otherwise).
GRANULE = 8
_AGREES = "engine_steps_agree_with_suspect"
_MIN_ONE_SIDED = 5  # rows that all lean to one side: by chance once in 16 times
_MIN_CARRIED = 3
_CARRIED_SHARE = 0.9


@dataclass(frozen=True)
class _Place:
    name: str
    text: str
    evidence: dict[str, Json]


def gross_rows(view: View) -> Bools:
    """Rows that stand out from all others by a gap in |delta|; none where the differences form one continuum."""
    none = np.zeros(len(view), np.bool_)
    gap = view.gap
    loud = view.differs & ~is_rounding(view)
    rest = view.differs & ~loud
    limit = math.floor(MAX_SHARE * len(view))
    if not loud.any():
        return none
    if int(loud.sum()) <= limit and float(gap[loud].min()) >= GAP * (float(gap[rest].max()) if rest.any() else 0.0):
        return loud
    ordered = np.sort(gap)[::-1]
    for count in range(1, min(limit, ordered.shape[0] - 1) + 1):
        if ordered[count - 1] < FLOOR:
            return none
        if ordered[count - 1] >= GAP * ordered[count]:
            return np.asarray(gap >= ordered[count - 1])
    return none


def label_fault(view: View) -> Finding | None:
    """Single gross rows at a chunk edge or at the end of each sequence, all else equal or as near as everywhere."""
    gross = gross_rows(view)
    if not _stands_alone(view, gross) or not _can_be_two_tokens(view, gross):
        return None
    place = _chunk_edges(view, gross) or _sequence_ends(view, gross) or _prompt_rows(view, gross)
    if place is None:
        return None
    side = _higher(view, gross)
    rest = view.gap[~gross]
    positions = np.unique(view.position[gross]).tolist()
    steps = _engine_steps(view, side)
    also = f"; side {side} is the suspect, its value is that of a likelier token" if side else ""
    also += " and its engine ran more steps for the same tokens" if steps.get(_AGREES) else ""
    others = "bit-equal" if not view.differs[~gross].any() else f"at most {float(rest.max()):.2g} apart"
    return Finding(
        "label-fault",
        f"{place.text}: the log-prob of another token (a label fault, not numerics); the other "
        f"{int((~gross).sum())} rows are {others}{also}",
        {
            "place": place.name,
            "positions": positions,
            "logits_rows": [p - 1 for p in positions],
            "rows": _rows(view, gross),
            "suspect": side,
            "largest_elsewhere": float(rest.max()) if rest.size else 0.0,
            "median_elsewhere": float(np.median(rest)) if rest.size else 0.0,
            **place.evidence,
            **steps,
        },
        gross,
        proof="the logits of the row before are equal on both sides; gather the right token's log-prob from them",
        capture=("output_layer:out", "logprobs/*"),
    )


def isolated(view: View) -> Finding | None:
    """Single gross rows in no recognised place; stated as seen, without a cause."""
    gross = gross_rows(view)
    if not _stands_alone(view, gross) or label_fault(view) is not None:
        return None
    return Finding(
        "isolated-rows",
        f"{int(gross.sum())} row(s) stand out and the rows right after them do not: not state that is carried on "
        f"(positions {listing(np.unique(view.position[gross]).tolist())})",
        {"rows": _rows(view, gross), "two_tokens_possible": _can_be_two_tokens(view, gross)},
        gross,
        proof="compare the logits of the row before: equal logits make it a label, a gather or a buffer",
        capture=("output_layer:out", "logprobs/*"),
    )


def carried_forward(view: View) -> Finding | None:
    """In the affected sequences nearly everything from the first difference on differs, and clean sequences exist."""
    rows = np.flatnonzero(view.differs)
    bad, at = np.unique(view.sequence[rows], return_index=True)
    if bad.shape[0] == 0:
        return None
    first = rows[at]
    start = np.full(int(view.sequence[-1]) + 1, len(view), np.int64)
    start[bad] = first
    index = np.arange(len(view))
    after = index > start[view.sequence]
    before = np.isin(view.sequence, bad) & (index < start[view.sequence])
    clean_sequences = start.shape[0] - int(bad.shape[0])
    if not (clean_sequences or before.any()):
        return None
    per_sequence = np.bincount(view.sequence[after], minlength=start.shape[0])[bad]
    if int(per_sequence.max(initial=0)) < _MIN_CARRIED or float(view.differs[after].mean()) < _CARRIED_SHARE:
        return None
    from_start = not view.rank[first].any()
    where = "their first valid token" if from_start else f"position {listing(np.unique(view.position[first]).tolist())}"
    return Finding(
        "carried-forward",
        f"{bad.shape[0]} sequence(s) differ from {where} on and stay different: state that is carried along (KV, SSM, "
        f"weights or positions), not a label or one row",
        {
            "sequences": int(bad.shape[0]),
            "clean_sequences": clean_sequences,
            "from_first_valid_token": from_start,
            "share_after": float(view.differs[after].mean()),
        },
        np.asarray(view.differs & np.isin(view.sequence, bad)),
        proof="compare K and V (or the SSM state) of the rows before the first difference with those of training",
        capture=("*core_attention:in*", "*mixer*", "embedding*"),
    )


def _stands_alone(view: View, gross: Bools) -> bool:
    """Whether gross rows are far off and have neighbours in their sequence, none of them gross."""
    if not gross.any() or float(np.median(view.gap[gross])) < FLOOR:
        return False
    # Rows are sorted: a neighbour in the sequence can only be the row before or after.
    touching = (view.sequence[1:] == view.sequence[:-1]) & (view.position[1:] == view.position[:-1] + 1)
    if (touching & gross[1:] & gross[:-1]).any():
        return False
    alone = (view.rank == 0) & (view.from_end == 0)
    return not bool(alone[gross].any())


def _can_be_two_tokens(view: View, gross: Bools) -> bool:
    """Two tokens of one distribution cannot have probabilities that add up to more than 1."""
    a, b = view.a[gross].astype(np.float64), view.b[gross].astype(np.float64)
    if not (np.isfinite(a) & np.isfinite(b)).all():
        return False
    return bool((np.exp(a) + np.exp(b) <= 1.0 + 1e-6).all())


def _chunk_edges(view: View, gross: Bools) -> _Place | None:
    """All gross rows are prompt tokens right after a multiple of one chunk size, and no such edge is missing.

    One edge alone could be anywhere. It counts when the chunk is a multiple of :data:`GRANULE`, or when the engine ran
    more steps on the side whose value is too likely.
    """
    known = bool(view.generated.any() and not view.generated.all())
    if known and view.generated[gross].any():
        return None
    chunk = int(np.gcd.reduce(view.position[gross]))
    if chunk < 2:
        return None
    edge = (view.position >= 1) & (view.position % chunk == 0) & ~(view.generated & known)
    missed = edge & ~gross
    likely = np.exp(np.maximum(view.a, view.b).astype(np.float64)) >= PLAUSIBLE
    if (missed & ~likely).any() or int(gross.sum()) <= int(missed.sum()):
        return None
    positions = np.unique(view.position[gross]).tolist()
    if len(positions) == 1 and chunk % GRANULE and not _engine_steps(view, _higher(view, gross)).get(_AGREES):
        return None
    one = "exactly one position" if len(positions) == 1 else f"exactly {len(positions)} positions"
    kind = "prompt position" if known else "position"
    text = (
        f"{one.replace('position', kind)} ({listing(positions)}, scored by the logits of token "
        f"{listing([p - 1 for p in positions])}) at the edge of a prefill chunk of {chunk} tokens"
    )
    evidence: dict[str, Json] = {"chunk": chunk, "edges": int(edge.sum()), "edges_hit": int(gross.sum())}
    return _Place("chunk-edge", text, evidence)


def _sequence_ends(view: View, gross: Bools) -> _Place | None:
    """The gross rows are the last row of every sequence (at least two)."""
    ends = view.from_end == 0
    if int(gross.sum()) < 2 or not (gross == ends).all():
        return None
    text = f"the last position of each of the {int(ends.sum())} sequences, and no other"
    return _Place("sequence-end", text, {"sequences": int(ends.sum())})


def _prompt_rows(view: View, gross: Bools) -> _Place | None:
    """Single prompt rows without a common chunk size (chunks that share a token budget), all likelier on one side."""
    known = bool(view.generated.any() and not view.generated.all())
    if not known or view.generated[gross].any():
        return None
    if int(gross.sum()) < _MIN_ONE_SIDED or _higher(view, gross) is None:
        return None
    positions = np.unique(view.position[gross]).tolist()
    text = (
        f"{int(gross.sum())} single prompt positions ({listing(positions)}) and nothing after them, always the "
        "likelier value on one side, as where a prefill chunk ends (no common chunk size)"
    )
    return _Place("single-prompt-rows", text, {"sequences": int(np.unique(view.sequence[gross]).shape[0])})


def _higher(view: View, gross: Bools) -> str | None:
    """The side whose value is the likelier one on every gross row: what a wrong, sampled label looks like."""
    sign: I64 = np.unique(np.sign(view.delta[gross])).astype(np.int64)
    if sign.shape[0] != 1:
        return None
    return view.sides[0] if int(sign[0]) > 0 else view.sides[1]


def _rows(view: View, rows: Bools) -> list[Json]:
    at = np.flatnonzero(rows)[:16].tolist()
    return [
        {
            "step": int(view.step[r]),
            "sample": int(view.sample[r]),
            "position": int(view.position[r]),
            "token": int(view.token[r]),
            view.sides[0]: float(view.a[r]),
            view.sides[1]: float(view.b[r]),
        }
        for r in at
    ]


def _engine_steps(view: View, side: str | None) -> dict[str, Json]:
    """Engine steps of both runs, where the files have them: the one that chunked its prompt needs more."""
    ours, theirs = (view.meta.get(key, {}).get("engine_steps") for key in ("a", "b"))
    if not ours or not theirs:
        return {}
    more = {s: ours[s] - theirs[s] for s in ours if s in theirs}
    label = {True: view.sides[0], False: view.sides[1]}
    agree = bool(side) and all(d != 0 and label[d > 0] == side for d in more.values())
    return {"more_engine_steps_in_a": more, _AGREES: agree}
