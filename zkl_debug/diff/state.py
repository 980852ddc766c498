"""Which state of the engine is not what the trainer's weights ask for, and which event is to answer for it.

Pure functions over the moments of an event log (:mod:`zkl_debug.capture.events` makes them, a capture keeps them):
digests decide, and values, where the caller still has them, explain. Three kinds of state:

- parameters and persistent buffers, compared with the trainer's by name, now and under every version that was seen;
- caches derived from a parameter, compared with functions of it under every version;
- KV blocks that can still be found: old when nothing was written into them since before the last weight update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from zkl_debug.diff.state_kept import find_blocks, find_caches, freed_blocks
from zkl_debug.diff.state_model import (
    GEN,
    REFIT,
    TRAIN,
    Bits,
    EventRef,
    MomentLike,
    StateFinding,
    StoredMoment,
    ValueSource,
    bits_of,
    confirmed,
    is_read,
    ref_of,
    stored_moments,
    versions,
)
from zkl_debug.diff.state_values import Match, Source, explain_values
from zkl_debug.schema import StateRecord

__all__ = [
    "EventRef",
    "StateFinding",
    "StoredMoment",
    "confirmed",
    "freed_blocks",
    "state_findings",
    "stored_moments",
]


def state_findings(moments: Sequence[MomentLike], at: int, values: ValueSource | None = None) -> list[StateFinding]:
    """Everything in the engine that is not as the trainer's weights ask for at moment ``at``.

    Args:
        moments: the log, in order; those without state are passed over.
        at: index of the moment in question (the beginning of the generation that diverged).
        values: tensors the caller still has, to explain what digests cannot.
    """
    history = [m for m in moments[: at + 1] if m.state]
    if not history or history[-1] is not moments[at]:
        return []
    return [
        *_parameters(history, values),
        *find_caches(history, values, _used_until(moments, at)),
        *find_blocks(history),
    ]


def _used_until(moments: Sequence[MomentLike], at: int) -> MomentLike | None:
    """The next moment with state under the same weights, in the same step: what the generation left behind."""
    now = moments[at]
    return next((m for m in moments[at + 1 :] if m.state and (m.step, m.version) == (now.step, now.version)), None)


def _parameters(history: Sequence[MomentLike], values: ValueSource | None) -> list[StateFinding]:
    now = history[-1]
    known = versions(history)
    by_bits = {
        bits: Source(path, version)
        for path, seen in known.items()
        for version, bits in sorted(seen.items())
        if now.state.get(TRAIN + path) is not None and now.state[TRAIN + path].kind != "cache"
    }
    found = []
    for name, record in now.state.items():
        path = name.removeprefix(GEN)
        if not name.startswith(GEN) or record.kind not in ("parameter", "buffer") or not is_read(record):
            continue
        wanted = known.get(path, {}).get(now.version)
        if wanted is None or wanted == bits_of(record):
            continue
        source = _version_of(record, known.get(path, {}), path) or by_bits.get(bits_of(record))
        match, strength = Match("equal", source) if source else Match("none"), "digest"
        if source is None and values is not None:
            match, strength = _explain(path, now.version, known, values), "bytes"
        role, event = _blame(history, name, path, known)
        found.append(StateFinding(path, record.kind, match, now.version, role, event, strength))
    return found


def _version_of(record: StateRecord, seen: Mapping[int, Bits], path: str) -> Source | None:
    equal = [version for version, bits in seen.items() if bits == bits_of(record)]
    return Source(path, max(equal)) if equal else None


def _explain(path: str, current: int, known: Mapping[str, Mapping[int, Bits]], values: ValueSource) -> Match:
    found = values.engine(path)
    if found is None:
        return Match("none")
    order = sorted(known.get(path, {}), key=lambda version: abs(current - version))
    candidates = [(Source(path, v), values.trainer(path, v)) for v in order]
    return explain_values(found, [(source, got) for source, got in candidates if got is not None])


def _blame(
    history: Sequence[MomentLike], name: str, path: str, known: Mapping[str, Mapping[int, Bits]]
) -> tuple[str, EventRef | None]:
    """The event that made a tensor of the engine wrong, or should have made it right and did not.

    The time from one refit to the next is right or wrong as a whole; the answer is the first of the wrong ones that
    were never put right again.
    """
    ends = [i for i, m in enumerate(history) if m.name == REFIT and m.phase == "end"]
    answer: tuple[str, EventRef | None] = ("unknown", None)
    is_wrong = False
    for start, stop in pairwise([0, *ends, len(history)]):
        found = _wrong_from(history[: stop if stop < len(history) else None], start, name, known.get(path, {}))
        if found is not None and not is_wrong:
            answer = found
        is_wrong = found is not None
    return answer


def _wrong_from(
    history: Sequence[MomentLike], start: int, name: str, seen: Mapping[int, Bits]
) -> tuple[str, EventRef] | None:
    """What made the tensor wrong between a refit (or the build) and the end of ``history``; None when it was right."""
    refit = history[start]
    after, wanted = refit.state.get(name), seen.get(refit.version)
    if after is None:
        return None
    if wanted is None or bits_of(after) == wanted:
        changed = _first_change(history, name, start)
        return ("changed", ref_of(changed)) if changed else None
    before = next((m.state[name] for m in reversed(history[:start]) if name in m.state), None)
    if refit.name != REFIT:
        return "unknown", ref_of(refit)
    return ("left" if before is not None and bits_of(before) == bits_of(after) else "wrote"), ref_of(refit)


def _first_change(history: Sequence[MomentLike], name: str, start: int) -> MomentLike | None:
    """The first moment after ``start`` at which the tensor is another than just before."""
    previous = history[start].state.get(name)
    for moment in history[start + 1 :]:
        record = moment.state.get(name)
        if record is not None and previous is not None and bits_of(record) != bits_of(previous):
            return moment
        previous = record or previous
    return None
