"""A bundle: one operator of a mismatch with its inputs, outputs and weights, and a script that replays it alone.

Nothing of the machine goes in: no paths, no environment, no token beyond those of the rows used.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zkl_debug.beds import bundle_settings
from zkl_debug.beds.bundle_tensors import Stored, cut_linear, safetensors
from zkl_debug.bits import round_to
from zkl_debug.diff import diff_captures
from zkl_debug.diff.edges import named_row
from zkl_debug.diff.explain import gather_more
from zkl_debug.diff.explain.gather import Chosen, choose, port
from zkl_debug.diff.explain.model import Evidence, Keys, Port, Values
from zkl_debug.diff.model import Ints
from zkl_debug.diff.referee import formula_of
from zkl_debug.diff.suggest import looked_into
from zkl_debug.errors import Refused, UsageError
from zkl_debug.schema import Json, Phase

if TYPE_CHECKING:
    from zkl_debug.diff.comparison import Comparison
    from zkl_debug.diff.verdict import Verdict

_BYTES = 4 << 20


@dataclass(frozen=True)
class Bundle:
    """What was written.

    Attributes:
        folder: where.
        site, formula: what; an empty formula when none is known.
        rows: pairs of rows in it.
        size: bytes of all files.
        notes: what is missing, and why.
        settings: what the operator is given otherwise on each side: eps, temperature, positions ...
        replayed: by ``a`` and ``b``, what replay.py reproduced here: ``with``, ``missed`` of ``elements``.
    """

    folder: Path
    site: str
    formula: str
    rows: int
    size: int
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Json] = field(default_factory=dict)
    replayed: Mapping[str, Json] = field(default_factory=dict)

    @property
    def reproduced(self) -> bool:
        """Whether replay.py gives both sides bit for bit."""
        return bool(self.replayed) and all(told["missed"] == 0 for told in self.replayed.values())


def write_bundle(dir_a: Path, dir_b: Path, out: Path, site: str | None = None, rows: int = 32) -> Bundle:
    """Compare two captures and bundle one operator.

    Args:
        dir_a, dir_b: captures with payload.
        out: folder to create.
        site: canonical name of an output, with or without its port; default: the first divergence.
        rows: most pairs of rows; fewer where they are long (the tensors stay below about 4 MiB without weights).

    Raises:
        UsageError: the folder holds something, or there is no such site.
        Refused: nothing can be compared or nothing differs there, or its raw bits were not captured.
    """
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty", "a new folder", f"rm -r {out}, or another --out")
    verdict = diff_captures(dir_a, dir_b)
    comparison = verdict.comparison
    if comparison is None or verdict.edge is None or verdict.first is None:
        reason = verdict.refusal.text if verdict.refusal is not None else "no compared row differs"
        raise Refused(f"nothing to bundle: {reason}", "two captures that diverge")
    if not verdict.by_rows:
        raise Refused(f"{verdict.first.site} is no operator of a forward: nothing can be replayed", "an operator")
    at = find_site(comparison, site or looked_into(comparison, verdict.first))
    chosen = _rows(comparison, verdict.edge, at, rows)
    return _written(chosen, verdict, out, dir_a, dir_b)


def find_site(comparison: Comparison, name: str) -> int:
    """Place of an output by its name, with or without its port.

    Raises:
        UsageError: there is none.
    """
    names = {pair.name: i for i, pair in enumerate(comparison.sites) if not pair.parsed.is_input and not pair.is_input}
    if name in names:
        return names[name]
    owned = [i for full, i in names.items() if full.rsplit(":", 1)[0] == name]
    if owned:
        return owned[0]
    near = difflib.get_close_matches(name, list(names), n=1)
    raise UsageError(f"no output named {name!r}", near[0] if near else "a site of both captures", "zkl-debug diff A B")


def _rows(comparison: Comparison, edge: str, site: int, most: int) -> Chosen:
    """The earliest differing pairs of the site on the edge, as many as fit."""
    base = choose(comparison, edge)
    assert base is not None
    part, where, pair = comparison.pairs.slices[edge], comparison.where(site), comparison.sites[site]
    differs = part.start + np.flatnonzero(comparison.done[site].differs[part])
    if not len(differs):
        raise Refused(f"{pair.name} does not differ in any row of {edge}", "a site that differs", "zkl-debug diff A B")
    left, right = comparison.pairs.left[differs], comparison.pairs.right[differs]
    have = differs[where.bits[left] & where.bits[right]]
    if not len(have) or pair.differ:
        raise Refused(
            f"{pair.name}: {pair.differ or 'captured without its raw bits'}",
            "an output with its payload on both sides, of one dtype and width",
            "zkl-debug capture ... --level payload",
        )
    width = max(1, int(np.prod(pair.meta.row_shape, dtype=np.int64)))
    fits = max(1, min(most, _BYTES // (width * 4 * 6)))
    return replace(base, site=site, affected=differs, read=have[:fits])


def _written(chosen: Chosen, verdict: Verdict, out: Path, dir_a: Path, dir_b: Path) -> Bundle:
    comparison, pair = chosen.comparison, chosen.comparison.sites[chosen.site]
    formula = formula_of(Evidence(pair.parsed, pair.meta.semantic))
    notes: list[str] = []
    output = port(chosen, chosen.site, chosen.read)
    assert output is not None
    tensors: dict[str, Stored] = {}
    if formula == "attention":
        chosen, rows_of = _attention(chosen, tensors, notes)
        output = Port(_some(output.left, rows_of), _some(output.right, rows_of))
    else:
        _inputs(chosen, tensors)
    tensors["out/a"], tensors["out/b"] = _stored(output.left), _stored(output.right)
    space = comparison.space
    named = named_row(space, *chosen.rows(chosen.read))
    positions = space.position[named]
    tensors["positions"] = Stored(positions, "int64", positions.shape)
    left, right = chosen.rows(chosen.read)
    sides = (comparison.a, comparison.b)
    of = (sides[int(space.side[left[0]])].side, sides[int(space.side[right[0]])].side)
    forms = _blocks(chosen, tensors, notes) if formula == "linear" else ("", "")
    tensors |= bundle_settings.parameters(pair.parsed, of, dir_a, dir_b, notes, forms)
    settings = bundle_settings.differing(tensors)
    more, told = bundle_settings.fitted(verdict, pair.name, positions, space.sample[named].tolist(), tensors)
    if "positions/a" in more:
        del tensors["positions"]
    tensors |= more
    columns = None
    if formula == "linear":
        tensors, columns = cut_linear(tensors, _BYTES)
    if columns is not None:
        notes.append(f"the weight is large: {len(columns)} of its outputs are here, those that differ most often")
    meta = _metadata(chosen, formula, named, notes)
    meta["columns"] = None if columns is None else columns.tolist()
    meta["settings"] = settings | told
    out.mkdir(parents=True, exist_ok=True)
    (out / "tensors.safetensors").write_bytes(safetensors(tensors))
    meta["replayed"] = replayed = _replayed(out, formula, notes)
    (out / "metadata.json").write_text(json.dumps(meta, indent=2) + "\n")
    (out / "replay.py").write_text(Path(__file__).with_name("bundle_script.py").read_text())
    size = sum(file.stat().st_size for file in out.iterdir())
    return Bundle(out, pair.name, formula, len(chosen.read), size, tuple(notes), meta["settings"], replayed)


def _replayed(out: Path, formula: str, notes: list[str]) -> dict[str, Json]:
    """What replay.py makes of the bundle, by row of the pair: the arithmetic that comes closest, and what it misses."""
    if not formula:
        return {}
    import torch

    from zkl_debug.beds import bundle_script

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tensors = bundle_script.load(out / "tensors.safetensors")
        found = {side: bundle_script.replay(tensors, formula, side) for side in bundle_settings.LETTERS}
    finally:
        torch.set_num_threads(threads)
    told: dict[str, Json] = {}
    for side, (name, missed, got) in found.items():
        elements = tensors[f"out/{side}"].numel()
        told[side] = {"with": name, "missed": None if got is None else missed, "elements": elements}
        if got is None:
            notes.append(f"replay.py has nothing to replay {side} with: {name}")
        elif missed:
            notes.append(f"replay.py does not give {side}: closest is {name}, {missed} of {elements} elements miss")
    return told


def _metadata(chosen: Chosen, formula: str, named: Ints, notes: list[str]) -> dict[str, Json]:
    comparison, space = chosen.comparison, chosen.comparison.space
    pair = comparison.sites[chosen.site]
    left, right = chosen.rows(chosen.read)
    versions = [capture.manifest.get("versions") or capture.meta.get("versions") or {} for capture in _both(comparison)]
    return {
        "format": "zkl-bundle",
        "version": 1,
        "site": pair.name,
        "operator": pair.parsed.operator,
        "layer": pair.parsed.layer,
        "formula": formula,
        "edge": chosen.edge,
        "sides": {"a": _side(comparison, left), "b": _side(comparison, right)},
        "dtype": pair.meta.torch_dtype,
        "row_shape": list(pair.meta.row_shape),
        "differing_rows": len(chosen.affected),
        "rows": [
            {"sample": int(space.sample[r]), "position": int(space.position[r]), "token": int(space.token[r])}
            for r in named
        ],
        "versions": {name: versions[0].get(name) for name in ("torch", "megatron-core") if name in versions[0]},
        "notes": list(notes),
    }


def _both(comparison: Comparison) -> tuple[Any, Any]:
    return comparison.a, comparison.b


def _side(comparison: Comparison, rows: Ints) -> str:
    """``train (score)``: the label of the side and the phase of its rows."""
    space = comparison.space
    sides = {str(_both(comparison)[int(s)].manifest.get("side", "ab"[int(s)])) for s in np.unique(space.side[rows])}
    phases = {Phase(int(code)).name.lower() for code in np.unique(space.phase[rows])}
    return f"{', '.join(sorted(sides))} ({', '.join(sorted(phases))})"


# ---- tensors --------------------------------------------------------------------------------------------------------
def _stored(values: Values) -> Stored:
    return Stored(values.bits, values.dtype, (len(values.bits), *(values.shape or values.bits.shape[1:])))


def _some(values: Values, rows: list[int]) -> Values:
    return Values(values.bits[rows], values.dtype, values.shape)


def _inputs(chosen: Chosen, tensors: dict[str, Stored]) -> None:
    """The operator's input ports in the chosen pairs: once where both sides have the same bits."""
    owner = chosen.comparison.sites[chosen.site].parsed.owner
    for i, pair in enumerate(chosen.comparison.sites):
        if pair.parsed.owner != owner or not pair.parsed.is_input or pair.differ:
            continue
        values = port(chosen, i, chosen.read)
        if values is None:
            continue
        name = "in" if pair.parsed.port == "in.0" else pair.parsed.port
        if values.equal:
            tensors[name] = _stored(values.left)
        else:
            tensors[f"{name}/a"], tensors[f"{name}/b"] = _stored(values.left), _stored(values.right)


