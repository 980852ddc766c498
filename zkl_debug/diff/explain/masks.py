"""Sets of keys an attention row may have read by mistake, from the usual ones to one solved for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from zkl_debug.bits import F64
from zkl_debug.diff.explain.model import Keys
from zkl_debug.diff.model import Bools

_WINDOWS = 512
_SKIPPED = 8


@dataclass(frozen=True)
class Mask:
    """A named rule for which keys enter; ``crosses``: it reads slots of other sequences, padding too."""

    name: str
    words: str
    use: Callable[[Keys], Bools]
    crosses: bool = False


def _earlier(keys: Keys) -> Bools:
    """Keys of sequences that come before the row's own in the call."""
    return np.asarray((keys.place >= 0) & (keys.place < keys.row_place))


def _chain(keys: Keys) -> Bools:
    """Keys of the row's own sequence in the call, later positions included."""
    return np.asarray((keys.place == keys.row_place) | keys.reach)


def _from(first: int) -> Callable[[Keys], Bools]:
    return lambda keys: keys.reach & (keys.position >= first)


def _window(size: int) -> Callable[[Keys], Bools]:
    return lambda keys: keys.reach & (keys.position > keys.row_position - size)


def _block(size: int) -> Callable[[Keys], Bools]:
    return lambda keys: keys.reach & (keys.position >= keys.row_position // size * size)


def hypotheses(items: list[Keys]) -> Iterator[Mask]:
    """Masks to test, the simplest first."""
    if any(keys.chain is not None for keys in items):
        yield Mask("no-window", "all keys of its sequence up to its own, without the window", lambda keys: keys.reach)
    yield Mask(
        "earlier-sequences",
        "its own keys and all keys of the sequences before it in the call",
        lambda keys: keys.own | _earlier(keys),
        crosses=True,
    )
    yield Mask(
        "previous-sequence",
        "its own keys and those of the sequence before it in the call",
        lambda keys: keys.own | ((keys.place >= 0) & (keys.place == keys.row_place - 1)),
        crosses=True,
    )
    yield Mask("bidirectional", "all keys of its own sequence, later ones too", _chain)
    yield Mask(
        "whole-call",
        "all keys of the call",
        lambda keys: keys.own | (keys.place >= 0),
        crosses=True,
    )
    yield Mask(
        "without-itself", "its own keys but the last", lambda keys: keys.own & (keys.position < keys.row_position)
    )
    yield Mask(
        "next-key",
        "its own keys and the one after it",
        lambda keys: keys.own | (_chain(keys) & (keys.position == keys.row_position + 1)),
    )
    yield Mask(
        "whole-call-before",
        "every key of the call at a position up to its own",
        lambda keys: keys.own | ((keys.place >= 0) & (keys.position <= keys.row_position)),
    )
    yield Mask("own-and-padding", "its own keys", lambda keys: keys.own, crosses=True)
    longest = min(_WINDOWS, max(int(keys.row_position) for keys in items) + 1)
    for skipped in range(1, min(_SKIPPED, longest - 1) + 1):
        yield Mask(
            f"without-first-{skipped}",
            f"its own keys but the first {skipped}",
            _from(skipped),
        )
    for window in range(1, longest):
        yield Mask(
            f"window-{window}",
            f"the last {window} of its own keys (a sliding window)",
            _window(window),
        )
    for chunk in (4, 8, 16, 32, 64, 128, 256, 512):
        if chunk < longest:
            yield Mask(
                f"chunk-{chunk}",
                f"its own keys of the same block of {chunk}",
                _block(chunk),
            )


def solve_keys(keys: Keys, out: F64, scale: float) -> Bools | None:
    """The keys that entered, if their weights can be solved for; None where there are too many of them.

    For every head and channel the sum over keys of entered * exp(score) * (v - out) is zero: linear in ``entered``,
    up to a common factor. With more equations than keys the null space tells which are 0 and which are not.
    """
    heads, width = keys.query.shape
    n = len(keys.key)
    if n < 2 or n > 0.8 * heads * width:
        return None
    group = np.arange(heads) // (heads // keys.key.shape[1])
    k, v = keys.key[:, group], keys.value[:, group]
    score = np.einsum("hd,nhd->hn", keys.query, k) * scale
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    table = np.einsum("hn,nhd->hdn", weight, v - out[None]).reshape(heads * width, n)
    size = np.maximum(np.abs(table).max(axis=1, keepdims=True), 1e-300)
    _, singular, basis = np.linalg.svd(table / size, full_matrices=False)
    if singular[-1] > 1e-2 * singular[0] or (n > 1 and singular[-2] < 10 * singular[-1]):
        return None
    solution = basis[-1] / basis[-1][np.abs(basis[-1]).argmax()]
    use = np.asarray(solution > 0.5)
    return use if bool((np.abs(solution - use) < 0.25).all()) else None
