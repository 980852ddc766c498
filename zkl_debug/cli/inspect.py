"""``zkl-debug inspect``: what a capture folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

from zkl_debug.cli.common import emit_json, stdout
from zkl_debug.errors import ExitCode, ZklError
from zkl_debug.schema import Json, Phase, row_phase
from zkl_debug.store.reader import Capture, open_capture

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@click.command(name="inspect", short_help="Show what a capture folder holds.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--sites", "with_sites", is_flag=True, help="List every site.")
def command(folder: Path, as_json: bool, with_sites: bool) -> int:
    """Show what a capture folder holds: side, frames, rows, sites, bytes, versions, and whether it is complete.

    Exits with 3 when the folder is not a readable capture.
    """
    try:
        with open_capture(folder, partial=True) as capture:
            document = describe(capture)
    except ZklError as error:
        if as_json:
            fields = {"found": error.found, "expected": error.expected, "next": error.next_step}
            emit_json({"root": str(folder), "valid": False, "error": fields})
        raise
    if as_json:
        emit_json(document)
    else:
        _show(document, with_sites)
    return int(ExitCode.OK)


def describe(capture: Capture) -> dict[str, Json]:
    """A JSON description of an open capture."""
    manifest = capture.manifest
    phases = row_phase(capture.rows["flags"])
    return {
        "root": str(capture.root),
        "valid": True,
        "side": capture.side,
        "complete": manifest["complete"],
        "repaired": bool(manifest.get("repaired")),
        "reason": manifest.get("reason", ""),
        "world": manifest["world"],
        "ranks": sorted(set(capture.frame_rank.tolist())),
        "segments": manifest["segments"],
        "bytes": sum(segment["bytes"] for segment in manifest["segments"]),
        "frames": {"total": len(capture.frames), **_per_phase(capture.frames["phase"])},
        "rows": {"total": len(capture.rows), **_per_phase(phases)},
        "samples": len(np.unique(capture.rows["sample"])),
        "counts": manifest["counts"],
        "events": len(capture.events),
        "states": {str(seq): len(records) for seq, records in capture.states.items()},
        "sites": [_site(capture, name) for name in capture.sites],
        "meta": capture.meta,
        "notes": manifest["notes"],
        "dropped_frames": manifest.get("dropped_frames", []),
    }


def _per_phase(codes: Any) -> dict[str, int]:
    return {phase.name.lower(): int((codes == phase).sum()) for phase in Phase if (codes == phase).any()}


def _site(capture: Capture, name: str) -> dict[str, Json]:
    site = capture.sites[name]
    return {
        "name": name,
        "kind": str(site.meta.kind),
        "layer": site.meta.layer,
        "order": site.meta.order,
        "torch_dtype": site.meta.torch_dtype,
        "row_shape": list(site.meta.row_shape),
        "semantic": site.meta.semantic,
        "rows": len(site),
        "payload_rows": site.payload_rows,
        "payload_bytes": site.payload_bytes,
        "payload_dropped_rows": site.payload_dropped,
    }


def human_bytes(count: float) -> str:
    """Bytes with a binary suffix."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def _parts(counts: dict[str, int]) -> str:
    detail = ", ".join(f"{name} {n}" for name, n in counts.items() if name != "total")
    return f"{counts['total']}" + (f" ({detail})" if detail else "")


def _show(document: dict[str, Json], with_sites: bool) -> None:
    out = stdout()
    state = "complete" if document["complete"] else f"INCOMPLETE: {document['reason']}"
    counts = document["counts"]
    lines = [
        ("capture", document["root"]),
        ("side", document["side"]),
        ("state", state + (" (repaired)" if document["repaired"] else "")),
        ("ranks", f"{len(document['ranks'])} of {document['world']}, {len(document['segments'])} segments"),
        ("bytes", human_bytes(document["bytes"])),
        ("frames", _parts(document["frames"])),
        ("rows", f"{_parts(document['rows'])}, of {document['samples']} samples"),
        ("sites", f"{counts['sites']}, {counts['digests']} digests"),
        ("payload", f"{counts['payload_rows']} rows, {human_bytes(counts['payload_bytes'])}"),
        ("events", f"{document['events']}, state snapshots {len(document['states'])}"),
    ]
    versions = document["meta"].get("versions")
    if isinstance(versions, dict):
        lines.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    for label, text in lines:
        out.print(f"{label:<9} {text}", markup=False, soft_wrap=True)
    if counts.get("payload_dropped_rows"):
        out.print(
            f"payload   of {counts['payload_dropped_rows']} rows was not taken (byte budget)",
            markup=False,
            soft_wrap=True,
        )
    for note in document["notes"]:
        out.print(f"note      {note}", markup=False, soft_wrap=True)
    for frame in document["dropped_frames"]:
        out.print(f"left out  frame {frame.get('frame')}: {frame.get('reason')}", markup=False, soft_wrap=True)
    if with_sites:
        out.print(_site_table(document["sites"]))


def _site_table(sites: list[dict[str, Json]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("site", overflow="fold")
    for title in ("dtype", "row shape", "rows", "payload rows", "payload"):
        table.add_column(title, justify="left" if title in ("dtype", "row shape") else "right")
    for site in sites:
        table.add_row(
            site["name"],
            site["torch_dtype"],
            "x".join(map(str, site["row_shape"])) or "scalar",
            str(site["rows"]),
            str(site["payload_rows"]),
            human_bytes(site["payload_bytes"]),
        )
    return table
