"""Row keys of Megatron forwards: training batches, packed batches, static and dynamic inference steps."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.capture.rows import I64, FrameRows, late, make_rows, packed_rows, padded_rows, spread_rows, warmup_rows
from zkl_debug.digest import extend_prefix, prefix_digests_of
from zkl_debug.schema import Phase, RowFlag

if TYPE_CHECKING:
    from zkl_debug.engines.megatron.scoring import MicroBatch


@dataclass
class RequestTokens:
    """All tokens of one engine request seen so far, and where its prompt ends."""

    tokens: list[int]
    prompt_len: int
    started: bool = False
    cached: int = 0  # positions that came from the prefix cache and never ran
    last: NDArray[np.uint64] | None = None  # prefix digest [2] of the first ``covered`` tokens
    covered: int = 0


class LatePrefix:
    """Prefix digests of the rows of a step, uint64 [n, 2], worked out from those of the step before when asked for.

    May be asked for by several threads: what they work out is the same.
    """

    def __init__(self, value: NDArray[np.uint64] | None, behind: tuple[LatePrefix, I64, I64] | None = None) -> None:
        self._value, self._behind = value, behind

    def next(self, token: I64, position: I64) -> LatePrefix:
        """The step that runs one further token of each row, int64 [n], at these positions, int64 [n]."""
        return LatePrefix(None, (self, token, position))

    @property
    def value(self) -> NDArray[np.uint64]:
        """The digests."""
        steps: list[tuple[LatePrefix, I64, I64]] = []
        at = self
        while (behind := at._behind) is not None:
            steps.append((at, behind[1], behind[2]))
            at = behind[0]
        found = at._value
        assert found is not None
        for step, token, position in reversed(steps):
            found = extend_prefix(found, token.astype(np.int32), position)
            step._value, step._behind = found, None  # in this order: another thread looks at the second first
        return found


@dataclass
class DecodeRun:
    """Steps that run one further token of each of the same requests, as nearly all steps of a generation do.

    What such a step costs grows neither with the length of the sequences nor, but for numpy, with their number. Tokens
    are given to the requests when somebody asks for them.

    Attributes:
        request, position: of the last step, int64 [n].
        prefix: digests up to and with the last step's tokens.
        entries: what is known of each request.
        prompt_len: int64 [n].
        flags: flags of every row of the run, uint32 [n].
        tokens: of each step that the requests do not have yet, int64 [n].
    """

    request: NDArray[np.int64]
    position: NDArray[np.int64]
    prefix: LatePrefix
    entries: list[RequestTokens]
    prompt_len: NDArray[np.int64]
    flags: NDArray[np.uint32]
    tokens: list[NDArray[np.int64]] = field(default_factory=list)

    @classmethod
    def behind(
        cls, entries: list[RequestTokens], request: NDArray[np.int64], position: NDArray[np.int64]
    ) -> DecodeRun | None:
        """The run that begins behind these positions; None unless every request has run exactly up to its own."""
        if len({id(e) for e in entries}) != len(entries):
            return None
        if any(
            e.last is None or not e.started or not e.covered == len(e.tokens) == p + 1
            for e, p in zip(entries, position.tolist(), strict=True)
        ):
            return None
        flags = np.full(len(entries), int(Phase.DECODE), np.uint32)
        flags[[entry.cached > 0 for entry in entries]] |= np.uint32(RowFlag.AFTER_CACHE_HIT)
        prompt_len = np.array([entry.prompt_len for entry in entries], np.int64)
        prefix = np.array([entry.last for entry in entries], np.uint64).reshape(-1, 2)
        return cls(request, position, LatePrefix(prefix), entries, prompt_len, flags)

    def continues(self, request: NDArray[np.int64], position: NDArray[np.int64]) -> bool:
        """Whether a step is the next of the run."""
        return np.array_equal(request, self.request) and np.array_equal(position, self.position + 1)

    def advance(self, position: NDArray[np.int64], token: NDArray[np.int64]) -> LatePrefix:
        """Prefix digests of the next step's rows."""
        self.prefix = self.prefix.next(token, position)
        self.position = position
        self.tokens.append(token)
        return self.prefix

    def flags_at(self, position: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Flags of a step's rows."""
        flags = self.flags.copy()
        flags[position >= self.prompt_len] |= np.uint32(RowFlag.GENERATED)
        flags[position == self.prompt_len] |= np.uint32(RowFlag.FIRST_DECODE)
        return flags

    def settle(self) -> None:
        """Give the requests the tokens that were run."""
        if not self.tokens:
            return
        new, self.tokens = np.stack(self.tokens, axis=1).tolist(), []
        for entry, tokens, prefix in zip(self.entries, new, self.prefix.value, strict=True):
            entry.tokens.extend(tokens)
            entry.last, entry.covered = prefix, entry.covered + len(tokens)


@dataclass
class EngineHistory:
    """Tokens of every request an engine has run, so that a step's rows can be keyed by their whole prefix."""

    known: dict[int, RequestTokens] = field(default_factory=dict)
    step: int = 0
    run: DecodeRun | None = None

    @property
    def requests(self) -> dict[int, RequestTokens]:
        """All requests, with all their tokens."""
        if self.run is not None:
            self.run.settle()
        return self.known

    def decoding(self, request: NDArray[np.int64], position: NDArray[np.int64]) -> bool:
        """Whether a step runs one further token of every request; then :attr:`run` is what it belongs to."""
        if self.run is not None and self.run.continues(request, position):
            return True
        found = [self.requests.get(rid) for rid in request.tolist()]
        entries = [entry for entry in found if entry is not None]
        self.run = DecodeRun.behind(entries, request, position - 1) if len(entries) == len(found) else None
        return self.run is not None

    def add(self, request_id: int, prompt: list[int], *, first_chunk: bool) -> None:
        """A request was admitted with this prompt, or a further chunk of it was scheduled.

        A request that was evicted comes back with what it had generated as part of its prompt; the end of its first
        prompt is kept.
        """
        known = self.requests.get(request_id)
        if known is not None and not first_chunk:
            return
        self.run = None
        length = len(prompt)
        if (
            known is not None
            and known.prompt_len < length
            and known.tokens[: known.prompt_len] == prompt[: known.prompt_len]
        ):
            length = known.prompt_len
        self.known[request_id] = RequestTokens(list(prompt), length)


@dataclass
class StepRequests:
    """What one dynamic step ran: the request and position of each valid token slot, and each request's rows."""

    request: NDArray[np.int64]  # [n]
    position: NDArray[np.int64]  # [n]
    keyed: NDArray[np.int64]  # rows of the step that have a key, indices into [n]
    prompt_len: NDArray[np.int64] | None = None  # [n]; only where every request runs one token, its last


def dynamic_step(context: Any, history: EngineHistory) -> tuple[FrameRows, StepRequests]:
    """Rows of the step a ``DynamicInferenceContext`` is about to run.

    Slots beyond ``active_token_count`` are padding and get no rows. A request whose prompt was never seen (the probe
    was attached while it ran) cannot be keyed; its rows are left out and counted by the caller.
    """
    n = int(context.active_token_count)
    padded = int(context.padded_active_token_count)
    if getattr(context, "is_creating_cuda_graphs", False):
        none = np.zeros(0, np.int64)
        return warmup_rows((padded, 1)), StepRequests(none, none, none)
    slots = _host(context.token_to_request_idx[:n])
    request = _host(context.request_ids)[slots]
    position = _host(context.token_to_pos_ids[:n])
    token = _host(context.token_to_input_ids[:n])
    graph = padded if context.using_cuda_graph_this_step() else -1
    decode_end = int(context.paused_request_count) + int(context.num_decode_requests)
    is_decode = slots < decode_end
    if n and is_decode.all() and history.decoding(request, position):
        assert history.run is not None
        frame = _decode_frame(history.run, history.step, position, token, (padded, 1), graph)
        history.step += 1
        return frame, StepRequests(request, position, frame.slot, history.run.prompt_len)
    known, history.run = history.requests, None
    prefix = np.zeros((n, 2), np.uint64)
    flags = np.zeros(n, np.uint32)
    keyed = np.zeros(n, bool)
    found = []
    for rid, index in _by_request(request):
        entry = known.get(rid)
        if entry is not None and _take_tokens(entry, position[index], token[index]):
            keyed[index] = True
            found.append((entry, index))
    _key_requests(found, position, is_decode, prefix, flags)
    rows_at = np.flatnonzero(keyed)
    rows = late(lambda: make_rows(request[rows_at], position[rows_at], token[rows_at], prefix[rows_at], flags[rows_at]))
    phases = set(np.where(is_decode, int(Phase.DECODE), int(Phase.PREFILL)).tolist())
    phase = Phase(phases.pop()) if len(phases) == 1 else Phase.MIXED
    counts = np.unique(request, return_counts=True)[1] if n else np.zeros(0, np.int64)
    last = np.flatnonzero(np.append(request[1:] != request[:-1], True)) if n else np.zeros(0, np.int64)
    frame = FrameRows(
        grid=(padded, 1),
        rows=rows,
        slot=rows_at.astype(np.int64),
        phase=phase,
        n_seqs=len(counts),
        max_seqlen_q=int(counts.max(initial=0)),
        last=last.astype(np.int64) if len(rows_at) == n else np.zeros(0, np.int64),
        micro_batch=history.step,
        graph=graph,
    )
    history.step += 1
    return frame, StepRequests(request, position, rows_at.astype(np.int64))


def sketched(context: Any) -> tuple[int, int] | None:
    """Rows and bucket of a step that only decodes, by CUDA graphs: known without a look at its rows; None of others."""
    if getattr(context, "is_creating_cuda_graphs", False) or not context.using_cuda_graph_this_step():
        return None
    n = int(context.active_token_count)
    return (n, int(context.padded_active_token_count)) if n and context.is_decode_only() else None


def _decode_frame(
    run: DecodeRun,
    step: int,
    position: NDArray[np.int64],
    token: NDArray[np.int64],
    grid: tuple[int, int],
    graph: int,
) -> FrameRows:
    """A step in which every request runs one token."""
    prefix = run.advance(position, token)
    request = run.request
    every = _arange(len(position))
    frame = FrameRows(
        grid=grid,
        rows=late(lambda: make_rows(request, position, token, prefix.value, run.flags_at(position))),
        slot=every,
        phase=Phase.DECODE,
        n_seqs=len(position),
        max_seqlen_q=1,
        last=every,
        micro_batch=step,
        graph=graph,
    )
    frame.cache["leading"] = True
    return frame


def _host(tensor: torch.Tensor) -> NDArray[np.int64]:
    """A copy on the host: the engine writes the next step over what it keeps there."""
    return tensor.cpu().numpy().astype(np.int64)


@functools.lru_cache(maxsize=256)
def _arange(n: int) -> NDArray[np.int64]:
    """0 .. n-1; shared, so not to be changed."""
    return np.arange(n, dtype=np.int64)


def _by_request(request: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """Requests of a step and where their rows are, in the order of their first row."""
    if not len(request):
        return []
    order = np.argsort(request, kind="stable")
    ends = np.flatnonzero(np.diff(request[order])) + 1
    parts = np.split(order, ends)
    parts.sort(key=lambda index: int(index[0]))
    return [(int(request[index[0]]), index) for index in parts]


def _take_tokens(entry: RequestTokens, position: NDArray[np.int64], token: NDArray[np.int64]) -> bool:
    """Add a request's rows of a step to its tokens; False when its tokens before these rows are unknown."""
    first, count, values = int(position[0]), len(position), token.tolist()
    if first <= len(entry.tokens) and np.array_equal(position, np.arange(first, first + count)):
        if entry.tokens[first : first + count] != values:
            _overwrite(entry.tokens, first, values)
    else:
        for place, value in zip(position.tolist(), values, strict=True):
            if place > len(entry.tokens):
                return False
            _overwrite(entry.tokens, place, [value])
    if not entry.started:
        entry.started = True
        entry.cached = first
    return True


def _overwrite(tokens: list[int], first: int, values: list[int]) -> None:
    """Put tokens in place; where the first of them is another than before, all behind it are no longer known."""
    for place, value in enumerate(values, first):
        if place == len(tokens):
            tokens.append(value)
        elif tokens[place] != value:
            tokens[place:] = [value]


def _key_requests(
    found: list[tuple[RequestTokens, NDArray[np.int64]]],
    position: NDArray[np.int64],
    is_decode: NDArray[np.bool_],
    prefix: NDArray[np.uint64],
    flags: NDArray[np.uint32],
) -> None:
    """Fill prefix and flags of the rows of these requests, all at once: their number is what a step waits for."""
    if not found:
        return
    known = prefix_digests_of([np.asarray(entry.tokens, np.int32) for entry, _ in found])
    bits = np.where(is_decode, np.uint32(Phase.DECODE), np.uint32(Phase.PREFILL))
    for (entry, index), digests in zip(found, known, strict=True):
        entry.last, entry.covered = digests[-1], len(digests)
        at = position[index]
        prefix[index] = digests[at]
        flag = bits[index]
        if int(at[-1]) >= entry.prompt_len or int(at[0]) >= entry.prompt_len:
            flag |= np.where(at >= entry.prompt_len, np.uint32(RowFlag.GENERATED), np.uint32(0))
            flag |= np.where(is_decode[index] & (at == entry.prompt_len), np.uint32(RowFlag.FIRST_DECODE), np.uint32(0))
        if entry.cached:
            flag |= np.uint32(RowFlag.AFTER_CACHE_HIT)
        if not is_decode[index[-1]] and int(at[-1]) + 1 < entry.prompt_len:
            flag[-1] |= np.uint32(RowFlag.CHUNK_EDGE)
        flags[index] = flag


def scoring_rows(mb: MicroBatch, prompt_lens: Mapping[int, int]) -> FrameRows:
    """Rows of one scoring micro-batch.

    Args:
        mb: the micro-batch.
        prompt_lens: prompt length by sample id, for samples where it is known.
    """
    known = [prompt_lens.get(sample) for sample in mb.samples]
    lens = [int(n) for n in known if n is not None]
    tokens = mb.tokens.cpu().numpy()
    prompts = lens if len(lens) == len(known) else None
    if mb.layout == "packed":
        frame = packed_rows(tokens[0], samples=mb.samples, starts=mb.offsets, lengths=mb.lengths, prompt_lens=prompts)
    else:
        frame = padded_rows(tokens, samples=mb.samples, lengths=mb.lengths, prompt_lens=prompts, offsets=mb.offsets)
    frame.micro_batch = mb.index
    return spread_rows(frame, mb.columns().numpy()) if mb.part[1] > 1 else frame


def scoring_places(mb: MicroBatch) -> Hashable:
    """What the slots of :func:`scoring_rows` depend on."""
    return mb.layout, tuple(mb.tokens.shape), tuple(mb.lengths), tuple(mb.offsets), mb.part


def packed_forward(ids: torch.Tensor, packed: Any, first_sample: int) -> FrameRows:
    """Rows of a [1, T] forward with ``PackedSeqParams`` whose caller gave no sample ids."""
    starts_of = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
    starts = starts_of.cpu().numpy().astype(np.int64)
    lengths = np.diff(packed.cu_seqlens_q.cpu().numpy().astype(np.int64))
    samples = range(first_sample, first_sample + len(lengths))
    tokens = ids.detach().cpu().numpy().reshape(-1)
    return packed_rows(tokens, samples=list(samples), starts=starts[:-1].tolist(), lengths=lengths.tolist())


class StaticHistory:
    """Tokens of the batch a ``StaticInferenceContext`` is running; a forward at offset 0 starts a new batch."""

    def __init__(self) -> None:
        self.tokens: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self.first_sample = 0
        self.next_sample = 0
        self.prompt_len = 0
        self.step = 0

    def rows(self, ids: torch.Tensor, offset: int) -> FrameRows | None:
        """Rows of a [b, s] forward at sequence offset ``offset``; None when earlier tokens were not seen."""
        new = ids.detach().cpu().numpy().astype(np.int64)
        if offset == 0:
            self.tokens = new
            self.first_sample, self.next_sample = self.next_sample, self.next_sample + len(new)
            self.prompt_len = new.shape[1]
        elif self.tokens.shape != (len(new), offset):
            return None
        else:
            self.tokens = np.concatenate([self.tokens, new], axis=1)
        samples = list(range(self.first_sample, self.first_sample + len(new)))
        phase = Phase.PREFILL if offset == 0 else Phase.DECODE
        total = self.tokens.shape[1]
        whole = padded_rows(
            self.tokens,
            samples=samples,
            lengths=[total] * len(new),
            prompt_lens=[self.prompt_len] * len(new),
            phase=phase,
        )
        fresh = whole.rows["position"] >= offset
        rows = whole.rows[fresh]
        first = (rows["position"] == self.prompt_len) & (phase == Phase.DECODE)
        rows["flags"] |= np.where(first, np.uint32(RowFlag.FIRST_DECODE), np.uint32(0))
        batch, seq = new.shape
        slot = (np.tile(np.arange(seq), batch) * batch) + np.repeat(np.arange(batch), seq)
        last = (np.arange(1, batch + 1) * seq) - 1
        self.step += 1
        return FrameRows((seq, batch), rows, slot.astype(np.int64), phase, batch, seq, last, micro_batch=self.step - 1)
