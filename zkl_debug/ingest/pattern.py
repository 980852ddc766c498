"""Folders of .npy, .npz and .safetensors files whose names follow a pattern of the user's.

``{layer}.{name}_{step}.npy`` says what the parts of a name mean. Within archives, ``::`` separates the file from the
key of the array: ``step{step}.npz::{layer}.{name}``.

Three things must be known, and are refused where they are not: the token ids (a row has no key without them), whether a
tensor has token rows at all, and the order in which the tensors were computed (what is "first" without it?).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from zkl_debug.bits import DTYPES
from zkl_debug.errors import Refused, UsageError
from zkl_debug.ingest import arrays
from zkl_debug.ingest.build import CaptureBuilder, Survey
from zkl_debug.ingest.calls import BadCallError, Call, Keys
from zkl_debug.ingest.fed import key_call
from zkl_debug.ingest.raw import RawTensor, files_under
from zkl_debug.schema import Json, Phase

_NUMBERS = ("layer", "step", "frame", "sample", "rank", "index")
FIELDS = (*_NUMBERS, "name", "port", "any")
_FIELD = re.compile(r"\{(\w+)\}")
_PORT = re.compile(r"(in|out)(?:put)?s?(?:[._]?(\d+))?")
_PORT_TEXT = r"(?:in|out)(?:put)?s?(?:[._]?\d+)?"
#: What tools call the things a model is fed -> the name :mod:`zkl_debug.ingest.fed` knows.
_FED = {
    **dict.fromkeys(("input_ids", "token_ids", "tokens", "ids"), "input_ids"),
    **dict.fromkeys(("position_ids", "positions"), "position_ids"),
    **dict.fromkeys(("attention_mask", "mask"), "attention_mask"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens"), "cu_seqlens_q"),
}


@dataclass(frozen=True)
class Options:
    """How a folder is read; see ``zkl-debug ingest --help``."""

    patterns: tuple[str, ...]
    side: str
    payload: bool = True
    ids: str = ""
    order: tuple[str, ...] = ()
    phase: Phase = Phase.SCORE
    dtype: str = ""
    rank: int | None = None
    steps: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Found:
    """One array and what its name says; -1 for numbers that the pattern has not."""

    path: Path
    key: str
    name: str
    port: str
    layer: int
    step: int
    frame: int
    sample: int
    rank: int
    index: int

    @property
    def call(self) -> tuple[int, int, int]:
        """What the arrays of one forward have in common."""
        return self.step, self.frame, self.sample

    @property
    def site(self) -> str:
        """Canonical site name."""
        inside = f"layers.{self.layer}." if self.layer >= 0 else ""
        return f"{inside}{re.sub(r'[:/#~ ]', '_', self.name)}:{self.port}"


def compile_pattern(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Regular expressions of the file part and of the key part.

    Raises:
        UsageError: for a field that is not known, or a pattern without ``{name}``.
    """
    file, _, key = pattern.partition("::")
    used = _FIELD.findall(pattern)
    unknown = [field for field in used if field not in FIELDS]
    if unknown or len(set(used) - {"any"}) != len([field for field in used if field != "any"]):
        what = f"{{{unknown[0]}}}" if unknown else "one field twice"
        raise UsageError(f"--pattern {pattern}: {what}", "fields " + ", ".join(f"{{{field}}}" for field in FIELDS))
    if "name" not in used and key:
        raise UsageError(f"--pattern {pattern} has no {{name}}", "a part that says what the tensor is")
    if "name" not in used and not file.endswith((".npz", ".safetensors")):
        raise UsageError(f"--pattern {pattern} has no {{name}}", "a part that says what the tensor is")
    return _expression(file), _expression(key or ("{any}" if "name" in used else "{name}"))


def _expression(text: str) -> re.Pattern[str]:
    parts = _FIELD.split(text)
    out = []
    for place, part in enumerate(parts):
        if place % 2 == 0:
            out.append(re.escape(part))
        elif part == "any":
            out.append(".*?")
        elif part in _NUMBERS:
            out.append(rf"(?P<{part}>\d{{1,9}})")
        else:
            out.append(f"(?P<{part}>{_PORT_TEXT if part == 'port' else '.+?'})")
    return re.compile("".join(out))


