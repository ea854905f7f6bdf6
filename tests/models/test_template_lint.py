"""Templates that render history as it was computed pass; each that does not is found, and where."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spolia.models import ChatTemplate
from spolia.models.template_lint import lint_template

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
    "tells the date": ("{{ strftime_now('%d %b %Y') }}\n" + HONEST, "the date"),
}


def test_an_honest_template_has_no_findings():
    assert lint_template(ChatTemplate(HONEST)) == []


@pytest.mark.parametrize("name", DRIFTING)
def test_a_template_that_drifts_is_found_and_where(name):
    source, where = DRIFTING[name]
    findings = lint_template(ChatTemplate(source))
    assert findings
    assert findings[0].where.startswith(where)
    assert findings[0].was != findings[0].is_now


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
