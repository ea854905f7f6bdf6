"""From one HTTP request to the token streams that answer it, and back.

A request may ask for several prompts and for n choices of each; every pair is one engine request, the k-th of
a prompt numbered `prompt * n + k`. They share what they have in common through the cache, and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spolia.engine import (
    DEFAULT_PRIORITY,
    AsyncEngine,
    Delta,
    History,
    RequestOutput,
    SamplingParams,
    SessionTurn,
    TokenStream,
    Wish,
)
from spolia.errors import InvalidRequest, NotReady, Overloaded
from spolia.generation import Stage
from spolia.server.access import Caller, current_caller
from spolia.server.conversations import Conversation
from spolia.server.errors import TookTooLong
from spolia.server.explaining import explain
from spolia.server.logs import log_fields
from spolia.server.replies import CompletionTokensDetails, Usage
from spolia.server.served import ServedModel

__all__ = ["Answer"]

logger = logging.getLogger("spolia.requests")

_TIMEOUT = "request_timeout"


class Answer:
    """The submitted streams of one HTTP request. Use it on the event loop that made it.

    Attributes:
        id: of the whole answer; the engine's requests are `id-choice`.
        submitted_s: by `time.perf_counter`.
        outputs: by choice, those that have ended.
        num_moved_lines: that the canonicaliser moved; None if it was not asked for.
        beams: what is told of each beam among the outputs, if they are any.
        is_prompt_only: the client wants the prompt computed and no token; the one that comes is not shown.
    """

    def __init__(
        self,
        kind: str,
        served: ServedModel,
        num_choices: int,
        messages: Sequence[Mapping[str, Any]] | None = None,
        turn: SessionTurn | None = None,
    ) -> None:
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.submitted_s = time.perf_counter()
        self.outputs: dict[int, RequestOutput] = {}
        self.num_moved_lines: int | None = None
        self.beams: list[dict[str, Any]] = []
        self.is_prompt_only = False
        self._served = served
        self._engine = served.engine
        self._num_choices = num_choices
        self._streams: list[TokenStream] = []
        self._last_token_s: dict[int, float] = {}
        self._num_tokens: Counter[int] = Counter()  # by choice, so far
        self._num_admitted_tokens = 0
        self._messages = messages
        self._turn = turn
        self._explained: dict[int, dict[str, Any]] = {}
        self._earlier: Conversation | None = None
        self._caller = current_caller()
        self._deadline: asyncio.TimerHandle | None = None
        self._is_read = False
        self._is_left = False
        self._ended_by: str | None = None

    @classmethod
    def submit(
        cls,
        kind: str,
        served: ServedModel,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        cache_salt: str,
        max_waiting: int,
        wishes: Sequence[Wish] = (),
        messages: Sequence[Mapping[str, Any]] | None = None,
        turn: SessionTurn | None = None,
        is_limit_soft: bool = False,
    ) -> Answer:
        """Queue each prompt with each of `params`, or nothing at all.

        Args:
            kind: the id's first word, which tells endpoints apart.
            is_limit_soft: a `max_tokens` that the context has no room for is no error, but as many as fit: so it is
                with clients that always send a large one.
            messages: the history (see `conversations`) that the prompt was rendered from, if it was.
            turn: of a session, which the answer becomes part of.

        Raises:
            InvalidRequest: some prompt can never be answered, or there are more than may ever wait.
            Overloaded: `max_waiting` requests would be waiting, or the server is draining.
            SessionBusy: it is not the turn's turn.
        """
        if turn is not None:
            turn.begin()
        try:
            return cls(kind, served, len(params), messages, turn)._submit(
                prompts,
                params,
                cache_salt=cache_salt,
                max_waiting=max_waiting,
                wishes=wishes,
                is_limit_soft=is_limit_soft,
            )
        except BaseException:
            if turn is not None:
                turn.abandon()
            raise

    def _submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        cache_salt: str,
        max_waiting: int,
        wishes: Sequence[Wish],
        is_limit_soft: bool,
    ) -> Answer:
        answer, served = self, self._served
        num_asked = len(prompts) * len(params)
        if num_asked > max_waiting:
            raise InvalidRequest(
                f"{num_asked} answers are asked for, {len(params)} to each of {len(prompts)} prompts; at most "
                f"{max_waiting} may wait here. Send fewer at a time, or raise max_waiting",
                param="n" if len(params) > max_waiting else "prompt",
            )
        if served.num_waiting + num_asked > max_waiting:
            raise Overloaded(f"{served.num_waiting} requests are waiting, of at most {max_waiting}; try again later")
        caller = answer._caller
        cache_salt = caller.cache_salt(cache_salt)
        history = self.history(served.engine.namespace_of(params[0], cache_salt))
        if caller.account is not None:
            self._num_admitted_tokens = len(params) * sum(map(len, prompts))
            caller.account.admit(self._num_admitted_tokens)  # from here on whatever fails has to settle it
            wishes = _capped(wishes, caller.account.settings.priority)
        try:
            for choice, (prompt, choice_params) in enumerate(itertools.product(prompts, params)):
                id_ = f"{answer.id}-{choice}"
                if is_limit_soft and len(prompt) + (choice_params.max_tokens or 0) > served.engine.context_tokens:
                    choice_params = replace(choice_params, max_tokens=None)
                stream = served.engine.generate(
                    prompt,
                    choice_params,
                    request_id=id_,
                    cache_salt=cache_salt,
                    wishes=wishes,
                    tenant=caller.share,
                    history=history,
                )
                answer._streams.append(stream)
                served.streams.add(stream)
        except BaseException:
            answer.abort()
            answer._settle()
            raise
        answer._deadline = asyncio.get_running_loop().call_later(served.request_timeout_s, answer._time_out)
        return answer

    def history(self, namespace: bytes) -> History | None:
        """What is known of the prompt: so many of its first tokens have been computed before, if they are the same."""
        if self._turn is not None:  # the last token of an answer has no KV
            return History(max(0, self._turn.num_history_tokens - 1), is_exact=True)
        if self._messages is None:
            return None
        earlier = self._served.conversations.continued(namespace, self._messages)
        return None if earlier is None else History(earlier.num_tokens)

    def _time_out(self) -> None:
        self.cut(_TIMEOUT)

    def cut(self, reason: str) -> None:
        """End what has not ended; the answer so far counts as one that reached a limit, for this `stop_reason`."""
        self._ended_by = reason
        self.abort()

    def decisions(self, choice: int) -> tuple[tuple[Stage, ...], ...]:
        """Those of the tokens so far, where `explain_candidates` asked for them."""
        return self._streams[choice].request.decisions or ()

    def params(self, choice: int) -> SamplingParams:
        return self._streams[choice].request.params

    @property
    def model(self) -> str:
        return self._served.name

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    @property
    def fingerprint(self) -> str:
        return self._engine.fingerprint

    def prompt_token_ids(self, choice: int) -> list[int]:
        ids: list[int] = self._streams[choice].request.prompt_token_ids.tolist()
        return ids

    def abort(self) -> None:
        """End every stream that has not ended; their blocks are given back within a step.

        An answer that nobody has begun to read is settled here: there will be no end of its reading.
        """
        self._is_left = True
        if not self._is_read:
            self._settle()
        for choice in range(len(self._streams)):
            if choice not in self.outputs:
                self._engine.abort(f"{self.id}-{choice}")

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, delta) as they come, until all have ended. Leaving early aborts the rest.

        Raises:
            TookTooLong: its time is up, and a choice has not begun.
            NotReady: the engine was closed before its end.
            SpoliaError: the engine failed.
        """
        self._is_read = True
        try:
            if len(self._streams) == 1:  # no queue between the engine and the only reader
                async for delta in self._streams[0]:
                    noted = self._note(0, delta)
                    if delta.output is not None and self._turn is not None:
                        await self._turn.session.kept()  # who has read the answer can go on from it, come what may
                    yield 0, noted
            else:
                async for pair in self._merged():
                    yield pair
        finally:
            self.abort()
            self._settle()

    def _settle(self) -> None:
        """Once, at the end: what the answer took is put down to who asked, what they did not wait for included."""
        self._served.streams.difference_update(self._streams)
        if self._turn is not None:
            self._turn.abandon()
        if self._deadline is not None:
            self._deadline.cancel()
        account, self._caller = self._caller.account, Caller(None, self._caller.request_id)
        if account is not None:
            num_prompt = sum(len(stream.request.prompt_token_ids) for stream in self._streams)
            account.settle(num_prompt + self._num_tokens.total() - self._num_admitted_tokens)

    async def finish(self) -> dict[int, RequestOutput]:
        """All outputs, by choice; of a search those that there are: its client may have left, or it found no more."""
        async for _ in self.deltas():
            pass
        return dict(sorted(self.outputs.items()))

    def usage(self) -> Usage:
        """Sums over the choices that have ended. A prompt counts once, with the cache hit of its first choice."""
        firsts = [output for choice, output in self.outputs.items() if choice % self._num_choices == 0]
        return Usage.of(
            prompt_tokens=sum(len(output.prompt_token_ids) for output in firsts),
            completion_tokens=sum(len(output.token_ids) for output in self.outputs.values()),
            cached_tokens=sum(output.num_cached_tokens for output in firsts),
            truncated_tokens=sum(output.num_truncated_tokens for output in firsts),
            shifted_tokens=sum(output.num_shifted_tokens for output in self.outputs.values()),
            rounded_tokens=sum((Counter(output.num_rounded_tokens) for output in firsts), Counter()),
            moved_lines=self.num_moved_lines,
            drafts=self._drafts(),
        )

    def usage_so_far(self) -> Usage:
        """Tokens of prompts and answers, while they come; how much of the prompts was reused is told at the end."""
        firsts = range(0, len(self._streams), self._num_choices)
        num_prompt = sum(len(self._streams[choice].request.prompt_token_ids) for choice in firsts)
        num_completion = self._num_tokens.total()
        return Usage(num_prompt, num_completion, num_prompt + num_completion)

    def _drafts(self) -> CompletionTokensDetails | None:
        """What was drafted; None where nothing was and no prediction came along."""
        outputs = self.outputs.values()
        is_predicted = any(stream.request.prediction_ids is not None for stream in self._streams)
        if not is_predicted and not any(output.num_drafted_tokens for output in outputs):
            return None
        predicted = [output.drafts["prediction"] for output in outputs if "prediction" in output.drafts]
        num_accepted = sum(count.num_accepted for count in predicted)
        return CompletionTokensDetails(
            accepted_prediction_tokens=num_accepted,
            rejected_prediction_tokens=sum(count.num_drafted for count in predicted) - num_accepted,
            drafted_tokens=sum(output.num_drafted_tokens for output in outputs),
            accepted_tokens=sum(output.num_accepted_tokens for output in outputs),
        )

    def explanation(self) -> dict[str, Any]:
        """What `"explain": true` adds: per choice, what was reused and why not more, and where the time went."""
        return {"choices": [self._explain(choice) for choice in sorted(self.outputs)]}

    def _decisions(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        """How each token came about, if `explain_candidates` asked for it."""
        if output.decisions is None:
            return {}
        text = self._engine.model.tokenizer.token_text
        tokens: list[dict[str, Any]] = [
            {
                "token_id": token_id,
                "token": text(token_id),
                "chosen": output.strategy,
                "drafted": output.foreseen.get(index),
                "stages": [
                    {
                        "name": stage.name,
                        "num_left": stage.num_left,
                        "top": [{"token_id": id_, "token": text(id_), "probability": p} for id_, p in stage.top],
                        **({} if stage.form is None else {"form": stage.form._asdict()}),
                        **({"told": stage.told} if stage.told else {}),
                    }
                    for stage in stages
                ],
            }
            for index, (token_id, stages) in enumerate(zip(output.token_ids, output.decisions, strict=False))
        ]
        for token, weighed in zip(tokens, output.choices, strict=False):
            options = [
                {
                    "token_id": option.token_id,
                    "token": text(option.token_id),
                    "score": option.score,
                    **option.parts,
                    "is_kept": option.is_kept,
                }
                for option in weighed.options
            ]
            token |= {"score": weighed.score, "rank": weighed.rank, "options": options}
        return {
            "tokens": tokens,
            "num_drafted_tokens": output.num_drafted_tokens,
            "num_accepted_tokens": output.num_accepted_tokens,
        }

    def _explain(self, choice: int) -> dict[str, Any]:
        output = self.outputs[choice]
        timings = output.timings
        return {
            "index": choice,
            **self._explained[choice],
            **self._decisions(choice, output),
            "seed": output.seed,
            "timings": {
                "restore_s": timings.restore_s,
                "queue_s": timings.queue_s,
                "first_token_s": timings.first_token_s,
                "total_s": timings.total_s,
            },
        }

    def take(self, choice: int, output: RequestOutput) -> None:
        """An output that came about without a stream of its own. `remember` it when all are there."""
        self.outputs[choice] = output
        self._keep_explanation(choice, output)
        self._served.metrics.observe(output)
        self._log(output)

    def _note(self, choice: int, delta: Delta) -> Delta:
        """Measure a delta on its way to the client, and log the last one; what the client is to see of it."""
        if delta.output is not None and delta.output.finish_reason == "abort" and self._ended_by is not None:
            # What clients know of limits. "abort" is no word of theirs, and strict ones refuse the whole answer for it.
            delta = replace(delta, output=replace(delta.output, finish_reason="length", stop_reason=self._ended_by))
        if self.is_prompt_only:
            delta = _without_tokens(delta)
        self._num_tokens[choice] += len(delta.token_ids)
        metrics = self._served.metrics
        now_s = time.perf_counter()
        if delta.token_ids:
            previous_s = self._last_token_s.get(choice)
            if previous_s is not None:
                metrics.observe_gap(now_s - previous_s, len(delta.token_ids))
            self._last_token_s[choice] = now_s
        if delta.output is not None:
            self.outputs[choice] = delta.output
            self._served.streams.discard(self._streams[choice])
            self._take_output(choice, delta.output)
            metrics.observe(delta.output)
            if self._caller.trace is not None:
                self._caller.trace.record(self.model, self._streams[choice].request.params, delta.output)
            self._log(delta.output)
            if _took_too_long(delta.output) and not delta.output.token_ids:
                raise TookTooLong(
                    f"no token came within {self._served.request_timeout_s:g} s, the longest that an answer may take "
                    "here; try again later, shorten the prompt, or raise --request-timeout"
                )
            if delta.output.finish_reason == "abort" and not self._is_left:
                raise NotReady(
                    f"the server is ending, and this answer was cut off after {len(delta.output.token_ids)} tokens; "
                    "send the request again when it has been started anew"
                )
        return delta

    def _log(self, output: RequestOutput) -> None:
        timings = output.timings
        fields: dict[str, Any] = {
            "request": output.request_id,
            "model": self.model,
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "reason": None if output.explanation is None else output.explanation.reason.value,
            "output_tokens": len(output.token_ids),
            "ttft_ms": None if timings.first_token_s is None else round(1e3 * timings.first_token_s, 1),
            "total_ms": round(1e3 * timings.total_s, 1),
            "finish": _TIMEOUT if _took_too_long(output) else output.finish_reason,
        }
        caller = self._caller
        if caller.account is not None:
            fields |= {"key": caller.account.settings.name, "tenant": caller.tenant}
        if caller.request_id is not None:
            fields["client_request"] = caller.request_id
        if caller.ignored:
            fields["ignored"] = ",".join(caller.ignored)
        log_fields(logger, "answered", fields)
        self._served.recent.append(
            {
                "request": output.request_id,
                "ended": time.time(),
                "restore_s": timings.restore_s,
                "queue_s": timings.queue_s,
                "first_token_s": timings.first_token_s,
                "total_s": timings.total_s,
                "num_prompt_tokens": fields["prompt_tokens"],
                "num_cached_tokens": fields["cached_tokens"],
                "num_output_tokens": fields["output_tokens"],
                "finish": output.finish_reason,
            }
        )

    def _take_output(self, choice: int, output: RequestOutput) -> None:
        """Explain it, for whoever asks now or later, and remember what was said."""
        self._keep_explanation(choice, output)
        self._served.curve.take(output, self._streams[choice].request.wishes)
        if self._turn is not None and output.finish_reason != "abort":
            self._turn.finish(output.token_ids, output.text)
        self.remember(choice)

    def _keep_explanation(self, choice: int, output: RequestOutput) -> None:
        served = self._served
        if self._messages is not None and not self._explained:  # later the log has this request's own choices
            self._earlier = served.conversations.closest(output.namespace, self._messages)
        explained = explain(output, self._engine.model.tokenizer, messages=self._messages, earlier=self._earlier)
        self._explained[choice] = explained
        served.explained.add(self.id, choice, explained, self._caller.tenant)

    def remember(self, *choices: int) -> None:
        """Chats may go on from these."""
        messages = self._messages
        if messages is None:
            return
        for choice in choices:
            output = self.outputs[choice]
            if output.finish_reason != "abort":
                num_tokens = len(output.prompt_token_ids) + len(output.token_ids) - 1
                self._served.conversations.add(
                    Conversation(f"{self.id}-{choice}", output.namespace, messages, num_tokens, output.text)
                )

    async def _merged(self) -> AsyncIterator[tuple[int, Delta]]:
        arrived: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()

        async def pump(choice: int) -> None:
            try:
                async for delta in self._streams[choice]:
                    arrived.put_nowait((choice, self._note(choice, delta)))
                arrived.put_nowait(None)
            except Exception as error:
                arrived.put_nowait(error)

        pumps = [asyncio.ensure_future(pump(choice)) for choice in range(len(self._streams))]
        try:
            num_open = len(pumps)
            while num_open:
                item = await arrived.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()


def _without_tokens(delta: Delta) -> Delta:
    output = delta.output
    if output is not None:
        none = None if output.logprobs is None else ()
        output = replace(output, text="", token_ids=(), logprobs=none, finish_reason="length", stop_reason=None)
    return Delta("", (), (), output, delta.prompt_logprobs)


def _took_too_long(output: RequestOutput) -> bool:
    return output.finish_reason == "length" and output.stop_reason == _TIMEOUT


def _capped(wishes: Sequence[Wish], priority: int | None) -> Sequence[Wish]:
    """A key's priority is what its KV gets, and no more, whatever a request wishes."""
    if priority is None:
        return wishes
    if not wishes:
        return [] if priority == DEFAULT_PRIORITY else [Wish(priority)]
    return [replace(wish, priority=min(wish.priority, priority)) for wish in wishes]
