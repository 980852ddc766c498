"""Operator trace: every tensor operator that runs while a window is open, what it did to some rows, and where it is.

Rows inside a module rarely lie where they lie at its edge: scores are [batch * heads, query, key], a paged engine goes
through one sequence at a time. So of every result the slices are taken that can be the row's, and each is digested by
its values in ascending order. Equal values then mean the same intermediate, whatever its layout and dtype are
and however often it is repeated.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _push_mode

from zkl_debug.capture.layout import dtype_name
from zkl_debug.capture.rows import FrameRows
from zkl_debug.capture.source import Where, where
from zkl_debug.schema import RowFlag

_LEAST_VALUES = 4  # distinct values of a slice that can tell intermediates apart
_MOST_ELEMENTS = 1 << 16
_MOST_SLICES = 12


@dataclass(frozen=True)
class Place:
    """Where one row lies in a call.

    Attributes:
        s, b: grid of token slots; ``at`` and ``sequence``: the row's place in it.
        queries: rows of its sequence in the call; ``query``: the row's place among them.
        position: its position in the sequence; ``start``: slot of the sequence's position 0 along s, 0 if not there.
        last: its place among the last rows of the sequences, or -1.
    """

    s: int
    b: int
    at: int
    sequence: int
    queries: int
    query: int
    position: int
    start: int
    last: int = -1

    @property
    def slot(self) -> int:
        """Flat slot, s-major."""
        return self.at * self.b + self.sequence


def place_of(frame: FrameRows, sample: int, position: int) -> Place | None:
    """The place of a row in the open frame; None when it is not there."""
    rows = frame.rows
    plain = (rows["flags"] & np.uint32(RowFlag.LABEL)) == 0
    mine = np.flatnonzero((rows["sample"] == sample) & plain)
    found = mine[rows["position"][mine] == position]
    if not len(found):
        return None
    s, b = frame.grid
    slot = int(frame.slot[found[0]])
    order = mine[np.argsort(rows["position"][mine], kind="stable")]
    last = np.flatnonzero(frame.last == found[0])
    return Place(
        s,
        b,
        slot // b,
        slot % b,
        len(mine),
        int(np.flatnonzero(order == found[0])[0]),
        position,
        max(0, slot // b - position),
        int(last[0]) if len(last) else -1,
    )


@dataclass
class TracedOp:
    """One operator.

    Attributes:
        index: its place in the stream.
        name: e.g. ``aten.bmm``, ``triton.fused_kernel``.
        dtype, shape: of its first result.
        where: source location.
        inputs: operators whose results it read.
        slices: per row looked at, digests of what may be the row's part of the result; empty where there is none.
        values: values of those slices, ascending, by digest; of the first row.
        related: it has to do with the first row.
    """

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    where: Where
    inputs: tuple[int, ...] = ()
    slices: list[frozenset[str]] = field(default_factory=list)
    values: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    related: bool = False


class OpTrace(TorchDispatchMode):
    """Records operators between :meth:`open` and :meth:`close`; silent otherwise.

    Modes belong to a thread. Opened in another thread than the one it was entered in, it is put in place there as well,
    and stays there, silent, until that thread ends.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[TracedOp] = []
        self.errors: list[str] = []
        self._places: Sequence[Place] = ()
        self._writers: dict[int, list[int]] = {}
        self._ranges: dict[int, tuple[int, int]] = {}
        self._created: set[int] = set()  # storages that are results of operators in the window
        self._threads = {threading.get_ident()}
        self._kept: list[Any] = []  # storages stay alive, so that none takes the address of another

    @property
    def is_open(self) -> bool:
        """Whether operators are recorded now."""
        return bool(self._places)

    def open(self, places: Sequence[Place]) -> None:
        """Start recording, anew when it was started before; the first place is the row of interest."""
        self.close()
        if threading.get_ident() not in self._threads:
            self._threads.add(threading.get_ident())
            _push_mode(self)
        self._places = tuple(places)

    def close(self) -> list[TracedOp]:
        """Stop recording; the operators so far, which are forgotten here."""
        ops = self.ops
        self.ops, self._places = [], ()
        self._writers, self._ranges, self._created, self._kept = {}, {}, set(), []
        return ops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._places and torch.is_inference_mode_enabled():
            with self:  # composite operators arrive whole in inference mode
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        before = self._inputs((*args, *kwargs.values())) if self._places else None
        result = func(*args, **kwargs)
        if before is not None:
            try:
                with torch.no_grad(), _disable_current_modes():
                    self._note(func, (*args, *kwargs.values()), result, *before)
            except Exception as error:  # a broken trace must not end the run
                self.errors.append(f"{func}: {type(error).__name__}: {error}")
        return result

    def _inputs(self, args: tuple[Any, ...]) -> tuple[tuple[int, ...], bool]:
        """Operators whose results are read, and whether any of what is read belongs to the first row."""
        read: set[int] = set()
        related = False
        for tensor in _tensors(args):
            key = tensor.untyped_storage().data_ptr()
            writers = self._writers.get(key, [])
            read.update(writers)
            if key not in self._ranges and not writers:
                self._note_range(tensor)
            if key in self._ranges:
                related |= self._covers(tensor)
            elif key in self._created:  # a cache that was there before holds other rows as well
                related |= any(self.ops[i].related for i in writers)
        return tuple(sorted(read)), related

    def _note(self, func: Any, args: tuple[Any, ...], result: Any, inputs: tuple[int, ...], related: bool) -> None:
        first = next(_tensors((result,)), None)
        if first is None or _is_view(func):
            return
        index = len(self.ops)
        op = TracedOp(index, _name(func), dtype_name(first), tuple(first.shape), where(), inputs, related=related)
        self.ops.append(op)
        written = list(_tensors(t for t, changed in zip(args, _written(func, len(args)), strict=False) if changed))
        if written and any(t.untyped_storage().data_ptr() in self._ranges for t in written):
            op.related = related = any(self._covers(t) for t in written)
            if not related:  # it writes the rows of others into a tensor that has the row's as well
                return
        ours = {t.untyped_storage().data_ptr() for t in written}
        for tensor in _tensors((result, *written)):
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            self._kept.append(storage)
            self._writers.setdefault(key, []).append(index)
            if key not in ours:
                self._created.add(key)
            if key not in self._ranges:
                self._note_range(tensor)
        # A byte that is no truth value holds the bits of a narrow format: codes of scales and data.
        if (first.is_floating_point() or first.dtype == torch.uint8) and first.numel() and related:
            for number, place in enumerate(self._places):
                found = _digests(first, place)
                if not found and number == 0:
                    found = self._row_behind(written)
                op.slices.append(frozenset(found))
                if number == 0:
                    op.values = found

    def _covers(self, tensor: Tensor) -> bool:
        """Whether a tensor looks at the first row's bytes of its storage, where these are known."""
        span = self._ranges.get(tensor.untyped_storage().data_ptr())
        low, high = _extent(tensor)
        return span is not None and low < span[1] and span[0] < high

    def _row_behind(self, written: Sequence[Tensor]) -> dict[str, NDArray[np.float64]]:
        """The first row of what was written into, where only a piece was written that does not tell which part is the
        row's: rows that are copied over others, or rounded in place."""
        for tensor in written:
            storage = tensor.untyped_storage()
            span = self._ranges.get(storage.data_ptr())
            if span is None or not self._covers(tensor):
                continue
            size = tensor.element_size()
            row = tensor.new_empty(0).set_(storage, span[0] // size, ((span[1] - span[0]) // size,), (1,))
            told = value_digest(row)
            if told is not None:
                return {told[0]: told[1]}
        return {}

    def _note_range(self, tensor: Tensor) -> None:
        """Which bytes of a storage are the first row's, where its rows lie one behind the other."""
        place = self._places[0]
        if not tensor.is_contiguous() or tensor.storage_offset():
            return
        at = _row_index(tuple(tensor.shape), place)
        if at is None:
            return
        size = tensor.numel() * tensor.element_size() // (place.s * place.b)
        self._ranges[tensor.untyped_storage().data_ptr()] = at * size, (at + 1) * size

    def launched(self, name: str, source: Where) -> None:
        """Note a kernel that is no tensor operator."""
        if self._places:
            self.ops.append(TracedOp(len(self.ops), name, "", (), source, related=True))


@contextmanager
def triton_launches(trace: OpTrace) -> Iterator[None]:
    """Also note Triton launches, by the name and the source line of the kernel, where triton is loaded."""
    jit = sys.modules.get("triton.runtime.jit")
    function = getattr(jit, "JITFunction", None)
    original = getattr(function, "run", None)
    if function is None or original is None:
        yield
        return

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        code = getattr(getattr(kernel, "fn", None), "__code__", None)
        name = getattr(kernel, "__name__", "kernel")
        source = where() if code is None else Where.of(code.co_filename, code.co_firstlineno, name)
        trace.launched(f"triton.{name}", source)
        return original(kernel, *args, **kwargs)

    function.run = run
    try:
        yield
    finally:
        function.run = original


def _name(func: Any) -> str:
    return str(func).rpartition(".")[0]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _is_view(func: Any) -> bool:
    """Whether the result only looks at the argument."""
    if func is torch.ops.aten._unsafe_view.default:
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _written(func: Any, count: int) -> list[bool]:
    flags = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    return (flags + [False] * count)[:count]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of what a tensor covers of its storage."""
    size = tensor.element_size()
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start * size, start * size
    span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + int(span) + 1) * size


def _row_index(shape: tuple[int, ...], place: Place) -> int | None:
    """Index of the row among the token slots at the front of a tensor, None where there are none."""
    s, b = place.s, place.b
    if shape[:2] == (s, b) or shape[:1] == (s * b,):
        return place.slot
    if shape[:2] == (b, s):
        return place.sequence * s + place.at
    return None


def value_digest(part: Tensor) -> tuple[str, NDArray[np.float64]] | None:
    """Digest of a tensor's finite values, and all its values ascending; None where that tells too little.

    The digest is of the distinct values and how often each is there compared with the others: an intermediate that is
    repeated as a whole stays the same, one in which a value was rounded to a neighbour that is there as well does not.
    Infinities are how keys and experts are masked; with or without them it is the same intermediate.
    """
    if not 0 < part.numel() <= _MOST_ELEMENTS:
        return None
    if part.dtype == torch.float4_e2m1fn_x2:
        part = part.view(torch.uint8)  # two values a byte, which torch cannot take apart
    values = np.sort(part.detach().double().cpu().numpy().ravel() + 0.0)
    distinct, often = np.unique(values[np.isfinite(values)], return_counts=True)
    if len(distinct) < min(_LEAST_VALUES, len(values)) or not distinct.any():
        return None
    told = distinct.tobytes() + (often // np.gcd.reduce(often)).tobytes()
    return hashlib.blake2b(told, digest_size=12).hexdigest(), values


def _digests(tensor: Tensor, place: Place) -> dict[str, NDArray[np.float64]]:
    """Values of every slice that can be the row's, ascending, by digest."""
    found: dict[str, NDArray[np.float64]] = {}
    for piece in _slices(tensor.detach(), place):
        for part in _of_keys(piece, place):
            told = value_digest(part) if len(found) < _MOST_SLICES else None
            if told is not None:
                found.setdefault(*told)
    return found


def _slices(tensor: Tensor, place: Place) -> Iterator[Tensor]:
    shape = tuple(tensor.shape)
    s, b = place.s, place.b
    at = _row_index(shape, place)
    if at is not None:
        front = 1 if shape[:1] == (s * b,) and shape[:2] != (s, b) else 2
        yield tensor.reshape(s * b, *shape[front:])[at]
    if place.last >= 0 and place.s > 1 and shape and shape[0] < s and place.last < shape[0]:
        yield tensor[place.last]
    for axis, size in enumerate(shape):
        if size == s and b == 1:
            yield tensor.select(axis, place.at)
        elif size == s:
            yield from _of_batch(tensor.select(axis, place.at), place)
        if size == place.queries and (b > 1 or size != s):
            yield tensor.select(axis, place.query)


def _of_batch(piece: Tensor, place: Place) -> Iterator[Tensor]:
    """The part of the row's sequence, where an axis is the batch or the batch times heads."""
    for axis, size in enumerate(piece.shape):
        if size % place.b == 0:
            shape = (*piece.shape[:axis], place.b, size // place.b, *piece.shape[axis + 1 :])
            yield piece.reshape(shape).select(axis, place.sequence)
            return


def _of_keys(piece: Tensor, place: Place) -> Iterator[Tensor]:
    """The slice, and for an axis that may be one of keys, the keys that a causal row reads."""
    yield piece
    keys = place.position + 1
    for axis, size in enumerate(piece.shape):
        if size > keys:
            yield piece.narrow(axis, 0, keys)
        if place.start and size >= place.start + keys:
            yield piece.narrow(axis, place.start, keys)
