"""A small probe for the engine tests: rows of module and function values, keyed by the token prefix they depend on.

Deliberately independent of ``zkl_debug.capture``: the beds are checked without the instrument they serve.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from zkl_debug.beds import BedContext, BedOptions, BedRun, run_bed
from zkl_debug.engines.patching import patched

Key = bytes  # a token prefix, int32 each: see key_of
Rows = dict[str, dict[Key, list[tuple[str, bytes]]]]


def key_of(tokens: Sequence[int]) -> Key:
    """The key of a row that depends on ``tokens`` (bytes keep their hash, a tuple does not)."""
    return np.array(tokens, np.int32).tobytes()


class Probe:
    """Rows of one side: ``rows[site][prefix]`` is the list of (phase, bytes) seen for it, in order."""

    def __init__(self, context: BedContext, side: str) -> None:
        self.context = context
        self.side = side
        self.rows: Rows = {}
        self._keys: list[tuple[int, Key, str]] = []  # (slot, prefix, phase) of the forward that runs now
        self._slots = 0
        self._shape = (0, 0)
        self._layer = 0
        self._tokens: dict[int, list[int]] = {}

    def put(self, site: str, value: Any) -> None:
        """Record the rows of a tensor under ``site``; tensors without token rows are ignored."""
        flat = self._by_slot(value)
        if flat is None:
            return
        store = self.rows.setdefault(site, {})
        raw = flat.contiguous().view(torch.uint8).numpy()
        for slot, key, phase in self._keys:
            store.setdefault(key, []).append((phase, raw[slot].tobytes()))

    def _by_slot(self, value: Any) -> torch.Tensor | None:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or not self._slots:
            return None
        value = value.detach().clone()
        b, s = self._shape
        if tuple(value.shape[:2]) == (s, b):
            value = value.transpose(0, 1)
        elif value.shape[0] == s * b and b > 1:
            value = value.reshape(s, b, -1).transpose(0, 1)
        elif value.shape[0] != s * b and tuple(value.shape[:2]) != (b, s):
            return None
        rows: torch.Tensor = value.reshape(self._slots, -1)
        return rows

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks and taps on, for one side."""
        with ExitStack() as stack:
            self._hook_modules(stack)
            self._tap_functions(stack)
            (self._gen_frames if self.side == "gen" else self._train_frames)(stack)
            yield

    def _hook_modules(self, stack: ExitStack) -> None:
        for name, module in self.context.model.named_modules():
            if not name or "experts." in name or name.endswith("rotary_pos_emb"):
                continue
            handle = module.register_forward_hook(self._hook(name), with_kwargs=True)
            stack.callback(handle.remove)
        for index, layer in enumerate(self.context.model.decoder.layers):
            handle = layer.register_forward_pre_hook(self._enter_layer(index))
            stack.callback(handle.remove)

    def _enter_layer(self, index: int) -> Callable[..., None]:
        def hook(*_args: Any) -> None:
            self._layer = index

        return hook

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
            first = kwargs.get("hidden_states", args[0] if args else None)
            if name.endswith("core_attention"):
                return
            self.put(f"{name}:in", first)
            self.put(f"{name}:out", output[0] if isinstance(output, tuple) else output)

        return hook

    def _site(self, what: str) -> str:
        return f"decoder.layers.{self._layer}.{what}"

    def _tap_functions(self, stack: ExitStack) -> None:
        import megatron.core.inference.contexts.dynamic_context as dynamic_context
        import megatron.core.transformer.attention as attention
        import megatron.core.transformer.moe.router as router
        import megatron.core.transformer.moe.token_dispatcher as dispatcher

        tap = stack.enter_context
        tap(patched(attention, "apply_rotary_pos_emb", self._rope))
        tap(patched(dynamic_context, "apply_rotary_pos_emb", self._rope))
        tap(
            patched(
                attention.SelfAttention,
                "get_query_key_value_tensors",
                self._each(("out.0", "out.1", "out.2"), "self_attention/qkv"),
            )
        )
        tap(patched(router, "router_gating_linear", self._each(("out.0",), "mlp/router.gating")))
        tap(patched(router, "topk_routing_with_score_function", self._each(("out.0", "out.1"), "mlp/router.topk")))
        tap(patched(dispatcher, "unpermute", self._each(("out.0",), "mlp/unpermute")))
        tap(patched(dynamic_context.DynamicInferenceContext, "append_key_value_cache", self._cache_write))
        tap(patched(dynamic_context.DynamicInferenceContext, "_processed_log_probs", self._gen_log_softmax))
        tap(patched(dynamic_context.DynamicInferenceContext, "calculate_log_probs_tensors", self._gen_selected))
        tap(patched(attention.Attention, "flash_decode_and_prefill", self._gen_attention))
        for index, layer in enumerate(self.context.model.decoder.layers):
            core = layer.self_attention.core_attention
            handle = core.register_forward_hook(self._train_attention(index))
            stack.callback(handle.remove)

    def _each(self, names: tuple[str, ...], where: str) -> Callable[[Any], Any]:
        def wrap(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                out = original(*args, **kwargs)
                for name, value in zip(names, out if isinstance(out, tuple) else (out,), strict=False):
                    self.put(self._site(f"{where}:{name}"), value)
                return out

            return call

        return wrap

    def _rope(self, original: Any) -> Any:
        def call(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            kind = "q" if t.shape[-2] == self.context.spec.heads else "k"
            self.put(self._site(f"self_attention/rope.{kind}:in.0"), t)
            out = original(t, *args, **kwargs)
            self.put(self._site(f"self_attention/rope.{kind}:out.0"), out)
            return out

        return call

    def _cache_write(self, original: Any) -> Any:
        def call(ctx: Any, layer: int, key: Any, value: Any) -> Any:
            self.put(self._site("self_attention.core_attention:in.1"), key)
            self.put(self._site("self_attention.core_attention:in.2"), value)
            return original(ctx, layer, key, value)

        return call

    def _gen_attention(self, original: Any) -> Any:
        def call(module: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.put(self._site("self_attention.core_attention:in"), q)
            out = original(module, q, *args, **kwargs)
            self.put(self._site("self_attention.core_attention:out"), out)
            return out

        return call

    def _train_attention(self, index: int) -> Callable[..., None]:
        def hook(_module: Any, args: Any, output: Any) -> None:
            self._layer = index
            for port, value in zip(("in", "in.1", "in.2"), args[:3], strict=True):
                self.put(self._site(f"self_attention.core_attention:{port}"), value)
            self.put(self._site("self_attention.core_attention:out"), output)

        return hook

    def _gen_log_softmax(self, original: Any) -> Any:
        def call(ctx: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            out = original(ctx, logits, *args, **kwargs)
            padded = torch.zeros(self._slots, out.shape[-1])
            padded[: out.shape[0]] = out
            self.put("logprobs/log_softmax:out.0", padded)
            return out

        return call

    def _gen_selected(self, original: Any) -> Any:
        def call(ctx: Any, logits: Any, new_tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            selected, every = original(ctx, logits, new_tokens, *args, **kwargs)
            padded = torch.full((self._slots, 1), torch.nan)
            padded[: selected.shape[0], 0] = selected
            rows, self._keys = self._keys, []
            for row, key, phase in rows:
                slot = int(ctx.token_to_request_idx[row])
                tokens = self._tokens[int(ctx.request_ids[slot])]
                following = tokens[len(key) // 4] if len(key) // 4 < len(tokens) else int(new_tokens[slot])
                self._keys.append((row, key + key_of([following]), phase))
            self.put("logprobs/selected:out.0", padded)
            self._keys = rows
            return selected, every

        return call

    def _gen_frames(self, stack: ExitStack) -> None:
        controller, ctx = self.context.generator.controller, self.context.generator.context

        def wrap_add(original: Any) -> Any:
            def add(this: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
                self._tokens[int(req.request_id)] = req.prompt_tokens.tolist()
                return original(this, req, *args, **kwargs)

            return add

        def wrap(original: Any) -> Any:
            def step(ids: Any, positions: Any) -> Any:
                n = ctx.active_token_count
                self._slots = ctx.padded_active_token_count
                self._shape = (1, self._slots)
                slot_of = ctx.token_to_request_idx[:n].tolist()
                decoding = ctx.paused_request_count + ctx.num_decode_requests
                self._keys = []
                for row, (slot, position) in enumerate(zip(slot_of, ctx.token_to_pos_ids[:n].tolist(), strict=True)):
                    tokens = self._tokens[int(ctx.request_ids[slot])]
                    if position == len(tokens):
                        tokens.append(int(ids[0, row]))
                    phase = "decode" if slot < decoding else "prefill"
                    self._keys.append((row, key_of(tokens[: position + 1]), phase))
                return original(ids, positions)

            return step

        stack.enter_context(patched(type(ctx), "add_request", wrap_add))
        stack.enter_context(patched(controller, "_dynamic_step_forward_logits", wrap))

    def _train_frames(self, stack: ExitStack) -> None:
        from zkl_debug.engines.megatron import scoring

        def wrap(original: Any) -> Any:
            def forward(model: Any, mb: Any) -> Any:
                b, s = mb.tokens.shape
                self._slots, self._shape, self._keys = b * s, (b, s), []
                for which, length in enumerate(mb.lengths):
                    row, start = mb.locate(which)
                    tokens = mb.tokens[row, start : start + length].tolist()
                    self._keys += [(row * s + start + i, key_of(tokens[: i + 1]), "score") for i in range(length)]
                return original(model, mb)

            return forward

        def wrap_log_softmax(original: Any) -> Any:
            def call(logits: torch.Tensor) -> Any:
                out = original(logits)
                self.put("logprobs/log_softmax:out.0", out)
                return out

            return call

        def wrap_select(original: Any) -> Any:
            def call(log_probs: torch.Tensor, labels: torch.Tensor) -> Any:
                out = original(log_probs, labels)
                keys = self._keys
                follows = [(k, after) for k, after in itertools.pairwise(keys) if after[1][:-4] == k[1]]
                self._keys = [(slot, after[1], phase) for (slot, _, phase), after in follows]
                self.put("logprobs/selected:out.0", torch.nn.functional.pad(out, (0, 1)))
                return out

            return call

        stack.enter_context(patched(scoring, "forward_logits", wrap))
        stack.enter_context(patched(scoring, "select_logprobs", wrap_select))
        stack.enter_context(patched(scoring, "log_softmax", wrap_log_softmax))


class Comparison:
    """Sites of a train and a gen probe, row by row."""

    def __init__(self, run: BedRun, train: Probe, gen: Probe) -> None:
        self.run, self.train, self.gen = run, train, gen
        self.order = [site for site in train.rows if site in gen.rows]

    def differing(self, site: str, phases: tuple[str, ...] = ("prefill", "decode")) -> list[Key]:
        """Prefixes whose gen rows (of these phases) are not all the bytes of the train row."""
        result = []
        for key, seen in self.gen.rows[site].items():
            scored = self.train.rows[site].get(key)
            if scored is not None and any(raw != scored[0][1] for phase, raw in seen if phase in phases):
                result.append(key)
        return result

    def within_gen(self, site: str) -> list[Key]:
        """Prefixes whose gen rows differ among themselves (prefill against decode, or batch variance)."""
        return [k for k, seen in self.gen.rows[site].items() if len({raw for _, raw in seen}) > 1]

    def compared(self, site: str) -> int:
        """Train rows that have a gen counterpart."""
        return sum(key in self.train.rows[site] for key in self.gen.rows[site])

    def first(self, phases: tuple[str, ...] = ("prefill", "decode")) -> str | None:
        """First site, in the order of the training forward, with a differing row."""
        return next((site for site in self.order if self.differing(site, phases)), None)


def observe(options: BedOptions) -> Comparison:
    """Run a bed with a probe on each side."""
    probes: dict[str, Probe] = {}

    @contextmanager
    def on_side(context: BedContext, side: str) -> Iterator[None]:
        probes[side] = Probe(context, side)
        with probes[side].attached():
            yield

    run = run_bed(options, on_side)
    return Comparison(run, probes["train"], probes["gen"])


def test_probe_sees_rows_of_both_sides() -> None:
    seen = observe(BedOptions(bed="tiny-gpt", dtype="fp32"))
    assert len(seen.order) > 50
    assert seen.run.gen is not None
    total = sum(len(tokens) for tokens in seen.run.gen.sequences.values())
    for site in seen.order:
        assert seen.compared(site) > 0.5 * total, site
    phases = {phase for rows in seen.gen.rows["output_layer:out"].values() for phase, _ in rows}
    assert phases == {"prefill", "decode"}
