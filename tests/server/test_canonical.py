"""The canonicaliser moves what changes with each request out of the prefix, and says so."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from spolia.server.canonical import canonical

ASK = {"role": "user", "content": "Hello?"}
RULES = "You help people who ask for help, and you are kind to them."


@pytest.mark.parametrize(
    "line",
    [
        "x-anthropic-billing-header: cc_version=2.1; cch=3fa9b2c1;",
        "Request-ID: 8812",
        "session_id=4711",
        "Current date and time: 2026-12-01 21:09",
        "Today's date: Tuesday",
        "The current time is 2024-05-15 15:00:00 EST.",
        "user 550e8400-e29b-41d4-a716-446655440000",
    ],
)
def test_a_line_of_a_request_goes_to_the_end_as_it_is(line):
    changed, num_moved = canonical([{"role": "system", "content": f"{line}\n{RULES}"}, ASK])
    assert num_moved == 1
    assert changed[0]["content"] == RULES
    assert changed[1]["content"] == f"Hello?\n\n{line}"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": RULES}, ASK],
        [{"role": "system", "content": "Tell the date when asked.\nUse dates like 2024-05-15."}, ASK],
        [{"role": "system", "content": "cch=abc"}, ASK],  # nothing would be left
        [{"role": "user", "content": "session id: 5\nHello"}],  # the user's own words
        [{"role": "system", "content": f"cch=abc\n{RULES}"}],
        [{"role": "system", "content": [{"type": "text", "text": "cch=abc"}]}, ASK],
    ],
)
def test_everything_else_stays_where_it_is(messages):
    assert canonical(messages) == (messages, 0)


def test_with_it_a_nonce_no_longer_costs_the_prefix_and_usage_says_so(toy_url):
    def ask(nonce: int, **fields: Any) -> dict[str, Any]:
        system = {"role": "system", "content": f"cch={nonce:x}\n{RULES}"}
        body = {"messages": [system, ASK], "max_tokens": 1, **fields}
        return httpx.post(f"{toy_url}/v1/chat/completions", json=body, timeout=60).json()["usage"]

    def cached(usage: dict[str, Any]) -> int:
        return usage["prompt_tokens_details"]["cached_tokens"]

    ask(0xABC)
    plain = ask(0xDEF)
    assert cached(plain) < 20
    assert "moved_lines" not in plain
    ask(0x123, canonicalise=True)
    moved = ask(0x456, canonicalise=True)
    assert moved["moved_lines"] == 1
    assert cached(moved) >= len(RULES)
