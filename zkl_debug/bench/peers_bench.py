"""This tool beside others on the same bed: what each costs, writes and finds."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zkl_debug.bench.children import child, scratch
from zkl_debug.bench.peer_run import FAULTS, INJECTIONS, TARGET
from zkl_debug.bench.peer_tools import TOOLS, Told, kind
from zkl_debug.schema import Json

#: What the right answer contains, by case.
RIGHT = {
    "K2": ("layers.0.self_attention.linear_qkv",),
    "K4": ("layers.0.self_attention.core_attention", "layers.0.self_attention/core_attention"),
    "K7": ("layers.1.mlp/unpermute", "layers.1.mlp.token_dispatcher"),
    **dict.fromkeys(INJECTIONS, (TARGET.removeprefix("decoder."),)),
}
#: The module round it, by case, where the right answer is inside a module that tools of modules see as one.
AROUND = {"K7": re.compile(r"(^|\.)layers\.1\.mlp([:#\s]|\.MoELayer\b|$)")}


def bench_peers(
    tools: Sequence[str] = tuple(TOOLS), folder: Path | None = None, progress: Callable[[str], None] | None = None
) -> dict[str, Json]:
    """Run every tool that is installed over every case.

    For each fault: *against the other side* compares scoring with generation, which is the question of a user, who has
    no good run. *Against a good run* compares the same side without the fault, which is easier; calls of a kind that
    differs between two good runs (memory that nothing has been written to yet, say) are left out of it.

    Returns:
        By tool: version, cost, bytes, answers by case; why it was left out where it is not installed.
    """
    say = progress or (lambda _text: None)
    found: dict[str, Json] = {}
    for key in tools:
        tool = TOOLS[key]
        if not tool.version:
            found[key] = {"name": tool.name, "left_out": f"{tool.package} is not installed"}
            continue
        with scratch(folder, "zkl-peers-") as root:
            found[key] = {"name": tool.name, "version": tool.version, **_one_tool(key, root, say)}
    return {"bench": "peers", "tools": found, "cases": {**FAULTS, **INJECTIONS}}


def _one_tool(key: str, root: Path, say: Callable[[str], None]) -> dict[str, Json]:
    say(f"{key}: cost")
    result: dict[str, Json] = {"cost": _run(key, "cost", root / "cost")}
    good: dict[str, Path] = {}
    noise: dict[str, frozenset[str]] = {}
    for bed in sorted(set(FAULTS.values())):
        say(f"{key}: {bed} without a fault, twice")
        good[bed], again = root / f"good-{bed}", root / f"again-{bed}"
        failed = [ran for ran in (_run(key, f"good-{bed}", at) for at in (good[bed], again)) if "error" in ran]
        if failed:
            result[f"good-{bed}"] = failed[0]
            return result
        told = _compare(key, good[bed] / "train", good[bed] / "gen")
        repeated = [_compare(key, good[bed] / side, again / side) for side in ("gen", "train")]
        noise[bed] = frozenset(kind(name) for each in repeated for name in each.names)
        result[f"good-{bed}"] = {
            "other_side": {**told.json(), "answer": _alarm(told)},
            "repeated": [each.json() for each in repeated],
            "noise": sorted(noise[bed]),
        }
        shutil.rmtree(again)
    for case in (*FAULTS, *INJECTIONS):
        say(f"{key}: {case}")
        ran = _run(key, case, root / case)
        bed = FAULTS.get(case, "tiny-gpt")
        if case in INJECTIONS and ran.get("injected") == 0:
            ran = {"error": "the change did not reach the result while this tool was recording"}
        if "error" in ran:
            result[case] = ran
            continue
        sides = ("gen", "train") if case in FAULTS else ("train",)
        against = [_compare(key, root / case / side, good[bed] / side).without(noise[bed]) for side in sides]
        told = next((t for t in against if t.names), next((t for t in against if t.why_not), against[0]))
        result[case] = {"good_run": {**told.json(), "answer": answer(case, told)}}
        if case in FAULTS:
            told = _compare(key, root / case / "train", root / case / "gen")
            alarm = bool(result[f"good-{bed}"]["other_side"]["differ"])
            result[case]["other_side"] = {**told.json(), "answer": answer(case, told, alarm)}
        shutil.rmtree(root / case)
    return result


def _compare(key: str, a: Path, b: Path) -> Told:
    try:
        return TOOLS[key].compare(a, b)
    except (OSError, ValueError, KeyError) as error:
        return Told(why_not=f"{type(error).__name__}: {error}")


def answer(case: str, told: Told, alarm: bool = False) -> str:
    """A verdict on what a tool told: ``names it``, ``names the module round it``, ``names another``, ``misses``,
    ``cannot compare``.

    Args:
        case: what was put in.
        told: what it said.
        alarm: it says that something differs when nothing was put in, too, so that its word means nothing.
    """
    if told.why_not:
        return "cannot compare"
    if not told.names:
        return "misses"
    if alarm:
        return "differs without it too"
    named = told.first.replace("Module.module.", "").replace("Module.", "")
    if any(right in named for right in RIGHT[case]):
        return "names it"
    return "names the module round it" if case in AROUND and AROUND[case].search(named) else "names another"


def _alarm(told: Told) -> str:
    if told.why_not:
        return "cannot compare"
    return "says that they differ" if told.names else "equal"


def _run(key: str, case: str, folder: Path) -> dict[str, Json]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with child([sys.executable, "-m", "zkl_debug.bench.peer_run", key, case, str(folder)], environment) as process:
        output, errors = process.communicate()
    if process.returncode:
        return {"error": (errors.strip().splitlines() or ["no output"])[-1][:300]}
    found: dict[str, Json] = json.loads(output.strip().splitlines()[-1])
    return found
