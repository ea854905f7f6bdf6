"""`spolia ps`: a server's models, and where its memory goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx

from spolia.cli.flags import no_answer, parse_url
from spolia.errors import SpoliaError

__all__ = ["report", "run"]


def run(url: str, *, key: str | None) -> None:
    """
    Raises:
        SpoliaError: the server is not there, or refuses.
    """
    address = f"{parse_url(url)}/v1/models"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        reply = httpx.get(address, headers=headers, timeout=10, trust_env=False)
        listing = reply.json()
        print(report(listing, time.time()), end="")
    except httpx.HTTPError as error:
        raise no_answer(address, error) from None
    except (KeyError, TypeError, ValueError):
        raise SpoliaError(f"{address} answered {reply.status_code}: {reply.text[:200]}") from None


def report(listing: Mapping[str, Any], now_s: float) -> str:
    """What `/v1/models` says, as a table.

    Args:
        now_s: Unix time.
    """
    rows = [("model", "state", "weights", "kv", "requests", "stays")]
    rows += [
        (
            card["id"],
            card["status"],
            _size(card["weights_bytes"]) if card["status"] == "ready" else "",
            _size(card["kv_bytes"]) if card["status"] == "ready" else "",
            f"{card['num_requests']}" + (f" ({card['num_queued']} wait)" if card["num_queued"] else ""),
            _stay(card, now_s),
        )
        for card in listing["data"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{card['id']}: {card['reason']}" for card in listing["data"] if card["status"] in ("loading", "failed")]
    memory = listing["memory"]
    limit = "" if memory["limit_bytes"] is None else f" of {_size(memory['limit_bytes'])}"
    used = memory["weights_bytes"] + memory["kv_bytes"]
    lines += ["", f"in use {_size(used)}{limit}; available on this machine {_size(memory['available_bytes'])}"]
    return "\n".join(lines) + "\n"


def _stay(card: Mapping[str, Any], now_s: float) -> str:
    if card["status"] != "ready":
        return ""
    if card["is_pinned"]:
        return "for ever"
    if card["expires_at"] is None:
        return "in use" if card["num_requests"] else "until its memory is wanted"
    return f"{max(0, round(card['expires_at'] - now_s))} s more"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.0f} MB"
