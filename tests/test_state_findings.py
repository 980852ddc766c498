"""Walking objects, logging events, putting state back, and naming the state that is old: on a small program."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from zkl_debug.capture.events import EventLog
from zkl_debug.capture.image import Image, module_objects
from zkl_debug.capture.options import CaptureOptions
from zkl_debug.capture.session import CaptureSession
from zkl_debug.capture.walk import walk
from zkl_debug.diff.state import StateFinding, freed_blocks, state_findings, stored_moments
from zkl_debug.diff.state_values import Values
from zkl_debug.schema import StateRecord
from zkl_debug.store.reader import open_capture
from zkl_debug.store.writer import CaptureWriter


class Mixer(nn.Module):
    """Keeps ``-exp(A)`` for decoding, and refreshes it when told to train, like mcore's ``MambaMixer``."""

    def __init__(self) -> None:
        super().__init__()
        self.a_log = nn.Parameter(torch.randn(6))
        self.cached: torch.Tensor | None = None

    def decay(self) -> torch.Tensor:
        if self.cached is None:
            self.cached = -torch.exp(self.a_log.detach())
        return self.cached


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.mixer = Mixer()
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("lost", torch.arange(4.0), persistent=False)


class Program:
    """A trainer, an engine and a refit between them; each part can be broken."""

    def __init__(self) -> None:
        self.trainer, self.engine = Net(), Net()
        self.send: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda _name, value: value
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self.log = EventLog({"train": self.trainer, "gen": self.engine})

    def refit(self) -> None:
        with torch.no_grad():
            for name, parameter in self.engine.named_parameters():
                sent = self.send(name, dict(self.trainer.named_parameters())[name])
                if sent is not None:
                    parameter.copy_(sent)

    def step(self, number: int) -> None:
        self.log.step = number
        if number > 1:
            with self.log.around("refit"):
                self.refit()
        with self.log.around("generate"):
            self.engine.mixer.decay()
        self.versions[self.log.version] = {n: p.detach().clone() for n, p in self.trainer.named_parameters()}
        with self.log.around("optimizer_step"), torch.no_grad():
            for index, parameter in enumerate(self.trainer.parameters()):
                parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + number + index).view_as(parameter))
            self.log.version += 1

    # the values that are still there
    def engine_values(self) -> dict[str, Values]:
        return {f.path: raw(f.tensor) for f in walk(self.engine).found}

    def trainer_values(self, path: str, version: int) -> Values | None:
        found = self.versions.get(version, {}).get(path)
        return raw(found) if found is not None else None


def raw(tensor: torch.Tensor) -> Values:
    flat = tensor.detach().contiguous()
    return Values(flat.view(torch.int32).numpy().view("u4").copy(), str(flat.dtype).removeprefix("torch."))


def findings(program: Program, steps: int) -> list[StateFinding]:
    for number in range(1, steps + 1):
        program.step(number)
    at = max(m.seq for m in program.log.moments if m.name == "generate" and m.phase == "begin")
    held = program.engine_values()

    class Held:
        def engine(self, path: str) -> Values | None:
            return held.get(path)

        def trainer(self, path: str, version: int) -> Values | None:
            return program.trainer_values(path, version)

    return state_findings(program.log.moments, at, Held())


# ---- walk ------------------------------------------------------------------------------------------------------------


def test_walk_finds_parameters_buffers_and_caches() -> None:
    net = Net()
    net.mixer.decay()
    found = {f.path: f for f in walk(net).found}
    assert found["out.weight"].kind == "parameter"
    assert found["kept"].kind == "buffer"
    assert found["kept"].persistent
    assert not found["lost"].persistent
    assert found["mixer.cached"].kind == "cache"
    assert found["mixer.cached"].owner == "mixer"


