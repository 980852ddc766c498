"""Every notebook runs from top to bottom on a CPU, and is committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stripped(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert all(
        not c.get("outputs") and c.get("execution_count") is None for c in notebook.cells if c.cell_type == "code"
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    for cell in notebook.cells:
        last = cell.source.rstrip().rpartition("\n")[2]
        if cell.cell_type == "code" and last.startswith("viz."):
            shown = [name for output in cell.outputs for name in output.get("data", {})]
            assert "image/png" in shown, f"no picture is shown by: {last}"
