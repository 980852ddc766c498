"""A capture of several ranks seen as one of the whole model: rows joined, shards added up, partial sums kept apart."""

from __future__ import annotations

from zkl_debug.diff.world.fold import Folded, fold
from zkl_debug.diff.world.level import level

__all__ = ["Folded", "fold", "level"]
