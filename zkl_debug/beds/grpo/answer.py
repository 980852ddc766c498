"""The answer of a drift search as a document and as lines for a person."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zkl_debug.beds.grpo.drift import Drift, status
from zkl_debug.diff.state import StateFinding
from zkl_debug.errors import ExitCode
from zkl_debug.schema import Json

_EXPERT = re.compile(r"(?P<head>.*\.local_experts)\.(?P<index>\d+)\.(?P<tail>.*)")
_SHOWN = 6


@dataclass(frozen=True)
class Group:
    """Findings that say the same of several tensors.

    Attributes:
        name: machine-readable name of the mechanism.
        text: one sentence.
        findings: the members.
    """

    name: str
    text: str
    findings: tuple[StateFinding, ...]

    def to_json(self) -> Json:
        """Name, text, the event and the members (at most 100)."""
        event = self.findings[0].event
        return {
            "name": self.name,
            "text": self.text,
            "event": event.to_json() if event else None,
            "strength": self.findings[0].strength,
            "count": len(self.findings),
            "tensors": [f.to_json() for f in self.findings[:100]],
        }


def groups(findings: Sequence[StateFinding], parameters: int) -> list[Group]:
    """Findings put together by what they are and which event answers for them, in the given order, unknown ones last.

    Args:
        findings: from the state diff.
        parameters: parameters the engine has.
    """
    sorted_out: dict[tuple[Any, ...], list[StateFinding]] = {}
    for finding in findings:
        sorted_out.setdefault(_key(finding), []).append(finding)
    found = [_group(tuple(members), parameters) for members in sorted_out.values()]
    return sorted(found, key=lambda group: group.name == "unknown-weights")


def _key(finding: StateFinding) -> tuple[Any, ...]:
    event = (finding.event.name, finding.event.seq) if finding.event else ("", -1)
    return finding.kind, finding.match.form, finding.lag, _is_other(finding), finding.role, event


def _is_other(finding: StateFinding) -> bool:
    source = finding.match.source
    return finding.kind in ("parameter", "buffer") and source is not None and source.name != finding.path


def _group(members: tuple[StateFinding, ...], parameters: int) -> Group:
    first = members[0]
    name = _name(first)
    who = first.path if len(members) == 1 else f"{len(members)} {_plural(first.kind)}"
    if first.kind == "parameter" and len(members) == parameters > 1:
        who = f"all {parameters} parameters"
    what = first.match.text(first.current, first.path if len(members) == 1 else "")
    if name == "expert-map":
        what = _expert_text(members)
    event = f"{first.event.name} of step {first.event.step}" if first.event else ""
    does = {
        "changed": f"changed by {event}",
        "wrote": f"written by {event}",
        "left": f"{event} should have changed {'it' if len(members) == 1 else 'them'} and did not",
        "kept": f"kept over {event}, which brought other weights",
        "reused": f"given out again in {event}",
        "unknown": f"last seen right before {event}" if event else "no event explains it",
    }[first.role]
    return Group(name, f"{who}: {what}; {does}", members)


def _name(finding: StateFinding) -> str:
    form = finding.match.form
    if form == "freed while in use":
        return "kv-block-freed-in-use"
    if form == "not zeroed":
        return "recurrent-state-not-zeroed"
    if finding.kind == "kv":
        return "stale-kv-cache"
    if finding.kind == "cache":
        return "stale-derived-cache"
    if _is_other(finding) and _EXPERT.match(finding.path):
        return "expert-map"
    if _is_other(finding):
        return "swapped-parameters"
    if form == "equal":
        return "stale-weights" if finding.role == "changed" else "weights-not-updated"
    names = {"dtype-rounded": "extra-rounding", "permutation": "permuted-weights", "none": "unknown-weights"}
    names |= {"partly updated": "partly-updated-weights", "blend": "blended-weights"}
    return names.get(form, f"{form}-weights")


def _plural(kind: str) -> str:
    return {
        "parameter": "parameters",
        "buffer": "buffers",
        "cache": "derived caches",
        "kv": "KV blocks",
        "ssm": "recurrent slots",
    }[kind]


def _expert_text(members: Sequence[StateFinding]) -> str:
    """``expert i holds expert i + 1`` where one offset explains every member."""
    pairs, count = set(), 0
    for finding in members:
        assert finding.match.source is not None
        mine, theirs = _EXPERT.match(finding.path), _EXPERT.match(finding.match.source.name)
        if not mine or not theirs or mine["head"] != theirs["head"] or mine["tail"] != theirs["tail"]:
            return "they hold each other's weights"
        pairs.add((int(mine["index"]), int(theirs["index"])))
        count = max(count, int(mine["index"]) + 1, int(theirs["index"]) + 1)
    offsets = {(b - a) % count for a, b in pairs}
    if len(offsets) == 1:
        return f"expert i holds the weights of expert i + {offsets.pop()} (modulo {count})"
    return "an expert map: " + ", ".join(f"{a}<-{b}" for a, b in sorted(pairs))


def exit_code(drift: Drift) -> ExitCode:
    """0 when clean or found and repeated, 4 when it does not repeat or stays undecided."""
    if drift.onset is None:
        return ExitCode.OK
    return ExitCode.INCONCLUSIVE if drift.kind == "undecided" or not drift.repeats else ExitCode.OK


def document(drift: Drift) -> dict[str, Json]:
    """The ``zkl-steps`` document."""
    found = groups(drift.state, drift.parameters)
    record = next((r for r in drift.records if r.step == drift.onset), None)
    clean = drift.onset is None
    verdict = "clean" if clean else "found" if exit_code(drift) is ExitCode.OK else "undecided"
    return {
        "format": "zkl-steps",
        "version": 1,
        "bed": "grpo",
        "options": {
            name: getattr(drift.options, name)
            for name in ("layout", "steps", "seed", "dtype", "stack", "kv", "prefix_caching", "chunked_prefill")
        },
        "verdict": verdict,
        "claim": {
            "equality": "bytes",
            "scope": "log-probs of every generated token"
            + (" and of every prompt token the engine returned" if drift.options.prompt_log_probs else "")
            + ", every step",
            "repeats": 3 if drift.repeats else 1,
        },
        "onset": {
            "status": status(drift).value,
            "step": drift.onset,
            "last_zero": drift.onset - 1 if drift.onset and drift.onset > 1 else None,
            "diverged_steps": list(drift.steps),
            "steps_compared": len(drift.records),
        },
        "affected": {
            "sequences": list(record.diverged) if record else [],
            "of": len(record.sequences) if record else 0,
            "rule": drift.rule.to_json() if drift.rule else None,
        },
        "kind": drift.kind,
        "reason": drift.reason,
        "swap": {
            engine: {"cells": cells, "fault": v.fault.value, "reason": v.reason}
            for engine, (cells, v) in drift.swaps.items()
        },
        "state_since": {
            "status": drift.probe.status.value,
            "step": drift.probe.first_mismatch,
            "reason": drift.probe.reason,
            "probe": f"the data of step {drift.onset} on the engine as it was in every step",
        }
        if drift.probe
        else None,
        "event": drift.event.to_json() if drift.event else None,
        "between": [e.to_json() for e in drift.between],
        "explanations": [g.to_json() for g in found],
        "table": [*drift.table],
        "operator": _operator(drift, found),
        "captures": drift.captures,
        "metrics": [_metrics(r) for r in drift.records],
        "cells": [c.to_json() for c in drift.cells],
        "cost": drift.cost,
        "notes": drift.notes,
        "next": next_steps(drift, found),
    }


def _metrics(record: Any) -> dict[str, Json]:
    m = record.metrics.to_json()
    shown = ("gen_kl_error", "token_mult_prob_error", "js_divergence_error", "tokens", "exact", "max_abs")
    return {
        "step": record.step,
        "weight_version": record.version,
        "diverged": list(record.diverged),
        **{name: m[name] for name in shown},
    }


def _operator(drift: Drift, found: Sequence[Group]) -> Json:
    """What the captures say, short; the whole verdict is one ``zkl-debug diff`` away.

    Captures see what an operator was given by its caller, not what it finds in a cache or a weight. Where a new engine
    with the same weights gives zero, the operator is not to blame: it read state, and the state diff says which.
    """
    if not isinstance(drift.operator, dict):
        return None
    keys = ("verdict", "edge", "first", "affected", "refusal", "claim")
    told: dict[str, Json] = {key: drift.operator[key] for key in keys if key in drift.operator}
    first = told.get("first")
    if drift.kind == "state" and isinstance(first, dict) and first["kind"] in ("own", "propagated"):
        told["first"] = {**first, "kind": "uncaptured-state", "kind_of_captures": first["kind"]}
        told["read"] = [g.text for g in found]
    return told


def next_steps(drift: Drift, found: Sequence[Group]) -> list[str]:
    """What to do about it."""
    if drift.onset is None:
        return [f"zkl-debug bisect steps --bed grpo --steps {2 * drift.options.steps}"]
    steps = []
    names = {g.name for g in found}
    if "stale-kv-cache" in names:
        steps.append(
            "forget cached KV blocks after every refit, or kv_cache_management_mode: recompute; then run again"
        )
    if "stale-derived-cache" in names:
        steps.append(
            "refresh the cache named above after every refit (a model that stays in eval() never sees train())"
        )
    weights = names & {"weights-not-updated", "stale-weights", "swapped-parameters", "expert-map", "permuted-weights"}
    if weights:
        steps.append("check the weight sync at the event named above; layers are not to blame")
    if drift.operator is not None and not weights:  # with other weights a diff of layers says nothing
        kept = "the same command with --out DIR keeps the captures of the step for: zkl-debug diff DIR/train DIR/gen"
        steps.append(f"zkl-debug diff {drift.captures}/train {drift.captures}/gen" if drift.captures else kept)
    return steps


# ---- for a person ----------------------------------------------------------------------------------------------------


def lines(drift: Drift) -> Iterator[str]:
    """The report, with rich markup."""
    doc = document(drift)
    yield from _metric_lines(doc["metrics"])
    if drift.onset is None:
        yield f"[bold green]clean[/]: {len(drift.records)} steps, every generated token bitwise equal on both sides"
        yield from _cost(doc)
        return
    affected = doc["affected"]
    yield ""
    yield f"[bold red]step {drift.onset}[/]: {len(affected['sequences'])} of {affected['of']} sequences diverge: " + (
        ", ".join(str(s) for s in affected["sequences"][:12]) + (" ..." if len(affected["sequences"]) > 12 else "")
    )
    if drift.rule is not None:
        rule = drift.rule
        yield f"  they have in common: {rule.text} (precision {rule.precision:.2f}, recall {rule.recall:.2f})"
        if rule.same:
            yield f"  [dim]the same sequences: {'; '.join(rule.same)}[/]"
    yield f"  the step run again from its kept state {'gives the same bits' if drift.repeats else 'DIFFERS'}"
    yield ""
    yield f"[bold]{_KINDS.get(drift.kind, drift.kind)}[/]: {drift.reason}"
    for engine, (cells, _) in drift.swaps.items():
        yield f"  {engine:8} " + _swap_line(cells)
    if drift.probe is not None and drift.probe.first_mismatch is not None:
        since = drift.probe.first_mismatch
        if since != drift.onset and drift.kind == "state":
            yield f"  on the data of step {drift.onset} the engine's state already fails as it was in step {since}"
    yield ""
    yield from _state_lines(doc)
    yield from _operator_lines(doc["operator"])
    for finding in drift.table[:1]:
        yield f"  log-probs alone: {finding['name']}: {finding['text']}"
    yield from _cost(doc)
    for step in doc["next"]:
        yield f"next: {step}"


_KINDS = {
    "state": "state, not data",
    "data": "data, not state",
    "weights": "the weight values",
    "either": "state and data each alone",
    "interaction": "only this state on this data",
    "always": "from the first step on",
    "table": "the table of log-probs, not the model",
    "undecided": "undecided",
}


def _metric_lines(metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "[dim]step  weights  gen_kl_error  token_mult_prob_error  exact tokens  diverged[/]"
    for m in metrics:
        colour = "red" if m["diverged"] else "green"
        count = len(m["diverged"])
        yield (
            f"[{colour}]{m['step']:4}  v{m['weight_version']:<6}  {m['gen_kl_error']:<12.4g}  "
            f"{m['token_mult_prob_error']:<21.8g}  {m['exact']}/{m['tokens']:<10} {count or ''}[/]"
        )


def _swap_line(cells: Mapping[str, str]) -> str:
    order = ("old_weights_old_data", "new_weights_old_data", "old_weights_new_data", "new_weights_new_data")
    short = ("t-1/t-1", "t/t-1", "t-1/t", "t/t")
    return "  ".join(f"{name} {cells[key]}" for key, name in zip(order, short, strict=True)) + "   (state/data)"


def _state_lines(doc: Mapping[str, Any]) -> Iterator[str]:
    for group in doc["explanations"][:_SHOWN]:
        proof = {"bytes": "proved by bytes", "digest": "by digest", "age": "by age only"}[group["strength"]]
        yield f"[bold]{group['name']}[/]: {group['text']} [dim]({proof})[/]"
        if group["event"]:
            yield f"  at {group['event']['site']}"
    more = len(doc["explanations"]) - _SHOWN
    if more > 0:
        yield f"  and {more} more"
    if not doc["explanations"]:
        yield "no parameter, cache or KV block of the engine is other than the weights ask for"
    yield "  after the last good generation, to the end of the first bad one: " + ", ".join(
        f"{e['name']} ({e['step']})" for e in doc["between"] if e["name"] != "mode"
    )


def _operator_lines(operator: Json) -> Iterator[str]:
    if not operator:
        return
    if operator["verdict"] == "refused":
        yield f"  operators: not compared, {operator['refusal']['text']}"
    elif operator.get("first"):
        first = operator["first"]
        read = f": {'; '.join(operator['read'][:2])}" if operator.get("read") else ""
        yield (
            f"  first operator: {first['site']} ({first['kind']}{read}), {first['phase']}, sample {first['sample']}, "
            f"position {first['position']}, edge {operator['edge']}"
        )
    else:
        yield f"  operators: {operator['verdict']}"


def _cost(doc: Mapping[str, Any]) -> Iterator[str]:
    cost = doc["cost"]
    watch = cost["watch"]
    text = (
        f"loop {cost['loop_seconds']} s; watching it took {watch['seconds'] + watch['image_seconds']:.2f} s of that "
        f"({watch['slowdown']:.3f}x, {watch['snapshots']} snapshots)"
    )
    extra = f"; investigation {cost['investigation_seconds']} s" if "investigation_seconds" in cost else ""
    yield f"[dim]{text}{extra}[/]"
