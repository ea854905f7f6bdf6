"""From a conversation to the prompt that a model goes on from, as every API's body describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from spolia.errors import InvalidRequest
from spolia.models import Model
from spolia.server.access import current_caller, set_caller
from spolia.server.encoding import encode
from spolia.server.schema import chat_messages
from spolia.server.toolcalls import ToolUse
from spolia.server.tools import check_tools

__all__ = [
    "Conversation",
    "PromptBody",
    "effort_variables",
    "encode_chat",
    "note_ignored",
    "prompt_options",
    "render_chat",
    "thinking_variables",
]


class PromptBody(Protocol):
    """The fields of a body that are about its prompt; None is what a client says who says nothing."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None


def prompt_options(body: PromptBody, model: Model) -> dict[str, Any]:
    """What `render_chat` and `encode_chat` take beside the messages.

    Raises:
        InvalidRequest: fields that are not well-formed, or do not go together.
    """
    check_tools(body.tools)
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message goes on with the last message, and add_generation_prompt begins another; "
            "send one of them",
            param="continue_final_message",
        )
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        if name in (body.chat_template_kwargs or {}):
            raise InvalidRequest(
                f"chat_template_kwargs holds {name!r}, which has a field of its own in the request; send it there",
                param="chat_template_kwargs",
            )
    tool_use = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    variables = dict(body.chat_template_kwargs or {})
    source = "" if model.chat_template is None else model.chat_template.source
    if (documents := getattr(body, "documents", None)) is not None and documents != []:
        if "documents" not in source:
            raise InvalidRequest(
                f"documents are given, and the chat template of {model.name} takes none; put them into a message",
                param="documents",
            )
        variables["documents"] = documents
    if body.reasoning_effort is not None:
        variables = {**effort_variables(body.reasoning_effort, source), **variables}
    return {
        "tool_use": tool_use,
        "template_kwargs": variables,
        "add_generation_prompt": body.add_generation_prompt is not False and not body.continue_final_message,
        "continue_final_message": bool(body.continue_final_message),
    }


def effort_variables(effort: str, source: str) -> dict[str, Any]:
    """What a template that minds it is told of how much to think; the field is ignored, and named, if none does."""
    variables: dict[str, Any] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    known = {name: value for name, value in variables.items() if name in source}
    if not known:
        note_ignored("reasoning_effort")
    return known


def thinking_variables(thinks: bool, source: str) -> dict[str, Any]:
    """What a template is told of whether to think; `thinking` is named as ignored if it does not mind."""
    if "enable_thinking" in source:
        return {"enable_thinking": thinks}
    if "<think>" not in source or not thinks:
        note_ignored("thinking")
    return {}


def note_ignored(name: str) -> None:
    """Name a field of this request that does nothing, in `x-spolia-ignored` and the log."""
    caller = current_caller()
    if name not in caller.ignored:
        set_caller(replace(caller, ignored=(*caller.ignored, name)))


def render_chat(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    tool_use: ToolUse | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    prefill: str = "",
) -> str:
    """A conversation as the model was trained to see it, with the beginning of a call where it must call.

    Args:
        continue_final_message: leave the last message open: an assistant's becomes the beginning of the reply.
        prefill: text that the reply is to begin with.

    Raises:
        InvalidRequest: messages that are not well-formed or that the template refuses, or a model without one.
    """
    if model.chat_template is None:
        raise InvalidRequest(
            f"{model.name} has no chat template: it is a base model; use /v1/completions", code="no_chat_template"
        )
    checked = chat_messages(messages)
    if "developer" not in model.chat_template.source:  # templates pass over roles that they do not know
        checked = [{**each, "role": "system"} if each["role"] == "developer" else each for each in checked]
    if continue_final_message and checked[-1]["role"] == "assistant" and len(checked) > 1:
        prefill, checked, add_generation_prompt = checked[-1]["content"] + prefill, checked[:-1], True
        continue_final_message = False
    tools = None if tool_use is None else tool_use.tools
    text = model.chat_template.render(
        checked, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
    )
    if continue_final_message:
        text = _cut_after(text, checked[-1]["content"])
    return text + prefill + ("" if tool_use is None else tool_use.beginning(model))


def _cut_after(text: str, content: str) -> str:
    """`text` up to the end of the last message's content, whose spaces at its ends a template may drop."""
    for shown in (content, content.strip()):
        if (at := text.rfind(shown)) >= 0:
            return text[: at + len(shown)]
    raise InvalidRequest(
        "the chat template does not show the last message as it is, so it cannot be continued",
        param="continue_final_message",
    )


async def encode_chat(
    model: Model, messages: Sequence[Mapping[str, Any]], *, add_special: bool = False, **options: Any
) -> list[int]:
    """Token ids of a conversation; `options` and errors are those of `render_chat`.

    Args:
        add_special: put the tokenizer's own special tokens around it, though the template writes them itself.
    """
    return await encode(model.tokenizer, render_chat(model, messages, **options), add_special=add_special)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a turn goes on from.

    Attributes:
        messages: as OpenAI has them.
        prefill: text that the reply is to begin with; the client has it already.
        template_kwargs: whatever else the chat template knows.
    """

    messages: list[dict[str, Any]]
    tool_use: ToolUse | None = None
    prefill: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    async def encode(self, model: Model, *, add_generation_prompt: bool = True) -> list[int]:
        """
        Raises:
            InvalidRequest: messages that are not well-formed or that the template refuses, or a model without one.
        """
        return await encode_chat(
            model,
            self.messages,
            tool_use=self.tool_use,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=self.template_kwargs,
            prefill=self.prefill,
        )
