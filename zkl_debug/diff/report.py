"""The text report of a verdict: one screen of about 40 lines at 100 columns. rich is imported when it is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zkl_debug.diff.answer import First
from zkl_debug.diff.coverage import Coverage, Share
from zkl_debug.diff.model import EDGE_PRIORITY, MAIN_EDGES, Outcome, Skip
from zkl_debug.diff.tables import edge_stats
from zkl_debug.diff.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_STYLE = {
    Outcome.IDENTICAL: "bold green",
    Outcome.DIVERGED: "bold red",
    Outcome.REFUSED: "bold yellow",
    Outcome.INCONCLUSIVE: "bold yellow",
}
_SCOPES = {
    "all-sites": "all sites",
    "captured-sites": "the sites captured on both sides",
    "up-to-first": "sites up to the first that differs",
}
_NEXT_SITES = 5
_OWN_SITES = 3
_SKIP_LINES = 6
_WHY_LINES = 3
_TABLE_COLUMNS = 70  # below, a table folds its cells into columns of a few letters


def print_report(verdict: Verdict, console: Console) -> None:
    """Print the report of a verdict."""
    for part in report(verdict):
        console.print(part, overflow="fold")


def report(verdict: Verdict) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    from rich.text import Text

    yield Text(f"{str(verdict.outcome).upper()}  {headline(verdict)}", style=_STYLE[verdict.outcome])
    if verdict.refusal is not None:
        yield from _refusal(verdict)
        return
    yield Text(f"claim     {_claim(verdict)}")
    yield Text(f"checks    {_checks(verdict)}")
    yield Text(f"coverage  {_coverage(verdict.coverage, 'b' not in verdict.certification)}")
    yield _edges(verdict)
    if verdict.first is not None:
        yield from _first(verdict.first, verdict.by_rows)
        if verdict.checks.get("first_on_ranks"):
            yield Text(f"  ranks   {verdict.checks['first_on_ranks']['text']}")
        yield from _following(verdict)
    yield from _skipped(verdict.coverage)
    yield from _next(verdict)


def headline(verdict: Verdict) -> str:
    """The answer in a line, without its word."""
    if verdict.refusal is not None:
        return verdict.refusal.text
    if verdict.first is None:
        return f"every compared row is bitwise equal at every {_scope(verdict)}{_but(verdict)}"
    first = verdict.first
    layer = f"layer {first.name.layer} " if first.name.layer >= 0 else ""
    where = f"{layer}{first.name.operator} ({first.name.port})"
    return f"first on {verdict.edge} at {where}: {first.kind.label}"


def _but(verdict: Verdict) -> str:
    """What weakens an "identical"; a headline must not promise more than the body."""
    coverage = verdict.coverage
    shares = {"prompt": coverage.prompt, "generated": coverage.generated}
    parts = [
        f"only {_percent(share)} of the {name} rows were compared"
        for name, share in shares.items()
        if share.of and share.compared is not None and share.compared < 0.99 * share.of
    ]
    if verdict.incomplete:
        parts.append("a capture is incomplete, and what it lost may differ")
    if not all(tests.get("a0_a2") for tests in verdict.certification.values()):
        parts.append("not self-tested on both sides")
    return f" - but {', '.join(parts)}" if parts else ""


def _scope(verdict: Verdict) -> str:
    return "site" if verdict.claim.scope == "all-sites" else "site captured on both sides"


def _refusal(verdict: Verdict) -> Iterator[RenderableType]:
    from rich.text import Text

    refusal = verdict.refusal
    assert refusal is not None
    yield Text(f"reason    {refusal.code}")
    yield Text(f"found     {refusal.found}")
    if refusal.expected:
        yield Text(f"expected  {refusal.expected}")
    yield Text("nothing is said of any layer")
    yield from _next(verdict)


def _claim(verdict: Verdict) -> str:
    claim = verdict.claim
    equality = "raw bytes compared" if claim.equality == "bytes" else "128-bit digests compared"
    scope = _SCOPES[claim.scope]
    tail = "; incomplete captures allowed" if verdict.partial else ""
    tests = "; ".join(_certified(side, results) for side, results in verdict.certification.items())
    return f"{equality}, {scope}{tail}\nself-test {tests}"


def _certified(side: str, results: Mapping[str, bool | None]) -> str:
    """Plain against plain (A0, A1) and plain against probed (A0, A2) runs of a side."""
    signs = {True: "=", False: "!="}
    parts = [f"A0 {signs[equal]} {test[-2:].upper()}" for test, equal in results.items() if equal is not None]
    return f"{side.upper()}: {', '.join(parts) or 'not tested'}"


def _checks(verdict: Verdict) -> str:
    checks = verdict.checks
    words = [f"weights {checks.get('weights', 'not checked')}", f"token ids {checks.get('token_ids', '-')}"]
    words.append(f"position ids {checks.get('position_ids', 'not captured')}")
    formats = checks.get("quantised_weights")
    if formats is not None:
        words.append(
            "quantised weights " + (formats if isinstance(formats, str) else f"differ: {', '.join(formats[:3])}")
        )
    names = checks.get("names")
    if names:
        kinds = (f"{side.upper()} {', '.join(names[side]['families']) or 'of no known kind'}" for side in "ab")
        words.append(f"names joined ({'; '.join(kinds)}: zkl-debug names A B)")
    buffers = checks.get("buffers_differ")
    if buffers:
        words.append(f"BUFFERS DIFFER: {', '.join(buffers[:3])}")
    if checks.get("on_one_side"):
        words.append(f"parameters on one side only: {', '.join(checks['on_one_side'][:3])}")
    for side in "ab":
        ranks = checks.get(f"ranks_{side}")
        if ranks:
            unlike = "" if ranks["alike"] else f", NOT ALIKE: {ranks['first']}"
            words.append(f"{side.upper()} on {ranks['ranks']} ranks ({ranks['layout']}){unlike}")
    if checks.get("routing_returned"):
        words.append(f"routing handed back {checks['routing_returned']}")
    return ", ".join(words)


def _coverage(coverage: Coverage, alone: bool) -> str:
    sides = "" if alone else " on both sides"
    sites = f"{coverage.matched} of {coverage.expected} sites{sides}"
    rows = f"{coverage.compared} rows compared (A {coverage.rows_a}{'' if alone else f', B {coverage.rows_b}'})"
    if coverage.stopped_at is not None:
        looked = f"{coverage.looked_at} of {coverage.matched} sites{sides} looked at; {rows}"
        return f"{looked}\n          stopped at {coverage.stopped_at}: what lies behind it was not looked at"
    shares = {"prompt": coverage.prompt, "generated": coverage.generated, "log-probs": coverage.labels}
    parts = ", ".join(f"{name} {_percent(share)}" for name, share in shares.items() if share.of)
    crossed = ", ".join(f"{name.replace('_', ' ')} {count or 'NEVER'}" for name, count in coverage.crossed.items())
    whole = "there is" if alone else "both could have run"
    return f"{sites}; {rows}\n          of what {whole}: {parts}\n          rows at a {crossed}"


def _percent(share: Share) -> str:
    assert share.compared is not None
    return f"{100.0 * share.compared / share.of:.1f} %"


class _ByWidth:
    """A table where there is room for it, else its lines."""

    def __init__(self, wide: RenderableType, narrow: RenderableType) -> None:
        self.wide, self.narrow = wide, narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.wide if options.max_width >= _TABLE_COLUMNS else self.narrow


def _edges(verdict: Verdict) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("edge", "rows", "differ", "first site", "kind", "ulp"):
        table.add_column(name, justify="right" if name in ("rows", "differ", "ulp") else "left", overflow="fold")
    lines: list[str] = []
    order = [*MAIN_EDGES, *(edge for edge in EDGE_PRIORITY if edge not in MAIN_EDGES and edge in verdict.edges)]
    for edge in order:
        summary = verdict.edges[edge]
        mark = "> " if edge == verdict.edge else "  "
        if summary.compared == 0:
            nothing = "no row up to there" if summary.up_to is not None else "not crossed by any row"
            table.add_row(mark + edge, "0", "", nothing, "", "")
            lines.append(f"{mark}{edge}: {nothing}")
            continue
        first = summary.first
        equal = "equal up to there" if summary.up_to is not None else "equal"
        cells = (equal, "", "") if first is None else (first.site, first.kind.label, _ulp(first))
        table.add_row(mark + edge, str(summary.compared), str(summary.mismatched), *cells)
        lines.append(f"{mark}{edge}: {summary.mismatched} of {summary.compared} rows differ")
        if first is not None:
            lines.append(f"    {first.site}\n    {first.kind.label}, {_ulp(first)} ulp")
    return _ByWidth(table, Text("\n".join(lines)))


def _ulp(first: First) -> str:
    return "?" if first.stats.max_ulp is None else str(first.stats.max_ulp)


def _first(first: First, verdict_of_rows: bool) -> Iterator[RenderableType]:
    from rich.text import Text

    step = f"step {first.step} " if first.step >= 0 else ""
    row = f"{step}sample {first.sample} position {first.position} token {first.token} ({first.phase})"
    yield Text(f"first     {first.site}", style="bold")
    yield Text(f"  row     {row}")
    yield Text(f"  kind    {first.kind.label}: {first.reason}")
    stats = first.stats
    if stats.elements is not None:
        ulp = "undefined (NaN)" if stats.max_ulp is None else str(stats.max_ulp)
        size = f"{stats.mismatched_elements} of {stats.elements} elements, first at {stats.first_element}"
        yield Text(f"  size    max {ulp} ulp, max abs {stats.max_abs:.3g}; {size}")
    else:
        unknown = "no payload on both sides (capture with --level payload)" if verdict_of_rows else "nothing to measure"
        yield Text(f"  size    unknown: {unknown}")
    yield Text(f"  before  {first.last_equal or 'nothing'} is the last site compared and equal")


def _following(verdict: Verdict) -> Iterator[RenderableType]:
    """What else differs on the edge: operators of their own first, then the next sites that inherit it."""
    from rich.table import Table
    from rich.text import Text

    assert verdict.first is not None
    assert verdict.comparison is not None
    affected = verdict.affected
    samples = ", ".join(map(str, affected.samples[:6])) + (" ..." if len(affected.samples) > 6 else "")
    yield Text(f"affected  {affected.rows} of {affected.of} rows, samples {samples}")
    if affected.rule is not None:
        yield Text(f"rule      {_rule(affected.rule)}")
    for index, why in enumerate(verdict.explanations[:_WHY_LINES]):
        yield Text(f"{'why' if index == 0 else '':<10}{why['name']}: {why['text']}")
    if verdict.replay is not None:
        yield Text(f"replay    {verdict.replay['status']}: {verdict.replay['text']}")
    if verdict.referee is not None:
        yield Text(f"referee   {verdict.referee['text']}")
    if verdict.masked.hidden:
        yield Text(f"masked    {verdict.masked.text}")
    if verdict.coverage.stopped_at is not None:
        yield Text("then      not looked at")
        return
    table = verdict.site_counts
    after = table[(table["edge"] == verdict.edge) & (table["mismatched"] > 0) & (table["site"] != verdict.first.site)]
    if not len(after):
        return
    own, inherited = after[after["own"] > 0], after[after["own"] == 0]
    yield Text(f"then      {len(after)} more sites differ, {len(own)} of them on their own")
    view = Table(box=None, pad_edge=False, show_header=False)
    lines: list[str] = []
    shown = [*own[:_OWN_SITES], *inherited[: _NEXT_SITES - min(_OWN_SITES, len(own))]]
    for row in shown:
        stats = edge_stats(verdict.comparison, int(row["order"]), str(row["edge"]))
        ulp = "" if stats.max_ulp is None else f"{stats.max_ulp} ulp"
        cells = (f"{row['mismatched']}/{row['compared']}", str(row["kind"]), ulp)
        view.add_row(f"  {row['site']}", *cells)
        lines.append(f"  {row['site']}\n    {' '.join(cells)}")
    yield _ByWidth(view, Text("\n".join(lines)))


def _rule(rule: Mapping[str, Any]) -> str:
    """A rule with how well it holds."""
    if not rule["found"] or rule["precision"] == rule["recall"] == 1.0:
        return str(rule["text"])
    return f"{rule['text']} (precision {rule['precision']:.2f}, recall {rule['recall']:.2f})"


def _skipped(coverage: Coverage) -> Iterator[RenderableType]:
    from rich.text import Text

    groups = _grouped(coverage.skipped)
    for index, (reason, (count, example)) in enumerate(groups.items()):
        if index == _SKIP_LINES:
            yield Text(f"          ... {len(groups) - index} more reasons (see --json)")
            break
        head = "skipped   " if index == 0 else "          "
        yield Text(f"{head}{reason}: {example}{f' (+{count - 1})' if count > 1 else ''}")


def _grouped(skips: tuple[Skip, ...]) -> Mapping[str, tuple[int, str]]:
    """Skips by reason, unmatched sites first: (how many, the first one)."""

    def rank(skip: Skip) -> int:
        return next((i for i, word in enumerate(("lost", "site", "rows", "edge")) if skip.what.startswith(word)), 9)

    ordered = sorted(skips, key=rank)
    counts = Counter(skip.reason for skip in ordered)
    groups: dict[str, tuple[int, str]] = {}
    for skip in ordered:
        rows = f"{skip.count} {skip.what}" if skip.what.startswith("rows ") else skip.what.removeprefix("tensor in ")
        groups.setdefault(skip.reason, (counts[skip.reason], rows))
    return groups


def _next(verdict: Verdict) -> Iterator[RenderableType]:
    from rich.text import Text

    for index, command in enumerate(verdict.next):
        yield Text(f"{'next' if index == 0 else '':<10}{command}")
