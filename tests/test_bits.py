"""The dtype table, ULP keys, decoding and rounding, held against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from zkl_debug import bits

FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
SIGNED_FLOATS = ("float64", "float32", "float16", "bfloat16", *FP8[:4])
U32 = np.uint32


def torch_values(raw: NDArray[Any], name: str) -> NDArray[np.float64]:
    """What torch makes of raw bits."""
    return np.asarray(torch.from_numpy(raw.copy()).view(getattr(torch, name)).to(torch.float64).numpy())


def torch_round(raw: NDArray[Any], source: str, target: str) -> NDArray[Any]:
    """Raw bits of torch's cast from one dtype to another."""
    info = bits.dtype_info(target)
    cast = torch.from_numpy(raw.copy()).view(getattr(torch, source)).to(getattr(torch, target))
    return np.asarray(cast.view(getattr(torch, f"uint{8 * info.itemsize}")).numpy())


def some_bits(name: str, count: int = 200_000) -> NDArray[Any]:
    """Random raw bits with the special values of the dtype among them."""
    info = bits.dtype_info(name)
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 1 << 63, count, dtype=np.uint64) * 2 + rng.integers(0, 2, count, dtype=np.uint64)
    raw[:6] = [0, 1 << (info.value_bits - 1), 1, info.max_finite, info.max_finite + 1, (1 << info.value_bits) - 1]
    return raw.astype(info.storage)


def test_table_agrees_with_torch() -> None:
    for name, info in bits.DTYPES.items():
        dtype = getattr(torch, name)
        assert torch.empty((), dtype=dtype).element_size() == info.itemsize == info.storage.itemsize
        assert dtype.is_floating_point == info.is_float
        if info.is_float and not info.is_packed:
            assert (
                torch.finfo(dtype).bits == info.value_bits == info.exponent_bits + info.mantissa_bits + info.is_signed
            )
            top = bits.to_float64(np.array([info.max_finite]).astype(info.storage), name)[0]
            assert top == torch.finfo(dtype).max
            if info.is_signed:
                assert torch.finfo(dtype).smallest_normal == 2.0 ** (1 - info.bias)


def test_unknown_dtype_is_named() -> None:
    with pytest.raises(KeyError, match="complex64"):
        bits.dtype_info("torch.complex64")
    assert bits.dtype_info("torch.bfloat16").itemsize == 2
    with pytest.raises(TypeError, match="2 bytes"):
        bits.ulp_keys(np.zeros(3, np.uint32), "bfloat16")


@pytest.mark.parametrize("name", ["bfloat16", "float16", *FP8])
def test_every_code_decodes_as_in_torch(name: str) -> None:
    info = bits.dtype_info(name)
    codes = np.arange(1 << info.value_bits).astype(info.storage)
    values = bits.to_float64(codes, name)
    expected = torch_values(codes, name)
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.array_equal(np.signbit(values)[~np.isnan(values)], np.signbit(expected)[~np.isnan(expected)])
    assert np.array_equal(bits.is_nan(codes, name), np.isnan(expected))


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_wide_floats_decode(name: str) -> None:
    raw = some_bits(name)
    assert np.array_equal(bits.to_float64(raw, name), torch_values(raw, name), equal_nan=True)


@pytest.mark.parametrize("name", SIGNED_FLOATS)
def test_keys_are_in_the_order_of_the_values(name: str) -> None:
    info = bits.dtype_info(name)
    raw = np.arange(1 << info.value_bits).astype(info.storage) if info.value_bits <= 16 else some_bits(name)
    raw = raw[~bits.is_nan(raw, name)]
    keys, values = bits.ulp_keys(raw, name), bits.to_float64(raw, name)
    order = np.argsort(keys, kind="stable")
    assert (np.diff(values[order]) >= 0).all()
    if info.value_bits <= 16:  # neighbours are one apart; the two zeros share a key
        assert np.array_equal(np.unique(np.diff(keys[order])), [0, 1] if info.nan != "fnuz" else [1])
        assert ((np.diff(keys[order]) == 0) == (np.diff(values[order]) == 0)).all()


def test_zeros_differ_in_bits_only() -> None:
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        info = bits.dtype_info(name)
        zeros = np.array([0, 1 << (info.value_bits - 1)], np.uint64).astype(info.storage)
        assert zeros[0] != zeros[1]
        assert bits.ulp_distance(zeros[:1], zeros[1:], name)[0] == 0
        tiny = zeros + info.storage.type(1)
        assert bits.ulp_distance(tiny[:1], tiny[1:], name)[0] == 2


