"""Ollama's bodies. Durations in replies are nanoseconds, times ISO 8601."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from spolia.engine import SamplingParams
from spolia.errors import InvalidRequest
from spolia.models import Model, Recipe
from spolia.server.durations import parse_duration
from spolia.server.sampling import SamplingFields
from spolia.server.served import ServedModel

__all__ = [
    "ChatRequest",
    "CopyRequest",
    "CreateRequest",
    "EmbedRequest",
    "EmbeddingRequest",
    "GenerateRequest",
    "ModelRequest",
    "Options",
    "PullRequest",
]

# Ollama's own, which its users expect where they say nothing.
_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_last_n": 64}


class Options(SamplingFields, kw_only=True):
    """Ollama's `options`; others than these are about its own engine, and do nothing here.

    -1 and -2 for `num_predict` mean as many as fit.
    """

    num_predict: int | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any], param: str = "parameters") -> Options:
        """
        Raises:
            InvalidRequest: a value that is not allowed.
        """
        try:
            options = msgspec.convert(parameters, cls)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        options.sampling_params()
        return options

    def over(self, others: Options) -> Options:
        """These, and what the others say where these say nothing."""
        said = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(others, **said)

    def sampling_params(self, **more: Any) -> SamplingParams:
        """
        Raises:
            InvalidRequest: a value that is not allowed.
        """
        given = {**_DEFAULTS, **self.given(), **more}
        if self.num_predict is not None and self.num_predict > 0:
            given["max_tokens"] = self.num_predict
        return SamplingParams(**given)


class ModelRequest(msgspec.Struct, kw_only=True):
    """`name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str | None:
        """The model's name without the tag that Ollama's clients add to a name without one."""
        name = self.model or self.name
        return None if not name else name.removesuffix(":latest")


class _Keeping(ModelRequest, kw_only=True):
    """`keep_alive`: how long the model is to stay in memory after this."""

    keep_alive: str | float | None = None

    @property
    def keep_alive_s(self) -> float | None:
        """
        Raises:
            InvalidRequest: it is no duration.
        """
        if self.keep_alive in (None, ""):
            return None
        try:
            return parse_duration(self.keep_alive or 0)
        except ValueError as error:
            raise InvalidRequest(f"keep_alive: {error}", param="keep_alive") from None


class _Generating(_Keeping, kw_only=True):
    """`truncate`: true drops the beginning of a prompt that is too long; here that is not the default."""

    stream: bool = True
    options: Options | None = None
    think: bool | str | None = None
    format: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | str | None = None
    resumable: bool | None = None

    def sampling_params(self, served: ServedModel) -> SamplingParams:
        """With the form that `format` asks for: "json", or a JSON schema; and the parameters of the model's recipe.

        Raises:
            InvalidRequest: a value that is not allowed.
        """
        more: dict[str, Any] = {}
        if self.format not in (None, ""):
            if self.format != "json" and not isinstance(self.format, dict):
                raise InvalidRequest(f'format is {self.format!r}; it must be "json" or a schema', param="format")
            more["structured_outputs"] = {"json_object": True} if self.format == "json" else {"json": self.format}
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        if self.truncate:
            more["truncate"] = "head" if self.truncate is True else self.truncate
        options = self.options or Options()
        if served.recipe is not None:
            options = options.over(Options.of(served.recipe.parameters))
        return options.sampling_params(**more)

    def template_kwargs(self, model: Model) -> dict[str, Any]:
        """For templates that can be told whether to think, or how much.

        Raises:
            InvalidRequest: it is to think, and is not made for it.
        """
        source = "" if model.chat_template is None else model.chat_template.source
        if self.think is None:
            return {}
        if self.think and "<think>" not in source and "enable_thinking" not in source:
            raise InvalidRequest(f"{model.name} does not support thinking; leave think out", param="think")
        told: dict[str, Any] = {"enable_thinking": bool(self.think)}
        return {**told, "reasoning_effort": self.think} if isinstance(self.think, str) else told


class GenerateRequest(_Generating, kw_only=True):
    """`/api/generate`. An empty prompt only loads the model, or with `keep_alive` 0 unloads it.

    Attributes:
        suffix: what comes after the answer, for models that fill in.
        raw: the prompt is the text to continue, without a template.
        context: token ids of the conversation so far, as the last reply gave them.
    """

    prompt: str = ""
    suffix: str = ""
    system: str | None = None
    raw: bool = False
    context: list[int] | None = None
    template: str | None = None
    images: list[Any] | None = None

    def check(self) -> None:
        """
        Raises:
            InvalidRequest: a field that is not supported.
        """
        for name in ("template", "images"):
            if getattr(self, name):
                raise InvalidRequest(f"`{name}` is not supported; leave it out", param=name)


class ChatRequest(_Generating, kw_only=True):
    """`/api/chat`. Without messages the model is only loaded."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class EmbedRequest(_Keeping, kw_only=True):
    """`/api/embed`. Without input the model is only loaded. `options` do nothing here.

    Attributes:
        truncate: keep the beginning of an input that is too long; if not, that is an error.
    """

    input: str | list[str] = ""
    truncate: bool = True
    dimensions: int | None = None
    options: dict[str, Any] | None = None


class EmbeddingRequest(_Keeping, kw_only=True):
    """`/api/embeddings`, the older one, whose vectors are not normalised."""

    prompt: str = ""
    options: dict[str, Any] | None = None


class PullRequest(ModelRequest, kw_only=True):
    stream: bool = True


class CopyRequest(msgspec.Struct, kw_only=True):
    source: str
    destination: str


class CreateRequest(ModelRequest, kw_only=True):
    """`/api/create`: a model made of another (`from`), or of a file that was sent (`files`).

    Attributes:
        files: name and digest of one GGUF file.
        template: Jinja; none: that of the model.
        messages: what each conversation goes on from.
    """

    stream: bool = True
    from_: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    quantize: str | None = None
    template: str | None = None
    system: str | None = None
    parameters: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    license: str | list[str] | None = None

    def check(self) -> None:
        """
        Raises:
            InvalidRequest: a field that is not supported, or wrong.
        """
        if self.quantize:
            raise InvalidRequest("`quantize` is not supported; send a file that is quantised", param="quantize")
        if self.adapters:
            raise InvalidRequest("`adapters` are not supported; send a file with them merged into it", param="adapters")
        if bool(self.from_) == bool(self.files):
            raise InvalidRequest("send either `from`, a model's name, or `files`, a GGUF file", param="from")
        Options.of(self.parameters or {})
        for index, message in enumerate(self.messages or []):
            if message.get("role") not in ("user", "assistant") or not isinstance(message.get("content"), str):
                raise InvalidRequest(
                    f"messages[{index}] must have the role user or assistant, and text as content", param="messages"
                )

    def blob(self) -> str:
        """The digest of the file.

        Raises:
            InvalidRequest: there are several.
        """
        digests = list((self.files or {}).values())
        if len(digests) != 1:
            raise InvalidRequest(
                f"files has {len(digests)} files; a model is made of one GGUF file here", param="files"
            )
        return digests[0]

    def given(self) -> dict[str, Any]:
        """The fields of a recipe that are sent."""
        licence = [self.license] if isinstance(self.license, str) else self.license
        sent = {"system": self.system, "template": self.template, "messages": self.messages, "license": licence}
        sent = {name: value for name, value in sent.items() if value is not None}
        return {**sent, "parameters": self.parameters} if self.parameters is not None else sent

    def over(self, recipe: Recipe) -> Recipe:
        """That recipe, with what is sent in place of what it has; parameters one by one."""
        given = self.given()
        given["parameters"] = {**recipe.parameters, **(self.parameters or {})}
        return msgspec.structs.replace(recipe, **given)
