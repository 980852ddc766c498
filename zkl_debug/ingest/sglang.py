"""Folders of SGLang's tensor dumper: one file a tensor, of SGLang itself or of a Megatron model it was put into.

File names are ``key=value`` parts joined by ``___``: ``step`` (older: ``forward_pass_id``), ``rank``, ``dump_index``,
``name``, and context such as ``layer_id``. A file holds ``{"value": tensor, "meta": {...}}`` (older: the tensor). What
the model was fed is dumped under fixed names: ``input_ids``, ``positions``, ``seq_lens``, ``rids`` and
``req_pool_indices`` by SGLang, ``input_ids``, ``position_ids``, ``cu_seqlens_q`` by Megatron.

Dumps made with activation recomputation hold a forward twice (the second is left out), gradients have no rows here, and
tensors of a rank under tensor or context parallelism are shards: they are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zkl_debug.errors import Refused
from zkl_debug.ingest import pickled
from zkl_debug.ingest.build import CaptureBuilder, Survey
from zkl_debug.ingest.calls import BadCallError, Call, Keys
from zkl_debug.ingest.fed import key_call
from zkl_debug.ingest.raw import RawTensor, state_of
from zkl_debug.ingest.sglang_names import FED, PARAMETER, Chosen, DumpFile, choose, site_name
from zkl_debug.schema import Json

_SHARDED = re.compile(r"(?:^|_)(?:tp|cp|sp|pp|ep|etp|tcp|etmp)_size$")


@dataclass(frozen=True)
class _Keyed:
    """Keyed forwards of a dump, what of it has token rows, and what was left out."""

    calls: Sequence[Call]
    survey: Survey
    left_out: Mapping[str, int]
    unkeyed: Mapping[str, int]


def ingest(
    folder: Path, out: Path, side: str, *, payload: bool, rank: int | None = None, steps: Collection[int] = ()
) -> dict[str, Json]:
    """Write the dump of one rank as a capture.

    Args:
        folder: the dump.
        out: folder to create.
        side: label of the system that was dumped.
        payload: keep bits, not digests alone.
        rank: which rank, where there are several.
        steps: only these steps of the dumper; empty for all.

    Returns:
        A summary: frames, rows, what was left out.

    Raises:
        Refused: when files cannot be trusted, tokens are not in the dump, or the weights change in it.
    """
    chosen = choose(folder, rank, steps)
    keyed = _key_all(chosen)
    weights = _weights(chosen)
    builder = CaptureBuilder(
        out, side, payload=payload, meta={"engine": "sglang dumper"}, refused=keyed.survey.refused()
    )
    builder.parameters(weights)
    stream = pickled.load([f.path for files in chosen.forwards for f in files if f.name not in FED])
    for files, call in zip(chosen.forwards, keyed.calls, strict=True):
        values = _values([f for f in files if f.name not in FED], stream)
        named = [(*site_name(file), value) for file, value in values if isinstance(value, RawTensor)]
        builder.frame(call, [(name, value, semantic) for name, semantic, value in named])
    left_out = {**chosen.skipped, **keyed.left_out}
    builder.notes += [f"left out: {count} {what}" for what, count in left_out.items()]
    if not weights:
        builder.notes.append(
            "the dump holds no weights (DUMPER_ENABLE_MODEL_VALUE=1 with dump_model writes them): they are taken to be "
            "the same in all of its steps, and as those of the other side"
        )
    builder.close({"unkeyed_rows": sum(keyed.unkeyed.values())})
    return {"frames": len(keyed.calls), "rows": builder.rows, "left_out": left_out, "unkeyed": dict(keyed.unkeyed)}


def _weights(chosen: Chosen) -> dict[str, Any]:
    """Records of the parameters in the dump, by name.

    Raises:
        Refused: when one of them has two values: rows of one prefix are then not expected to be equal.
    """
    found: dict[str, Any] = {}
    for file, value in _values(chosen.parameters, pickled.load([file.path for file in chosen.parameters])):
        if not isinstance(value, RawTensor):
            continue
        name = file.name.removeprefix(PARAMETER)
        record = state_of(name, value)
        if found.setdefault(name, record) != record:
            raise Refused(
                f"the dump holds two values of the weight {name}, the second at step {file.step}",
                "a dump of one version of the weights",
                "choose the steps of one version with --step N",
            )
    return found


def _key_all(chosen: Chosen) -> _Keyed:
    """Key every forward, and ask of every tensor whether it has token rows, before anything is written."""
    fed = [[f for f in files if f.name in FED] for files in chosen.forwards]
    stream = pickled.load([file.path for files in fed for file in files])
    keys, calls = Keys(), []
    for files, there in zip(chosen.forwards, fed, strict=True):
        values = {file.name: value for file, value in _values(there, stream)}
        try:
            calls.append(key_call(keys, values))
        except BadCallError as error:
            raise Refused(
                f"step {files[0].step} of the dump cannot be keyed: {error}",
                "what the model was fed beside each forward: input_ids, and seq_lens with positions, or cu_seqlens_q",
                "dump with the hooks on the model (register_non_intrusive_dumper), which write it",
            ) from None
    if not any(len(call.rows) for call in calls):
        raise Refused(
            f"no row of the dump can be keyed: {next(iter(keys.unkeyed), 'it holds no tokens')}",
            "requests from their first token on",
            "dump from a fresh server, without a prefix cache",
        )
    survey, left_out = Survey(), Counter[str]()
    others = [[f for f in files if f.name not in FED] for files in chosen.forwards]
    stream = pickled.load([file.path for files in others for file in files], shapes_only=True)
    for files, call in zip(others, calls, strict=True):
        for file, value in _values(files, stream):
            if isinstance(value, RawTensor):
                survey.look(site_name(file)[0], call, value.shape)
            else:
                left_out["values that are no tensors"] += 1
    return _Keyed(calls, survey, dict(left_out), dict(keys.unkeyed))


def _values(files: Iterable[DumpFile], stream: Iterator[pickled.Loaded]) -> Iterator[tuple[DumpFile, Any]]:
    """The value of each file, after what its meta says of parallelism was looked at."""
    for file in files:
        loaded = next(stream)
        if loaded.error:
            raise Refused(
                f"{file.path} is not used: {loaded.error}",
                "a file of torch.save that holds a tensor and plain data",
                "nothing in it was run; remove the file to go on without it",
            )
        tree = loaded.tree
        if isinstance(tree, dict) and "value" in tree:
            _refuse_shards(file, tree.get("meta"))
            tree = tree["value"]
        yield file, tree


def _refuse_shards(file: DumpFile, meta: Any) -> None:
    if not isinstance(meta, dict):
        return
    for info in (value for key, value in meta.items() if key.endswith("parallel_info") and isinstance(value, dict)):
        for key, size in info.items():
            if _SHARDED.search(key) and isinstance(size, int) and size > 1:
                raise Refused(
                    f"{file.path.name} was dumped with {key} {size}: its tensors may be shards",
                    "a run without tensor, pipeline, expert or context parallelism",
                    "dump a run of one GPU, or capture with zkl-debug, which knows the layout of each site",
                )
