"""Every switch this project carries is put in place, is read back as on, and leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from zkl_debug.engines import patching
from zkl_debug.engines.cpu import cpu_backend, quiet
from zkl_debug.engines.megatron import invariant_kernels, ladder_patches, model, preload, world
from zkl_debug.engines.megatron.hybrid import mamba_backend
from zkl_debug.stack.applying import by_config, by_variables
from zkl_debug.stack.full import full_ladder
from zkl_debug.stack.switches import NotEffective, Switch, SwitchUnavailable, applied, switch, verify

CARRIED = [s for s in full_ladder() if s.carried]
#: Switches whose effect lies in a call at the moment they are turned on, not in something that is replaced.
ACTS_AT_ONCE = {"reseed-sides", "fresh-rope-cache"}
#: Kernels of Mamba that a CPU has not.
MAMBA = "zkl_debug.engines.mamba_reference"
#: What a switch needs before it can be in effect: a config that is built, a value nobody set before.
BUILT = {"model key": "TransformerConfig", "engine key": "InferenceConfig"}


@pytest.fixture(scope="module", autouse=True)
def _backend() -> Iterator[None]:
    """Everything imported, with stand-ins for the packages this machine has not."""
    with cpu_backend(), world.world(), mamba_backend(), fake_transformer_engine():
        preload.preload()
        with quiet():
            for name in ("megatron.core.resharding.refit", "megatron.core.ssm.mamba_mixer", MAMBA):
                importlib.import_module(name)
            importlib.import_module("megatron.core.transformer.custom_layers.batch_invariant_kernels")
        yield


@contextmanager
def fake_transformer_engine() -> Iterator[None]:
    """Modules with the names that the TE switches replace, each attribute an object of its own."""
    attributes: dict[str, dict[str, Any]] = {
        "": {},
        ".pytorch": {"RMSNorm": type("RMSNorm", (), {"forward": lambda _self, x: x})},
        ".pytorch.cpp_extensions": {"general_gemm": lambda *_a: "plain"},
        ".pytorch.cpp_extensions.gemm": {"get_cublas_workspace_size_bytes": lambda: 1 << 25},
        ".pytorch.module": {},
        ".pytorch.module._common": {"apply_normalization": lambda *_a: "plain"},
        ".pytorch.module.layernorm": {"rmsnorm_fwd": lambda *_a: "plain"},
        ".pytorch.module.layernorm_linear": {"general_gemm": 1, "apply_normalization": 2},
        ".pytorch.module.layernorm_mlp": {"apply_normalization": 3},
        ".pytorch.module.linear": {"general_gemm": 4},
    }
    made = {}
    for suffix, values in attributes.items():
        module = types.ModuleType("transformer_engine" + suffix)
        vars(module).update({**values, "__path__": [], "__spec__": ModuleSpec(module.__name__, None)})
        made[module.__name__] = module
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def places() -> dict[tuple[str, str], int]:
    """Identity of every attribute of the modules that switches reach into, and of the classes defined there."""
    found: dict[tuple[str, str], int] = {}
    prefixes = ("megatron.core", "transformer_engine", "zkl_debug.engines.megatron.scoring", MAMBA)
    for name, module in list(sys.modules.items()):
        if name.startswith(prefixes) and isinstance(module, types.ModuleType):
            for attribute, value in list(vars(module).items()):
                if attribute == "__warningregistry__":
                    continue
                found[name, attribute] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found.update({(f"{name}.{attribute}", k): id(v) for k, v in list(vars(value).items())})
    return found


def required(s: Switch) -> list[Switch]:
    """What a switch requires, the first to be turned on first."""
    found: dict[str, Switch] = {}
    for name in s.requires:
        found.update({other.name: other for other in (*required(switch(name)), switch(name))})
    return list(found.values())


@contextmanager
def conditions(s: Switch, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a machine with a GPU would offer, where a switch asks for it."""
    if s.kind == "kernel":
        monkeypatch.setattr(invariant_kernels, "_dispatch_key", lambda: "CPU")
    if s.kind == "environment":
        monkeypatch.delitem(sys.modules, "transformer_engine")
    needs = [need for other in (s, *required(s)) for need in other.needs]
    for name in ("TransformerConfig", "InferenceConfig"):
        for field in (f for need in needs if need.owner == name for f in need.names[0].split("|")[:1]):
            config_class = config_of(name)
            if field not in config_class.__dataclass_fields__:  # a newer megatron-core has it
                fields = {**config_class.__dataclass_fields__, field: None}
                monkeypatch.setattr(config_class, "__dataclass_fields__", fields)
                monkeypatch.setattr(config_class, field, None, raising=False)
    yield


