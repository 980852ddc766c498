"""Runs when an interpreter of an attached program starts. It must never stop the program."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as little as possible is imported here


def _run_the_one_behind() -> None:
    """Only the first ``sitecustomize`` on the path is run by Python: run the one this file hides."""
    import importlib.machinery
    import importlib.util

    behind = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    _run_the_one_behind()
finally:
    try:
        from zkl_debug.attach.program import start

        start()
    except Exception as error:
        print(f"zkl-debug: not attached to this process: {type(error).__name__}: {error}", file=sys.stderr)
