"""What a diff says of the ranks of a side."""

from __future__ import annotations

from zkl_debug.diff.model import CaptureLike, Refusal, Skip, refuse
from zkl_debug.diff.world.fold import Folded
from zkl_debug.diff.world.level import Leveled
from zkl_debug.schema import Json


def folded_of(capture: CaptureLike) -> Folded | None:
    """The folded capture behind what the diff works with, None for a capture of one rank."""
    inner: object = capture
    while not isinstance(inner, Folded):
        inner = inner._capture if isinstance(inner, Leveled) else getattr(inner, "original", None)
        if inner is None:
            return None
    return inner


def lost_ranks(name: str, capture: CaptureLike) -> list[Skip]:
    """Ranks that are not there, and what could not be joined because of it."""
    folded = folded_of(capture)
    if folded is None:
        return []
    world = int(folded.manifest.get("world", 1))
    missing = sorted(set(range(min(world, 1 << 20))) - set(folded.ranks))
    lost = [Skip(f"lost in {name}: rank {rank}", f"nothing of rank {rank} of {world} was captured") for rank in missing]
    short = {rank: len(own.frames) for rank, own in folded.ranks.items()}
    most = {folded.places[r].at("dp"): 0 for r in short}
    for rank, count in short.items():
        replica = folded.places[rank].at("dp")
        most[replica] = max(most[replica], count)
    for rank, count in short.items():
        longest = most[folded.places[rank].at("dp")]
        if count < longest:
            lost.append(Skip(f"lost in {name}: end of rank {rank}", f"it has {count} of {longest} forwards"))
    return [*lost, *(Skip(f"{skip.what} ({name})", skip.reason, skip.count) for skip in folded.skips)]


def rank_report(name: str, capture: CaptureLike) -> dict[str, Json]:
    """For ``checks`` of the verdict: the layout, and whether ranks that should have the same rows have."""
    folded = folded_of(capture)
    if folded is None:
        return {}
    sizes = " ".join(f"{group}{size}" for group, size in folded.layout.items() if size > 1)
    first = folded.disagreements[0] if folded.disagreements else None
    return {
        f"ranks_{name.lower()}": {
            "layout": sizes,
            "ranks": len(folded.ranks),
            "alike": first is None,
            "first": "" if first is None else first.text,
        }
    }


def check_ranks(name: str, capture: CaptureLike) -> Refusal | None:
    """Weights that every rank should have, and ranks have differently."""
    folded = folded_of(capture)
    if folded is None or not folded.unlike_weights:
        return None
    parameter, rank, other = folded.unlike_weights[0]
    return refuse(
        "ranks-hold-other-weights",
        f"ranks {rank} and {other} of {name} hold different values of {parameter}",
        f"{len(folded.unlike_weights)} parameter(s) that are not cut over ranks and differ between them",
        "every rank with the same copy of what is not cut",
        "broadcast the weights, or load the checkpoint again, then capture again",
        capture=name,
        parameters=[entry[0] for entry in folded.unlike_weights[:10]],
    )
