"""A small numpy transformer with known data flow, run as a scorer or as an engine, written as real captures.

Every row is computed by itself, so without a planted fault all phases, batches and orders give the same bits.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.digest import digest_array, digest_bytes
from zkl_debug.schema import Json, Phase, RowFlag, SiteBlock, SiteKind, SiteMeta, StateRecord, parse_site
from zkl_debug.store.build import make_block, make_frame, make_rows, write_capture

Row = NDArray[Any]
H, VOCAB, LAYERS = 8, 40, 2


@dataclass(frozen=True)
class Ctx:
    """Where a row is computed: what a planted fault may look at."""

    site: str
    side: str
    phase: Phase
    sample: int
    position: int
    frame: int
    rows_in_call: int


Tweak = Callable[[Ctx, Row], Row]


@dataclass(frozen=True)
class Part:
    """Rows start .. stop-1 of one sample in a frame. ``again`` names another cache, for a second run of a sample."""

    sample: int
    start: int
    stop: int
    again: int = 0


@dataclass(frozen=True)
class Call:
    """One forward."""

    phase: Phase
    parts: tuple[Part, ...]
    step: int = -1
    weight_version: int = 0


@dataclass
class World:
    """Tokens by sample, prompt lengths, and weights."""

    tokens: dict[int, list[int]]
    prompts: dict[int, int]
    seed: int = 0
    layers: int = LAYERS
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        shapes = {"embedding.word_embeddings.weight": (VOCAB, H), "output_layer.weight": (H, VOCAB)}
        for i in range(self.layers):
            base = f"decoder.layers.{i}."
            shapes |= {
                base + "self_attention.linear_qkv.weight": (H, 3 * H),
                base + "self_attention.linear_proj.weight": (H, H),
                base + "mlp.linear_fc1.weight": (H, 2 * H),
                base + "mlp.linear_fc2.weight": (2 * H, H),
            }
        for name, shape in shapes.items():
            self.weights.setdefault(name, rng.normal(0, 0.4, shape).astype(np.float32))


def norm(x: Row) -> Row:
    return np.asarray(x / np.sqrt((x * x).mean(dtype=np.float32) + np.float32(1e-5)), np.float32)


def rope(x: Row, position: int) -> Row:
    half = len(x) // 2
    angle = (position / 100.0 ** (np.arange(half) / half)).astype(np.float32)
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate([x[:half] * c - x[half:] * s, x[half:] * c + x[:half] * s]).astype(np.float32)


class Runner:
    """Computes rows and collects (site, value) in execution order."""

    def __init__(self, world: World, side: str, tweak: Tweak | None) -> None:
        self.world, self.side, self.tweak = world, side, tweak
        self.cache: dict[tuple[int, int, int], tuple[list[Row], list[Row]]] = {}

    def row(self, part: Part, position: int, ctx: Mapping[str, Any], feed: int) -> list[tuple[str, Row]]:
        world, seen = self.world, list[tuple[str, Row]]()
        token = world.tokens[part.sample][position]

        def out(site: str, value: Row) -> Row:
            if self.tweak is not None:
                here = Ctx(site, self.side, sample=part.sample, position=position, **ctx)
                value = np.asarray(self.tweak(here, value), value.dtype)
            seen.append((site, value))
            return value

        def note(site: str, value: Row) -> Row:
            seen.append((site, value))
            return value

        seen.append(("inputs/token_ids:in.0", np.array([token], np.int64)))
        seen.append(("inputs/position_ids:in.0", np.array([feed], np.int64)))
        x = out("embedding.word_embeddings:out", world.weights["embedding.word_embeddings.weight"][token])
        for i in range(world.layers):
            x = self._layer(i, x, part, position, feed, out, note)
        note("decoder.final_layernorm:in", x)
        x = out("decoder.final_layernorm:out", norm(x))
        note("output_layer:in", x)
        logits = out("output_layer:out", x @ world.weights["output_layer.weight"])
        note("logprobs/log_softmax:in.0", logits)
        top = logits.max()
        out("logprobs/log_softmax:out.0", logits - (top + np.log(np.exp(logits - top).sum(dtype=np.float32))))
        return seen

    def _layer(self, i: int, x: Row, part: Part, position: int, feed: int, out: Any, note: Any) -> Row:
        base = f"decoder.layers.{i}"
        attention, mlp = f"{base}.self_attention", f"{base}.mlp"
        weight = self.world.weights
        note(f"{base}:in", x)
        note(f"{base}.input_layernorm:in", x)
        y = out(f"{base}.input_layernorm:out", norm(x))
        note(f"{attention}:in", y)
        note(f"{attention}.linear_qkv:in", y)
        qkv = out(f"{attention}.linear_qkv:out", y @ weight[f"{attention}.linear_qkv.weight"])
        q, k, v = (out(f"{attention}/qkv:out.{n}", qkv[n * H : (n + 1) * H]) for n in range(3))
        note(f"{attention}/rope.q:in.0", q)
        q = out(f"{attention}/rope.q:out.0", rope(q, feed))
        note(f"{attention}/rope.k:in.0", k)
        k = out(f"{attention}/rope.k:out.0", rope(k, feed))
        for port, value in (("in", q), ("in.1", k), ("in.2", v)):
            note(f"{attention}.core_attention:{port}", value)
        if position == 0:
            self.cache[part.sample, part.again, i] = ([], [])
        keys, values = self.cache[part.sample, part.again, i]
        keys.append(k)
        values.append(v)
        score = np.array([float(q @ old) for old in keys], np.float32)
        share = np.exp(score - score.max())
        mixed = sum((s * old for s, old in zip(share, values, strict=True)), np.zeros(H, np.float32))
        y = out(f"{attention}.core_attention:out", (mixed / share.sum(dtype=np.float32)).astype(np.float32))
        note(f"{attention}.linear_proj:in", y)
        y = out(f"{attention}.linear_proj:out", y @ weight[f"{attention}.linear_proj.weight"])
        y = note(f"{attention}:out", y)
        note(f"{base}/self_attn_bda:in.0", y)
        note(f"{base}/self_attn_bda:in.1", x)
        x = out(f"{base}/self_attn_bda:out.0", x + y)
        note(f"{base}.pre_mlp_layernorm:in", x)
        y = out(f"{base}.pre_mlp_layernorm:out", norm(x))
        note(f"{mlp}:in", y)
        note(f"{mlp}.linear_fc1:in", y)
        y = out(f"{mlp}.linear_fc1:out", y @ weight[f"{mlp}.linear_fc1.weight"])
        y = np.maximum(y, 0)
        note(f"{mlp}.linear_fc2:in", y)
        y = out(f"{mlp}.linear_fc2:out", y @ weight[f"{mlp}.linear_fc2.weight"])
        y = note(f"{mlp}:out", y)
        note(f"{base}/mlp_bda:in.0", y)
        note(f"{base}/mlp_bda:in.1", x)
        x = out(f"{base}/mlp_bda:out.0", x + y)
        note(f"{base}:out", x)
        return x


@dataclass(frozen=True)
class Options:
    """How a capture is written.

    Attributes:
        tweak: planted fault: gets the place and the value of every operator's output, returns the value to use.
        record: changes what is recorded, not what is computed.
        drop: patterns of sites that are not captured.
        payload: keep raw bits.
        feed: position fed to the model, from (sample, position).
        padding: rows beyond the tokens that each scored sample runs, with token 0.
    """

    tweak: Tweak | None = None
    record: Tweak | None = None
    drop: tuple[str, ...] = ()
    payload: bool = True
    feed: Callable[[int, int], int] | None = None
    meta: Mapping[str, Json] = field(default_factory=dict)
    weights: bool = True
    padding: int = 0
    labels: bool = True

    def drops(self, site: str) -> bool:
        """Whether a site is not captured."""
        return any(fnmatch.fnmatchcase(site, pattern) for pattern in self.drop)


def site_meta(name: str, order: int, value: Row) -> SiteMeta:
    parsed = parse_site(name)
    kind = SiteKind.INPUT if name.startswith("inputs/") else SiteKind.TAP if parsed.op else SiteKind.MODULE
    shape = () if value.shape == (1,) else value.shape
    semantic = "core_attention" if parsed.operator == "core_attention" else ""
    return SiteMeta(name, kind, parsed.layer, order, parsed.port, str(value.dtype), shape, semantic=semantic)


def bits(value: Row) -> Row:
    return np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")


class _Frame:
    """Collects the rows and values of one call."""

    def __init__(self) -> None:
        self.tables: list[NDArray[Any]] = []
        self.values: dict[str, tuple[list[int], list[Row]]] = {}
        self.n = 0

    def add(self, table: NDArray[Any], seen: Sequence[tuple[str, Row]]) -> None:
        for site, value in seen:
            rows, values = self.values.setdefault(site, ([], []))
            rows.append(self.n)
            values.append(value)
        self.tables.append(table)
        self.n += 1

    def blocks(self, metas: dict[str, SiteMeta], options: Options) -> list[SiteBlock]:
        made = []
        for site, (rows, values) in self.values.items():
            if options.drops(site):
                continue
            meta = metas.setdefault(site, site_meta(site, len(metas), values[0]))
            stacked = np.stack([bits(value) for value in values])
            made.append(make_block(meta, stacked, np.array(rows, np.uint32), options.payload))
        return made


def _frames(world: World, side: str, calls: Sequence[Call], opt: Options) -> tuple[list[Any], list[_Frame]]:
    runner = Runner(world, side, opt.tweak)
    heads, frames = [], []
    for number, call in enumerate(calls):
        frames.append(_run_call(runner, world, call, number, opt))
        heads.append(
            make_frame(number, call.phase, step=call.step, weight_version=call.weight_version, n_seqs=len(call.parts))
        )
    return heads, frames


def write(root: Path, world: World, side: str, calls: Sequence[Call], options: Options | None = None) -> Path:
    """Run the calls and write them as a capture; returns the folder."""
    opt = options or Options()
    heads, frames = _frames(world, side, calls, opt)
    metas: dict[str, SiteMeta] = {}
    tables = [np.concatenate(frame.tables) for frame in frames]
    states = {0: state(world)} if opt.weights else {}
    write_capture(root, side, heads, tables, [f.blocks(metas, opt) for f in frames], opt.meta, states=states)
    return root


@dataclass
class MemorySite:
    """A site held in memory."""

    meta: SiteMeta
    rows: NDArray[np.int64]
    digest: NDArray[np.uint64]
    bits: NDArray[Any] | None

    @property
    def has_payload(self) -> bool:
        return self.bits is not None

    @property
    def payload_index(self) -> NDArray[np.int64]:
        return np.arange(len(self.rows) if self.bits is not None else 0)

    def payload(self, i: NDArray[np.int64], /) -> NDArray[Any]:
        assert self.bits is not None
        return self.bits[i]


@dataclass
class MemoryCapture:
    """A capture held in memory: the same shape as the reader's, without the files."""

    side: str
    meta: dict[str, Json]
    manifest: dict[str, Json]
    frames: NDArray[Any]
    rows: NDArray[Any]
    sites: dict[str, MemorySite]
    states: dict[int, list[StateRecord]]


