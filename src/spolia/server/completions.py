"""`POST /v1/completions`: text or token ids in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from spolia.engine import Delta, RequestOutput, TokenLogprobs
from spolia.errors import InvalidRequest
from spolia.models import Tokenizer
from spolia.server.access import note_request_id
from spolia.server.answer import Answer
from spolia.server.beams import beam_search
from spolia.server.body import read_body
from spolia.server.config import ServerConfig
from spolia.server.contrastive import contrastive_search
from spolia.server.encoding import encode, params_of_choices
from spolia.server.fill_in import infill_ids
from spolia.server.rendering import Extras, prompt_ids, prompt_logprobs, rendered_prompt, respond
from spolia.server.replies import CompletionChoice, CompletionLogprobs, CompletionReply
from spolia.server.schema import CompletionRequest, prompts
from spolia.server.search import respond_with_search
from spolia.server.served import ServedModels
from spolia.server.sessions import completion_turn, find_session

__all__ = ["CompletionEndpoint"]


class CompletionEndpoint:
    """Bound to the models and limits of one app."""

    def __init__(self, models: ServedModels, config: ServerConfig) -> None:
        self._models = models
        self._config = config

    async def respond(self, request: Request) -> Response:
        """Continue a text, or several."""
        body = await read_body(request, CompletionRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        body.check()
        note_request_id(body.request_id)
        tokenizer = served.model.tokenizer
        asked = prompts(body)
        turn = None
        if body.session is not None:
            if body.suffix or len(asked) != 1:
                raise InvalidRequest("a session takes one prompt a turn, and no suffix", param="prompt")
            turn = await completion_turn(await find_session(served, body.session, body.cache_salt), tokenizer, asked[0])
            ids = [turn.prompt_ids]
        else:
            ids = await _prompt_ids(body, tokenizer)
        echoes = [""] * len(asked)
        if body.echo:
            echoes = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in asked]
        model = served.model
        search = await beam_search(body, served.engine, model) or await contrastive_search(body, served.engine, model)
        if search is not None:
            return await respond_with_search(
                request,
                body,
                "cmpl",
                served,
                ids,
                search,
                lambda answer: _CompletionRendering(body, answer, tokenizer, echoes),
                max_waiting=self._config.max_waiting,
                turn=turn,
            )
        answer = Answer.submit(
            "cmpl",
            served,
            ids,
            await params_of_choices(body, served.engine),
            cache_salt=body.cache_salt or "",
            max_waiting=self._config.max_waiting,
            wishes=body.wishes(),
            turn=turn,
        )
        answer.is_prompt_only = body.is_prompt_only
        return await respond(request, body, answer, _CompletionRendering(body, answer, tokenizer, echoes))

    async def render(self, request: Request) -> Response:
        """The prompts as token ids and as text, without answers."""
        body = await read_body(request, CompletionRequest, max_bytes=self._config.max_body_bytes)
        served = await self._models.ready(body.model)
        body.check()
        if body.session is not None:
            raise InvalidRequest("session is only known when there is an answer; leave it out", param="session")
        prompts_ids = await _prompt_ids(body, served.model.tokenizer)
        params = body.sampling_params(0)
        rendered = [rendered_prompt("cmpl", served, body, ids, params) for ids in prompts_ids]
        return Response(msgspec.json.encode(rendered), media_type="application/json")


async def _prompt_ids(body: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    asked = prompts(body)
    if body.suffix:
        return [infill_ids(tokenizer, prompt, body.suffix) for prompt in asked]
    add_special = body.add_special_tokens is not False
    return [
        await encode(tokenizer, prompt, add_special=add_special) if isinstance(prompt, str) else prompt
        for prompt in asked
    ]


class _CompletionRendering:
    """
    Args:
        echoes: by prompt, the text to put before each of its choices; "" for none.
    """

    def __init__(self, body: CompletionRequest, answer: Answer, tokenizer: Tokenizer, echoes: list[str]) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._echoes = [echo for echo in echoes for _ in range(body.num_choices)]
        self._with_ids = bool(body.return_token_ids)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._with_logprobs = body.logprobs is not None
        self._with_names = not body.return_tokens_as_token_ids
        self._offsets: dict[int, int] = {}  # by choice that has begun: characters its tokens have had so far

    def whole(self, outputs: Mapping[int, RequestOutput], extras: Extras) -> CompletionReply:
        choices = [
            CompletionChoice(
                index=index,
                text=self._echoes[index] + output.text,
                logprobs=self._all_logprobs(index, output),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=list(output.token_ids) if self._with_ids else UNSET,
                prompt_token_ids=list(output.prompt_token_ids) if self._with_ids else UNSET,
                prompt_logprobs=(
                    prompt_logprobs(output.prompt_logprobs, self._tokenizer) if self._with_prompt_logprobs else UNSET
                ),
            )
            for index, output in outputs.items()
        ]
        reply = self._reply(choices, extras)
        reply.timings = extras.timings
        return reply

    def chunk(self, choice: int, delta: Delta) -> CompletionReply:
        part = CompletionChoice(choice, delta.text)
        if choice not in self._offsets:
            self._offsets[choice] = 0
            part.text = self._echoes[choice] + delta.text
            if self._with_ids:
                part.prompt_token_ids = prompt_ids(self._answer, choice, delta)
            if delta.prompt_logprobs is not None and self._with_prompt_logprobs:
                part.prompt_logprobs = prompt_logprobs(delta.prompt_logprobs, self._tokenizer)
            first_id = prompt_ids(self._answer, choice, delta)[0]
            part.logprobs = self._echoed_logprobs(choice, first_id, delta.prompt_logprobs)
        if delta.logprobs:
            more = self._logprobs(choice, delta.logprobs)
            part.logprobs = more if part.logprobs is None else part.logprobs + more
        if self._with_ids:
            part.token_ids = list(delta.token_ids)
        if delta.output is not None:
            part.finish_reason = delta.output.finish_reason
            part.stop_reason = delta.output.stop_reason
        return self._reply([part])

    def blank(self, choice: int) -> CompletionReply:
        return self._reply([CompletionChoice(choice, "")])

    def closing(self, extras: Extras) -> CompletionReply:
        return self._reply([], extras)

    def _reply(self, choices: list[CompletionChoice], extras: Extras = Extras()) -> CompletionReply:  # noqa: B008
        answer = self._answer
        reply = CompletionReply(
            answer.id, answer.created, answer.model, choices, usage=extras.usage, spolia=extras.spolia
        )
        reply.system_fingerprint = answer.fingerprint
        return reply

    def _all_logprobs(self, choice: int, output: RequestOutput) -> CompletionLogprobs | None:
        """Those of the answer, after those of the prompt if it is echoed."""
        if output.logprobs is None:
            return None
        echoed = self._echoed_logprobs(choice, output.prompt_token_ids[0], output.prompt_logprobs)
        answered = self._logprobs(choice, output.logprobs)
        return answered if echoed is None else echoed + answered

    def _echoed_logprobs(
        self, choice: int, first_id: int, prompt: Sequence[TokenLogprobs] | None
    ) -> CompletionLogprobs | None:
        """Those of the prompt, if it is echoed and log-probabilities were asked for; its first token has none."""
        if not self._echoes[choice] or prompt is None or not self._with_logprobs:
            return None
        self._offsets[choice] = len(self._tokenizer.token_text(first_id))
        return CompletionLogprobs([self._name(first_id)], [None], [None], [0]) + self._logprobs(choice, prompt)

    def _name(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if self._with_names else f"token_id:{token_id}"

    def _logprobs(self, choice: int, tokens: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        columns = CompletionLogprobs([], [], [], [])
        offset = self._offsets.get(choice, 0)
        for token in tokens:
            name = self._name(token.token_id)
            columns.tokens.append(name)
            columns.token_logprobs.append(token.logprob)
            # OpenAI lists the sampled token too, wherever it ranks.
            columns.top_logprobs.append({**{self._name(id_): p for id_, p in token.top}, name: token.logprob})
            columns.text_offset.append(offset)
            offset += len(self._tokenizer.token_text(token.token_id))
        self._offsets[choice] = offset
        return columns
