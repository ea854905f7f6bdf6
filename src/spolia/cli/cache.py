"""`spolia cache explain` and `spolia cache lint`: why prompts were, or will be, computed again."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from spolia.cli.flags import no_answer, parse_url
from spolia.cli.models import fetch
from spolia.errors import InvalidRequest
from spolia.models import ChatTemplate
from spolia.models.template_lint import lint_template, lint_turn
from spolia.server.conversations import Conversation, ConversationLog, Difference, compare_messages, history

__all__ = ["explain", "lint"]

_TIMEOUT_S = 30
_REASONING = ("reasoning", "reasoning_content", "thinking")
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_DATE = re.compile(
    r"\d{4}-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d\d:\d\d|"
    r"\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b",
    re.IGNORECASE,
)


def explain(request_id: str, url: str) -> None:
    """Print where the KV of a request's prompt came from, and why the rest was computed.

    Raises:
        InvalidRequest: the server does not know that request.
        SpoliaError: the server does not answer.
    """
    base = parse_url(url)
    try:
        reply = httpx.get(f"{base}/v1/cache/explain/{request_id}", timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise no_answer(url, error) from None
    if reply.status_code != 200:
        raise InvalidRequest(_message(reply))
    for choice in reply.json()["choices"]:
        print(f"choice {choice['index']}: {choice['num_cached_tokens']} of {choice['num_prompt_tokens']} tokens reused")
        for part in choice.get("ranges", ()):
            why = f"  {part['reason']}" if "reason" in part else ""
            print(f"  {part['start']:>7} .. {part['stop']:<7} {part['source']:<9}{why}")
        for line in _evidence(choice):
            print(f"  {line}")


def lint(model: str | None, traffic: Path | None) -> bool:
    """Print what makes prompts differ from those before them; True if there is nothing.

    Raises:
        InvalidRequest: neither a model nor traffic, or traffic that is none.
        ModelError: the model cannot be had or read.
    """
    if model is None and traffic is None:
        raise InvalidRequest("name a model, whose chat template is checked, or recorded requests with --traffic")
    is_clean = True
    template = None
    if model is not None:
        template = _template(model)
        findings = lint_template(template)
        is_clean = not findings
        for finding in findings:
            print(f"{finding.check}: from {finding.where} on, nothing is reused")
            print(f"  was    {finding.was!r}\n  is now {finding.is_now!r}")
        if not findings:
            print(f"{model}: its chat template renders history as it was computed")
    if traffic is not None:
        is_clean = _lint_traffic(traffic, template) and is_clean
    return is_clean


def _template(model: str) -> ChatTemplate:
    from spolia.models import load

    fetch(model)
    template = load(model).chat_template
    if template is None:
        raise InvalidRequest(f"{model} has no chat template: it is a base model, whose prompts are the client's own")
    return template


def _lint_traffic(path: Path, template: ChatTemplate | None) -> bool:
    """Compare each request with the earlier one that it has most in common with, and what a template makes of both."""
    log = ConversationLog(max_conversations=1 << 16, max_bytes=1 << 30)
    fields: Counter[tuple[str, str]] = Counter()
    num_requests = 0
    for number, body in _bodies(path):
        messages = history(body["messages"], tools=body.get("tools"), template=body.get("chat_template_kwargs"))
        num_requests += 1
        earlier = log.closest(b"", messages)
        difference = None if earlier is None else _surprise(log, earlier, messages)
        if earlier is not None and difference is not None:
            place, kind = _place(difference), difference.kind
            fields[place, kind] += 1
            at, cause = _at(difference, earlier, messages), _cause(difference, earlier, messages)
            print(f"line {number} differs from line {earlier.id}: {place} {kind}{at}{cause}")
        elif earlier is not None and template is not None:
            finding = lint_turn(template, earlier.messages[1:], messages[1:], body.get("tools"))
            if finding is not None:
                fields[finding.where, "rendered otherwise"] += 1
                print(f"line {number} renders line {earlier.id} otherwise: from {finding.where} on, nothing is reused")
                print(f"  was    {finding.was!r}\n  is now {finding.is_now!r}")
        log.add(Conversation(str(number), b"", messages, 0, ""))
    if not fields:
        print(f"{path}: {num_requests} requests, each of which is new or goes on from an earlier one")
    for (place, kind), count in fields.most_common():
        print(f"{count} x {place} {kind}", file=sys.stderr)
    return not fields


def _surprise(log: ConversationLog, earlier: Conversation, messages: list[Mapping[str, Any]]) -> Difference | None:
    """Where a request that resembles an earlier one departs from it, other than by asking something else at its end."""
    difference = compare_messages(earlier.messages, messages)
    if difference is None or difference.message >= min(len(messages), len(earlier.messages)):
        return None
    is_last = difference.message == len(messages) - 1 or difference.message == len(earlier.messages) - 1
    asks = messages[difference.message].get("role") == "user"
    return None if is_last and asks else difference


def _place(difference: Difference) -> str:
    return difference.field if difference.message == 0 else f"messages[{difference.message - 1}].{difference.field}"


def _at(difference: Difference, earlier: Conversation, messages: list[Mapping[str, Any]]) -> str:
    if difference.position is None:
        return ""
    was, is_now = (
        _value(history_[difference.message], difference.field)[max(0, difference.position - 12) :][:36]
        for history_ in (earlier.messages, messages)
    )
    return f" at character {difference.position}: {was!r} -> {is_now!r}"


def _cause(difference: Difference, earlier: Conversation, messages: list[Mapping[str, Any]]) -> str:
    """What it most likely is; "" where nothing is known."""
    if difference.kind == "reordered":
        return " (the same JSON with its keys in another order)"
    name = difference.field.rpartition(".")[2]
    if name in _REASONING and difference.kind == "dropped":
        return " (reasoning that the client left out)"
    if difference.position is None or difference.message == 0:
        return ""
    was, is_now = (_value(held[difference.message], difference.field) for held in (earlier.messages, messages))
    if "<think>" in was and "".join(_THOUGHT.sub("", was).split()) == "".join(_THOUGHT.sub("", is_now).split()):
        return " (reasoning that the client left out)"
    if messages[difference.message].get("role") != "system":
        return ""
    before = ", before the tools" if messages[0].get("tools") else ""
    around = slice(max(0, difference.position - 16), difference.position + 16)
    is_date = _DATE.search(was[around]) is not None and _DATE.search(is_now[around]) is not None
    return f" ({'a date' if is_date else 'a text that changes from request to request'}{before})"


def _value(message: Mapping[str, Any], field: str) -> str:
    value: Any = message
    for part in field.replace("[", ".").replace("]", "").split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return str(value)


def _bodies(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="traffic") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(f"{path}, line {number} is not JSON: {error}", param="traffic") from None
        messages = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest(
                f"{path}, line {number} is no chat request: it has no list of messages", param="traffic"
            )
        yield number, body


def _evidence(choice: Mapping[str, Any]) -> Iterator[str]:
    if choice.get("divergence") is not None:
        yield f"first difference at token {choice['divergence']}: {choice['text_around']!r}"
    if "evicted_by" in choice:
        ago = choice.get("evicted_s_ago")
        when = "" if ago is None else f" {ago:.1f} s before"
        for_whom = f" for {choice['evicted_for']}" if "evicted_for" in choice else ""
        yield f"given up by {choice['evicted_by']}{when}{for_whom}"
    if "message" in choice:
        message = choice["message"]
        where = "the settings" if "index" not in message else f"messages[{message['index']}], {message['role']}"
        yield f"{where}: {message['field']} {message['kind']}"


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {reply.status_code}"