def memory(world: World, side: str, calls: Sequence[Call], options: Options | None = None) -> MemoryCapture:
    """Run the calls and keep them in memory."""
    opt = options or Options()
    heads, frames = _frames(world, side, calls, opt)
    collected: dict[str, tuple[list[int], list[Row]]] = {}
    base = 0
    for number, frame in enumerate(frames):
        for table in frame.tables:
            table["frame"] = number
        for name, (rows, values) in frame.values.items():
            own = collected.setdefault(name, ([], []))
            own[0].extend(row + base for row in rows)
            own[1].extend(values)
        base += frame.n
    made: dict[str, MemorySite] = {}
    for name, (rows, values) in collected.items():
        if not opt.drops(name):
            raw = np.stack([bits(value) for value in values])
            meta = site_meta(name, len(made), values[0])
            made[name] = MemorySite(meta, np.array(rows), digest_array(raw), raw if opt.payload else None)
    states = {0: state(world)} if opt.weights else {}
    tables = np.concatenate([table for frame in frames for table in frame.tables])
    return MemoryCapture(side, dict(opt.meta), {}, np.concatenate(heads), tables, made, states)


def _run_call(runner: Runner, world: World, call: Call, number: int, opt: Options) -> _Frame:
    frame, labels = _Frame(), list[tuple[NDArray[Any], list[tuple[str, Row]]]]()
    size = sum(part.stop - part.start for part in call.parts)
    for part in call.parts:
        tokens = np.array(world.tokens[part.sample], np.int32)
        for p in range(part.start, part.stop):
            ctx = {"phase": call.phase, "frame": number, "rows_in_call": size}
            seen = runner.row(part, p, ctx, opt.feed(part.sample, p) if opt.feed else p)
            prompt = world.prompts[part.sample]
            flags = int(call.phase) | (RowFlag.GENERATED if p >= prompt else 0)
            flags |= RowFlag.FIRST_DECODE if call.phase is Phase.DECODE and p == prompt else 0
            frame.add(make_rows(part.sample, tokens, p, p + 1, flags), recorded(seen, part, p, ctx, runner, opt))
            if p + 1 < len(tokens) and opt.labels:
                labels.append(_label(runner, part, p, tokens, dict(seen), ctx, prompt))
        if opt.padding and call.phase is Phase.SCORE:
            _pad(frame, part, tokens, opt.padding)
    for table, seen in labels:
        frame.add(table, seen)
    return frame


