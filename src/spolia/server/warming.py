"""Prompts that are computed when a model has been loaded: see `read_prompts`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from spolia.errors import InvalidRequest, SpoliaError
from spolia.server.cache_admin import WarmRequest, warm
from spolia.server.logs import log_fields
from spolia.server.pins import Pins
from spolia.server.served import ServedModel

__all__ = ["read_prompts", "warm_up"]

logger = logging.getLogger("spolia.server")

_FORM = '{"prompt": "..."} or {"messages": [...]}'


def read_prompts(path: Path) -> list[WarmRequest]:
    """A file's prompts: a JSON object a line, as `/v1/cache/warm` takes it. One without `model` is for every model.

    Raises:
        InvalidRequest: it cannot be read, or a line is none; says which.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequest(
            f"--warm {path} cannot be read: {error.strerror}; name a file with {_FORM} a line", param="warm"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"--warm {path} is no text: {error}; it must have {_FORM} a line", param="warm") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            asked = msgspec.json.decode(line, type=WarmRequest)
        except msgspec.DecodeError as error:
            raise InvalidRequest(
                f"--warm {path}, line {number}, {line[:40]!r}, is no prompt to warm: {error}; write {_FORM} a line",
                param="warm",
            ) from None
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest(
                f"--warm {path}, line {number}, {line[:40]!r}, has not just one of prompt and messages", param="warm"
            )
        prompts.append(asked)
    return prompts


async def warm_up(served: ServedModel, prompts: Sequence[WarmRequest], pins: Pins) -> None:
    """Compute those that are for this model, one after the other; what cannot be computed is logged."""
    num_tokens = num_computed = 0
    for number, asked in enumerate(prompts, start=1):
        if asked.model not in (None, served.name):
            continue
        if asked.pin and served.kv_bytes is not None:  # it has been here before, and its pins are back without this
            continue
        try:
            done = await warm(served, asked, pins, max_waiting=len(prompts))
        except SpoliaError as error:
            log_fields(logger, "not warmed", {"model": served.name, "prompt": number, "reason": str(error)})
            continue
        num_tokens += done["num_tokens"]
        num_computed += done["num_computed_tokens"]
    log_fields(logger, "warmed", {"model": served.name, "tokens": num_tokens, "computed": num_computed})
