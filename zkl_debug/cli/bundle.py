"""``zkl-debug bundle A B``: one operator to attach to a bug report."""

from __future__ import annotations

from pathlib import Path

import click

from zkl_debug.cli.common import emit_json, stderr, stdout
from zkl_debug.errors import UsageError


@click.command("bundle")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--site", default=None, help="Output to bundle, with or without its port; default: the first divergence.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to create.")
@click.option("--rows", type=int, default=32, show_default=True, help="Most pairs of rows.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(a: Path, b: Path, site: str | None, out: Path, rows: int, as_json: bool) -> int:
    """Write one operator of a mismatch into a folder of a few MB: inputs, both outputs, weights and replay.py.

    The script replays it with torch alone. No paths, no environment and no tokens beyond the rows used go in.
    Exit code: 0 written, 2 usage, 3 nothing differs there or its raw bits were not captured.
    """
    from zkl_debug.beds.bundle import write_bundle

    if rows < 1:
        raise UsageError(f"--rows {rows}", "1 or more")
    with stderr().status("bundling"):
        done = write_bundle(a, b, out, site, rows)
    if as_json:
        emit_json(
            {
                "format": "zkl-bundle-written",
                "version": 1,
                "out": str(out),
                "site": done.site,
                "formula": done.formula,
                "rows": done.rows,
                "bytes": done.size,
                "notes": list(done.notes),
                "settings": dict(done.settings),
                "replayed": dict(done.replayed),
                "reproduced": done.reproduced,
            }
        )
        return 0
    console = stdout()
    console.print(f"[bold]{done.site}[/]: {done.rows} rows, {done.size / (1 << 20):.2f} MiB in {out}")
    if not done.formula:
        console.print("no formula is known for it: replay.py shows the differing elements only")
    for name, told in done.settings.items():
        console.print(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in told.items()))
    for side, told in done.replayed.items():
        if told["missed"] == 0:
            console.print(f"  replay.py gives {side} bit for bit: {told['with']}")
    for note in done.notes:
        console.print(f"  {note}")
    console.print(f"next: python {out}/replay.py")
    return 0
