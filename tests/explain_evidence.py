"""Evidence made by hand for the tests of explanations: bits of both sides, inputs, positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bits import dtype_info, round_to
from zkl_debug.diff.explain import Evidence
from zkl_debug.diff.explain.model import Port, Values
from zkl_debug.diff.explain.run import TESTS, explain_evidence
from zkl_debug.schema import parse_site

Real = NDArray[Any]


def values(real: Real, dtype: str = "float32", shape: tuple[int, ...] | None = None) -> Values:
    """Rows of reals, rounded to a dtype."""
    flat = np.asarray(real, np.float64).reshape(len(real), -1)
    info = dtype_info(dtype)
    bits = round_to(flat, dtype) if info.is_float else flat.astype(info.storage)
    return Values(bits, dtype, np.asarray(real).shape[1:] if shape is None else shape)


def pair(left: Real, right: Real, dtype: str = "float32") -> Port:
    return Port(values(left, dtype), values(right, dtype))


def both(real: Real, dtype: str = "float32") -> Port:
    """The same rows on both sides."""
    one = values(real, dtype)
    return Port(one, one)


def evidence(
    left: Real,
    right: Real,
    *,
    site: str = "decoder.layers.0.mlp.linear_fc1:out",
    semantic: str = "",
    dtype: str = "float32",
    inputs: Mapping[str, Port] | None = None,
    **more: Any,
) -> Evidence:
    """Affected rows of a site."""
    m = len(left)
    more.setdefault("position", np.arange(m))
    more.setdefault("sample", np.zeros(m, np.int64))
    more.setdefault("rows", m)
    more.setdefault("of", m)
    return Evidence(
        parse_site(site),
        semantic,
        ("A (score)", "B (prefill)"),
        pair(left, right, dtype),
        inputs=dict(inputs or {}),
        **more,
    )


def names(e: Evidence) -> list[str]:
    """What is told, strongest first."""
    return [finding.name for finding in explain_evidence(e)]


def says(name: str, e: Evidence) -> bool:
    """Whether one explanation, asked alone, says yes."""
    for test in TESTS:
        if test.name == name and test.applies(e) and not test.missing(e):
            found = test.run(e)
            if found is not None and found.name == name:
                return True
    return False


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ulps(real: Real, steps: Real | int) -> Real:
    """float32 values moved by whole ulps."""
    wide = np.asarray(real, np.float32)
    return (wide.view(np.int32) + np.asarray(steps, np.int32)).view(np.float32).astype(np.float64)
