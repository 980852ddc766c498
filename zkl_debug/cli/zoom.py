"""``zkl-debug zoom A B --site SITE``: the operators inside one site, both sides next to each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zkl_debug.cli.common import emit_json, stderr, stdout
from zkl_debug.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zkl_debug.beds.zoom import Zoom
    from zkl_debug.diff.streams import Op

_AROUND = 8  # operators shown on either side of the first that differ
_ANCHORS = 4


@click.command("zoom")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--site", default=None, metavar="SITE", help="Output to look into; default: the first that differs.")
@click.option("--all", "whole", is_flag=True, help="Show both streams from end to end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document (zkl-zoom 1).")
def command(a: Path, b: Path, site: str | None, whole: bool, as_json: bool) -> int:
    """Run the bed of captures A and B again and trace every tensor operator inside SITE.

    Both streams are aligned by equal values. Exit code: 0 all operators agree, 1 they part and the first operator is
    named, 3 refused, 4 they part and no operator could be named, or a call did not reproduce its capture.
    """
    from zkl_debug.beds.zoom import NothingToZoomError, zoom

    console = stderr()
    try:
        with console.status("starting") as status:
            found = zoom(a, b, site, lambda text: status.update(text))
    except NothingToZoomError as equal:
        if as_json:
            emit_json(
                {"format": "zkl-zoom", "version": 1, "site": site or "", "differs": False, "notes": [equal.found]}
            )
        else:
            stdout().print(equal.found)
        return int(equal.exit_code)
    if as_json:
        emit_json(found.to_json())
    else:
        for part in report(found, whole):
            stdout().print(part, overflow="fold")
    return int(exit_code(found))


def exit_code(found: Zoom) -> ExitCode:
    """See :func:`command`."""
    if not all(found.reproduced):
        return ExitCode.INCONCLUSIVE
    if not found.differs and not any(found.aligned.first):
        return ExitCode.OK
    return ExitCode.DIVERGED if any(found.aligned.first) else ExitCode.INCONCLUSIVE


def report(found: Zoom, whole: bool = False) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    from rich.text import Text

    yield Text(f"zoom      {found.site} on {found.edge}", style="bold")
    yield Text(f"  row     sample {found.sample} position {found.position} token {found.token}")
    for name, same, ops in zip(found.names, found.reproduced, (found.aligned.left, found.aligned.right), strict=True):
        word = "the traced call gave its captured bits" if same else "THE TRACED CALL DID NOT GIVE ITS CAPTURED BITS"
        yield Text(f"  call    {name}: {len(ops)} operators; {word}")
    anchors = found.aligned.anchors
    equal = [port for port, same in found.inputs.items() if same]
    differ = [port for port, same in found.inputs.items() if not same]
    words = f"inputs {', '.join(equal) or 'none'} are equal on both sides"
    words += f", {', '.join(differ)} DIFFER" if differ else ""
    yield Text(f"anchors   {words}; so are {len(anchors)} results before the streams part")
    for one, two in anchors[-_ANCHORS:]:
        yield Text(f"          {one.name} {one.source}  =  {two.name} {two.source}")
    yield from _first(found)
    for name, ops in zip(found.names, found.roundings, strict=True):
        if ops:
            listed = ", ".join(f"{op.name} {_short(op)}" for op in ops[:_ANCHORS])
            yield Text(
                f"rounds    {name} keeps {len(ops)} results in {ops[0].dtype} that the other side has not: {listed}"
            )
    yield _table(found, whole)
    for note in found.notes:
        yield Text(f"note      {note}")


def _first(found: Zoom) -> Iterator[RenderableType]:
    from rich.text import Text

    if not any(found.aligned.first):
        words = "no operator with a value of its own differs"
        yield Text(f"first     {words}" + (": what differs is inside one opaque operator" if found.differs else ""))
        return
    for name, op in zip(found.names, found.aligned.first, strict=True):
        text = "nothing with a value of its own" if op is None else f"{op.text} in {op.function}"
        yield Text(f"first     {name}: {text}", style="bold")
    relation = found.aligned.relation
    if relation is not None:
        words = relation.text.replace("the left is right", f"{found.names[0]} is {found.names[1]}")
        words = words.replace("the right is left", f"{found.names[1]} is {found.names[0]}")
        pair = f"{relation.left.name} ({relation.left.dtype}) and {relation.right.name} ({relation.right.dtype})"
        yield Text(f"  how     {pair}: {words}")


def _table(found: Zoom, whole: bool) -> RenderableType:
    from rich.table import Table

    from zkl_debug.diff.streams import rows_of

    rows = rows_of(found.aligned)
    marks = [i for i, (_, _, mark) in enumerate(rows) if mark == "!"]
    low, high = (marks[0] - _AROUND, marks[-1] + _AROUND + 1) if marks and not whole else (0, len(rows))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(found.names[0], overflow="fold", ratio=1)
    table.add_column("", justify="center", min_width=1)
    table.add_column(found.names[1], overflow="fold", ratio=1)
    for one, two, mark in rows[max(0, low) : high]:
        style = {"!": "bold red", "=": "green"}.get(mark, "")
        table.add_row(_cell(one), mark, _cell(two), style=style)
    return table


def _cell(op: Op | None) -> str:
    if op is None:
        return ""
    shape = "x".join(map(str, op.shape))
    return f"{op.name} {op.dtype} {shape} {_short(op)}"


def _short(op: Op) -> str:
    return f"{op.file.rpartition('/')[2]}:{op.line}" if op.file else ""