def test_walk_looks_into_containers_closures_and_other_objects() -> None:
    hidden = torch.ones(2)

    class Plain:
        def __init__(self) -> None:
            self.queue = deque([{"a": torch.zeros(1)}])
            self.partial = functools.partial(print, torch.zeros(3))
            self.closed = lambda: hidden

    net = Net()
    net.extra = Plain()  # type: ignore[assignment]
    paths = {f.path for f in walk(net).found}
    assert "extra.queue[0]['a']" in paths
    assert "extra.partial.args[0]" in paths
    assert "extra.closed<hidden>" in paths


def test_walk_says_what_it_cannot_look_into_and_where_it_stopped() -> None:
    class Cached:
        @functools.lru_cache  # noqa: B019 - as mcore's rotary embedding
        def table(self) -> torch.Tensor:
            return torch.ones(2)

    cached = Cached()
    cached.table()
    assert any("lru_cache with 1 entries" in text for text in walk(cached).opaque)
    assert walk([[[1]], [[2]]], max_objects=2).truncated


def test_walk_survives_cycles() -> None:
    loop: list[object] = [torch.ones(1)]
    loop.append(loop)
    assert len(walk(loop).found) == 1


# ---- events ----------------------------------------------------------------------------------------------------------


def test_events_say_what_changed_and_where() -> None:
    program = Program()
    program.step(1)
    begin, end = (
        next(m for m in program.log.moments if m.phase == p and m.name == "optimizer_step") for p in ("begin", "end")
    )
    changed = {n for n in end.state if end.state[n].digest != begin.state[n].digest}
    assert changed == {f"train:{n}" for n, _ in program.trainer.named_parameters()}
    assert (begin.version, end.version) == (0, 1)
    assert end.site.split(" ")[-1] == "step"
    assert program.log.cost.snapshots == len(program.log.moments)


def test_aliases_and_unallocated_storage_are_recorded() -> None:
    net = Net()
    net.view = net.out.weight.detach()
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    net.freed = freed
    state = EventLog({"gen": net}).snapshot()
    assert state["gen:view"].detail["shares_storage_with"] == "gen:out.weight"
    assert "not allocated" in str(state["gen:freed"].detail["no_digest"])


def test_budget_leaves_out_and_counts() -> None:
    log = EventLog({"gen": Net()}, budget_bytes=200)
    state = log.snapshot()
    left_out = [r for r in state.values() if "no_digest" in r.detail]
    assert left_out
    assert log.cost.left_out == len(left_out)


def test_instrumented_methods_are_put_back() -> None:
    program = Program()
    program.log.instrument(program.engine, "train", "mode", state=False)
    program.engine.eval()
    assert [m.name for m in program.log.moments] == ["mode"]
    program.log.close()
    program.engine.eval()
    assert len(program.log.moments) == 1
    assert "train" not in vars(program.engine)


def test_log_is_stored_and_read_back(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "loop", side="loop", meta={})
    session = CaptureSession(writer, CaptureOptions())
    program = Program()
    program.log.session = session
    program.send = lambda name, value: None if name == "out.weight" else value
    live = findings(program, 3)
    writer.close(manifest=session.summary())
    with open_capture(tmp_path / "loop") as capture:
        moments = stored_moments(capture.events, capture.states)
    at = max(m.seq for m in moments if m.name == "generate" and m.phase == "begin")
    stored = state_findings(moments, at)
    assert [f.text() for f in stored if f.kind == "parameter"] == [f.text() for f in live if f.kind == "parameter"]


# ---- images ----------------------------------------------------------------------------------------------------------


def test_image_restores_in_place() -> None:
    net = Net()
    weight = net.out.weight.detach()
    table: dict[str, object] = {"weights": weight, "n": 3}
    flags = [1, 2]
    vars(net).update(table=table, flags=flags)
    image = Image(module_objects(net))
    before = {f.path: f.tensor.clone() for f in walk(net).found}
    address = net.out.weight.data_ptr()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    net.mixer.decay()
    table["n"] = 4
    flags.append(3)
    image.restore()
    assert net.out.weight.data_ptr() == address
    assert all(f.tensor.equal(before[f.path]) for f in walk(net).found)
    assert net.mixer.cached is None
    assert (table["n"], flags) == (3, [1, 2])
    assert table["weights"] is weight
    with torch.no_grad():
        net.out.weight.fill_(5.0)
    assert weight.eq(5.0).all()  # still the same storage


