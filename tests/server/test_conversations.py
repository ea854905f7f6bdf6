"""Which conversation a request goes on from, and which field says something else."""

from __future__ import annotations

import pytest

from spolia.server.conversations import Conversation, ConversationLog, Difference, compare_messages, history

SYSTEM = {"role": "system", "content": "You help."}
ASK = {"role": "user", "content": "What is the weather?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"day": "today", "unit": "C"}'}}],
}
TURNED = '{"unit": "C", "day": "today"}'
THINKING = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Blue sky."}


def changed(message: dict, **fields: object) -> dict:
    return {**message, **fields}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (SYSTEM, changed(SYSTEM, content="You helped."), Difference(0, "content", "changed", 8)),
        (SYSTEM, changed(SYSTEM, role="developer"), Difference(0, "role", "changed", 0)),
        (THINKING, changed(THINKING, reasoning_content=""), Difference(0, "reasoning_content", "dropped")),
        (changed(THINKING, reasoning_content=None), THINKING, Difference(0, "reasoning_content", "added")),
        (
            CALL,
            changed(CALL, tool_calls=[{"id": "1", "function": {"name": "weather", "arguments": TURNED}}]),
            Difference(0, "tool_calls[0].function.arguments", "reordered"),
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            Difference(0, "content[1]", "added"),
        ),
        ({"role": "user", "content": "a"}, {"role": "user", "content": ["a"]}, Difference(0, "content", "changed")),
    ],
)  # fmt: skip
def test_the_field_that_differs_is_named(before, after, expected):
    assert compare_messages([before], [after]) == expected
    assert compare_messages([SYSTEM, before], [SYSTEM, after]) == expected._replace(message=1)


def test_equal_lists_have_no_difference_and_empty_fields_say_as_much_as_none():
    assert compare_messages([SYSTEM, CALL], [SYSTEM, changed(CALL, content="", tool_call_id=None)]) is None


def test_a_list_that_ends_sooner_or_goes_on_is_told():
    assert compare_messages([SYSTEM, ASK], [SYSTEM]) == Difference(1, "", "dropped")
    assert compare_messages([SYSTEM], [SYSTEM, ASK]) == Difference(1, "", "added")


def talk(number: int, *messages: dict, reply: str = "Sunny.", namespace: bytes = b"ns") -> Conversation:
    return Conversation(f"c{number}", namespace, history(messages), 100, reply)


def test_a_request_goes_on_from_the_latest_conversation_of_the_longest_beginning():
    log = ConversationLog()
    log.add(talk(0, SYSTEM))
    log.add(talk(1, SYSTEM, ASK))
    log.add(talk(2, SYSTEM))
    assert log.closest(b"ns", history([SYSTEM, ASK, THINKING])).id == "c1"
    assert log.closest(b"ns", history([SYSTEM, THINKING])).id == "c2"
    assert log.closest(b"other", history([SYSTEM])) is None


def test_going_on_asking_again_and_asking_something_else_are_no_difference():
    log = ConversationLog()
    earlier = talk(1, SYSTEM, ASK)
    reply = {"role": "assistant", "content": "Sunny."}
    for messages in ([SYSTEM, ASK, reply, ASK], [SYSTEM, ASK], [SYSTEM, ASK, ASK]):
        assert log.difference(earlier, history(messages)) is None


def test_a_reply_that_comes_back_changed_is_a_difference():
    log = ConversationLog()
    earlier = talk(1, SYSTEM, ASK, reply="<think>Blue.</think>Sunny.")
    messages = history([SYSTEM, ASK, {"role": "assistant", "content": "Sunny."}, ASK])
    assert log.difference(earlier, messages) == Difference(3, "content", "changed", 0)


def test_other_tools_are_a_difference_in_the_settings():
    log = ConversationLog()
    earlier = Conversation("c", b"ns", history([ASK], tools=[{"name": "a"}]), 100, "Sunny.")
    assert log.difference(earlier, history([ASK], tools=[{"name": "b"}])) == Difference(
        0, "tools[0].name", "changed", 0
    )


def test_the_log_is_bounded_in_number_and_in_bytes():
    few = ConversationLog(max_conversations=3)
    for number in range(10):
        few.add(talk(number, SYSTEM, changed(ASK, content=str(number))))
    assert few.closest(b"ns", history([SYSTEM, changed(ASK, content="2"), ASK])).id == "c9"
    assert few.closest(b"ns", history([SYSTEM, changed(ASK, content="8"), ASK])).id == "c8"
    small = ConversationLog(max_bytes=1_000)
    for number in range(10):
        small.add(talk(number, changed(ASK, content=str(number) * 400)))
    assert small.closest(b"ns", history([changed(ASK, content="2" * 400)])).id == "c9"
    assert len(small._by_digest) <= 6