def recorded(
    seen: list[tuple[str, Row]], part: Part, p: int, ctx: Mapping[str, Any], runner: Runner, opt: Options
) -> list[tuple[str, Row]]:
    if opt.record is None:
        return seen
    change = opt.record
    return [(s, change(Ctx(s, runner.side, sample=part.sample, position=p, **ctx), value)) for s, value in seen]


def _label(
    runner: Runner, part: Part, p: int, tokens: NDArray[Any], seen: dict[str, Row], ctx: Mapping[str, Any], prompt: int
) -> tuple[NDArray[Any], list[tuple[str, Row]]]:
    used = np.array([tokens[p + 1]], np.int64)
    if runner.tweak is not None:
        used = runner.tweak(Ctx("logprobs/label:out.0", runner.side, sample=part.sample, position=p + 1, **ctx), used)
    selected = seen["logprobs/log_softmax:out.0"][used % VOCAB]
    flags = int(ctx["phase"]) | RowFlag.LABEL | (RowFlag.GENERATED if p + 1 >= prompt else 0)
    table = make_rows(part.sample, tokens, p + 1, p + 2, flags)
    return table, [("logprobs/label:out.0", used), ("logprobs/selected:out.0", selected)]


def _pad(frame: _Frame, part: Part, tokens: NDArray[Any], count: int) -> None:
    padded = np.concatenate([tokens, np.zeros(count, np.int32)])
    for p in range(len(tokens), len(padded)):
        junk = np.full(H, p, np.float32)
        frame.add(make_rows(part.sample, padded, p, p + 1, int(Phase.SCORE)), [("decoder.final_layernorm:out", junk)])


