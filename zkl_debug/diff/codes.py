"""Keeping one small code for every pair and site without filling the memory."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
_IN_MEMORY = 256 << 20


class CodeKeeper:
    """Keeps arrays of codes: equal ones once, and in a file without a name when they have become many.

    What it returns is equal to what it was given, and must not be written to.
    """

    def __init__(self, in_memory: int = _IN_MEMORY) -> None:
        self._limit = in_memory
        self._held = 0
        self._known: dict[bytes, Codes] = {}
        self._file: Any = None
        self._end = 0

    def __call__(self, codes: Codes) -> Codes:
        """The same codes, uint8 [n]."""
        key = codes.tobytes()
        known = self._known.get(key)
        if known is not None:
            return known
        if self._held + codes.nbytes > self._limit and codes.nbytes:
            return self._in_file(key, codes)
        kept = np.frombuffer(key, np.uint8)  # one copy: as the key, and as the array
        self._known[key] = kept
        self._held += kept.nbytes
        return kept

    def _in_file(self, key: bytes, codes: Codes) -> Codes:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the codes
        self._file.seek(self._end)
        self._file.write(key)
        self._file.flush()
        start, self._end = self._end, self._end + codes.nbytes
        return np.memmap(self._file, np.uint8, "r", start, codes.shape).view(np.ndarray)
