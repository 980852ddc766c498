"""Readings that the probe had come to rely on, and that turned out to be another than those they stood for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession


def betrayed(session: CaptureSession) -> list[str]:
    """What is known by now, as errors of the capture."""
    found = []
    if pairs := sorted(session.twins.betrayed):
        text = ", ".join(f"{a} = {b}" for _, a, b in pairs[:3])
        found.append(f"sites that shared one reading turned out to differ later: {text}")
    if session.graphs is not None and (names := session.graphs.betrayed()):
        found.append(f"sites in graphs turned out to be written before they are read: {', '.join(names[:3])}")
    if written := sorted(session.postponed.written):
        found.append(f"sites were written before they were read: {', '.join(written[:3])}")
    if unproven := sorted(session.postponed.unproven):
        text = "parts of the model were left out, and sites were read where they had never been compared"
        found.append(f"{text}: {', '.join(unproven[:3])}")
    return [f"{text} (a capture with --at-once reads each when it is passed)" for text in found]
