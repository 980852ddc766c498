"""What is searched: switches, their order, and which configurations of them are allowed. No I/O (see ``load``)."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from zkl_debug.errors import UsageError

#: A configuration: the names of the switches that are on.
Config = frozenset[str]

_NAME_RE = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.:/+-]*$")


@dataclass(frozen=True)
class EnvBinding:
    """One environment variable a switch sets; ``None`` means the variable is removed."""

    name: str
    when_on: str | None = "1"
    when_off: str | None = "0"


@dataclass(frozen=True)
class Switch:
    """Anything that can be on or off.

    Attributes:
        name: unique name.
        requires: switches that must be on whenever this one is.
        conflicts: switches that must be off whenever this one is on (symmetric).
        alternatives: switches that may do the same job; tried first when this one turns out replaceable.
        env: environment variables set by the command oracle, besides ``ZKL_SWITCH_<NAME>``.
        untestable: why this machine cannot run it; non-empty means it is never varied.
        held: the fixed state of a switch that is not varied; ``None`` for a switch that is searched.
        doc: what the switch fixes.
    """

    name: str
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    env: tuple[EnvBinding, ...] = ()
    untestable: str = ""
    held: bool | None = None
    doc: str = ""

    @property
    def is_searched(self) -> bool:
        """Whether the search may turn the switch on and off."""
        return self.held is None and not self.untestable


@dataclass(frozen=True)
class Space:
    """An ordered ladder of switches with its constraints.

    Raises:
        UsageError: names that repeat or are unknown, cycles in ``requires``, a switch that requires what it
            conflicts with, held switches that contradict each other.
    """

    switches: tuple[Switch, ...]

    def __post_init__(self) -> None:
        _check_names(self.switches)
        _check_references(self.switches, self.by_name)
        for name in self.by_name:
            self._visit(name, [], {})
        _check_closures(self)

    @cached_property
    def by_name(self) -> Mapping[str, Switch]:
        """The switches by name, in file order."""
        return {s.name: s for s in self.switches}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """All names in ladder order: file order, except that requirements come before what requires them."""
        done: dict[str, bool] = {}
        for switch in self.switches:
            self._visit(switch.name, [], done)
        return tuple(done)

    def _visit(self, name: str, path: list[str], done: dict[str, bool]) -> None:
        if name in done:
            return
        if name in path:
            cycle = " -> ".join([*path[path.index(name) :], name])
            raise UsageError(f"switches require each other in a circle: {cycle}")
        for needed in self.by_name[name].requires:
            self._visit(needed, [*path, name], done)
        done[name] = True

    def sort(self, names: Iterable[str]) -> tuple[str, ...]:
        """``names`` in ladder order."""
        wanted = set(names)
        return tuple(n for n in self.order if n in wanted)

    def closure(self, names: Iterable[str]) -> Config:
        """``names`` and everything they require."""
        found: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo.extend(self.by_name[name].requires)
        return frozenset(found)

    def dependents(self, names: Iterable[str]) -> Config:
        """``names`` and everything that (transitively) requires one of them."""
        return frozenset().union(*(self._dependents[n] for n in names))

    @cached_property
    def _dependents(self) -> Mapping[str, Config]:
        found: dict[str, Config] = {}
        for name in reversed(self.order):
            direct = [s.name for s in self.switches if name in s.requires]
            found[name] = frozenset([name]).union(*(found[d] for d in direct))
        return found

    def rivals(self, names: Iterable[str]) -> Config:
        """Switches that conflict with one of ``names``."""
        wanted = set(names)
        own = {c for n in wanted for c in self.by_name[n].conflicts}
        return frozenset(own | {s.name for s in self.switches if wanted.intersection(s.conflicts)})

    def is_valid(self, config: Config) -> bool:
        """Whether ``config`` is closed under ``requires``, free of conflicts and respects what is held."""
        return (
            self.closure(config) == config
            and not (self.rivals(config) & config)
            and self.bottom <= config
            and all(self.by_name[n].is_searched or n in self.bottom for n in config)
        )

    @cached_property
    def bottom(self) -> Config:
        """The all-off configuration: only what is held on."""
        return frozenset(s.name for s in self.switches if s.held)

    @cached_property
    def excluded(self) -> Mapping[str, str]:
        """Switches outside ``top`` that are not held on, with the reason."""
        return self._layout[1]

    @cached_property
    def top(self) -> Config:
        """The all-on configuration: every switch in ladder order that the machine and the conflicts allow."""
        return self._layout[0]

    @cached_property
    def _layout(self) -> tuple[Config, Mapping[str, str]]:
        top = set(self.bottom)
        out: dict[str, str] = {}
        for name in self.order:
            switch = self.by_name[name]
            if name in top:
                continue
            missing = [r for r in switch.requires if r in out]
            rivals = self.sort(self.rivals([name]) & top)
            if switch.untestable:
                out[name] = switch.untestable
            elif switch.held is False:
                out[name] = "held off"
            elif missing:
                out[name] = f"requires {missing[0]}, which is left out: {out[missing[0]]}"
            elif rivals:
                out[name] = f"conflicts with {', '.join(rivals)}, which comes first in the ladder"
            else:
                top.add(name)
        return frozenset(top), out

    @cached_property
    def swappable(self) -> tuple[str, ...]:
        """Switches left out of ``top`` only because of a conflict: alternatives that can be swapped in."""
        return tuple(n for n in self.excluded if self.swap_in(self.top, n) is not None)

    def swap_in(self, config: Config, name: str) -> Config | None:
        """``config`` with ``name`` (and what it requires) on and all that conflicts with it off, or None."""
        added = self.closure([name])
        if self.rivals(added) & added or any(not self.by_name[n].is_searched for n in added - self.bottom):
            return None
        gone = self.dependents(self.rivals(added))
        if gone & (added | self.bottom):
            return None
        return (config - gone) | added

    def digest(self) -> str:
        """SHA-256 of everything that decides what a configuration means (documentation is left out)."""
        body = [{k: v for k, v in asdict(s).items() if k != "doc"} for s in self.switches]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def env_name(name: str) -> str:
    """The environment variable that carries the state of switch ``name``."""
    return "ZKL_SWITCH_" + re.sub(r"[^A-Z0-9]", "_", name.upper())


def _check_names(switches: tuple[Switch, ...]) -> None:
    if not switches:
        raise UsageError("the space has no switches", "at least one switch")
    seen: dict[str, str] = {}
    for switch in switches:
        if not _NAME_RE.match(switch.name):
            raise UsageError(f"{switch.name!r} is not a switch name", "letters, digits and any of _ . : / + -")
        variable = env_name(switch.name)
        if variable in seen:
            both = f"{seen[variable]!r} and {switch.name!r}"
            raise UsageError(f"switches {both} share the variable {variable}", "names that differ in letters or digits")
        seen[variable] = switch.name


def _check_references(switches: tuple[Switch, ...], known: Mapping[str, Switch]) -> None:
    for switch in switches:
        for field in ("requires", "conflicts", "alternatives"):
            for other in getattr(switch, field):
                if other == switch.name:
                    raise UsageError(f"switch {switch.name!r} names itself in {field}")
                if other not in known:
                    near = difflib.get_close_matches(other, known, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else "a switch of this space"
                    raise UsageError(f"switch {switch.name!r}: {field} names the unknown switch {other!r}", hint)
        if switch.untestable and switch.held:
            raise UsageError(f"switch {switch.name!r} is both untestable and held on", "one of the two")


def _check_closures(space: Space) -> None:
    for name in space.order:
        needed = space.closure([name])
        clash = space.sort(space.rivals(needed) & needed)
        if clash:
            raise UsageError(f"switch {name!r} can never be on: it needs {' and '.join(clash)}, which conflict")
    for name in space.bottom:
        for missing in space.sort(space.closure([name]) - space.bottom):
            raise UsageError(f"switch {name!r} is held on but requires {missing!r}, which is not", "hold both on")
    clash = space.sort(space.rivals(space.bottom) & space.bottom)
    if clash:
        raise UsageError(f"switches held on conflict: {', '.join(clash)}")
