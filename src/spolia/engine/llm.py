"""The engine for programs that just want answers."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from spolia.engine.assembly import Engine, build_engine
from spolia.engine.beams import BeamRun
from spolia.engine.config import EngineConfig
from spolia.engine.contrastive import ContrastiveRun
from spolia.engine.core import Observer
from spolia.engine.embedding import Embedding, EmbeddingRun, Pooling
from spolia.engine.outputs import BeamOutput, Delta, EngineStats, RequestOutput
from spolia.engine.request import Request
from spolia.engine.thread import EngineThread
from spolia.errors import InvalidRequest, SpoliaError
from spolia.generation import BeamParams, ContrastiveParams, SamplingParams
from spolia.models import Model
from spolia.tiers import HandedDown, TierUse

__all__ = ["LLM"]


class Streamer(Protocol):
    """What transformers calls a `BaseStreamer`."""

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


_NO_ROOM_S = 0.02  # until running requests may have left some

Ids: TypeAlias = NDArray[np.int32]
_Mail: TypeAlias = "queue.SimpleQueue[tuple[int, Delta | SpoliaError]]"


class LLM:
    """A model with its engine. Any thread may call it; calls at the same time share the engine's batch.

        with LLM("smollm2") as llm:
            print(llm.generate("Name three rivers.").text)

    Args:
        model: a source as `models.load` takes it, a loaded model, or a whole `Engine` that was built elsewhere.
        config: settings; None: all measured.
        observer: told of each step and each finished request, on the engine's thread.
        settings: fields of `EngineConfig`, instead of or on top of `config`.

    Raises:
        ModelError: the model cannot be had or read.
        InvalidRequest: a setting that is impossible with this model.
    """

    def __init__(
        self,
        model: str | Path | Model | Engine,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(model, Engine):
            self._engine = model
        else:
            self._engine = build_engine(model, replace(config or EngineConfig(), **settings), observer=observer)
        self._thread: EngineThread[tuple[_Mail, int]] = EngineThread(self._engine.core, _deliver)
        weakref.finalize(self, self._thread.close)  # the thread ends with its owner, or before the interpreter does

    @property
    def model(self) -> Model:
        return self._engine.model

    @property
    def fingerprint(self) -> str:
        """Of all that an answer depends on besides its request."""
        return self._engine.fingerprint

    @property
    def config(self) -> EngineConfig:
        """The settings as resolved at start: nothing that was to be measured is left None."""
        return self._engine.config

    @property
    def stats(self) -> EngineStats:
        """Counters and block ledger as of the last step."""
        return self._engine.core.stats

    @overload
    def generate(
        self, prompts: str | list[int] | Ids, params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[Ids],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one prompt, or many at once.

        Args:
            prompts: a text, a list or array of token ids, or a list of any of these.
            params: for all prompts, or one each.
            cache_salt: only requests with the same salt share KV.

        Returns:
            An output for a prompt; a list, in the order of the prompts, for a list of prompts.

        Raises:
            InvalidRequest: a prompt that can never be answered; none was started.
        """
        is_one = not isinstance(prompts, list) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = [prompts] if is_one else prompts
        each = params if isinstance(params, list) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidRequest(f"{len(each)} params for {len(many)} prompts; give one, or one each", param="params")
        admit = self._engine.admission.admit
        outputs = self._answer(
            [admit(prompt, one, cache_salt=cache_salt) for prompt, one in zip(many, each, strict=True)]
        )
        return outputs[0] if is_one else outputs

    def _answer(self, requests: Sequence[Request]) -> list[RequestOutput]:
        outputs = {index: delta.output for index, delta in self._run(requests) if delta.output is not None}
        return [outputs[index] for index in range(len(requests))]

    def stream(
        self, prompt: str | list[int] | Ids, params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[Delta]:
        """Answer a prompt bit by bit; the last delta carries the whole output. Closing the iterator ends the request.

        Raises:
            InvalidRequest: at the call, if the prompt can never be answered.
        """
        request = self._engine.admission.admit(prompt, params, cache_salt=cache_salt)
        return (delta for _, delta in self._run([request]))

    def stream_to(
        self,
        streamer: Streamer,
        prompt: str | list[int] | Ids,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Answer a prompt, and hand tokens to a streamer of transformers (`TextStreamer`, ...) as they come.

        Raises:
            InvalidRequest: the prompt can never be answered.
        """
        import torch

        request = self._engine.admission.admit(prompt, params, cache_salt=cache_salt)
        streamer.put(torch.from_numpy(request.prompt_token_ids.astype(np.int64))[None])
        outputs = []
        try:
            for _, delta in self._run([request]):
                for token_id in delta.token_ids:
                    streamer.put(torch.tensor([token_id]))
                if delta.output is not None:
                    outputs.append(delta.output)
        finally:  # whoever reads it in another thread waits for that
            streamer.end()
        return outputs[0]

    def beam_search(
        self, prompt: str | list[int] | Ids, params: BeamParams | None = None, *, cache_salt: str = ""
    ) -> list[BeamOutput]:
        """The likeliest continuations of a prompt, best first, as beam search finds them.

        Beams share in the cache all that they have in common: a beam that forks copies at most the part of a block.

        Raises:
            InvalidRequest: the prompt and `max_tokens` do not fit the context.
        """
        run = BeamRun(self._engine.admission, prompt, params or BeamParams())
        while not run.is_over:
            run.take(
                self._answer(
                    [
                        self._engine.admission.admit(ids, each, cache_salt=cache_salt, is_part=is_part)
                        for ids, each, is_part in run.requests()
                    ]
                )
            )
        return run.beams()

    def contrastive_search(
        self, prompt: str | list[int] | Ids, params: ContrastiveParams | None = None, *, cache_salt: str = ""
    ) -> RequestOutput:
        """A continuation of likely tokens that are unlike what was said before.

        Costs, for each token, one more token of the model for each candidate; they share what is cached.

        Raises:
            InvalidRequest: the prompt and `max_tokens` do not fit the context.
            ModelError: the model's results are not finite.
        """
        run = ContrastiveRun(self._engine.admission, prompt, params or ContrastiveParams(), cache_salt=cache_salt)
        while run.prompt.states is None:
            if not self._thread.call(run.prompt.step).result():
                time.sleep(_NO_ROOM_S)
        run.begin()
        while not run.is_over:
            ids, one = run.request()
            self._answer([self._engine.admission.admit(ids, one, cache_salt=cache_salt, is_part=True)])
            run.take(self._embed(run.candidates(), cache_salt=cache_salt, is_part=True))
        return run.output()

    def embed(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling = "last",
        cache_salt: str = "",
        truncate: bool = False,
    ) -> list[Embedding]:
        """Vectors of texts, or of token ids: the model's last hidden state, of the last token or the mean of all.

        Args:
            truncate: keep the beginning of inputs that are too long.

        Raises:
            InvalidRequest: an input is empty or too long, or there is no such pooling.
            ModelError: the model's results are not finite.
        """
        return self._embed(prompts, pooling=pooling, cache_salt=cache_salt, truncate=truncate)

    def _embed(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling = "last",
        cache_salt: str,
        truncate: bool = False,
        is_part: bool = False,
    ) -> list[Embedding]:
        admission = self._engine.admission
        inputs = [admission.check_input(prompt, truncate=truncate) for prompt in prompts]
        # Vectors are compared with those of another day, so nothing in them may have been rounded.
        namespace = admission.namespace_for(cache_salt, is_exact=True)
        run = EmbeddingRun(inputs, namespace=namespace, pooling=pooling, is_part=is_part)
        while (embeddings := run.embeddings) is None:
            if not self._thread.call(run.step).result():
                time.sleep(_NO_ROOM_S)
        return embeddings

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Answer a conversation, rendered by the model's own chat template.

        Args:
            messages: as in OpenAI's API: `{"role": "user", "content": "..."}` and so on.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses these messages.
        """
        return self.generate(self.chat_prompt(messages, tools=tools), params, cache_salt=cache_salt)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The token ids that `chat` would send, for use with `stream`.

        Raises:
            InvalidRequest: as `chat`.
        """
        template = self.model.chat_template
        if template is None:
            raise InvalidRequest(f"model {self.model.name} has no chat template; use generate", param="messages")
        # The template writes the special tokens itself.
        return self.model.tokenizer.encode(template.render(messages, tools=tools), add_special=False)

    def attach_tier(self, use: TierUse, index: int | None = None) -> None:
        """Use one more tier, as the `index`-th fastest; None: as the slowest. Requests go on meanwhile.

        Raises:
            StorageUnavailable: it does not work. Nothing has changed.
            InvalidRequest: there is one of that name.
        """
        self._thread.attach_tier(use, index)

    def detach_tier(self, name: str, timeout_s: float = 10.0) -> HandedDown:
        """Write what waits for a tier, then do without it; what an exclusive one alone has goes to the tier below.

        Waits, as long as something gets done within that time; requests go on meanwhile.

        Returns:
            What became of the blocks that an exclusive tier alone had: without a tier below they are dropped.

        Raises:
            StorageUnavailable: not all could be written. The tier is in use as before.
            InvalidRequest: there is none of that name.
        """
        return self._thread.detach_tier(name, timeout_s)

    def close(self) -> None:
        """End the engine's thread; what is in flight is aborted. May be called again."""
        self._thread.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Delta]]:
        """Deltas of all requests as they come, each with its request's index. Ending early (Ctrl-C too) aborts them."""
        mail: _Mail = queue.SimpleQueue()
        unfinished = {index: request.request_id for index, request in enumerate(requests)}
        self._thread.submit([(request, (mail, index)) for index, request in enumerate(requests)])
        try:
            while unfinished:
                index, event = mail.get()
                if isinstance(event, SpoliaError):
                    raise event
                if event.output is not None:
                    del unfinished[index]
                yield index, event
        finally:
            if unfinished:
                self._thread.abort(list(unfinished.values()))


def _deliver(events: Sequence[tuple[tuple[_Mail, int], Delta | SpoliaError]]) -> None:
    for (mail, index), event in events:
        mail.put((index, event))
