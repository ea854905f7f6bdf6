"""One turn of a conversation: what every chat API but OpenAI's own makes its replies of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from spolia.engine import RequestOutput, SamplingParams, Wish
from spolia.generation import ReasoningSplitter
from spolia.models import Model
from spolia.server.answer import Answer
from spolia.server.chat import encode_chat
from spolia.server.conversations import history
from spolia.server.served import ServedModel
from spolia.server.sse import watch_for_disconnect
from spolia.server.toolcalls import Part, Text, Thought, ToolCallParser, ToolUse

__all__ = ["Conversation", "Turn"]


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

    async def encode(self, served: ServedModel, *, add_generation_prompt: bool = True) -> list[int]:
        """
        Raises:
            InvalidRequest: messages that are not well-formed or that the template refuses, or a model without one.
        """
        return await encode_chat(
            served.engine.model,
            self.messages,
            tool_use=self.tool_use,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=self.template_kwargs,
            prefill=self.prefill,
        )


class Turn:
    """A reply that is being generated, read as parts.

    Attributes:
        prompt_ids: what the model goes on from.
    """

    def __init__(
        self,
        answer: Answer,
        prompt_ids: Sequence[int],
        parser: ToolCallParser | None = None,
        splitter: ReasoningSplitter | None = None,
    ) -> None:
        self.answer = answer
        self.prompt_ids = prompt_ids
        self._parser = parser
        self._splitter = splitter

    @classmethod
    async def begin(
        cls,
        kind: str,
        served: ServedModel,
        conversation: Conversation,
        params: SamplingParams,
        *,
        cache_salt: str,
        max_waiting: int,
        wishes: Callable[[Sequence[int]], Awaitable[Sequence[Wish]]] | None = None,
    ) -> Turn:
        """Queue the turn. Errors are those of `Conversation.encode` and `Answer.submit`."""
        model, tool_use = served.engine.model, conversation.tool_use
        ids = await conversation.encode(served)
        wished = () if wishes is None else await wishes(ids)
        if tool_use is None:
            await served.engine.prepare(params)
        else:
            params = await tool_use.prepare(params, served.engine)
        answer = Answer.submit(
            kind,
            served,
            [ids],
            [params],
            cache_salt=cache_salt,
            max_waiting=max_waiting,
            wishes=wished,
            messages=history(conversation.messages, tools=None if tool_use is None else tool_use.tools),
        )
        return cls(answer, ids, None if tool_use is None else tool_use.parser(model), _splitter(model, ids))

    @property
    def output(self) -> RequestOutput:
        """Once all parts were read."""
        return self.answer.outputs[0]

    @property
    def has_called(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    async def parts(self) -> AsyncIterator[list[Part]]:
        """What comes, as it comes. Leaving early aborts the turn."""
        async for _, delta in self.answer.deltas():
            parts = self._read(delta.text, is_last=delta.output is not None)
            if parts:
                yield parts

    async def whole(self, request: Request) -> list[Part]:
        """All parts, at the end. If the client of `request` goes away, the turn is aborted."""
        parts: list[Part] = []
        with watch_for_disconnect(request.receive, self.answer.abort):
            async for more in self.parts():
                parts += more
        return parts

    def _read(self, text: str, *, is_last: bool) -> list[Part]:
        thought = ""
        if self._splitter is not None:
            thought, text = self._splitter.feed(text)
            if is_last:
                rest = self._splitter.finish()
                thought, text = thought + rest.reasoning, text + rest.content
        parts: list[Part] = [Thought(thought)] if thought else []
        if self._parser is None:
            return [*parts, Text(text)] if text else parts
        parts += self._parser.feed(text)
        return [*parts, *self._parser.finish()] if is_last else parts


def _splitter(model: Model, prompt_ids: Sequence[int]) -> ReasoningSplitter | None:
    """What tells thoughts from the answer; None for a model whose template knows of none."""
    opening, closing = "<think>", "</think>"
    if model.chat_template is None or opening not in model.chat_template.source:
        return None
    end = model.tokenizer.decode(list(prompt_ids[-(len(opening) + 4) :]), skip_special=False).rstrip()
    return ReasoningSplitter(opening, closing, is_open=end.endswith(opening))
