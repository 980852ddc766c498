"""Zoom into one operator: the run that made the captures is made again, with every tensor operator inside it traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.beds.rebuild import recipe_of, run_again
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.edges import named_row
from zkl_debug.diff.flow import is_inside_mixer
from zkl_debug.diff.model import EDGE_PRIORITY, Ints
from zkl_debug.diff.run import diff_captures
from zkl_debug.diff.streams import Aligned, Op, align, roundings
from zkl_debug.diff.suggest import looked_into
from zkl_debug.errors import ExitCode, Refused, UsageError, ZklError
from zkl_debug.schema import Json, Phase, SiteKind, parse_site

if TYPE_CHECKING:
    from zkl_debug.beds.run import BedContext
    from zkl_debug.capture.layout import RowView
    from zkl_debug.capture.trace import OpTrace, Place, TracedOp

Say = Callable[[str], None]
_ROWS = 6  # pairs of the same two calls that must agree on an anchor


class NothingToZoomError(ZklError):
    """The captures are identical: no operator parts them."""

    exit_code = ExitCode.OK


@dataclass(frozen=True)
class Row:
    """One row of a call: its key in the frame, and its digest at the site as captured."""

    sample: int
    position: int
    digest: tuple[int, int]


@dataclass
class Target:
    """One call to trace.

    Attributes:
        name: how the report calls it, e.g. ``A (score)``.
        side: side of the bed.
        frame: number of the forward in its capture.
        rows: rows to look at, the one of interest first.
        ops: what ran, filled in by the trace.
        inputs: digests of the values of the operator's inputs, by port and row.
        seen: the site's digest of the first row in the traced run; ``results``: digests of its values, by row.
    """

    name: str
    side: str
    frame: int
    rows: tuple[Row, ...]
    ops: list[TracedOp] = field(default_factory=list)
    inputs: dict[str, list[str]] = field(default_factory=dict)
    seen: tuple[int, int] | None = None
    results: list[str] = field(default_factory=list)

    @property
    def reproduced(self) -> bool:
        """Whether the traced call gave what its capture holds."""
        return self.seen == self.rows[0].digest


@dataclass(frozen=True)
class Zoom:
    """Both streams inside one operator, aligned.

    Attributes:
        site, edge: what was looked into.
        sample, position, token: the row.
        differs: the site differs in this row.
        names: the two calls.
        frames: their numbers.
        reproduced: each traced call gave its captured output again.
        aligned: the streams.
        inputs: ports of the operator, and whether their values are equal on both sides in every row looked at.
        notes: what the trace could not see.
    """

    site: str
    edge: str
    sample: int
    position: int
    token: int
    differs: bool
    names: tuple[str, str]
    frames: tuple[int, int]
    reproduced: tuple[bool, bool]
    aligned: Aligned
    inputs: Mapping[str, bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether an operator is named on each side."""
        return all(op is not None for op in self.aligned.first)

    @property
    def roundings(self) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """Results in a narrow dtype that the other side does not have, on each side."""
        (left, right), (one, two) = self.aligned.matched, self.aligned.results
        return roundings(self.aligned.left, left, one), roundings(self.aligned.right, right, two)

    def to_json(self) -> dict[str, Json]:
        """The document of ``zkl-debug zoom --json`` (format ``zkl-zoom``, version 1)."""
        first, relation = self.aligned.first, self.aligned.relation
        told: Json = None
        if relation is not None:
            told = {
                "left": relation.left.to_json(),
                "right": relation.right.to_json(),
                "text": relation.text,
                "equal_after_rounding_to": relation.equal_after,
                "largest": relation.largest,
                "elements": relation.elements,
            }
        return {
            "format": "zkl-zoom",
            "version": 1,
            "site": self.site,
            "edge": self.edge,
            "row": {"sample": self.sample, "position": self.position, "token": self.token},
            "differs": self.differs,
            "calls": [
                {"name": name, "frame": frame, "reproduced": same}
                for name, frame, same in zip(self.names, self.frames, self.reproduced, strict=True)
            ],
            "first": [None if op is None else op.to_json() for op in first],
            "relation": told,
            "inputs": dict(self.inputs),
            "anchors": [[one.to_json(), two.to_json()] for one, two in self.aligned.anchors],
            "streams": [
                [{**op.to_json(), "equals": found.get(op.index)} for op in ops]
                for ops, found in zip((self.aligned.left, self.aligned.right), self.aligned.matched, strict=True)
            ],
            "roundings": [[op.to_json() for op in ops] for ops in self.roundings],
            "notes": list(self.notes),
        }


