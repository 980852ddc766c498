"""What to run next. Only commands that exist, with the paths of these captures."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote

from zkl_debug.diff.answer import First
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.coverage import Coverage
from zkl_debug.diff.model import CaptureLike, Outcome, fact


def suggestions(comparison: Comparison, outcome: Outcome, first: First | None, coverage: Coverage) -> tuple[str, ...]:
    """Next commands for a finished comparison."""
    a, b = (path_of(capture, name) for capture, name in ((comparison.a, "A"), (comparison.b, "B")))
    if outcome is Outcome.IDENTICAL:
        has_payload = any(pair.a is not None and pair.a.has_payload for pair in comparison.sites)
        verify = has_payload and not comparison.all_bytes
        return (f"zkl-debug diff {a} {b} --verify-bytes",) if verify else ()
    commands = []
    if first is not None and first.stats.max_ulp is None and not first.differ:
        commands.append(_payload_capture(comparison.b, first))
    if first is not None and first.inputs == "port":
        commands += [f"zkl-debug inspect {a}", f"zkl-debug inspect {b}"]
    elif coverage.matched < coverage.captured:
        commands.append(f"zkl-debug inspect {b}")
    return tuple(commands)


def path_of(capture: CaptureLike, name: str) -> str:
    """Folder of a capture, quoted for a shell; its letter when it is not in a folder."""
    root = getattr(capture, "root", None)
    return name if root is None else quote(str(root))


def _payload_capture(capture: CaptureLike, first: First) -> str:
    """Capture again with raw bits round the first divergence."""
    layer = first.name.layer
    window = f"--layers {max(0, layer - 1)}-{layer}" if layer >= 0 else f"--sites {quote(first.name.owner + ':*')}"
    bed = fact(capture, "bed")
    name = bed.get("name") if isinstance(bed, Mapping) else bed
    what = f"--bed {quote(str(name))}" if name else "--bed BED"
    return f"zkl-debug capture {what} --level payload {window} --out DIR"
