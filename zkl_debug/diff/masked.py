"""Divergence that does not last: where a later rounding hides it again, and whether the log-probs still show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from zkl_debug.schema import Json, parse_site

_FINAL = ("logprobs/selected", "logprobs/log_softmax", "output_layer")
_LISTED = 10


@dataclass(frozen=True)
class Masked:
    """What became of a divergence.

    Attributes:
        sites: outputs that are equal in rows whose inputs differ, with the number of those rows, in execution order.
        final: the last output there is of log-probs or logits; empty when none was compared.
        compared, mismatched: its rows, over all edges.
    """

    sites: tuple[tuple[str, int], ...]
    final: str
    compared: int
    mismatched: int

    @property
    def hidden(self) -> bool:
        """Whether a divergence was hidden entirely: some site masks it, and every final value is equal."""
        return bool(self.sites) and self.compared > 0 and self.mismatched == 0

    @property
    def text(self) -> str:
        """One line, empty when nothing is masked."""
        if not self.sites:
            return ""
        site, rows = self.sites[0]
        more = f" (and {len(self.sites) - 1} more sites)" if len(self.sites) > 1 else ""
        text = f"{site} is equal in {rows} rows whose inputs differ{more}"
        if self.hidden:
            return f"{text}; all {self.compared} values of {self.final} are equal: hidden by a later rounding"
        if self.compared:
            return f"{text}; {self.mismatched} of {self.compared} values of {self.final} still differ"
        return f"{text}; no log-probs were compared"

    def to_json(self) -> Json:
        """The ``masked`` object of the verdict document."""
        return {
            "hidden": self.hidden,
            "sites": [{"site": site, "rows": rows} for site, rows in self.sites[:_LISTED]],
            "final": {"site": self.final, "compared": self.compared, "mismatched": self.mismatched},
            "text": self.text,
        }


def masked(table: NDArray[Any], edge: str | None) -> Masked:
    """What became of the divergence of an edge.

    Args:
        table: from :func:`zkl_debug.diff.tables.site_table`.
        edge: the edge of the verdict; None when nothing differs.
    """
    mine = table[(table["edge"] == edge) & (table["masked"] > 0)] if edge is not None else table[:0]
    sites = tuple((str(row["site"]), int(row["masked"])) for row in mine)
    for owner in _FINAL:
        rows = [r for r in table if (s := parse_site(str(r["site"]))).owner == owner and not s.is_input]
        compared = sum(int(row["compared"]) for row in rows)
        if compared:
            name = f"{owner}:{parse_site(str(rows[0]['site'])).port}"
            return Masked(sites, name, compared, sum(int(row["mismatched"]) for row in rows))
    return Masked(sites, "", 0, 0)
