"""Logs of torch's DebugMode and of torchtitan's activation traces. They are read as logs, and never give a verdict.

Their hashes are sums over whole tensors: a permutation of values leaves many of them as they are, and they say nothing
of which row differs. So what can be had of two of them is the first line in which they differ: a hint where to look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zkl_debug.errors import Refused
from zkl_debug.schema import Json

MAX_BYTES = 1 << 30
_MAX_LINE = 1 << 20
_SNIFF = 400
_OP = re.compile(
    r"^\s*(?:\[\w+\]\s*)?(?P<op>[\w.:$]+)\((?P<args>.*)\)(?:\s+->\s+(?P<out>.*?))?(?:\s+#\s*(?P<log>\{.*\}))?\s*$"
)
_BLOCK = re.compile(r"^\[(?P<op>[\w.\-]+(?:/[\w.\-]+)*)\]\s*$")
_FIELD = re.compile(r"^\s+(?P<key>Shape|L1 norm|L2 norm|Min|Max|Mean|Hash|Phase)\b:?\s*(?P<value>.*)$")
_NAMESPACED = re.compile(r"^\s*(?:aten|prims|_c10d_functional|c10d|inductor|triton)::")


@dataclass(frozen=True)
class Entry:
    """One operator of a log: the line it starts at, its name, and everything that is said of its values."""

    line: int
    op: str
    values: str


def looks_like(path: Path) -> bool:
    """Whether a text file is one of these logs."""
    try:
        lines = [line for _, line in _lines(path, _SNIFF)]
    except Refused:
        return False
    namespaced = sum(bool(_NAMESPACED.match(line) and _OP.match(line)) for line in lines)
    blocks = sum(bool(_BLOCK.match(line)) for line in lines)
    return namespaced >= 2 or (blocks >= 1 and any(_FIELD.match(line) for line in lines))


def read(path: Path) -> list[Entry]:
    """The operators of a log, in order.

    Raises:
        Refused: when it is no such log, too large, or cut off within a line that is too long.
    """
    found: list[Entry] = []
    block: tuple[int, str, list[str]] | None = None
    for number, line in _lines(path):
        start, field, call = _BLOCK.match(line), _FIELD.match(line), _OP.match(line)
        if block is not None and field is not None:
            block[2].append(f"{field['key']} {field['value'].strip()}")
            continue
        if block is not None:
            found.append(Entry(block[0], block[1], ", ".join(block[2])))
            block = None
        if start is not None:
            block = (number, start["op"], [])
        elif call is not None:
            found.append(Entry(number, call["op"], " ".join(filter(None, (call["args"], call["out"], call["log"])))))
    if block is not None:
        found.append(Entry(block[0], block[1], ", ".join(block[2])))
    if not found:
        raise Refused(f"{path} holds no operator", "a log of DebugMode.debug_string(), or an activation trace")
    return found


def compare(a: Sequence[Entry], b: Sequence[Entry]) -> dict[str, Json]:
    """The first place where two logs differ, and what kind of difference it is.

    The document never says that the logs are of equal values: equal sums are not equal bits.
    """
    for place, (one, two) in enumerate(zip(a, b, strict=False)):
        if one.op != two.op:
            return _difference("other operators: from here on the logs are of different programs", place, one, two)
        if one.values != two.values:
            return _difference("the first operator whose logged values differ", place, one, two)
    if len(a) != len(b):
        return {"differs": f"one log goes on after {min(len(a), len(b))} operators", "a": len(a), "b": len(b)}
    return {"differs": "", "a": len(a), "b": len(b)}


def _difference(what: str, place: int, one: Entry, two: Entry) -> dict[str, Json]:
    sides = {name: {"line": e.line, "operator": e.op, "values": e.values[:300]} for name, e in (("a", one), ("b", two))}
    return {"differs": what, "operators_before": place, **sides}


def _lines(path: Path, most: int = 0) -> Iterator[tuple[int, str]]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise Refused(f"{path} is larger than {MAX_BYTES} bytes", "a log within the limit")
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(_MAX_LINE + 1):
                number += 1
                if len(line) > _MAX_LINE:
                    raise Refused(f"line {number} of {path} is longer than {_MAX_LINE} bytes", "a log of operators")
                yield number, line.decode("utf-8", "replace").rstrip("\r\n")
                if most and number >= most:
                    return
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}", "a readable file") from None
