"""What to run next. Only commands that exist, with the paths of these captures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from zkl_debug.diff.alone import Alone
from zkl_debug.diff.answer import First
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.coverage import Coverage
from zkl_debug.diff.model import CaptureLike, Outcome, fact


def suggestions(
    comparison: Comparison, outcome: Outcome, first: First | None, coverage: Coverage, verified: bool
) -> tuple[str, ...]:
    """Next commands for a finished comparison; ``verified``: digests were recomputed and bytes compared where both are."""
    a, b = (path_of(capture, name) for capture, name in ((comparison.a, "A"), (comparison.b, "B")))
    alone = isinstance(comparison.b, Alone)
    if outcome is Outcome.IDENTICAL:
        has_payload = any(pair.a is not None and pair.a.has_payload for pair in comparison.sites)
        verify = has_payload and not comparison.all_bytes
        return (f"zkl-debug diff {a}{'' if alone else ' ' + b} --verify-bytes",) if verify else ()
    if alone:
        return (f"zkl-debug inspect {a}",)
    commands = []
    again = comes_from_one_bed_run(comparison.a, comparison.b)
    bare = first is not None and first.stats.elements is None and not first.differ
    if first is not None and bare:
        commands.append(f"zkl-debug diff {a} {b} --drill" if again else _payload_capture(comparison.b, first))
    elif first is not None and again and first.inputs != "port" and not first.name.path.startswith("logprobs"):
        commands.append(f"zkl-debug zoom {a} {b} --site {quote(first.site)}")
        commands.append(f"zkl-debug bundle {a} {b} --site {quote(first.site)} --out DIR")
    if first is not None and first.inputs == "port":
        commands += [f"zkl-debug inspect {a}", f"zkl-debug inspect {b}"]
    elif coverage.matched < coverage.captured:
        commands.append(f"zkl-debug inspect {b}")
    return tuple(commands)


def comes_from_one_bed_run(a: CaptureLike, b: CaptureLike) -> bool:
    """Whether both captures lie beside one ``run.json``, so that the run can be made again."""
    roots = [getattr(capture, "root", None) for capture in (a, b)]
    if any(root is None for root in roots):
        return False
    parents = {Path(root).resolve().parent for root in roots if root is not None}
    return len(parents) == 1 and (parents.pop() / "run.json").is_file()


def path_of(capture: CaptureLike, name: str) -> str:
    """Folder of a capture, quoted for a shell; its letter when it is not in a folder."""
    root = getattr(capture, "root", None)
    return name if root is None else quote(str(root))


def _payload_capture(capture: CaptureLike, first: First) -> str:
    """Capture again with raw bits round the first divergence."""
    layer = first.name.layer
    window = f"--layers {max(0, layer - 1)}-{layer}" if layer >= 0 else f"--sites {quote(first.name.owner + ':*')}"
    bed = fact(capture, "bed")
    name = bed.get("bed") if isinstance(bed, Mapping) else bed
    what = f"--bed {quote(str(name))}" if name else "--bed BED"
    return f"zkl-debug capture {what} --level payload {window} --out DIR"
