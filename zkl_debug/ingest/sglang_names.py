"""What the file names of SGLang's tensor dumper say, and which of them are read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zkl_debug.errors import Refused, UsageError
from zkl_debug.ingest.raw import files_under

FED = frozenset(
    {"input_ids", "positions", "seq_lens", "req_pool_indices", "rids", "position_ids", "cu_seqlens_q", "cu_seqlens_kv",
     "qkv_format"}
)  # fmt: skip
PARAMETER = "param__"
_HOOKED = "non_intrusive__"
_PORT = re.compile(r"^(?:(?P<path>.*?)\.)?(?P<port>inputs|output)(?:\.(?P<rest>.+))?$")


@dataclass(frozen=True)
class DumpFile:
    """One file, by what its name says."""

    path: Path
    name: str
    step: int
    rank: int
    index: int
    layer: int
    recomputed: bool


def parse_name(path: Path) -> DumpFile | None:
    """What a file's name says, or None when it is not of the dumper."""
    tags = dict(part.split("=", 1) for part in path.stem.split("___") if "=" in part)
    numbers = {key: tags.get(key, "") for key in ("step", "forward_pass_id", "rank", "dump_index", "layer_id")}
    if "name" not in tags or not _is_number(numbers["dump_index"]):
        return None
    step = numbers["step"] or numbers["forward_pass_id"]
    if not _is_number(step) or not _is_number(numbers["rank"] or "0"):
        return None
    layer = numbers["layer_id"]
    return DumpFile(
        path,
        tags["name"],
        int(step),
        int(numbers["rank"] or 0),
        int(numbers["dump_index"]),
        int(layer) if _is_number(layer) else -1,
        tags.get("recompute_status") == "recompute",
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def looks_like(folder: Path) -> bool:
    """Whether a folder, or one folder in it, holds files of the dumper."""
    return next((True for path in folder.rglob("*.pt") if parse_name(path) is not None), False)


def site_name(file: DumpFile) -> tuple[str, str]:
    """(canonical site name, operator class) of a dumped tensor."""
    layer = f"layers.{file.layer}" if file.layer >= 0 else ""
    if not file.name.startswith(_HOOKED):
        return f"{layer}/{_clean(file.name)}:out.0", ""
    match = _PORT.match(_clean(file.name.removeprefix(_HOOKED)))
    if match is None:
        return f"{layer}/{_clean(file.name)}:out.0", ""
    path, rest = match["path"] or "", match["rest"] or ""
    inward = match["port"] == "inputs"
    port = "in" if inward else "out"
    semantic = "core_attention" if path.rpartition(".")[2] in ("attn", "core_attention") else ""
    if not rest or rest == "0":
        return f"{path}:{port}", semantic
    if rest.isdigit():
        return f"{path}:{port}.{int(rest)}", semantic
    return f"{path}/{rest.replace('.', '_')}:{port}.0", semantic


def _clean(name: str) -> str:
    """A name without the characters that separate the parts of a site name."""
    return re.sub(r"[:/#~\s]", "_", name)


@dataclass(frozen=True)
class Chosen:
    """What is read of one rank: each forward its files in order of dumping, and weights; and what was left out."""

    forwards: Sequence[Sequence[DumpFile]]
    parameters: Sequence[DumpFile]
    skipped: Mapping[str, int]


def choose(folder: Path, rank: int | None, steps: Collection[int] = ()) -> Chosen:
    """The files of a folder to read.

    Raises:
        UsageError: when the folder holds several dumps.
        Refused: when it holds none, or several ranks and none was chosen.
    """
    paths, links = files_under(folder, (".pt",))
    skipped: Counter[str] = Counter({"links, which are not followed": links} if links else {})
    files = []
    for path in paths:
        file = parse_name(path)
        if file is None:
            skipped["files not named by the dumper"] += 1
        else:
            files.append(file)
    if not files:
        raise Refused(f"{folder} holds no file of the dumper", "step=0___rank=0___dump_index=1___name=... .pt files")
    dumps = sorted({file.path.parent for file in files})
    if len(dumps) > 1:
        raise UsageError(
            f"{folder} holds {len(dumps)} dumps: {dumps[0].name}, {dumps[1].name} ...",
            "the folder of one of them",
            f"zkl-debug ingest {dumps[0]} ...",
        )
    ranks = sorted({file.rank for file in files})
    if rank is None and len(ranks) > 1:
        raise Refused(
            f"{folder} holds ranks {', '.join(map(str, ranks[:8]))}",
            "one rank: tensors of several are replicas or shards, which are not put together here",
            "choose one with --rank N; it is refused if it holds shards",
        )
    chosen = ranks[0] if rank is None else rank
    kept: list[DumpFile] = []
    parameters: list[DumpFile] = []
    for file in sorted(files, key=lambda f: (f.step, f.index)):
        why = _left_out(file, chosen, steps)
        if why:
            skipped[why] += 1
        else:
            (parameters if file.name.startswith(PARAMETER) else kept).append(file)
    if not kept:
        there = sorted({file.step for file in files})
        raise Refused(
            f"{folder} holds nothing of rank {chosen} that can be compared",
            f"ranks there: {ranks[:8]}, steps {there[0]} to {there[-1]}",
        )
    return Chosen(_forwards(kept), parameters, dict(skipped))


def _forwards(files: Sequence[DumpFile]) -> list[list[DumpFile]]:
    """One list a forward: a step may hold several, each of which begins by dumping what it was fed."""
    found: list[list[DumpFile]] = []
    fed: set[str] = set()
    for file in files:
        starts = not found or file.step != found[-1][-1].step or (file.name in FED and file.name in fed)
        if starts:
            found.append([])
            fed = set()
        if file.name in FED:
            fed.add(file.name)
        found[-1].append(file)
    return found


def _left_out(file: DumpFile, rank: int, steps: Collection[int]) -> str:
    if file.rank != rank:
        return "files of other ranks"
    if steps and file.step not in steps:
        return "files of other steps"
    if file.name.startswith(f"{_HOOKED}inputs."):
        return "arguments of the model, which are dumped under their own names"
    if file.name.startswith("grad__"):
        return "gradients"
    return "forwards run again for the backward pass" if file.recomputed else ""
