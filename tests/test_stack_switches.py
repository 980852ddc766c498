"""Switch bookkeeping: names, resolution, effective read-back, everything off again."""

from __future__ import annotations

import pytest

from zkl_debug.engines.cpu import cpu_backend
from zkl_debug.engines.megatron.world import world
from zkl_debug.engines.patching import replaced_kernels
from zkl_debug.stack import SwitchError, ladder, resolve, switch
from zkl_debug.stack.switches import Switch, applied, check_together


def test_ladder_is_complete_and_documented() -> None:
    names = [s.name for s in ladder()]
    assert len(set(names)) == len(names)
    assert {"gemm-row-tiles", "attention-reference", "moe-ordered-combine", "log-softmax"} <= set(names)
    for s in ladder():
        assert s.fixes
        assert s.owner in {"TE", "mcore", "NeMo-RL", "environment", "cpu-backend"}
        assert {*s.requires, *s.conflicts} <= set(names)


def test_resolve() -> None:
    assert resolve(False) == ()
    assert resolve(True) == ladder()
    one = resolve(False, {"log-softmax": True})
    assert [s.name for s in one] == ["log-softmax"]
    assert "log-softmax" not in {s.name for s in resolve(True, {"log-softmax": False})}
    with pytest.raises(SwitchError, match="no switch named 'nonsense'"):
        resolve(True, {"nonsense": True})


def test_requirements_and_conflicts_are_checked() -> None:
    base = switch("log-softmax")
    needy = Switch("needy", "x", "mcore", "g", base.apply, base.effective, requires=("log-softmax",))
    hostile = Switch("hostile", "x", "mcore", "g", base.apply, base.effective, conflicts=("log-softmax",))
    check_together([needy, base])
    with pytest.raises(SwitchError, match="needy is on without log-softmax"):
        check_together([needy])
    with pytest.raises(SwitchError, match="hostile and log-softmax are both on"):
        check_together([hostile, base])


def test_effective_reads_back_what_is_on() -> None:
    with cpu_backend(), world():
        assert not any(s.effective() for s in ladder())
        with applied(ladder()):
            assert all(s.effective() for s in ladder())
        for s in ladder():
            with s.apply():
                assert [t.name for t in ladder() if t.effective()] == [s.name]
        assert not any(s.effective() for s in ladder())
    assert replaced_kernels() == ()
