"""Room on a disk: looked at before anything is written, and what to do when it ran out all the same."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zkl_debug.errors import UsageError
from zkl_debug.store.layout import StoreError

#: What to do where a bench cannot write.
FREE_SPACE = "free space, or --folder elsewhere"


def require_space(folder: Path | None, need: int, less: str) -> None:
    """Refuse what does not fit.

    Args:
        folder: where to write; None for the folder for temporary files.
        need: bytes.
        less: how to ask for less.

    Raises:
        UsageError: fewer bytes than ``need`` are free there.
    """
    where = Path(tempfile.gettempdir()) if folder is None else folder
    free = shutil.disk_usage(where).free
    if need > free:
        raise UsageError(f"{told(need)} to write, {told(free)} free in {where}", "room for it", f"{FREE_SPACE}; {less}")


def told(nbytes: float) -> str:
    """Bytes for a reader: ``4.3 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB" if nbytes < 1000 else f"{nbytes:,.0f} TB"


@contextlib.contextmanager
def room() -> Iterator[None]:
    """Where the disk is full inside, say what helps a bench: its captures are gone, there is nothing to repair.

    Raises:
        UsageError: something could not be written.
    """
    try:
        yield
    except StoreError as error:
        raise UsageError(error.found, next_step=FREE_SPACE) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        name = f" {error.filename}" if error.filename else ""
        raise UsageError(f"writing{name} failed: {error.strerror}", next_step=FREE_SPACE) from error
