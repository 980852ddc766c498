"""The CPU backend installs and removes everything it replaces."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys

import pytest
import torch

from zkl_debug.engines import cpu
from zkl_debug.engines.patching import PatchSet, aten_cpu_kernels, patched, replaced_kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the backend does nothing where there is a GPU")


def test_every_replaced_attribute_is_the_original_again() -> None:
    with cpu.cpu_backend():
        pass  # imports mcore, so that its modules exist below
    before = torch.get_rng_state()
    with cpu.cpu_backend():
        touched = cpu.replaced_attributes()
        inside = [getattr(owner, name) for owner, name in touched]
        torch.cuda.manual_seed(5)
        torch.rand(3)
    assert len(touched) > 30
    assert cpu.replaced_attributes() == []
    assert torch.equal(torch.get_rng_state(), before)
    originals = [getattr(owner, name) for owner, name in touched]
    assert all(a is not b for a, b in zip(inside, originals, strict=True))
    with cpu.cpu_backend():
        pass
    assert all(getattr(owner, name) is was for (owner, name), was in zip(touched, originals, strict=True))


def test_importing_mcore_does_not_change_what_ctrl_c_prints() -> None:
    with cpu.cpu_backend():
        assert "megatron.core" in sys.modules
    assert not faulthandler.unregister(signal.SIGINT)  # type: ignore[func-returns-value]
    assert not faulthandler.unregister(signal.SIGTERM)  # type: ignore[func-returns-value]


def test_nested_use_restores_on_the_last_exit() -> None:
    original = torch.cuda.Event
    with cpu.cpu_backend(), cpu.cpu_backend():
        assert torch.cuda.Event is not original
    assert torch.cuda.Event is original
    with pytest.raises(RuntimeError, match="boom"), cpu.cpu_backend():
        raise RuntimeError("boom")
    assert torch.cuda.Event is original
    assert not cpu.is_active()


def test_pinned_memory_is_requested_in_vain() -> None:
    with cpu.cpu_backend():
        assert torch.empty(2, pin_memory=True).numel() == 2
        assert str(torch.cuda.current_device()) == "cpu"
        assert torch.zeros(1).cuda().device.type == "cpu"


def test_importing_the_engines_touches_nothing() -> None:
    code = (
        "import torch; a = (torch.empty, torch.cuda.Event, torch.Tensor.cuda)\n"
        "import zkl_debug.engines.cpu, zkl_debug.beds, zkl_debug.stack.cpu, sys\n"
        "assert a == (torch.empty, torch.cuda.Event, torch.Tensor.cuda)\n"
        "assert not any(m.startswith('megatron') for m in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_beds_is_cheap() -> None:
    code = "import sys, zkl_debug.beds, zkl_debug.stack; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_patch_set_leaves_instances_as_they_were() -> None:
    module = torch.nn.Linear(2, 2)
    keys = set(vars(module))
    with PatchSet() as patches:
        patches.set(module, "forward", lambda x: x)
        assert module(3) == 3
        with pytest.raises(AttributeError):
            patches.set(module, "no_such_thing", 1)
    assert set(vars(module)) == keys


def test_patched_restores_after_an_exception() -> None:
    original = torch.nn.RMSNorm.forward
    with pytest.raises(ValueError, match="x"), patched(torch.nn.RMSNorm, "forward", lambda _f: None):
        raise ValueError("x")
    assert torch.nn.RMSNorm.forward is original


def test_kernels_nest_and_come_off() -> None:
    x = torch.tensor([0.5, 1.0])
    expected = torch.nn.functional.silu(x)
    with aten_cpu_kernels({"silu": lambda t: t * 0}):
        assert torch.equal(torch.nn.functional.silu(x), x * 0)
        with aten_cpu_kernels({"silu": lambda t: t * 0 + 1}):
            assert torch.equal(torch.nn.functional.silu(x), torch.ones(2))
        assert torch.equal(torch.nn.functional.silu(x), x * 0)
        assert replaced_kernels() == ("silu",)
    assert torch.equal(torch.nn.functional.silu(x), expected)
    assert replaced_kernels() == ()
