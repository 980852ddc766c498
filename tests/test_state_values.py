"""Closed forms between tensors: each is found, none is claimed of tensors that merely look alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from zkl_debug.bits import round_to, to_float64
from zkl_debug.diff.state_values import Source, Values, cycle_lengths, explain_values

NAME = "layers.0.weight"


def values(array: np.ndarray, dtype: str = "float32") -> Values:
    return Values(round_to(np.asarray(array, np.float64), dtype), dtype)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def explain(found: Values, *versions: Values) -> tuple[str, int | None, dict[str, object]]:
    """Form, version and parameters; ``versions[-1]`` is the current one."""
    order = [(Source(NAME, v), versions[v]) for v in reversed(range(len(versions)))]
    match = explain_values(found, order)
    return match.form, match.source.version if match.source else None, dict(match.detail)


OLD, NOW = (noise(seed, 12, 8).astype(np.float32).astype(np.float64) for seed in (0, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_to_a_version(dtype: str) -> None:
    old, now = values(OLD, dtype), values(NOW, dtype)
    assert explain(now, old, now)[:2] == ("equal", 1)
    assert explain(old, old, now)[:2] == ("equal", 0)


def rolled(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 3, 0)


def shuffled(x: np.ndarray) -> np.ndarray:
    order = np.random.default_rng(5).permutation(len(x))
    return x[order][order]


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (rolled, "shift"),
        (shuffled, "permutation"),
        (lambda x: x[:, ::-1], "permutation"),
        (lambda x: x * 0.5, "scale"),
        (lambda x: x * -3.0, "scale"),
        (lambda x: x + 2.0, "offset"),
        (lambda x: -np.exp(x), "negative exponential"),
        (lambda x: x * 0.0, "zero"),
        (lambda x: x * 0.0 + 7.0, "constant"),
    ],
)
def test_forms_of_a_version(change: Callable[[np.ndarray], np.ndarray], form: str) -> None:
    assert explain(values(change(NOW)), values(OLD), values(NOW))[:1] == (form,)
    if form not in ("zero", "constant"):
        assert explain(values(change(OLD)), values(OLD), values(NOW))[:2] == (form, 0)


@pytest.mark.parametrize(("narrow", "wide"), [("bfloat16", "float32"), ("float16", "float32")])
def test_rounded_through_a_narrower_dtype(narrow: str, wide: str) -> None:
    now = values(NOW, wide)
    through = Values(round_to(round_to(now.bits, narrow, wide), wide, narrow), wide)
    form, version, detail = explain(through, values(OLD, wide), now)
    assert (form, version, detail["dtype"]) == ("dtype-rounded", 1, narrow)


def test_cast_to_a_wider_dtype() -> None:
    old = values(OLD, "bfloat16")
    wide = values(to_float64(old.bits, "bfloat16"), "float32")
    assert explain(wide, old, values(NOW, "bfloat16"))[:2] == ("cast", 0)


def test_permutation_says_whether_it_is_a_square() -> None:
    _, _, detail = explain(values(shuffled(NOW)), values(NOW))
    assert detail["is_a_square"]
    swapped = NOW.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    _, _, detail = explain(values(swapped), values(NOW))
    assert not detail["is_a_square"]
    assert detail["moved"] == 2


def test_cycles() -> None:
    assert cycle_lengths([1, 0, 2]) == [2, 1]
    assert cycle_lengths([1, 2, 0]) == [3]
    assert cycle_lengths([]) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(8))
def test_an_optimizer_step_is_no_closed_form(dtype: str, seed: int) -> None:
    """A small update is neither a ratio near 1 nor an offset near 0, and one changed element is not "equal"."""
    now = values(NOW, dtype)
    updated = values(NOW + 1e-2 * np.sign(noise(seed, 12, 8)), dtype)
    assert explain(updated, values(OLD, dtype), now)[0] == "none"
    one = Values(now.bits.copy(), dtype)
    one.bits[3, 3] ^= 1
    form, _, detail = explain(one, values(OLD, dtype), now)
    assert form == "none"
    assert detail["different"] == 1


def test_zero_of_another_sign_is_not_equal() -> None:
    plus, minus = values(np.zeros((2, 2))), Values(np.full((2, 2), 1 << 31, np.uint32), "float32")
    assert explain(minus, plus)[0] == "zero"
    assert explain(plus, plus)[0] == "equal"


@pytest.mark.parametrize(
    ("at", "part"),
    [
        ((slice(9, 12),), "rows 9 to 11 of 12"),
        ((slice(None), slice(0, 2)), "columns 0 to 1 of 8"),
        ((slice(0, 1), slice(2, 5)), "elements 2 to 4 of 96"),
        ((slice(0, 12, 3), slice(0, 8, 3)), "scattered"),
    ],
)
def test_a_part_that_was_not_updated(at: tuple[slice, ...], part: str) -> None:
    both = NOW.copy()
    both[at] = OLD[at]
    form, version, detail = explain(values(both), values(OLD), values(NOW))
    assert (form, version) == ("partly updated", 0)
    assert part in str(detail["part"])
    both[5, 5] += 1.0
    assert explain(values(both), values(OLD), values(NOW))[0] == "none"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_versions_blended(dtype: str) -> None:
    old, now = values(OLD, dtype), values(NOW, dtype)
    form, version, detail = explain(values(0.75 * now.floats + 0.25 * old.floats, dtype), old, now)
    assert (form, version) == ("blend", 0)
    assert detail["share"] == pytest.approx(0.75, abs=5e-3)
    assert explain(values(noise(7, 12, 8), dtype), old, now)[0] == "none"
    # Rounding noise on the current version is no blend.
    near = now.floats + 1e-9 * noise(8, 12, 8)
    assert explain(values(near, dtype), old, now)[0] in ("equal", "none")
