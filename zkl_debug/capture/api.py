"""``with zkl_debug.capture(model, out, side="train") as cap:``"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from zkl_debug import marks
from zkl_debug.capture import meta as capture_meta
from zkl_debug.capture.forcing import Visitor
from zkl_debug.capture.graphs import GraphWatch
from zkl_debug.capture.hooks import ModuleHooks, ModuleRule
from zkl_debug.capture.labels import make_label_rows, record_labels
from zkl_debug.capture.options import CaptureOptions
from zkl_debug.capture.rows import FrameRows, Sketch, padded_rows, warmup_rows
from zkl_debug.capture.session import CaptureSession
from zkl_debug.capture.state import notices_mutation
from zkl_debug.capture.taps import TapSet
from zkl_debug.capture.weights import WeightWatch
from zkl_debug.errors import UsageError
from zkl_debug.schema import Json, SiteKind
from zkl_debug.store.layout import encode_json
from zkl_debug.store.rest import end_rest, write_rest
from zkl_debug.store.writer import CaptureWriter

#: packages whose models have an adapter, and the module that holds it
ADAPTERS = {
    "megatron": "zkl_debug.engines.megatron.adapter",
    "transformers": "zkl_debug.engines.hf.adapter",
}


_TOKEN_IDS, _POSITION_IDS = "inputs/token_ids:in.0", "inputs/position_ids:in.0"


class Adapter(Protocol):
    """What an engine contributes to a capture: how frames are keyed, which functions are tapped."""

    rules: tuple[ModuleRule, ...]

    def install(self, capture: Capture) -> None:
        """Install taps into ``capture.taps``."""

    def open_frame(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FrameRows | Sketch | None:
        """Rows of the forward that is about to run, or None when they cannot be known."""

    def metadata(self, capture: Capture) -> dict[str, Json]:
        """Engine facts for the manifest, when the capture begins."""

    def finish(self, capture: Capture) -> None:
        """Add what is known only at the end, with :meth:`Capture.add_manifest`; may be called more than once."""


class Capture:
    """Observes one model and writes a capture folder.

    Args:
        model: the model; forwards of this object open frames by themselves.
        out: folder to create.
        side: label of the observed system, ``train`` or ``gen`` by custom.
        level: ``digest``, ``payload`` or ``off``.
        sites: patterns of site names to record; empty for all.
        layers: inclusive layer range.
        budget: cap on payload bytes.
        strict: raise probe failures instead of switching the probe off.
        requests: generation requests to record; 0 for all. Frames are recorded while one of the first so many runs.
        at_once: on a device, read each site when it is passed; see :class:`~zkl_debug.capture.options.CaptureOptions`.
        meta: extra facts for the manifest.
        adapter: engine adapter; default chosen from the model's class.
        rank, world: this process among those that write into ``out``.
        forcing: compare with another side and put its values in place instead of writing a capture.

    Raises:
        UsageError: when ``out`` holds something already or the level is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        out: str | Path | None,
        side: str,
        *,
        level: str = "digest",
        sites: Sequence[str] = (),
        layers: tuple[int, int] | None = None,
        budget: int | None = None,
        strict: bool = False,
        requests: int = 0,
        at_once: bool = False,
        meta: Mapping[str, Json] | None = None,
        adapter: Adapter | None = None,
        rank: int = 0,
        world: int = 1,
        forcing: Visitor | None = None,
    ) -> None:
        self.model = model
        self.out = Path(out) if out is not None else None
        self.side = side
        self.options = CaptureOptions(level, tuple(sites), layers, budget, strict, requests, at_once)
        self.extra = dict(meta or {})
        self.rank, self.world = rank, world
        self.forcing = forcing
        self.adapter = adapter if adapter is not None else _adapter_for(model)
        self.taps = TapSet()
        self.session: CaptureSession
        self._hooks: ModuleHooks
        self._weights: WeightWatch
        self._root: list[Any] = []
        self._pending: FrameRows | Sketch | None = None
        self._next_sample = 0
        self._manifest: dict[str, Json] = {}
        self._id = uuid.uuid4().hex  # a copy of this capture is not another run
        self._rests = False
        self._misused: list[str] = []

    # ---- context --------------------------------------------------------------------------------------------------
    def __enter__(self) -> Capture:
        writer = None
        if self.options.level != "off" and self.forcing is None:
            if self.out is None:
                raise UsageError("a capture needs a folder to write to", "out=PATH")
            writer = CaptureWriter(
                self.out,
                side=self.side,
                rank=self.rank,
                world=self.world,
                meta=self._facts(),
                budget_bytes=self.options.budget,
            )
        self.session = CaptureSession(writer, self.options, self.forcing)
        self.session.calls = functools.partial(_calls, self.model)
        part_of = getattr(self.adapter, "parameter_part", None)
        self._weights = WeightWatch(self.session, self.model, part_of)
        rename = getattr(self.adapter, "rename", None)
        self._hooks = ModuleHooks(self.session, self.model, self.adapter.rules if self.adapter else (), rename)
        if self.options.level == "off":
            return self  # nothing would ever be recorded, so nothing is hooked
        with self.session.guarded("attach"):
            if writer is not None:
                self.add_manifest("self_test", {"mutation": notices_mutation()})
            self._root = [
                self.model.register_forward_pre_hook(self._before_model, with_kwargs=True),
                self.model.register_forward_hook(self._after_model, with_kwargs=True, always_call=True),
            ]
            self._hooks.install()
            if self.adapter is not None:
                self.adapter.install(self)
            if self.forcing is None and torch.cuda.is_available():
                self.watch_graphs(GraphWatch(self.session, self.session.kernels))
        marks.opened(self)
        return self

    def watch_graphs(self, watch: GraphWatch) -> None:
        """See recordings and replays through ``watch``; graphs recorded from here on carry the probe's kernels."""
        self.session.graphs = watch
        watch.opener = self._open_for_replay
        watch.rows_given = lambda: self._pending is not None
        in_a_row = getattr(self.adapter, "graphs_in_a_row", None)
        if in_a_row is not None:
            watch.in_a_row = lambda: bool(in_a_row(self.model))
        watch.install(self.taps)

    def _open_for_replay(self) -> None:
        """A graph of a whole model runs no hook: its rows are those given by :meth:`next_rows`."""
        if self._pending is not None and not self.session.inside():
            rows, self._pending = self._pending, None
            self._weights.before_frame(rows)
            self.session.begin_frame(rows)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for handle in self._root:
            handle.remove()
        self._hooks.remove()
        self.taps.remove()
        self.wake()
        marks.closed(self)
        writer = self.session.writer
        if writer is None:
            return
        try:
            self.session.close()
            extra = self._closing_facts()
            if error is not None:
                extra["ended_by"] = type(error).__name__
            if not self.session.frames_written and self.options.level != "off":
                print(
                    f"zkl-debug: {self.out} holds no frame: no forward with token ids was seen; "
                    "key other forwards with next_rows(...)",
                    file=sys.stderr,
                )
            elif self.session.frames_written and not self.session.metas:
                told = ", ".join(sorted(self.session.filtered)[:3]) or "none"
                print(
                    f"zkl-debug: {self.out} holds no site: sites and layers leave nothing of the "
                    f"{len(self.session.filtered)} that were seen, e.g. {told}",
                    file=sys.stderr,
                )
            writer.close(manifest=extra, reason=f"it ended early, by {type(error).__name__}" if error else "")
        except Exception as failure:
            if self.options.strict and error is None:
                raise
            print(f"zkl-debug: the capture could not be closed: {failure}", file=sys.stderr)

    def _closing_facts(self) -> dict[str, Json]:
        if self.adapter is not None:
            self.adapter.finish(self)
        extra = {**self.session.summary(), **self._manifest, "left_patched": list(self.taps.left_in_place)}
        extra["id"] = self._id
        if self._misused:
            told = f"{len(self._misused)} marks of the program were left out, the first: {self._misused[0]}"
            extra["notes"] = [*self.session.summary()["notes"], told]
        return extra

    def rest(self) -> None:
        """Put everything on file, and say so there: what ends the process from now on takes nothing with it.

        For processes that are ended from outside. Undone by :meth:`wake`, which must come before the next forward.
        """
        if self.session.writer is None or self.out is None or self._rests:
            return
        with self.session.guarded("rest"):
            self.session.flush()
            write_rest(self.out, self.rank, self.session.frames_written, self._closing_facts())
            self._rests = True

    def wake(self) -> None:
        """Take back :meth:`rest`."""
        if self._rests and self.out is not None:
            self._rests = False
            end_rest(self.out, self.rank)

    # ---- for the program ------------------------------------------------------------------------------------------
    def next_rows(self, rows: FrameRows | Sketch) -> None:
        """Key the next forward of the model by ``rows`` instead of guessing them from its arguments."""
        self._pending = rows

    def set_step(self, step: int, weight_version: int | None = None) -> None:
        """Say which training step the following frames belong to; what cannot be a step is left out (:meth:`misused`).

        Args:
            step: from 0, in 32 bits.
            weight_version: from 0, in 64 bits; None leaves it as it is.
        """
        try:
            number = marks.whole("step", step, marks.STEPS)
            version = None if weight_version is None else marks.whole("weight_version", weight_version, marks.VERSIONS)
        except UsageError as error:
            self.misused(error)
            return
        self.session.end_frame()
        self.session.step = number
        if version is not None:
            self.session.weight_version = version

    def event(self, name: str, detail: Mapping[str, Json] | None = None) -> None:
        """Note that something happened between forwards; what cannot be noted is left out (:meth:`misused`).

        Args:
            name: of the event.
            detail: facts by name; values that JSON cannot hold are kept as their ``repr``.
        """
        try:
            if not isinstance(name, str) or not name:
                raise UsageError(f"an event whose name is {type(name).__name__}", "a text that is not empty")
            try:  # as it is now: the program may go on writing into it
                facts = json.loads(encode_json(dict(detail or {})))
            except Exception as error:  # also what a repr of the program raises
                raise UsageError(f"facts of event {name!r}: {error}", "a mapping that JSON can hold") from None
        except UsageError as error:
            self.misused(error)
            return
        self.session.event(name, facts)

    def misused(self, error: UsageError, *, stop: bool = True) -> None:
        """The program said something of itself that cannot be taken. It is left out and told; the program goes on.

        Raises:
            UsageError: the same, in strict mode, unless ``stop`` is false.
        """
        if self.options.strict and stop:
            raise error
        if not self._misused:
            text = str(error).replace("\n", "; ")
            print(f"zkl-debug: a mark was left out, the program goes on: {text}", file=sys.stderr)
        self._misused.append(error.found)

    def tapped(self, name: str, direction: str, values: Sequence[Any]) -> None:
        """Record the tensors among the arguments or results of a function of the program.

        Args:
            name: operator, filed under the module that is being run.
            direction: ``in`` or ``out``.
            values: arguments or results; tensors are numbered among themselves.
        """
        session = self.session
        if session.frame is None or not session.enabled:
            return
        owner = f"{session.current_path()}/{name}:{direction}"
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        for index, tensor in enumerate(tensors):
            with session.guarded(owner):
                session.record(f"{owner}.{index}", tensor)

    def record(self, name: str, tensor: torch.Tensor, **options: Any) -> None:
        """Record any tensor with token rows under a canonical site name, e.g. ``logprobs/log_softmax:out.0``."""
        if self.session.enabled:
            with self.session.guarded(name):
                self.session.record(name, tensor, **options)

    def selected(self, log_probs: torch.Tensor, labels: torch.Tensor) -> None:
        """Record the log-probs of the labels of the open frame.

        Args:
            log_probs: one value per row of the frame (in row order), shape [n], float32.
            labels: token ids they belong to, shape [n]; -1 where a row has no label.
        """
        if not self.session.enabled:
            return
        with self.session.guarded("logprobs/selected:out.0"):
            ids = labels.detach().cpu().numpy().astype(np.int64)
            keep = np.flatnonzero(ids >= 0)
            rows = make_label_rows(self.session, keep, ids[keep])
            index = torch.from_numpy(keep)
            record_labels(
                self.session, "logprobs/selected:out.0", rows, log_probs.detach()[index], labels.detach()[index]
            )

    def add_manifest(self, key: str, value: Json) -> None:
        """Add a fact to the manifest, e.g. ``self_repeat``."""
        self._manifest[key] = value

    def keep(self, handle: Any) -> None:
        """Remove this hook with the capture."""
        self._root.append(handle)

    # ---- model hooks ----------------------------------------------------------------------------------------------
    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        session, last = self.session, self.session.frame
        if not session.enabled:
            session.inside(1)
            if last is not None and last.ended:
                with session.guarded("model:in"):
                    session.postponed.settle(last)  # this forward is not seen, and may write over what waits
            return
        with session.guarded("model:in"):
            session.path.clear()
            session.inside(1)  # what broke off goes before anything is told of this one
            rows: FrameRows | Sketch | None = self._recording_rows(args, kwargs)
            if rows is None:
                rows, self._pending = self._pending, None
            if rows is None and self.adapter is not None:
                rows = self.adapter.open_frame(self, args, kwargs)
            if rows is None:
                rows = self._guess_rows(args, kwargs)
            if rows is None:
                session.end_frame()
            else:
                session.begin(rows, functools.partial(self._open, rows))
            session.in_forward = True
            if rows is None or rows.warmup:
                return
            ids, positions = _ids(args, kwargs)
            for name, value in ((_TOKEN_IDS, ids), (_POSITION_IDS, positions)):
                if isinstance(value, torch.Tensor):
                    value = value if value.dtype == torch.int64 else value.to(torch.int64)
                    if not session.postponed.waits(name, value, SiteKind.INPUT, "input", "bs"):
                        session.record(name, value, kind=SiteKind.INPUT, semantic="input", layout="bs")

    def _open(self, rows: FrameRows | Sketch) -> None:
        self._weights.before_frame(rows)
        fit = getattr(self.adapter, "fit_rows", None)
        if fit is not None and not rows.warmup:
            rows = rows.then(fit) if isinstance(rows, Sketch) else fit(rows)
        self.session.begin_frame(rows)

    def _after_model(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        session = self.session
        session.path.clear()
        if session.graphs is not None:
            session.graphs.handing = None
        if session.enabled and session.frame is not None:
            with session.guarded("model:out"):
                # torch calls this where it has caught what the model raised, too
                session.forward_ended(failed=output is None and sys.exc_info()[0] is not None)
        session.in_forward = False

    def _recording_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FrameRows | None:
        """Token slots of a forward that is being recorded into a graph: its ids cannot be read, only their shape."""
        if self.session.graphs is None or not self.session.graphs.active:
            return None
        ids, _ = _ids(args, kwargs)
        return warmup_rows((ids.shape[1], ids.shape[0])) if ids is not None and ids.ndim == 2 else None

    def _guess_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FrameRows | None:
        """Every row of a [b, s] batch taken as one whole sequence: trailing padding only adds rows nobody joins."""
        ids, _ = _ids(args, kwargs)
        if ids is None or ids.ndim != 2:
            return None
        batch, seq = ids.shape
        samples = range(self._next_sample, self._next_sample + batch)
        self._next_sample += batch
        return padded_rows(ids.detach().cpu().numpy(), samples=list(samples), lengths=[seq] * batch)

    def _facts(self) -> dict[str, Json]:
        facts: dict[str, Json] = {
            "versions": capture_meta.versions(),
            "environment": capture_meta.environment(),
            "process": capture_meta.process(),
            "model": {"class": type(self.model).__name__, "layers": _count_layers(self.model)},
            "config": capture_meta.to_json(getattr(self.model, "config", None)),
        }
        if self.adapter is not None:
            facts.update(self.adapter.metadata(self))
        facts.update(self.extra)
        return facts


def capture(model: nn.Module, out: str | Path | None, side: str = "train", **options: Any) -> Capture:
    """Capture every forward of ``model`` inside the ``with`` block; see :class:`Capture` for the options."""
    return Capture(model, out, side, **options)


def _adapter_for(model: nn.Module) -> Adapter | None:
    for cls in type(model).__mro__:
        module = ADAPTERS.get(cls.__module__.split(".")[0])
        if module is not None:
            adapter: Adapter = importlib.import_module(module).make_adapter(model)
            return adapter
    return None


def _ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Token and position ids of a language model's forward, by keyword or as the first two integer arguments."""
    if "input_ids" in kwargs and "position_ids" in kwargs:
        return kwargs["input_ids"], kwargs["position_ids"]
    integers = [a for a in args if isinstance(a, torch.Tensor) and not a.is_floating_point() and a.dtype != torch.bool]
    ids = kwargs.get("input_ids", kwargs.get("tokens", integers[0] if integers else None))
    positions = kwargs.get("position_ids", integers[1] if len(integers) > 1 else None)
    return ids, positions


def _count_layers(model: nn.Module) -> int:
    layers = [getattr(m, "layers", None) for m in model.modules()]
    return max((len(found) for found in layers if isinstance(found, nn.ModuleList)), default=0)


def _calls(model: nn.Module) -> int:
    """Calls of the model that are under way, on whatever thread."""
    codes = nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__  # a class may call the second at once
    counts = dict.fromkeys(codes, 0)
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code in counts and frame.f_locals.get("self") is model:
                counts[frame.f_code] += 1
            frame = frame.f_back
    return max(counts.values())
