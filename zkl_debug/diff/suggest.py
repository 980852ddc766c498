"""What to run next. Only commands that exist, with the paths of these captures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from zkl_debug.diff.alone import Alone
from zkl_debug.diff.answer import First
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.coverage import Coverage
from zkl_debug.diff.flow import is_inside_mixer
from zkl_debug.diff.model import CaptureLike, Kind, Outcome, fact
from zkl_debug.diff.sites import SitePair


def suggestions(
    comparison: Comparison, outcome: Outcome, first: First | None, coverage: Coverage, verified: bool
) -> tuple[str, ...]:
    """Next commands for a finished comparison; ``verified``: ``--verify-bytes`` was given."""
    a, b = _paths(comparison)
    alone = isinstance(comparison.b, Alone)
    if outcome is Outcome.IDENTICAL:
        sides = ("a",) if alone else ("a", "b")
        both = all(any(_has_payload(pair, side) for pair in comparison.sites) for side in sides)
        verify = both and not verified and not comparison.all_bytes
        return (f"zkl-debug diff {a}{'' if alone else ' ' + b} --verify-bytes",) if verify else ()
    if alone:
        return (f"zkl-debug diff {a}" if comparison.stopped is not None else f"zkl-debug inspect {a}",)
    commands = [] if first is None else _inside(comparison, first, a, b)
    if comparison.stopped is not None:
        commands.append(f"zkl-debug diff {a} {b}")
    if first is not None and first.inputs == "port":
        commands += [f"zkl-debug inspect {a}", f"zkl-debug inspect {b}"]
    elif coverage.matched < coverage.captured:
        commands.append(f"zkl-debug inspect {b}")
    return tuple(commands) or on_a_page(comparison)


def on_a_page(comparison: Comparison) -> tuple[str, ...]:
    """Where there is nothing to look into: every site and every row of the comparison on one page."""
    a, b = _paths(comparison)
    return (f"zkl-debug diff {a}{'' if isinstance(comparison.b, Alone) else ' ' + b} --html report.html",)


def _paths(comparison: Comparison) -> tuple[str, str]:
    return path_of(comparison.a, "A"), path_of(comparison.b, "B")


def _inside(comparison: Comparison, first: First, a: str, b: str) -> list[str]:
    """Commands that look into the first site."""
    again = comes_from_one_bed_run(comparison.a, comparison.b)
    if first.stats.elements is None and not first.differ:
        return [f"zkl-debug diff {a} {b} --drill" if again else _payload_capture(comparison.b, first)]
    name = looked_into(comparison, first)
    pair = next((pair for pair in comparison.sites if pair.name == name), None)
    if pair is None or _on_ranks(comparison) or first.inputs == "port":
        return []
    commands, site = [], quote(pair.name)
    looked_up = pair.meta.semantic in ("label", "selected")
    if again and not looked_up and not is_inside_mixer(pair.meta.semantic):
        commands.append(f"zkl-debug zoom {a} {b} --site {site}")
    if all(_has_payload(pair, side) for side in "ab") and not looked_up and not pair.differ:
        commands.append(f"zkl-debug bundle {a} {b} --site {site} --out DIR")
    if again and first.kind is Kind.OWN and first.inputs == "equal" and pair.name == first.site and _is_called(pair):
        # Equal inputs and another output: the operator is another, or it reads what is not captured.
        commands.append(f"zkl-debug diff {a} {b} --replay")
    return commands


def looked_into(comparison: Comparison, first: First) -> str:
    """The site that can be looked into: the first one, or for a block format that one side alone uses the product it is
    for, which both sides have."""
    pair = next((pair for pair in comparison.sites if pair.name == first.site), None)
    return f"{first.name.module}:out" if pair is not None and pair.differ and _is_quantised(pair) else first.site


def _is_called(pair: SitePair) -> bool:
    """Whether a replay can call what computes the site by itself."""
    return pair.meta.semantic not in ("label", "selected") and not _is_quantised(pair)


def _is_quantised(pair: SitePair) -> bool:
    """Whether it is a part of a block format, on one side at least."""
    return any(site is not None and site.meta.semantic.startswith("quantised") for site in (pair.a, pair.b))


def _on_ranks(comparison: Comparison) -> bool:
    """Whether a side is on several ranks, which zoom and bundle do not run."""
    return any(int(capture.manifest.get("world", 1) or 1) > 1 for capture in (comparison.a, comparison.b))


def _has_payload(pair: SitePair, side: str) -> bool:
    site = pair.a if side == "a" else pair.b
    return site is not None and site.has_payload


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
    told = bed if isinstance(bed, Mapping) else {"bed": bed}
    if told.get("bed"):
        return f"zkl-debug capture --bed {quote(str(told['bed']))}{_as_run(told)} --level payload {window} --out DIR"
    return f"zkl-debug capture --side {quote(capture.side)} --level payload {window} --out DIR -- PROGRAM"


def _as_run(bed: Mapping[str, object]) -> str:
    """Options of a bed that are not what they are when left out, as far as a capture tells them."""
    stack, graphs = bed.get("stack"), bed.get("graphs")
    given = ["" if stack in (None, True) else " --stack off", " --graphs" if graphs is True else ""]
    for name, usual in (("seed", 0), ("dtype", "bf16"), ("size", "full")):
        value = bed.get(name, usual)
        given.append("" if value == usual else f" --{name} {quote(str(value))}")
    return "".join(given)
