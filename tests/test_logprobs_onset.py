"""A loop that is bit-exact for some steps and then is not, seen from its log-probs alone."""

from __future__ import annotations

import numpy as np
from test_logprobs_findings import PROMPT, grid, names

from zkl_debug.logprobs.report import analyse
from zkl_debug.logprobs.table import LogprobTable, make_table


def drift(bad: dict[int, list[int]], steps: int = 6) -> LogprobTable:
    """Bit-exact loop in which some sequences of some steps are wrong from their first generated token on."""
    rows = []
    for step in range(1, steps + 1):
        train = grid(32, 100, seed=step)
        gen = train.copy()
        for sample in bad.get(step, []):
            gen[sample, PROMPT:] = grid(1, 100 - PROMPT, seed=1000 + step + sample)[0]
        rows.append((gen, train))
    n = 32 * 100
    mask = np.tile(np.arange(100) >= PROMPT, 32).astype(np.float32)
    return make_table(
        step=np.repeat(np.arange(1, steps + 1), n),
        sample=np.tile(np.repeat(np.arange(32), 100), steps),
        position=np.tile(np.arange(1, 101), 32 * steps),
        gen=np.concatenate([g.ravel() for g, _ in rows]),
        train=np.concatenate([t.ravel() for _, t in rows]),
        mask=np.tile(mask, steps),
    )


def test_drift_that_begins_at_step_4() -> None:
    report = analyse(drift({4: [7, 19], 5: [3], 6: [7]}), commands={"capture", "bisect", "diff"})
    assert report.onset is not None
    assert (report.onset.step, report.onset.clean_before, report.onset.last_clean) == (4, 3, 3)
    assert report.onset.diverged == (4, 5, 6)
    assert report.affected.sequences == 4
    rule = report.affected.rule
    assert rule is not None
    assert rule.is_exact
    assert rule.text == (
        "sequences {step 4 sample 7, step 4 sample 19, step 5 sample 3, step 6 sample 7}, from step 4 on"
    )
    assert names(report) == ["carried-forward"]
    assert report.findings[0].evidence["from_first_valid_token"] is True
    assert [m.exact == m.tokens for _, m in report.per_step] == [True, True, True, False, False, False]
    assert report.per_step[0][1].token_mult_prob_error == 1
    assert "bisect steps" in report.next[0]
    assert "last good step 3, first bad step 4" in report.next[0]


def test_no_bisect_command_is_advised_when_there_is_none() -> None:
    report = analyse(drift({4: [7]}))
    assert not any("bisect" in line or "zkl-debug diff" in line for line in report.next)
    assert all(line.startswith("zkl-debug capture --side ") for line in report.next)
    assert all(" ... " in line for line in report.next)


def test_a_clean_loop_blames_nothing() -> None:
    report = analyse(drift({}))
    assert (report.verdict, report.findings, report.onset, report.next, report.limits) == (
        "identical",
        (),
        None,
        (),
        (),
    )
