"""What the installed megatron-core knows, as one JSON line: ``python -m zkl_debug.engines.megatron.survey < names``.

Run in a process of its own, so that whoever asks neither pays for the imports nor dies with them. Standard input is a
JSON list of ``module:attribute.attribute`` names to look for.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

#: Starts the one line of the answer; libraries may print before it.
MARK = "zkl-survey:"


def survey(symbols: list[str]) -> dict[str, Any]:
    """GPUs, fields of the two config classes, and which of ``symbols`` can be imported."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append([properties.name, 10 * properties.major + properties.minor])
    problem = ""
    fields: dict[str, list[str]] | None = None
    try:
        fields = config_fields()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return {"gpus": gpus, "fields": fields, "symbols": {s: has_symbol(s) for s in symbols}, "problem": problem}


def config_fields() -> dict[str, list[str]]:
    """Names of the fields of ``TransformerConfig`` and ``InferenceConfig`` (``dataclasses.fields``)."""
    import dataclasses

    from megatron.core.inference.config import InferenceConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {c.__name__: [f.name for f in dataclasses.fields(c)] for c in (TransformerConfig, InferenceConfig)}


def has_symbol(name: str) -> bool:
    """Whether ``module:attribute.attribute`` is there."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except Exception:
        return False
    return True


if __name__ == "__main__":
    print(MARK + json.dumps(survey(json.load(sys.stdin))))
