"""The history of a bench: every run is kept, and what changed is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zkl_debug.bench.history import record
from zkl_debug.errors import UsageError


def document(seconds: float, extra: float = 1.0) -> dict[str, object]:
    figures = {"seconds": seconds, "found": True, "sizes": [{"rss": extra}, {"rss": 3}]}
    return {"format": "zkl-bench", "version": 1, "diff": figures}


def test_runs_are_appended_and_changes_told(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    assert record(path, document(2.0)) == []
    assert record(path, {"format": "zkl-bench", "version": 1, "store": {"ratio": 9.0}}) == []  # another bench
    head, *lines = record(path, document(3.0, 1.05))
    assert head.endswith("a tenth or more: 1")
    assert lines == ["diff.seconds: 2 -> 3 (1.50 x)"]
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["document"]["diff"]["seconds"] for entry in entries if "diff" in entry["document"]] == [2.0, 3.0]
    assert all(entry["versions"]["numpy"] and entry["machine"]["cores"] for entry in entries)


def test_a_file_that_is_no_history_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(UsageError, match="line 1 is no run of a bench"):
        record(path, document(1.0))
    assert path.read_text() == "mine\n"
