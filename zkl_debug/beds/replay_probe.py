"""Calls one operator again, in the middle of the run it belongs to, on inputs taken from captures."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zkl_debug.beds.ambient import Surroundings, observe, surrounded
from zkl_debug.beds.replay_pages import Table, write_pages
from zkl_debug.beds.run import BedContext
from zkl_debug.capture.api import Capture
from zkl_debug.capture.experts import get_permutation
from zkl_debug.capture.forcing import row_keys, shares_storage, write_rows
from zkl_debug.capture.layout import RowView, raw_rows
from zkl_debug.engines.megatron.operators import bindings, entry
from zkl_debug.engines.patching import patched
from zkl_debug.schema import SiteKind, parse_site


@dataclass(frozen=True)
class Operand:
    """One row of a pair as its capture holds it.

    Attributes:
        name: ``left`` or ``right``.
        side: which side of the bed.
        frame: the forward the row was computed in.
        inputs: captured rows of each input port: those of this forward, else of the same phase, else any.
        output: captured rows of the output in this forward.
        history: for an attention, the row keys of positions 0 .. p of each row of this forward.
    """

    name: str
    side: str
    frame: int
    inputs: Mapping[str, Table]
    output: Table
    history: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)


@dataclass
class Outcome:
    """What the operator gave for the rows of one call.

    Attributes:
        operand: whose call it is.
        live: in the rebuilt run itself.
        own: called again on its own captured inputs, twice.
        cross: called again with the other operand's captured inputs in place, where the other came first.
        swapped: the same with the other operand's surroundings, empty when none differ.
        names: surroundings that turn the output into the other's, each alone or, failing that, together.
        surroundings: data round the operator at the time of the call.
        substituted: input ports that were overwritten with captured values.
        error: why it could not be called again.
    """

    operand: Operand
    live: Table
    own: list[Table] = field(default_factory=list)
    cross: Table = field(default_factory=dict)
    swapped: Table = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    surroundings: Surroundings = field(default_factory=lambda: Surroundings({}))
    substituted: set[str] = field(default_factory=set)
    error: str = ""


@dataclass
class _Call:
    owner: Any
    attribute: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ReplayProbe:
    """Stands where teacher forcing stands in a capture session; replays the operator when its call comes by.

    Args:
        site: canonical name of the output.
        operands: the calls to look at.
        wanted: row keys whose agreement is asked for.
        known: outcomes of an earlier pass, by operand; those calls are not looked at again.
    """

    def __init__(
        self,
        site: str,
        operands: Sequence[Operand],
        wanted: Sequence[bytes],
        known: Mapping[str, Outcome] | None = None,
    ) -> None:
        self.site, self.parsed = site, parse_site(site)
        self.operands = operands
        self.wanted = wanted
        self.outcomes: dict[str, Outcome] = dict(known or {})
        self.bound = False
        self._capture: Capture
        self._side = ""
        self._roots: list[Any] = []
        self._call: _Call | None = None
        self._substitute: Mapping[str, Table] | None = None  # not None while replaying
        self._running: _Call
        self._result: dict[bytes, NDArray[Any]] = {}
        self._written: set[str] = set()

    def sides(self) -> dict[str, Callable[[BedContext], AbstractContextManager[None]]]:
        """Probes for :func:`zkl_debug.beds.rebuild.run_again`: one for each side with a call still to be looked at."""
        todo = {o.side for o in self.operands if o.name not in self.outcomes}
        return {side: functools.partial(self.attached, side=side) for side in sorted(todo)}

    @contextmanager
    def attached(self, context: BedContext, side: str) -> Iterator[None]:
        """Observe one side inside the block."""
        self._side = side
        self._roots = list(context.model.modules())
        with ExitStack() as stack:
            for owner, attribute in bindings(self.parsed, context.model):
                self.bound = True
                stack.enter_context(patched(owner, attribute, self._note(owner, attribute)))
            capture = Capture(context.model, None, side, strict=True, forcing=self)
            self._capture = stack.enter_context(capture)
            capture.adapter.prompt_lens.update(context.prompt_lens)  # type: ignore[union-attr]
            yield

    def _note(self, owner: Any, attribute: str) -> Any:
        """Wrap the callable: keep its arguments as they are before the call, for some write into them."""

        def make(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._substitute is None and self._is_wanted():
                    self._call = _Call(owner, attribute, _clone(args), _clone(kwargs))
                return original(*args, **kwargs)

            return call

        return make

    def _here(self) -> list[Operand]:
        frame = self._capture.session.frame
        return [o for o in self.operands if frame is not None and o.side == self._side and o.frame == frame.index]

    def _is_wanted(self) -> bool:
        if not self._here():
            return False
        path, running = self.parsed.path.split("#")[0], self._capture.session.current_path()
        return not running or f"{path}.".startswith(f"{running}.") or f"{running}.".startswith(f"{path}.")

    def visit(self, name: str, view: RowView, kind: SiteKind, rows: NDArray[np.void], source: torch.Tensor) -> None:  # noqa: ARG002
        """What the session sees of a site: see :meth:`zkl_debug.capture.forcing.Forcing.visit`."""
        if self._substitute is not None:
            self._during(name, view, rows, source)
        elif name == self.site and self._call is not None:
            for operand in self._here():
                if operand.name not in self.outcomes:
                    live = dict(zip(row_keys(rows), raw_rows(view), strict=True))
                    self.outcomes[operand.name] = self._look(Outcome(operand, live), self._call)
            self._call = None

    def _look(self, outcome: Outcome, call: _Call) -> Outcome:
        try:
            operand = outcome.operand
            outcome.surroundings = observe(self._roots)
            outcome.own = [self._again(call, operand.inputs), self._again(call, operand.inputs)]
            outcome.substituted = set(self._written)
            other = next((o for o in self.outcomes.values() if o.operand.name != operand.name), None)
            if other is not None and not other.error:
                outcome.cross = self._again(call, other.operand.inputs)
                outcome.substituted &= self._written
                self._exchange(outcome, other, call)
        except Exception as error:  # an operator that cannot be called alone must not end the diagnosis
            outcome.error = f"{type(error).__name__}: {error}"
        return outcome

    def _exchange(self, outcome: Outcome, other: Outcome, call: _Call) -> None:
        """The other's surroundings round this operator: does its output follow them, and which of them?"""
        names = outcome.surroundings.differing(other.surroundings)
        if not names or self._agrees(outcome.cross, other):
            return
        outcome.swapped = self._surrounded(call, other, names)
        if not self._agrees(outcome.swapped, other):
            return
        alone = [name for name in names if self._agrees(self._surrounded(call, other, [name]), other)]
        outcome.names = alone or names

    def _surrounded(self, call: _Call, other: Outcome, names: Sequence[str]) -> Table:
        with surrounded(other.surroundings, names, self._roots):
            return self._again(call, other.operand.inputs)

    def _agrees(self, got: Table, other: Outcome) -> bool:
        return agrees(got, other.operand.output, self.wanted)

    # ---- the call itself ----------------------------------------------------------------------------------------
    def _again(self, call: _Call, inputs: Mapping[str, Table]) -> Table:
        """Call the operator with captured rows in place of those of its arguments; the session is left as it was."""
        frame = self._capture.session.frame
        assert frame is not None
        seen, scratch = dict(frame.seen), {k: dict(v) for k, v in frame.scratch.items() if isinstance(v, dict)}
        base = self.parsed.owner.split("#")[0]
        for name in frame.seen:
            if name.rsplit(":", 1)[0] == base:
                frame.seen[name] -= 1
        labels = list(frame.labels)
        calls = frame.scratch.get("rope_calls", {})
        for path in calls:
            calls[path] -= 1
        self._running = _Call(call.owner, call.attribute, _clone(call.args), _clone(call.kwargs))
        self._substitute, self._result, self._written = inputs, {}, set()
        try:
            self._write_pages(inputs)
            entry(call.owner, call.attribute)(*self._running.args, **self._running.kwargs)
        finally:
            self._substitute = None
            frame.seen.clear()
            frame.seen.update(seen)
            frame.scratch.update(scratch)
            frame.labels[:] = labels
        return self._result

    def _write_pages(self, inputs: Mapping[str, Table]) -> None:
        """K and V of the dynamic engine lie in its cache, not in the arguments that taps see as inputs."""
        frame = self._capture.session.frame
        ports = [f"{self.parsed.owner}:{port}" for port in ("in.1", "in.2")]
        if self._running.attribute != "flash_decode_and_prefill" or frame is None:
            return
        history = next((o.history for o in self._here()), {})
        keys = row_keys(frame.rows.rows)
        tables = inputs.get(ports[0], {}), inputs.get(ports[1], {})
        if write_pages(self._running.args, self._running.kwargs, frame.rows.slot.tolist(), keys, history, tables):
            self._written.update(ports)

    def _during(self, name: str, view: RowView, rows: NDArray[np.void], source: torch.Tensor) -> None:
        if name == self.site:
            self._result = dict(zip(row_keys(rows), raw_rows(view), strict=True))
            return
        assert self._substitute is not None
        table = self._substitute.get(name)
        if table is None or parse_site(name).owner != self.parsed.owner:
            return
        keys = row_keys(rows)
        which = np.array([i for i, key in enumerate(keys) if key in table], np.int64)
        if not len(which):
            return
        bits = np.stack([table[keys[i]] for i in which.tolist()])
        if not self._scatter(view, which, bits):
            if not shares_storage(view.tensor, source):
                return
            write_rows(view, which, bits)
        self._written.add(name)

    def _scatter(self, view: RowView, which: NDArray[np.int64], bits: NDArray[Any]) -> bool:
        """Rows that were gathered by token go back to their places among the experts' rows."""
        session = self._capture.session
        path = re.split(r"[./](?:experts|permute|unpermute)", self.parsed.owner)[0]
        permutation = get_permutation(session, path)
        frame = session.frame
        if permutation is None or frame is None or view.tensor.dim() < 3:
            return False
        table = permutation.per_token(frame.rows.n_slots)
        target = next((a for a in self._running.args if isinstance(a, torch.Tensor)), None)
        if table is None or target is None or len(permutation.slot) != target.shape[0]:
            return False
        at = torch.from_numpy(table[frame.rows.slot[view.row[which]]].reshape(-1))
        value = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(target.dtype)
        target[at] = value.reshape(len(at), *target.shape[1:]).to(target.device)
        return True


def agrees(got: Table, want: Table, keys: Sequence[bytes]) -> bool:
    """Whether all of these rows are there and have the same bits."""
    return bool(keys) and all(key in got and key in want and np.array_equal(got[key], want[key]) for key in keys)


def _clone(value: Any) -> Any:
    """Copies of all tensors but parameters, in tuples, lists and dicts as well."""
    if isinstance(value, torch.nn.Parameter):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_clone(item) for item in value)
    if type(value) is dict:
        return {key: _clone(item) for key, item in value.items()}
    return value
