"""Probe code runs guarded: whatever happens in it, the program goes on."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from zkl_debug.errors import ProbeError

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession


class Guard:
    """Probe code runs inside it: without gradients and modes of the program, and without harm to it.

    The program issues nothing meanwhile, so the digests asked for inside go out together, at the end. Every site of a
    forward passes through here, so it costs next to nothing where no mode is active.
    """

    __slots__ = ("_grad", "_kernels", "_modes", "_session", "_where")

    def __init__(self, session: CaptureSession, where: str) -> None:
        self._session, self._where = session, where

    def __enter__(self) -> None:
        self._kernels = self._session.kernels
        self._kernels.hold()
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch._C._set_grad_enabled(False)
        self._modes: Any = None
        if _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():  # type: ignore[no-untyped-call]
            self._modes = _disable_current_modes()
            self._modes.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> bool:
        try:
            self._session.release(self._kernels)
        except Exception as failure:
            error = error or failure
        if self._modes is not None:
            self._modes.__exit__(None, None, None)
        if self._grad:
            torch._C._set_grad_enabled(True)
        if not isinstance(error, Exception):
            return False
        _fail(self._session, self._where, error)
        return True


def _fail(session: CaptureSession, where: str, error: Exception) -> None:
    """Disable the probe, remember why and say so on stderr.

    Raises:
        ProbeError: in strict mode.
    """
    text = f"{where}: {type(error).__name__}: {error}"
    session.errors.append(text)
    session.enabled = False
    session.drop_frames()
    if session.options.strict:
        raise ProbeError(f"the probe failed at {text}") from error
    print(f"zkl-debug: the probe failed and is off from here on; the program goes on. {text}", file=sys.stderr)
    for line in traceback.format_exception(error)[-4:]:
        print("  " + line.rstrip().replace("\n", "\n  "), file=sys.stderr)
