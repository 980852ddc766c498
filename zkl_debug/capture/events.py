"""Events of a loop, each with the state before and after it: what changed, in which event, under which weight version.

An :class:`EventLog` knows nothing of an engine. It is given *roots* (objects to walk for tensors) and functions that
return further records (KV blocks, recurrent slots), and it instruments methods of the running program, so that an
optimizer step, a refit, sleep and wake announce themselves from where they really happen.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zkl_debug.capture.layout import dtype_name
from zkl_debug.capture.state import allocated, tensor_digest
from zkl_debug.capture.taps import TapSet
from zkl_debug.capture.walk import Found, walk
from zkl_debug.digest_torch import unobserved
from zkl_debug.schema import Json, StateRecord

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession

_HERE = str(Path(__file__).parent)
_UNSEEN = (_HERE, "contextlib.py", "functools.py")

#: Returns state records of one part of the program; the event log puts the part's name in front.
StateSource = Callable[[], Sequence[StateRecord]]


@dataclass(frozen=True)
class Moment:
    """State at one side of an event.

    Attributes:
        seq: sequence number of the event in this log, counting both sides.
        name: ``optimizer_step``, ``refit``, ``sleep``, ``wake``, ``cache_reset``, ``build``, ``mode``, ``generate`` ...
        phase: ``begin``, ``end``, or ``mark`` for an event without duration.
        step: step of the loop.
        version: weight version of the trainer.
        site: file, line and function that brought it about.
        state: records by name (``part:path``); empty where none was taken.
        detail: facts of the event.
    """

    seq: int
    name: str
    phase: str
    step: int
    version: int
    site: str
    state: Mapping[str, StateRecord]
    detail: Mapping[str, Json] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """``refit (step 4)``."""
        return f"{self.name} (step {self.step})"


@dataclass
class Cost:
    """What watching cost: seconds spent, snapshots, bytes digested, tensors left out for the budget."""

    seconds: float = 0.0
    snapshots: int = 0
    bytes: int = 0
    left_out: int = 0
    largest: float = 0.0

    def to_json(self) -> dict[str, Json]:
        """All fields, seconds rounded to a tenth of a millisecond."""
        return {
            "seconds": round(self.seconds, 4),
            "slowest_snapshot_seconds": round(self.largest, 4),
            "snapshots": self.snapshots,
            "bytes_digested": self.bytes,
            "tensors_left_out": self.left_out,
        }


class EventLog:
    """Watches a loop.

    Args:
        roots: objects to walk, by part name, e.g. ``{"train": model, "gen": inference_model}``.
        sources: functions that return further records, by part name.
        session: also write every event and its state into this capture session.
        budget_bytes: bytes digested per snapshot, at most; what does not fit is recorded without a digest and counted.
        before: take the state before an event too; without it a change between two events is put on the later one.
        stateless: names of events whose state is not taken at all.
        keep: moments whose state is kept in memory; older ones keep name and place only. None keeps all.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        sources: Mapping[str, StateSource] | None = None,
        *,
        session: CaptureSession | None = None,
        budget_bytes: int = 1 << 30,
        before: bool = True,
        stateless: Collection[str] = (),
        keep: int | None = None,
    ) -> None:
        self.roots = dict(roots)
        self.sources = dict(sources or {})
        self.session = session
        self.budget_bytes = budget_bytes
        self.before = before
        self.stateless = frozenset(stateless)
        self.keep = keep
        self.step = 0
        self.version = 0
        self.moments: list[Moment] = []
        self.cost = Cost()
        self.opaque: dict[str, None] = {}
        self.truncated = False
        self.enabled = True
        self._taps = TapSet()
        self._callbacks: list[Callable[[], None]] = []

    # ---- events ---------------------------------------------------------------------------------------------------
    @contextmanager
    def around(self, name: str, **detail: Json) -> Iterator[None]:
        """An event with a duration: the state is taken before and after the block."""
        if not self.enabled:
            yield
            return
        site = call_site()
        self._note(name, "begin", site, detail, self.before)
        yield
        self._note(name, "end", site, detail, True)

    def mark(self, name: str, *, state: bool = True, **detail: Json) -> None:
        """An event without duration."""
        if self.enabled:
            self._note(name, "mark", call_site(), detail, state)

    def instrument(self, owner: Any, attribute: str, name: str, *, state: bool = True) -> None:
        """Make every call of ``owner.attribute`` an event; undone by :meth:`close`."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def announced(*args: Any, **kwargs: Any) -> Any:
                if not self.enabled:
                    return function(*args, **kwargs)
                if not state:
                    result = function(*args, **kwargs)
                    self.mark(name, state=False, arguments=_shown(args, kwargs))
                    return result
                with self.around(name):
                    return function(*args, **kwargs)

            return announced

        self._taps.wrap(owner, attribute, wrap)

    def adopt(self, moments: Sequence[Moment], part: str, seconds: float = 0.0) -> None:
        """Take in events that another process saw of ``part``; the other parts are taken to be as they were.

        ``seconds`` is what seeing them cost there.
        """
        self.cost.seconds += seconds
        self.cost.snapshots += sum(1 for m in moments if m.state)
        last = next((m.state for m in reversed(self.moments) if m.state), {})
        rest = {name: record for name, record in last.items() if not name.startswith(f"{part}:")}
        for moment in moments:
            state = {**rest, **moment.state} if moment.state else {}
            self._add(moment.name, moment.phase, moment.site, moment.detail, state)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the log is closed."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """Take every instrumentation out again."""
        self._taps.remove()
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()

    def _note(self, name: str, phase: str, site: str, detail: Mapping[str, Json], state: bool) -> None:
        taken = self.snapshot() if state and name not in self.stateless else {}
        self._add(name, phase, site, detail, taken)

    def _add(
        self, name: str, phase: str, site: str, detail: Mapping[str, Json], taken: Mapping[str, StateRecord]
    ) -> None:
        moment = Moment(len(self.moments), name, phase, self.step, self.version, site, taken, dict(detail))
        self.moments.append(moment)
        if self.keep is not None and len(self.moments) > self.keep:
            old = self.moments[-self.keep - 1]
            self.moments[-self.keep - 1] = Moment(
                old.seq, old.name, old.phase, old.step, old.version, old.site, {}, old.detail
            )
        if self.session is not None:
            self.session.step, self.session.weight_version = self.step, self.version
            self.session.event(name, {"phase": phase, "site": site, **detail})
            if taken:
                self.session.state(list(taken.values()))

    # ---- state ----------------------------------------------------------------------------------------------------
    def snapshot(self) -> dict[str, StateRecord]:
        """Digests of everything the roots and sources hold now, by ``part:path``."""
        started = time.perf_counter()
        records: dict[str, StateRecord] = {}
        left = self.budget_bytes
        with unobserved():
            for part, root in self.roots.items():
                found = walk(root)
                self.opaque.update(dict.fromkeys(found.opaque))
                self.truncated |= found.truncated
                for record in _records(part, found.found, left):
                    records[record.name] = record
                    left -= int(record.detail.get("nbytes", 0))
            for part, source in self.sources.items():
                for record in source():
                    name = f"{part}:{record.name}"
                    records[name] = _renamed(record, name)
                    left -= int(record.detail.get("nbytes", 0))
        spent = time.perf_counter() - started
        self.cost.seconds += spent
        self.cost.largest = max(self.cost.largest, spent)
        self.cost.snapshots += 1
        self.cost.bytes += self.budget_bytes - max(left, 0)
        self.cost.left_out += sum(1 for r in records.values() if r.detail.get("no_digest"))
        return records


def _records(part: str, found: Sequence[Found], budget: int) -> Iterator[StateRecord]:
    storages: dict[int, str] = {}
    # Whoever else holds its storage is an alias of the parameter or buffer, also where it was met first.
    for entry in sorted(found, key=lambda e: e.kind == "cache"):
        if pointer := entry.tensor.untyped_storage().data_ptr():
            storages.setdefault(pointer, f"{part}:{entry.path}")
    digests: dict[tuple[int, int], tuple[int, int]] = {}
    for entry in found:
        tensor = entry.tensor
        detail: dict[str, Json] = {"owner": entry.owner, "persistent": entry.persistent}
        storage = tensor.untyped_storage()
        pointer, name = storage.data_ptr(), f"{part}:{entry.path}"
        if pointer:
            if storages[pointer] != name:
                detail["shares_storage_with"] = storages[pointer]
            detail["storage_offset"] = tensor.storage_offset() * tensor.element_size()
        nbytes = tensor.numel() * tensor.element_size()
        digest = (0, 0)
        if not allocated(tensor):
            detail["no_digest"] = "its storage is not allocated"
        elif nbytes > budget:
            detail["no_digest"] = "over the budget of a snapshot"
        else:
            key = (id(tensor), nbytes)
            if key not in digests:
                digests[key] = tensor_digest(tensor)
                detail["nbytes"] = nbytes
                budget -= nbytes
            digest = digests[key]
        shape = tuple(tensor.shape)
        yield StateRecord(name, entry.kind, dtype_name(tensor), shape, digest, tensor.data_ptr(), detail)


def _renamed(record: StateRecord, name: str) -> StateRecord:
    return StateRecord(
        name, record.kind, record.torch_dtype, record.shape, record.digest, record.data_ptr, record.detail
    )


def _shown(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    plain = [repr(a) for a in args if isinstance(a, bool | int | float | str)]
    plain += [f"{k}={v!r}" for k, v in kwargs.items() if isinstance(v, bool | int | float | str)]
    return ", ".join(plain)


def call_site() -> str:
    """``file:line function`` of the nearest caller that is not part of the probe."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE) and not name.endswith(_UNSEEN):
            parts = Path(name).parts
            return f"{'/'.join(parts[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"
