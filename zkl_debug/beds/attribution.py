"""How much of the final log-prob gap each operator that diverges on its own accounts for.

Operators are put right with the other side's values, one after the other in execution order. Once the first i of them
are right, everything up to there is equal, so what remains of the gap is due to the later ones: the drop at each step
is that operator's share, and the shares add up to the whole gap. Putting one operator right alone is told as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zkl_debug.beds.run import BedContext
from zkl_debug.bits import to_float64
from zkl_debug.capture.api import Capture
from zkl_debug.capture.forcing import Forcing, Reference
from zkl_debug.schema import Json, parse_site

LOG_PROBS = "logprobs/selected:out.0"
_MOST = 24


@dataclass(frozen=True)
class Gap:
    """Distance of the log-probs of both sides over the rows both have, in nats."""

    rows: int
    mean_abs: float
    max_abs: float

    def to_json(self) -> Json:
        """The ``gap`` object."""
        return {"site": LOG_PROBS, "rows": self.rows, "mean_abs": self.mean_abs, "max_abs": self.max_abs}


@dataclass(frozen=True)
class Share:
    """What one operator accounts for.

    Attributes:
        site: its output.
        share: of the mean gap, in execution order; all shares add up to 1 when nothing remains.
        alone: part of the gap that goes away when only this operator is put right; negative when it grows.
    """

    site: str
    share: float
    alone: float


@dataclass(frozen=True)
class Attribution:
    """Shares of all operators.

    Attributes:
        gap: with nothing put right.
        remaining: with every operator put right.
        shares: in execution order.
        left_out: operators beyond the first ones, which were not tried.
        still: outputs that still differ with every operator put right; the rest of the gap is theirs.
    """

    gap: Gap
    remaining: Gap
    shares: tuple[Share, ...]
    left_out: tuple[str, ...] = ()
    still: tuple[str, ...] = ()

    @property
    def unexplained(self) -> float:
        """Part of the mean gap that stays with every operator put right; 0 where there is no gap."""
        return self.remaining.mean_abs / self.gap.mean_abs if self.gap.mean_abs else 0.0

    def to_json(self) -> Json:
        """The ``attribution`` object of ``bisect operators --json``."""
        return {
            "gap": self.gap.to_json(),
            "remaining": self.remaining.to_json(),
            "operators": [vars(share) for share in self.shares],
            "unexplained": self.unexplained,
            "left_out": list(self.left_out),
            "still_differ": list(self.still),
        }


def attribute(
    context: BedContext, reference: Reference, sites: Sequence[str], say: Callable[[str], None]
) -> Attribution:
    """Run generation once per operator and order of putting right; see the module's text.

    Args:
        context: an open bed whose scoring was captured.
        reference: that capture, with payload.
        sites: outputs that diverge on their own, in execution order; the first 24 are tried.
        say: told what happens.
    """
    tried = list(sites[:_MOST])
    nothing, _ = _gap(context, reference, [])
    ladder = [nothing]
    still: tuple[str, ...] = ()
    alone = []
    for i, site in enumerate(tried):
        say(f"gen: operator {i + 1} of {len(tried)} put right")
        gap, still = _gap(context, reference, tried[: i + 1])
        ladder.append(gap)
        # The first operator put right alone is the first step of the ladder.
        alone.append(ladder[1] if i == 0 else _gap(context, reference, [site])[0])
    return Attribution(nothing, ladder[-1], shares_of(tried, ladder, alone), tuple(sites[_MOST:]), still)


def shares_of(sites: Sequence[str], ladder: Sequence[Gap], alone: Sequence[Gap]) -> tuple[Share, ...]:
    """Shares from the gaps.

    Args:
        sites: operators, n of them.
        ladder: gap with the first 0 .. n of them put right, n + 1.
        alone: gap with just that one put right, n.
    """
    whole = ladder[0].mean_abs
    if whole == 0.0:
        return tuple(Share(site, 0.0, 0.0) for site in sites)
    return tuple(
        Share(site, (before.mean_abs - after.mean_abs) / whole, 1.0 - only.mean_abs / whole)
        for site, before, after, only in zip(sites, ladder[:-1], ladder[1:], alone, strict=True)
    )


def _gap(context: BedContext, reference: Reference, right: Sequence[str]) -> tuple[Gap, tuple[str, ...]]:
    """Gap of the log-probs with some operators put right, and the other outputs that differ all the same."""
    forcing = Forcing(reference, only=frozenset(right), watched=LOG_PROBS)
    with context.side("gen"), Capture(context.model, None, "gen", strict=True, forcing=forcing):
        context.run_gen()
    differ = [(r.order, n) for n, r in forcing.results.items() if r.mismatched and not parse_site(n).is_input]
    still = tuple(name for _, name in sorted(differ) if name not in right)
    if not forcing.kept:
        return Gap(0, 0.0, 0.0), still
    dtype = reference.sites[LOG_PROBS].meta.torch_dtype
    a, b = (to_float64(np.concatenate([visit[side] for visit in forcing.kept]), dtype) for side in (0, 1))
    distance = np.abs(a - b)
    return Gap(len(distance), float(distance.mean()), float(distance.max())), still
