"""Faults of the loop: stale state, weight sync, and drift that is only data. Each with its known right answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zkl_debug.beds.grpo.options import GrpoOptions
from zkl_debug.errors import UsageError

if TYPE_CHECKING:
    from zkl_debug.beds.grpo.loop import GrpoLoop


@dataclass(frozen=True)
class LoopAnswer:
    """What a diagnosis must say.

    Attributes:
        swap: ``state``, ``data``, ``weights`` or empty when nothing differs.
        step: the step at which it begins; 0 when nothing differs.
        event: name of the event that changed the state, or should have and did not; empty for data.
        match: how the wrong state is explained, e.g. ``version v-2``, ``dtype-rounded``, ``permutation``.
        names: glob patterns, one of which every blamed tensor matches.
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
    """

    id: str
    title: str
    source: str
    breaks: Callable[[GrpoLoop], AbstractContextManager[Any]]
    answer: LoopAnswer
    options: Mapping[str, Any] = field(default_factory=dict)

    def adjust(self, options: GrpoOptions) -> GrpoOptions:
        """``options`` with the fields this fault needs."""
        return replace(options, **self.options) if self.options else options


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
        raise UsageError(f"no loop fault {name!r}", f"one of {', '.join(LOOP_FAULTS)}", "zkl-debug beds")
    return found


register(LoopFault("Z0", "nothing is broken", "", lambda _loop: nullcontext(), LoopAnswer()))
register(
    LoopFault(
        "S1",
        "prefix cache kept over refit: blocks cached under old weights are hit when a prompt comes back",
        "NeMo-RL#4018, lmdeploy#4917",
        lambda _loop: nullcontext(),
        LoopAnswer("state", 4, "refit", "version v-3", ("gen:kv/block.*",)),
        {"invalidate": False, "kv": "persist", "prefix_caching": True},
    ),
)
