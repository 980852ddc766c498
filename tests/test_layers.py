"""Dependencies point one way (DESIGN 4), read from the source; `zkl_debug.diff` needs neither torch nor megatron."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "zkl_debug"

#: What each part may import of the package, besides itself. Parts not named may import anything.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "schema": {"errors"},
    "bits": {"errors", "schema"},
    "digest": {"errors", "schema", "bits"},
    "digest_int8": {"errors", "schema", "bits", "digest"},
    "digest_torch": {"errors", "schema", "bits", "digest", "digest_int8"},
    "lanes": set(),
    "digest_triton": {"errors", "schema", "bits", "digest", "digest_int8", "digest_torch", "lanes"},
    "digest_cuda": {"errors", "schema", "bits", "digest", "lanes"},
    "digest_gpu": {"errors", "schema", "bits", "digest", "lanes", "digest_cuda", "digest_triton"},
    "marks": {"errors", "capture"},
    "cluster": {"errors"},
    "store": {"errors", "schema", "bits", "digest"},
    "diff": {"errors", "schema", "bits", "digest", "store", "cluster"},
    "viz": {"errors", "schema", "bits", "digest", "store", "diff"},
    "attach": {"errors", "schema", "bits", "digest", "store", "capture", "marks"},
    "capture": {
        "errors",
        "schema",
        "bits",
        "digest",
        "digest_int8",
        "digest_torch",
        "digest_gpu",
        "lanes",
        "marks",
        "store",
    },
}
#: Parts that may not import these packages at all, not even inside a function.
FORBIDDEN: dict[str, set[str]] = {
    "errors": {"torch", "megatron", "h5py"},
    "schema": {"torch", "megatron", "h5py"},
    "bits": {"torch", "megatron", "h5py"},
    "digest": {"torch", "megatron", "h5py"},
    "cluster": {"torch", "megatron", "h5py"},
    "store": {"torch", "megatron"},
    "diff": {"torch", "megatron"},
    "viz": {"torch", "megatron"},
    "ingest": {"megatron"},
    "cli": {"megatron"},
}


def part_of(module: str) -> str:
    """``zkl_debug.diff.rows`` -> ``diff``; the package itself is ``""``."""
    return module.split(".")[1] if "." in module else ""


def modules() -> dict[str, Path]:
    """Every module of the package, by dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = [ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def _is_typing_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, without what only a type checker sees."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt) and _is_typing_guard(child):
            continue
        yield child
        yield from _statements(child)


def imported(name: str, path: Path) -> set[str]:
    """Modules that a module imports at run time, anywhere in it."""
    found: set[str] = set()
    for node in _statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES)
    return found


@pytest.mark.parametrize("name", list(MODULES))
def test_imports_point_one_way(name: str) -> None:
    part = part_of(name)
    names = imported(name, MODULES[name])
    own = {part_of(other) for other in names if other.startswith("zkl_debug.")} - {part, ""}
    if part in ALLOWED:
        assert own <= ALLOWED[part], f"{name} imports {sorted(own - ALLOWED[part])}"
    foreign = {other.split(".")[0] for other in names}
    wrong = foreign & FORBIDDEN.get(part, set())
    assert not wrong, f"{name} imports {sorted(wrong)}"


def test_megatron_is_imported_under_engines_alone() -> None:
    users = {name for name, path in MODULES.items() if any(i.split(".")[0] == "megatron" for i in imported(name, path))}
    assert {name for name in users if not name.startswith("zkl_debug.engines")} == set()


def test_the_walk_sees_what_it_should(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "def f():\n    from zkl_debug import capture\n    import megatron.core\n"
    )
    assert imported("zkl_debug.diff.x", source) >= {"typing", "zkl_debug.capture", "megatron.core"}
    assert "torch" not in imported("zkl_debug.diff.x", source)


def test_diff_runs_without_torch() -> None:
    code = (
        "import sys\nfor name in ('torch', 'megatron'): sys.modules[name] = None\n"
        "import zkl_debug.diff, zkl_debug.diff.report, zkl_debug.store.reader, zkl_debug.cli.diff\n"
        "bad = [m for m in sys.modules if m.startswith(('zkl_debug.capture', 'zkl_debug.engines', 'matplotlib'))]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_import_of_diff_loads_no_rich_and_no_h5py() -> None:
    code = "import sys, zkl_debug.diff\nassert not {'rich', 'h5py', 'torch', 'matplotlib'} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
