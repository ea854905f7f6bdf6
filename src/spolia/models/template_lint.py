"""Whether a chat template keeps prompts stable: what one turn computed must begin the next one's prompt.

Each check renders a small conversation twice, as two requests would, and compares texts. What it finds costs a cache
miss each turn, from the place that is named; the cure is in the template, or a session, which never renders history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, TypeAlias

from spolia.errors import InvalidRequest
from spolia.models.chat_template import ChatTemplate

__all__ = ["TemplateFinding", "lint_template", "lint_turn"]

Message: TypeAlias = Mapping[str, Any]

_SYSTEM = {"role": "system", "content": "You help."}
_ASK = {"role": "user", "content": "What is the weather?"}
_GO_ON = {"role": "user", "content": "And tomorrow?"}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a day.",
            "parameters": {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]},
        },
    }
]
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"day": "today"}'}}
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "Sunny."}
_REPLIES = {
    "a plain reply": "It is sunny.",
    "a reply that ends in a line break": "It is sunny.\n",
    "a reply that begins with a space": " It is sunny.",
    "a reply with reasoning": "<think>\nThe sky is blue.\n</think>\n\nIt is sunny.",
}
_CONTEXT = 24


@dataclass(frozen=True, slots=True)
class TemplateFinding:
    """A prompt that does not begin as the one before it ended.

    Attributes:
        check: what was tried.
        where: the part of the conversation, such as "messages[2].content", from which on nothing is reused.
        was, is_now: the text from there on, first as it was computed, then as it is rendered.
    """

    check: str
    where: str
    was: str
    is_now: str


def lint_template(template: ChatTemplate) -> list[TemplateFinding]:
    """What of this template costs reuse; nothing is the right answer.

    Messages that the template refuses (a system message, say, or tools) are left out of the checks.

    Raises:
        ModelError: the template is broken.
    """
    return [
        *_replies(template),
        *_growth(template),
        *_argument_order(template),
        *_repeats(template),
        *_dates(template),
    ]


def lint_turn(
    template: ChatTemplate, earlier: Sequence[Message], later: Sequence[Message], tools: Sequence[Message] | None
) -> TemplateFinding | None:
    """What two turns of one conversation cost: the prompt of `earlier` should begin that of `later`, which has more.

    None also where the template does not take them, or the later one is no later turn.
    """
    was, is_now = _render(template, earlier, tools), _render(template, later, tools)
    if len(later) <= len(earlier) or was is None or is_now is None or is_now.startswith(was):
        return None
    position = _first_difference(was, is_now)
    ends = [_render(template, earlier[:stop], tools, generate=False) for stop in range(1, len(earlier) + 1)]
    changed = next((i for i, text in enumerate(ends) if text is not None and len(text) > position), None)
    where = "the prompt of the answer" if changed is None else f"messages[{changed}].content"
    return _finding("two turns", where, was, is_now)


def _replies(template: ChatTemplate) -> Iterator[TemplateFinding]:
    """The prompt and what was generated after it begin the next prompt."""
    for check, reply in _REPLIES.items():
        for opening in ([_SYSTEM, _ASK], [_ASK]):
            messages = [*opening, {"role": "assistant", "content": reply}, _GO_ON]
            prompt, later = _render(template, opening, None), _render(template, messages, None)
            if prompt is None or later is None:
                continue
            finding = _compare(check, prompt + reply, later, len(prompt), f"messages[{len(opening)}].content")
            if finding is not None:
                yield finding
            break


def _growth(template: ChatTemplate) -> Iterator[TemplateFinding]:
    """The history of a conversation with tools begins that of the same conversation with one message more."""
    turns: list[Message] = [
        _ASK,
        _CALL,
        _RESULT,
        {"role": "assistant", "content": "It is sunny."},
        _GO_ON,
        _CALL,
        _RESULT,
    ]
    for messages in ([_SYSTEM, *turns], turns):
        texts = [_render(template, messages[:stop], _TOOLS, generate=False) for stop in range(1, len(messages) + 1)]
        if texts[-1] is None:
            continue
        for stop, (shorter, longer) in enumerate(pairwise(texts), start=1):
            if shorter is None or longer is None or longer.startswith(shorter):
                continue
            position = _first_difference(shorter, longer)
            changed = next(i for i, text in enumerate(texts) if text is not None and len(text) > position)
            check = f"tools, as messages[{stop}] ({messages[stop]['role']}) is added"
            yield _finding(check, f"messages[{changed}]", shorter, longer)
            return
        return


def _argument_order(template: ChatTemplate) -> Iterator[TemplateFinding]:
    """A call's arguments stand in the order in which the model wrote them."""
    first, second = "zebra", "apple"
    function = {"name": "weather", "arguments": f'{{"{first}": 1, "{second}": 2}}'}
    call = {**_CALL, "tool_calls": [{"id": "call00001", "type": "function", "function": function}]}
    text = _render(template, [_ASK, call, _RESULT], _TOOLS, generate=False)
    if text is None or first not in text or second not in text or text.index(first) < text.index(second):
        return
    position = text.index(second) - 1
    where = "messages[1].tool_calls[0].function.arguments"
    was, is_now = function["arguments"], text[position : position + _CONTEXT]
    yield TemplateFinding("the keys of a call's arguments", where, was[1 : 1 + _CONTEXT], is_now)


def _repeats(template: ChatTemplate) -> Iterator[TemplateFinding]:
    """The same prompt, at the same time."""
    still = template.at(lambda: datetime(2024, 5, 6, 7, 8, 9))
    for opening in ([_SYSTEM, _ASK], [_ASK]):
        # Chance may give the same twice, but hardly ever so often.
        texts = [_render(still, opening, _TOOLS) for _ in range(8)]
        other = next((text for text in texts if text != texts[0]), None)
        if texts[0] is not None and other is not None:
            position = _first_difference(texts[0], other)
            yield _finding("the same request again", f"the prompt, character {position}", texts[0], other)
            return


def _dates(template: ChatTemplate) -> Iterator[TemplateFinding]:
    """The same prompt on another day, at another time."""
    one = template.at(lambda: datetime(2024, 5, 6, 7, 8, 9))
    other = template.at(lambda: datetime(2031, 12, 24, 23, 59, 58))
    for opening in ([_SYSTEM, _ASK], [_ASK]):
        was, is_now = _render(one, opening, _TOOLS), _render(other, opening, _TOOLS)
        if was is None or is_now is None:
            continue
        is_before = _first_difference(was, is_now) < was.find(_TOOLS[0]["function"]["description"])
        finding = _compare("another day", was, is_now, 0, "the date, before the tools" if is_before else "the date")
        if finding is not None:
            yield finding
        return


def _compare(check: str, was: str, is_now: str, end_of_prompt: int, after: str) -> TemplateFinding | None:
    """A finding if `is_now` does not begin with `was`; in the prompt itself, or in what `after` names."""
    if is_now.startswith(was):
        return None
    position = _first_difference(was, is_now)
    where = f"the prompt, character {position}" if position < end_of_prompt else after
    return _finding(check, where, was, is_now)


def _finding(check: str, where: str, was: str, is_now: str) -> TemplateFinding:
    position = _first_difference(was, is_now)
    shown = slice(position, position + _CONTEXT)
    return TemplateFinding(check, where, was[shown], is_now[shown])


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _render(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Message] | None, *, generate: bool = True
) -> str | None:
    """The text; None if the template does not take these messages."""
    try:
        return template.render(messages, tools=tools, add_generation_prompt=generate)
    except InvalidRequest:
        return None
