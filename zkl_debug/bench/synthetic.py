"""Synthetic captures of any size: many ranks, layers and sites, digests only, with single bits flipped where wanted.

The digest of a row at a site is a function of the site, the sample and the position alone, so the two sides agree
wherever nothing was planted, although they hold the samples on other ranks, in another order and in other frames.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zkl_debug.bench.children import writing
from zkl_debug.digest import weights_at
from zkl_debug.errors import ZklError
from zkl_debug.schema import U64, Phase, SiteBlock, SiteKind, SiteMeta, parse_site
from zkl_debug.store.build import make_frame, make_rows
from zkl_debug.store.layout import MANIFEST, part_path, segment_path
from zkl_debug.store.manifest import finalize_manifest, read_json, write_json
from zkl_debug.store.writer import CaptureWriter

_VOCAB = 32000
_HIDDEN = 4096
_DIGEST_BYTES = 20  # of a row at a site: the digest, and the number of the row
_FILE_BYTES = 32 << 10
_SITE_BYTES = 3200  # of a site in a file, whatever its rows: measured 3000 to 3100
# Sites of a layer in execution order, as a probed megatron-core layer has them.
_LAYER_SITES = (
    "input_layernorm:in",
    "input_layernorm:out",
    "self_attention.linear_qkv:in",
    "self_attention.linear_qkv:out",
    "self_attention/qkv:out.0",
    "self_attention/qkv:out.1",
    "self_attention/qkv:out.2",
    "self_attention/rope.q:in",
    "self_attention/rope.q:out.0",
    "self_attention/rope.k:in",
    "self_attention/rope.k:out.0",
    "self_attention/kv_write:out.0",
    "self_attention/kv_write:out.1",
    "self_attention.core_attention:in",
    "self_attention.core_attention:in.1",
    "self_attention.core_attention:in.2",
    "self_attention.core_attention:out",
    "self_attention.linear_proj:in",
    "self_attention.linear_proj:out",
    "self_attention:out",
    "/residual.attention:out.0",
    "pre_mlp_layernorm:in",
    "pre_mlp_layernorm:out",
    "mlp.linear_fc1:in",
    "mlp.linear_fc1:out",
    "mlp/activation:out.0",
    "mlp.linear_fc2:in",
    "mlp.linear_fc2:out",
    "mlp:out",
    "/residual.mlp:out.0",
)


@dataclass(frozen=True)
class Flip:
    """One bit of one digest of side B: the site by its number, the row, and the bit (0 .. 127)."""

    site: int
    sample: int
    position: int
    bit: int = 0


@dataclass(frozen=True)
class Synthetic:
    """Size of a pair of captures.

    Attributes:
        digests: rows times sites of one side, about; every rank has the same number of rows, at least one.
        ranks, layers: files and layers; a layer has thirty sites.
        seed: of tokens and digests.
    """

    digests: int
    ranks: int = 64
    layers: int = 48
    seed: int = 0

    @property
    def sites(self) -> int:
        """Sites of a side."""
        return self.layers * len(_LAYER_SITES)

    @property
    def positions(self) -> int:
        """Rows of a rank: one sample of that many tokens."""
        return max(1, round(self.digests / (self.ranks * self.sites)))

    @property
    def total(self) -> int:
        """Digests of one side, exactly."""
        return self.positions * self.ranks * self.sites

    @property
    def nbytes(self) -> int:
        """Bytes on disk of both sides while they are written, about: the log of a rank under way counts as well."""
        fixed = 2 * self.ranks * (_FILE_BYTES + self.sites * _SITE_BYTES)
        return fixed + 2 * _DIGEST_BYTES * (self.total + self.total // self.ranks)


def site_metas(size: Synthetic) -> list[SiteMeta]:
    """The sites of both sides, in execution order."""
    metas: list[SiteMeta] = []
    for layer in range(size.layers):
        for suffix in _LAYER_SITES:
            dot = "" if suffix.startswith("/") else "."
            name = f"decoder.layers.{layer}{dot}{suffix}"
            parsed = parse_site(name)
            kind = SiteKind.TAP if parsed.op else SiteKind.MODULE
            semantic = "core_attention" if parsed.operator == "core_attention" else ""
            metas.append(
                SiteMeta(name, kind, layer, len(metas), parsed.port, "bfloat16", (_HIDDEN,), semantic=semantic)
            )
    return metas


def sample_tokens(size: Synthetic, sample: int) -> NDArray[np.int32]:
    """Tokens of a sample, [positions] int32."""
    rng = np.random.default_rng([size.seed, sample])
    return rng.integers(0, _VOCAB, size.positions).astype(np.int32)


def _digests(size: Synthetic, sample: int) -> tuple[U64, U64]:
    """What the digests of a sample are made of: rows [positions, 2], and an odd factor and an offset of each site."""
    rows = np.random.default_rng([size.seed, sample, 1]).integers(0, 1 << 64, (size.positions, 2), dtype=np.uint64)
    sites = weights_at(np.arange(2 * size.sites, dtype=np.uint64) + np.uint64(size.seed << 20)).reshape(-1, 2)
    return rows, sites


def write_side(root: Path, size: Synthetic, side: str, flips: Sequence[Flip] = ()) -> Path:
    """Write one side, ``train`` (one frame a rank, samples by rank) or ``gen`` (two frames, ranks shuffled).

    Args:
        root: new or empty folder.
        size: how much.
        side: ``train`` or ``gen``.
        flips: bits to flip.

    Returns:
        Path of the manifest.
    """
    metas = site_metas(size)
    for rank in range(size.ranks):
        _write_rank(root, size, side, rank, metas, flips)
    if size.ranks > 1:
        return finalize_manifest(root, size.ranks)
    return root / MANIFEST


def rewrite_ranks(root: Path, size: Synthetic, side: str, flips: Sequence[Flip], restore: Iterable[Flip] = ()) -> None:
    """Write again only the ranks that hold the rows of ``flips``, and of ``restore``, whose bits go back.

    The manifest is put together anew from the old one and the parts of those ranks.
    """
    assert size.ranks > 1
    metas = site_metas(size)
    old = read_json(root / MANIFEST)
    (root / MANIFEST).unlink()
    for rank in sorted({_rank_of(size, side, flip.sample) for flip in [*flips, *restore]}):
        segment_path(root, rank, 0).unlink()
        _write_rank(root, size, side, rank, metas, flips)
        part = read_json(part_path(root, rank))
        part_path(root, rank).unlink()
        place = next(k for k, entry in enumerate(old["segments"]) if entry["rank"] == rank)
        old["segments"][place] = part["segments"][0]
    write_json(root / MANIFEST, old)


def _sample_of(size: Synthetic, side: str, rank: int) -> int:
    """Sample of a rank: generation has them elsewhere."""
    if side == "train":
        return rank
    return int(np.random.default_rng([size.seed, 2]).permutation(size.ranks)[rank])


def _rank_of(size: Synthetic, side: str, sample: int) -> int:
    return next(rank for rank in range(size.ranks) if _sample_of(size, side, rank) == sample)


def _write_rank(
    root: Path, size: Synthetic, side: str, rank: int, metas: Sequence[SiteMeta], flips: Sequence[Flip]
) -> None:
    sample = _sample_of(size, side, rank)
    tokens = sample_tokens(size, sample)
    base, factors = _digests(size, sample)
    mine = [flip for flip in flips if side != "train" and flip.sample == sample]
    phase = Phase.SCORE if side == "train" else Phase.PREFILL
    writer = CaptureWriter(root, side=side, rank=rank, world=size.ranks, meta={"synthetic": size.seed})
    cut = size.positions if side == "train" else size.positions * 2 // 3
    with writing(writer):
        for number, (start, stop) in enumerate([(0, cut), (cut, size.positions)]):
            if start == stop:
                continue
            rows = make_rows(sample, tokens, start, stop, int(phase))
            index = np.arange(stop - start, dtype=np.uint32)
            digests = (_site_digests(base, factors, k, start, stop, mine) for k in range(len(metas)))
            blocks = [SiteBlock(meta, index, digest) for meta, digest in zip(metas, digests, strict=True)]
            frame = make_frame(number, phase, step=0, n_padded=stop - start, n_seqs=1, max_seqlen_q=stop - start)
            frame["n_rows"] = stop - start
            writer.write_frame(frame, rows, blocks)


def _site_digests(base: U64, factors: U64, site: int, start: int, stop: int, flips: Sequence[Flip]) -> U64:
    digest: U64 = base[start:stop] * factors[2 * site] + factors[2 * site + 1]
    for flip in flips:
        if flip.site == site and start <= flip.position < stop:
            digest[flip.position - start, flip.bit // 64] ^= np.uint64(1) << np.uint64(flip.bit % 64)
    return digest


def random_flip(size: Synthetic, rng: np.random.Generator) -> Flip:
    """A flip anywhere."""
    numbers: Any = rng.integers([size.sites, size.ranks, size.positions, 128])
    return Flip(*(int(n) for n in numbers))


def writing_command(root: Path, size: Synthetic, side: str, flips: Sequence[Flip]) -> list[str]:
    """The command line that writes one side in a process of its own; see :func:`write_side`."""
    what = {"root": str(root), "size": asdict(size), "side": side, "flips": [asdict(flip) for flip in flips]}
    return [sys.executable, "-m", "zkl_debug.bench.synthetic", json.dumps(what)]


def main(arguments: Sequence[str]) -> int:
    """What :func:`writing_command` starts: exit status 0, or 3 and the reason on stderr."""
    what = json.loads(arguments[0])
    try:
        flips = [Flip(**flip) for flip in what["flips"]]
        write_side(Path(what["root"]), Synthetic(**what["size"]), what["side"], flips)
    except (ZklError, OSError, MemoryError) as error:
        sys.stderr.write(error.found if isinstance(error, ZklError) else f"{type(error).__name__}: {error}")
        return 3
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a writer whose disk is full must not hold up the end
