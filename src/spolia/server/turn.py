"""One turn of a conversation: what every chat API but OpenAI's own makes its replies of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.requests import Request

from spolia.engine import RequestOutput, SamplingParams, TokenLogprobs, Wish
from spolia.generation import ReasoningSplitter
from spolia.models import Model
from spolia.server.answer import Answer
from spolia.server.conversations import history
from spolia.server.encoding import after_thoughts, prepare_form_of
from spolia.server.prompting import Conversation
from spolia.server.served import ServedModel
from spolia.server.sse import watch_for_disconnect
from spolia.server.toolcalls import Part, Text, Thought, ToolCallParser

__all__ = ["Turn", "splitter_of"]

_TAGS = ("<think>", "</think>")


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
        self._logprobs: list[TokenLogprobs] = []
        self._begins_thinking = splitter is not None and _is_open(answer.engine.model, prompt_ids)

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
        is_limit_soft: bool = False,
        form_field: str = "structured_outputs",
    ) -> Turn:
        """Queue the turn; `is_limit_soft` is that of `Answer.submit`, `form_field` where the client asks for a form.

        Raises:
            InvalidRequest, Overloaded: as `Conversation.encode` and `Answer.submit`.
        """
        model, tool_use = served.model, conversation.tool_use
        ids = await conversation.encode(model)
        wished = () if wishes is None else await wishes(ids)
        splitter = splitter_of(model, ids)
        if tool_use is None:
            params = after_thoughts(params, splitter)
        await prepare_form_of(form_field, served.engine, params)
        if tool_use is not None:
            params = await tool_use.prepare(params, served.engine, model, splitter)
        answer = Answer.submit(
            kind,
            served,
            [ids],
            [params],
            cache_salt=cache_salt,
            max_waiting=max_waiting,
            wishes=wished,
            is_limit_soft=is_limit_soft,
            messages=history(conversation.messages, tools=None if tool_use is None else tool_use.tools),
        )
        return cls(answer, ids, None if tool_use is None else tool_use.parser(model), splitter)

    @property
    def output(self) -> RequestOutput:
        """Once all parts were read."""
        return self.answer.outputs[0]

    @property
    def has_called(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    @property
    def num_thought_tokens(self) -> int:
        """Of the answer's tokens, those up to the end of its thoughts; 0 if it has none."""
        ids, decode = self.output.token_ids, self.answer.engine.model.tokenizer.decode
        if self._splitter is None:
            return 0
        opening, closing = _TAGS
        text = decode(list(ids), skip_special=False)
        if not (self._begins_thinking or text.lstrip().startswith(opening)):
            return 0
        if closing not in text:
            return len(ids)
        return bisect_left(range(len(ids)), 1, key=lambda n: closing in decode(list(ids[:n]), skip_special=False))

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens since the last call, where they were asked for."""
        taken, self._logprobs = self._logprobs, []
        return taken

    async def parts(self) -> AsyncIterator[list[Part]]:
        """What comes, as it comes. Leaving early aborts the turn."""
        async for _, delta in self.answer.deltas():
            self._logprobs += delta.logprobs
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


def splitter_of(model: Model, prompt_ids: Sequence[int]) -> ReasoningSplitter | None:
    """What tells thoughts from the answer; None for a model whose template knows of none."""
    if model.chat_template is None or _TAGS[0] not in model.chat_template.source:
        return None
    return ReasoningSplitter(*_TAGS, is_open=_is_open(model, prompt_ids))


def _is_open(model: Model, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt has begun the thoughts."""
    opening, _ = _TAGS
    end = model.tokenizer.decode(list(prompt_ids[-(len(opening) + 4) :]), skip_special=False).rstrip()
    return end.endswith(opening)
