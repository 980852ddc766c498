"""multilinear-128: golden bytes, agreement of the implementations, and the differences weaker sums miss."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zkl_debug import digest, digest_int8, digest_torch
from zkl_debug.digest_torch import digest_tensor, digest_wholes, row_bytes

GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def reference(row: bytes, lane_offset: int = 0) -> tuple[int, int]:
    """The definition, with Python integers."""
    row += bytes(-len(row) % 4)
    sums = [0, 0]
    for i in range(len(row) // 4):
        lane = int.from_bytes(row[4 * i : 4 * i + 4], "little", signed=True)
        for k, seed in enumerate(digest.SEEDS):
            z = (seed + (lane_offset + i + 1) * GAMMA) & MASK
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
            sums[k] += lane * ((z ^ (z >> 31)) | 1)
    return sums[0] & MASK, sums[1] & MASK


GOLDEN = [
    (b"", 0, (0, 0)),
    (b"\x01\x00\x00\x00", 0, (0xF9BAB9B9A2BF2CEF, 0xB97736DFA92C75BB)),
    (bytes(range(256)), 0, (0xC7BC604E8223D9F0, 0x5526BC485ACEDD40)),
    (bytes(range(255)), 7, (0x837FBA89B5D94098, 0x1E0D6CEFCFC2CB48)),
    (b"\xff" * 4096, 0, (0x6897FF2639DDD8E4, 0x8B5D838608B5C686)),
    (b"\x00\x00\x00\x80" * 3, 1 << 22, (0x4EBFEDBB80000000, 0xEB0216CC80000000)),
]


@pytest.mark.parametrize(("row", "lane_offset", "expected"), GOLDEN)
def test_golden(row: bytes, lane_offset: int, expected: tuple[int, int]) -> None:
    assert digest.digest_bytes(row, lane_offset) == expected == reference(row, lane_offset)
    tensor = torch.frombuffer(bytearray(row), dtype=torch.uint8) if row else torch.empty(0, dtype=torch.uint8)
    assert tuple(int(x) for x in digest_tensor(tensor, 1, lane_offset)[0]) == expected


def test_golden_prefix() -> None:
    tokens = np.array([101, 7, 0, -1, 50256])
    prefix = digest.prefix_digests(tokens)
    assert prefix.tolist() == [list(reference(tokens[: p + 1].astype("<i4").tobytes())) for p in range(5)]
    assert prefix[-1].tolist() == [0x8147EB409214D889, 0xB36FDFC46D26E5D5]
    parent = digest.parent_prefix(prefix, tokens, np.arange(5))
    assert parent[0].tolist() == [0, 0]
    assert np.array_equal(parent[1:], prefix[:-1])
    assert np.array_equal(digest.extend_prefix(parent, tokens, np.arange(5)), prefix)
    far = np.array([digest._CACHED_LANES + 5, 2])
    assert np.array_equal(
        digest.parent_prefix(digest.extend_prefix(prefix[:2], tokens[:2], far), tokens[:2], far), prefix[:2]
    )
    assert digest.parent_prefix(prefix[:0], tokens[:0], tokens[:0]).shape == (0, 2)
    with pytest.raises(ValueError, match="negative"):
        digest.parent_prefix(prefix[:1], tokens[:1], np.array([-1]))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64,
]  # fmt: skip


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits (NaN payloads included); booleans are 0 and 1."""
    size = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = rng.integers(0, high, (int(np.prod(shape)) * size,), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def test_numpy_equals_torch_on_a_thousand_tensors() -> None:
    rng = np.random.default_rng(128)
    for k in range(1000):
        dtype = DTYPES[k % len(DTYPES)]
        shape = tuple(int(n) for n in rng.integers(1, (40, 6, 90)))
        tensor = random_tensor(rng, shape, dtype)
        if k % 3 == 1:
            tensor = tensor.transpose(0, 2)
        elif k % 3 == 2:
            tensor = tensor[::2, :, 1:] if shape[2] > 1 else tensor[:, :1]
        rows = tensor.shape[0] if k % 5 else 1
        offset = int(rng.integers(0, 5000))
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().reshape(rows, -1)
        expected = digest.digest_rows(raw, offset)
        assert np.array_equal(digest_tensor(tensor, rows, offset), expected)
        assert np.array_equal(row_bytes(tensor, rows), raw)
        if k % 50 == 0:
            assert expected[0].tolist() == list(reference(raw[0].tobytes(), offset))


def naive(raw: NDArray[np.uint8]) -> NDArray[np.uint64]:
    lanes = raw.view("<i4").astype(np.int64).view(np.uint64)
    return np.stack([(lanes * w).sum(axis=1) for w in digest.weights(0, lanes.shape[1])], axis=1)


@pytest.mark.parametrize("shape", [(1, 1 << 22), (3, 400_000), (600, 4096), (2, 70_000)])
def test_blocks_and_threads_do_not_matter(shape: tuple[int, int]) -> None:
    raw = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    assert np.array_equal(digest.digest_rows(raw), naive(raw))
    # The same rows out of a wider array, and unaligned.
    wide = np.zeros((shape[0], shape[1] + 3), np.uint8)
    wide[:, 3:] = raw
    assert np.array_equal(digest.digest_rows(wide[:, 3:]), naive(raw))


@pytest.mark.parametrize(
    ("shape", "lane_offset"),
    [((1, 4), 0), ((3, 8), 5), ((257, 4096), 0), ((96, 11264), 3), ((5, 70_000 * 4), 1), ((2, 140_000 * 4), 0)],
)
def test_int8_product_gives_the_same_bits(shape: tuple[int, int], lane_offset: int) -> None:
    raw = np.random.default_rng(7).integers(0, 256, shape, np.uint8)
    for fill in (0x00, 0x7F, 0x80, 0xFF):  # the extremes of signed and unsigned bytes add up without overflow
        raw[-1] = fill
        got = digest_int8.digest_lanes(torch.from_numpy(raw.view("<i4")), lane_offset)
        assert np.array_equal(got, digest.digest_rows(raw, lane_offset))
    strided = np.zeros((shape[0], 3, shape[1]), np.uint8)
    strided[:, 1] = raw
    lanes = torch.from_numpy(strided.view("<i4"))[:, 1]
    assert np.array_equal(digest_int8.digest_lanes(lanes, lane_offset), digest.digest_rows(raw, lane_offset))


def test_a_product_with_wrong_bits_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int32))
    monkeypatch.setattr(digest_int8, "_verdict", None)
    monkeypatch.setattr(digest_int8, "_dot_products", lambda: True)
    assert not digest_int8.available()
    big = torch.arange(1 << 18, dtype=torch.int32).reshape(64, -1)
    assert np.array_equal(digest_tensor(big, 64), digest.digest_array(big.numpy()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_large_rows_with_gaps_are_read_as_they_lie(dtype: torch.dtype) -> None:
    wide = random_tensor(np.random.default_rng(4), (600, 3, 16, 200), dtype)
    views = [
        wide[:, 1],
        wide[:, 1, :, 8:136],
        wide[:, 1, :, 1:120],  # odd for small elements: neither lanes nor their beginnings fit
        wide[:, :, 3],
        wide.transpose(1, 2)[:, :, 2],
        wide[:, 0].transpose(1, 2),  # gaps between single elements
        wide[:1, 0].expand(600, 16, 200),  # one row, 600 times
    ]
    for view in views:
        expected = digest.digest_array(view.contiguous().view(torch.uint8).reshape(600, -1).numpy())
        assert np.array_equal(digest_tensor(view, 600), expected)
        assert np.array_equal(digest_tensor(view, 300), digest_tensor(view.contiguous(), 300))


def test_the_room_for_lanes_may_be_made_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    if not digest_int8.available():
        pytest.skip("no faster product here")
    monkeypatch.setattr(digest_int8._own, "room", None, raising=False)
    big = torch.arange(1 << 18, dtype=torch.int32).reshape(64, -1)
    with torch.inference_mode():
        inside = digest_tensor(big, 64)
    assert np.array_equal(digest_tensor(big, 64), inside)
    with torch.inference_mode():
        assert np.array_equal(digest_tensor(big, 64), inside)


def test_a_product_is_faster_where_interruptions_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("zkl_debug.digest_int8.time.perf_counter", lambda: now[0])

    def takes(*seconds: float) -> Any:
        each = itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def call() -> None:
            now[0] += next(each)

        return call

    assert digest_int8._faster(takes(9e-3, 9e-3, 9e-3, 9e-3, 9e-3, 9e-3, 1e-3), takes(4e-3))
    assert not digest_int8._faster(takes(4e-3), takes(9e-3, 1e-3))
    assert not digest_int8._faster(takes(4e-3), takes(1e-3))
    assert not digest_int8._faster(takes(9, 9, 9, 9, 9, 1), takes(4))  # it does not go on for seconds


def test_weights_do_not_depend_on_how_they_were_asked_for() -> None:
    high = digest._CACHED_LANES - 3
    across = digest.weights(high, 10)
    assert np.array_equal(across, digest._make_weights(high, high + 10))
    assert (across & np.uint64(1)).all()
    assert np.array_equal(digest.weights(1000, 5), digest._make_weights(1000, 1005))


def test_shards_add_up() -> None:
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (17, 4 * 96), dtype=np.uint8)
    whole = digest.digest_rows(raw)
    for parts in (2, 3, 8):
        width = raw.shape[1] // parts
        total = np.zeros_like(whole)
        for k in range(parts):
            total += digest.digest_rows(np.ascontiguousarray(raw[:, k * width : (k + 1) * width]), k * width // 4)
        assert np.array_equal(total, whole)


def pairs() -> dict[str, list[tuple[NDArray[Any], NDArray[Any]]]]:
    """Rows that differ in ways that sums, XOR and L1 norms overlook: kind of change -> pairs of raw rows."""
    rng = np.random.default_rng(3)
    found: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {}

    def add(kind: str, before: NDArray[Any], after: NDArray[Any]) -> None:
        if before.tobytes() != after.tobytes():
            found.setdefault(kind, []).append((before, after))

    kinds: tuple[Any, ...] = (np.uint16, np.uint32)
    for dtype, width in itertools.product(kinds, (8, 64, 1024)):
        sign = dtype(1 << (8 * np.dtype(dtype).itemsize - 1))
        for _ in range(40):
            row = rng.integers(0, np.iinfo(dtype).max, width, dtype=dtype)
            i, j = rng.choice(width, 2, replace=False)

            def changed(where: Any, value: Any, row: NDArray[Any] = row) -> NDArray[Any]:
                copy = row.copy()
                copy[where] = value
                return copy

            add("one LSB", row, changed(i, row[i] ^ dtype(1)))
            add("two LSBs", row, changed([i, j], row[[i, j]] ^ dtype(1)))
            add("plus one, minus one", row, changed([i, j], row[[i, j]] + np.array([1, -1]).astype(dtype)))
            add("sign flip", row, changed(i, row[i] ^ sign))
            add("paired sign flips", row, changed([i, j], row[[i, j]] ^ sign))
            add("all signs flipped", row, row ^ sign)
            add("swap", row, changed([i, j], row[[j, i]]))
            add("permutation", row, rng.permutation(row))
            add("reversed", row, row[::-1].copy())
            add("rotated", row, np.roll(row, 1))
            zeroed = changed(i, dtype(0))
            add("moved zero", zeroed, np.insert(np.delete(zeroed, i), j, dtype(0)))
            spike = np.zeros_like(row)
            spike[i] = row[i]
            add("moved value", spike, np.roll(spike, 1))
            add("zero sign", np.zeros_like(row), changed(i, sign, np.zeros_like(row)))
    return found


def test_no_difference_is_missed() -> None:
    missed = {
        kind: sum(digest.digest_bytes(a.tobytes()) == digest.digest_bytes(b.tobytes()) for a, b in rows)
        for kind, rows in pairs().items()
    }
    assert len(missed) == 13
    assert missed == dict.fromkeys(missed, 0)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations it sees."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class FunctionRecorder(TorchFunctionMode):
    """Counts the torch functions it sees."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_unseen_by_modes() -> None:
    plain = torch.randn(6, 10)
    strided = torch.randn(10, 6).T
    expected = digest_tensor(plain, 6), digest_tensor(strided, 6)
    with Recorder() as dispatch, FunctionRecorder() as function:  # type: ignore[no-untyped-call]
        found = digest_tensor(plain, 6), digest_tensor(strided, 6)
        row_bytes(strided, 6)
    assert dispatch.seen == function.seen == 0
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_inference_tensors_and_autograd() -> None:
    with torch.inference_mode():
        inside = torch.arange(12.0).reshape(3, 4)
        expected = digest_tensor(inside, 3)
        assert np.array_equal(digest_tensor(inside.T, 4), digest_tensor(inside.T.contiguous(), 4))
    assert np.array_equal(digest_tensor(inside, 3), expected)
    leaf = torch.arange(12.0).reshape(3, 4).requires_grad_()
    assert np.array_equal(digest_tensor(leaf * 1, 3), expected)
    assert np.array_equal(digest_tensor(torch.nn.Parameter(leaf.detach()), 3), expected)
    assert leaf.grad is None
    assert np.array_equal(digest_tensor((leaf * 1).T, 4), digest_tensor(leaf.T.contiguous(), 4))


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    value = torch.tensor([[1 + 2j, 3 - 4j]])
    assert np.array_equal(digest_tensor(value.conj(), 1), digest_tensor(value.conj().resolve_conj(), 1))
    negative = torch._neg_view(torch.tensor([1.0, -2.0]))
    assert np.array_equal(digest_tensor(negative, 1), digest_tensor(torch.tensor([-1.0, 2.0]), 1))


def test_shapes_at_the_edge() -> None:
    assert digest_tensor(torch.empty(0, 5), 0).shape == (0, 2)
    assert digest_tensor(torch.empty(3, 0), 3).tolist() == [[0, 0]] * 3
    assert digest_tensor(torch.tensor(1.0), 1).shape == (1, 2)
    for rows in (0, 4, -1):
        with pytest.raises(ValueError, match="equal rows"):
            digest_tensor(torch.ones(3, 3), rows)
    with pytest.raises(TypeError, match="uint8"):
        digest.digest_rows(np.zeros((2, 2), np.float32))
    assert digest.digest_array(np.zeros((4, 0), np.uint16)).tolist() == [[0, 0]] * 4


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_child_can_digest() -> None:
    raw = np.ones((64, 16384), np.uint8)
    expected = digest.digest_rows(raw)  # large enough to start the thread
    pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(digest.digest_rows(raw), expected) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_digest_module_does_not_import_torch() -> None:
    tree = ast.parse(Path(inspect.getfile(digest)).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith("torch")]


@pytest.mark.parametrize(
    ("rows", "width", "offset"), [(1, 9001, 0), (3, 130, 7), (2, 64, (1 << 22) - 20), (5, 3, 1 << 40)]
)
def test_sums_on_a_device_are_those_of_the_host(
    rows: int, width: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block, with weights that the device makes itself."""
    monkeypatch.setattr(digest_torch, "_BLOCK_LANES", 64)
    raw = np.random.default_rng(rows).integers(0, 256, (rows, width), np.uint8)
    assert np.array_equal(digest_torch._device_digest(torch.from_numpy(raw), offset), digest.digest_rows(raw, offset))


def test_tensors_digested_together_have_the_digests_they_have_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(0,), (1,), (7, 3), (4096, 64), (1 << 14, 3), (3, 5, 11111), (1 << 18,), (1 << 18, 5), (65537,), (16385,)]
    tensors: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for size in sizes:
            value = torch.randint(0, 256, (*size, torch.empty((), dtype=dtype).element_size()), generator=generator)
            tensors.append(value.to(torch.uint8).view(dtype).reshape(size))
    tensors += [tensors[3].t(), tensors[5][:, :, ::3], tensors[3], torch.nn.Parameter(tensors[3])]
    expected = [tuple(int(h) for h in digest_tensor(t.contiguous().reshape(1, -1), 1)[0]) for t in tensors if t.numel()]
    found = digest_wholes(tensors)
    assert [d for d, t in zip(found, tensors, strict=True) if t.numel()] == expected
    assert {d for d, t in zip(found, tensors, strict=True) if not t.numel()} == {(0, 0)}
    assert digest_wholes([]) == []
    with torch.inference_mode():
        assert digest_wholes([t.clone() for t in tensors]) == found
