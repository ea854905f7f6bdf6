"""Templates render as transformers renders them, and a template from a stranger can do no harm.

The oracle is transformers' own renderer, given the same template text.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from spolia.errors import InvalidRequest, ModelError
from spolia.models import ChatTemplate, Tokenizer
from spolia.models.chat_template import chat_template_from_folder, chat_template_from_gguf, no_chat_template
from spolia.models.gguf import read_gguf
from spolia.models.tokenizer import tokenizer_from_gguf

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather\'s <state> & "outlook" für Zürich',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Zürich <ZH>"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <b>brief</b> & kind."}, {"role": "user", "content": "Hi {{ 1 }} {% x %}"}],
    [
        {"role": "user", "content": "  你好 \n\n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "<|im_end|>"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "rainy"},
        {"role": "assistant", "content": "Both."},
        {"role": "user", "content": "Thanks"},
    ],
]
TEMPLATES = {
    "loops and namespaces": (
        "{{ bos_token }}{% set ns = namespace(system='') %}\n{%- for m in messages if m.role != 'tool' %}\n"
        "    {%- if m['role'] == 'system' %}{% set ns.system = m.content %}{% continue %}{% endif %}\n"
        "    {{- '<' + m.role ~ '>' }}{{ m.content | trim }}{{ eos_token if m.role == 'assistant' }}\n"
        "    {%- if loop.last %}{% break %}{% endif %}\n{%- endfor %}{{ ns.system|length }}\n"
    ),
    "macros and filters": (
        "{% macro one(m, n=3) -%}{{ m.role|upper }}:{{ m.content.split('\\n')|join('|') }}:{{ n }}\n{%- endmacro %}\n"
        "{% for m in messages %}{{ one(m, loop.index) }}{{ m.content[:2]|replace('H', 'J') }}{% endfor %}"
        "{{ messages|map(attribute='role')|list|unique|join(',') }}{{ (messages|first).content|indent(2) }}"
        "{{ messages|selectattr('role', 'eq', 'user')|list|length }}{{ range(3)|list }}"
        "{{ messages[-1].content.replace('a', 'bb').strip('T') }}"
    ),
    "json": "{% if tools %}{{ tools|tojson }}{{ tools|tojson(indent=2) }}{{ tools[0].function|tojson }}{% endif %}"
    "{{ messages|tojson }}{{ {'a': 'é', 'b': [1, 2.5, true, none]}|tojson(ensure_ascii=True, sort_keys=True) }}",
    "blocks and tests": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% set x %}[{{ m.role }}]{% endset %}{{ x }}"
    "{% if m.tool_calls is defined and m.tool_calls is iterable %}T{% endif %}{% endfor %}"
    "{{ undefined_thing }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1] + [2] }}"
    "{{ 'x' if add_generation_prompt }}",
    "recursion": "{% macro walk(v) %}{% if v is mapping %}{% for k in v|dictsort %}{{ k[0] }}={{ walk(k[1]) }};"
    "{% endfor %}{% elif v is string %}{{ v }}{% elif v is iterable %}{% for x in v %}{{ walk(x) }},{% endfor %}"
    "{% else %}{{ v }}{% endif %}{% endmacro %}{{ walk(tools) }}{{ walk(messages) }}",
}


def oracle(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(conversations=[messages], chat_template=source, **variables)
    (text,) = rendered
    return str(text)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> ChatTemplate:
    return from_file(smollm2_path)


@pytest.fixture(scope="module")
def qwen_coder(qwen_coder_path: Path) -> ChatTemplate:
    return from_file(qwen_coder_path)


def from_file(path: Path) -> ChatTemplate:
    metadata = read_gguf(path).metadata
    template = chat_template_from_gguf(metadata, tokenizer_from_gguf(metadata))
    assert template is not None
    return template


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("tools", [None, [WEATHER]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "qwen_coder"])
def test_real_templates_render_as_in_transformers(
    request: pytest.FixtureRequest, name: str, add_generation_prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    template: ChatTemplate = request.getfixturevalue(name)
    variables = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    for messages in CONVERSATIONS:
        assert template.render(messages, **variables) == oracle(template.source, messages, **variables)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_are_made_of_renders_as_in_transformers(name: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(TEMPLATES[name], special_tokens=special)
    for messages in CONVERSATIONS:
        for tools in (None, [WEATHER]):
            variables: dict[str, Any] = {"tools": tools, "add_generation_prompt": True}
            expected = oracle(template.source, messages, **special, **variables)
            assert template.render(messages, **variables) == expected


def test_a_rendered_conversation_has_its_special_tokens(qwen_coder: ChatTemplate, qwen_coder_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(read_gguf(qwen_coder_path).metadata)
    ids = tokenizer.encode(qwen_coder.render(user("Hi")), add_special=False)
    assert ids[0] == tokenizer.token_id("<|im_start|>")
    assert ids.count(tokenizer.token_id("<|im_end|>")) == 2


def test_the_date_is_the_clocks() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2024, 7, 26))
    assert template.render(user("Hi")) == "26 Jul 2024"


def test_other_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ 'think' if enable_thinking else 'act' }}")
    assert template.render(user("Hi"), enable_thinking=True) == "think"
    assert template.render(user("Hi"), self=1, enable_thinking=True) == "think"
    assert template.render(user("Hi")) == "act"


# ----------------------------------------------------------------------------------------------- what is reconciled


def test_text_parts_are_joined_for_a_template_that_wants_strings(smollm2: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert not smollm2.takes_parts
    assert smollm2.render(user(parts)) == smollm2.render(user("one\ntwo"))


def test_text_parts_are_left_to_a_template_that_reads_them() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert template.takes_parts
    assert template.render(user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])) == "[one][two]"
    assert template.render(user("one")) == "one"


def test_parts_that_are_not_text_are_refused(smollm2: ChatTemplate) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[1\] is of type 'image_url'; only text") as caught:
        smollm2.render(user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]))
    assert caught.value.param == "messages"


def test_missing_content_is_empty_text(smollm2: ChatTemplate) -> None:
    assert smollm2.render([{"role": "user"}]) == smollm2.render(user(None)) == smollm2.render(user(""))


def test_arguments_as_json_text_are_the_same_as_an_object(qwen_coder: ChatTemplate) -> None:
    text = {**CALL, "function": {"name": "weather", "arguments": json.dumps(CALL["function"]["arguments"])}}  # type: ignore[index]
    for content in ("", None):
        rendered = [
            qwen_coder.render([*user("?"), {"role": "assistant", "content": content, "tool_calls": [call]}])
            for call in (CALL, text)
        ]
        assert rendered[0] == rendered[1]
        assert '"arguments": {"city": "Zürich <ZH>"}' in rendered[0]


def test_arguments_stay_text_for_a_template_that_joins_text() -> None:
    template = ChatTemplate("{{ 'call: ' + messages[0].tool_calls[0].function.arguments }}")
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":  1}'}}]}
    assert template.render([message]) == 'call: {"a":  1}'


def test_messages_are_not_changed(qwen_coder: ChatTemplate) -> None:
    messages: list[dict[str, Any]] = [{"role": "user"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    before = json.dumps(messages)
    qwen_coder.render(messages)
    assert json.dumps(messages) == before


def test_a_template_for_tools_is_taken_where_tools_are_given() -> None:
    template = ChatTemplate("plain", variants={"tool_use": "with {{ tools|length }}"})
    assert template.render(user("Hi")) == "plain"
    assert template.render(user("Hi"), tools=[]) == "plain"
    assert template.render(user("Hi"), tools=[WEATHER]) == "with 1"


# ------------------------------------------------------------------------------------------------------- what it says


@pytest.mark.parametrize("messages", [[], "hello", ["hello"]])
def test_what_is_no_conversation_is_the_requests_error(smollm2: ChatTemplate, messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        smollm2.render(messages)
    assert caught.value.param == "messages"


def test_a_templates_refusal_is_the_requests_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="does not take these messages: roles must alternate") as caught:
        template.render(user("Hi"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ messages[7].role.x }}", "{{ 1 // 0 }}"])
def test_messages_that_do_not_fit_are_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="does not take these messages"):
        ChatTemplate(source).render(user("Hi"))


@pytest.mark.parametrize("source", ["{% if %}", "{{ x|no_such_filter }}", "{% for %}", "{{" + "(" * 5_000, "{% foo %}"])
def test_a_broken_template_is_the_models_error(source: str) -> None:
    with pytest.raises(ModelError, match="chat template 'default' is broken"):
        ChatTemplate(source).render(user("Hi"))


def test_a_template_of_megabytes_is_refused() -> None:
    with pytest.raises(ModelError, match="has 2000000 characters; the limit is"):
        ChatTemplate("x" * 2_000_000)


def test_a_base_model_is_told_apart(gemma3_path: Path) -> None:
    metadata = read_gguf(gemma3_path).metadata
    assert chat_template_from_gguf(metadata, tokenizer_from_gguf(metadata)) is None
    error = no_chat_template("gemma3:270m")
    assert "gemma3:270m has no chat template" in str(error)
    assert "/v1/completions" in str(error)


# ---------------------------------------------------------------------------------------------------------- strangers

DOUBLED = (
    "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s|length }}"
)
NESTED = "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}USE"
HOSTILE = {
    "a long range": "{% for i in range(10 ** 12) %}{% endfor %}",
    "nested ranges": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "nested strings": "{% for i in 'x' * 90000 %}{% for j in 'x' * 90000 %}{% endfor %}{% endfor %}",
    "a tree of calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless calls": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless loop recursion": "{% set l = [[1]] %}{% for a in l recursive %}{{ loop(l) }}{% endfor %}",
    "a power": "{% set x = 9 ** 9 %}{{ x ** x }}",
    "repeated squaring": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a repeated string": "{{ 'a' * 10 ** 10 }}",
    "a repeated list": "{{ [1] * 10 ** 10 }}",
    "doubling by ~": DOUBLED.replace("STEP", "ns.s ~ ns.s"),
    "doubling by +": DOUBLED.replace("STEP", "ns.s + ns.s"),
    "doubling by join": DOUBLED.replace("STEP", "[ns.s, ns.s]|join"),
    "doubling by a method": DOUBLED.replace("STEP", "''.join([ns.s, ns.s])"),
    "growth by replace": DOUBLED.replace("STEP", "ns.s|replace('a', 'aaaaaaaaaa')"),
    "growth by a method": DOUBLED.replace("STEP", "ns.s.replace('a', 'aaaaaaaaaa')"),
    "doubling by blocks": "{% set s = 'aaaaaaaaaa' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "doubling by macro": "{% macro f(s, n) %}{{ f(s ~ s, n - 1) if n else s }}{% endmacro %}{{ f('aaaaaaaaaa', 60) }}",
    "shared lists put out": NESTED.replace("STEP", "[ns.s, ns.s]").replace("USE", "{{ ns.s }}"),
    "shared lists as JSON": NESTED.replace("STEP", "[ns.s, ns.s]").replace("USE", "{{ ns.s|tojson }}"),
    "shared tuples hashed": NESTED.replace("STEP", "(ns.s, ns.s)").replace("USE", "{{ {ns.s: 1}|length }}"),
    "shared dicts": NESTED.replace("STEP", "dict(a=ns.s, b=ns.s)").replace("USE", "{{ ns.s|string }}"),
    "a width by %": "{{ '%1000000000d' % 1 }}",
    "a width by format": "{{ '{:>1000000000}'.format(1) }}",
    "a width by format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "a width by a method": "{{ 'a'.ljust(1000000000) }}",
    "a width of bytes": "{{ 'a'.encode().ljust(1000000000) }}",
    "a width of a number": "{{ (1).to_bytes(1000000000) }}",
    "a width by attr": "{{ ('a'|attr('ljust'))(1000000000) }}",
    "a width by a filter": "{{ 'a'|center(1000000000) }}",
    "an indent": "{{ 'a\n'|indent(1000000000) }}",
    "an indent of JSON": "{{ [1]|tojson(indent=1000000000) }}",
    "lorem ipsum": "{{ lipsum(n=100000) }}",
    "Python's classes": "{{ ''.__class__.__mro__ }}",
    "Python's globals": "{{ cycler.__init__.__globals__ }}",
    "a function's globals": "{{ raise_exception.__globals__.json }}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
    "a change to the messages": "{{ messages.append(1) }}",
    "a namespace's inside": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_in_seconds(name: str) -> None:
    start = time.process_time()
    with pytest.raises((ModelError, InvalidRequest)) as caught:
        ChatTemplate(HOSTILE[name]).render(user("Hi"))
    assert "chat template" in str(caught.value)
    assert time.process_time() - start < 10


def test_a_long_conversation_has_budget_enough(qwen_coder: ChatTemplate) -> None:
    messages = [{"role": role, "content": "word " * 2_000} for _ in range(200) for role in ("user", "assistant")]
    assert len(qwen_coder.render(messages, tools=[WEATHER] * 50)) > 4_000_000


def test_threads_do_not_share_a_budget() -> None:
    template = ChatTemplate("{% for i in range(30000) %}{% for j in range(2) %}{{ 'x' * 5 }}{% endfor %}{% endfor %}")
    rendered: list[str] = []
    threads = [threading.Thread(target=lambda: rendered.append(template.render(user("Hi")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(text) for text in rendered] == [300_000] * 4


# -------------------------------------------------------------------------------------------------------------- files


class NoTokens:
    """Stands in for a tokenizer where a folder's settings name the special tokens."""


