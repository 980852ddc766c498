"""The HTML report: what it holds, that nothing in it can run, and that it opens in a real browser."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from test_diff_edges import ATTENTION, TRAIN, decode_only, gen
from test_diff_world import plant

from zkl_debug.cli.diff import command
from zkl_debug.diff import Verdict, diff_captures
from zkl_debug.diff.model import Kind
from zkl_debug.errors import UsageError
from zkl_debug.viz import html_data
from zkl_debug.viz.html import document, write_html

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
REFERENCE = Path(__file__).resolve().parents[1] / "captures/reference/h200-gpt-te-stack-off"


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    return diff_captures(TRAIN, gen(plant(ATTENTION, decode_only)))


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_map_has_every_site_and_its_kind(verdict: Verdict) -> None:
    data = data_of(document(verdict))
    model = data["map"]
    assert [site[0] for site in model["sites"]] == [pair.name for pair in verdict.comparison.sites]  # type: ignore[union-attr]
    cells = {site[0]: cell for site, cell in zip(model["sites"], model["edges"]["prefill-decode"], strict=True)}
    table = verdict.site_counts
    for row in table[table["edge"] == "prefill-decode"]:
        assert cells[row["site"]][1:4] == [row["compared"], row["mismatched"], row["own"]]
    assert cells[ATTENTION][0] == Kind.OWN
    assert [name for name, cell in cells.items() if cell[0] == Kind.OWN] == [ATTENTION]
    assert next(iter(model["edges"])) == verdict.edge, "the edge of the verdict is shown first"
    for layer in model["layers"]:
        columns = [site[2] for site in model["sites"] if site[1] == layer]
        assert columns == sorted(columns), "columns follow the order of execution"


def test_columns_merge_layers_of_two_kinds() -> None:
    named = [(f"d.layers.{n}.{tail}", n) for n, tails in ((0, "abe"), (1, "abcde")) for tail in tails]
    assert html_data._columns_in_order([("embed", -1), *named]) == list("abcde")


def test_row_maps_hold_every_pair(verdict: Verdict) -> None:
    first = data_of(document(verdict))["rows"][0]
    assert (first["edge"], first["site"]) == (verdict.edge, ATTENTION)
    rows = verdict.row_table(ATTENTION, verdict.edge)
    expected: dict[tuple[str, int], int] = {}
    for row in rows:
        key = (f"sample {row['sample']}", int(row["position"]))
        code = html_data.LABELS.index(str(row["kind"]))
        expected[key] = max(code, expected.get(key, 0))
    drawn = {
        (name, start + i): code
        for name, line in zip(first["names"], first["lines"], strict=True)
        for start, length, code in line
        for i in range(length)
    }
    assert drawn == expected
    assert sum(count for _, count in first["ulp"]["bins"]) + first["ulp"]["unknown"] == rows["mismatch"].sum()


def test_the_page_is_self_contained_and_escapes_what_captures_say(verdict: Verdict) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    bad = dataclasses.replace(verdict, explanations=({"name": hostile, "text": hostile, "evidence": {}},))
    page = document(bad, title=hostile)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://", document(verdict))
    assert data_of(page)["verdict"]["explanations"][0]["name"] == hostile


def test_refused_and_identical_verdicts_have_pages() -> None:
    refused = diff_captures(TRAIN, gen(feed=lambda _, p: p + 1))
    page = document(refused)
    assert data_of(page)["map"] is None
    assert refused.refusal is not None
    assert refused.refusal.code in page
    clean = data_of(document(diff_captures(TRAIN, gen())))
    assert clean["verdict"]["verdict"] == "identical"
    assert {cell[0] for cell in clean["map"]["edges"]["score-prefill"]} <= {Kind.EQUAL, Kind.ABSENT}


def test_the_command_writes_the_page_beside_its_output(tmp_path: Path) -> None:
    sides = [str(REFERENCE / side) for side in ("train", "gen")]
    out = tmp_path / "page.html"
    result = CliRunner().invoke(command, [*sides, "--json", "--html", str(out)], standalone_mode=False)
    verdict = json.loads(result.stdout)
    assert data_of(out.read_text())["verdict"]["first"] == verdict["first"]
    with pytest.raises(UsageError, match="cannot write"):
        write_html(diff_captures(*sides), tmp_path / "none" / "page.html")


needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium or chrome on this machine")


def opened(page: Path) -> str:
    """The document after its script ran."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    run = subprocess.run([BROWSER, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    return run.stdout


@needs_browser
def test_it_opens_in_a_browser(verdict: Verdict, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_html(verdict, page)
    dom = opened(page)
    assert re.search(r'data-ready="\d+"', dom), "the script ran to its end"
    assert dom.count('class="cell') == len(verdict.comparison.sites)  # type: ignore[union-attr]
    assert re.search(rf'class="cell first"[^>]*title="{re.escape(ATTENTION)}: own"', dom)


def facts_of(dom: str) -> str:
    """The table of facts and the line above it, without tags."""
    part = dom[dom.index('id="lead"') : dom.index('id="mapsec"')]
    return re.sub(r"<[^>]+>", " ", part)


@needs_browser
def test_the_page_says_what_the_terminal_says(verdict: Verdict, tmp_path: Path) -> None:
    write_html(verdict, tmp_path / "d.html")
    shown = facts_of(opened(tmp_path / "d.html"))
    assert "null" not in shown
    assert "undefined" not in shown
    on = REFERENCE.with_name("h200-gpt-te-stack-on")
    write_html(diff_captures(on / "gen"), tmp_path / "i.html")
    identical = facts_of(opened(tmp_path / "i.html"))
    assert "but only 95.8 % of the generated rows were compared" in identical, "what weakens it is beside it"
    assert "on both sides" not in identical
    write_html(diff_captures(on / "gen", tmp_path / "none"), tmp_path / "r.html")
    refused = facts_of(opened(tmp_path / "r.html"))
    assert "is not a folder" in refused
    assert "claim" not in refused, "nothing was compared, nothing is claimed"


@needs_browser
def test_a_large_model_opens_quickly(verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tails = [f"part.{i}:out" for i in range(30)]
    sites = [[f"decoder.layers.{n}.{tail}", n, i] for n in range(48) for i, tail in enumerate(tails)]
    cells = [[4 if n == 700 else 1, 131072, 9, 9, 0, 0, 0] for n in range(len(sites))]
    big = {"sites": sites, "tails": tails, "layers": list(range(48)), "edges": {"prefill-decode": cells}}
    codes = np.random.default_rng(0).integers(1, 5, 4096)
    line = [[i, 1, int(code)] for i, code in enumerate(codes)]  # no two rows alike: the longest a map can be
    rows = {"site": sites[700][0], "edge": "prefill-decode", "names": [f"sample {i}" for i in range(32)]}
    rows |= {"width": 4096, "lines": [line] * 32, "ulp": {"bins": [[0, 5]], "unknown": 0}}
    monkeypatch.setattr(html_data, "model_map", lambda _: big)
    monkeypatch.setattr(html_data, "row_maps", lambda _: [rows])
    page = tmp_path / "large.html"
    write_html(verdict, page)
    dom = opened(page)
    assert dom.count('class="cell') == 48 * 30
    ready = re.search(r'data-ready="(\d+)"', dom)
    assert ready is not None
    assert int(ready[1]) < 10_000, "milliseconds; under 2,000 on a quiet machine"
    print("opened in", ready[1], "ms")
