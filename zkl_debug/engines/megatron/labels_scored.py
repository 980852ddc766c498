"""Label rows of a scoring forward on a device: labels and log-probs are copied out as they are, and sorted when filed.

They come when the program waits for its log-probs: each launch, and each index sent to the device, would be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.device import Pending
from zkl_debug.capture.frame import Deferred, OpenFrame
from zkl_debug.capture.labels import add_label_rows, label_blocks, label_metas
from zkl_debug.capture.rows import FrameRows
from zkl_debug.engines.megatron.labels_dynamic import SELECTED
from zkl_debug.schema import U64, SiteBlock, SiteMeta

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession

#: Of a frame's row table and rows: the intended label of each row, negative where there is none, and flags to add.
Following = Callable[[NDArray[np.void], FrameRows], tuple[NDArray[np.integer], NDArray[Any]]]


def label_places(rows: FrameRows, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows that have a label, and where it is in a [b, width] table of them, read row by row; int64 [m] each."""
    batch = rows.grid[1]
    column = rows.slot // batch
    has_label = np.flatnonzero(column < width)
    return has_label, (rows.slot[has_label] % batch) * width + column[has_label]


@dataclass(frozen=True)
class ScoredLabels(Deferred):
    """Labels of a scoring forward, made when the frame is filed.

    Attributes:
        pending: where its words are: labels (int64 [b, w]) and their log-probs (float32 [b, w]).
        width: w.
        following: see :data:`Following`.
        metas: of the label's site and of the log-prob's, None where it is not wanted.
        payload: whether payload is kept.
    """

    pending: Pending
    width: int
    following: Following
    metas: tuple[SiteMeta | None, SiteMeta | None]
    payload: bool

    def blocks(self, frame: OpenFrame, parts: list[U64]) -> list[SiteBlock]:
        """The sites; adds the label rows to the frame. Rows without a label are left out."""
        at, count = self.pending, frame.rows.grid[1] * self.width
        words = parts[at.part][at.start : at.start + at.rows].reshape(-1).view(np.int32)
        parents, places = label_places(frame.rows, self.width)
        used, value = words[: 2 * count].view(np.int64)[places], words[2 * count : 3 * count][places]
        label, flags = (each[parents] for each in self.following(frame.rows.rows, frame.rows))
        keep = np.flatnonzero((label >= 0) & (used >= 0))
        if len(keep) == 0:
            return []
        index = add_label_rows(frame, parents[keep], label[keep], flags[keep])
        return label_blocks(self.metas, index, used[keep], value[keep], self.payload)


def record_scored(session: CaptureSession, labels: torch.Tensor, result: torch.Tensor, following: Following) -> bool:
    """Record labels [b, w] and their log-probs [b, w] on the device, without waiting for it.

    Returns:
        False where they must go another way: on a CPU, under forcing, or with other types.
    """
    frame = session.frame
    plain = (labels.dtype, result.dtype) == (torch.int64, torch.float32) and labels.shape == result.shape
    if frame is None or not plain or labels.ndim != 2 or not session.late(labels, result):
        return False
    if labels.shape[0] != frame.rows.grid[1]:
        return False
    metas = label_metas(session, frame, SELECTED, labels, result)
    words = [tensor.detach().reshape(-1).view(torch.int32) for tensor in (labels, result)]
    pending = session.device_frame(frame).fetch_words(words)
    payload = session.options.level == "payload"
    frame.deferred.append(ScoredLabels(pending, int(labels.shape[1]), following, metas, payload))
    return True
