"""Faults of the loop: stale state, weight sync, and drift that is only data. Each with its known right answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.grpo import breaks
from zkl_debug.beds.grpo.options import LAYOUTS, GrpoOptions
from zkl_debug.errors import UsageError

if TYPE_CHECKING:
    from zkl_debug.beds.grpo.loop import GrpoLoop


@dataclass(frozen=True)
class LoopAnswer:
    """What a diagnosis must say.

    Attributes:
        swap: ``state``, ``data``, ``table`` (what was computed is equal, what was handed on is not) or empty when
            nothing differs.
        step: the step at which it begins; 0 when nothing differs.
        event: name of the event that changed the state, or should have and did not; empty for data.
        match: how the wrong state is explained, e.g. ``version v-2``, ``dtype-rounded``, ``permutation``.
        names: glob patterns, one of which every blamed tensor matches; for ``table`` the finding at log-prob level.
    """

    swap: str = ""
    step: int = 0
    event: str = ""
    match: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoopFault:
    """A defect to put into the loop.

    Attributes:
        id, title, source: as in the catalogue.
        breaks: context manager factory; the defect is there inside.
        answer: the known right answer.
        options: fields of the options it needs.
        second_model: the engine must have weights of its own.
        everywhere: ``breaks`` replaces functions of a process and needs no object of the loop; in the dedicated layout
            it is put into both processes.
    """

    id: str
    title: str
    source: str
    breaks: Callable[[GrpoLoop], AbstractContextManager[Any]]
    answer: LoopAnswer
    options: Mapping[str, Any] = field(default_factory=dict)
    second_model: bool = False
    everywhere: bool = False

    def breaks_everywhere(self) -> AbstractContextManager[Any]:
        """The defect in the engine's own process, where it is one of functions and not of this loop's objects."""
        return self.breaks(None) if self.everywhere else nullcontext()  # type: ignore[arg-type]

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts of the loop it can be put into."""
        fits = {"colocated-shared": not self.second_model, "dedicated": self.everywhere or self.breaks is _nothing}
        return tuple(name for name in LAYOUTS if fits.get(name, True))

    def adjust(self, options: GrpoOptions) -> GrpoOptions:
        """``options`` with the fields this fault needs."""
        fields = dict(self.options)
        if self.second_model and options.layout == "colocated-shared":
            fields["layout"] = "colocated-inference-model"
        return replace(options, **fields) if fields else options


LOOP_FAULTS: dict[str, LoopFault] = {}


def register(*faults: LoopFault) -> None:
    """Add to :data:`LOOP_FAULTS`."""
    for fault in faults:
        assert fault.id not in LOOP_FAULTS, fault.id
        LOOP_FAULTS[fault.id] = fault


def loop_fault(name: str | None) -> LoopFault:
    """The fault of that id (None: nothing broken).

    Raises:
        UsageError: when there is none.
    """
    found = LOOP_FAULTS.get(name or "Z0")
    if found is None:
        from zkl_debug.beds.faults import FAULTS

        one = FAULTS.get(str(name))
        if one is not None:
            command = f"zkl-debug capture --bed {one.beds[0]} --fault {one.id} --out DIR"
            raise UsageError(f"{name} is a fault of one capture, not of the loop", "a fault of the loop", command)
        raise UsageError(f"no loop fault {name!r}", f"one of {', '.join(LOOP_FAULTS)}", "zkl-debug beds")
    return found


_FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
_ROUTER = "decoder.layers.1.mlp.router.weight"
_NOT_SENT = "decoder.layers.1.self_attention.linear_proj.weight"


def _nothing(_loop: GrpoLoop) -> AbstractContextManager[None]:
    return nullcontext()


