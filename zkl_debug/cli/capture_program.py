"""The part of ``zkl-debug capture`` that runs a program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zkl_debug.attach.launch import run_attached
from zkl_debug.attach.settings import Settings, model_parts
from zkl_debug.attach.why import nothing, unresolved_model
from zkl_debug.cli.common import stderr
from zkl_debug.errors import CaptureInvalid, ExitCode, Refused, UsageError
from zkl_debug.schema import parse_site
from zkl_debug.store.layout import MANIFEST
from zkl_debug.store.manifest import read_json


def run_program(command: Sequence[str], settings: Settings) -> int:
    """Run it and return its exit status; 3 where it succeeded but what was asked for was not captured.

    A summary goes to stderr only while a person watches: the program's streams stay its own.

    Raises:
        UsageError: a ``--model`` that is no MODULE:CLASS, a folder in use, a program that cannot be started.
    """
    if settings.model:
        try:
            model_parts(settings.model)
        except ValueError as error:
            raise UsageError(f"--model: {error}", "MODULE:CLASS of a module that the program imports") from None
    ended = run_attached(command, settings)
    if not ended.folders:
        return _refused(nothing(command, settings, ended.facts, ended.status), ended.status)
    if sys.stderr.isatty():
        for folder in ended.folders:
            stderr().print(f"captured {folder}", markup=False)
    wrong = unresolved_model(settings, ended.facts) or _empty(ended.folders, settings)
    return ended.status if wrong is None else _refused(wrong, ended.status)


def _refused(why: Refused, status: int) -> int:
    stderr().print(f"zkl-debug: {why}", markup=False, soft_wrap=True)
    return status or int(ExitCode.REFUSED)


def _empty(folders: Sequence[Path], settings: Settings) -> Refused | None:
    """What is wrong where ``--sites`` or ``--layers`` left nothing of a forward that ran."""
    if not settings.sites and settings.layers is None:
        return None
    for folder in folders:
        try:
            manifest = read_json(folder / MANIFEST)
        except CaptureInvalid:  # not closed: it is for `repair`
            continue
        names = manifest.get("sites") or {}
        if not manifest.get("frames"):
            continue
        if not names or (settings.layers is not None and not any(parse_site(name).layer >= 0 for name in names)):
            return Refused(
                f"{folder} holds no site{' of a layer' if names else ''}: no --sites pattern or no --layers range fits",
                f"patterns and layers that fit some of the {manifest.get('filtered_sites', 0)} sites that were seen",
                "capture without them into another DIR: zkl-debug inspect DIR --sites lists the names",
            )
    return None
