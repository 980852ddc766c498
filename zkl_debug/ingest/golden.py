"""Megatron-LM's golden inference values: one JSON file a run, log-probs of one side.

``{"0": {"input_prompt": ..., "generated_tokens": [...], "prompt_logprobs": [...], "generated_logprobs": [...],
"step_count": ...}, "throughput": ...}``. ``prompt_logprobs[i]`` belongs to prompt token i + 1 (token 0 has none), so
it is the row at position i + 1 here; generated tokens follow. Ids of prompt tokens are not in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zkl_debug.errors import Refused
from zkl_debug.logprobs.table import F64, UNKNOWN_TOKEN, LogprobTable, Skip, concat, make_table
from zkl_debug.schema import Json

MAX_BYTES = 512 << 20
_FIELDS = ("prompt_logprobs", "generated_logprobs", "logprobs", "generated_tokens")


def is_golden(document: Any) -> bool:
    """Whether a parsed JSON document is a golden file."""
    return isinstance(document, dict) and any(_is_request(value) for value in document.values())


def load_document(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Parse a JSON file of bounded size.

    Raises:
        Refused: when it is too large, unreadable or not JSON.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}", "a readable file") from None
    if len(data) > max_bytes:
        raise Refused(f"{path} is larger than {max_bytes} bytes", "a file within the limit")
    try:
        return json.loads(data)
    except RecursionError:
        raise Refused(f"{path} is nested too deeply", "a JSON file of golden values") from None
    except ValueError as error:
        raise Refused(f"{path} is not JSON, or cut off ({str(error)[:80]})", "a JSON file of golden values") from None


def read(path: Path, max_bytes: int = MAX_BYTES) -> LogprobTable:
    """The table of one golden file: side ``gen`` only, every row valid.

    Raises:
        Refused: when no request has log-probs.
    """
    document = load_document(path, max_bytes)
    if not isinstance(document, dict):
        raise Refused(f"{path} holds a JSON {type(document).__name__}", "an object with one entry a request")
    requests = {str(key): value for key, value in document.items() if _is_request(value)}
    tables, skipped = [], []
    numbers = _numbers(requests)
    for key, request in requests.items():
        try:
            tables.append(_request(numbers[key], request))
        except ValueError as error:
            skipped.append(Skip("request(s)", f"request {key[:40]}: {error}", damage=True))
    if not tables:
        why = f" ({skipped[0].reason})" if skipped else ""
        raise Refused(
            f"{path} holds no request with log-probs{why}", "entries with prompt_logprobs or generated_logprobs"
        )
    table = concat(tables).with_notes(*_count_note(document, tables), skipped=skipped)
    return _with_meta(table, {numbers[key]: request for key, request in requests.items()})


def _is_request(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(value.get(field), list) for field in _FIELDS)


def _numbers(requests: Mapping[str, Any]) -> dict[str, int]:
    """Sample number of each request: its key where all keys are numbers, else its place."""
    if all(key.isascii() and key.isdigit() and len(key) < 12 for key in requests):
        return {key: int(key) for key in requests}
    return {key: place for place, key in enumerate(requests)}


def _request(number: int, request: Mapping[str, Any]) -> LogprobTable:
    prompt, generated = (_floats(request, field) for field in ("prompt_logprobs", "generated_logprobs"))
    both = _floats(request, "logprobs")
    if not prompt.shape[0] and not generated.shape[0]:
        generated = both
    tokens = _tokens(request, generated.shape[0])
    n_prompt, n_generated = prompt.shape[0], generated.shape[0]
    if not n_prompt + n_generated:
        raise ValueError("no log-probs")
    notes = ["token ids of the prompt are not in the file: equal prompt texts are taken to be equal tokens"]
    if not n_prompt:
        notes.append("no prompt_logprobs: positions count from the first generated token (1)")
    if both.shape[0] and both.shape[0] != n_prompt + n_generated:
        notes.append(f"logprobs holds {both.shape[0]} values, prompt and generated {n_prompt + n_generated} together")
    count = n_prompt + n_generated
    with np.errstate(over="ignore"):
        values = np.concatenate([prompt, generated]).astype(np.float32)
    return make_table(
        sample=np.full(count, number, np.int64),
        position=np.arange(1, count + 1),
        token=np.concatenate([np.full(n_prompt, UNKNOWN_TOKEN, np.int64), tokens]),
        gen=values,
        generated=np.arange(count) >= n_prompt,
        notes=notes,
    )


def _floats(request: Mapping[str, Any], field: str) -> F64:
    value = request.get(field)
    if value is None:
        return np.zeros(0)
    try:
        array = np.array(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{field} is not a list of numbers") from None
    if array.ndim != 1:
        raise ValueError(f"{field} is not a flat list")
    return array


def _tokens(request: Mapping[str, Any], count: int) -> Any:
    values = _floats(request, "generated_tokens")
    if not values.shape[0]:
        return np.full(count, UNKNOWN_TOKEN, np.int64)
    if values.shape[0] != count:
        raise ValueError(f"{values.shape[0]} generated tokens, but {count} generated log-probs")
    if not (np.isfinite(values) & (values == np.floor(values)) & (values >= 0) & (values < 2**31)).all():
        raise ValueError("generated_tokens holds a value that is no token id")
    return values.astype(np.int64)


def _count_note(document: Mapping[str, Any], tables: list[LogprobTable]) -> list[str]:
    """Whether the prompt log-probs are as many as the engine's prefilled tokens say (one request only)."""
    total = document.get("lifetime_prefill_token_count")
    prompt = int((~tables[0].generated).sum())
    if len(tables) != 1 or type(total) is not int or not prompt or total == prompt + 1:
        return []
    return [
        f"{prompt} prompt log-probs, but {total} prefilled tokens: with prefix caching generated values can be folded "
        "in, or cached tokens have none"
    ]


def _with_meta(table: LogprobTable, requests: Mapping[int, Mapping[str, Any]]) -> LogprobTable:
    """Facts of the run that pairing and findings use."""
    meta: dict[str, Json] = {"format": "golden", "sampled": True}
    texts = {str(n): r["input_prompt"] for n, r in requests.items() if isinstance(r.get("input_prompt"), str)}
    steps = {str(n): r["step_count"] for n, r in requests.items() if type(r.get("step_count")) is int}
    counts = {
        str(n): int((~table.generated & (table.sample == n)).sum()) + 1
        for n in requests
        if (~table.generated & (table.sample == n)).any()
    }
    meta |= {"prompt_text": texts, "engine_steps": steps, "prompt_tokens": counts}
    columns = {name: getattr(table, name) for name in ("step", "sample", "position", "token", "gen", "generated")}
    return make_table(**columns, meta=meta, notes=table.notes, skipped=table.skipped)
