"""What a person reads: results of a bisection as rich text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zkl_debug.bisect.commit_step import CommitRun
from zkl_debug.bisect.commits import Commit, CommitResult, CommitStatus
from zkl_debug.bisect.outcome import Observation, Outcome, RawRun, Request
from zkl_debug.bisect.result import Finding, Role, SearchResult, Status
from zkl_debug.bisect.space import Space

_COLOUR = {
    Outcome.ZERO: "green",
    Outcome.MISMATCH: "red",
    Outcome.UNTESTABLE: "yellow",
    Outcome.ERROR: "magenta",
}
_ROLE_COLOUR = {Role.CORE: "bold red", Role.REPLACEABLE: "cyan", Role.REMOVABLE: "dim", Role.UNTESTED: "yellow"}
_HEADLINE = {
    Status.NOTHING: "refused: nothing to explain",
    Status.INSUFFICIENT: "refused: the stack is insufficient",
    Status.UNTESTABLE: "refused: it cannot be tested here",
    Status.ERROR: "refused: the runs fail",
    Status.INCOMPLETE: "incomplete",
}
_COMMIT_HEADLINE = {
    CommitStatus.FOUND: "found and confirmed",
    CommitStatus.RANGE: "not narrowed to one commit",
    CommitStatus.ALWAYS_BAD: "refused: the good end mismatches",
    CommitStatus.ALWAYS_GOOD: "refused: the bad end is zero",
    CommitStatus.UNTESTABLE: "refused: an end cannot be tested",
    CommitStatus.ERROR: "refused: a run failed",
    CommitStatus.UNCONFIRMED: "found, but not confirmed",
}


def config_text(space: Space, on: Sequence[str]) -> str:
    """A configuration in few words: what is on, or what is off when that is shorter."""
    ladder = space.sort(space.top - space.bottom)
    off = [n for n in ladder if n not in on]
    if not on:
        return "all off"
    if len(off) < len(on) and set(on) <= set(ladder):
        return f"all but {', '.join(off)}" if off else "all on"
    return ", ".join(on)


def progress_line(number: int, space: Space, request: Request, raw: RawRun, seen: Observation, stored: bool) -> str:
    """One line of progress, with markup."""
    on = space.sort(request.config - space.bottom)
    colour = _COLOUR[seen.outcome]
    extra = seen.signature or seen.reason
    tail = f"  [dim]{escape(extra)}[/]" if extra else ""
    marks = f"{' wide' * request.wide}{f' #{request.repeat + 1}' if request.repeat else ''}"
    time = "journal" if stored else f"{raw.seconds:.1f} s"
    what = escape(config_text(space, on))
    head = f"[dim]{number:4d} {request.purpose.value + marks:<17}[/] [{colour}]{seen.outcome.value:<10}[/]"
    return f"{head} {time:>8}  {what}{tail}"


def print_switches(console: Console, result: SearchResult) -> None:
    """The answer of ``bisect switches``."""
    if result.status is Status.FOUND:
        state = "found and confirmed" if result.confirmed else "found, but not confirmed"
        needed = ", ".join(result.minimal)
        console.print(f"[bold]{state}[/]: {len(result.minimal)} of {len(result.findings)} switches are enough")
        console.print(f"  [bold red]{escape(needed)}[/]", soft_wrap=True)
        console.print(f"  {_claim(result)}", soft_wrap=True)
    else:
        console.print(f"[bold yellow]{_HEADLINE[result.status]}[/]")
    if result.reason:
        console.print(f"  {escape(result.reason)}", soft_wrap=True)
    if result.status is Status.INCOMPLETE and result.minimal:
        console.print(f"  smallest set known zero so far: {escape(', '.join(result.minimal))}", soft_wrap=True)
    if result.findings:
        console.print(_findings(result.findings))
    for witness in result.witnesses:
        console.print(f"interaction: {escape(witness.text)}", soft_wrap=True)
        for seen in witness.evidence:
            on = ", ".join(seen.config) or "all off"
            console.print(f"    [{_COLOUR[seen.outcome]}]{seen.outcome.value:<10}[/] {escape(on)}", soft_wrap=True)
    if result.slippage:
        console.print(f"slippage: the mismatch under bisection is {escape(result.signature)}; other ones were seen:")
    for seen in result.slippage:
        on = ", ".join(seen.config) or "all off"
        console.print(f"    {escape(seen.signature)}  with {escape(on)}", soft_wrap=True)
    runs = ", ".join(f"{name} {count}" for name, count in result.runs.items())
    console.print(f"[dim]runs: {runs or 'none'}; {sum(result.runs.values())} in all[/]", soft_wrap=True)
    for step in result.next_steps:
        console.print(f"next: {escape(step)}", soft_wrap=True)


def _claim(result: SearchResult) -> str:
    repeats = f"in {result.repeats} repeats each" if result.repeats > 1 else "in one run each"
    minimal = "taking any one out mismatches"
    if result.unproven:
        minimal = f"taking one out mismatches, except that {', '.join(result.unproven)} could not be judged"
    return f"zero with these alone ({repeats}); {escape(minimal)}"


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "switch", "role", "why"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        why = []
        if finding.replaced_by:
            why.append("or " + ", or ".join(" with ".join(s) for s in finding.replaced_by))
        if finding.fixes:
            why.append(f"without it: {finding.fixes}")
        if finding.reason:
            why.append(finding.reason)
        role = f"[{_ROLE_COLOUR[finding.role]}]{finding.role.value}[/]"
        table.add_row("*" if finding.in_minimal else "", escape(finding.name), role, escape("; ".join(why)))
    return table


def commit_line(run: CommitRun) -> str:
    """One line of progress for a commit, with markup."""
    colour = _COLOUR[run.outcome]
    extra = f"  [dim]{escape(run.signature or run.reason)}[/]" if run.signature or run.reason else ""
    slipped = " (another mismatch)" * run.slipped
    where = f"[dim]{run.purpose:<13}[/] {run.commit[:12]}"
    return f"{where} [{colour}]{run.outcome.value:<10}[/] {run.seconds:6.1f} s{slipped}{extra}"


def print_commits(console: Console, result: CommitResult) -> None:
    """The answer of ``bisect commits``."""
    colour = "bold" if result.status is CommitStatus.FOUND else "bold yellow"
    console.print(f"[{colour}]{_COMMIT_HEADLINE[result.status]}[/]")
    if result.reason:
        console.print(f"  {escape(result.reason)}", soft_wrap=True)
    if result.candidates:
        title = "the first commit that mismatches:" if result.culprit else "it is one of these, oldest first:"
        console.print(f"  {title}")
        for commit in result.candidates:
            console.print(f"    {_commit_text(commit)}", soft_wrap=True)
    if result.signature:
        console.print(f"  mismatch: {escape(result.signature)}", soft_wrap=True)
    for label, runs in (("slippage", result.slippage), ("could not be tested", result.untestable)):
        for run in runs:
            extra = escape(run.signature or run.reason)
            console.print(f"  {label}: {run.commit[:12]}  [dim]{extra}[/]", soft_wrap=True)
    ends = f"{result.good.sha[:12]}..{result.bad.sha[:12]}"
    console.print(f"[dim]{len(result.runs)} runs over {result.span} commits {ends}[/]", soft_wrap=True)


def _commit_text(commit: Commit) -> str:
    return f"[bold]{commit.sha[:12]}[/] {escape(commit.subject)} [dim]{escape(commit.author)} {commit.date[:10]}[/]"