def _blocks(chosen: Chosen, tensors: dict[str, Stored], notes: list[str]) -> tuple[str, str]:
    """Block format of each side's operands, whose values take the place of the input; empty where there is none."""
    from zkl_debug.beds import bundle_blocks

    found = bundle_blocks.operands(chosen)
    forms = [bundle_blocks.form_of(one) for one in found]
    if not any(forms):
        return "", ""
    plain = {letter: tensors.get(f"in/{letter}", tensors.get("in")) for letter in bundle_settings.LETTERS}
    for letter, one, form in zip(bundle_settings.LETTERS, found, forms, strict=True):
        values = bundle_blocks.rows_of(one) if form else plain[letter]
        for name in ("in", f"in/{letter}"):
            tensors.pop(name, None)
        if values is None:
            notes.append(f"the operand of {letter} in {form or 'its dtype'} was not captured with its raw bits")
        else:
            tensors[f"in/{letter}"] = values
    both = tensors.get("in/a"), tensors.get("in/b")
    if None not in both:
        for letter in bundle_settings.LETTERS:
            del tensors[f"in/{letter}"]
        tensors |= bundle_settings.by_side({"in": both})
    words = " and ".join(f"{form} on {letter}" for letter, form in zip("ab", forms, strict=True) if form)
    notes.append(f"in and weight hold the values that the product ran over: {words}")
    return forms[0], forms[1]


