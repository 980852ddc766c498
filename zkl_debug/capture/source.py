"""Where in the observed program something happens: file and line, without the machine's paths."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_STDLIB = str(Path(os.__file__).parent)
_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parent.parent.parent)
_INSTALLED = ("site-packages/", "dist-packages/")


@dataclass(frozen=True)
class Where:
    """A place in the source.

    Attributes:
        file: relative to site-packages, or to the project the code belongs to.
        line: number, from 1; 0 when not known.
        function: qualified name.
    """

    file: str = ""
    line: int = 0
    function: str = ""

    @classmethod
    def of(cls, file: str, line: int, function: str) -> Where:
        """A place, its file made relative."""
        return cls(relative(file), line, function)


def relative(file: str) -> str:
    """A file below site-packages, or below this project, or its last three parts."""
    for mark in _INSTALLED:
        if mark in file:
            return file.rpartition(mark)[2]
    if file.startswith(_PACKAGE + "/"):
        return str(PurePath(file).relative_to(_PACKAGE))
    return "/".join(PurePath(file).parts[-3:])


def where() -> Where:
    """The innermost code that called into torch, neither torch's own nor the probe's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return Where()
    return Where.of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def _is_machinery(file: str) -> bool:
    if file.startswith(("<", _TORCH, _HERE)):
        return True
    return file.startswith(_STDLIB) and not any(mark in file for mark in _INSTALLED)
