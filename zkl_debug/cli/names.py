"""``zkl-debug names A B``: which site of one capture is which of the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from zkl_debug.cli.common import emit_json, stdout
from zkl_debug.diff.naming import join_names, load_map
from zkl_debug.diff.naming.join import Joined
from zkl_debug.diff.naming.table import Line, by_layer, document, lines
from zkl_debug.errors import ExitCode
from zkl_debug.store.reader import open_capture

MAP_HELP = "Names of your own, before the known ones: TOML with sites = [[own, common], ...]; repeatable."


@click.command("names")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--map", "maps", type=click.Path(path_type=Path, dir_okay=False), multiple=True, help=MAP_HELP)
@click.option("--all", "every", is_flag=True, help="Every layer on a line of its own.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(a: Path, b: Path, maps: tuple[Path, ...], every: bool, as_json: bool) -> int:
    """Show how the sites of captures A and B are joined by name, and which are not, and why.

    Model trees of megatron-core (any spec), transformers (Llama, Qwen, Qwen-MoE, DeepSeek, Nemotron-H) and of vLLM or
    SGLang are known. Exit code 0, or 3 when nothing is joined.
    """
    with open_capture(a, partial=True) as left, open_capture(b, partial=True) as right:
        joined = join_names(left, right, [load_map(file) for file in maps])
        found = lines(joined)
    if as_json:
        emit_json(document(joined, found))
    else:
        _print(joined, found if every else by_layer(found))
    return int(ExitCode.OK if any(line.joined for line in found) else ExitCode.REFUSED)


def _print(joined: Joined, found: Sequence[Line]) -> None:
    out = stdout()
    for side, names in zip("AB", joined.families, strict=True):
        out.print(f"{side}: {', '.join(names) or 'no known kind of model'}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("A", "B", "how"):
        table.add_column(title, overflow="fold")
    table.add_column("sites", justify="right")
    for line in found:
        named = f"; as {line.name}" if line.joined and line.name not in (line.a, line.b) else ""
        cells = (line.a or "-", line.b or "-", line.how + named)
        table.add_row(*map(escape, cells), str(line.count), style="" if line.joined else "dim")
    out.print(table)
    count = sum(line.count for line in found if line.joined)
    alone = sum(line.count for line in found if not line.joined)
    out.print(f"{count} sites joined, {alone} stand alone")
