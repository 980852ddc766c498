"""Diff two captures: open, refuse or compare, and put the answer together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from zkl_debug.diff import handed as handed_over
from zkl_debug.diff.alone import Alone, nothing_twice, own_coverage
from zkl_debug.diff.answer import affected, edge_summaries
from zkl_debug.diff.buffers import check_buffers
from zkl_debug.diff.comparison import Comparison, Progress, compare
from zkl_debug.diff.coverage import Coverage, measure, never_forwarded
from zkl_debug.diff.explain import explain
from zkl_debug.diff.explain.gather_quantised import weights_in_other_form
from zkl_debug.diff.kinds import ReplayOracle
from zkl_debug.diff.model import WITHIN_EDGES, CaptureLike, Outcome, Refusal, Skip, refuse
from zkl_debug.diff.naming import Family, Joined, join_names
from zkl_debug.diff.processes import Processes
from zkl_debug.diff.refuse import (
    certification,
    check_input_site,
    check_overlap,
    check_probe,
    check_repeat,
    check_same,
    check_self_test,
    check_switches,
    from_error,
)
from zkl_debug.diff.sitework import Runner
from zkl_debug.diff.suggest import on_a_page, suggestions
from zkl_debug.diff.tokens import check_tokens
from zkl_debug.diff.verdict import Claim, Verdict, refused
from zkl_debug.diff.weights import check_weights
from zkl_debug.diff.world import fold, level
from zkl_debug.diff.world.report import check_ranks, lost_ranks, rank_report
from zkl_debug.diff.world.where import first_on_ranks
from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import Json

_NAMES = ("A", "B")
_LISTED = 10
Source = str | PathLike[str] | CaptureLike


def diff_captures(
    a: Source,
    b: Source | None = None,
    *,
    partial: bool = False,
    verify_bytes: bool = False,
    aliases: Mapping[str, str] | None = None,
    oracle: ReplayOracle | None = None,
    progress: Progress | None = None,
    first_only: bool = False,
    runner: Runner | None = None,
    maps: Sequence[Family] = (),
) -> Verdict:
    """Compare two captures and name the first site that is not bitwise equal.

    Args:
        a, b: capture folders or open captures. Usually A is the training side. Without B, rows of A are compared with
            each other: those of one prefix in several batches, and in both phases.
        partial: accept incomplete captures; the verdict says so.
        verify_bytes: recompute every digest from the raw bytes first, and compare bytes where both sides have them.
        aliases: site name of either side -> canonical name.
        oracle: replays operators on captured inputs, to settle kinds.
        progress: called with (done, total, site name) while comparing.
        first_only: stop at the first site that differs: later sites are listed as skipped, and so are not claimed.
        runner: who compares the sites; by default some processes where there is enough to compare.
        maps: the user's own names for sites; see :func:`zkl_debug.diff.naming.load_map`.

    Returns:
        The verdict. Captures that cannot be opened or must not be compared give a refused verdict, not an error.
    """
    with ExitStack() as stack:
        opened: list[CaptureLike] = []
        for name, source in zip(_NAMES, (a,) if b is None else (a, b), strict=False):
            try:
                opened.append(_open(source, partial, stack))
            except CaptureInvalid as error:
                return refused(_of_tables(a, b) or from_error(error, name), partial=partial)
        for index, name in enumerate(_NAMES[: len(opened)]):
            try:
                opened[index] = fold(opened[index])
            except CaptureInvalid as error:
                return refused(from_error(error, name), partial=partial)
        if b is None:
            opened.append(Alone(opened[0]))
        else:
            opened[:] = level(*opened)
        try:
            comparing: dict[str, Any] = {"aliases": aliases, "oracle": oracle, "progress": progress}
            comparing |= {"first_only": first_only, "runner": runner or Processes()}
            verdict = _diff(join_names(opened[0], opened[1], maps), partial, verify_bytes, comparing)
            if verdict.comparison is not None:
                verdict.site_table  # noqa: B018 - all payload that any form of the answer shows is read, so checked, here
        except CaptureInvalid as error:  # a segment that is damaged where it is read
            return refused(from_error(error, "A or B"), partial=partial)
        stack.pop_all()  # the tables of the verdict still read from the captures
        return verdict


def _of_tables(a: Source, b: Source | None) -> Refusal | None:
    """Two files of log-probs are compared by another command."""
    from zkl_debug.store.layout import TABLES

    paths = [Path(source) for source in (a, b) if isinstance(source, str | PathLike)]
    if len(paths) < 2 or not all(path.is_file() and path.suffix in TABLES for path in paths):
        return None
    names = " ".join(quote(str(path)) for path in paths)
    return refuse(
        "not-captures",
        "A and B are files, not captures; files of log-probs are compared by logprobs",
        ", ".join(path.name for path in paths),
        "two capture folders",
        f"zkl-debug logprobs {names}",
    )


def _open(source: Source, partial: bool, stack: ExitStack) -> CaptureLike:
    if not isinstance(source, str | PathLike):
        return source
    from zkl_debug.store.reader import open_capture

    return stack.enter_context(open_capture(Path(source), partial=partial))


def _diff(joined: Joined, partial: bool, verify_bytes: bool, comparing: dict[str, Any]) -> Verdict:
    a, b = joined.a, joined.b
    checks: dict[str, Json] = {"names": joined.to_json()} if joined.changed else {}
    alone = isinstance(b, Alone)
    certified = {"a": certification(a)} if alone else {"a": certification(a), "b": certification(b)}
    known: dict[str, Any] = {"checks": checks, "certification": certified, "partial": partial}
    for name, capture in zip(_NAMES, (a, b), strict=True):
        early = (check_probe(name, capture), check_self_test(name, capture), check_switches(name, capture))
        refusal = next(_found_of(early), None) or (check_bytes(name, capture) if verify_bytes else None)
        if refusal is not None:
            return refused(refusal, **known)
    comparison = compare(a, b, verify_bytes=verify_bytes, **comparing)
    refusal = check_same(comparison)
    if refusal is not None:
        return refused(refusal, **known)
    coverage = _coverage(comparison, partial, joined.skips())
    refusal = next(_refusals(comparison, checks, alone), None)
    if refusal is not None:
        return refused(refusal, coverage=coverage, **known)
    other_form = weights_in_other_form(comparison)
    if other_form is not None:
        checks["quantised_weights"] = other_form[:_LISTED] or "equal"
    edges = edge_summaries(comparison)
    edge = comparison.edge
    first = edges[edge].first if edge is not None else None
    if joined.changed and first is not None:
        checks["names"]["first"] = dict(zip("ab", joined.own(first.site), strict=True))
    on_ranks = first_on_ranks(comparison)
    if on_ranks:
        checks["first_on_ranks"] = on_ranks
    rows, why = affected(comparison), explain(comparison)
    outcome = Outcome.IDENTICAL if edge is None else Outcome.DIVERGED
    hints = suggestions(comparison, outcome, first, coverage, verify_bytes)
    handed = _handed(comparison, checks)
    if handed is not None:
        why = (*why, handed_over.finding(handed).to_json())
        if edge is None:  # no row differs anywhere: the hand-over itself is the first thing that is wrong
            edge, first = handed_over.edge_of(handed), handed_over.first_of(handed, comparison)
            rows, edges, hints = (
                handed_over.summary(handed),
                handed_over.with_first(edges, handed, first),
                on_a_page(comparison),
            )
    outcome = Outcome.DIVERGED if edge is not None else Outcome.IDENTICAL
    claim = Claim(
        equality="bytes" if comparison.all_bytes else "digest",
        scope=_scope(comparison, coverage, partial),
        repeats=2 if all(tests["a0_a1"] for tests in certified.values()) else 1,
    )
    return Verdict(
        outcome=outcome,
        claim=claim,
        coverage=coverage,
        edge=edge,
        first=first,
        affected=rows,
        explanations=why,
        edges=edges,
        next=hints,
        comparison=comparison,
        **known,
    )


def _handed(comparison: Comparison, checks: dict[str, Json]) -> handed_over.Handed | None:
    """What a side handed back wrongly beside its log-probs, if anything; ``checks`` says how it stands."""
    found = [handed_over.handed_over(side, capture) for side, capture in enumerate((comparison.a, comparison.b))]
    texts = [one.text for one in found if one is not None]
    if texts:
        checks["routing_returned"] = "; ".join(texts)
    return handed_over.worst(found)


def _coverage(comparison: Comparison, partial: bool, left_out: Sequence[Skip]) -> Coverage:
    skips = [*comparison.skips, *left_out, *_not_reached(comparison)]
    for name, capture in zip(_NAMES, (comparison.a, comparison.b), strict=True):
        skips += lost_ranks(name, capture)
        if partial and not capture.manifest.get("complete", True):
            skips.append(Skip(f"lost in {name}: end of the capture", str(capture.manifest.get("reason", "incomplete"))))
    alone = isinstance(comparison.b, Alone)
    compared = np.any(list(comparison.edge_compared.values()), axis=0) if alone else comparison.compared
    joined = (comparison.a, comparison.b, comparison.space, comparison.pairs, comparison.sites)
    coverage = measure(*joined, compared, skips, comparison.stopped)
    return own_coverage(coverage) if alone else coverage


def _scope(comparison: Comparison, coverage: Coverage, partial: bool) -> str:
    if comparison.stopped is not None:
        return "up-to-first"
    return "captured-sites" if coverage.dropped or partial else "all-sites"


def _not_reached(comparison: Comparison) -> list[Skip]:
    if comparison.stopped is None:
        return []
    left = [pair for pair in comparison.sites[comparison.stopped + 1 :] if not pair.is_input]
    name = comparison.sites[comparison.stopped].name
    reason = "not looked at: only the first site that differs was asked for"
    return [Skip(f"sites after {name}", reason, len(left))] if left else []


def _refusals(comparison: Comparison, checks: dict[str, Json], alone: bool) -> Iterator[Refusal]:
    """Reasons not to believe the comparison, the most basic first; ``checks`` is filled on the way."""
    captures: tuple[CaptureLike, ...] = (comparison.a,) if alone else (comparison.a, comparison.b)
    for side, (name, capture) in enumerate(zip(_NAMES, captures, strict=False)):
        yield from _found(check_repeat(name, capture, _stochastic(comparison, WITHIN_EDGES[side])))
    for name, capture in zip(_NAMES, captures, strict=False):
        yield from _found(check_buffers(name, capture))
    checks["buffers"] = "distinct"
    for name, capture in zip(_NAMES, captures, strict=False):
        checks.update(rank_report(name, capture))
        yield from _found(check_ranks(name, capture))
    refusal, report = check_weights(comparison.a, comparison.b)
    checks.update(report)
    yield from _found(refusal)
    if not alone:
        yield from _found(check_overlap(comparison.space, comparison.sites))
    yield from _found(check_tokens(comparison.space, never_forwarded(comparison.space)))
    checks["token_ids"] = "equal"
    for i, pair in enumerate(comparison.sites):
        if pair.is_input and comparison.done[i].present.any():
            where = comparison.where(i)
            yield from _found(check_input_site(pair, where, comparison.space, comparison.pairs, comparison.done[i]))
            checks[pair.parsed.op or pair.parsed.operator] = "equal"
    if alone:
        if not any(keys.any() for keys in comparison.edge_compared.values()):
            yield nothing_twice(_NAMES[0])
    elif not comparison.compared.any():
        yield refuse(
            "nothing-compared",
            "no row of A and B was recorded at a common site",
            f"{int(np.count_nonzero(comparison.space.matched))} common row keys, none with a site on both sides",
            "at least one row recorded on both sides at the same site",
            "capture both sides with the same --sites and --layers",
        )


def _found_of(refusals: Iterable[Refusal | None]) -> Iterator[Refusal]:
    return (refusal for refusal in refusals if refusal is not None)


def _found(refusal: Refusal | None) -> Iterator[Refusal]:
    if refusal is not None:
        yield refusal


def _stochastic(comparison: Comparison, edge: str) -> str | None:
    first = comparison.firsts.get(edge)
    return None if first is None else comparison.sites[first.site].name


def check_bytes(name: str, capture: CaptureLike) -> Refusal | None:
    """Recompute the digest of every payload row; a capture held in memory has no files to check."""
    from zkl_debug.store.reader import Capture, verify_payload

    capture = getattr(capture, "original", capture)
    ranks = getattr(capture, "ranks", None)
    if isinstance(ranks, dict):
        return next(_found_of(check_bytes(f"{name}, rank {rank}", own) for rank, own in ranks.items()), None)
    if not isinstance(capture, Capture):
        return None
    bad = verify_payload(capture)
    if not bad:
        return None
    row = capture.rows[bad[0].row]
    where = f"sample {int(row['sample'])} position {int(row['position'])}"
    return refuse(
        "payload-damaged",
        f"capture {name} is damaged: the bytes of {bad[0].site} at {where} do not have their digest",
        f"{len(bad)} row(s) whose payload and digest disagree",
        "bytes as they were recorded",
        "copy the capture again, or capture again",
        capture=name,
        site=bad[0].site,
        row=bad[0].row,
        sample=int(row["sample"]),
        position=int(row["position"]),
        rows=len(bad),
    )
