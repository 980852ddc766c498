"""What ``zkl-debug bench`` prints: tables that fit 80 columns, and fold in fewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

_ORDER = ("plain", "off", "digest-first", "digest", "payload", "filing", "naive")
_GOALS = {
    "found": "flipped bit found, each size",
    "trials": "flipped bits found, trials",
    "over_linear": "processor seconds, off a line",
    "peak_rss": "peak memory",
    "join_rows_per_min_core": "row keys joined, a minute",
    "payload_over_memcmp": "payload compared, over memcmp",
    "seconds_100M": "100 million digests",
    "first_seconds_100M": "the same, --first",
}


def print_diff(console: Console, found: dict[str, Any]) -> None:
    """Figures by size, the line through them, and the goals last."""
    from zkl_debug.bench.linear import describe

    console.print("[bold]diff[/] of synthetic captures")
    sizes = found["sizes"]
    table = _table("", *(f"{size['digests'] / 1e6:.3g} M" for size in sizes))
    rows: dict[str, list[str]] = {
        "files a side": [f"{size['ranks']}" for size in sizes],
        "both sides": [_bytes(size["bytes"]) for size in sizes],
        "memcmp": [_seconds(size["memcmp_seconds"]) for size in sizes],
    }
    for run, word in (("full", "diff"), ("first", "diff --first")):
        rows[word] = [_seconds(size[run]["seconds"]) for size in sizes]
        rows[f"  processor{' ' if run == 'first' else ''}"] = [_seconds(size[run]["cpu_seconds"]) for size in sizes]
        rows[f"  peak memory{' ' if run == 'first' else ''}"] = [_bytes(size[run]["peak_rss"]) for size in sizes]
    for word, values in rows.items():
        table.add_row(word, *values)
    console.print(table)
    for unit, line in found["growth"].items():
        if line is not None:
            console.print(f"{unit.replace('_', ' ')}: {describe(line)}")
    print_goals(console, found)


def print_goals(console: Console, found: dict[str, Any]) -> None:
    """Every goal with its figure: met, missed, or why it was not judged."""
    from zkl_debug.bench.diff_bench import AT_LEAST

    table = _table("goal", "found", "wanted", "")
    for name, word in _GOALS.items():
        value, goal = found["judged"][name], found["goals"].get(name)
        wanted = "all" if goal is None else f"{'>=' if name in AT_LEAST else '<='} {_figure(name, goal)}"
        table.add_row(word, "-" if value is None else _figure(name, value), wanted, _word(found["met"][name]))
    console.print(table)
    met = found["met"]
    if met["over_linear"] is None:
        console.print("growth is judged from three sizes on: --rows several times")
    if met["payload_over_memcmp"] is None:
        console.print("payload is judged where a size has a million digests: --rows 1e6")
    if met["seconds_100M"] is None:
        console.print("100 million digests are judged with --rows 1e8 --ranks 64")


def print_times(console: Console, title: str, part: dict[str, Any]) -> None:
    """Seconds of each variant and its ratio to the plain one; below it whatever else was measured."""
    console.print(f"[bold]{title}[/]")
    columns = {
        "seconds": "seconds",
        "best": "best",
        "ratio": "x plain",
        "ratio_of_best": "best x",
        "undisturbed_seconds": "undisturbed",
        "undisturbed_ratio": "x plain",
    }
    given = [name for name in columns if name in part]
    table = _table("", *(columns[name] for name in given))
    names = [name for name in _ORDER if name in part["seconds"]]
    for name in [*names, *(name for name in part["seconds"] if name not in names)]:
        cells = (part[column].get(name) for column in given)
        table.add_row(name, *("-" if cell is None else f"{cell:.4g}" for cell in cells))
    console.print(table)
    for key, value in part.items():
        if key in columns:
            continue
        if isinstance(value, dict) and "seconds" in value:
            print_times(console, f"{title}: a {key}", value)
        elif isinstance(value, dict):
            console.print(f"{key.replace('_', ' ')}: {', '.join(f'{name} {each}' for name, each in value.items())}")
        elif key == "errors":
            console.print(*[f"[red]error of the probe:[/] {each}" for each in value] or ["errors of the probe: none"])
        else:
            console.print(f"{key.replace('_', ' ')}: {_bytes(value) if key.endswith('bytes') else value}")


def print_store(console: Console, found: dict[str, Any]) -> None:
    """Both speeds, and their ratio against its goal."""
    console.print(f"[bold]store[/]: payload of {_bytes(found['bytes'])} written {found['repeats']} times")
    table = _table("", "a second")
    table.add_row("plain file", _bytes(found["raw_bytes_per_s"]))
    table.add_row("store", _bytes(found["store_bytes_per_s"]))
    console.print(table)
    console.print(
        f"store over plain file: {found['ratio']:.2f} x (median of the pairs {found['median_ratio']:.2f} x), "
        f"wanted >= {found['goal']:.2f} x: {_word(found['ok'])}"
    )


def print_gpu(console: Console, found: dict[str, Any]) -> None:
    """The device, the kernel, and the forwards."""
    console.print(f"[bold]{found['device']}[/], {found['rounds']} rounds")
    if "kernel" in found:
        table = _table("digest kernel", "ms", "a second")
        for each in found["kernel"]:
            table.add_row(str(each["shape"]), f"{1000 * each['seconds']:.3f}", _bytes(each["bytes_per_second"]))
        console.print(table)
    for name in ("scoring", "decode"):
        if name in found:
            print_times(console, name, found[name])


def print_peers(console: Console, found: dict[str, Any]) -> None:
    """A table a tool: what it says of each case."""
    for tool in found["tools"].values():
        if "left_out" in tool:
            console.print(f"[bold]{tool['name']}[/]: {tool['left_out']}\n", overflow="fold")
            continue
        cost = tool["cost"]
        spent = f"{cost['ratio']:.2f} x plain, {_bytes(cost['bytes'])}" if "ratio" in cost else f"failed: {_why(cost)}"
        console.print(f"[bold]{tool['name']} {tool['version']}[/]: first scoring forward {spent}", overflow="fold")
        table = _table("", "other side", "good run", right=False)
        table.add_row("nothing wrong", *_cells(tool.get("good-tiny-gpt")))
        for case in found["cases"]:
            if case in tool:
                table.add_row(case.replace("-", " "), *_cells(tool[case]))
        console.print(table)
        console.print()
    console.print("other side: scoring against generation; good run: a side against one of its own, nothing put in")


def _cells(case: dict[str, Any] | None) -> tuple[str, ...]:
    if case is None or "error" in case:
        return ("failed", "" if case is None else _why(case))
    return tuple(case[key]["answer"] if key in case else "-" for key in ("other_side", "good_run"))


def _why(case: dict[str, Any]) -> str:
    return str(case.get("error", ""))


def _table(first: str, *others: str, right: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right" if right and name else "left", overflow="fold")
    return table


def _word(met: bool | None) -> str:
    return {True: "[green]met[/]", False: "[red]missed[/]", None: "not judged"}[met]


def _figure(name: str, value: float | Sequence[int]) -> str:
    if isinstance(value, list | tuple):
        return f"{value[0]} of {value[1]}"
    assert isinstance(value, int | float)
    if name == "peak_rss":
        return _bytes(value)
    if name.startswith("join"):
        return f"{value / 1e6:.3g} M"
    return _seconds(value) if "seconds" in name else f"{value:.2f} x"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _bytes(value: float) -> str:
    from zkl_debug.bench.space import told

    return told(value)