def find(folder: Path, options: Options) -> tuple[list[Found], dict[str, int]]:
    """Arrays of a folder whose names fit, and how many files and keys did not.

    Raises:
        Refused: when none fits, or a file cannot be read.
    """
    patterns = [compile_pattern(pattern) for pattern in options.patterns]
    paths, links = files_under(folder, arrays.ENDINGS)
    left_out = {"links, which are not followed": links} if links else {}
    found, others = [], 0
    for path in paths:
        name = path.relative_to(folder).as_posix()
        fitting = [(fits, key) for file, key in patterns if (fits := file.fullmatch(name)) is not None]
        if not fitting:
            others += 1
            continue
        for entry in arrays.read(path, dtype=options.dtype, shapes_only=True):
            if entry.error:
                raise Refused(
                    f"{path}{'::' if entry.key else ''}{entry.key} is not used: {entry.error}",
                    "whole arrays of numbers",
                    "remove it from the folder to go on without it",
                )
            item = _found(path, entry.key, fitting)
            if item is None:
                others += 1
                continue
            if options.steps and item.step not in options.steps:
                left_out["of other steps"] = left_out.get("of other steps", 0) + 1
            else:
                found.append(item)
    if not found:
        there = paths[0].relative_to(folder).as_posix() if paths else f"none of {', '.join(arrays.ENDINGS)}"
        raise Refused(
            f"no file of {folder} fits --pattern {' '.join(options.patterns)}", f"names such as it holds: {there}"
        )
    return found, left_out | ({"names that do not fit the pattern": others} if others else {})


def _found(path: Path, key: str, fitting: Sequence[tuple[re.Match[str], re.Pattern[str]]]) -> Found | None:
    """An array by the first pattern that fits both its file and its key."""
    for fits, key_pattern in fitting:
        inside = key_pattern.fullmatch(key) if key else None
        if key and inside is None:
            continue
        fields = fits.groupdict() | (inside.groupdict() if inside is not None else {})
        numbers = {name: int(fields.get(name, -1)) for name in _NUMBERS}
        match = _PORT.fullmatch(fields.get("port", "out"))
        assert match is not None
        number = int(match.group(2) or 0)
        port = match.group(1) + (f".{number}" if number else "")
        return Found(path, key, fields.get("name", ""), port, **numbers)
    return None


def ingest(folder: Path, out: Path, options: Options) -> dict[str, Json]:
    """Write a folder of arrays as a capture.

    Returns:
        A summary: frames, rows, what was left out.

    Raises:
        UsageError: for options that cannot be used.
        Refused: when token ids, ranks or the order of execution are not known, or files are damaged.
    """
    if options.dtype and options.dtype not in DTYPES:
        raise UsageError(f"--dtype {options.dtype}", f"one of {', '.join(sorted(DTYPES))}")
    found, left_out = find(folder, options)
    found = _one_rank(folder, found, options.rank)
    fed_of = _FED | ({options.ids: "input_ids"} if options.ids else {})
    shared = _shared_ids(options)
    calls: dict[tuple[int, int, int], Call] = {}
    keys = Keys()
    groups: dict[tuple[int, int, int], list[Found]] = {}
    for item in found:
        groups.setdefault(item.call, []).append(item)
    for where in sorted(groups):
        fed = {fed_of[i.name]: load(i, options) for i in groups[where] if i.name in fed_of and i.layer < 0}
        if shared is not None:
            fed.setdefault("input_ids", shared)
        try:
            calls[where] = key_call(keys, fed, options.phase)
        except BadCallError as error:
            raise Refused(
                f"the tensors of {_where(where)} cannot be keyed: {error}",
                "token ids beside the activations, as input_ids, token_ids, tokens or ids",
                "name the array with --ids NAME, or give a file of ids with --ids FILE",
            ) from None
    activations = {where: [i for i in items if i.layer >= 0 or i.name not in fed_of] for where, items in groups.items()}
    ordered = {where: _in_order(items, options) for where, items in activations.items()}
    survey = Survey()
    for where, items in ordered.items():
        for item in items:
            survey.look(item.site, calls[where], load(item, options, shapes_only=True).shape)
    builder = CaptureBuilder(
        out, options.side, payload=options.payload, meta={"engine": "files"}, refused=survey.refused()
    )
    for where in sorted(ordered):
        tensors = ((item.site, load(item, options), _semantic(item)) for item in ordered[where])
        builder.frame(calls[where], tensors, step=where[0])
    builder.notes += [f"left out: {count} {what}" for what, count in left_out.items()]
    builder.notes.append("weights are not in the files: they are taken to be those of the other side")
    if not options.order and all(item.index < 0 for item in found):
        builder.notes.append("the order of execution is that of the arrays in each archive")
    builder.close({"unkeyed_rows": sum(keys.unkeyed.values())})
    return {"frames": len(calls), "rows": builder.rows, "left_out": left_out, "unkeyed": dict(keys.unkeyed)}


