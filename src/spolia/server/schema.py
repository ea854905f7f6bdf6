"""Request bodies, and how bytes become them.

A field that no struct names is ignored, and the client is told; one that is misspelt is refused, see `unknown_fields`.
A field that would change the answer and is not supported is named in `_NEUTRAL`, and refused unless it holds a value
under which it does nothing: an answer that silently leaves out what was asked for would be a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from spolia.engine import DEFAULT_PRIORITY, SamplingParams, Wish
from spolia.errors import InvalidRequest
from spolia.server.sampling import SamplingFields
from spolia.server.tools import check_tool_calls

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Retention",
    "SamplingRequest",
    "StreamOptions",
    "TokenizeRequest",
    "chat_messages",
    "decode",
    "prompts",
    "refuse_unless",
]

# Values under which a field that is not supported changes nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
}


def refuse_unless(body: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse the fields that `neutral` names, unless they are null or hold a value under which they do nothing.

    Raises:
        InvalidRequest: naming the field and what it may hold.
    """
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            allowed = ", ".join(msgspec.json.encode(v).decode() for v in values)
            hint = f"; leave it out or send {allowed}" if allowed else "; leave it out"
            raise InvalidRequest(f"`{name}` is not supported here{hint}", param=name, code="unsupported_parameter")


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_WISHES = 16  # each may split nodes of the cache's tree
_LONG_PRIORITY = 75  # of what OpenAI's clients want kept for a day


class StreamOptions(msgspec.Struct):
    """`continuous_usage_stats`: usage so far in every chunk, as vLLM has it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Retention(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How long prompt tokens [start, end) are worth keeping; without `end`, all from `start` on, the answer's too."""

    start: int = 0
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    ttl: float | None = None