@pytest.mark.parametrize("name", [*SIGNED_FLOATS, "float8_e8m0fnu"])
def test_nan_has_no_ulp_distance(name: str) -> None:
    info = bits.dtype_info(name)
    raw = np.arange(1 << min(16, info.value_bits), dtype=np.uint64)
    raw = np.append(raw, raw << np.uint64(info.value_bits - min(16, info.value_bits))).astype(info.storage)
    one = bits.round_to(np.ones(1), name) if info.is_signed else np.array([info.bias], np.uint8)
    nan = bits.is_nan(raw, name)
    assert nan.any()
    distance = bits.ulp_distance(raw, one, name)
    assert (distance[nan] == bits.ULP_UNDEFINED).all()
    assert (distance[~nan] != bits.ULP_UNDEFINED).all()
    assert (bits.ulp_distance(raw, raw, name) == 0).all()  # equal bits are equal, NaN or not


def test_nan_payloads_are_told_apart() -> None:
    quiet, other = np.array([0x7FC00000], U32), np.array([0x7FC00001], U32)
    assert bits.ulp_distance(quiet, other, "float32")[0] == bits.ULP_UNDEFINED
    assert bits.is_nan(np.array([0x7F800001, 0xFFFFFFFF, 0x7F800000], U32), "float32").tolist() == [True, True, False]


def test_distance_of_the_extremes_does_not_overflow() -> None:
    ends = np.array([0x7FF0000000000000, 0xFFF0000000000000], np.uint64)
    assert bits.ulp_distance(ends[:1], ends[1:], "float64")[0] == 2 * 0x7FF0000000000000
    wide = np.array([0, 2**64 - 1], np.uint64)
    assert bits.ulp_distance(wide[:1], wide[1:], "uint64")[0] == 2**64 - 1
    signed = np.array([2**63, 2**63 - 1], np.uint64)
    assert bits.ulp_distance(signed[:1], signed[1:], "int64")[0] == 2**64 - 1
    assert bits.ulp_keys(np.array([0, 255], np.uint8), "int8").tolist() == [0, -1]
    assert bits.to_float64(np.array([0, 255], np.uint8), "uint8").tolist() == [0.0, 255.0]
    assert bits.to_float64(np.array([0xFFFE], np.uint16), "int16").tolist() == [-2.0]


def test_packed_fp4() -> None:
    name = "float4_e2m1fn_x2"
    raw = np.arange(256, dtype=np.uint8)
    packed = torch.from_numpy(raw.copy()).view(torch.float4_e2m1fn_x2)
    assert np.array_equal(packed.view(torch.uint8).numpy(), raw)  # the bytes survive torch
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table += [-value for value in table]
    values = bits.to_float64(raw, name)
    assert values.shape == (512,)
    assert values[0::2].tolist() == [table[byte & 15] for byte in range(256)]
    assert values[1::2].tolist() == [table[byte >> 4] for byte in range(256)]
    assert bits.ulp_keys(np.array([0x1F], np.uint8), name).tolist() == [-7, 1]
    assert bits.ulp_distance(np.array([[0x1F]], np.uint8), np.array([[0x2F]], np.uint8), name).tolist() == [[0, 1]]
    assert not bits.is_nan(raw, name).any()
    assert bits.value_shape((4, 8), name) == (4, 16)
    assert bits.value_shape((4, 8), "bfloat16") == (4, 8)


@pytest.mark.parametrize("target", [name for name in SIGNED_FLOATS if name != "float64"])
def test_rounding_is_torchs(target: str) -> None:
    source = "float64" if target == "float32" else "float32"
    info = bits.dtype_info(target)
    raw = some_bits(source)
    # Exact ties between neighbours of the target and their surroundings.
    codes = some_bits(target, 40_000)
    values = bits.to_float64(codes, target)
    above = bits.to_float64(codes + info.storage.type(1), target)
    with np.errstate(all="ignore"):
        middle = np.where(np.isfinite(values + above), (values + above) / 2, 0.0)
        ties = middle.astype(source)
        near = np.concatenate([ties, np.nextafter(ties, ties.dtype.type(np.inf)), np.nextafter(ties, -ties)])
    raw = np.concatenate([raw, near.view(raw.dtype)])
    rounded, expected = bits.round_to(raw, target, source), torch_round(raw, source, target)
    nan = bits.is_nan(expected, target)
    assert np.array_equal(rounded[~nan], expected[~nan])
    assert bits.is_nan(rounded, target)[nan].all()


def test_rounding_back_and_forth() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    codes = codes[~bits.is_nan(codes, "bfloat16")]
    wide = bits.round_to(codes, "float32", "bfloat16")
    assert np.array_equal(wide, codes.astype(U32) << U32(16))
    assert np.array_equal(bits.round_to(wide, "bfloat16", "float32"), codes)
    assert np.array_equal(bits.round_to(bits.to_float64(codes, "bfloat16"), "bfloat16"), codes)
    with pytest.raises(ValueError, match="cannot round"):
        bits.round_to(np.ones(1), "int32")
    with pytest.raises(ValueError, match="cannot round"):
        bits.round_to(np.ones(1), "float8_e8m0fnu")
