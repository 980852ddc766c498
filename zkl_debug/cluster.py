"""A Ray cluster, of this machine or one that runs: found, joined and left. Ray is imported when it is asked for."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zkl_debug
from zkl_debug.errors import UsageError

LOCAL = "local"
#: How often a task is run again whose worker is lost.
RETRIES = 4
_KNOCK_S = 5.0
_STARTS = 3


def import_ray() -> Any:
    """The module ``ray``.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise UsageError(
            "ray is not installed", "the ray extra", "pip install 'zkl-debug[ray]', or use --jobs"
        ) from None
    return ray


def cores() -> int:
    """Cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else (os.cpu_count() or 1)


def knock(address: str) -> None:
    """Find out whether anything listens at an address: Ray itself waits for minutes.

    Raises:
        UsageError: when nothing does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # ``auto`` and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"no Ray cluster at {address}: {error}", "the address of a cluster that runs, or local", "ray status"
        ) from None


@contextlib.contextmanager
def connected(ray: Any, address: str, jobs: int | None = None) -> Iterator[None]:
    """A connection to a cluster; the program's own, where it has one, is used and kept.

    While a connection of this function is open, stdout goes to stderr: Ray tells of lost workers on stdout, where a
    command's answer alone may be.

    Args:
        ray: the module.
        address: ``local`` for a cluster of this machine that lives as long as the connection, else the address of one
            that runs (``auto``, ``HOST:PORT``, ``ray://HOST:PORT``).
        jobs: workers of a local cluster; default one a core.

    Raises:
        UsageError: the cluster cannot be reached.
    """
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        # By that address Ray starts a cluster, even where one runs already on this machine.
        options |= {"address": "local", "num_cpus": jobs or cores(), "include_dashboard": False}
    else:  # other nodes get the code of this very package
        knock(address)
        package = str(Path(zkl_debug.__file__).parent)
        options |= {"address": address, "runtime_env": {"py_modules": [package]}}
    with _stdout_on_stderr():
        _join(ray, address, options)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """``sys.stdout`` for what Ray's threads print, and the descriptor for its libraries and the processes it starts."""
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a program without stdout or stderr has nothing to keep apart
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
        yield


def _join(ray: Any, address: str, options: dict[str, Any]) -> None:
    tries = _STARTS if address == LOCAL else 1  # on a busy machine a cluster may not come up in the time Ray gives it
    for left in reversed(range(tries)):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises plain ones
            ray.shutdown()
            if not left:
                raise UsageError(
                    f"no Ray cluster at {address}: {first_line(error)}",
                    "the address of a cluster that runs, or local",
                    "ray status",
                ) from None


def first_line(error: BaseException) -> str:
    """What an error of Ray says, without the pages behind it."""
    text = str(error).strip().splitlines()
    return text[0] if text else repr(error)