def load(item: Found, options: Options, *, shapes_only: bool = False) -> RawTensor:
    """The bits of one array.

    Raises:
        Refused: when it cannot be read.
    """
    for entry in arrays.read(item.path, dtype=options.dtype, shapes_only=shapes_only, only=item.key):
        if entry.key == item.key and entry.tensor is not None:
            return entry.tensor
        if entry.key == item.key:
            raise Refused(f"{item.path} is not used: {entry.error}", "whole arrays of numbers")
    raise Refused(f"{item.path} lost {item.key} while it was read", "files that nobody changes")


def _one_rank(folder: Path, found: Sequence[Found], rank: int | None) -> list[Found]:
    ranks = sorted({item.rank for item in found})
    if rank is None and len(ranks) > 1:
        raise Refused(
            f"{folder} holds ranks {', '.join(map(str, ranks[:8]))}",
            "one rank: tensors of several are replicas or shards, which are not put together here",
            "choose one that holds whole tensors with --rank N",
        )
    return [item for item in found if rank is None or item.rank == rank]


def _shared_ids(options: Options) -> RawTensor | None:
    """Token ids in a file of their own, which hold for every call."""
    file, _, key = options.ids.partition("::")
    path = Path(file)
    if not options.ids or path.suffix not in arrays.ENDINGS:
        return None
    if not path.is_file():
        raise UsageError(f"--ids {options.ids} is no file", "a file of token ids, or the name of an array")
    for entry in arrays.read(path):
        if entry.key == key or not key:
            if entry.tensor is None:
                raise Refused(f"{path} is not used: {entry.error}", "an array of token ids")
            return entry.tensor
    raise UsageError(f"{path} holds no {key}", "the key of the array after ::")


def _in_order(items: Sequence[Found], options: Options) -> list[Found]:
    """The arrays of a call in the order in which they were computed.

    Raises:
        Refused: when nothing tells it.
    """
    if all(item.index >= 0 for item in items):
        return sorted(items, key=lambda item: item.index)
    if options.order:
        return sorted(items, key=lambda item: _place(item, options.order, items))
    if {item.path.suffix for item in items} == {".npz"} and len({item.path for item in items}) == 1:
        return list(items)
    per_layer: dict[int, set[str]] = {}
    for item in items:
        per_layer.setdefault(item.layer, set()).add(item.site)
    if all(len(sites) == 1 for sites in per_layer.values()) and -1 not in per_layer:
        return sorted(items, key=lambda item: item.layer)
    names = sorted({item.name for item in items})
    raise Refused(
        f"nothing says in which order {', '.join(names[:4])}{' ...' if len(names) > 4 else ''} were computed",
        "an {index} in the pattern, one .npz for each forward, or the names in order of execution",
        f"add --order {','.join(names[:4])} with the names in their order, those outside layers where they belong",
    )


def _place(item: Found, order: Sequence[str], items: Sequence[Found]) -> tuple[int, int, int, str]:
    """Sort key: before, in or after the layers; layer; place in the order; port (inputs first)."""
    place = next((i for i, glob in enumerate(order) if fnmatchcase(item.name, glob)), None)
    if place is None:
        raise Refused(f"--order does not name {item.name}", f"all of {sorted({i.name for i in items})[:20]}")
    if item.layer >= 0:
        return 1, item.layer, place, item.port
    layered = {i.name for i in items if i.layer >= 0}
    inside = [i for i, glob in enumerate(order) if any(fnmatchcase(name, glob) for name in layered)]
    return (0 if not inside or place < inside[0] else 2), 0, place, item.port


def _semantic(item: Found) -> str:
    return "core_attention" if item.name.rpartition(".")[2] in ("attn", "core_attention") else ""


def _where(where: tuple[int, int, int]) -> str:
    parts = [f"{name} {number}" for name, number in zip(("step", "frame", "sample"), where, strict=True) if number >= 0]
    return ", ".join(parts) or "the folder"