def zoom(a: Path, b: Path, site: str | None = None, say: Say | None = None) -> Zoom:
    """Trace the operators inside one site on both sides, in the calls of its first differing row.

    Args:
        a, b: captures of one run of a bed.
        site: canonical name of an output; default the first site that differs.
        say: told what happens.

    Raises:
        Refused: the captures cannot be compared, or are not from one run of a bed.
        UsageError: no such site, or nothing runs inside it.
        NothingToZoomError: the captures are identical.
    """
    say = say or (lambda _text: None)
    say("comparing")
    verdict = diff_captures(a, b)
    if verdict.comparison is None:
        assert verdict.refusal is not None
        raise Refused(verdict.refusal.text, "captures that can be compared", f"zkl-debug diff {a} {b}")
    comparison = verdict.comparison
    if verdict.first is None:
        raise NothingToZoomError("identical, nothing to zoom", "two captures that diverge", f"zkl-debug diff {a} {b}")
    if site is None and not verdict.by_rows:
        raise UsageError(f"{verdict.first.site} is no operator of a forward, nothing runs inside it", "--site SITE")
    name = site or looked_into(comparison, verdict.first)
    recipe = recipe_of(a, b)
    index = _site(comparison, name)
    edge, pairs = _pairs(comparison, index, verdict.edge)
    targets = tuple(_target(comparison, index, pairs, right) for right in (False, True))
    probe = _Probe(comparison.sites[index].name, comparison, targets)
    run_again(recipe, {side: functools.partial(probe.attached, side=side) for side in _sides(targets)}, say)
    return _told(comparison, index, edge, pairs, targets, tuple(probe.notes))


def _sides(targets: Sequence[Target]) -> list[str]:
    return sorted({target.side for target in targets})


def _site(comparison: Comparison, name: str) -> int:
    names = [pair.name for pair in comparison.sites]
    if name not in names:
        import difflib

        near = difflib.get_close_matches(name, names, 3, 0.5) or names[:3]
        raise UsageError(f"no site {name} in both captures", f"e.g. {', '.join(near)}", "zkl-debug inspect A")
    if parse_site(name).is_input:
        raise UsageError(f"{name} is an input: nothing computes it", "the output of an operator, SITE:out")
    if comparison.sites[names.index(name)].meta.semantic in ("label", "selected"):
        raise UsageError(
            f"{name} is looked up, not computed", "the output of an operator, e.g. logprobs/log_softmax:out.0"
        )
    pair = comparison.sites[names.index(name)]
    kinds = {site.meta.semantic.startswith("quantised") for site in (pair.a, pair.b) if site is not None}
    if pair.differ and True in kinds:
        product = f"{pair.parsed.module}:out"
        raise UsageError(f"{name}: {pair.differ}; one side does not run it", f"the product it is for: --site {product}")
    if is_inside_mixer(comparison.sites[names.index(name)].meta.semantic):
        raise UsageError(
            f"{name} runs over whole sequences inside a mixer: its operators have no rows to follow",
            "the explanation of the diff, which recomputes it from its captured inputs, or an operator elsewhere",
            "zkl-debug diff A B",
        )
    return names.index(name)


def _pairs(comparison: Comparison, site: int, preferred: str | None) -> tuple[str, Ints]:
    """(edge, pairs of the first differing pair's two calls, that pair first); pairs that agree where none differ."""
    kinds, pairs = comparison.done[site], comparison.pairs
    order = [*([preferred] if preferred else []), *(edge for edge in EDGE_PRIORITY if edge in pairs.slices)]
    for wanted in (kinds.differs, kinds.present):
        for edge in order:
            part = pairs.slices[edge]
            hits = part.start + np.flatnonzero(wanted[part])
            if len(hits):
                return edge, _same_calls(comparison, hits)
    raise UsageError("no row of the site was compared", "a site recorded on both sides for the same rows")


