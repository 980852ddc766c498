"""A matplotlib Figure that a notebook shows by itself, without pyplot and its global state."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

_DPI = 110


class Picture(Figure):
    """A figure; the last expression of a notebook cell is drawn."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=_DPI)
        return out.getvalue()
