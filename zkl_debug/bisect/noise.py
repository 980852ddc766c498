"""How many repeats a "zero" needs. Noise is one-sided: a mismatch is final, a pass may be luck."""

from __future__ import annotations

import math
from functools import cache

from zkl_debug.errors import UsageError


def conclusions_bound(n: int) -> int:
    """More "zero" conclusions than a search over ``n`` switches can draw (all phases, worst case)."""
    return n * (math.ceil(math.log2(n + 1)) + 4) + 16


def repeats_for(visibility: float, error_bound: float, conclusions: int) -> int:
    """Repeats of every passing configuration that keep the chance of any false "zero" below ``error_bound``.

    A configuration that mismatches shows it in one run with probability ``visibility``, so all ``r`` repeats pass by
    luck with probability ``(1 - visibility) ** r``; the union bound over ``conclusions`` does the rest.

    Raises:
        UsageError: a visibility outside (0, 1], an error bound outside (0, 1).
    """
    if not 0.0 < visibility <= 1.0:
        raise UsageError(f"visibility {visibility} is not usable", "a probability above 0, at most 1")
    if not 0.0 < error_bound < 1.0:
        raise UsageError(f"error bound {error_bound} is not usable", "a probability between 0 and 1")
    if visibility == 1.0:
        return 1
    return max(1, math.ceil(math.log(error_bound / conclusions) / math.log1p(-visibility)))


@cache
def visibility_bound(seen: int, runs: int, confidence: float = 0.95) -> float:
    """Lower confidence bound (Clopper-Pearson) of the visibility, from ``seen`` mismatches in ``runs`` runs.

    Returns 0.0 when no run showed the mismatch.
    """
    assert 0 <= seen <= runs
    if seen == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        mid = (low + high) / 2
        tail = sum(math.comb(runs, k) * mid**k * (1 - mid) ** (runs - k) for k in range(seen, runs + 1))
        low, high = (mid, high) if tail < 1 - confidence else (low, mid)
    return low
