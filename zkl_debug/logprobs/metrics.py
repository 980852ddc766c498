"""NeMo-RL's mismatch metrics, recomputed from the raw float32 log-probs.

Formulas of ``ClippedPGLossFn``, ``calculate_kl``, ``masked_mean`` and ``compute_and_apply_seq_logprob_error_masking``,
term by term and in float32. What has to be assumed, because it is not in a file:

- the step is one micro-batch, so sums are normalised once by its own count of valid tokens (NeMo-RL adds the
  ``.item()`` of micro-batches that were normalised by the global count: the last bits depend on the micro-batch size);
- sums run in the order of ``torch.sum`` on a CPU with AVX2 and one thread (a GPU sums in another order);
- exp and log are correctly rounded (torch's are, to 1 ulp, on 99 % and 92 % of values).

Where both sides are equal every term is exact, so 0 and 1 are exact whatever the device; only js_divergence_error is
then not quite 0 (about 1e-10), because the log of a mean of exps rounds. As in NeMo-RL a masked row
enters as value x 0: a NaN or an infinity there makes the metric NaN. :attr:`Metrics.notes` says so when it happens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.logprobs.table import F32, F64, I64, LogprobTable, bits
from zkl_debug.schema import Json

#: Added to every denominator of ``masked_mean``.
EPSILON = np.float32(1e-8)
_AVX2_LANES = 8
_ILP = 4
_LEVELS = 4
_ZERO = np.float32(0)
_ONE = np.float32(1)
_HALF = np.float32(0.5)


@dataclass(frozen=True)
class Metrics:
    """The metrics of one step (or of all rows together). None means: cannot be had from these columns."""

    tokens: int
    sequences: int
    exact: int
    max_abs: float
    token_mult_prob_error: float
    gen_kl_error: float
    gen_kl_k1: float
    gen_kl_k2: float
    policy_kl_error: float
    js_divergence_error: float
    sampling_importance_ratio: float
    max_seq_mult_prob_error: float
    mean_seq_mult_prob_error: float
    min_seq_mult_prob_error: float
    probs_ratio_min: float | None
    probs_ratio_max: float | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """All fields by name; a value that is not finite is spelled as a string."""
        return {name: _spell(value) for name, value in asdict(self).items()}


def compute(table: LogprobTable) -> Metrics:
    """Metrics of all rows of a table that holds both sides."""
    assert table.train is not None
    return compute_arrays(table.gen, table.train, table.mask, table.sequence, table.curr)


def compute_arrays(gen: F32, train: F32, mask: F32, sequence: I64, curr: F32 | None = None) -> Metrics:
    """Metrics of rows in the order NeMo-RL flattens them.

    Args:
        gen, train: log-probs, float32, shape [N] (``generation_logprobs[:, 1:]`` and ``prev_logprobs[:, 1:]``).
        mask: token mask x sample mask, float32, shape [N].
        sequence: index of each row's sequence, not decreasing, shape [N].
        curr: log-probs of the policy being trained, for ``probs_ratio``.
    """
    count = torch_sum(mask)
    with np.errstate(all="ignore"):
        ratio = train - gen  # log-ratio of gen_kl
        # Of equal finite rows every term but the mixture's is known: exp(0) = 1.
        rows = (bits(gen) != bits(train)) | ~np.isfinite(ratio)
        mult = _at(rows, _exp(np.abs(ratio[rows]) * mask[rows]), _ONE)
        weight = _exp(ratio[rows])
        probability = _exp(gen)
        mixture = _log(_HALF * _at(rows, _exp(train[rows]), probability) + _HALF * probability)
        to_train = _to_mixture(train, mixture)
        to_gen = _at(rows, _to_mixture(gen[rows], mixture[rows]), to_train)
        terms = {
            "token_mult_prob_error": mult,
            "gen_kl_error": _at(rows, _k3(ratio[rows]), _ZERO),
            "gen_kl_k1": -ratio,
            "gen_kl_k2": ratio * ratio / np.float32(2),
            "policy_kl_error": _at(rows, _k3(gen[rows] - train[rows]), _ZERO),
            "js_divergence_error": _HALF * to_train + _HALF * to_gen,
            "sampling_importance_ratio": _at(rows, np.where(np.isfinite(weight), weight, _ZERO), _ONE),
        }
        means = {name: float(torch_sum(term * mask) / (count + EPSILON)) for name, term in terms.items()}
        per_sequence = _per_sequence(mult, mask, sequence)
    valid = mask != 0
    difference = absolute_difference(gen, train)[valid]
    low, high = _probs_ratio(curr, train, mask)
    return Metrics(
        tokens=int(valid.sum()),
        sequences=int(np.unique(sequence[valid]).shape[0]),
        exact=int((bits(gen)[valid] == bits(train)[valid]).sum()),
        max_abs=float(_max(difference)),
        max_seq_mult_prob_error=float(_max(per_sequence)),
        mean_seq_mult_prob_error=float(torch_sum(per_sequence) / np.float32(max(per_sequence.shape[0], 1))),
        min_seq_mult_prob_error=float(per_sequence.min()) if per_sequence.shape[0] else 0.0,
        probs_ratio_min=low,
        probs_ratio_max=high,
        notes=_notes(gen, train, mask, means),
        **means,
    )


def torch_sum(values: F32) -> np.float32:
    """Sum in the order of ``torch.sum`` over a contiguous float32 tensor (CPU, AVX2, one thread).

    torch adds 8 lanes x 4 accumulators, spilled through 4 levels, then the tail, then the lanes one by one; fewer than
    8 values go through the 4 accumulators alone.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    lanes = _AVX2_LANES if flat.shape[0] >= _AVX2_LANES else 1
    vectors = flat.shape[0] // lanes
    with np.errstate(all="ignore"):
        partial = _row_sum(flat[: vectors * lanes].reshape(vectors, lanes))
        if lanes == 1:
            return np.float32(partial[0])
        total = np.float32(0)
        for value in (*flat[vectors * lanes :], *partial):
            total = np.float32(total + value)
    return total


