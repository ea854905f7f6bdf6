"""Templates that render history as it was computed pass; each that does not is found, and where."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spolia.cli import cache
from spolia.models import ChatTemplate
from spolia.models.template_lint import lint_template, lint_turn

HONEST = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
DRIFTING = {
    "strips replies": (HONEST.replace("{{ m.content }}", "{{ m.content | trim }}"), "messages[2].content"),
    "drops reasoning": (
        HONEST.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
        "messages[2].content",
    ),
    "opens a thought that history lacks": (HONEST.replace("<assistant>{%", "<assistant><think>{%"), "the prompt"),
    "puts the tools into the last message": (
        HONEST.replace("{{ m.content }}", "{% if loop.last and tools %}{{ tools }}{% endif %}{{ m.content }}"),
        "messages[",
    ),
    "tells the date": (HONEST + "{{ strftime_now('%d %b %Y') }}", "the date"),
    "tells the date before the tools": (
        "{{ strftime_now('%d %b %Y') }}{{ tools | tojson }}\n" + HONEST,
        "the date, before the tools",
    ),
    "empties reasoning": (
        HONEST.replace("{{ m.content }}", "<think></think>{{ m.content.split('</think>')[-1] }}"),
        "messages[2].content",
    ),
    "sorts the keys of arguments": (
        HONEST.replace("c.function.arguments | tojson", "c.function.arguments | dictsort"),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "has a nonce in its system message": (
        HONEST.replace("{{ m.content }}", "{% if loop.first %}{{ range(100000) | random }}{% endif %}{{ m.content }}"),
        "the prompt, character 8",
    ),
}


def test_an_honest_template_has_no_findings():
    assert lint_template(ChatTemplate(HONEST)) == []


@pytest.mark.parametrize("name", DRIFTING)
def test_a_template_that_drifts_is_found_and_where(name):
    source, where = DRIFTING[name]
    findings = lint_template(ChatTemplate(source))
    assert any(finding.where.startswith(where) for finding in findings), findings
    assert all(finding.was != finding.is_now for finding in findings)


def test_messages_that_a_template_refuses_are_left_out():
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + HONEST
    assert lint_template(ChatTemplate(source)) == []


def lint(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spolia", "cache", "lint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_checks_a_models_template(smollm2_path):
    done = lint(smollm2_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "renders history as it was computed" in done.stdout


def test_the_command_names_the_message_and_field_that_change_from_request_to_request(tmp_path):
    def body(nonce: int, *more: dict) -> str:
        system = {"role": "system", "content": f"x-header: cch={nonce:x}; You help."}
        return json.dumps({"messages": [system, {"role": "user", "content": "Hi"}, *more]})

    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    turned = {**call, "function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    said_otherwise = [{**said[0], "tool_calls": [turned]}, said[1]]
    ask = {"role": "user", "content": "And?"}
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join([body(0xABC), body(0xDEF), body(0xDEF, *said), body(0xDEF, *said_otherwise, ask)]))
    done = lint("--traffic", path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "line 2 differs from line 1: messages[0].content changed at character" in lines[0]
    assert "cch=abc" in lines[0]
    assert "cch=def" in lines[0]
    assert "line 4 differs from line 3: messages[2].tool_calls[0].function.arguments reordered" in lines[1]
    assert len(lines) == 2


SYSTEM = {"role": "system", "content": "Today is 2026-12-02. You help."}
ASK = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": {"c": 2, "d": 3}}}}
THOUGHT = {"role": "assistant", "content": "Ho", "reasoning_content": "He greets."}
TAGGED = {"role": "assistant", "content": "<think>\nHe greets.\n</think>\n\nHo"}
MORE = {"role": "user", "content": "And?"}


def turned(call: dict) -> dict:
    arguments = {"a": 1, "b": {"d": 3, "c": 2}}
    return {**call, "function": {"name": "f", "arguments": arguments}}


CAUSES = {
    "a nonce in the system prompt": (
        [[{**SYSTEM, "content": "id=4711 You help."}, ASK], [{**SYSTEM, "content": "id=4712 You help."}, ASK]],
        "messages[0].content changed at character 6: 'id=4711 You help.' -> 'id=4712 You help.' "
        "(a text that changes from request to request, before the tools)",
    ),
    "a date before the tools": (
        [[SYSTEM, ASK], [{**SYSTEM, "content": "Today is 2026-12-03. You help."}, ASK]],
        "messages[0].content changed at character 18: 'is 2026-12-02. You help.' -> 'is 2026-12-03. You help.' "
        "(a date, before the tools)",
    ),
    "reasoning dropped": (
        [[ASK, THOUGHT, MORE], [ASK, {"role": "assistant", "content": "Ho"}, MORE, THOUGHT, MORE]],
        "messages[1].reasoning_content dropped (reasoning that the client left out)",
    ),
    "reasoning emptied": (
        [[ASK, THOUGHT, MORE], [ASK, {**THOUGHT, "reasoning_content": ""}, MORE, THOUGHT, MORE]],
        "messages[1].reasoning_content dropped (reasoning that the client left out)",
    ),
    "reasoning dropped from between its tags": (
        [[ASK, TAGGED, MORE], [ASK, {"role": "assistant", "content": "<think>\n</think>\n\nHo"}, MORE, TAGGED, MORE]],
        "(reasoning that the client left out)",
    ),
    "argument keys in another order": (
        [
            [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, MORE],
            [ASK, {"role": "assistant", "content": "", "tool_calls": [turned(CALL)]}, MORE, THOUGHT, MORE],
        ],
        "messages[1].tool_calls[0].function.arguments.b reordered (the same JSON with its keys in another order)",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_clients_do_to_a_prefix_is_told_by_message_and_field(tmp_path, capsys, cause):
    requests, told = CAUSES[cause]
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages, "tools": [TOOL]}) for messages in requests))
    assert not cache.lint(None, path)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("line 2 differs from line 1: messages[")
    assert line.endswith(told)


def test_two_turns_that_a_template_renders_unlike_are_found_in_traffic():
    drifting = ChatTemplate(HONEST.replace("<assistant>{%", "<assistant><think>{%"))
    one, other = [ASK], [ASK, {"role": "assistant", "content": "Ho"}, MORE]
    finding = lint_turn(drifting, one, other, None)
    assert finding is not None
    assert (finding.where, finding.was, finding.is_now[:2]) == ("the prompt of the answer", "<think>", "Ho")
    last = ChatTemplate(HONEST.replace("{{ m.content }}", "{{ m.content }}{% if loop.last %}!{% endif %}"))
    finding = lint_turn(last, one, other, None)
    assert finding is not None
    assert finding.where == "messages[0].content"
    assert lint_turn(ChatTemplate(HONEST), one, other, None) is None


def test_the_command_renders_recorded_turns_with_the_models_template(tmp_path, capsys, smollm2_path):
    path = tmp_path / "traffic.jsonl"
    turns = [[ASK], [ASK, {"role": "assistant", "content": "Ho"}, MORE]]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    assert cache.lint(str(smollm2_path), path)
    assert "2 requests, each of which is new or goes on" in capsys.readouterr().out


def test_traffic_that_only_grows_is_clean(tmp_path):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages[:stop]}) for stop in (1, 3)))
    assert lint("--traffic", path).returncode == 0


@pytest.mark.parametrize(("text", "message"), [("{", "line 1 is not JSON"), ("{}", "no list of messages")])
def test_what_is_no_traffic_is_refused(tmp_path, text, message):
    path = tmp_path / "traffic.jsonl"
    path.write_text(text)
    done = lint("--traffic", path)
    assert done.returncode == 2
    assert message in done.stderr


def test_nothing_to_check_is_refused():
    assert "name a model" in lint().stderr
