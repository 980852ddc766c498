"""One self-contained HTML file for a verdict: no network, no script from elsewhere, readable without colours.

Everything the page shows is in it as JSON and drawn by the script of the template. Text of captures (site names,
tokens, messages) enters only as JSON strings or escaped text, so a hostile capture cannot run anything in the page.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

from zkl_debug.diff import Verdict
from zkl_debug.diff.report import headline, print_report
from zkl_debug.errors import UsageError
from zkl_debug.schema import Json
from zkl_debug.viz import html_data
from zkl_debug.viz.palette import KINDS

_TEMPLATE = "report.html.j2"
#: Letters that carry the kind in the model map where colour cannot.
SIGNS = {"absent": "-", "equal": "", "masked": "m", "propagated": "p", "own": "O", "uncaptured-state": "U"}
_MEANING = {
    "absent": "not compared",
    "equal": "every compared row is bitwise equal",
    "masked": "an input differs, the output is equal",
    "propagated": "an input differs, and so does the output",
    "own": "every captured input is equal, the output differs",
    "uncaptured-state": "as own, but a replay from the captured inputs agrees",
}


def document(verdict: Verdict, title: str = "") -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("zkl_debug.viz", "templates"), autoescape=True, undefined=StrictUndefined
    )
    template = environment.get_template(_TEMPLATE)
    compared = verdict.comparison is not None
    data: dict[str, Json] = {
        "verdict": verdict.to_json(),
        "map": html_data.model_map(verdict) if compared else None,
        "rows": html_data.row_maps(verdict) if compared else [],
        "kinds": _kinds(),
        "headline": headline(verdict),
    }
    data["verdict"].pop("sites", None)
    return str(
        template.render(
            title=title or "zkl-debug report",
            outcome=verdict.verdict,
            text=_text(verdict),
            first=verdict.first,
            edge=verdict.edge,
            kinds=_kinds(),
            data=_script_json(data),
        )
    )


def write_html(verdict: Verdict, path: Path, title: str = "") -> None:
    """Write the page; an existing file is replaced at once or not at all.

    Raises:
        UsageError: when the file cannot be written.
    """
    text = document(verdict, title)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}", "a file in a folder that exists and can be written"
        ) from error


def _text(verdict: Verdict) -> str:
    """The terminal report."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=110, color_system=None, force_terminal=False)
    print_report(verdict, console)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def _kinds() -> list[Json]:
    rows: list[Json] = []
    for label in html_data.LABELS:
        colour = KINDS[label][0] if label in KINDS else "transparent"
        rows.append({"label": label, "colour": colour, "sign": SIGNS[label], "meaning": _MEANING[label]})
    return rows


def _script_json(data: Json) -> str:
    """JSON that is safe between script tags: no ``<``, ``>`` or ``&`` can end or open anything."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")
