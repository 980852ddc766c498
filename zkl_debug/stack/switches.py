"""What a switch is, which ones a run of a bed has on, and proof that what was asked for is what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from zkl_debug.errors import Refused, UsageError
from zkl_debug.stack.needs import NO_GPU, Need


class SwitchError(UsageError):
    """A switch is unknown, or the switches asked for do not go together."""


class SwitchUnavailable(SwitchError):  # noqa: N818 - it is a state of the switch
    """A switch cannot be applied here: the machine lacks something, or this project carries no code for it."""


class NotEffective(Refused):
    """A switch was requested on and is off in what runs."""


@dataclass(frozen=True)
class Reading:
    """The effective state of a switch, and where it was read."""

    on: bool
    text: str = ""


@dataclass(frozen=True)
class Setting:
    """How a run is told about a switch from outside.

    Attributes:
        where: ``env`` (an environment variable) or ``recipe`` (an override of a NeMo-RL recipe).
        key: the variable, or the full path of the key.
        on: its value with the switch on.
        off: its value with the switch off; None leaves it as it is (removes the variable).
    """

    where: str
    key: str
    on: str
    off: str | None = None


@dataclass(frozen=True)
class Switch:
    """Anything that can be on or off.

    Attributes:
        name: as used on the command line.
        fixes: what is different with the switch on: which order, shape class, or label.
        owner: who carries the real patch: TE, mcore, NeMo-RL, environment or cpu-backend.
        group: batch invariance, log-probs, router replay, graph shapes, lifecycle, unrelated ...
        apply: returns a context manager; the switch is on inside.
        effective: reads back whether it is on, from what runs, not from what was asked.
        requires: switches that must be on too.
        conflicts: switches that must be off.
        needs: what the machine must have.
        alternatives: switches that may do the same job.
        mechanism: reduction order, shape class, lifecycle, label, precision, routing, sampling or nothing.
        kind: environment, patch, kernel, model key, engine key, recipe key, lifecycle or cpu stand-in.
        patch: number in the first implementation's list (RECIPES.md), or empty.
        target: the function, variable or key that it changes.
        settings: how a run is told from outside.
        presets: recipe presets that ask for it.
        carried: this project can apply it; otherwise only a harness that has the code can.
        stacked: part of ``--stack on``; the others are turned on by name, and by a bisection.
        not_searched: why a search leaves it alone, or empty.
        read: like ``effective``, given the model (or None), with the reason in words.
    """

    name: str
    fixes: str
    owner: str
    group: str
    apply: Callable[[], AbstractContextManager[None]]
    effective: Callable[[], bool]
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    needs: tuple[Need, ...] = (NO_GPU,)
    alternatives: tuple[str, ...] = ()
    mechanism: str = "reduction order"
    kind: str = "cpu stand-in"
    patch: str = ""
    target: str = ""
    settings: tuple[Setting, ...] = ()
    presets: tuple[str, ...] = ()
    carried: bool = True
    stacked: bool = True
    not_searched: str = ""
    read: Callable[[Any], Reading] | None = None

    def reading(self, model: Any = None) -> Reading:
        """The effective state, read from what runs; ``model`` makes it stricter where the switch shapes a model."""
        return self.read(model) if self.read is not None else Reading(self.effective())


def ladder(hybrid: bool = False) -> tuple[Switch, ...]:
    """The CPU stack, first switch first; ``hybrid`` adds what a model with Mamba layers needs."""
    from zkl_debug.stack.catalogue.cpu import CPU_LADDER
    from zkl_debug.stack.catalogue.mamba import MAMBA_LADDER

    return (*CPU_LADDER, *MAMBA_LADDER) if hybrid else CPU_LADDER


def switch(name: str) -> Switch:
    """The switch of that name: of the CPU stack, any other of the full ladder, or a precision of the beds.

    Raises:
        SwitchError: when there is none.
    """
    from zkl_debug.stack.catalogue.precision import PRECISIONS
    from zkl_debug.stack.full import full_ladder

    known = {s.name: s for s in (*full_ladder(), *PRECISIONS)}
    if name not in known:
        raise SwitchError(f"no switch named {name!r}", f"one of {_near(name, known)}", "zkl-debug stack")
    return known[name]


def _near(name: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return ", ".join(close or [s.name for s in ladder()])


def resolve(stack: bool, changes: Mapping[str, bool] | None = None, hybrid: bool = False) -> tuple[Switch, ...]:
    """The switches that are on: all or none of the stack, with single ones changed; in ladder order.

    ``hybrid``: the model has Mamba layers.

    Raises:
        SwitchError: unknown name, or a switch whose requirements are off or whose conflicts are on.
        SwitchUnavailable: a switch this project carries no code for.
    """
    changes = dict(changes or {})
    stacked = ladder(hybrid)
    names = {s.name for s in stacked}
    extra = [s for s in (switch(name) for name in changes) if s.name not in names]
    for s in extra:
        if changes[s.name] and not s.carried:
            raise SwitchUnavailable(
                f"switch {s.name} ({s.target}) cannot be applied here: this project carries no code for it",
                "a switch of this bed, or a program of yours that knows it",
                "zkl-debug bisect switches --space FILE -- COMMAND",
            )
    on = [s for s in (*stacked, *extra) if changes.get(s.name, stack and s in stacked)]
    check_together(on)
    return tuple(on)


def check_together(on: Iterable[Switch]) -> None:
    """Raise unless the switches that are on have what they require and nothing they conflict with.

    Raises:
        SwitchError: naming the first that does not fit.
    """
    on = list(on)
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
    """All of ``switches`` on inside the block, in the given order; off again in reverse.

    Raises:
        SwitchUnavailable: one of them cannot be applied here.
        NotEffective: at the end of a block that went well, when one of them was off in what ran.
    """
    switches = tuple(switches)
    with ExitStack() as stack:
        for s in switches:
            stack.enter_context(s.apply())
        yield
        verify(switches)


def verify(switches: Iterable[Switch], model: Any = None) -> None:
    """Read every switch back.

    Args:
        switches: those that were requested on.
        model: the model that runs, when there is one.

    Raises:
        NotEffective: one of them is off in effect.
    """
    off = [(s, r) for s in switches if not (r := s.reading(model)).on]
    if not off:
        return
    lines = [f"switch {s.name} was requested on but is off in effect: {r.text or 'it is not in place'}" for s, r in off]
    raise NotEffective(
        "\n".join(lines),
        "a switch that is set before the thing it changes is built or read",
        "set it before the model is built, or before the process starts when it is an environment variable",
    )
