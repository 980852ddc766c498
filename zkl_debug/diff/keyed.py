"""What differs at a site, by row key."""

from __future__ import annotations

import numpy as np

from zkl_debug.diff.compare import SiteRows
from zkl_debug.diff.edges import Pairs
from zkl_debug.diff.model import Bools
from zkl_debug.diff.rows import RowSpace

#: For A, for B and for both, per key: do any copies differ; and was the site not captured there. bool [3, K] each.
KeyFlags = tuple[Bools, Bools]


def differing_keys(space: RowSpace, pairs: Pairs, differs: Bools) -> Bools:
    """Keys with a pair that differs, within A, within B and anywhere, bool [3, K]."""
    flags = np.zeros((3, space.n_keys), np.bool_)
    chosen = np.flatnonzero(differs)
    flags[pairs.sides[chosen], pairs.key[chosen]] = True
    flags[2] |= flags[0] | flags[1]
    return flags


def key_flags(space: RowSpace, pairs: Pairs, present: Bools, differs: Bools, where: SiteRows) -> KeyFlags:
    """:data:`KeyFlags` of a site.

    Args:
        space, pairs: rows and pairs.
        present, differs: of the site, bool [P].
        where: rows of the site.
    """
    has = np.zeros((2, space.n_keys), np.bool_)
    rows = np.flatnonzero(where.at >= 0)
    has[space.side[rows], space.key[rows]] = True
    return differing_keys(space, pairs, differs & present), ~np.stack([has[0], has[1], has[0] & has[1]])
