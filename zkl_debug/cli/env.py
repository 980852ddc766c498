"""``zkl-debug env``: the variables that attach to a program which is started by something else."""

from __future__ import annotations

import os
from pathlib import Path

import click

from zkl_debug.attach.settings import FILE_VARIABLE, STARTUP, from_file
from zkl_debug.cli.common import emit_json
from zkl_debug.errors import UsageError

EPILOG = """\b
A file of settings, its keys as the options of zkl-debug capture:
  out: /results/captures/train
  side: train
  level: payload
  layers: 0-3
  budget: 4GiB
  steps: 2
\b
Examples:
  zkl-debug env train.yaml                # NAME=VALUE lines
  zkl-debug env train.yaml --yaml         # for env_vars of a NeMo-RL recipe, or of a Ray runtime_env
  env $(zkl-debug env train.yaml) python train.py"""


@click.command("env", epilog=EPILOG)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--yaml", "as_yaml", is_flag=True, help="Print them as lines of a YAML mapping.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(config: Path, as_yaml: bool, as_json: bool) -> None:
    """Print the environment variables under which a program captures its models by itself.

    CONFIG says what to capture. Every process that has these variables and runs a Python with zkl-debug installed is
    attached to, as under zkl-debug capture; workers of Ray too.
    """
    try:
        settings = from_file(config)
    except ValueError as error:
        raise UsageError(str(error), "a YAML or JSON file of settings", "zkl-debug env --help") from None
    path = os.environ.get("PYTHONPATH", "")
    values = {
        FILE_VARIABLE: str(config.resolve()),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *([path] if path else [])]),
    }
    if as_json:
        emit_json({"format": "zkl-env", "version": 1, "variables": values, "out": settings.out, "side": settings.side})
        return
    for name, value in values.items():
        click.echo(f"{name}: {value}" if as_yaml else f"{name}={value}")
