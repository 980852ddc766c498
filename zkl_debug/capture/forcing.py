"""Teacher forcing: while side B runs, every operator's output is compared with side A's and then replaced by it.

Each operator so works on A's values, whatever the operators before it did, and one pass names all operators that
diverge on their own, not only the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.layout import RowView, dtype_name, raw_rows
from zkl_debug.schema import RowFlag, SiteKind, parse_site


class Visitor(Protocol):
    """What a session shows the rows of every site to, in the place of a writer."""

    def visit(self, name: str, view: RowView, kind: SiteKind, rows: NDArray[np.void], source: torch.Tensor) -> None:
        """See :meth:`Forcing.visit`."""


class ReferenceSite(Protocol):
    """What forcing needs of a captured site; :class:`zkl_debug.store.reader.Site` fits."""

    meta: Any
    rows: NDArray[np.int64]
    has_payload: bool

    def payload(self, rows: Any) -> NDArray[Any]:
        """Raw bits of the given site rows."""


class Reference(Protocol):
    """What forcing needs of a capture; :class:`zkl_debug.store.reader.Capture` fits."""

    rows: NDArray[np.void]

    @property
    def sites(self) -> dict[str, Any]:
        """Sites by name."""


@dataclass
class SiteResult:
    """What one pass saw of a site.

    Attributes:
        order: rank of the site's first visit.
        compared, mismatched: rows.
        first: sample, position and token of the first row that differed.
        forced: rows that were replaced by A's.
        missed: rows that differed and could not be replaced, because the tensor seen was a copy.
    """

    order: int
    compared: int = 0
    mismatched: int = 0
    first: tuple[int, int, int] | None = None
    forced: int = 0
    missed: int = 0


@dataclass
class Forcing:
    """Holds side A and the tally of the pass; put into a session's ``forcing``.

    Attributes:
        reference: capture of side A with payload.
        only: sites whose values are put in place; None for every output. The others are compared all the same.
        watched: a site whose values are kept for both sides.
        results: by site name, in order of first visit.
        unmatched: sites of B that A has no payload of.
        kept: raw bits of the watched site, (A's, what B goes on with), [n, W] each, one entry a visit.
    """

    reference: Reference
    only: frozenset[str] | None = None
    watched: str = ""
    results: dict[str, SiteResult] = field(default_factory=dict)
    unmatched: set[str] = field(default_factory=set)
    kept: list[tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=list)
    _index: dict[str, dict[bytes, int]] = field(default_factory=dict)

    def visit(self, name: str, view: RowView, kind: SiteKind, rows: NDArray[np.void], source: torch.Tensor) -> None:
        """Compare the rows of one site with A's and, for an output, write A's bits in their place.

        Args:
            name: canonical site name.
            view: the rows as seen.
            kind: inputs fed to the model are compared, never replaced.
            rows: row-table entries of the view's rows, same order.
            source: the tensor the program goes on with.
        """
        site = self.reference.sites.get(name)
        if site is None or not site.has_payload or site.meta.torch_dtype != dtype_name(view.tensor):
            self.unmatched.add(name)
            return
        index = self._index_of(name, site)
        at = np.array([index.get(key, -1) for key in row_keys(rows)], np.int64)
        mine = np.flatnonzero(at >= 0)
        if len(mine) == 0:
            return
        result = self.results.setdefault(name, SiteResult(len(self.results)))
        here, there = raw_rows(view)[mine], site.payload(at[mine])
        if here.shape != there.shape:
            self.unmatched.add(name)
            return
        differ = (here != there).any(axis=1)
        result.compared += len(mine)
        result.mismatched += int(differ.sum())
        if name == self.watched:
            self.kept.append((there, there if self.only is None or name in self.only else here))
        if not differ.any():
            return
        if result.first is None:
            row = rows[mine[np.flatnonzero(differ)[0]]]
            result.first = int(row["sample"]), int(row["position"]), int(row["token"])
        if kind is SiteKind.INPUT or parse_site(name).is_input or (self.only is not None and name not in self.only):
            return
        if not shares_storage(view.tensor, source):
            result.missed += int(differ.sum())
            return
        write_rows(view, mine[differ], there[differ])
        result.forced += int(differ.sum())

    @staticmethod
    def looked_up_again(
        selected: torch.Tensor, table: torch.Tensor, before: torch.Tensor, now: torch.Tensor
    ) -> torch.Tensor:
        """Log-probs [n], out of ``table`` [n, V] where a label was put right (``before`` to ``now``, [n] each)."""
        changed = ((before != now) & (now >= 0) & (now < table.shape[-1])).to(selected.device)
        if not bool(changed.any()):
            return selected
        labels = now.to(selected.device)[changed].long()
        replaced = selected.clone()
        replaced[changed] = table[changed].gather(1, labels[:, None]).squeeze(1).to(selected.dtype)
        return replaced

    def _index_of(self, name: str, site: ReferenceSite) -> dict[bytes, int]:
        known = self._index.get(name)
        if known is None:
            known = {}
            for i, key in enumerate(row_keys(self.reference.rows[site.rows])):
                known.setdefault(key, i)
            self._index[name] = known
        return known


def row_keys(rows: NDArray[np.void]) -> list[bytes]:
    """Key of each row-table entry: position, label or not, prefix digest; equal keys mean equal tokens so far."""
    packed = np.zeros(len(rows), [("position", "<i8"), ("label", "<i8"), ("prefix", "<u8", (2,))])
    packed["position"] = rows["position"]
    packed["label"] = rows["flags"] & np.uint32(RowFlag.LABEL)
    packed["prefix"] = rows["prefix"]
    return [entry.tobytes() for entry in packed]


def shares_storage(view: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a write to ``view`` reaches ``source``."""
    return view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def write_rows(view: RowView, which: NDArray[np.int64], bits: NDArray[Any]) -> None:
    """Write raw bits into rows ``which`` of the view (indices into its rows)."""
    target = view.tensor.detach()
    at = which if view.take is None else view.take[which]
    value = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(target.dtype)
    value = value.reshape(len(which), *target.shape[1:]).to(target.device)
    target[torch.from_numpy(at).to(target.device)] = value
