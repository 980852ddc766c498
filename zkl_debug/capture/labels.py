"""Label rows whose labels are still on a device when they are recorded: made when the frame is filed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import Pending, payload_bits
from zkl_debug.capture.forcing import Forcing
from zkl_debug.capture.frame import Deferred, OpenFrame
from zkl_debug.capture.layout import RowView, dtype_name
from zkl_debug.capture.rows import label_rows
from zkl_debug.digest import digest_array
from zkl_debug.schema import U64, SiteBlock, SiteKind, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession

#: Site of the label that was really used.
LABEL = "logprobs/label:out.0"
#: Of a frame's rows: the intended label of each candidate (negative: none) and flags to add.
Intended = Callable[[NDArray[np.void]], tuple[NDArray[np.integer], NDArray[Any]]]


@dataclass(frozen=True)
class LateSite:
    """A site over all candidates, on the device."""

    meta: SiteMeta
    pending: Pending


@dataclass(frozen=True)
class LateLabels(Deferred):
    """Candidates for label rows.

    Attributes:
        parents: row of each, shape [m].
        intended: see :data:`Intended`.
        sites: what is recorded on these rows.
    """

    parents: NDArray[np.integer]
    intended: Intended
    sites: tuple[LateSite, ...]

    def blocks(self, frame: OpenFrame, parts: list[U64]) -> list[SiteBlock]:
        """The sites; adds the label rows to the frame. Candidates without a label are left out."""
        label, flags = self.intended(frame.rows.rows)
        keep = np.flatnonzero(label >= 0)
        if len(keep) == 0:
            return []
        index = add_label_rows(frame, self.parents[keep], label[keep], flags[keep])
        found = []
        for site in self.sites:
            at = site.pending
            payload = payload_bits(at)
            digest = parts[at.part][at.start : at.start + at.rows][keep]
            found.append(SiteBlock(site.meta, index, digest, None if payload is None else payload[keep]))
        return found


def record_labels(
    session: CaptureSession,
    label_site: str,
    rows: NDArray[np.void],
    selected: torch.Tensor,
    used: torch.Tensor,
    table: torch.Tensor | None = None,
) -> None:
    """Record selected log-probs on label rows, with the label that was really used.

    Args:
        session: the session with an open frame.
        label_site: site of the selected log-prob, e.g. ``logprobs/selected:out.0``.
        rows: label rows from :func:`zkl_debug.capture.rows.label_rows`, shape [n].
        selected: log-probs, shape [n], float32.
        used: label ids that were used, shape [n], int64; teacher forcing writes the other side's into it.
        table: log-probs of the whole vocabulary, shape [n, V]. Where a label was put right, the log-prob is
            looked up again in it; without it the old label's stays.
    """
    frame = session.frame
    if frame is None or frame.rows.warmup or len(rows) == 0:
        return
    index = (frame.n_rows + np.arange(len(rows))).astype(np.uint32)
    frame.labels.append(rows)
    before = used.clone() if session.forcing is not None else used
    session.record_view(LABEL, RowView(used, None, index, ()), kind=SiteKind.TAP, semantic="label")
    if isinstance(session.forcing, Forcing) and table is not None:  # others only look on and change no label
        selected = session.forcing.looked_up_again(selected, table, before, used)
    view = RowView(selected.contiguous(), None, index, ())
    session.record_view(label_site, view, kind=SiteKind.TAP, semantic="selected")


def record_late_labels(
    session: CaptureSession,
    label_site: str,
    parents: NDArray[np.integer],
    used: torch.Tensor,
    selected: torch.Tensor,
    intended: Intended,
) -> bool:
    """:func:`record_labels` while labels and log-probs are on a device, without waiting for them.

    Args:
        session: the session with an open frame.
        label_site: site of the selected log-prob.
        parents: rows of the frame, shape [m].
        used: label that was used for each, int64 [m], -1 where the log-prob is that of no known label.
        selected: log-probs, float32 [m].
        intended: called when the frame is filed, with its row table.

    Returns:
        False where labels must be recorded at once: on a CPU, or under forcing.
    """
    frame = session.frame
    if frame is None or not session.late(used, selected):
        return False
    sites = []
    index = np.zeros(len(parents), np.uint32)  # the rows are known when the frame is filed
    for name, tensor, semantic in ((LABEL, used, "label"), (label_site, selected, "selected")):
        if not session.wants(name):
            continue
        view = RowView(tensor.contiguous(), None, index, ())
        pending = session.device_frame(frame).launch(view, session.options.level == "payload")
        if pending is None:
            return False
        sites.append(LateSite(session.meta_of(session.occurrence(frame, name), view, SiteKind.TAP, semantic), pending))
    frame.deferred.append(LateLabels(np.asarray(parents), intended, tuple(sites)))
    return True


def add_label_rows(
    frame: OpenFrame, parents: NDArray[np.integer], label: NDArray[np.integer], flags: NDArray[Any]
) -> NDArray[np.uint32]:
    """Add label rows to a frame that is being filed.

    Args:
        frame: the frame.
        parents: indices into its rows, shape [n].
        label: label token of each, shape [n].
        flags: flags to add to each, shape [n].

    Returns:
        Where they are in the frame's table, shape [n].
    """
    index = (frame.n_rows + np.arange(len(label))).astype(np.uint32)
    made = label_rows(frame.rows.rows[parents], label)
    made["flags"] |= flags.astype(np.uint32)
    frame.labels.append(made)
    return index


def label_metas(
    session: CaptureSession, frame: OpenFrame, label_site: str, labels: torch.Tensor, selected: torch.Tensor
) -> tuple[SiteMeta | None, SiteMeta | None]:
    """Metas of the label's site and of the log-prob's, None where it is not wanted."""

    def meta(name: str, tensor: torch.Tensor, semantic: str) -> SiteMeta | None:
        if not session.wants(name):
            return None
        return session.meta_for(session.occurrence(frame, name), dtype_name(tensor), (), SiteKind.TAP, semantic)

    return meta(LABEL, labels, "label"), meta(label_site, selected, "selected")


def label_blocks(
    metas: tuple[SiteMeta | None, SiteMeta | None],
    index: NDArray[np.uint32],
    labels: NDArray[np.int64],
    selected: NDArray[np.int32],
    payload: bool,
) -> list[SiteBlock]:
    """The two sites, of labels [n] and the bits of float32 log-probs [n]; ``payload``: with their values."""
    bits: tuple[NDArray[Any], NDArray[Any]] = labels.view(np.uint64)[:, None], selected.view(np.uint32)[:, None]
    return [
        SiteBlock(meta, index, digest_array(row), row if payload else None)
        for meta, row in zip(metas, bits, strict=True)
        if meta is not None
    ]


def make_label_rows(
    session: CaptureSession,
    parents: NDArray[np.integer],
    labels: NDArray[np.integer],
    extra_flags: NDArray[Any] | int = 0,
) -> NDArray[np.void]:
    """Label rows for some rows of the open frame.

    Args:
        session: the session with an open frame.
        parents: indices into the frame's rows, shape [n].
        labels: label token of each, shape [n].
        extra_flags: flags to add to each row, a scalar or shape [n].
    """
    rows = label_rows(session.parent_rows()[parents], labels)
    rows["flags"] |= np.asarray(extra_flags, np.uint32)
    return rows