register(
    LoopFault("Z0", "nothing is broken", "", _nothing, LoopAnswer()),
    LoopFault(
        "S1",
        "prefix cache kept over refit: blocks cached under old weights are hit when a prompt comes back",
        "NeMo-RL#4018, lmdeploy#4917",
        _nothing,
        LoopAnswer("state", 4, "refit", "version v-3", ("kv/block.*",)),
        {"invalidate": False, "kv": "persist", "prefix_caching": True},
    ),
    LoopFault(
        "S6",
        "waking restores a CPU backup taken before the last sync",
        "trl#5312",
        breaks.old_backup,
        LoopAnswer("state", 4, "wake", "version v-2", ("*",)),
        second_model=True,
    ),
    LoopFault(
        "S7",
        "a Mamba mixer that stays in eval() decodes with -exp(A_log) of the weights before the refit; A_log is trained "
        "from step 3 on",
        "mcore 0.19.2, Megatron-LM#6723",
        _nothing,
        LoopAnswer("state", 4, "refit", "negative exponential (version v-", ("*._A_neg_exp_cache",)),
        {
            "hybrid": True,
            "dtype": "fp32",
            "prefix_caching": False,
            "refresh": False,
            "frozen": "*.A_log",
            "trained_from": 3,
        },
        second_model=True,
    ),
    LoopFault(
        "S8",
        "KV blocks are freed at sleep while a request in flight still points to them",
        "issue 5 (c)",
        breaks.blocks_freed_at_sleep,
        LoopAnswer("state", 4, "sleep", "freed while in use", ("kv/block.*",)),
        {"nap": 4, "late": 4, "prefix_caching": True},
    ),
    LoopFault(
        "S10",
        "a recurrent slot is not zeroed when it is given to another request",
        "AReno#520",
        breaks.slots_not_zeroed,
        LoopAnswer("state", 2, "generate", "not zeroed", ("ssm/slot.*",)),
        {"hybrid": True, "dtype": "fp32", "prefix_caching": False},
        everywhere=True,
    ),
    LoopFault(
        "S15",
        "recurrent state is dropped at a prefill chunk edge; from step 4 prompts are long enough to be split",
        "NeMo-RL#2100",
        breaks.state_dropped_between_chunks,
        LoopAnswer("data", 4),
        {
            "hybrid": True,
            "dtype": "fp32",
            "prefix_caching": False,
            "long_from": 4,
            "long_groups": (2, 9),
            "long_length": 40,
            "returns_at": 0,
            "max_tokens": 512,
            "late": 0,
        },
        everywhere=True,
    ),
    LoopFault(
        "S13",
        "prompt log-probs are filled in past the cached part only, in a buffer that other requests used",
        "vllm#42245",
        breaks.reused_rows,
        LoopAnswer("table", 1, names=("another-samples-rows",)),
        {"prompt_log_probs": True, "chunked_prefill": False, "max_tokens": 512},
        everywhere=True,
    ),
    LoopFault(
        "S14",
        "a float32 copy of the output layer's weight is not refreshed",
        "prime-rl#2438",
        breaks.float_head,
        LoopAnswer("state", 2, "refit", "cast (version v-1", ("output_layer.weight_fp32",)),
        second_model=True,
    ),
    LoopFault(
        "W1",
        "updates never reach the engine",
        "verl#7495",
        breaks.nothing_sent,
        LoopAnswer("state", 2, "refit", "version v-1", ("*",)),
        second_model=True,
        everywhere=True,
    ),
    LoopFault(
        "W2",
        "the tied output layer is a clone that no refit updates",
        "torchtitan#2402",
        breaks.untied_copy,
        LoopAnswer("state", 2, "refit", "version v-1", ("output_weight_copy",)),
        {"tied": True},
        second_model=True,
    ),
    LoopFault(
        "W3",
        "one tensor is missing from the payload of the refit",
        "prime-rl#2714",
        breaks.one_missing(_NOT_SENT),
        LoopAnswer("state", 2, "refit", "version v-1", (_NOT_SENT,)),
        second_model=True,
        everywhere=True,
    ),
    LoopFault(
        "W5",
        "a weight is shuffled twice",
        "sglang#28963",
        breaks.shuffled_twice,
        LoopAnswer("state", 2, "refit", "permutation", (_FC1,)),
        second_model=True,
    ),
    LoopFault(
        "W9",
        "expert ids are offset by one in the refit",
        "AReaL#1595",
        breaks.experts_off_by_one,
        LoopAnswer("state", 2, "refit", "version v of", ("decoder.layers.1.mlp.experts.*",)),
        {"experts": 4},
        second_model=True,
    ),
    LoopFault(
        "P3",
        "the fp32 router weight is sent as bf16",
        "prime-rl#3524",
        breaks.sent_as(_ROUTER, "bfloat16"),
        LoopAnswer("state", 2, "refit", "dtype-rounded", (_ROUTER,)),
        {"experts": 4, "dtype": "fp32"},
        second_model=True,
    ),
    LoopFault(
        "K2",
        "linear sums K in one chunk for 1 or 33 rows; from step 4 long sequences are scored alone, 33 rows at a time",
        "TransformerEngine#2986",
        breaks.linear_by_size,
        LoopAnswer("data", 4),
        {"long_from": 4, "long_groups": (5,), "long_length": 25, "alone_from": 30, "returns_at": 0},
        everywhere=True,
    ),
    LoopFault(
        "D1",
        "a later prefill chunk merges old and new keys by log-sum-exp; from step 4 prompts are long enough to be split",
        "issue 5 (d)",
        breaks.chunk_merge,
        LoopAnswer("data", 4),
        {
            "long_from": 4,
            "long_groups": (2, 9),
            "long_length": 40,
            "returns_at": 0,
            "prefix_caching": False,
            "max_tokens": 512,
            "late": 0,  # all prompts at once: together more than 512 tokens
        },
        everywhere=True,
    ),
)
