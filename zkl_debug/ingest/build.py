"""Dumped tensors as a capture: keyed calls and their tensors in, a folder that ``diff`` reads out."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from zkl_debug.errors import Refused
from zkl_debug.ingest.calls import Call, align
from zkl_debug.ingest.raw import RawTensor
from zkl_debug.schema import EventRecord, Json, SiteBlock, SiteKind, SiteMeta, StateRecord, parse_site
from zkl_debug.store.build import make_block, make_frame
from zkl_debug.store.writer import CaptureWriter

_INPUTS = ("inputs/token_ids:in.0", "inputs/position_ids:in.0")
_LISTED = 200


@dataclass
class Survey:
    """Whether the tensors under a name are rows, asked of every call before any is written.

    A tensor that has the token dimension in one call and not in another only happens to be as long as the call: none
    of its tensors are taken.
    """

    seen: dict[str, set[str]] = field(default_factory=dict)

    def look(self, name: str, call: Call, shape: tuple[int, ...]) -> None:
        """Note how a tensor fits a call."""
        fits = place(name, call, shape)
        self.seen.setdefault(name, set()).add(fits if isinstance(fits, str) else "")

    def refused(self) -> dict[str, str]:
        """Names that are not taken, and why."""
        return {name: sorted(why)[-1] for name, why in self.seen.items() if why != {""}}


def place(name: str, call: Call, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...], int] | str:
    """(rows of the call, their places in the flattened leading dimensions, row shape, leading dimensions), or why not.

    Logits are often computed for the last token of each sequence only.
    """
    fits = align(call, shape)
    if not isinstance(fits, str):
        take, row_shape, lead = fits
        return np.arange(len(take)), take, row_shape, lead
    if "logits" in name.rpartition(".")[2].lower() and shape and shape[0] == len(call.last):
        there = np.flatnonzero(call.last >= 0)
        return call.last[there], there, shape[1:], 1
    return fits


class CaptureBuilder:
    """Writes a capture call by call.

    Args:
        out: new or empty folder.
        side: label of the system the dump is of.
        payload: keep the bits, not digests alone.
        meta: facts of the source, for the manifest.
        refused: names that are left out everywhere, and why.
    """

    def __init__(
        self, out: Path, side: str, *, payload: bool, meta: Mapping[str, Json], refused: Mapping[str, str]
    ) -> None:
        self.payload = payload
        self.not_rows = dict(refused)
        self.notes: list[str] = []
        self.rows = 0
        self._writer = CaptureWriter(out, side=side, meta={**meta, "versions": {}})
        self._frames = 0
        self._metas: dict[str, SiteMeta] = {}

    def parameters(self, records: Mapping[str, StateRecord]) -> None:
        """Digests of the weights, so that stale or other ones are found before any layer is blamed."""
        if records:
            self._writer.write_event(EventRecord(0, "ingested parameters"))
            self._writer.write_state(0, list(records.values()))

    def frame(self, call: Call, tensors: Iterable[tuple[str, RawTensor, str]], step: int = -1) -> None:
        """One call.

        Args:
            call: its rows.
            tensors: (site name, tensor, operator class) in order of execution.
            step: training step, -1 where it has none.
        """
        blocks = [
            self._input(name, values)
            for name, values in zip(_INPUTS, (call.rows["token"], call.positions), strict=True)
        ]
        seen: dict[str, int] = {}
        for name, tensor, semantic in tensors:
            if name in self.not_rows:
                continue
            count = seen[name] = seen.get(name, -1) + 1
            owner, _, port = name.rpartition(":")
            block = self._block(name if not count else f"{owner}#{count}:{port}", name, call, tensor, semantic)
            if block is not None:
                blocks.append(block)
        frame = make_frame(
            self._frames,
            call.phase,
            step=step,
            n_padded=call.slots,
            n_seqs=len(call.last),
            max_seqlen_q=call.longest,
            micro_batch=self._frames,
        )
        self._writer.write_frame(frame, call.rows, blocks)
        self._frames += 1
        self.rows += len(call.rows)

    def close(self, manifest: Mapping[str, Json]) -> Path:
        """Finish the capture.

        Raises:
            Refused: when it has no row or no site.
        """
        if not self.rows or len(self._metas) <= len(_INPUTS):
            what = "row" if not self.rows else "tensor with token rows"
            why = next(iter(self.not_rows.items()), None)
            self._writer.abort("nothing to write")
            raise Refused(
                f"no {what} was found" + (f"; {why[0]}: {why[1]}" if why else ""),
                "activations whose leading dimensions are the tokens of the call",
            )
        facts: dict[str, Json] = {
            "probe": {"ok": True, "errors": []},
            "level": "payload" if self.payload else "digest",
            "id": uuid.uuid4().hex,
            "not_rows": dict(list(self.not_rows.items())[:_LISTED]),
            "notes": self.notes,
        }
        return self._writer.close(manifest={**facts, **manifest})

    def _input(self, name: str, values: np.ndarray) -> SiteBlock:
        bits = np.ascontiguousarray(values.astype(np.int64)).view(np.uint64)[:, None]
        meta = self._meta(name, "int64", (), "input", SiteKind.INPUT)
        return make_block(meta, bits, payload=self.payload)

    def _block(self, name: str, known_as: str, call: Call, tensor: RawTensor, semantic: str) -> SiteBlock | None:
        fits = place(known_as, call, tensor.shape)
        if isinstance(fits, str):
            self.not_rows.setdefault(known_as, fits)
            return None
        rows, take, row_shape, lead = fits
        if not len(rows):
            return None
        assert tensor.bits is not None
        bits = tensor.bits.reshape(prod(tensor.shape[:lead]), -1)[take]
        if not bits.shape[1]:
            self.not_rows.setdefault(known_as, f"shape {list(tensor.shape)} holds nothing")
            return None
        return make_block(
            self._meta(name, tensor.dtype, row_shape, semantic, SiteKind.MODULE),
            bits,
            rows.astype(np.uint32),
            payload=self.payload,
        )

    def _meta(self, name: str, dtype: str, row_shape: tuple[int, ...], semantic: str, kind: SiteKind) -> SiteMeta:
        known = self._metas.get(name)
        if known is None or known.torch_dtype != dtype or known.row_shape != row_shape:
            site = parse_site(name)
            order = len(self._metas) if known is None else known.order
            made = SiteMeta(name, kind, site.layer, order, site.port, dtype, row_shape, semantic=semantic)
            if known is not None:
                return made  # the writer files it beside the first form and notes it
            known = self._metas[name] = made
        return known
