"""Names across model trees: what is joined, taken apart into lanes, or told as not joinable; nothing is dropped."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray

from zkl_debug.capture.api import capture
from zkl_debug.cli.diff import command as diff_command
from zkl_debug.cli.names import command as names_command
from zkl_debug.diff import diff_captures
from zkl_debug.diff.naming import join_names
from zkl_debug.diff.naming.derived import lane_index
from zkl_debug.diff.naming.rules import families_of, known_families, load_map, modules_of
from zkl_debug.errors import UsageError
from zkl_debug.schema import Phase, SiteKind, SiteMeta, StateRecord, parse_site
from zkl_debug.store.build import make_block, make_frame, make_rows, write_capture
from zkl_debug.store.reader import open_capture

HEADS, GROUPS, WIDTH, HIDDEN, FFN, ROWS = 4, 2, 8, 16, 12, 5
CONFIG = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": WIDTH, "gated_linear_unit": True}
HF_CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": WIDTH}
M, H = "decoder.layers.0.", "model.layers.0."
Bits = NDArray[np.uint32]
Sites = Mapping[str, NDArray[Any]]


def tensors(seed: int = 0) -> dict[str, Bits]:
    rng = np.random.default_rng(seed)
    sizes = {"x": HIDDEN, "normed": HIDDEN, "q": HEADS * WIDTH, "k": GROUPS * WIDTH, "v": GROUPS * WIDTH, "mlp": HIDDEN}
    sizes |= {"gate": FFN, "up": FFN, "out": HIDDEN}
    return {name: rng.normal(size=(ROWS, size)).astype(np.float32).view(np.uint32) for name, size in sizes.items()}


def per_group(t: Mapping[str, Bits]) -> Bits:
    """q, k, v as megatron-core lays them out, written by hand: for each group its heads of q, then k, then v."""
    each = HEADS // GROUPS * WIDTH
    pieces = []
    for g in range(GROUPS):
        kv = slice(g * WIDTH, (g + 1) * WIDTH)
        pieces += [t["q"][:, g * each : (g + 1) * each], t["k"][:, kv], t["v"][:, kv]]
    return np.concatenate(pieces, axis=1)


def megatron(t: Mapping[str, Bits]) -> dict[str, NDArray[Any]]:
    return {
        f"{M}input_layernorm:in": t["x"],
        f"{M}input_layernorm:out": t["normed"],
        f"{M}self_attention.linear_qkv:in": t["normed"],
        f"{M}self_attention.linear_qkv:out": per_group(t),
        f"{M}mlp.linear_fc1:in": t["mlp"],
        f"{M}mlp.linear_fc1:out": np.concatenate([t["gate"], t["up"]], axis=1),
        f"{M}mlp:out": t["out"],
        f"{M}mlp/only_here:out.0": t["out"],
    }


def transformers(t: Mapping[str, Bits]) -> dict[str, NDArray[Any]]:
    return {
        f"{H}input_layernorm:in": t["x"],
        f"{H}input_layernorm:out": t["normed"],
        **{f"{H}self_attn.{n}_proj:in": t["normed"] for n in "qkv"},
        **{f"{H}self_attn.{n}_proj:out": t[n] for n in "qkv"},
        **{f"{H}mlp.{n}_proj:in": t["mlp"] for n in ("gate", "up")},
        **{f"{H}mlp.{n}_proj:out": t[n] for n in ("gate", "up")},
        f"{H}mlp:out": t["out"],
    }


def vllm(t: Mapping[str, Bits]) -> dict[str, NDArray[Any]]:
    return {
        f"{H}input_layernorm:out": t["normed"],
        f"{H}self_attn.qkv_proj:in": t["normed"],
        f"{H}self_attn.qkv_proj:out": np.concatenate([t["q"], t["k"], t["v"]], axis=1),
        f"{H}mlp.gate_up_proj:in": t["mlp"],
        f"{H}mlp.gate_up_proj:out": np.concatenate([t["gate"], t["up"]], axis=1),
        f"{H}mlp:out": t["out"],
    }


_DTYPES = {"uint32": "float32", "int64": "int64", "bool": "bool"}


def written(
    out: Path, sites: Sites, config: Mapping[str, Any], payload: bool = True, weights: Mapping[str, int] | None = None
) -> Path:
    blocks = []
    for order, (name, bits) in enumerate(sites.items()):
        parsed, dtype = parse_site(name), _DTYPES[str(bits.dtype)]
        meta = SiteMeta(name, SiteKind.MODULE, parsed.layer, order, parsed.port, dtype, bits.shape[1:])
        raw = bits.view(f"u{bits.dtype.itemsize}")
        blocks.append(make_block(meta, raw, payload=payload))
    records = [
        StateRecord(name, "parameter", "float32", (2,), (value, value)) for name, value in (weights or {}).items()
    ]
    rows = make_rows(0, np.arange(ROWS, dtype=np.int64), flags=int(Phase.SCORE))
    frame = make_frame(0, Phase.SCORE, n_rows=ROWS, n_padded=ROWS, n_seqs=1, max_seqlen_q=ROWS)
    write_capture(
        out, "train", [frame], [rows], [blocks], {"config": dict(config)}, states={0: records} if records else None
    )
    return out


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return (
        written(tmp_path / "hf", transformers(tensors()), HF_CONFIG),
        written(tmp_path / "mcore", megatron(tensors()), CONFIG),
    )


def names_of(a: Path, b: Path, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(names_command, [str(a), str(b), "--json", *options], standalone_mode=False)
    assert done.exception is None, done.exception
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_three_trees_of_one_model_are_identical(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    third = written(tmp_path / "vllm", vllm(tensors()), HF_CONFIG)
    for a, b, matched in ((*pair, 10), (third, pair[1], 8), (pair[0], third, 9)):
        document = diff_captures(a, b).to_json()
        assert document["verdict"] == "identical", document
        assert document["claim"]["scope"] == "captured-sites"
        assert document["coverage"]["sites"]["matched"] == matched


def test_every_site_is_in_the_table_once(pair: tuple[Path, Path]) -> None:
    document = names_of(*pair)
    assert document["families"] == {"a": ["hf-llama"], "b": ["megatron"]}
    for side, sites in (("a", transformers(tensors())), ("b", megatron(tensors()))):
        assert {line[side] for line in document["sites"]} - {""} == set(sites)
    by_name = {line["name"]: line for line in document["sites"] if line["name"]}
    part = by_name[f"{M}self_attention.linear_qkv/k:out.0"]
    assert (part["a"], part["b"]) == (f"{H}self_attn.k_proj:out", f"{M}self_attention.linear_qkv:out")
    assert part["joined"]
    assert not by_name[f"{M}mlp/only_here:out.0"]["joined"]
    left_out = {line["a"] or line["b"]: line["how"] for line in document["sites"] if not line["name"]}
    assert left_out[f"{H}self_attn.k_proj:in"].startswith(f"equal to {H}self_attn.q_proj:in")
    assert left_out[f"{M}self_attention.linear_qkv:out"] == "compared by parts: q, k, v"
    text = CliRunner().invoke(names_command, [str(path) for path in pair]).output
    assert "10 sites joined" in text


@pytest.mark.parametrize("part", ["q", "k", "v", "up"])
def test_a_difference_in_one_part_is_named_at_that_part(tmp_path: Path, pair: tuple[Path, Path], part: str) -> None:
    changed = tensors()
    changed[part] = changed[part].copy()
    changed[part][3, -1] ^= 1
    broken = written(tmp_path / "broken", megatron(changed), CONFIG)
    document = diff_captures(pair[0], broken).to_json()
    layer = "mlp.linear_fc1" if part == "up" else "self_attention.linear_qkv"
    first = document["first"]
    assert (first["site"], first["kind"], first["position"]) == (f"{M}{layer}/{part}:out.0", "own", 3)
    assert (first["max_ulp"], first["mismatched_elements"]) == (1, 1)
    assert document["checks"]["names"]["first"]["b"] == f"{M}{layer}:out"
    assert document["affected"]["rows"] == 1


def test_without_raw_bits_a_fused_site_is_told_as_not_joinable(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    bare = written(tmp_path / "bare", megatron(tensors()), CONFIG, payload=False)
    document = diff_captures(pair[0], bare).to_json()
    assert document["verdict"] == "identical"
    assert document["claim"]["scope"] == "captured-sites"
    reasons = {skip["what"]: skip["reason"] for skip in document["coverage"]["skipped"]}
    assert "cannot be taken apart" in reasons[f"site {M}self_attention.linear_qkv:out of B"]
    assert not any("linear_qkv/" in name for name in (document["first"] or {}))
    third = written(tmp_path / "third", vllm(tensors()), HF_CONFIG, payload=False)
    document = diff_captures(third, bare).to_json()
    assert document["verdict"] == "identical", "q, k, v in another order must not be compared as they lie"
    assert document["coverage"]["sites"]["matched"] == 5  # gate and up lie alike on both sides


def test_lanes_that_do_not_follow_from_the_configuration_are_not_guessed(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    for config in ({}, CONFIG | {"kv_channels": 4}, CONFIG | {"num_query_groups": 3}):
        assert lane_index("per-group", 3, 64, config) is None
    odd = written(tmp_path / "odd", megatron(tensors()), {"gated_linear_unit": False})
    reasons = " ".join(skip["reason"] for skip in diff_captures(pair[0], odd).to_json()["coverage"]["skipped"])
    assert "does not follow from the configuration" in reasons
    assert "not gated" in reasons


def test_fused_norms_are_read_where_they_read(tmp_path: Path) -> None:
    """The input of a fused layer is that of its norm: under one name it would be blamed for being another tensor."""
    t = tensors()
    local = megatron(t)
    fused = {
        f"{M}self_attention:in": t["x"],
        f"{M}self_attention.linear_qkv:in": t["x"],
        f"{M}self_attention.linear_qkv:out": per_group(t),
        f"{M}mlp.linear_fc1:in": t["out"],
        f"{M}mlp.linear_fc1:out": local[f"{M}mlp.linear_fc1:out"],
        f"{M}mlp:out": t["out"],
    }
    local[f"{M}pre_mlp_layernorm:in"], local[f"{M}pre_mlp_layernorm:out"] = t["out"], t["mlp"]
    a = written(tmp_path / "local", local, CONFIG, weights={f"{M}input_layernorm.weight": 7})
    b = written(tmp_path / "te", fused, CONFIG, weights={f"{M}self_attention.linear_qkv.layer_norm_weight": 7})
    document = diff_captures(a, b).to_json()
    assert document["checks"]["names"]["b"]["families"] == ["megatron-fused-norm", "megatron"]
    assert document["checks"]["parameters"] == 1
    assert document["verdict"] == "identical"
    assert document["coverage"]["sites"]["matched"] == 5
    assert diff_captures(b, b.parent / "te").to_json()["verdict"] == "refused"  # one capture, twice


def test_weights_are_compared_under_common_names(tmp_path: Path) -> None:
    a = written(tmp_path / "a", transformers(tensors()), HF_CONFIG, weights={f"{H}mlp.down_proj.weight": 1})
    b = written(tmp_path / "b", megatron(tensors()), CONFIG, weights={f"{M}mlp.linear_fc2.weight": 2})
    document = diff_captures(a, b).to_json()
    assert document["refusal"]["code"] == "weights-differ"
    assert document["refusal"]["detail"]["parameters"] == [f"{M}mlp.linear_fc2.weight"]


def test_a_map_of_the_user_joins_what_is_not_known(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    other = {f"net.block.{name.removeprefix(M)}": bits for name, bits in megatron(tensors()).items()}
    strange = written(tmp_path / "strange", other, {})
    refused = diff_captures(strange, pair[1]).to_json()
    assert refused["refusal"]["code"] == "no-sites-matched"
    file = tmp_path / "map.toml"
    file.write_text(
        'paths = [["net.block.input_layernorm", "decoder.layers.0.input_layernorm"],\n'
        '         ["net.block.mlp", "decoder.layers.0.mlp"]]\n'
        'sites = [["net.block.mlp.linear_fc1:in", "decoder.layers.0.mlp.linear_fc1:in"]]\n'
    )
    asked = [str(strange), str(pair[1]), "--map", str(file), "--json"]
    done = CliRunner().invoke(diff_command, asked, standalone_mode=False)
    document = json.loads(done.stdout)
    assert document["verdict"] == "identical"
    assert document["coverage"]["sites"]["matched"] == 5
    assert sum(line["joined"] for line in names_of(strange, pair[1], "--map", str(file))["sites"]) == 5


@pytest.mark.parametrize(
    "text", ["sites = 3", 'sites = [["a"]]', "nonsense = 1", "sites = [", 'sites = [["a", "b{i}"]]']
)
def test_a_map_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(UsageError, match=r"map\.toml"):
        load_map(tmp_path / "map.toml")


def test_choices_told_as_ids_stand_against_maps(tmp_path: Path) -> None:
    """Dense [T, k] against sparse [T, E]: the same experts and weights are the same, another expert is named."""
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(8)[:2] for _ in range(ROWS)]).astype(np.int64)
    weights = rng.random((ROWS, 2)).astype(np.float32)
    chosen, spread = np.zeros((ROWS, 8), bool), np.zeros((ROWS, 8), np.float32)
    np.put_along_axis(chosen, ids, True, axis=1)
    np.put_along_axis(spread, ids, weights, axis=1)
    logits: NDArray[Any] = rng.normal(size=(ROWS, 8)).astype(np.float32).view(np.uint32)
    owner = f"{M}mlp/router.topk"
    sparse: dict[str, NDArray[Any]] = {
        f"{owner}:in.0": logits,
        f"{owner}:out.0": spread.view(np.uint32),
        f"{owner}:out.1": chosen,
    }
    dense: dict[str, NDArray[Any]] = {
        f"{owner}:in.0": logits,
        f"{owner}:out.0": weights.view(np.uint32),
        f"{owner}:out.1": ids,
    }
    a = written(tmp_path / "sparse", sparse, CONFIG)
    document = diff_captures(a, written(tmp_path / "dense", dense, CONFIG)).to_json()
    assert document["verdict"] == "identical"
    assert document["coverage"]["sites"]["matched"] == 3
    bare = diff_captures(a, written(tmp_path / "bare", dense, CONFIG, payload=False)).to_json()
    assert bare["verdict"] == "identical"
    assert bare["coverage"]["sites"]["matched"] == 1
    assert any("experts by id" in skip["reason"] for skip in bare["coverage"]["skipped"])
    other = ids.copy()
    other[2, 0] = next(e for e in range(8) if e not in ids[2])
    wrong = written(tmp_path / "wrong", dense | {f"{owner}:out.1": other}, CONFIG)
    first = diff_captures(a, wrong).to_json()["first"]
    assert (first["site"], first["kind"], first["position"]) == (f"{owner}:out.0", "own", 2)


def test_families_are_sound() -> None:
    for family in known_families():
        assert family.detect, family.name
        for rule in family.rules:
            targets = [to for _, to in rule.sites]
            assert all(":" in to or to.endswith("weight") for to in targets)
            sources = [s for s, _ in (*rule.paths, *rule.sites)]
            assert len(sources) == len(set(sources)), family.name
            for name in targets:
                if ":" in name:
                    parse_site(name.replace("{i}", "3"))
    llama = modules_of([f"{H}self_attn.q_proj:out", f"{H}self_attn.k_proj.weight"])
    assert [f.name for f in families_of(llama)] == ["hf-llama"]
    hybrid = modules_of(
        [
            "backbone.layers.0.mixer.in_proj:out",
            "backbone.layers.1.mixer.q_proj:out",
            "backbone.layers.2.mixer.up_proj:in",
        ]
    )
    (nemotron,) = families_of(hybrid)
    common = [nemotron.common(f"backbone.layers.{i}.norm:out", hybrid) for i in range(3)]
    assert common == [
        "decoder.layers.0.norm:out",
        "decoder.layers.1.input_layernorm:out",
        "decoder.layers.2.pre_mlp_layernorm:out",
    ]
    latent = modules_of([f"{H}self_attn.kv_a_proj_with_mqa:out", f"{H}self_attn.q_a_proj:out"])
    (deepseek,) = families_of(latent)
    assert deepseek.common(f"{H}self_attn.q_b_proj:out", latent) == f"{M}self_attention.linear_q_up_proj:out"


# ---- real models ----------------------------------------------------------------------------------------------------
needs_hf = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the hf extra")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``mcore`` and ``hf``: a GPTModel and a LlamaForCausalLM of the same weights and tokens, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from zkl_debug.engines.cpu import cpu_backend
    from zkl_debug.engines.megatron import model, scoring, world

    root = tmp_path_factory.mktemp("real")
    with cpu_backend(), world.world():
        mcore: Any = model.build_model(model.ModelSpec(layers=2), "fp32", 0)
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
        sizes |= {"vocab_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}
        config = LlamaConfig(**sizes, rms_norm_eps=mcore.config.layernorm_epsilon, attn_implementation="eager")
        llama = LlamaForCausalLM(config).eval()
        llama.load_state_dict(_llama_weights(dict(mcore.named_parameters())), strict=True)
        batch = scoring.padded_batch(0, [(0, list(range(3, 14))), (1, list(range(40, 60, 2)))])
        with capture(mcore, root / "mcore", side="train", level="payload"):
            scoring.score_microbatch(mcore, batch)
        with torch.no_grad(), capture(llama, root / "hf", side="train", level="payload"):
            llama(input_ids=batch.tokens, use_cache=False)
    return root


def _llama_weights(mcore: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {
        "model.embed_tokens.weight": mcore["embedding.word_embeddings.weight"],
        "model.norm.weight": mcore["decoder.final_layernorm.weight"],
        "lm_head.weight": mcore["output_layer.weight"],
    }
    for i in range(2):
        m, h = f"decoder.layers.{i}.", f"model.layers.{i}."
        q, k, v = mcore[f"{m}self_attention.linear_qkv.weight"].view(2, 4, 16, 64).tensor_split((2, 3), 1)
        gate, up = mcore[f"{m}mlp.linear_fc1.weight"].chunk(2)
        found |= {f"{h}self_attn.{n}_proj.weight": w.reshape(-1, 64) for n, w in (("q", q), ("k", k), ("v", v))}
        found |= {f"{h}mlp.gate_proj.weight": gate, f"{h}mlp.up_proj.weight": up}
        found |= {
            f"{h}self_attn.o_proj.weight": mcore[f"{m}self_attention.linear_proj.weight"],
            f"{h}mlp.down_proj.weight": mcore[f"{m}mlp.linear_fc2.weight"],
            f"{h}input_layernorm.weight": mcore[f"{m}input_layernorm.weight"],
            f"{h}post_attention_layernorm.weight": mcore[f"{m}pre_mlp_layernorm.weight"],
        }
    return found


@needs_hf
def test_a_llama_of_transformers_stands_against_a_gpt_of_megatron(real: Path) -> None:
    """Kernels may add in another order, so values are held to rounding here, and to bits where nothing is computed."""
    document = names_of(real / "hf", real / "mcore")
    pairs = {line["name"]: (line["a"], line["b"]) for line in document["sites"] if line["joined"]}
    assert len(pairs) == 65
    for i in range(2):
        for port in ("qkv:in", "qkv/q:out.0", "qkv/k:out.0", "qkv/v:out.0", "proj:in", "proj:out"):
            assert f"decoder.layers.{i}.self_attention.linear_{port}" in pairs
    alone = [line for line in document["sites"] if not line["joined"] and line["a"]]
    assert {line["a"].split(".")[-1] for line in alone} == {
        "k_proj:in",
        "v_proj:in",
        "up_proj:in",
        "act_fn:in",
        "act_fn:out",
    }

    verdict = diff_captures(real / "hf", real / "mcore")
    assert verdict.outcome in ("identical", "diverged")
    comparison = verdict.comparison
    assert comparison is not None
    assert "embedding" not in (verdict.first.site if verdict.first else "")
    bits = {
        pair.name: [site.payload(site.payload_index) for site in (pair.a, pair.b)]
        for pair in comparison.sites
        if pair.a is not None and pair.b is not None and pair.a.meta.torch_dtype == "float32"
    }
    assert set(bits) == {name for name in pairs if not name.startswith("inputs/")}
    for name, sides in bits.items():
        left, right = (side.reshape(len(side), -1).view(np.float32)[:21] for side in sides)
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4, err_msg=name)


@needs_hf
def test_fused_norms_of_a_real_transformer_engine_capture(real: Path) -> None:
    """Taken on a GPU: the inputs of a fused layer and of its module are one tensor; one name stands for both."""
    captures = Path(__file__).parent.parent / "captures/reference/h200-gpt-te-stack-on/train"
    document = names_of(captures, real / "mcore")
    assert document["families"]["a"] == ["megatron-fused-norm", "megatron"]
    by_name = {line["name"]: line for line in document["sites"] if line["name"]}
    fused = by_name["decoder.layers.0.input_layernorm:in"]
    assert (fused["a"], fused["joined"]) == ("decoder.layers.0.self_attention:in", True)
    assert not by_name["decoder.layers.0.self_attention.linear_qkv:in"]["joined"]
    left_out = {line["a"]: line["how"] for line in document["sites"] if not line["name"]}
    assert left_out["decoder.layers.0.mlp.linear_fc1:in"].startswith("equal to decoder.layers.0.mlp:in in every row")


@needs_hf
def test_real_models_with_other_weights_are_refused_by_a_common_name(real: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, num_hidden_layers=2)).eval()
    with torch.no_grad(), capture(llama, tmp_path / "hf", side="train"):
        llama(input_ids=torch.arange(3, 14)[None], use_cache=False)
    refusal = diff_captures(tmp_path / "hf", real / "mcore").to_json()["refusal"]
    assert refusal["code"] == "weights-differ"
    assert "decoder.layers.0.self_attention.linear_proj.weight" in refusal["detail"]["parameters"]


@needs_hf
@pytest.mark.slow
def test_experts_of_qwen_stand_against_experts_of_megatron(tmp_path: Path) -> None:
    """The router's ids [t, k] become a map over the experts; logits, map and rows of the experts stand side by side."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    qwen = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=2, intermediate_size=128)).eval()
    from zkl_debug.engines.cpu import cpu_backend
    from zkl_debug.engines.megatron import model, scoring, world

    with cpu_backend(), world.world():
        mcore = model.build_model(model.ModelSpec(layers=2, experts=8, topk=2), "fp32", 0)
        batch = scoring.padded_batch(0, [(0, list(range(3, 14)))])
        with capture(mcore, tmp_path / "mcore", side="train", level="payload"):
            scoring.score_microbatch(mcore, batch)
        with torch.no_grad(), capture(qwen, tmp_path / "hf", side="train", level="payload"):
            qwen(input_ids=batch.tokens, use_cache=False)
    joined = {line["name"]: line for line in names_of(tmp_path / "hf", tmp_path / "mcore")["sites"] if line["joined"]}
    for i in range(2):
        for port in ("gating:in.0", "gating:out.0", "topk:in.0", "topk:out.0", "topk:out.1"):
            assert f"decoder.layers.{i}.mlp/router.{port}" in joined
        assert joined[f"decoder.layers.{i}.mlp/unpermute:out.0"]["a"] == f"model.layers.{i}.mlp.experts:out"
    with open_capture(tmp_path / "hf") as a, open_capture(tmp_path / "mcore") as b:
        made = join_names(a, b).a.sites["decoder.layers.1.mlp/router.topk:out.1"]
        ids = a.sites["model.layers.1.mlp.gate:out.2"].payload(np.arange(11)).view(np.int64)
        assert made.meta.row_shape == (8,)
        assert [np.flatnonzero(row).tolist() for row in made.payload(np.arange(11))] == np.sort(ids, 1).tolist()
