"""Raw bits as they were recorded: read from a capture and checked against their digests, or not used at all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.diff.model import Ints, SiteLike
from zkl_debug.digest import wrong_rows
from zkl_debug.errors import CaptureInvalid
from zkl_debug.schema import U64


def sound_bits(site: SiteLike, rows: Ints, name: str = "", digest: U64 | None = None) -> NDArray[Any]:
    """Raw bits of rows of a site, shape [m, W], of a site that is in a file checked against their digests.

    Args:
        site: a site.
        rows: which of its rows, int64 [m]; all must have raw bits.
        name: what to call it; default its own name.
        digest: digests of these rows, uint64 [m, 2], where they were read already.

    Raises:
        CaptureInvalid: when some bits do not agree with their digests.
    """
    bits = site.payload(rows)
    if not hasattr(site, "payload_blocks"):  # only what was written and read again can have been damaged between
        return bits
    digest = np.asarray(site.digest, np.uint64).reshape(-1, 2)[rows] if digest is None else digest
    shard = site.meta.shard
    wrong = int(np.count_nonzero(wrong_rows(bits, digest, () if shard is None else shard.lanes(bits.dtype.itemsize))))
    if wrong:
        raise CaptureInvalid(
            f"payload of {name or site.meta.name} is not what was written, in {wrong} rows looked at",
            "bytes that agree with their digests",
            "copy the capture again, or capture again",
        )
    return bits
