"""Looking at this machine: the facts that decide which switches can be tried here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from zkl_debug.stack.needs import Facts, NeedKind
from zkl_debug.stack.switches import Switch

_TIMEOUT_SECONDS = 300
_SURVEY = "zkl_debug.engines.megatron.survey"
_MARK = "zkl-survey:"


def probe(switches: Iterable[Switch]) -> Facts:
    """The facts of this machine that the needs of ``switches`` ask about. Imports megatron-core in another process."""
    needs = [need for s in switches for need in s.needs]
    names = {name for need in needs if need.kind is NeedKind.PACKAGE for name in need.names}
    symbols = sorted({name for need in needs if need.kind is NeedKind.SYMBOL for name in need.names})
    packages = {name: version_of(name) for name in sorted(names)}
    answer, problem = _survey(symbols)
    if answer is None:
        return Facts("this machine", sm=0, packages=packages, problem=problem)
    fields = answer["fields"]
    return Facts(
        "this machine",
        sm=min((sm for _, sm in answer["gpus"]), default=0),
        gpus=tuple(name for name, _ in answer["gpus"]),
        packages=packages,
        fields=None if fields is None else {name: frozenset(listed) for name, listed in fields.items()},
        symbols=answer["symbols"],
        problem=answer["problem"],
    )


def version_of(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _survey(symbols: list[str]) -> tuple[dict[str, Any] | None, str]:
    command = [sys.executable, "-m", _SURVEY]
    try:
        done = subprocess.run(
            command, input=json.dumps(symbols), capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT_SECONDS} s"
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return answer, ""
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    return None, errors[-1].strip()[:200] if errors else f"exit code {done.returncode}"