class SamplingRequest(SamplingFields, kw_only=True):
    """What both generating endpoints understand. None means the default, so that an explicit null is one too."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    prompt_cache_retention: str | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    resumable: bool | None = None
    cache_salt: str | None = None
    explain: bool | None = None
    session: str | None = None
    priority: int | None = None
    ttl: float | None = None
    retention: list[Retention] | None = None

    # Refused unless neutral; see `_NEUTRAL`.
    audio: Any = None
    chat_template: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    web_search_options: Any = None

    # Contrastive search, with `top_k`; see `contrastive`.
    penalty_alpha: float | None = None

    # Beams; see `beams`.
    use_beam_search: bool | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    do_sample: bool | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    force_words: list[str] | None = None
    force_words_ids: list[list[int]] | None = None

    @property
    def wants_beams(self) -> bool:
        return bool(self.use_beam_search) or (self.num_beams is not None and self.num_beams != 1)

    @property
    def takes_best(self) -> bool:
        """Whether the best of several answers are given; of beams, their search takes the best."""
        return self.num_candidates > self.num_choices and not self.wants_beams

    @property
    def comes_at_the_end(self) -> bool:
        """Whether which is the answer is known when all have ended, so that a stream has nothing to say before."""
        return self.wants_beams or self.takes_best

    @property
    def num_candidates(self) -> int:
        """Answers to compute for each prompt, of which the best `num_choices` are given."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    def wishes(self) -> list[Wish]:
        """What `priority`, `ttl` and `retention` ask for.

        Raises:
            InvalidRequest: a value that is not allowed.
        """
        asked = list(self.retention or ())
        if self.prompt_cache_retention == "24h":
            asked.append(Retention(priority=_LONG_PRIORITY, ttl=24 * 3600.0))
        if self.priority is not None or self.ttl is not None:
            priority = DEFAULT_PRIORITY if self.priority is None else self.priority
            asked.append(Retention(priority=priority, ttl=self.ttl))
        if len(asked) > _MAX_WISHES:
            raise InvalidRequest(f"retention has {len(asked)} ranges; at most {_MAX_WISHES} allowed", param="retention")
        try:
            return [Wish(range_.priority, range_.ttl, range_.start, range_.end) for range_ in asked]
        except ValueError as error:
            raise InvalidRequest(
                str(error), param="retention" if self.retention else str(error).split()[0].removesuffix("_s")
            ) from None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        options = self.stream_options
        return options is not None and (options.include_usage or options.continuous_usage_stats)

    def _sampling_params(self, choice: int, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        given = self.given()
        if self.seed is not None:
            given["seed"] = self._seed_of(self.seed, choice)
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        if logprobs is not None:
            given["logprobs"] = logprobs
        return SamplingParams(**given)

    @staticmethod
    def _seed_of(seed: int, choice: int) -> int:
        """Each of n choices gets a seed of its own, or all would be the same text. After the largest comes 0."""
        return seed + choice - (2**64 if choice and seed + choice >= 2**64 else 0)

    def check(self) -> None:
        """Refuse what no later stage would.

        Raises:
            InvalidRequest: a field that is not supported, or `n` or `stream_options` out of place.
        """
        refuse_unless(self, _NEUTRAL)
        if self.prompt_cache_retention not in (None, "in_memory", "in-memory", "24h"):
            raise InvalidRequest(
                f"prompt_cache_retention is {self.prompt_cache_retention!r}; it must be in_memory or 24h",
                param="prompt_cache_retention",
            )
        if not 1 <= self.num_choices <= 64:
            raise InvalidRequest(f"n is {self.n}; allowed are 1 to 64", param="n")
        if not self.num_choices <= self.num_candidates <= 64:
            raise InvalidRequest(
                f"best_of is {self.best_of}; allowed are n ({self.num_choices}) to 64", param="best_of"
            )
        if self.session is not None and self.context_shift is not None:
            raise InvalidRequest(
                "context_shift does not go with session, which keeps every token", param="context_shift"
            )
        if self.session is not None and self.num_choices != 1:
            raise InvalidRequest(f"n is {self.n}; a session has one answer a turn", param="n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")


class CompletionRequest(SamplingRequest, kw_only=True):
    """`/v1/completions`. With `max_tokens` 0 the prompt is computed, for its log-probabilities, and nothing follows."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def is_prompt_only(self) -> bool:
        return self.max_tokens == 0

    def check(self) -> None:
        SamplingRequest.check(self)
        if self.is_prompt_only and (self.wants_beams or self.penalty_alpha):
            raise InvalidRequest("max_tokens is 0, and a search needs tokens to look for", param="max_tokens")

    def sampling_params(self, choice: int) -> SamplingParams:
        """The parameters of one of `n` choices. Without `max_tokens`, 16, as OpenAI has it."""
        max_tokens = (
            16 if self.max_tokens is None else max(1, self.max_tokens) if self.is_prompt_only else self.max_tokens
        )
        params = self._sampling_params(choice, max_tokens=max_tokens, logprobs=self.logprobs)
        if self.echo and self.logprobs is not None:
            params = replace(params, prompt_logprobs=max(self.logprobs, params.prompt_logprobs or 0))
        return params


class ChatRequest(SamplingRequest, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    canonicalise: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: str | None = None
    mcp: bool | list[str] | None = None
    mcp_max_rounds: int | None = None

    def sampling_params(self, choice: int) -> SamplingParams:
        """The parameters of one of `n` choices. Without a limit, as many tokens as the context holds."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        try:
            return self._sampling_params(choice, max_tokens=getattr(self, limit), logprobs=logprobs)
        except InvalidRequest as error:
            spelt = {"max_tokens": limit, "logprobs": "top_logprobs"}.get(error.param or "", error.param)
            said = str(error).replace(f"{error.param} is", f"{spelt} is", 1)
            raise InvalidRequest(said, param=spelt, code=error.code) from None

    def check(self) -> None:
        SamplingRequest.check(self)
        if self.reasoning_format not in (None, "none", "auto", "deepseek"):
            raise InvalidRequest(
                f"reasoning_format is {self.reasoning_format!r}; it must be none, auto or deepseek",
                param="reasoning_format",
            )
        if self.reasoning_effort not in (None, *_EFFORTS):
            raise InvalidRequest(
                f"reasoning_effort is {self.reasoning_effort!r}; it must be one of {', '.join(_EFFORTS)}",
                param="reasoning_effort",
            )
        if None not in (limits := (self.max_tokens, self.max_completion_tokens)) and limits[0] != limits[1]:
            raise InvalidRequest(
                f"max_tokens is {limits[0]} and max_completion_tokens is {limits[1]}: two names of one parameter; "
                "send one",
                param="max_tokens",
            )
        if self.mcp_max_rounds is not None and not self.mcp:
            raise InvalidRequest(
                f"mcp_max_rounds is {self.mcp_max_rounds}; it does nothing without mcp", param="mcp_max_rounds"
            )
        if self.mcp and (self.wants_beams or self.penalty_alpha):
            raise InvalidRequest("mcp does not go with beam search or contrastive search", param="mcp")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}, and needs logprobs to be true", param="top_logprobs"
            )
        if self.echo and not self.continue_final_message:
            raise InvalidRequest(
                "echo repeats the message that is continued: it needs continue_final_message", param="echo"
            )


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`/tokenize`: a prompt, or messages to put through the chat template, as vLLM has it; or llama.cpp's `content`.

    Attributes:
        add_special_tokens: by default of prompts, and not of messages, whose template writes them.
        add_special, parse_special, with_pieces: go with `content`.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template: Any = None  # refused


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


