"""What the captures hold of the calls that a replay looks at."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.beds.replay_probe import Operand
from zkl_debug.capture.forcing import row_keys
from zkl_debug.diff.comparison import Comparison
from zkl_debug.diff.model import Ints
from zkl_debug.diff.sound import sound_bits
from zkl_debug.errors import Refused


def operand_of(comparison: Comparison, site: int, row: int, name: str) -> Operand:
    """One row of a pair, with the forward it was computed in.

    Args:
        comparison: of the two captures.
        site: index of the output.
        row: unified row.
        name: ``left`` or ``right``.

    Raises:
        Refused: the output was captured without its raw bits.
    """
    space, pair = comparison.space, comparison.sites[site]
    side = int(space.side[row])
    capture = comparison.b if side else comparison.a
    frame, phase = int(space.frame[row]), int(space.phase[row])
    mine = np.flatnonzero((space.side == side) & (space.frame == frame))
    others = np.flatnonzero((space.side == side) & (space.phase != phase))
    alike = np.flatnonzero((space.side == side) & (space.phase == phase) & (space.frame != frame))
    output = _table(comparison, site, side, mine)
    if not output:
        raise Refused(
            f"{pair.name} was captured without its raw bits",
            "captures at payload level",
            "zkl-debug capture --bed NAME --level payload --out DIR",
        )
    inputs: dict[str, dict[bytes, NDArray[Any]]] = {}
    for i, other in enumerate(comparison.sites):
        if other.parsed.owner == pair.parsed.owner and other.parsed.is_input:
            inputs[other.name] = {}
            for rows in (others, alike, mine):  # the nearest row of a key counts
                inputs[other.name].update(_table(comparison, i, side, rows))
    history = _history(comparison, mine) if pair.meta.semantic == "core_attention" else {}
    return Operand(name, str(capture.manifest.get("side", "")), frame, inputs, output, history)


def _history(comparison: Comparison, rows: Ints) -> dict[bytes, tuple[bytes, ...]]:
    """Row keys of positions 0 .. p of some rows; rows whose earlier positions nobody captured are left out."""
    space = comparison.space
    names: dict[int, bytes] = {}
    found = {}
    for row in rows.tolist():
        chain: list[bytes] = []
        key = int(space.key[row])
        while key < space.n_keys:
            if key not in names:
                names[key] = keys_of(comparison, int(space.key_row[key]))[0]
            chain.append(names[key])
            key = int(space.parent[key])
        if len(chain) == int(space.position[row]) + 1:
            found[chain[0]] = tuple(reversed(chain))
    return found


def _table(comparison: Comparison, site: int, side: int, rows: Ints) -> dict[bytes, NDArray[Any]]:
    """Raw bits of unified rows of one side by row key; rows without bits are left out."""
    pair, where = comparison.sites[site], comparison.where(site)
    rows = rows[where.bits[rows]]
    found = pair.b if side else pair.a
    if found is None or not len(rows):
        return {}
    bits = sound_bits(found, where.at[rows])
    return dict(zip(keys_of(comparison, *rows.tolist()), bits, strict=True))


def keys_of(comparison: Comparison, *rows: int) -> list[bytes]:
    """Row keys of unified rows, as a capture session knows them."""
    space = comparison.space
    captures = (comparison.a, comparison.b)
    return [row_keys(captures[int(space.side[r])].rows[[int(space.row[r])]])[0] for r in rows]