def _attention(chosen: Chosen, tensors: dict[str, Stored], notes: list[str]) -> tuple[Chosen, list[int]]:
    """q of some rows with K and V of everything they read; the pairs are cut down to those rows."""
    pair = chosen.comparison.sites[chosen.site]
    found = gather_more.attention(chosen.comparison, chosen.read, pair, chosen.facts)
    if not found:
        notes.append("K and V of the rows read were not captured with their raw bits")
        return chosen, list(range(len(chosen.read)))
    kept = [index for index, _, _ in found]
    shape = found[0][1].query.shape
    for letter, which in (("a", 1), ("b", 2)):
        sides: list[Keys] = [entry[which] for entry in found]  # type: ignore[misc]
        lengths = np.cumsum([0, *(int(keys.own.sum()) for keys in sides)])
        tensors[f"starts/{letter}"] = Stored(lengths.astype(np.int64), "int64", lengths.shape)
        order = [np.flatnonzero(keys.own)[np.argsort(keys.position[keys.own], kind="stable")] for keys in sides]
        parts = {
            "in": np.stack([keys.query for keys in sides]),
            "in.1": np.concatenate([keys.key[at] for keys, at in zip(sides, order, strict=True)]),
            "in.2": np.concatenate([keys.value[at] for keys, at in zip(sides, order, strict=True)]),
        }
        for name, values in parts.items():
            dtype = pair.meta.torch_dtype
            tensors[f"{name}/{letter}"] = Stored(round_to(values, dtype), dtype, values.shape)
    notes.append(f"{len(kept)} rows of {shape[0]} heads, each with all keys it reads")
    return replace(chosen, read=chosen.read[kept]), kept
