"""Dumps as other tools write them, of a small model whose every row is a function of the tokens up to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zkl_debug.digest import digest_bytes, prefix_digests

WIDTH = 8
#: (module path, argument index or None for the output) in order of execution; three arguments are q, k and v.
LAYER = (
    ("input_layernorm", "output"),
    ("self_attn.qkv_proj", "output"),
    ("self_attn.attn", "inputs.0"),
    ("self_attn.attn", "inputs.1"),
    ("self_attn.attn", "inputs.2"),
    ("self_attn.attn", "output"),
    ("mlp", "inputs.0"),
    ("mlp", "output"),
)
SITES = [("model.embed_tokens", "output")] + [
    (f"model.layers.{layer}.{path}", port) for layer in range(2) for path, port in LAYER
]
REQUESTS = [[5, 9, 2, 7, 7, 1], [5, 9, 2, 8], [30, 31, 32, 33, 34]]
Tweak = Callable[[str, np.ndarray[Any, Any], int], np.ndarray[Any, Any]]


def row(site: str, prefix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values of a site at the end of a prefix, bfloat16-exact float32 [WIDTH]."""
    seed = digest_bytes(site.encode() + prefix.tobytes())
    values = np.random.default_rng(list(seed)).normal(size=WIDTH).astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def values(site: str, tokens: Sequence[int], start: int, tweak: Tweak | None, step: int) -> np.ndarray[Any, Any]:
    """Rows ``start`` to the end of a sequence, [n, WIDTH]."""
    prefixes = prefix_digests(np.asarray(tokens, np.int32))
    found = np.stack([row(site, prefixes[p]) for p in range(start, len(tokens))])
    return found if tweak is None else tweak(site, found, step)


@dataclass
class Dumper:
    """Writes files with the names and contents of SGLang's dumper.

    Args:
        folder: the dump's folder.
        rank, meta: as in its files.
        tags: further tags of every file name.
    """

    folder: Path
    rank: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)
    old: bool = False
    step: int = 0
    index: int = 0

    def dump(self, name: str, value: Any, **tags: Any) -> Path:
        self.index += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        counter = "forward_pass_id" if self.old else "step"
        full = {counter: self.step, "rank": self.rank, "dump_index": self.index, "name": name}
        full |= {"recompute_status": "disabled"} | tags
        path = self.folder / ("___".join(f"{k}={v}" for k, v in full.items()) + ".pt")
        torch.save(value if self.old else {"value": value, "meta": {**full, **self.meta}}, path)
        return path

    def forward(self, fed: Mapping[str, Any], parts: Sequence[tuple[Sequence[int], int]], tweak: Tweak | None) -> None:
        """One forward: what it was fed, then every site, in order."""
        for name, value in fed.items():
            self.dump(name, value)
        for path, port in SITES:
            site = f"{path}.{port}"
            data = np.concatenate([values(site, tokens, start, tweak, self.step) for tokens, start in parts])
            tensor = torch.from_numpy(data).to(torch.bfloat16)
            if self.packed:
                tensor = tensor[:, None]
            self.dump(f"non_intrusive__{site}", tensor)
        self.step += 1

    packed: bool = False


def engine_dump(
    folder: Path, *, prompt: int = 2, tweak: Tweak | None = None, rids: bool = True, **options: Any
) -> Dumper:
    """Three requests: prefilled in two steps (the second in chunks), then decoded one token a step."""
    dumper = Dumper(folder, **options)
    live = [(f"r{i}", tokens) for i, tokens in enumerate(REQUESTS)]
    done = [0] * len(live)

    def step(counts: Sequence[int]) -> None:
        parts: list[tuple[list[int], int]] = []
        ids: list[int] = []
        positions: list[int] = []
        totals: list[int] = []
        names: list[str] = []
        slots: list[int] = []
        for i, count in enumerate(counts):
            if not count:
                continue
            tokens, start = live[i][1][: done[i] + count], done[i]
            parts.append((tokens, start))
            ids += tokens[start:]
            positions += range(start, len(tokens))
            totals.append(len(tokens))
            names.append(live[i][0])
            slots.append(i + 4)
            done[i] += count
        fed: dict[str, Any] = {"input_ids": torch.tensor(ids), "seq_lens": torch.tensor(totals)}
        fed |= {"positions": torch.tensor(positions), "req_pool_indices": torch.tensor(slots)}
        dumper.forward(fed | ({"rids": names} if rids else {}), parts, tweak)

    step([prompt, prompt, 0])
    step([0, 0, 3] if rids else [0, 0, 4])
    if rids:
        step([0, 0, 1])  # the second chunk of a prompt, one token of it
    while any(done[i] < len(live[i][1]) for i in range(len(live))):
        step([int(done[i] < len(live[i][1])) for i in range(len(live))])
    return dumper


def training_dump(folder: Path, *, tweak: Tweak | None = None, **options: Any) -> Dumper:
    """The same requests in one packed forward, [t, 1, width]."""
    dumper = Dumper(folder, packed=True, **options)
    ids = [token for tokens in REQUESTS for token in tokens]
    cumulative = np.cumsum([0, *map(len, REQUESTS)])
    fed = {
        "input_ids": torch.tensor([ids]),
        "position_ids": torch.tensor([[p for t in REQUESTS for p in range(len(t))]]),
    }
    fed |= {"cu_seqlens_q": torch.from_numpy(cumulative.astype(np.int32))}
    dumper.forward(fed, [(tokens, 0) for tokens in REQUESTS], tweak)
    return dumper


def flip(site: str, step: int = -1, at: int = -1) -> Tweak:
    """A bit of one site flipped, in one step or in all of them."""

    def tweak(name: str, found: np.ndarray[Any, Any], now: int) -> np.ndarray[Any, Any]:
        if name != site or step not in (-1, now):
            return found
        changed = found.copy()
        changed[at, 0] *= 1.0078125  # one ulp of bfloat16
        return changed

    return tweak
