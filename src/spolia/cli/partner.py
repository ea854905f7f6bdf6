"""Who answers in `spolia chat`: a model of this process, or one of a server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import httpx

from spolia.cli.flags import no_answer, parse_url
from spolia.cli.generate import figures
from spolia.cli.talk import Messages, cache_bar, explained
from spolia.engine import LLM, Ledger, RequestOutput, SamplingParams
from spolia.errors import InvalidRequest, SpoliaError

__all__ = ["LocalPartner", "Partner", "RemotePartner"]

_TIMEOUT_S = 600


class Partner(Protocol):
    """What a conversation needs; the words about an answer are of the last one that came to its end."""

    def describe(self) -> str:
        """Who it is."""

    def answer(self, messages: Messages) -> Iterator[str]:
        """The next turn, bit by bit.

        Raises:
            InvalidRequest: it cannot be answered.
            SpoliaError: the server is not there.
        """

    def figures(self) -> str:
        """Tokens, speed and reuse of the last answer."""

    def explain(self) -> str | None:
        """Where the last answer's context came from; None before the first."""

    def cache(self) -> str:
        """What the pools hold."""


class LocalPartner:
    """A model of this process.

    Raises:
        InvalidRequest: a base model, which cannot chat.
    """

    def __init__(self, llm: LLM, source: str, params: SamplingParams) -> None:
        if llm.model.chat_template is None:
            raise InvalidRequest(f"{source} is a base model without a chat template; use `spolia generate`")
        self._llm = llm
        self._params = params
        self._last: RequestOutput | None = None
        self._took_s = 0.0

    def describe(self) -> str:
        return self._llm.model.describe()

    def answer(self, messages: Messages) -> Iterator[str]:
        start_s = time.perf_counter()
        for delta in self._llm.stream(self._llm.chat_prompt(messages), self._params):
            if delta.output is not None:
                self._last, self._took_s = delta.output, time.perf_counter() - start_s
            yield delta.text

    def figures(self) -> str:
        return "" if self._last is None else figures(self._last, self._took_s)

    def explain(self) -> str | None:
        output = self._last
        if output is None:
            return None
        ranges = [
            (part.start, part.stop, part.source, None if part.reason is None else part.reason.value)
            for part in output.ranges
        ]
        end = None if output.explanation is None else output.explanation.divergence
        ids = [] if end is None else output.prompt_token_ids[max(0, end - 8) : end + 8]
        around = self._llm.model.tokenizer.decode(ids, skip_special=False)
        return explained(ranges, end, around)

    def cache(self) -> str:
        return cache_bar(self._llm.stats.ledger)


class RemotePartner:
    """A model of a server.

    Args:
        model: None: the first that it lists.
        fields: of the request, besides the messages.

    Raises:
        InvalidRequest: it has no such model.
        SpoliaError: the server is not there.
    """

    def __init__(self, url: str, model: str | None, key: str | None, fields: Mapping[str, Any]) -> None:
        base = parse_url(url)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=base, timeout=_TIMEOUT_S, trust_env=False, headers=headers)
        self._url = url
        self._fields = dict(fields)
        names = [card["id"] for card in self._get("/v1/models")["data"]]
        if model is not None and model not in names:
            raise InvalidRequest(f"{url} does not serve {model!r}; it has {', '.join(names)}", param="model")
        self._model = model or names[0]
        self._last: dict[str, Any] | None = None
        self._num_output_tokens = 0
        self._finish = ""

    def describe(self) -> str:
        return f"{self._model} at {self._url}"

    def answer(self, messages: Messages) -> Iterator[str]:
        wanted = {"stream": True, "explain": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "messages": messages, **self._fields, **wanted}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise self._refusal(reply)
                for line in reply.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def figures(self) -> str:
        if self._last is None:
            return ""
        parts = [f"{self._last['num_prompt_tokens']} tokens in, {self._last['num_cached_tokens']} reused"]
        parts.append(f"{self._num_output_tokens} out")
        timings = self._last["timings"]
        if timings["first_token_s"] is not None:
            decode_s = timings["total_s"] - timings["first_token_s"]
            if self._num_output_tokens > 1 and decode_s > 0:
                parts.append(f"{(self._num_output_tokens - 1) / decode_s:.0f} tok/s")
            parts.append(f"first after {1e3 * timings['first_token_s']:.0f} ms")
        if self._finish == "length":
            parts.append("cut at its limit")
        return f"[{' · '.join(parts)}]"

    def explain(self) -> str | None:
        told = self._last
        if told is None:
            return None
        ranges = [(part["start"], part["stop"], part["source"], part.get("reason")) for part in told.get("ranges", ())]
        return explained(ranges, told.get("divergence"), told.get("text_around", ""))

    def cache(self) -> str:
        groups = self._get("/v1/cache/live", model=self._model)["groups"]
        return cache_bar([Ledger(each["free"], each["cached"], each["leased"], each["total"]) for each in groups])

    def close(self) -> None:
        self._http.close()

    def _take(self, event: dict[str, Any]) -> Iterator[str]:
        if "error" in event:
            raise SpoliaError(event["error"]["message"])
        for choice in event.get("choices", ()):
            self._finish = choice.get("finish_reason") or self._finish
            if text := choice["delta"].get("content"):
                yield text
        if event.get("usage"):
            self._num_output_tokens = event["usage"]["completion_tokens"]
        if event.get("spolia"):
            self._last = event["spolia"]["choices"][0]

    def _get(self, path: str, **params: str) -> dict[str, Any]:
        try:
            reply = self._http.get(path, params=params)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if reply.status_code != 200:
            raise self._refusal(reply)
        told: dict[str, Any] = reply.json()
        return told

    def _unreachable(self, error: httpx.HTTPError) -> SpoliaError:
        return no_answer(self._url, error)

    def _refusal(self, reply: httpx.Response) -> SpoliaError:
        try:
            told = reply.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            told = "it is no Spolia server"
        kind = InvalidRequest if reply.status_code in (400, 404) else SpoliaError
        return kind(f"{self._url} answered {reply.status_code}: {told}")