def _same_calls(comparison: Comparison, hits: Ints) -> Ints:
    """Of the pairs those of the same two calls as the first, spread over the positions, at most ``_ROWS``."""
    space, pairs = comparison.space, comparison.pairs
    # A row that reads several keys tells more than the first one.
    late = np.flatnonzero(space.position[pairs.left[hits]] >= min(4, int(space.position[pairs.left[hits]].max())))
    first = hits[late[0]]
    same = (space.frame[pairs.left[hits]] == space.frame[pairs.left[first]]) & (
        space.frame[pairs.right[hits]] == space.frame[pairs.right[first]]
    )
    others = hits[same & (hits != first)]
    return np.concatenate([[first], others[:: max(1, len(others) // (_ROWS - 1))][: _ROWS - 1]])


def _target(comparison: Comparison, site: int, chosen: Ints, right: bool) -> Target:
    space = comparison.space
    rows = (comparison.pairs.right if right else comparison.pairs.left)[chosen]
    side = int(space.side[rows[0]])
    capture = (comparison.a, comparison.b)[side]
    where = comparison.where(site)
    digest = where.digest[where.index(space, rows)]
    phase = Phase(int(space.phase[rows[0]])).name.lower()
    keys = tuple(
        Row(int(space.sample[row]), int(space.position[row]), (int(d[0]), int(d[1])))
        for row, d in zip(rows, digest, strict=True)
    )
    return Target(f"{'AB'[side]} ({phase})", capture.side, int(space.frame[rows[0]]), keys)


class _Probe:
    """Stands where teacher forcing stands in a session: opens the trace at an input, closes it at the output."""

    def __init__(self, site: str, comparison: Comparison, targets: Sequence[Target]) -> None:
        self.site, self.parsed = site, parse_site(site)
        self.targets = targets
        self.notes: list[str] = []
        self.begins = self._begins(comparison)
        self._capture: Any = None
        self._trace: OpTrace
        self._side = ""

    def _begins(self, comparison: Comparison) -> str:
        """Whose inputs open the trace: the operator's own or, where it has none, those of the module it runs in."""
        owner = self.parsed.owner
        for candidate in (owner, self.parsed.module, self.parsed.path):
            if any(pair.parsed.owner == candidate and pair.parsed.is_input for pair in comparison.sites):
                if candidate != owner:
                    self.notes.append(f"{owner} has no input site: traced from the start of {candidate}")
                return candidate
        raise UsageError(f"{self.site} has no captured input", "an operator with an input site", "zkl-debug inspect A")

    @contextmanager
    def attached(self, context: BedContext, side: str) -> Iterator[None]:
        """Observe one side inside the block."""
        from zkl_debug.capture.api import Capture
        from zkl_debug.capture.trace import OpTrace, triton_launches

        self._side = side
        patterns = {f"{_escaped(o.split('#')[0])}:*" for o in (self.parsed.owner, self.begins)}
        capture = Capture(context.model, None, side, strict=True, sites=sorted(patterns), forcing=self)
        with capture, OpTrace() as self._trace, triton_launches(self._trace):
            self._capture = capture
            capture.adapter.prompt_lens.update(context.prompt_lens)  # type: ignore[union-attr]
            yield
            self.notes += self._trace.errors

    def visit(self, name: str, view: RowView, kind: SiteKind, rows: NDArray[np.void], source: Any) -> None:  # noqa: ARG002
        """What the session sees of a site: see :meth:`zkl_debug.capture.forcing.Forcing.visit`."""
        from zkl_debug.capture.trace import place_of

        frame = self._capture.session.frame
        target = next((t for t in self.targets if t.side == self._side and t.frame == frame.index and not t.ops), None)
        if target is None:
            return
        parsed = parse_site(name)
        if parsed.owner == self.begins and parsed.is_input:
            places: list[Place | None] = [*_expert_places(name, view, rows, target)]
            places = places or [place_of(frame.rows, row.sample, row.position) for row in target.rows]
            if all(place is not None for place in places):
                target.inputs[parsed.port] = _values(target, view, rows)
                self._trace.open([place for place in places if place is not None])  # the last input opens it
        elif name == self.site and self._trace.is_open:
            self._close(target, view, rows)

    def _close(self, target: Target, view: RowView, rows: NDArray[np.void]) -> None:
        from zkl_debug.capture.layout import raw_rows
        from zkl_debug.digest import digest_array

        ops = self._trace.close()
        first = target.rows[0]
        at = np.flatnonzero((rows["sample"] == first.sample) & (rows["position"] == first.position))
        if len(at):
            digest = digest_array(raw_rows(view)[at[:1]])
            target.seen = int(digest[0, 0]), int(digest[0, 1])
        target.results = _values(target, view, rows)
        for each in self.targets:  # both rows of a pair may be of one call
            if each.side == target.side and each.frame == target.frame:
                each.ops, each.seen, each.inputs, each.results = ops, target.seen, target.inputs, target.results


def _expert_places(name: str, view: RowView, rows: NDArray[np.void], target: Target) -> list[Place]:
    """Places of the rows among those of one expert, which sees its own tokens alone; empty for any other site."""
    from zkl_debug.capture.trace import Place

    if ".local_experts." not in name or view.take is None:
        return []
    count = int(view.tensor.shape[0])
    found = []
    for row in target.rows:
        at = np.flatnonzero((rows["sample"] == row.sample) & (rows["position"] == row.position))
        if not len(at):
            return []
        # No axis is one of keys or of sequences there: the numbers that stand for them fit no size.
        found.append(Place(count, 1, int(view.take[at[0]]), 0, 0, 0, position=1 << 40, start=0))
    return found


def _values(target: Target, view: RowView, rows: NDArray[np.void]) -> list[str]:
    """Digest of the values of one input in each row of a target; empty where there is none."""
    from zkl_debug.capture.trace import value_digest

    found = []
    for row in target.rows:
        at = np.flatnonzero((rows["sample"] == row.sample) & (rows["position"] == row.position))
        take = at if view.take is None else view.take[at]
        told = value_digest(view.tensor[int(take[0])]) if len(take) else None
        found.append("" if told is None else told[0])
    return found


def _inputs_of(target: Target) -> tuple[frozenset[str], ...]:
    """Per row the digests of all inputs."""
    return tuple(frozenset(filter(None, row)) for row in zip(*target.inputs.values(), strict=True))


def _escaped(name: str) -> str:
    return name.replace("[", "[[]")


def _told(
    comparison: Comparison, site: int, edge: str, chosen: Ints, targets: Sequence[Target], notes: tuple[str, ...]
) -> Zoom:
    missing = [target.name for target in targets if not target.ops]
    if missing:
        raise Refused(
            f"the call of {', '.join(missing)} did not come by when the bed was run again, or nothing ran inside it",
            "a run that repeats itself",
            "zkl-debug capture again, then zoom into the new captures",
        )
    space, pairs = comparison.space, comparison.pairs
    row = int(named_row(space, pairs.left[chosen[:1]], pairs.right[chosen[:1]])[0])
    one, two = targets
    streams = [[_op(op) for op in target.ops] for target in targets]
    differs = bool(comparison.done[site].differs[chosen[0]])
    apart = (one.results, two.results) if differs else ((), ())  # all rows differ, or none
    aligned = align(streams[0], streams[1], (_inputs_of(one), _inputs_of(two)), apart)
    return Zoom(
        site=comparison.sites[site].name,
        edge=edge,
        sample=int(space.sample[row]),
        position=int(space.position[row]),
        token=int(space.token[row]),
        differs=differs,
        names=(one.name, two.name),
        frames=(one.frame, two.frame),
        reproduced=(one.reproduced, two.reproduced),
        aligned=aligned,
        inputs={
            port: one.inputs[port] == two.inputs[port]
            for port in one.inputs
            if port in two.inputs and any(one.inputs[port])
        },
        notes=notes,
    )


def _op(traced: TracedOp) -> Op:
    return Op(
        traced.index,
        traced.name,
        traced.dtype,
        traced.shape,
        traced.where.file,
        traced.where.line,
        traced.where.function,
        traced.inputs,
        tuple(traced.slices),
        traced.values,
        traced.related,
    )
