"""K and V of a paged cache, replaced by captured rows: what an attention row of the dynamic engine reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Table = Mapping[bytes, NDArray[Any]]

#: Parameters of ``Attention.flash_decode_and_prefill`` after ``self``.
_NAMES = ("q", "k", "v", "max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table")


def write_pages(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    slots: Sequence[int],
    keys: Sequence[bytes],
    history: Mapping[bytes, Sequence[bytes]],
    tables: tuple[Table, Table],
) -> bool:
    """Write captured K and V of every position that the rows of a call read into the call's own cache.

    Args:
        args, kwargs: of the call, ``self`` first; the caches among them are written to.
        slots: place of each row among the call's query rows, [n].
        keys: row key of each row, [n].
        history: row keys of positions 0 .. p of each row.
        tables: captured K and V by row key.

    Returns:
        Whether every position was there and written.
    """
    given = {**dict(zip(_NAMES, args[1:], strict=False)), **kwargs}
    pages, ends = given["block_table"], given["cu_seqlens_q"].tolist()
    size = int(given["k"].shape[1])
    request_of = np.searchsorted(np.asarray(ends), np.asarray(slots), side="right") - 1
    longest: dict[int, Sequence[bytes]] = {}
    for request, key in zip(request_of.tolist(), keys, strict=True):
        chain = history.get(key, ())
        if len(chain) > len(longest.get(request, ())):
            longest[request] = chain
    if len(longest) < len(set(request_of.tolist())):
        return False
    for request, chain in longest.items():
        if any(key not in table for key in chain for table in tables):
            return False
        at = torch.arange(len(chain))
        block = pages[request][at // size].long()
        for cache, table in zip((given["k"], given["v"]), tables, strict=True):
            bits = np.stack([table[key] for key in chain])
            rows = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(cache.dtype)
            cache[block, at % size] = rows.reshape(len(chain), *cache.shape[2:]).to(cache.device)
    return True
