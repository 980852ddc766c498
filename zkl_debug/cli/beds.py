"""``zkl-debug beds``: what can be run here, and what can be broken in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape
from rich.table import Table

from zkl_debug.cli.common import emit_json, stdout

if TYPE_CHECKING:
    from zkl_debug.stack.switches import Switch


def describe() -> dict[str, Any]:
    """Beds, switches and faults as one document."""
    from zkl_debug.beds.bed import BEDS
    from zkl_debug.beds.faults import FAULTS
    from zkl_debug.beds.gpu import lacking
    from zkl_debug.beds.grpo.faults_loop import LOOP_FAULTS
    from zkl_debug.beds.grpo.options import DTYPES, LAYOUTS
    from zkl_debug.stack import ladder
    from zkl_debug.stack.catalogue.precision import PRECISIONS

    return {
        "format": "zkl-beds",
        "version": 1,
        "beds": [
            {
                "name": b.name,
                "description": b.description,
                "dtypes": list(b.dtypes),
                "faults": list(b.faults),
                "untestable": lacking(b) if b.on_gpu else "",
                **({"switches": list(b.switches), "sizes": list(b.sizes)} if b.on_gpu else {}),
            }
            for b in BEDS.values()
        ]
        + [
            {
                "name": "grpo",
                "description": f"synchronous GRPO loop (bisect steps, watch, certify): {', '.join(LAYOUTS)}",
                "dtypes": list(DTYPES),
                "faults": list(LOOP_FAULTS),
            }
        ],
        "switches": [_switch(s) for s in ladder()],
        "precisions": [_switch(s) for s in PRECISIONS],
        "faults": [
            {"id": f.id, "title": f.title, "source": f.source, "beds": list(f.beds), "dtypes": list(f.dtypes)}
            for f in FAULTS.values()
        ],
        "loop_faults": [
            {"id": f.id, "title": f.title, "source": f.source, "layouts": list(f.layouts)} for f in LOOP_FAULTS.values()
        ],
    }


def _switch(s: Switch) -> dict[str, Any]:
    return {
        "name": s.name,
        "fixes": s.fixes,
        "owner": s.owner,
        "group": s.group,
        "requires": list(s.requires),
        "conflicts": list(s.conflicts),
    }


@click.command("beds")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> int:
    """List beds, the switches of their stack in order, and the faults that can be put in."""
    document = describe()
    if as_json:
        emit_json(document)
        return 0
    console = stdout()
    for title, key, columns in (
        ("Beds", "beds", ("name", "description", "dtypes", "untestable")),
        ("Switches, in ladder order", "switches", ("name", "fixes", "owner")),
        ("Formats, on by name alone (--switch NAME=on|gen|train)", "precisions", ("name", "fixes")),
        ("Faults", "faults", ("id", "title", "beds", "dtypes")),
        ("Faults of the loop", "loop_faults", ("id", "title", "layouts")),
    ):
        table = Table(title=title, title_justify="left", header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for item in document[key]:
            table.add_row(
                *(escape(", ".join(v) if isinstance(v := item.get(c), list) else str(v or "")) for c in columns)
            )
        console.print(table)
    console.print("next: zkl-debug capture --bed tiny-gpt --stack off --out DIR")
    return 0
