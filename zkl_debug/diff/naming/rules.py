"""Families of module trees as data (``families/*.toml``): how each is recognised, and its common names.

A pattern is a name in which ``{i}`` stands for a number. ``paths`` rename a module and with it every port, operator and
parameter of it; ``sites`` rename one port or parameter, and win. A rule with ``when`` holds where modules with the same
number are there, or (with ``!``) are not. ``lanes`` say of which parts a row of a fused tensor consists; ``sparse``
which sites together are a router's choice, told as ids.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zkl_debug.errors import UsageError

_FOLDER = Path(__file__).parent / "families"
_KEYS = {"title", "detect", "rules", "lanes", "sparse", "paths", "sites"}
LAYOUTS = ("per-group", "all-q-all-k-all-v", "halves")


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(re.escape("{i}"), r"(\d+)"))


def _filled(text: str, numbers: tuple[str, ...]) -> str:
    for number in numbers:
        text = text.replace("{i}", number, 1)
    return text


@dataclass(frozen=True)
class Rule:
    """Renamings that hold under a condition: (from, to) of modules and of single ports or parameters."""

    when: tuple[str, ...] = ()
    paths: tuple[tuple[str, str], ...] = ()
    sites: tuple[tuple[str, str], ...] = ()

    def holds(self, modules: frozenset[str], numbers: tuple[str, ...]) -> bool:
        """Whether the modules it asks for are there, and those it excludes are not."""
        return all((_filled(name.removeprefix("!"), numbers) in modules) != name.startswith("!") for name in self.when)


@dataclass(frozen=True)
class Lanes:
    """A fused tensor: the pattern of its site, names of its parts, and how they lie in a row (:data:`LAYOUTS`)."""

    site: str
    parts: tuple[str, ...]
    layout: str


@dataclass(frozen=True)
class Sparse:
    """A router's choice as ids and weights of the chosen experts; ``width`` is a site with one value an expert."""

    when: tuple[str, ...]
    width: str
    weights: str
    ids: str
    to: str


@dataclass(frozen=True)
class Family:
    """One kind of module tree.

    Attributes:
        name: of its file.
        title: in words.
        detect: it is recognised when all modules of any entry are there (``!``: are not), with one number.
        rules, lanes, sparse: its renamings and fused tensors.
    """

    name: str
    title: str = ""
    detect: tuple[tuple[str, ...], ...] = ()
    rules: tuple[Rule, ...] = ()
    lanes: tuple[Lanes, ...] = ()
    sparse: tuple[Sparse, ...] = ()

    def common(self, name: str, modules: frozenset[str]) -> str | None:
        """The common name of a site or parameter; None where the family has none for it."""
        for rule in self.rules:
            for source, target in rule.sites:
                found = _pattern(source).fullmatch(name)
                if found is not None and rule.holds(modules, found.groups()):
                    return _filled(target, found.groups())
        path, rest = split_name(name)
        for rule in self.rules:
            for source, target in rule.paths:
                found = _pattern(source).fullmatch(path)
                if found is not None and rule.holds(modules, found.groups()):
                    return _filled(target, found.groups()) + rest
        return None


def split_name(name: str) -> tuple[str, str]:
    """Module path and rest of a site name (``/operator:port`` or ``:port``) or of a parameter's (``.weight``)."""
    path = re.split(r"[/:]", name, maxsplit=1)[0] if ":" in name else name.rpartition(".")[0]
    return path, name[len(path) :]


def modules_of(names: Iterable[str]) -> frozenset[str]:
    """Module paths that occur in names of sites and parameters, those round them included."""
    found: set[str] = set()
    for name in names:
        path = split_name(name)[0]
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return frozenset(found)


def matches(pattern: str, name: str) -> tuple[str, ...] | None:
    """Numbers of ``{i}`` in a name, or None where it does not fit."""
    found = _pattern(pattern).fullmatch(name)
    return None if found is None else found.groups()


def filled(pattern: str, numbers: tuple[str, ...]) -> str:
    """A pattern with its numbers put in."""
    return _filled(pattern, numbers)


@cache
def known_families() -> tuple[Family, ...]:
    """All families of the package, by name."""
    return tuple(_parse(tomllib.loads(file.read_text()), file.stem) for file in sorted(_FOLDER.glob("*.toml")))


def families_of(modules: frozenset[str]) -> tuple[Family, ...]:
    """Families that a module tree belongs to."""
    return tuple(family for family in known_families() if any(_detected(entry, modules) for entry in family.detect))


def _detected(entry: tuple[str, ...], modules: frozenset[str]) -> bool:
    first = entry[0]
    candidates = (matches(first, module) for module in modules)
    rule = Rule(when=entry)
    return any(numbers is not None and rule.holds(modules, numbers) for numbers in candidates)


def load_map(file: Path) -> Family:
    """A map of the user's own, in the format of a family; ``paths`` and ``sites`` may stand at the top.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    try:
        document = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}", _EXPECTED) from None
    except (ValueError, RecursionError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else str(error)[:200]
        raise UsageError(f"{file} cannot be read as a map: {why}", _EXPECTED) from None
    if not document:
        raise UsageError(f"{file} is empty: it names nothing", _EXPECTED)
    return _parse(document, file.name)


_EXPECTED = 'TOML with sites = [["name in one capture", "common name"], ...], and likewise paths, rules, lanes'


def _parse(document: Mapping[str, Any], name: str) -> Family:
    unknown = sorted(set(document) - _KEYS)
    if unknown:
        raise UsageError(f"{name}: unknown key {unknown[0]!r}", _EXPECTED)
    try:
        top = Rule((), _renamings(document.get("paths", ())), _renamings(document.get("sites", ())))
        rules = tuple(
            Rule(_words(r.get("when", ())), _renamings(r.get("paths", ())), _renamings(r.get("sites", ())))
            for r in document.get("rules", ())
        )
        lanes = tuple(
            Lanes(_word(x["site"]), _words(x["parts"]), _word(x["layout"])) for x in document.get("lanes", ())
        )
        sparse = tuple(
            Sparse(_words(x.get("when", ())), *(_word(x[key]) for key in ("width", "weights", "ids", "to")))
            for x in document.get("sparse", ())
        )
        detect = tuple(_words(entry) for entry in document.get("detect", ()))
    except KeyError as error:
        raise UsageError(f"{name}: an entry has no {error.args[0]}", _EXPECTED) from None
    except (TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"{name}: {error}", _EXPECTED) from None
    for entry in lanes:
        if entry.layout not in LAYOUTS:
            raise UsageError(f"{name}: lanes of layout {entry.layout!r}", f"one of {', '.join(LAYOUTS)}")
    return Family(name, str(document.get("title", name)), detect, (top, *rules), lanes, sparse)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:60]!r} is not a name")
    return value


def _words(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{str(values)[:60]!r} is not a list of names")
    return tuple(_word(value) for value in values)


def _renamings(entries: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(entries, Mapping):
        entries = list(entries.items())
    if not isinstance(entries, list | tuple):
        raise TypeError(f"{str(entries)[:60]!r} is not a list of pairs of names")
    found = []
    for entry in entries:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise TypeError(f"{str(entry)[:60]!r} is not a pair of names")
        source, target = map(_word, entry)
        if source.count("{i}") < target.count("{i}"):
            raise ValueError(f"{target!r} has more numbers than {source!r}")
        found.append((source, target))
    return tuple(found)
