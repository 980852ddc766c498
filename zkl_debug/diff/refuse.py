"""Reasons not to compare two captures. Each check returns a :class:`Refusal`, or None when it is satisfied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zkl_debug.diff.compare import SiteRows, gather
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.edges import Pairs, named_row
from zkl_debug.diff.kinds import SiteKinds
from zkl_debug.diff.model import PHASE_EDGES, CaptureLike, Ints, Refusal, fact, refuse
from zkl_debug.diff.rows import RowSpace
from zkl_debug.diff.sites import SitePair
from zkl_debug.errors import ZklError
from zkl_debug.schema import Json, Phase, row_phase

_LISTED = 10


def from_error(error: ZklError, name: str) -> Refusal:
    """A capture that cannot be opened or read."""
    text = f"capture {name} is not valid: {error.found}"
    return refuse("capture-invalid", text, error.found, error.expected, error.next_step, capture=name)


def check_probe(name: str, capture: CaptureLike) -> Refusal | None:
    """The probe failed while it recorded."""
    probe = fact(capture, "probe")
    if not isinstance(probe, Mapping) or probe.get("ok", True):
        return None
    errors = [str(error) for error in probe.get("errors") or ()]
    return refuse(
        "probe-failed",
        f"the probe of {name} failed while recording, so its capture is incomplete",
        errors[0] if errors else "probe.ok is false",
        "a probe that ran to the end",
        "capture again with --strict to see where the probe fails",
        capture=name,
        errors=errors[:_LISTED],
    )


def check_same(comparison: Comparison) -> Refusal | None:
    """A capture against itself or a copy of it, without rows of two phases: everything is equal and nothing is said."""
    a, b = comparison.a, comparison.b
    same = a is b or (a.manifest.get("id") is not None and a.manifest.get("id") == b.manifest.get("id"))
    place = getattr(a, "place", None)
    same = same or (place is not None and place == getattr(b, "place", None))
    if not same or any(comparison.edge_compared[edge].any() for edge in PHASE_EDGES):
        return None
    return refuse(
        "same-capture",
        "A and B are the same capture, or copies of it",
        "one run on both sides, with rows of one phase only: all of them are equal to themselves",
        "two captures, or one that holds scoring and generation",
        "give the capture of the other side",
    )


def check_self_test(name: str, capture: CaptureLike) -> Refusal | None:
    """The digests of a capture did not notice a bit that was flipped on purpose."""
    tests = fact(capture, "self_test")
    failed = [str(test) for test, good in tests.items() if good is False] if isinstance(tests, Mapping) else []
    if not failed:
        return None
    return refuse(
        "self-test-failed",
        f"the digests of {name} did not change when a tensor did: what it holds may be equal to anything",
        f"self-test of the digests failed ({', '.join(failed)}): a flipped bit was not seen",
        "a digest that sees one flipped bit",
        "look for a cache or an alias in the way the digests are made, then capture again",
        capture=name,
        tests=failed,
    )


def check_switches(name: str, capture: CaptureLike) -> Refusal | None:
    """A switch that was asked for and is off in what ran."""
    requested, effective = fact(capture, "switches_requested"), fact(capture, "switches")
    if not isinstance(requested, list) or not isinstance(effective, Mapping):
        return None
    off = [str(switch) for switch in requested if effective.get(switch) is False]
    if not off:
        return None
    return refuse(
        "switch-not-effective",
        f"switch {', '.join(off)} was requested on in {name} and is off in effect",
        f"requested on, effective off: {', '.join(off)}",
        "a switch that is set before the thing it changes is built or read",
        "set it before the model is built, or before the process starts when it is an environment variable",
        capture=name,
        switches=off[:_LISTED],
    )


def _flag(capture: CaptureLike, test: str) -> bool | None:
    repeat = fact(capture, "self_repeat")
    entry = repeat.get(test) if isinstance(repeat, Mapping) else None
    equal = entry.get("equal") if isinstance(entry, Mapping) else None
    return None if equal is None else bool(equal)


def certification(capture: CaptureLike) -> dict[str, bool | None]:
    """Self-certification of a capture: plain run against plain run, plain run against probed run; None if not done."""
    return {test: _flag(capture, test) for test in ("a0_a1", "a0_a2")}


def only_scores(capture: CaptureLike) -> bool:
    """Whether a capture is of a training forward: it has score rows only."""
    return bool((row_phase(capture.rows["flags"].astype(np.uint32)) == Phase.SCORE).all())


def check_repeat(name: str, capture: CaptureLike, stochastic: str | None) -> Refusal | None:
    """A side that does not repeat itself, or that the probe changed.

    A training side that does not repeat is refused: there is nothing to compare with. Any other side makes the
    comparison inconclusive. In neither case is a layer blamed.

    Args:
        name: ``A`` or ``B``.
        capture: the capture.
        stochastic: first site that differs between two rows of the same prefix and phase on this side, if any.
    """
    flags = certification(capture)
    train = only_scores(capture)
    if flags["a0_a1"] is False:
        side = "train" if train else capture.side or name
        where = f"; first operator that varies: {stochastic}" if stochastic else "; no row is there twice to say where"
        refusal = refuse(
            "does-not-repeat",
            f"{side} does not repeat: two plain runs of {name} gave different log-probs{where}",
            "A0 and A1, two runs without a probe, differ",
            "two runs of the same inputs with equal outputs (no dropout, no sampling, deterministic kernels)",
            "make the side repeatable first (dropout off, fixed seeds), then capture again",
            capture=name,
            first_stochastic=stochastic,
        )
        return refusal if train else _inconclusive(refusal)
    if flags["a0_a2"] is False:
        return refuse(
            "probe-changes-results",
            f"the probe changed what {name} computes: a plain and a probed run differ",
            "A0 (plain) and A2 (probed) differ",
            "equal log-probs with and without the probe",
            "capture at digest level with fewer --sites, and report this as a defect of the probe",
            capture=name,
        )
    return None


def _inconclusive(refusal: Refusal) -> Refusal:
    values = (refusal.code, refusal.text, refusal.found, refusal.expected, refusal.next, refusal.detail)
    return Refusal(*values, inconclusive=True)


def check_overlap(space: RowSpace, sites: Sequence[SitePair]) -> Refusal | None:
    """Nothing to compare: no row key, or no site, on both sides."""
    next_step = "capture both sides from the same token ids; see zkl-debug inspect A, zkl-debug inspect B"
    if not space.matched.any():
        first = [_first_token(space, side) for side in (0, 1)]
        steps = [sorted({int(s) for s in np.unique(space.step[space.side == side])})[:5] for side in (0, 1)]
        found = f"A starts with {first[0]} at steps {steps[0]}, B with {first[1]} at steps {steps[1]}"
        text = "no row of A has the same token prefix as a row of B"
        return refuse("no-rows-matched", text, found, "rows of the same tokens on both sides", next_step)
    if not any(pair.matched and not pair.is_input for pair in sites):
        names = [next((pair.name for pair in sites if pair.on == side), "nothing") for side in ("a", "b")]
        found = f"A has {names[0]} ..., B has {names[1]} ..."
        return refuse("no-sites-matched", "no site has the same name on both sides", found, "common sites", next_step)
    return None


def _first_token(space: RowSpace, side: int) -> str:
    rows = np.flatnonzero((space.side == side) & (space.position == space.position[space.side == side].min(initial=0)))
    return f"token {int(space.token[rows[0]])} at position {int(space.position[rows[0]])}" if len(rows) else "no row"


_INPUT_CODES = (("token", "token-ids-differ"), ("position", "positions-differ"), ("mask", "masks-differ"))


def check_input_site(
    pair: SitePair, where: SiteRows, space: RowSpace, pairs: Pairs, kinds: SiteKinds
) -> Refusal | None:
    """What was fed to the model differs between rows of the same key."""
    differs = np.flatnonzero(kinds.differs)
    if not len(differs):
        return None
    across = differs[pairs.sides[differs] == 2]
    differs = across if len(across) else differs
    what = pair.parsed.op or pair.parsed.operator
    code = next((code for word, code in _INPUT_CODES if word in what), "inputs-differ")
    named = named_row(space, pairs.left, pairs.right)[differs]
    first = int(differs[np.lexsort((space.sample[named], space.position[named], space.step[named]))[0]])
    row = int(named_row(space, pairs.left[first : first + 1], pairs.right[first : first + 1])[0])
    sample, position = int(space.sample[row]), int(space.position[row])
    rows = len(np.unique(pairs.key[differs]))
    detail: dict[str, Json] = {"site": pair.name, "sample": sample, "position": position, "rows": rows}
    detail |= _fed_values(pair, where, space, pairs, differs, first, code)
    values = f": {detail['a']} on one side, {detail['b']} on the other" if "a" in detail else ""
    always = f", always by {detail['shift']}" if "shift" in detail else ""
    if "shift_of_sample" in detail:
        shifts = ", ".join(f"sample {s} by {n}" for s, n in list(detail["shift_of_sample"].items())[:4])
        always = f", in each sequence by a number of its own ({shifts}): is padding on the left counted on one side?"
    return refuse(
        code,
        f"{what.replace('_', ' ')} differ at sample {sample} position {position}{values}",
        f"{rows} row(s) of {pair.name} differ{always}",
        "both sides fed the same: layers cannot be blamed while their inputs differ",
        "check padding, position ids and masks where the batch is built, then capture again",
        **detail,
    )


def _fed_values(
    pair: SitePair, where: SiteRows, space: RowSpace, pairs: Pairs, differs: Ints, first: int, code: str
) -> dict[str, Json]:
    """The two values at the first difference, and their distance when it is the same everywhere, or in each sample."""
    differs = differs[where.bits[pairs.left[differs]] & where.bits[pairs.right[differs]]]
    if pair.differ or first not in differs:
        return {}
    left, right = (gather(pair, where, space, rows[differs]) for rows in (pairs.left, pairs.right))
    if left.shape[1] != 1 or left.dtype.itemsize != 8:
        return {}
    a, b = left[:, 0].view(np.int64), right[:, 0].view(np.int64)
    at = int(np.flatnonzero(differs == first)[0])
    values: dict[str, Json] = {"a": int(a[at]), "b": int(b[at])}
    gaps = np.unique(b - a)
    if len(gaps) == 1:
        values["shift"] = int(gaps[0])
        return values
    samples = space.sample[named_row(space, pairs.left, pairs.right)[differs]]
    by_sample = {int(sample): np.unique((b - a)[samples == sample]) for sample in np.unique(samples)}
    if code == "positions-differ" and all(len(shifts) == 1 for shifts in by_sample.values()):
        values["shift_of_sample"] = {str(sample): int(shifts[0]) for sample, shifts in by_sample.items()}
    return values
