"""``zkl-debug repair``: recover a capture whose process was killed."""

from __future__ import annotations

from pathlib import Path

import click

from zkl_debug.cli.common import emit_json, stdout
from zkl_debug.store.repair import RepairReport, repair


@click.command(name="repair", short_help="Recover every flushed frame of a capture that was killed.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(folder: Path, as_json: bool) -> None:
    """Recover every flushed frame of a capture that was killed.

    Each recovered payload row is checked against its digest; a frame that fails is left out and named. The capture
    stays marked as incomplete. Nothing is changed in a capture that is complete.
    """
    report = repair(folder)
    if as_json:
        emit_json(report.as_json())
    else:
        _show(report)


def _show(report: RepairReport) -> None:
    out = stdout()
    what = f"{report.frames} frames, {report.rows} rows, {report.payload_rows} payload rows"
    if report.already_complete:
        out.print(f"{report.root}: nothing to repair ({what})", markup=False, soft_wrap=True)
        return
    out.print(
        f"{report.root}: repaired, now {what}; {report.recovered_frames} frames came from the log",
        markup=False,
        soft_wrap=True,
    )
    for frame in report.dropped:
        out.print(f"  left out: frame {frame.frame} of rank {frame.rank}: {frame.reason}", markup=False, soft_wrap=True)
    for note in report.notes:
        out.print(f"  note: {note}", markup=False, soft_wrap=True)
    out.print(f"next: zkl-debug inspect {report.root}", markup=False, soft_wrap=True)
