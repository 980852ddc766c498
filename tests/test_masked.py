"""What became of a divergence, from the counts of the site table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zkl_debug.diff.masked import masked

FC2 = "decoder.layers.1.mlp.linear_fc2:out"
ADD = "decoder.layers.1/mlp_bda:out.0"
FINAL = "logprobs/selected:out.0"
EDGE, OTHER = "score-prefill", "score-decode"


def table(*rows: tuple[str, str, int, int, int]) -> NDArray[Any]:
    """(site, edge, compared, mismatched, masked) as the columns that are read."""
    names = [("site", "U80"), ("edge", "U20"), ("compared", "i8"), ("mismatched", "i8"), ("masked", "i8")]
    return np.array(list(rows), names)


def test_hidden_when_a_site_masks_it_and_every_log_prob_is_equal() -> None:
    found = masked(
        table((FC2, EDGE, 9, 5, 0), (ADD, EDGE, 9, 0, 5), (FINAL, EDGE, 8, 0, 0), (FINAL, OTHER, 2, 0, 0)), EDGE
    )
    assert found.hidden
    assert found.sites == ((ADD, 5),)
    assert (found.final, found.compared) == (FINAL, 10)
    assert "hidden by a later rounding" in found.text
    assert found.to_json()["hidden"] is True


@pytest.mark.parametrize("at", [EDGE, OTHER])
def test_not_hidden_while_a_log_prob_differs_on_any_edge(at: str) -> None:
    found = masked(table((ADD, EDGE, 9, 0, 5), (FINAL, EDGE, 8, 0, 0), (FINAL, at, 2, 1, 0)), EDGE)
    assert not found.hidden
    assert "1 of 10" in found.text


def test_not_hidden_without_log_probs_or_without_a_masking_site() -> None:
    without = masked(table((ADD, EDGE, 9, 0, 5)), EDGE)
    assert not without.hidden
    assert "no log-probs" in without.text
    assert not masked(table((FC2, EDGE, 9, 5, 0), (FINAL, EDGE, 8, 0, 0)), EDGE).hidden
    nothing = masked(table((ADD, EDGE, 9, 0, 5), (FINAL, EDGE, 8, 0, 0)), None)
    assert (nothing.sites, nothing.text) == ((), "")


def test_masking_on_another_edge_is_not_counted() -> None:
    assert masked(table((ADD, OTHER, 9, 0, 5), (FINAL, EDGE, 8, 0, 0)), EDGE).sites == ()