def test_image_handles_inference_tensors_and_freed_storage() -> None:
    class Box:
        pass

    box = Box()
    with torch.inference_mode():
        box.cache = torch.ones(3)  # type: ignore[attr-defined]
    box.backup = torch.ones(2)  # type: ignore[attr-defined]
    box.backup.untyped_storage().resize_(0)  # type: ignore[attr-defined]
    image = Image([box])
    with torch.inference_mode():
        box.cache.zero_()  # type: ignore[attr-defined]
    box.backup.untyped_storage().resize_(8)  # type: ignore[attr-defined]
    image.restore()
    assert box.cache.sum() == 3  # type: ignore[attr-defined]
    assert box.backup.untyped_storage().nbytes() == 0  # type: ignore[attr-defined]


# ---- state diff ------------------------------------------------------------------------------------------------------


def test_healthy_state_gives_no_finding() -> None:
    program = Program()
    plain = program.refit

    def refit() -> None:
        plain()
        program.engine.mixer.cached = None

    program.refit = refit  # type: ignore[method-assign]
    assert findings(program, 4) == []


def test_updates_that_never_arrive() -> None:
    program = Program()
    program.send = lambda _name, _value: None
    found = [f for f in findings(program, 4) if f.kind == "parameter"]
    assert len(found) == len(list(program.engine.parameters()))
    assert {(f.lag, f.role, f.event.name if f.event else "") for f in found} == {(3, "left", "refit")}


def test_one_missing_tensor_is_named() -> None:
    program = Program()
    program.send = lambda name, value: None if name == "out.weight" else value
    found = [f for f in findings(program, 3) if f.kind == "parameter"]
    assert [(f.path, f.lag, f.role) for f in found] == [("out.weight", 2, "left")]


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (lambda v: v.to(torch.bfloat16).float(), "dtype-rounded"),
        (lambda v: v[[1, 2, 0, *range(3, 10)]], "permutation"),
        (lambda v: v.roll(2, 0), "shift"),
        (lambda v: v * 2.5, "scale"),
        (torch.zeros_like, "zero"),
        (lambda v: v + 0.01 * torch.sin(1e3 * v), "none"),
    ],
)
def test_what_the_refit_wrote(change: Callable[[torch.Tensor], torch.Tensor], form: str) -> None:
    program = Program()
    program.send = lambda name, value: change(value) if name == "out.weight" else value
    found = [f for f in findings(program, 3) if f.kind == "parameter"]
    assert [(f.path, f.match.form, f.role) for f in found] == [("out.weight", form, "wrote")]


def test_a_later_event_changes_it_back() -> None:
    program = Program()
    for number in (1, 2, 3):
        program.step(number)
    program.log.step = 4
    with program.log.around("refit"):
        program.refit()
    with program.log.around("wake"), torch.no_grad():
        program.engine.out.weight.copy_(program.versions[1]["out.weight"])
    program.log.mark("generate")
    found = [f for f in state_findings(program.log.moments, len(program.log.moments) - 1) if f.kind == "parameter"]
    assert [(f.path, f.lag, f.role, f.event.name if f.event else "") for f in found] == [
        ("out.weight", 2, "changed", "wake")
    ]


def test_a_derived_cache_that_nobody_refreshed() -> None:
    """mcore's decode cache of -exp(A_log): parameters equal, the cache is the function of an old one."""
    found = findings(Program(), 4)
    assert [(f.path, f.kind, f.match.form, f.lag, f.role) for f in found] == [
        ("mixer.cached", "cache", "negative exponential", 3, "kept")
    ]
    assert found[0].strength == "bytes"
    assert found[0].event is not None
    assert found[0].event.step == 2


