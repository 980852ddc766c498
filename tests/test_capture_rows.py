"""Row keys and the resolution of token rows in tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zkl_debug.capture.experts import Permutation
from zkl_debug.capture.layout import raw_rows, resolve
from zkl_debug.capture.rows import label_rows, packed_rows, padded_rows
from zkl_debug.digest import prefix_digests
from zkl_debug.schema import Phase, RowFlag


def _padded(left: bool = False) -> tuple[np.ndarray, object]:
    tokens = np.array([[5, 6, 7, 0], [8, 9, 10, 11]], np.int64)
    offsets = None
    if left:
        tokens = np.array([[0, 5, 6, 7], [8, 9, 10, 11]], np.int64)
        offsets = [1, 0]
    return tokens, padded_rows(tokens, samples=[3, 4], lengths=[3, 4], prompt_lens=[2, 2], offsets=offsets)


def test_left_and_right_padding_give_the_same_keys() -> None:
    _, right = _padded()
    _, left = _padded(left=True)
    for name in ("sample", "position", "token", "prefix", "flags"):
        assert np.array_equal(right.rows[name], left.rows[name])  # type: ignore[attr-defined]
    assert not np.array_equal(right.slot, left.slot)  # type: ignore[attr-defined]


def test_packed_rows_have_the_keys_of_the_padded_ones() -> None:
    _, padded = _padded()
    packed = packed_rows(
        np.array([5, 6, 7, 0, 8, 9, 10, 11]), samples=[3, 4], starts=[0, 4], lengths=[3, 4], prompt_lens=[2, 2]
    )
    assert np.array_equal(packed.rows, padded.rows)  # type: ignore[attr-defined]
    assert packed.slot.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert packed.grid == (8, 1)
    assert packed.last.tolist() == [2, 6]


def test_batches_alike_have_their_rows_in_the_very_same_slots() -> None:
    """Which is seen at a glance; the tokens are each batch's own."""
    _, first = _padded()
    tokens = np.array([[1, 2, 3, 0], [4, 5, 6, 7]])
    second = padded_rows(tokens, samples=[8, 9], lengths=[3, 4])
    assert second.slot is first.slot  # type: ignore[attr-defined]
    assert second.last is first.last  # type: ignore[attr-defined]
    assert second.rows["token"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert padded_rows(tokens, samples=[8, 9], lengths=[4, 3]).slot.tolist() == [0, 2, 4, 6, 1, 3, 5]
    assert padded_rows(tokens, samples=[8, 9], lengths=[3, 3], offsets=[0, 1]).slot.tolist() == [0, 2, 4, 3, 5, 7]
    offsets = list(np.full(8, 5000, np.int16))
    far = padded_rows(np.zeros((8, 6000), np.int64), samples=range(8), lengths=[1] * 8, offsets=offsets)  # type: ignore[arg-type]
    assert far.slot.tolist() == list(range(40000, 40008))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("shape", ["sb", "bs", "flat"])
def test_every_layout_yields_the_rows_in_key_order(shape: str, left: bool) -> None:
    tokens, frame = _padded(left)
    value = torch.from_numpy(tokens).to(torch.float32).unsqueeze(-1) * torch.tensor([1.0, 10.0])  # [b, s, 2]
    tensor = {"bs": value, "sb": value.transpose(0, 1), "flat": value.transpose(0, 1).reshape(8, 2)}[shape]
    view = resolve(tensor, frame)  # type: ignore[arg-type]
    assert view is not None
    bits = raw_rows(view)
    assert bits.view(np.float32)[:, 0].tolist() == frame.rows["token"].tolist()  # type: ignore[attr-defined]
    assert view.row.tolist() == list(range(7))


def test_square_batches_follow_the_layout_hint() -> None:
    tokens = np.arange(4).reshape(2, 2)
    frame = padded_rows(tokens, samples=[0, 1], lengths=[2, 2])
    value = torch.arange(4.0).reshape(2, 2, 1)
    batch_first = resolve(value, frame, "bs")
    seq_first = resolve(value, frame)
    assert batch_first is not None
    assert seq_first is not None
    assert raw_rows(batch_first).view(np.float32)[:, 0].tolist() == [0, 1, 2, 3]
    assert raw_rows(seq_first).view(np.float32)[:, 0].tolist() == [0, 2, 1, 3]


def test_tables_and_weights_are_not_rows() -> None:
    _, frame = _padded()
    for shape in [(), (2,), (4, 1, 3), (5, 3), (3, 4, 4)]:
        assert resolve(torch.zeros(shape), frame) is None  # type: ignore[arg-type]


def test_label_rows_are_the_next_row_with_a_flag() -> None:
    ids = np.array([5, 6, 7, 9], np.int32)
    frame = padded_rows(ids[None], samples=[1], lengths=[4])
    labels = label_rows(frame.rows[:3], ids[1:])
    assert labels["position"].tolist() == [1, 2, 3]
    assert np.array_equal(labels["prefix"], prefix_digests(ids)[1:])
    assert ((labels["flags"] & int(RowFlag.LABEL)) != 0).all()
    assert (labels["flags"] & int(RowFlag.PHASE_MASK) == int(Phase.SCORE)).all()


def test_permutation_brings_expert_rows_back_in_expert_order() -> None:
    # two experts; slot 0 goes to both, in either arrival order
    permutation = Permutation(np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1]))
    table = permutation.per_token(2)
    assert table is not None
    assert table.tolist() == [[0, 3], [1, 2]]
    assert Permutation(np.array([0, 0, 1]), np.array([0, 1, 1])).per_token(2) is None
    fewer = Permutation(np.array([0, 0, 1]), np.array([0, 1, 1]), topk=2).per_token(2)
    assert fewer is not None
    assert fewer.tolist() == [[0, 1], [2, -1]]
    assert Permutation(np.array([0, 0, 1]), np.array([0, 1, 1]), topk=1).per_token(2) is None


def test_rows_that_are_made_late_are_those_that_were_told() -> None:
    """The program may go on writing into what it keyed a frame by."""
    tokens, samples, prompts = np.arange(8).reshape(2, 4), np.array([3, 5]), [1, 2]
    rows = padded_rows(tokens, samples=samples, lengths=[4, 4], prompt_lens=prompts)  # type: ignore[arg-type]
    packed = packed_rows(tokens.reshape(-1), samples=samples, starts=[0, 4], lengths=[4, 4], prompt_lens=prompts)  # type: ignore[arg-type]
    samples += 10
    prompts[:] = [4, 4]
    tokens += 1
    for made in (rows.rows, packed.rows):
        assert made["sample"].tolist() == [3] * 4 + [5] * 4
        assert made["token"].tolist() == list(range(8))
        assert (made["flags"] & RowFlag.GENERATED).astype(bool).tolist() == [
            False,
            True,
            True,
            True,
            False,
            False,
            True,
            True,
        ]


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (2, 1)])
def test_last_rows_are_known_where_every_sequence_has_one(lengths: tuple[int, int]) -> None:
    rows = packed_rows(np.arange(6), samples=[0, 1], starts=[0, 3], lengths=lengths)
    view = resolve(torch.zeros(2, 4), rows)
    assert (None if view is None else view.row.tolist()) == ([1, 2] if min(lengths) else None)
