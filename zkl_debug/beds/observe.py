"""One run of a bed for a bisection: both sides once, under the probe, compared; the answer lies in files of its folder.

``verdict.json`` holds the zkl-verdict, ``run.json`` how the run ended. ``python -m zkl_debug.beds.observe SPEC`` makes
one run in a fresh interpreter; the fork server (:mod:`zkl_debug.beds.server`) makes them in forked processes.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zkl_debug.beds.bed import BedOptions
from zkl_debug.beds.run import BedContext, BedRun, run_bed
from zkl_debug.bisect.outcome import EXIT_UNTESTABLE
from zkl_debug.errors import ExitCode, UsageError
from zkl_debug.stack.switches import verify

VERDICT = "verdict.json"
RUN = "run.json"
_EXIT = {
    "identical": ExitCode.OK,
    "diverged": ExitCode.DIVERGED,
    "refused": ExitCode.REFUSED,
    "inconclusive": ExitCode.INCONCLUSIVE,
}


@dataclass(frozen=True)
class Spec:
    """What to run.

    Attributes:
        options: the bed.
        folder: where the run writes.
        keep: keep the two captures (otherwise only the verdict stays).
    """

    options: BedOptions
    folder: Path
    keep: bool = False

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` restores the record."""
        return {"options": asdict(self.options), "folder": str(self.folder), "keep": self.keep}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Spec:
        """The record of a JSON object."""
        options = {**body["options"], "sides": tuple(body["options"]["sides"])}
        return cls(BedOptions(**options), Path(body["folder"]), bool(body["keep"]))


def observe(spec: Spec) -> int:
    """Make the run and write its answer; never raises.

    Returns:
        Exit code: 0 identical, 1 diverged, 3 refused, 4 inconclusive, 125 untestable here, 70 the run failed.
    """
    started = time.monotonic()
    report: dict[str, Any] = {"failure": "", "untestable": "", "outputs": {}}
    try:
        code = _observe(spec, report)
    except UsageError as error:
        code, report["untestable"] = EXIT_UNTESTABLE, _one_line(error)
    except BaseException as error:
        traceback.print_exc()
        code, report["failure"] = 70, f"{type(error).__name__}: {_one_line(error)}"
    report = {"exit_code": code, **report, "seconds": round(time.monotonic() - started, 3)}
    _write(spec.folder / RUN, report)
    return code


def _observe(spec: Spec, report: dict[str, Any]) -> int:
    from zkl_debug.diff import diff_captures

    run = run_bed(spec.options, lambda context, side: _probed(context, side, spec.folder / side))
    verdict = diff_captures(spec.folder / "train", spec.folder / "gen").to_json()
    _write(spec.folder / VERDICT, verdict)
    if not spec.keep:
        for side in ("train", "gen"):
            shutil.rmtree(spec.folder / side)
    report["outputs"] = run.mismatches()
    report["failure"] = _contradiction(run, verdict)
    return int(_EXIT[verdict["verdict"]])


def _contradiction(run: BedRun, verdict: Mapping[str, Any]) -> str:
    """An identical verdict over captures whose programs returned different log-probs is no verdict."""
    if verdict["verdict"] != "identical" or run.zero:
        return ""
    counts = {name: n for name, n in run.mismatches().items() if n}
    return f"the captures are identical, but returned log-probs differ ({counts}): the probe misses what differs"


@contextmanager
def _probed(context: BedContext, side: str, folder: Path) -> Iterator[None]:
    """A digest capture of one side, after every switch was read back from the model that is about to run."""
    from zkl_debug.capture.api import Capture

    verify(context.switches, context.model)
    meta = {"switches_requested": [s.name for s in context.switches]}
    with Capture(context.model, folder, side, meta=meta) as capture:
        lengths = getattr(capture.adapter, "prompt_lens", None)
        if lengths is not None:
            lengths.update(context.prompt_lens)
        if side == "gen":
            context.generator.record_graphs()
        yield
        verify(context.switches, context.model)
        capture.add_manifest("switches", {s.name: s.reading(context.model).on for s in context.switches})


def _write(path: Path, body: Any) -> None:
    path.write_text(json.dumps(body) + "\n")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


if __name__ == "__main__":
    sys.exit(observe(Spec.from_json(json.loads(Path(sys.argv[1]).read_text()))))