def render_folder(folder: Path, **variables: Any) -> str | None:
    template = chat_template_from_folder(folder, NoTokens())  # type: ignore[arg-type]
    return template.render(user("Hi"), **variables) if template else None


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_folder_without_a_template_is_a_base_model(tmp_path: Path) -> None:
    assert render_folder(tmp_path) is None
    write_config(tmp_path, chat_template=None)
    assert render_folder(tmp_path) is None


def test_a_folders_settings_have_the_template_and_its_tokens(tmp_path: Path) -> None:
    write_config(
        tmp_path, chat_template="{{ bos_token }}{{ eos_token }}", bos_token="<s>", eos_token={"content": "</s>"}
    )
    assert render_folder(tmp_path) == "<s></s>"


def test_a_folders_named_templates_are_read(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template=[{"name": n, "template": f"{n}!"} for n in ("default", "tool_use")])
    assert render_folder(tmp_path) == "default!"
    assert render_folder(tmp_path, tools=[WEATHER]) == "tool_use!"


def test_a_template_file_comes_before_the_settings(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="settings")
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tool file")
    assert render_folder(tmp_path) == "file"
    assert render_folder(tmp_path, tools=[WEATHER]) == "tool file"


def test_a_ggufs_named_templates_are_read(smollm2_path: Path) -> None:
    metadata = dict(read_gguf(smollm2_path).metadata)
    tokenizer: Tokenizer = tokenizer_from_gguf(metadata)
    metadata["tokenizer.chat_template.tool_use"] = "{{ eos_token }} {{ tools|length }}"
    template = chat_template_from_gguf(metadata, tokenizer)
    assert template is not None
    assert template.render(user("Hi"), tools=[WEATHER]) == "<|im_end|> 1"
