"""A model's chat template: messages to the text that the model was trained to continue.

A template is a Jinja program that comes with the model file, written for the environment that transformers gives it. It
runs in a sandbox with a budget (`chat_sandbox`), so one from a stranger can neither reach this process nor hold it up.

Templates differ in what they take, and clients in what they send. What is reconciled here:

* content as a list of text parts, for a template that wants strings: the parts, joined by line breaks;
* arguments of tool calls as JSON text, which is how OpenAI's clients send them, for a template that wants the object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spolia.errors import InvalidRequest, ModelError
from spolia.models.tokenizer_core import Tokenizer
from spolia.models.tokenizer_folder import read_json, token_named

if TYPE_CHECKING:  # Jinja takes longer to import than a small model to load
    import jinja2

    from spolia.models.chat_sandbox import TemplateSandbox

__all__ = ["ChatTemplate", "chat_template_from_folder", "chat_template_from_gguf", "no_chat_template"]

_MAX_TEMPLATE_CHARACTERS = 1 << 20
_GGUF_KEY = "tokenizer.chat_template"

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders conversations for one model. Any thread may call."""

    def __init__(
        self,
        source: str,
        *,
        variants: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
        system: str = "",
        first_messages: Sequence[Message] = (),
    ) -> None:
        """Take a template; it is compiled when it is first used.

        Args:
            source: the template's text.
            variants: further templates by name; `tool_use` is taken where tools are given.
            special_tokens: texts that templates use by name, such as `bos_token`.
            clock: local time, for templates that tell the model the date.
            system: what a conversation without a system message begins with.
            first_messages: what each conversation has before its own, after the system message.

        Raises:
            ModelError: the text is too long to be a template.
        """
        self.source = source
        self._sources = {**(variants or {}), "default": source}
        for name, text in self._sources.items():
            if len(text) > _MAX_TEMPLATE_CHARACTERS:
                raise ModelError(
                    f"the chat template {name!r} has {len(text)} characters; the limit is {_MAX_TEMPLATE_CHARACTERS}"
                )
        self._special_tokens = dict(special_tokens or {})
        self._clock = clock
        self._system = system
        self._first_messages = [dict(message) for message in first_messages]
        self._compiled: dict[str, jinja2.Template] = {}

    def at(self, clock: Callable[[], datetime]) -> ChatTemplate:
        """The same template by another clock."""
        variants = {name: text for name, text in self._sources.items() if name != "default"}
        return ChatTemplate(
            self.source,
            variants=variants,
            special_tokens=self._special_tokens,
            clock=clock,
            system=self._system,
            first_messages=self._first_messages,
        )

    def with_source(self, source: str) -> ChatTemplate:
        """Another template, for the same model."""
        return ChatTemplate(source, special_tokens=self._special_tokens, clock=self._clock)

    def prefaced(self, system: str, messages: Sequence[Message]) -> ChatTemplate:
        """The same template, for conversations that begin with these; see `system` and `first_messages`."""
        variants = {name: text for name, text in self._sources.items() if name != "default"}
        return ChatTemplate(
            self.source,
            variants=variants,
            special_tokens=self._special_tokens,
            clock=self._clock,
            system=system,
            first_messages=messages,
        )

    def check(self) -> None:
        """
        Raises:
            ModelError: it is no Jinja.
        """
        for name in self._sources:
            self._template(name)

    def render(
        self,
        messages: Sequence[Message],
        /,  # so that a variable may be called anything
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, to be encoded with `add_special=False, parse_special=True`.

        Args:
            messages: as OpenAI has them: `role`, `content` (a string or text parts), `tool_calls` and so on.
            tools: schemas of the functions that the model may call.
            add_generation_prompt: end with the opening of the assistant's reply.
            variables: whatever else the template knows, such as `enable_thinking`.

        Raises:
            InvalidRequest: the template refuses the messages, or cannot make sense of them.
            ModelError: the template is broken, or wants more work than an honest one.
        """
        if not messages:
            raise InvalidRequest("messages is empty; give at least one", param="messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise InvalidRequest(
                    f"messages[{index}] is {message!r}; a message is like {{'role': 'user', 'content': 'Hello'}}",
                    param="messages",
                )
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        values = {
            **self._special_tokens,
            "tools": [*tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        plain = self._with_preface([self._with_content(dict(message), index) for index, message in enumerate(messages)])
        objects = [_with_argument_objects(message) for message in plain]
        try:
            return self._run(name, {**values, "messages": objects})
        except _CannotRender as error:
            if objects == plain:
                raise error.as_request() from error
            try:  # some templates put the arguments' JSON text out as it is
                return self._run(name, {**values, "messages": plain})
            except _CannotRender:
                raise error.as_request() from error

    @property
    def tool_source(self) -> str:
        """The text of the template that is taken where tools are given."""
        return self._sources.get("tool_use", self.source)

    def _with_preface(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if messages[0].get("role") == "system":
            return [messages[0], *self._first_messages, *messages[1:]]
        head = [{"role": "system", "content": self._system}] if self._system else []
        return [*head, *self._first_messages, *messages]

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template reads content as a list of parts; found out by giving it some."""
        part = {"type": "text", "text": "content of the part"}
        try:
            text = self._run("default", {**self._special_tokens, "messages": [{"role": "user", "content": [part]}]})
        except _CannotRender:
            return False
        return part["text"] in text and "'type'" not in text  # else it put the list out as Python writes it

    def _with_content(self, message: dict[str, Any], index: int) -> dict[str, Any]:
        content = message.get("content")
        if content is None and not message.get("tool_calls"):  # beside tool calls some templates look for the None
            message["content"] = ""
        if isinstance(content, list):
            texts = [_text_of(part, f"messages[{index}].content[{number}]") for number, part in enumerate(content)]
            if not self.takes_parts:
                message["content"] = "\n".join(texts)
        return message

    @cached_property
    def _sandbox(self) -> TemplateSandbox:
        from spolia.models.chat_sandbox import TemplateSandbox

        return TemplateSandbox(self._clock)

    def _template(self, name: str) -> jinja2.Template:
        import jinja2

        if (template := self._compiled.get(name)) is None:
            try:
                template = self._compiled[name] = self._sandbox.from_string(self._sources[name])
            except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
                raise ModelError(f"the model's chat template {name!r} is broken: {error}") from error
        return template

    def _run(self, name: str, values: dict[str, Any]) -> str:
        import jinja2

        template = self._template(name)
        try:
            with self._sandbox.budget(_num_characters(values)):
                return template.render(values)
        except jinja2.exceptions.SecurityError as error:
            raise ModelError(f"the model's chat template was stopped: {error}") from error
        except jinja2.UndefinedError as error:
            raise _CannotRender(f"a value that it needs is not there: {error}") from error
        except jinja2.TemplateError as error:  # raise_exception, by which templates refuse
            raise _CannotRender(str(error)) from error
        except (
            ArithmeticError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise _CannotRender(f"{type(error).__name__}: {error}") from error


class _CannotRender(Exception):  # noqa: N818 - never leaves this module
    def as_request(self) -> InvalidRequest:
        return InvalidRequest(f"the model's chat template does not take these messages: {self}", param="messages")


def no_chat_template(model_name: str) -> InvalidRequest:
    """What to tell who wants to chat with a base model: an invented format would only give worse text."""
    return InvalidRequest(
        f"{model_name} has no chat template: it is a base model, which continues text and was not trained to chat; "
        f"use /v1/completions or `spolia generate`, or an instruct model such as smollm2",
        code="no_chat_template",
    )


def chat_template_from_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that a GGUF file carries, with its named variants; None for a base model."""
    variants = {
        key.removeprefix(f"{_GGUF_KEY}."): text
        for key, text in metadata.items()
        if key.startswith(f"{_GGUF_KEY}.") and isinstance(text, str)
    }
    source = metadata.get(_GGUF_KEY) or variants.pop("default", None)
    if not isinstance(source, str) or not source.strip():
        return None
    roles = {"bos_token": tokenizer.special.bos, "eos_token": tokenizer.special.eos}
    roles |= {"unk_token": tokenizer.special.unk, "pad_token": tokenizer.special.pad}
    return ChatTemplate(
        source,
        variants=variants,
        special_tokens={role: tokenizer.token_text(i) for role, i in roles.items() if i is not None},
    )


def chat_template_from_folder(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a folder in Hugging Face's form; None for a base model.

    It is `chat_template.jinja` with `additional_chat_templates/*.jinja`, or else `chat_template` in
    `tokenizer_config.json`: one text, or a list of named ones.
    """
    config = read_json(folder / "tokenizer_config.json")
    stated = config.get("chat_template")
    if isinstance(stated, list):
        variants = {str(entry.get("name")): str(entry.get("template")) for entry in stated if isinstance(entry, dict)}
    else:
        variants = {"default": stated} if isinstance(stated, str) else {}
    files = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for path in files:
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            variants[name] = path.read_text(encoding="utf-8")
    source = variants.pop("default", None)
    if source is None or not source.strip():
        return None
    keys = ("bos_token", "eos_token", "unk_token", "pad_token")
    named = {key: text for key in keys if (text := token_named(config, key)) is not None}
    return ChatTemplate(source, variants=variants, special_tokens=named)


def _text_of(part: object, path: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(f"{path} is of type {kind!r}; only text is supported", param="messages")
    return text


def _with_argument_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects, where they are JSON text of one."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_argument_object(call) for call in calls]}


def _with_argument_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:  # the model wrote it, and the model may read it again as it is
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


def _num_characters(values: Any) -> int:
    """Characters in all texts of a nested value; the size of a request."""
    total = 0
    pending = [values]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
    return total
