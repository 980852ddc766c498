"""What attached processes tell the command that started them, so that it can say why nothing was captured.

Standard library only. A process that was not started by the command, or runs on another node, tells nobody.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: Environment variable with the file that facts are added to, a line each.
VARIABLE = "ZKL_DEBUG_TOLD"

ATTACHED = "attached"
IMPORTED = "imported "  # + module of an engine
FOUND = "model found"
LACKS = "model lacks "  # + why the class of --model cannot be watched
FAILED = "failed "  # + class and error of a model whose capture could not begin


def tell(fact: str) -> None:
    """Add a fact. Never fails: it only explains."""
    path = os.environ.get(VARIABLE)
    if path:
        with contextlib.suppress(OSError), Path(path).open("a") as file:
            file.write(fact.replace("\n", " ")[:500] + "\n")


def read(path: Path) -> tuple[str, ...]:
    """Facts of all processes, each once, in the order in which they were told."""
    with contextlib.suppress(OSError):
        return tuple(dict.fromkeys(path.read_text(errors="replace").splitlines()))
    return ()