def config_of(name: str) -> Any:
    """The config class of megatron-core."""
    module = {"TransformerConfig": "transformer.transformer_config", "InferenceConfig": "inference.config"}[name]
    return getattr(importlib.import_module("megatron.core." + module), name)


def build(s: Switch) -> None:
    """Build the config that a key belongs to."""
    if s.kind not in BUILT:
        return
    if BUILT[s.kind] == "InferenceConfig":
        config_of("InferenceConfig")()
    else:
        with quiet():
            config_of("TransformerConfig")(
                num_layers=1, hidden_size=8, num_attention_heads=1, attention_dropout=0.0, hidden_dropout=0.0
            )


@pytest.mark.parametrize("s", CARRIED, ids=lambda s: s.name)
def test_a_switch_undoes_itself(s: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as below:
        below.enter_context(conditions(s, monkeypatch))
        for other in required(s):
            below.enter_context(other.apply())
        before, environment, kernels = places(), dict(os.environ), patching.replaced_kernels()
        assert not s.reading().on
        with s.apply():
            build(s)
            assert s.reading().on, s.reading().text
            changed = {place for place, value in places().items() if before.get(place) != value}
            acted = changed or dict(os.environ) != environment or patching.replaced_kernels() != kernels
            assert acted or s.name in ACTS_AT_ONCE or invariant_kernels._libraries
        assert not s.reading().on
        after = places()
        assert {place for place in {*before, *after} if before.get(place) != after.get(place)} == set()
        assert dict(os.environ) == environment
        assert patching.replaced_kernels() == kernels
        assert invariant_kernels._libraries == {}


@pytest.mark.parametrize("name", ["bi-te-gemm", "bi-te-rmsnorm", "bi-te-normalization"])
def test_overrides_of_transformer_engine_nest(name: str) -> None:
    kernels = invariant_kernels._kernels()
    others = [s for s in full_ladder() if s.kind == "kernel" and s.name.startswith("bi-te") and s.name != name]
    before = places()
    with applied([*others, switch(name)]):
        assert kernels._batch_invariant_MODE
        assert all(s.effective() for s in others)
    assert not kernels._batch_invariant_MODE
    assert places() == before


def test_all_kernels_without_transformer_engine_leave_the_mode_off(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = invariant_kernels._kernels()
    monkeypatch.setattr(invariant_kernels, "_dispatch_key", lambda: "CPU")
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SwitchUnavailable, match="bi-kernels cannot be applied here"), switch("bi-kernels").apply():
        raise AssertionError("entered")
    assert not kernels.is_batch_invariant_mode_enabled()
    assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))


def test_a_kernel_without_a_gpu_is_unavailable() -> None:
    with pytest.raises(SwitchUnavailable, match="need a GPU"), switch("bi-mm").apply():
        raise AssertionError("entered")
    with pytest.raises(SwitchUnavailable, match="carries no code"), switch("one-ssm-scan").apply():
        raise AssertionError("entered")


# --- requested on, effective off --------------------------------------------------------------------------------------


def _model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model; megatron-core leaves the attention backend of the last one in the environment, and insists on it."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
    return model.build_model(model.ModelSpec(layers=1), "fp32", 0)


def test_a_switch_set_after_the_model_is_built_reads_as_off(monkeypatch: pytest.MonkeyPatch) -> None:
    built = _model(monkeypatch)
    late = switch("attention-flash")
    with late.apply():
        reading = late.reading(built)
        assert not reading.on
        assert reading.text == "the TransformerConfig that runs was built before it was set"
        with pytest.raises(NotEffective, match="attention-flash was requested on but is off in effect: the Transf"):
            verify([late], built)
        other = _model(monkeypatch)
        assert late.reading(other).on
        assert not late.reading(built).on  # another model that was built in time does not help this one
    with pytest.raises(NotEffective), applied([late]):
        pass  # nothing was built at all


