"""The bench of peers: recordings are compared as each tool does, and answers are judged as they should be."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from zkl_debug.bench import peer_run, peers_bench
from zkl_debug.bench.peer_run import INJECTIONS, _change
from zkl_debug.bench.peer_tools import TOOLS, Told, _AtOnce, kind
from zkl_debug.bench.peers_bench import answer, bench_peers
from zkl_debug.cli.bench import command
from zkl_debug.cli.bench_print import print_peers
from zkl_debug.errors import UsageError
from zkl_debug.stack.switches import switch


class Net(torch.nn.Module):
    def __init__(self, case: str = "") -> None:
        super().__init__()
        self.case = case
        self.one, self.two = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        if self.case:
            y = y.clone()  # the same operators in every run
            if self.case in INJECTIONS:
                _change(y.detach(), self.case)
        out: torch.Tensor = self.two(y)
        return out


@pytest.mark.parametrize("tool", ["pt-hooks", "debugmode-norm", "debugmode-xor"])
def test_equal_runs_are_equal_and_changed_ones_differ(tool: str, tmp_path: Path) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    weights = Net().state_dict()
    for name, case in (("a", "none"), ("b", "none"), ("c", "permuted-row")):
        net = Net(case)
        net.load_state_dict(weights)
        (tmp_path / name).mkdir()
        with torch.no_grad(), TOOLS[tool].observe(net, tmp_path / name):
            net(x)
    same = TOOLS[tool].compare(tmp_path / "a", tmp_path / "b")
    assert same.compared >= 2
    assert (same.names, same.first, same.why_not) == ((), "", "")
    other = TOOLS[tool].compare(tmp_path / "a", tmp_path / "c")
    assert other.names or other.why_not or tool.startswith("debugmode")


@pytest.mark.parametrize("case", INJECTIONS)
def test_changes_are_in_place_and_small(case: str) -> None:
    x = torch.arange(1.0, 25.0).reshape(4, 6)
    changed = x.clone()
    _change(changed, case)
    assert (changed != x).any()
    assert torch.equal(changed.abs().sort().values.sum(), x.abs().sort().values.sum())
    assert torch.equal(changed[0], x[0])
    assert torch.equal(changed[3], x[3])


@pytest.mark.parametrize(
    ("told", "alarm", "expected"),
    [
        (Told(why_not="no"), False, "cannot compare"),
        (Told(5), False, "misses"),
        (Told(5, ("decoder.layers.0.self_attention.linear_qkv:0#0",)), False, "names it"),
        (Told(5, ("Module.decoder.layers.0.self_attention.linear_qkv.Col.forward.0:0",)), False, "names it"),
        (Told(5, ("decoder.layers.0.mlp:0#0",)), False, "names another"),
        (Told(5, ("decoder.layers.0.self_attention.linear_qkv:0#0",)), True, "differs without it too"),
    ],
)
def test_answers(told: Told, alarm: bool, expected: str) -> None:
    assert answer("K2", told, alarm) == expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("decoder.layers.1.mlp/unpermute:out.0", "names it"),
        ("decoder.layers.1.mlp:0#0", "names the module round it"),
        ("aten::index_add in decoder.layers.1.mlp", "names the module round it"),
        ("Tensor.index_add.3.forward:0 in Module.decoder.layers.1.mlp.MoELayer.forward.0", "names the module round it"),
        ("decoder.layers.1.mlp.router:0#0", "names another"),
        ("decoder.layers.1:0#0", "names another"),
        ("decoder.layers.11.mlp:0#0", "names another"),
    ],
)
def test_answers_inside_a_module(first: str, expected: str) -> None:
    """A tool that sees modules alone can name the mixture of experts, not what happens in it."""
    assert answer("K7", Told(5, (first,))) == expected


def test_what_msprobe_names_is_told_with_its_module(tmp_path: Path) -> None:
    """Its dump lists the function before the module that called it: a user reads both."""
    for side, md5 in (("a", "11"), ("b", "22")):
        folder = tmp_path / side / "step0" / "proc1"
        folder.mkdir(parents=True)
        call, module = "Functional.linear.0.forward", "Module.decoder.layers.0.self_attention.linear_qkv.Col.forward.0"
        value = {"output": [{"shape": [2], "dtype": "torch.float32", "md5": md5}]}
        (folder / "dump.json").write_text(json.dumps({"data": {call: value, module: value}}))
        (folder / "construct.json").write_text(json.dumps({call: module, module: None}))
    told = TOOLS["msprobe"].compare(tmp_path / "a", tmp_path / "b")
    assert (told.compared, len(told.names)) == (2, 2)
    assert answer("K2", told) == "names it"
    assert TOOLS["msprobe"].compare(tmp_path / "a", tmp_path / "a").first == ""


def test_calls_that_differ_between_two_good_runs_are_left_out() -> None:
    """Whatever layer or call they are of; a difference of another kind stays."""
    noise = frozenset(map(kind, ["Tensor.narrow.7.forward:0 in Module.decoder.layers.0.self_attention.S.forward.3"]))
    told = Told(9, ("Tensor.narrow.12.forward:0 in Module.decoder.layers.1.self_attention.S.forward.0", "x.linear:0"))
    assert told.without(noise) == Told(9, ("x.linear:0",))
    assert told.without(frozenset()) == told


def test_a_check_sum_is_taken_before_the_next_operator() -> None:
    x = torch.zeros(4)
    sums = _AtOnce().submit(lambda: x.sum().item())
    x.add_(1)
    assert sums.result() == 0


def test_a_tool_that_is_not_installed_is_said_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_bench, "TOOLS", {"x": TOOLS["msprobe"].__class__("x", "no-such-package", None, None)})  # type: ignore[arg-type]
    found = bench_peers(["x"])
    assert found["tools"]["x"]["left_out"] == "no-such-package is not installed"
    console = Console(file=io.StringIO(), width=80)
    print_peers(console, found)
    assert "no-such-package is not installed" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 40])
def test_the_table_of_a_tool_fits(width: int) -> None:
    """What a tool says of each case, and why it could not; no line is broken by the terminal."""
    said = {"compared": 3, "differ": 0, "first": "", "why_not": ""}
    both = {"other_side": {**said, "answer": "differs without it too"}, "good_run": {**said, "answer": "names it"}}
    tool = {
        "name": "some tool that hooks everything",
        "version": "26.2.0",
        "cost": {"ratio": 1.5, "bytes": 598_000_000, "plain_seconds": 1.0},
        "good-tiny-gpt": {"other_side": {**said, "answer": "says that they differ"}, "repeated": []},
        "K2": both,
        "K4": {"error": "RuntimeError: a long reason " * 5},
        "sign-flip": {"good_run": {**said, "answer": "names the module round it"}},
    }
    console = Console(file=io.StringIO(), width=width)
    print_peers(console, {"tools": {"x": tool}, "cases": {"K2": "", "K4": "", "K7": "", "sign-flip": ""}})
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for part in ("1.50 x plain, 598 MB", "sign flip", "names it", "failed"):
        assert part in words
    if width == 80:
        assert "K2 differs without it too names it" in words
        assert "sign flip - names the module round it" in words


def test_unknown_tools_are_refused() -> None:
    result = CliRunner().invoke(command, ["peers", "--tool", "nsys"], standalone_mode=False)
    assert isinstance(result.exception, UsageError)


@pytest.mark.parametrize("case", INJECTIONS)
@pytest.mark.parametrize("tool", ["pt-hooks", "debugmode-norm", "debugmode-xor"])
def test_a_change_is_below_the_tool_and_moves_rows_alone(
    tool: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_run, "TARGET", "one")
    net, x = Net(), torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    results, told = {}, {}
    for name in ("", case):
        (tmp_path / f"run{name}").mkdir()
        with (
            torch.no_grad(),
            switch("gemm-row-tiles").apply(),
            peer_run._products(net, name) as count,
            TOOLS[tool].observe(net, tmp_path / f"run{name}"),
        ):
            results[name] = [net(x), net(x)]
        told[name] = TOOLS[tool].compare(tmp_path / "run", tmp_path / f"run{name}")
        assert count == [1 if name else 0]  # the first call alone
    assert told[""].names == ()
    assert torch.equal(results[""][1], results[case][1])
    with torch.no_grad(), switch("gemm-row-tiles").apply():
        expected = net.one(x).clone()
        _change(expected, case)
        assert torch.equal(results[case][0], net.two(expected))
    assert told[case].why_not == ""  # the same operators in both
    if tool == "pt-hooks":
        assert told[case].first == "one:0#0"
    elif case == "permuted-row":  # neither a sum of magnitudes nor an exclusive or sees an order, and rows stay apart
        assert told[case].names == ()
    else:  # the same for signs in pairs, until they are added up
        assert "Net.two" in told[case].first