def test_a_cache_that_is_renewed_before_it_is_read_is_not_blamed() -> None:
    """Old when the generation begins, but marked: the generation makes it anew and reads no old value."""
    program = Program()
    mixer = program.engine.mixer
    marked = []

    def refit() -> None:
        Program.refit(program)
        marked.append(True)

    def decay() -> torch.Tensor:
        if marked:
            mixer.cached = -torch.exp(mixer.a_log.detach())
            marked.clear()
        return Mixer.decay(mixer)

    program.refit = refit  # type: ignore[method-assign]
    mixer.decay = decay  # type: ignore[method-assign]
    assert findings(program, 3) == []


def test_without_values_a_derived_cache_is_told_by_age() -> None:
    program = Program()
    for number in range(1, 4):
        program.step(number)
    at = max(m.seq for m in program.log.moments if m.name == "generate" and m.phase == "begin")
    found = state_findings(program.log.moments, at)
    assert [(f.path, f.match.form, f.strength) for f in found] == [("mixer.cached", "older than its parameter", "age")]


def test_swapped_parameters_are_told_apart() -> None:
    program = Program()
    program.engine.mixer.cached = torch.zeros(0)
    named = dict(program.trainer.named_parameters())
    program.send = lambda name, value: named["embed.weight"] if name == "out.weight" else value
    found = [f for f in findings(program, 2) if f.kind == "parameter"]
    assert [(f.path, f.match.source.name if f.match.source else "") for f in found] == [("out.weight", "embed.weight")]


def block(number: int, digest: int, **detail: object) -> StateRecord:
    return StateRecord(f"kv/block.{number:06d}", "kv", "float32", (2,), (digest, 1), 0, {"block": number, **detail})


def kv_log(script: list[tuple[str, str, int, int, list[StateRecord]]]) -> EventLog:
    """A log with given KV records: (event, phase, step, version, records)."""
    log = EventLog({})
    records: list[StateRecord] = []
    log.sources["gen"] = lambda: records
    for name, phase, step, version, held in script:
        log.step, log.version = step, version
        records[:] = held
        log._note(name, phase, "here", {}, True)
    return log


def test_kv_blocks_of_old_weights() -> None:
    found = {"found_by_hash": True}
    log = kv_log(
        [
            ("generate", "end", 1, 0, [block(7, 1, **found)]),
            ("refit", "end", 2, 1, [block(7, 1, **found)]),
            ("generate", "end", 2, 1, [block(7, 1, **found), block(8, 2, **found)]),
            ("refit", "end", 3, 2, [block(7, 1, **found), block(8, 2, **found)]),
            ("generate", "begin", 3, 2, [block(7, 1, **found), block(8, 2, **found)]),
        ]
    )
    got = state_findings(log.moments, 4)
    assert [(f.path, f.lag, f.event.step if f.event else 0) for f in got] == [
        ("kv/block.000007", 2, 2),
        ("kv/block.000008", 1, 3),
    ]


def test_kv_blocks_rewritten_or_dropped_are_not_old() -> None:
    log = kv_log(
        [
            ("generate", "end", 1, 0, [block(7, 1, found_by_hash=True), block(8, 2, found_by_hash=True)]),
            ("refit", "end", 2, 1, [block(7, 1, found_by_hash=True), block(8, 2, found_by_hash=False)]),
            ("wake", "end", 2, 1, [block(7, 9, found_by_hash=True), block(8, 2, found_by_hash=False)]),
        ]
    )
    assert state_findings(log.moments, 2) == []


def test_a_block_freed_under_a_request_in_flight() -> None:
    log = kv_log(
        [
            ("sleep", "begin", 4, 3, [block(7, 1, owners=[2], free=False), block(8, 1, owners=[], free=True)]),
            ("sleep", "end", 4, 3, [block(7, 1, owners=[2], free=True), block(8, 1, owners=[], free=True)]),
            ("wake", "begin", 4, 3, [block(7, 1, owners=[2], free=True)]),
        ]
    )
    got = freed_blocks(log.moments, 4)
    assert [(f.path, f.event.name if f.event else "", f.detail["owners"]) for f in got] == [
        ("kv/block.000007", "sleep", [2])
    ]
    assert freed_blocks(log.moments, 3) == []
