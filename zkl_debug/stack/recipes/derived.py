"""Values that NeMo-RL derives when the recipe leaves them open, with the arithmetic spelled out."""

from __future__ import annotations

from zkl_debug.schema import Json
from zkl_debug.stack.recipes.keys import MAX_TOKENS_PER_RANK
from zkl_debug.stack.recipes.model import TRAIN_ROOT, Derived, Side
from zkl_debug.stack.recipes.view import View

_KEY = f"{TRAIN_ROOT}.{MAX_TOKENS_PER_RANK}"


def max_tokens_per_rank(view: View) -> Derived:
    """The largest number of tokens one training forward may bring to the inference expert kernel.

    Derived unless set: with sequence packing or dynamic batching the larger of ``train_mb_tokens`` and
    ``logprob_mb_tokens``; else the larger of the training and log-prob micro-batch, times the padded sequence length.
    """
    value, text = _from_batching(view)
    written = _int(view, Side.TRAIN, MAX_TOKENS_PER_RANK)
    if written is None:
        lead = f"derived: {value}" if value is not None else "derived by NeMo-RL, not computable here"
        return Derived(_KEY, value, f"{lead} ({text})")
    warning = ""
    if value is not None and written < value:
        warning = f"set to {written}, which is less than the {value} tokens of the largest micro-batch"
    return Derived(_KEY, written, f"set to {written}; unset it would be {value} ({text})", warning)


def _from_batching(view: View) -> tuple[int | None, str]:
    for section, title in (("sequence_packing", "sequence packing"), ("dynamic_batching", "dynamic batching")):
        if view.find(Side.RECIPE, f"policy.{section}.enabled").effective is True:
            train = _int(view, Side.RECIPE, f"policy.{section}.train_mb_tokens")
            logprob = _int(view, Side.RECIPE, f"policy.{section}.logprob_mb_tokens")
            text = f"{title}: the larger of train_mb_tokens {_n(train)} and logprob_mb_tokens {_n(logprob)}"
            return (max(train, logprob) if train and logprob else None), text
    train = _int(view, Side.RECIPE, "policy.train_micro_batch_size")
    logprob = _int(view, Side.RECIPE, "policy.logprob_batch_size")
    length = _int(view, Side.RECIPE, "policy.max_total_sequence_length")
    multiple = _int(view, Side.RECIPE, "policy.make_sequence_length_divisible_by")
    padded = -(-length // multiple) * multiple if length and multiple else None
    text = (
        f"the larger of train_micro_batch_size {_n(train)} and logprob_batch_size {_n(logprob)}, times "
        f"max_total_sequence_length {_n(length)} padded to a multiple of {_n(multiple)} = {_n(padded)}"
    )
    return (max(train, logprob) * padded if train and logprob and padded else None), text


def _int(view: View, side: Side, key: str) -> int | None:
    value: Json = view.find(side, key).effective
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _n(value: int | None) -> str:
    return "?" if value is None else str(value)
