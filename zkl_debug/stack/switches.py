"""What a switch is, and the ladder of switches of the CPU stack, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from zkl_debug.errors import UsageError


class SwitchError(UsageError):
    """A switch is unknown, or the switches asked for do not go together."""


@dataclass(frozen=True)
class Switch:
    """Anything that can be on or off.

    Attributes:
        name: as used on the command line.
        fixes: what is different with the switch on: which order, shape class, or label.
        owner: who would carry the real patch: TE, mcore, NeMo-RL, environment or cpu-backend.
        group: batch invariance, log-probs, routing, lifecycle, unrelated ...
        apply: returns a context manager; the switch is on inside.
        effective: reads back whether it is on, from what runs, not from what was asked.
        requires: switches that must be on too.
        conflicts: switches that must be off.
        needs: what the machine must have (``cpu``, ``SM100``, a package), shown when a switch is untestable.
    """

    name: str
    fixes: str
    owner: str
    group: str
    apply: Callable[[], AbstractContextManager[None]]
    effective: Callable[[], bool]
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("cpu",)


def ladder() -> tuple[Switch, ...]:
    """The CPU stack, first switch first."""
    from zkl_debug.stack.cpu import CPU_LADDER

    return CPU_LADDER


def switch(name: str) -> Switch:
    """The switch of that name.

    Raises:
        SwitchError: when there is none.
    """
    known = {s.name: s for s in ladder()}
    if name not in known:
        raise SwitchError(f"no switch named {name!r}", f"one of {', '.join(known)}", "zkl-debug beds")
    return known[name]


def resolve(stack: bool, changes: Mapping[str, bool] | None = None) -> tuple[Switch, ...]:
    """The switches that are on: all or none of the ladder, with single ones changed; in ladder order.

    Raises:
        SwitchError: unknown name, or a switch whose requirements are off or whose conflicts are on.
    """
    changes = dict(changes or {})
    for name in changes:
        switch(name)
    on = [s for s in ladder() if changes.get(s.name, stack)]
    _check(on)
    return tuple(on)


def _check(on: Iterable[Switch]) -> None:
    names = {s.name for s in on}
    for s in on:
        missing = [r for r in s.requires if r not in names]
        if missing:
            raise SwitchError(f"switch {s.name} is on without {', '.join(missing)}", f"{s.name} with what it requires")
        clash = [c for c in s.conflicts if c in names]
        if clash:
            raise SwitchError(f"switches {s.name} and {', '.join(clash)} are both on", "one of them")


@contextmanager
def applied(switches: Iterable[Switch]) -> Iterator[None]:
    """All of ``switches`` on inside the block, in the given order; off again in reverse."""
    with ExitStack() as stack:
        for s in switches:
            stack.enter_context(s.apply())
        yield