def absolute_difference(a: F32, b: F32) -> F64:
    """|a - b| in float64: 0 where the bits are equal, NaN where one side is NaN, infinity where one is infinite."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return np.asarray(np.where(bits(a) == bits(b), 0.0, difference))


def _row_sum(vectors: F32) -> F32:
    blocks = vectors.shape[0] // _ILP
    partial = _cascade(vectors[: blocks * _ILP].reshape(blocks, _ILP, vectors.shape[1]))
    for vector in vectors[blocks * _ILP :]:
        partial[0] += vector
    for other in range(1, _ILP):
        partial[0] += partial[other]
    return np.asarray(partial[0], np.float32)


def _cascade(rows: F32) -> F32:
    size = rows.shape[0]
    power = max(4, (max(size, 2) - 1).bit_length() // _LEVELS)
    chunk = 1 << power
    total = np.zeros(rows.shape[1:], np.float32)
    level = rows
    for _ in range(_LEVELS - 1):
        whole = level.shape[0] // chunk
        total += _sequential(level[whole * chunk :])
        level = _sequential(level[: whole * chunk].reshape(whole, chunk, *rows.shape[1:]).swapaxes(0, 1))
    return np.asarray(total + _sequential(level), np.float32)


def _sequential(rows: F32) -> F32:
    """Sum over the first axis, one after the other."""
    total = np.zeros(rows.shape[1:], np.float32)
    for row in rows:
        total += row
    return total


def _at(rows: NDArray[np.bool_], values: F32, elsewhere: F32 | np.float32) -> F32:
    """``values`` on the given rows, ``elsewhere`` on the others."""
    out = np.array(np.broadcast_to(elsewhere, rows.shape), np.float32)
    out[rows] = values
    return out


def _exp(values: F32) -> F32:
    return np.asarray(np.exp(values.astype(np.float64)).astype(np.float32))


def _log(values: F32) -> F32:
    return np.asarray(np.log(values.astype(np.float64)).astype(np.float32))


def _k3(ratio: F32) -> F32:
    return np.asarray(_exp(ratio) - _ONE - ratio)


def _to_mixture(values: F32, mixture: F32) -> F32:
    return np.asarray(_exp(values - mixture) - (values - mixture) - _ONE)


def _per_sequence(mult: F32, mask: F32, sequence: I64) -> F32:
    """``seq_mult_prob_error`` of every sequence that has a valid token."""
    if mask.shape[0] == 0:
        return np.zeros(0, np.float32)
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    stops = np.append(starts[1:], sequence.shape[0])
    out = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        weight = mask[start:stop]
        if not weight.any():
            continue
        out.append(torch_sum(mult[start:stop] * weight) / max(torch_sum(weight), _ONE))
    return np.asarray(out, np.float32)


def _probs_ratio(curr: F32 | None, train: F32, mask: F32) -> tuple[float | None, float | None]:
    """Extremes of exp(curr - prev) over valid tokens; (inf, -inf) when there are none, as in NeMo-RL."""
    if curr is None:
        return None, None
    with np.errstate(all="ignore"):
        ratios = _exp(curr - train)[mask != 0]
    if ratios.shape[0] == 0:
        return float("inf"), float("-inf")
    return float(ratios.min()), float(ratios.max())


def _max(values: Any) -> Any:
    """Largest value, NaN if there is one, 0 of nothing."""
    return values.max() if values.shape[0] else 0.0


def _notes(gen: F32, train: F32, mask: F32, means: dict[str, float]) -> tuple[str, ...]:
    broken = [name for name, value in means.items() if not np.isfinite(value)]
    if not broken:
        return ()
    bad = ~np.isfinite(gen) | ~np.isfinite(train)
    inside, outside = int((bad & (mask != 0)).sum()), int((bad & (mask == 0)).sum())
    why = f"{inside} valid and {outside} masked row(s) hold NaN or infinity"
    if not inside and outside:
        why += "; NeMo-RL multiplies by the mask, and 0 x NaN is NaN: the valid rows are not to blame"
    if not inside and not outside:
        why = "a difference is too large for exp in float32"
    return (f"not finite: {', '.join(broken)} ({why})",)


def _spell(value: Any) -> Json:
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
