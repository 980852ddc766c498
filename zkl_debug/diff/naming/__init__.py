"""Names of one module in different trees: which site of one capture is which site of another."""

from __future__ import annotations

from zkl_debug.diff.naming.join import Joined, Renaming, join_names
from zkl_debug.diff.naming.rules import Family, families_of, load_map

__all__ = ["Family", "Joined", "Renaming", "families_of", "join_names", "load_map"]