def test_a_config_that_overrules_the_switch_reads_as_off() -> None:
    s = by_config("x", "InferenceConfig", {"enable_prefix_caching": True}, fixes="", owner="mcore", group="g")
    with s.apply():
        config = config_of("InferenceConfig")()
        assert config.enable_prefix_caching
        assert s.effective()
        config.enable_prefix_caching = False
        assert s.reading().text == "InferenceConfig.enable_prefix_caching is False instead of True"


def test_a_field_that_does_not_exist_is_unavailable() -> None:
    s = by_config("x", "TransformerConfig", {"no_such_field": 1}, fixes="", owner="mcore", group="g")
    with pytest.raises(SwitchUnavailable, match="no_such_field"), s.apply():
        raise AssertionError("entered")


def test_a_variable_that_was_read_already_reads_as_off(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"fixes": "", "owner": "environment", "group": "g"}
    s = by_variables("x", {"ZKL_TEST_VARIABLE": "1"}, "zkl_test_reader", **fields)
    with s.apply():
        assert os.environ["ZKL_TEST_VARIABLE"] == "1"
        assert s.effective()
        os.environ["ZKL_TEST_VARIABLE"] = "2"
        assert s.reading().text == "ZKL_TEST_VARIABLE is '2'"
    assert "ZKL_TEST_VARIABLE" not in os.environ
    monkeypatch.setitem(sys.modules, "zkl_test_reader", types.ModuleType("zkl_test_reader"))
    with s.apply():
        assert s.reading().text == "zkl_test_reader was imported before it was set, and reads it only once"
    monkeypatch.setenv("ZKL_TEST_VARIABLE", "1")
    with s.apply():
        assert s.effective()  # the process was started with it
    assert os.environ["ZKL_TEST_VARIABLE"] == "1"


# --- what the patches of megatron-core do -----------------------------------------------------------------------------


def _in(name: str, check: Callable[[], None]) -> None:
    with switch(name).apply():
        check()


def test_index_put_routing_gives_the_same_routing() -> None:
    import megatron.core.transformer.moe.router as router

    logits = torch.randn(33, 8, generator=torch.Generator().manual_seed(1))
    plain = router.topk_routing_with_score_function(logits, 3, score_function="sigmoid")

    def check() -> None:
        probs, chosen = router.topk_routing_with_score_function(logits, 3, score_function="sigmoid")
        assert torch.equal(probs, plain[0])
        assert torch.equal(chosen, plain[1])
        assert chosen.dtype == torch.bool
        dense = router.topk_routing_with_score_function(logits, 3, dense_output=True)
        assert dense[0].shape == (33, 3)

    _in("index-put-routing", check)


def test_graph_buckets_are_multiples_of_64() -> None:
    from megatron.core.inference.batch_dimensions_utils import CUDAGraphBatchDimensionBuilder as Builder

    arguments = (1, 8, 512, 4, 128, 1024, 512, True)
    plain, _ = Builder.generate_cuda_graph_batch_dimensions_list(*arguments)
    assert any(bucket.token_count % 64 for bucket in plain)

    def check() -> None:
        buckets, counts = Builder.generate_cuda_graph_batch_dimensions_list(*arguments)
        assert len(buckets) > 2
        assert all(bucket.token_count % 64 == 0 for bucket in buckets)
        assert counts == sorted({bucket.token_count for bucket in buckets}, reverse=True)
        assert Builder.generate_cuda_graph_batch_dimensions_list(1, None, 512, 4, 128, 1024, 512, True)[1] is None

    _in("graph-buckets-64", check)


def test_the_mamba_cache_is_stale_after_a_weight_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.resharding.refit as refit

    mixer = torch.nn.Module()
    mixer._A_neg_exp_cache_stale = False  # type: ignore[assignment]
    monkeypatch.setattr(refit, "swap_model_weights", lambda *_a, **_k: "done")

    def check() -> None:
        assert refit.swap_model_weights(None, torch.nn.Sequential(mixer), "gloo") == "done"
        assert mixer._A_neg_exp_cache_stale

    _in("mamba-cache-refreshed", check)


def test_te_workspace_is_starved() -> None:
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
    _in("te-gemm-workspace", lambda: _equal(gemm.get_cublas_workspace_size_bytes(), 4))
    assert gemm.get_cublas_workspace_size_bytes() == 1 << 25
    assert ladder_patches._MULTIPLE == 64


def _equal(found: object, expected: object) -> None:
    assert found == expected