_Body = TypeVar("_Body", bound=msgspec.Struct)
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"([^.\[\]]+)|\[([^\]]*)\]")
_MAX_SHOWN = 60
_NOT_A_NUMBER = re.compile(rb'"(?P<name>\w+)"\s*:\s*(?P<value>-?(?:NaN|Infinity))')


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """`body` as a `kind`; types are taken strictly ("5" is not 5).

    Raises:
        InvalidRequest: not JSON, or not of this kind; `param` is the path of the field at fault.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        path = _PATH.search(str(error))
        if path is None:
            missing = re.search(r"required field `(\w+)`", str(error))
            raise InvalidRequest(f"{error}", param=missing[1] if missing else None) from None
        field = path["path"] or None
        raise InvalidRequest(
            f"{field}{_value_at(body, field or '')}: {_PATH.sub('', str(error)).lower()}", param=field
        ) from None
    except msgspec.DecodeError as error:
        # Python's json module writes NaN, which is no JSON: name the field, as a byte offset helps nobody.
        if found := _NOT_A_NUMBER.search(body):
            name, value = found["name"].decode(), found["value"].decode()
            raise InvalidRequest(f"{name} is {value}; it must be a finite number", param=name) from None
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def _value_at(body: bytes, path: str) -> str:
    """What a body that is JSON has at a path, as part of a sentence; empty where the path does not say."""
    try:
        value = msgspec.json.decode(body)
        for name, index in _STEP.findall(path):
            value = value[name] if name else value[int(index)]
    except (LookupError, TypeError, ValueError, RecursionError):  # [...] is any item, and the rest may be no JSON
        return ""
    shown = repr(value)
    return f" is {shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + '...'}"


def prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The request's prompts, each text or token ids: a flat list of ids is one prompt.

    Raises:
        InvalidRequest: no prompt at all, or texts and ids mixed in one list.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty; send text, token ids, or a list of either", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise InvalidRequest("prompt mixes texts and token ids; send one kind", param="prompt")
    return [*texts] or [*lists]


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: checked, and text parts joined by line breaks; other fields pass through.

    Raises:
        InvalidRequest: no message, a message without role, or content that is not text.
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one", param="messages")
    return [{**message, **_role_and_content(message, f"messages[{i}]")} for i, message in enumerate(messages)]


def _role_and_content(message: Mapping[str, Any], path: str) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f'{path}.role is {role!r}; it must be a string such as "user"', param=f"{path}.role")
    check_tool_calls(message.get("tool_calls"), f"{path}.tool_calls")
    if content is None and (message.get("tool_calls") or role == "assistant"):
        content = ""
    if isinstance(content, list):
        content = "\n".join(_text_of_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{path}.content is {content!r}; it must be a string or a list of text parts", param=f"{path}.content"
        )
    return {"role": role, "content": content}


def _text_of_part(part: object, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "refusal"):
        raise InvalidRequest(f"{path}.type is {kind!r}; this model takes text parts only", param=path)
    name = "refusal" if kind == "refusal" else "text"
    text = part.get(name) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{name} is {text!r}; it must be a string", param=f"{path}.{name}")
    return text
