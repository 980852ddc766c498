"""Reads a NeMo-RL recipe: YAML through omegaconf, its ``defaults`` chain, NeMo-RL's resolvers. Nothing is executed.

A recipe is untrusted text: aliases that blow up, cycles, and files that are not YAML are refused with a reason.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zkl_debug.errors import UsageError
from zkl_debug.schema import Json

MAX_BYTES = 8 << 20
MAX_NODES = 500_000
MAX_DEPTH = 64
MAX_FILES = 256
OVERRIDE_MARK = "_override_"


@dataclass(frozen=True)
class Layer:
    """One file of the chain, its content as plain data with interpolations as text."""

    path: Path
    data: Mapping[Any, Json]


@dataclass(frozen=True)
class Recipe:
    """A recipe with its chain resolved.

    Args:
        path: the file that was asked for.
        layers: every file in merge order, the base first.
        config: the merged configuration; interpolations stay unresolved until they are read.
        missing: files named under ``defaults`` that do not exist (only with ``partial``).
    """

    path: Path
    layers: tuple[Layer, ...]
    config: Any
    missing: tuple[str, ...] = ()

    def with_overlay(self, overlay: Mapping[str, Json], path: Path) -> Recipe:
        """The recipe as it would be with one more file on top."""
        config = _merge(self.config, OmegaConf.create(dict(overlay)), path)
        return Recipe(self.path, (*self.layers, Layer(path, overlay)), config, self.missing)

    def origin(self, parts: tuple[str, ...]) -> str:
        """Name of the file whose value of the key wins, or an empty string."""
        for layer in reversed(self.layers):
            node: Json = layer.data
            for depth, part in enumerate(parts):
                if not isinstance(node, Mapping) or part not in node:
                    break
                node = node[part]
                if depth == len(parts) - 1:
                    return os.path.relpath(layer.path, self.path.parent)
        return ""


@dataclass
class _Loading:
    partial: bool
    layers: list[Layer] = field(default_factory=list)
    stack: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    files: int = 0


def load_recipe(path: Path, *, partial: bool = False) -> Recipe:
    """Load a recipe and everything it names under ``defaults``.

    Args:
        path: the recipe.
        partial: count files of the chain that do not exist as empty instead of failing.

    Raises:
        UsageError: unreadable file, bad YAML, not a mapping, a cycle, or a missing file of the chain.
    """
    register_resolvers()
    state = _Loading(partial)
    config = _load(path, state, None)
    return Recipe(path, tuple(state.layers), config, tuple(state.missing))


def _load(path: Path, state: _Loading, parent: Path | None) -> Any:
    real = path.resolve()
    if real in state.stack:
        names = [p.name for p in [*state.stack[state.stack.index(real) :], real]]
        raise UsageError(
            f"{path}: `defaults` form a cycle: {' -> '.join(names)}",
            "a chain of files that ends in one without `defaults`",
        )
    state.files += 1
    if state.files > MAX_FILES:
        raise UsageError(f"{path}: the `defaults` chain reads more than {MAX_FILES} files", "a short chain")
    if not path.is_file():
        if parent is not None and state.partial:
            state.missing.append(f"{path} (named by {parent.name})")
            return OmegaConf.create({})
        raise _not_found(path, parent)
    config = _parse(path)
    state.stack.append(real)
    names = _pop_defaults(config, path)
    parents = [_load(Path(os.path.normpath(path.parent / name)), state, path) for name in names]
    state.stack.pop()
    state.layers.append(Layer(path, OmegaConf.to_container(config, resolve=False)))
    return reduce(lambda base, override: _merge(base, override, path), [*parents, config])


def _not_found(path: Path, parent: Path | None) -> UsageError:
    what = "is a folder" if path.is_dir() else "does not exist"
    if parent is None:
        return UsageError(f"{path} {what}", "a NeMo-RL recipe in YAML")
    return UsageError(
        f"{parent}: `defaults` names {path}, which {what}",
        "every file of the chain, at the place the recipe expects it",
        "put the file there, or check what is present with --partial",
    )


def _parse(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB", "a recipe in YAML")
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})", "a recipe in YAML") from error
    try:
        _check_shape(text, path)
        config = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {_yaml_problem(error)}") from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is not valid YAML: {first_line(error)}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply", "a recipe in YAML") from error
    return config


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + first_line(error.problem or error.context or "syntax error")


def _check_shape(text: str, path: Path) -> None:
    """Refuse what is no mapping, what nests too deeply, and aliases that refer to themselves or blow up."""
    sizes: dict[str, int] = {}  # anchor -> how many values its node expands to
    open_nodes: list[tuple[str | None, int]] = []  # anchor and values so far, outermost first
    root = ""
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            root = root or type(event).__name__
            _count(event, sizes, open_nodes, path)
    if root != "MappingStartEvent":
        kind = {"": "nothing", "SequenceStartEvent": "a list"}.get(root, "a single value")
        raise UsageError(f"{path} holds {kind} at its top level", "a mapping of sections: a NeMo-RL recipe in YAML")


def _count(event: Any, sizes: dict[str, int], open_nodes: list[tuple[str | None, int]], path: Path) -> None:
    """Follow one event: keep the number of values every open node expands to."""
    size = 1
    if isinstance(event, yaml.CollectionStartEvent):
        open_nodes.append((event.anchor, 1))
        if len(open_nodes) > MAX_DEPTH:
            raise UsageError(f"{path} is nested too deeply", f"at most {MAX_DEPTH} levels")
        return
    if isinstance(event, yaml.CollectionEndEvent):
        anchor, size = open_nodes.pop()
    elif isinstance(event, yaml.AliasEvent):
        anchor = None
        if any(name == event.anchor for name, _ in open_nodes):
            raise UsageError(f"{path}: an alias refers to itself", "plain YAML data")
        size = sizes.get(event.anchor or "", 1)
    else:
        anchor = event.anchor
    if anchor is not None:
        sizes[anchor] = size
    if open_nodes:
        outer, total = open_nodes[-1]
        open_nodes[-1] = (outer, total + size)
        size += total
    if size > MAX_NODES:
        raise UsageError(f"{path}: its aliases expand to more than {MAX_NODES} values", "plain YAML data")


def _pop_defaults(config: Any, path: Path) -> list[str]:
    if "defaults" not in config and not OmegaConf.is_missing(config, "defaults"):
        return []
    try:
        value = config.pop("defaults")
    except OmegaConfBaseException as error:
        raise UsageError(
            f"{path}: `defaults` cannot be resolved: {first_line(error)}", "a path or a list of paths"
        ) from error
    names = list(value) if isinstance(value, ListConfig) else [value]
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise UsageError(f"{path}: `defaults` holds {name!r}", "a path, or a list of paths, relative to this file")
    return names


def _merge(base: Any, override: Any, path: Path) -> Any:
    """NeMo-RL's merge: deep, the override wins; a section marked ``_override_: true`` replaces the base's section."""
    try:
        for key in list(override.keys()):
            if OmegaConf.is_missing(override, key) or OmegaConf.is_interpolation(override, key):
                continue
            section = override[key]
            if isinstance(section, DictConfig) and section.get(OVERRIDE_MARK, False):
                section.pop(OVERRIDE_MARK)
                if key in base:
                    base.pop(key)
        return OmegaConf.merge(base, override)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} does not merge with its `defaults`: {first_line(error)}") from error


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


def register_resolvers() -> None:
    """Register the resolvers that NeMo-RL itself registers (and no others), numbers only."""
    resolvers = {
        "add": lambda a, b: _number(a) + _number(b),
        "mul": lambda a, b: _number(a) * _number(b),
        "div": lambda a, b: _number(a) / _number(b),
        "max": lambda a, b: max(_number(a), _number(b)),
    }
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    for name, function in resolvers.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)


def first_line(error: object) -> str:
    """The first line of an error's text, printable."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(c if c.isprintable() else "?" for c in lines[0])[:300]
