"""What the manifest tells of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zkl_debug.capture.betrayed import betrayed
from zkl_debug.schema import Json

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession


def summary_of(session: CaptureSession) -> dict[str, Json]:
    """What the probe saw and could not see."""
    errors: list[Json] = list(dict.fromkeys([*session.errors, *betrayed(session)]))
    graphs = session.graphs
    return {
        "probe": {"ok": not errors, "errors": errors},
        "level": session.options.level,
        "filtered_sites": len(session.filtered),
        "not_rows": dict(sorted(session.not_rows.items())),
        "outside_frames": dict(sorted(session.outside.items())),
        "unkeyed_rows": session.unkeyed_rows,
        "frames": session.frames_written,
        "notes": [*session.requests.notes(), *_broken_off(session.broken_off)],
        "graphs": graphs.summary(session.seen_eager, session.seen_graph) if graphs is not None else None,
    }


def _broken_off(count: int) -> list[str]:
    return [f"{count} forward{'' if count == 1 else 's'} left out: interrupted before the end"] if count else []
