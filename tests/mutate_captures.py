"""Diffs damaged copies of a capture against a sound one, in a process of its own: one JSON line a copy.

usage: mutate_captures.py SOUND DAMAGED_FROM SCRATCH FIRST COUNT
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from zkl_debug.diff import diff_captures
from zkl_debug.errors import ZklError
from zkl_debug.store.reader import open_capture

VALUES: tuple[Any, ...] = (None, True, -1, 0, 2**63, 10**30, 1e308, "", "x" * 5000, [], {}, [[]], "../../etc/passwd")


def damage(folder: Path, seed: int) -> str:
    """Change one file of a capture; says how."""
    rng = random.Random(seed)
    manifest = folder / "manifest.json"
    if seed % 4 == 3:
        return _damage_json(manifest, rng)
    path = rng.choice(sorted(folder.glob("*.h5"))) if seed % 8 else manifest
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    kind = rng.choice(("flip", "byte", "cut", "zero", "insert", "remove", "move", "append", "fill"))
    if kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        data[at] = (data[at] + rng.randrange(1, 256)) % 256
    elif kind == "cut":
        del data[at:]
    elif kind == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.randrange(1, 40))
    elif kind == "remove":
        del data[at : at + rng.randrange(1, 40)]
    elif kind == "move":
        data[at : at + 128] = data[:128]
    elif kind == "append":
        data += rng.randbytes(512)
    else:
        data[at : at + 32] = b"\xff" * len(data[at : at + 32])
    path.write_bytes(bytes(data))
    return f"{path.name} {kind} at {at}"


def _damage_json(path: Path, rng: random.Random) -> str:
    document = json.loads(path.read_text())
    node, where = document, []
    while isinstance(node, dict | list) and node:
        key = rng.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
        where.append(key)
        if not (isinstance(node[key], dict | list) and node[key]) or rng.random() < 0.25:
            break
        node = node[key]
    if rng.random() < 0.3 and isinstance(node, dict):
        del node[where[-1]]
        path.write_text(json.dumps(document))
        return f"{path.name} without {where}"
    node[where[-1]] = rng.choice(VALUES)
    path.write_text(json.dumps(document))
    return f"{path.name} {where} = {str(node[where[-1]])[:40]}"


def content(folder: Path, payload: bool) -> dict[str, bytes]:
    """Everything a verdict rests on; payload only where it was asked to be read."""
    with open_capture(folder, partial=True) as capture:
        parts = {"frames": capture.frames.tobytes(), "rows": capture.rows.tobytes()}
        parts["states"] = repr(sorted(capture.states.items())).encode()
        for name, site in sorted(capture.sites.items()):
            parts[f"{name} meta"] = repr(site.meta).encode()
            parts[f"{name} rows"] = np.asarray(site.rows).tobytes()
            parts[f"{name} digest"] = np.asarray(site.digest).tobytes()
            if payload and site.payload_rows:
                parts[f"{name} payload"] = np.ascontiguousarray(site.payload(slice(0, site.payload_rows))).tobytes()
        return parts


def main() -> None:
    sound, source, scratch = map(Path, sys.argv[1:4])
    first, count = map(int, sys.argv[4:])
    whole = [content(source, payload) for payload in (False, True)]
    for seed in range(first, first + count):
        folder = scratch / f"m{seed}"
        shutil.copytree(source, folder)
        how = damage(folder, seed)
        print(json.dumps({"seed": seed, "how": how}), flush=True)  # a crash leaves this as the last line
        verdict = diff_captures(sound, folder, verify_bytes=bool(seed % 2))
        differ: list[str] = []
        if verdict.exit_code != 3:
            try:
                now, before = content(folder, bool(seed % 2)), whole[seed % 2]
                differ = [name for name in now | before if now.get(name) != before.get(name)]
            except ZklError as error:
                differ = [str(error)]
        reason = verdict.refusal.text if verdict.refusal is not None else ""
        print(json.dumps({"seed": seed, "how": how, "code": int(verdict.exit_code), "differ": differ, "why": reason}))
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
