"""What the bits of a tensor mean: the dtype table, ULP distances, decoding and rounding. numpy only.

Values are handled as raw bits in the unsigned numpy dtype of the same width. Equality of bits is the verdict
everywhere else; what is here only explains a difference. ``+0`` and ``-0`` have different bits and are 0 ULP apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

#: ULP distance of two different values of which at least one is NaN: there is none.
ULP_UNDEFINED = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class DTypeInfo:
    """How one torch dtype is laid out.

    Attributes:
        name: torch's name without the prefix.
        itemsize: bytes of one stored element; for a packed dtype, of one byte of packed elements.
        storage: unsigned numpy dtype of the same width.
        exponent_bits, mantissa_bits: of one value, 0 for integers.
        bias: exponent bias.
        is_float: whether values are floating point.
        is_signed: whether there is a sign.
        is_packed: whether one stored element holds two values (the low half first).
        nan: where NaN and infinity lie. ``ieee``: top exponent; ``fn``: NaN at all ones, no infinity; ``fnuz``: NaN at
            the pattern of -0, no infinity; ``e8m0``: NaN at 255; ``none``: neither.
    """

    name: str
    itemsize: int
    storage: np.dtype[Any]
    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    is_float: bool = False
    is_signed: bool = True
    is_packed: bool = False
    nan: str = "none"

    @property
    def value_bits(self) -> int:
        """Bits of one value."""
        return self.itemsize * 4 if self.is_packed else self.itemsize * 8

    @property
    def max_finite(self) -> int:
        """Largest magnitude code of a finite value (floats only)."""
        if self.nan == "ieee":
            return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        return top - 1 if self.nan in ("fn", "e8m0") else top


def _float(name: str, itemsize: int, exponent: int, mantissa: int, bias: int, nan: str, **more: bool) -> DTypeInfo:
    return DTypeInfo(name, itemsize, np.dtype(f"<u{itemsize}"), exponent, mantissa, bias, True, nan=nan, **more)


def _integer(name: str, itemsize: int, is_signed: bool) -> DTypeInfo:
    return DTypeInfo(name, itemsize, np.dtype(f"<u{itemsize}"), is_signed=is_signed)


#: torch dtype name -> layout.
DTYPES: dict[str, DTypeInfo] = {
    info.name: info
    for info in (
        _float("float64", 8, 11, 52, 1023, "ieee"),
        _float("float32", 4, 8, 23, 127, "ieee"),
        _float("float16", 2, 5, 10, 15, "ieee"),
        _float("bfloat16", 2, 8, 7, 127, "ieee"),
        _float("float8_e4m3fn", 1, 4, 3, 7, "fn"),
        _float("float8_e5m2", 1, 5, 2, 15, "ieee"),
        _float("float8_e4m3fnuz", 1, 4, 3, 8, "fnuz"),
        _float("float8_e5m2fnuz", 1, 5, 2, 16, "fnuz"),
        _float("float8_e8m0fnu", 1, 8, 0, 127, "e8m0", is_signed=False),
        _float("float4_e2m1fn_x2", 1, 2, 1, 1, "none", is_packed=True),
        *(_integer(f"int{8 * size}", size, True) for size in (1, 2, 4, 8)),
        *(_integer(f"uint{8 * size}", size, False) for size in (1, 2, 4, 8)),
        _integer("bool", 1, False),
    )
}


def dtype_info(dtype: str) -> DTypeInfo:
    """Layout of a torch dtype, with or without the ``torch.`` prefix.

    Raises:
        KeyError: for a dtype that is not in :data:`DTYPES`.
    """
    name = dtype.removeprefix("torch.")
    if name not in DTYPES:
        raise KeyError(f"no layout known for torch dtype {dtype!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _codes(bits: NDArray[Any], info: DTypeInfo) -> NDArray[Any]:
    """One code per value in the storage dtype; a packed byte becomes two codes, so the last axis doubles."""
    raw = np.asarray(bits)
    if raw.dtype.itemsize != info.itemsize:
        raise TypeError(f"{info.name} is {info.itemsize} bytes an element; got an array of {raw.dtype}")
    raw = raw.view(info.storage) if raw.dtype != info.storage else raw
    if not info.is_packed:
        return raw
    if raw.ndim == 0:
        raw = raw[None]
    pairs = np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1)
    return pairs.reshape(*raw.shape[:-1], 2 * raw.shape[-1])


def _is_nan_code(codes: NDArray[Any], info: DTypeInfo) -> NDArray[np.bool_]:
    if not info.is_float or info.nan == "none":
        return np.zeros(codes.shape, np.bool_)
    sign = 1 << (info.value_bits - 1)
    kind = codes.dtype.type
    if info.nan == "fnuz":
        return np.asarray(codes == kind(sign))
    if info.nan == "e8m0":
        return np.asarray(codes == kind(0xFF))
    limit = info.max_finite + (1 if info.nan == "ieee" else 0)
    return np.asarray((codes & kind(sign - 1)) > kind(limit))


def is_nan(bits: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """Where the values are NaN; the shape of ``bits`` (last axis doubled for a packed dtype)."""
    info = dtype_info(dtype)
    return _is_nan_code(_codes(bits, info), info)


def ulp_keys(bits: NDArray[Any], dtype: str) -> NDArray[np.int64]:
    """Integers in the order of the values, one apart for neighbours: ``abs(a - b)`` is the ULP distance.

    Signed floats go from sign-magnitude to two's complement, so +0 and -0 share key 0. NaN has a key too (beyond
    infinity, by its payload) but no meaning as a distance: mask it with :func:`is_nan` or use :func:`ulp_distance`.

    Args:
        bits: raw bits in an array of the dtype's width.
        dtype: torch dtype name.

    Returns:
        int64, the shape of ``bits`` (last axis doubled for a packed dtype).
    """
    info = dtype_info(dtype)
    codes = _codes(bits, info)
    if not info.is_float:
        if info.is_signed:
            return codes.view(f"<i{info.itemsize}").astype(np.int64)
        if info.itemsize == 8:
            return (codes ^ np.uint64(1 << 63)).view(np.int64)
        return codes.astype(np.int64)
    if not info.is_signed:
        return codes.astype(np.int64)
    sign = 1 << (info.value_bits - 1)
    kind = codes.dtype.type
    magnitude = (codes & kind(sign - 1)).astype(np.int64)
    return np.asarray(np.where((codes & kind(sign)) != 0, -magnitude, magnitude), dtype=np.int64)


def ulp_distance(a: NDArray[Any], b: NDArray[Any], dtype: str) -> NDArray[np.uint64]:
    """ULP distance of values with the same dtype.

    Returns:
        uint64 of the broadcast shape. 0 for equal bits and for +0 against -0; :data:`ULP_UNDEFINED` where the bits
        differ and one of them is NaN.
    """
    info = dtype_info(dtype)
    left, right = _codes(a, info), _codes(b, info)
    key_a, key_b = ulp_keys(a, dtype), ulp_keys(b, dtype)
    high, low = np.maximum(key_a, key_b), np.minimum(key_a, key_b)
    distance = high.astype(np.int64).view(np.uint64) - low.astype(np.int64).view(np.uint64)
    undefined = (_is_nan_code(left, info) | _is_nan_code(right, info)) & (left != right)
    return np.where(undefined, ULP_UNDEFINED, np.asarray(distance, np.uint64))


@lru_cache(maxsize=32)
def _decode_table(name: str) -> F64:
    info = DTYPES[name]
    table = _decode(np.arange(1 << info.value_bits, dtype=np.uint8), info)
    table.setflags(write=False)
    return table


def _decode(codes: NDArray[Any], info: DTypeInfo) -> F64:
    wide = codes.astype(np.int64)
    if not info.is_signed:  # e8m0: a power of two, no zero
        values = np.ldexp(1.0, wide - info.bias)
    else:
        magnitude = wide & ((1 << (info.value_bits - 1)) - 1)
        exponent = magnitude >> info.mantissa_bits
        mantissa = magnitude & ((1 << info.mantissa_bits) - 1)
        normal = exponent > 0
        mantissa = np.where(normal, mantissa + (1 << info.mantissa_bits), mantissa)
        scale = np.maximum(exponent, 1) - info.bias - info.mantissa_bits
        values = np.ldexp(mantissa.astype(np.float64), scale)
        if info.nan == "ieee":
            values = np.where(magnitude > info.max_finite, np.inf, values)
        values = np.where(wide >> (info.value_bits - 1) != 0, -values, values)
    return np.where(_is_nan_code(codes, info), np.nan, values)


def to_float64(bits: NDArray[Any], dtype: str) -> F64:
    """Values of raw bits. Exact for every float and for integers below 2**53 in magnitude.

    Returns:
        float64, the shape of ``bits`` (last axis doubled for a packed dtype, low half first). NaN payloads are
        not kept.
    """
    info = dtype_info(dtype)
    codes = _codes(bits, info)
    if not info.is_float:
        kind = "i" if info.is_signed else "u"
        return codes.view(f"<{kind}{info.itemsize}").astype(np.float64)
    if info.name in ("float64", "float32", "float16"):
        with np.errstate(invalid="ignore"):
            return codes.view(f"<f{info.itemsize}").astype(np.float64)
    if info.name == "bfloat16":
        with np.errstate(invalid="ignore"):
            return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return np.asarray(_decode_table(info.name)[codes])


def round_to(values: NDArray[Any], to_dtype: str, from_dtype: str | None = None) -> NDArray[Any]:
    """Round to a float dtype, to nearest with ties to even, in one step.

    Too large becomes infinity where the dtype has one, else NaN; ``float8_e4m3fn`` saturates, as torch's CPU cast does.
    A NaN becomes the dtype's quiet NaN without sign or payload.

    Args:
        values: float64 values, or raw bits of ``from_dtype`` when that is given.
        to_dtype: any signed float dtype. A packed one saturates, has no NaN, and needs an even number of values on
            the last axis.
        from_dtype: dtype of the bits in ``values``.

    Returns:
        Raw bits in the storage dtype of ``to_dtype``, the shape of the values (last axis halved for a packed dtype).

    Raises:
        ValueError: when ``to_dtype`` is an integer or unsigned dtype, or has no NaN and a value is NaN.
    """
    info = dtype_info(to_dtype)
    if not info.is_float or not info.is_signed:
        raise ValueError(f"cannot round to {to_dtype}: not a signed float")
    wide = np.asarray(values, np.float64) if from_dtype is None else to_float64(values, from_dtype)
    if info.is_packed and np.isnan(wide).any():
        raise ValueError(f"cannot round NaN to {to_dtype}: it has none")
    lowest = 1 - info.bias
    sign_bit = 1 << (info.value_bits - 1)
    finite = np.isfinite(wide)
    magnitude = np.abs(np.where(finite, wide, 0.0))
    exponent = np.frexp(magnitude)[1].astype(np.int64) - 1
    exponent = np.where(magnitude == 0, lowest, np.maximum(exponent, lowest))
    units = np.rint(np.ldexp(magnitude, info.mantissa_bits - exponent)).astype(np.int64)
    code = ((exponent - lowest) << info.mantissa_bits) + units
    special = _special_codes(info)
    code = np.where((code > info.max_finite) | np.isinf(wide), special[0], code)
    negative = np.signbit(wide)
    code = np.where(np.isnan(wide), special[1], code)
    if info.nan == "fnuz":
        negative &= (code != 0) & (code != special[1])
    bits = code.astype(np.uint64) | np.where(negative & ~np.isnan(wide), np.uint64(sign_bit), np.uint64(0))
    codes = np.asarray(bits.astype(info.storage))
    return codes if not info.is_packed else np.asarray(codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4)))


def _special_codes(info: DTypeInfo) -> tuple[int, int]:
    """Codes that stand for "too large" and for NaN."""
    if info.nan == "ieee":
        infinity = info.max_finite + 1
        return infinity, infinity | (1 << (info.mantissa_bits - 1))
    if info.nan == "fnuz":
        return 1 << (info.value_bits - 1), 1 << (info.value_bits - 1)
    return info.max_finite, info.max_finite + 1


def value_shape(row_shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Shape of a row's values: ``row_shape`` with its last axis doubled for a packed dtype."""
    if not dtype_info(dtype).is_packed:
        return row_shape
    return (2,) if not row_shape else (*row_shape[:-1], 2 * row_shape[-1])