def state(world: World) -> list[StateRecord]:
    """Digests of the weights."""
    return [
        StateRecord(name, "parameter", "float32", value.shape, digest_bytes(value.tobytes()))
        for name, value in world.weights.items()
    ]


def default_world(seed: int = 0) -> World:
    """Four requests; 0 and 1 share a prefix, 3 is the prompt of 2 with another ending."""
    rng = np.random.default_rng(100 + seed)
    shared = rng.integers(1, VOCAB, 4).tolist()
    tokens = {
        0: shared + rng.integers(1, VOCAB, 5).tolist(),
        1: shared + rng.integers(1, VOCAB, 3).tolist(),
        2: rng.integers(1, VOCAB, 8).tolist(),
    }
    tokens[3] = tokens[2][:5] + rng.integers(1, VOCAB, 2).tolist()
    return World(tokens, {0: 6, 1: 5, 2: 4, 3: 5}, seed)


def scoring(world: World, samples: Sequence[int] | None = None, size: int = 2, step: int = -1) -> list[Call]:
    """Score whole samples in micro-batches."""
    order = list(world.tokens) if samples is None else list(samples)
    whole = [Part(s, 0, len(world.tokens[s])) for s in order]
    return [Call(Phase.SCORE, tuple(whole[i : i + size]), step) for i in range(0, len(whole), size)]


def generation(
    world: World, samples: Sequence[int] | None = None, chunk: int = 99, reprefill: bool = True
) -> list[Call]:
    """Prefill every prompt in chunks, decode all but the last token, and prefill whole samples once more."""
    order = list(world.tokens) if samples is None else list(samples)
    calls = []
    for s in order:
        for start in range(0, world.prompts[s], chunk):
            stop = min(start + chunk, world.prompts[s])
            calls.append(Call(Phase.PREFILL, (Part(s, start, stop),)))
    longest = max(len(t) for t in world.tokens.values())
    for p in range(longest):
        live = [Part(s, p, p + 1) for s in order if world.prompts[s] <= p < len(world.tokens[s]) - 1]
        if live:
            calls.append(Call(Phase.DECODE, tuple(live)))
    if reprefill:
        calls += [Call(Phase.PREFILL, (Part(s, 0, len(world.tokens[s]) - 1, again=1),)) for s in order]
    return calls


def plant(site: str, when: Callable[[Ctx], bool] | None = None, ulps: int = 1) -> Tweak:
    """A fault: one element of every matching output moves by some ULPs."""

    def tweak(ctx: Ctx, value: Row) -> Row:
        if ctx.site != site or (when is not None and not when(ctx)):
            return value
        changed = value.copy()
        at = min(3, len(changed) - 1)
        bits(changed)[at] += np.array(ulps).astype(bits(changed).dtype)
        return changed

    return tweak


def test_phases_agree_without_a_fault() -> None:
    world = default_world()
    scorer, engine = Runner(world, "train", None), Runner(world, "gen", None)
    ctx = {"phase": Phase.SCORE, "frame": 0, "rows_in_call": 1}
    for p in range(len(world.tokens[0])):
        a = scorer.row(Part(0, 0, 9), p, ctx, p)
        b = engine.row(Part(0, p, p + 1, again=1), p, ctx, p)
        assert all(np.array_equal(bits(x), bits(y)) for (_, x), (_, y) in zip(a, b, strict=True))
