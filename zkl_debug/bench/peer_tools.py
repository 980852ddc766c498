"""Other tools that look for differences between two runs, and this one, behind one interface."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zkl_debug.schema import Json


@dataclass(frozen=True)
class Told:
    """What a tool says of two of its recordings.

    Attributes:
        compared: tensors it could compare.
        names: what differs, in the order of execution, each by a name of its own.
        why_not: why it cannot compare; empty when it can.
    """

    compared: int = 0
    names: tuple[str, ...] = ()
    why_not: str = ""

    @property
    def first(self) -> str:
        """What it names first; empty when nothing differs."""
        return self.names[0] if self.names else ""

    def without(self, noise: frozenset[str]) -> Told:
        """Leave out calls of a kind (see :func:`kind`) that differ between two good runs, too."""
        return replace(self, names=tuple(name for name in self.names if kind(name) not in noise))

    def json(self) -> dict[str, Json]:
        """As written into a history: how many differ instead of which."""
        return {"compared": self.compared, "differ": len(self.names), "first": self.first, "why_not": self.why_not}


def kind(name: str) -> str:
    """A call without its numbers, so that the same call of another layer or step is of the same kind."""
    return re.sub(r"\d+", "#", name)


@dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        name: for tables.
        package: whose version is told.
        observe: records a model into a folder while the context lasts.
        compare: what it says of two folders.
    """

    name: str
    package: str
    observe: Callable[[Any, Path], contextlib.AbstractContextManager[None]]
    compare: Callable[[Path, Path], Told]

    @property
    def version(self) -> str:
        """Installed version, empty when it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


Entry = tuple[str, list[int], Json]  # name with its call, shape, value


def _told(left: list[Entry], right: list[Entry]) -> Told:
    """Join recordings by name and call, and compare what has the same shape."""
    other = {name: (shape, value) for name, shape, value in right}
    pairs = [(name, value, other[name][1]) for name, shape, value in left if name in other and other[name][0] == shape]
    differ = [name for name, one, two in pairs if one != two]
    if not pairs:
        return Told(why_not="no tensor of one name and shape on both sides")
    return Told(len(pairs), tuple(differ))


# Forward hooks that save every output with torch.save.


@contextlib.contextmanager
def _pt_observe(model: Any, folder: Path) -> Iterator[None]:
    import torch

    index: list[Json] = []
    calls: dict[str, int] = {}

    def save(name: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            call = calls[name] = calls.get(name, -1) + 1
            parts = output if isinstance(output, tuple | list) else (output,)
            for part, tensor in enumerate(parts):
                if isinstance(tensor, torch.Tensor):
                    file = f"{len(index):06d}.pt"
                    torch.save(tensor.detach().cpu().clone(), folder / file)
                    index.append([f"{name}:{part}#{call}", list(tensor.shape), file])

        return hook

    handles = [module.register_forward_hook(save(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        (folder / "index.json").write_text(json.dumps(index))


def _pt_compare(a: Path, b: Path) -> Told:
    import torch

    def entries(folder: Path) -> list[Entry]:
        listed = json.loads((folder / "index.json").read_text())
        return [(name, shape, folder / file) for name, shape, file in listed]

    right = {name: (shape, file) for name, shape, file in entries(b)}
    both = [(n, file, right[n][1]) for n, shape, file in entries(a) if n in right and right[n][0] == shape]
    differ = [n for n, one, two in both if not _same(torch.load(one), torch.load(two))]
    if not both:
        return Told(why_not="no tensor of one name and shape on both sides")
    return Told(len(both), tuple(differ))


def _same(one: Any, two: Any) -> bool:
    import torch

    return one.dtype == two.dtype and bool(torch.equal(one.view(torch.uint8), two.view(torch.uint8)))


# torch's DebugMode with tensor hashes, compared by the rules of its own ``check_hash_mismatches``.


def _debug_observe(hash_fn: str) -> Callable[[Any, Path], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def observe(_model: Any, folder: Path) -> Iterator[None]:
        from torch.utils._debug_mode import DebugMode

        with DebugMode(record_nn_module=True, record_stack_trace=False) as mode, mode.log_tensor_hashes(hash_fn):
            yield
        inside: list[tuple[int, str]] = []  # what its log shows by indenting: (depth, module)
        lines = []
        for call in mode.logs:
            kind = type(call).__name__
            while inside and inside[-1][0] >= call.call_depth:
                inside.pop()
            if kind == "_AnnotateCall":
                inside.append((call.call_depth, str(getattr(call, "tag", ""))))
                continue
            log = getattr(call, "log", None) or {}
            module = inside[-1][1] if inside else ""
            lines.append(json.dumps([str(getattr(call, "op", kind)), module, repr(log.get("hash"))]))
        (folder / "log.jsonl").write_text("\n".join(lines))

    return observe


def _debug_compare(a: Path, b: Path) -> Told:
    left, right = ([json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()] for folder in (a, b))
    if len(left) != len(right):
        return Told(why_not=f"other operators: {len(left)} and {len(right)}")
    for number, (one, two) in enumerate(zip(left, right, strict=True)):
        if one[0] != two[0]:
            return Told(why_not=f"other operators: {one[0]} and {two[0]} at {number}")
    both = enumerate(zip(left, right, strict=True))
    return Told(len(left), tuple(f"{number}: {one[0]} in {one[1]}" for number, (one, two) in both if one[2] != two[2]))


# msprobe (mindstudio-probe): statistics with check sums of modules and functions.


class _AtOnce:
    """In place of the threads in which msprobe takes check sums: they are taken before the model goes on.

    On a device msprobe copies a result first. On the CPU its threads read the tensor of the model itself, which the
    next operator may be writing in place, so that two good runs disagreed (18 of 4245 results, msprobe 26.2.0). It is
    judged here as it would do on a device.
    """

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """As :meth:`concurrent.futures.Executor.submit`, done when it returns."""
        done: Future[Any] = Future()
        done.set_result(function(*args))
        return done


@contextlib.contextmanager
def _msprobe_observe(model: Any, folder: Path) -> Iterator[None]:
    statistics = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "md5"}
    config = {
        "task": "statistics",
        "dump_path": str(folder),
        "rank": [],
        "step": [],
        "level": "mix",
        "async_dump": False,
        "statistics": statistics,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    import msprobe.pytorch

    debugger = msprobe.pytorch.PrecisionDebugger(config_path=str(path), dump_path=str(folder))
    debugger.service.config.dump_path = str(folder)
    debugger.service.data_collector.data_processor._crc_executor = _AtOnce()
    debugger.start(model=model)
    try:
        yield
    finally:
        debugger.stop()
        debugger.step()


def _msprobe_entries(folder: Path) -> list[Entry]:
    found: list[Entry] = []
    for path in sorted(folder.rglob("dump.json")):
        for name, call in json.loads(path.read_text())["data"].items():
            for number, value in enumerate(call.get("output") or []):
                if isinstance(value, dict) and value.get("md5") is not None:
                    found.append((f"{name}:{number}", value.get("shape") or [], [value.get("dtype"), value["md5"]]))
    return found


def _msprobe_compare(a: Path, b: Path) -> Told:
    """By name and call, as its own comparison does; each is told with the module that called it."""
    told = _told(_msprobe_entries(a), _msprobe_entries(b))
    parents: dict[str, Any] = {}
    for path in sorted(a.rglob("construct.json")):
        parents |= json.loads(path.read_text())
    within = [(name, parents.get(name.rpartition(":")[0])) for name in told.names]
    return replace(told, names=tuple(f"{name} in {it}" if isinstance(it, str) else name for name, it in within))


# This package.


@contextlib.contextmanager
def _zkl_observe(model: Any, folder: Path) -> Iterator[None]:
    from zkl_debug.capture.api import Capture

    with Capture(model, folder / "capture", folder.name, level="digest"):
        yield


def _zkl_compare(a: Path, b: Path) -> Told:
    from zkl_debug.diff.run import diff_captures

    verdict = diff_captures(a / "capture", b / "capture")
    if verdict.refusal is not None:
        return Told(why_not=verdict.refusal.text)
    return Told(verdict.coverage.compared, () if verdict.first is None else (verdict.first.site,))


TOOLS: dict[str, Tool] = {
    "zkl-debug": Tool("zkl-debug", "zkl-debug", _zkl_observe, _zkl_compare),
    "msprobe": Tool("msprobe", "mindstudio-probe", _msprobe_observe, _msprobe_compare),
    "debugmode-norm": Tool("torch DebugMode, norm", "torch", _debug_observe("norm"), _debug_compare),
    "debugmode-xor": Tool("torch DebugMode, hash_tensor", "torch", _debug_observe("hash_tensor"), _debug_compare),
    "pt-hooks": Tool("forward hooks, .pt files", "torch", _pt_observe, _pt_compare),
}
