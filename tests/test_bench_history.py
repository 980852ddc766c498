"""The history of a bench: every run is kept, and what changed is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from zkl_debug.bench.history import record
from zkl_debug.cli.bench import command
from zkl_debug.errors import UsageError

SETTINGS = {"size": 64, "rows": (1, 2)}


def document(seconds: float, extra: float = 1.0) -> dict[str, object]:
    figures = {"seconds": seconds, "found": True, "sizes": [{"rss": extra}, {"rss": 3}]}
    return {"format": "zkl-bench", "version": 1, "diff": figures}


def test_runs_are_appended_and_changes_told(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    (none,) = record(path, document(2.0), SETTINGS)
    assert none.endswith("no earlier run of this bench with these settings to compare with")
    record(path, {"format": "zkl-bench", "version": 1, "store": {"ratio": 9.0}}, SETTINGS)  # another bench
    (none,) = record(path, document(50.0), {"size": 16})  # other settings
    assert none.endswith("to compare with; 1 with others")
    head, *lines = record(path, document(3.0, 1.05), SETTINGS)
    assert head.endswith("a tenth or more: 1")
    assert lines == ["diff.seconds: 2 -> 3 (1.50 x)"]
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["document"]["diff"]["seconds"] for entry in entries if "diff" in entry["document"]] == [
        2.0,
        50.0,
        3.0,
    ]
    assert all(entry["versions"]["numpy"] and entry["machine"]["cores"] for entry in entries)


@pytest.mark.parametrize(
    "data",
    [
        bytes(range(128, 256)) + b"\n",
        b"[" * 100_000,
        b'{"format": "zkl-bench-history", "document": {}}\n',
        b"\n",
    ],
)
def test_a_hostile_history_is_told_before_anything_is_measured(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(data)
    for where in (path, tmp_path / "none" / "history.jsonl"):
        done = CliRunner().invoke(command, ["store", "--history", str(where)], standalone_mode=False)
        assert isinstance(done.exception, UsageError)
        assert done.exception.expected
    assert "history.jsonl: no folder" in str(done.exception)
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_compares_with_the_same_settings_alone(tmp_path: Path) -> None:
    """The size is in the settings; where it was written is not."""
    path = tmp_path / "history.jsonl"
    heads = []
    for size, folder in (("32MiB", tmp_path), ("64MiB", tmp_path), ("32MiB", tmp_path.parent)):
        done = CliRunner().invoke(
            command, ["store", "--size", size, "--folder", str(folder), "--history", str(path)], standalone_mode=False
        )
        assert done.exception is None
        assert "store over plain file" in done.output
        heads.append(done.output)
    assert "to compare with\n" in heads[0]
    assert "1 with others" in heads[1]
    assert "figures that changed by a tenth or more" in heads[2]


def test_a_file_that_is_no_history_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(UsageError, match="line 1 is no run of a bench"):
        record(path, document(1.0), SETTINGS)
    assert path.read_text() == "mine\n"
