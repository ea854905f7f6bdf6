"""What a client said about tools: which there are, whether one must be called, and how many at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spolia.engine import AsyncEngine, SamplingParams, StructuredOutput
from spolia.errors import InvalidRequest
from spolia.generation import ReasoningSplitter
from spolia.models import Model
from spolia.server.toolcalls.formats import FORMATS, Format, format_of
from spolia.server.toolcalls.parser import ToolCallParser
from spolia.server.toolcalls.strict import call_grammar, form_or_calls_grammar, one_call_grammar

__all__ = ["ToolUse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """
    Attributes:
        tools: as OpenAI describes them, checked.
        must_call: the reply must be a call: it is begun for the model, and held to the tools' schemas.
        names: of those that may be called. The prompt has all, so that it stays as it was when these change.
        parallel: whether more than one call is welcome.
    """

    tools: Sequence[dict[str, Any]]
    names: Sequence[str]
    must_call: bool = False
    parallel: bool = True

    @classmethod
    def of(
        cls, tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool | None
    ) -> ToolUse | None:
        """From OpenAI's fields; None where no tool may be called.

        Raises:
            InvalidRequest: a choice that is none, or that needs tools which are not there.
        """
        names = [tool["function"]["name"] for tool in tools or ()]
        only: list[object] | None = None
        match choice:
            case None | "none" | "auto" | "required":
                must_call = choice == "required"
            case {"function": {"name": str(name)}}:
                must_call, only = True, [name]
            case {"allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}} if allowed:
                must_call = mode == "required"
                only = [_name_of(each) for each in allowed]
            case _:
                raise InvalidRequest(
                    f'tool_choice is {choice!r}; it must be "none", "auto", "required", a function by name, or '
                    "allowed_tools",
                    param="tool_choice",
                )
        unknown = [name for name in only or () if name not in names]
        if unknown or (must_call and not names):
            raise InvalidRequest(
                f"tool_choice wants {unknown[0] if unknown else 'a call'}; tools has {', '.join(names) or 'none'}",
                param="tool_choice",
            )
        if not tools or choice == "none":
            return None
        allowed_names = names if only is None else [name for name in names if name in only]
        return cls(tools=tools, must_call=must_call, names=allowed_names, parallel=parallel is not False)

    def format(self, model: Model) -> Format:
        return FORMATS["hermes"] if model.chat_template is None else format_of(model.chat_template.tool_source)

    def beginning(self, model: Model) -> str:
        """What the reply is begun with, after the generation prompt."""
        return self.format(model).beginning if self.must_call else ""

    def parser(self, model: Model) -> ToolCallParser:
        offered = {tool["function"]["name"] for tool in self.tools}
        return ToolCallParser(
            self.format(model),
            offered,
            schemas={tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools},
            denied=offered.difference(self.names),
            strict=self.strict_names,
            one_call=not self.parallel or self.must_call,
            begun_with=self.beginning(model),
        )

    @property
    def _callable(self) -> list[dict[str, Any]]:
        return [tool for tool in self.tools if tool["function"]["name"] in self.names]

    @property
    def strict_names(self) -> list[str]:
        """Of the tools that may be called, those whose arguments must be of their schema."""
        return [tool["function"]["name"] for tool in self._callable if tool["function"].get("strict")]

    def params(self, params: SamplingParams, model: Model, thoughts: ReasoningSplitter | None = None) -> SamplingParams:
        """With the marks of calls in the text, where they are special tokens, and the form of calls that must be, that
        are to be strict, or that come in place of an answer that has a form.
        """
        format_ = self.format(model)
        if format_.is_special:
            params = replace(params, skip_special_tokens=False)
        if format_.stop:
            params = replace(params, stop=(*params.stop, *format_.stop))
        form = params.structured_outputs
        if not self.must_call:
            if form is not None and self._callable:
                if form.grammar is not None:
                    raise InvalidRequest(
                        "tools may be called and the answer has a grammar of its own, which would have to allow for "
                        "calls; send tool_choice none, or a form in place of the grammar: a JSON schema, regex, choice",
                        param="tools",
                    )
                grammar = form_or_calls_grammar(format_, self._callable, model.tokenizer, form, thoughts)
                return replace(params, structured_outputs=StructuredOutput.of({"grammar": grammar}))
            if form is not None or not self.strict_names:
                return params
            grammar = call_grammar(format_, self._callable, model.tokenizer, thoughts)
            return replace(params, structured_outputs=StructuredOutput.of({"grammar": grammar}))
        if form is not None:
            raise InvalidRequest(
                "a call must be made and the answer have a form of its own: it cannot be both; send tool_choice auto",
                param="tool_choice",
            )
        if format_.shape is None:
            call = StructuredOutput(json=format_.call_schema(self._callable))
        else:
            call = StructuredOutput(grammar=one_call_grammar(format_, self._callable, model.tokenizer))
        return replace(params, structured_outputs=call)

    async def prepare(
        self, params: SamplingParams, engine: AsyncEngine, model: Model, thoughts: ReasoningSplitter | None = None
    ) -> SamplingParams:
        """`params`, whose form is compiled, with all that the use of tools needs, that form compiled, too.

        Args:
            model: the engine's, with the template that the prompt was made by.
            thoughts: what will tell the reply's thoughts from the rest.

        Raises:
            InvalidRequest: a tool's schema cannot be compiled.
        """
        try:
            params = self.params(params, model, thoughts)
            await engine.prepare(params)
        except InvalidRequest as error:
            if error.param != "structured_outputs":
                raise
            wrong = await self._wrong_schema(engine)
            said = str(error).replace("structured_outputs", "tools", 1) if wrong is None else wrong
            raise InvalidRequest(said, param="tools") from None
        except RecursionError:
            raise InvalidRequest(
                "tools: the parameters of one nest too deeply; make them flatter", param="tools"
            ) from None
        return params

    async def _wrong_schema(self, engine: AsyncEngine) -> str | None:
        """Which tool's schema cannot be compiled by itself, and where; the whole grammar is not the client's."""
        for index, tool in enumerate(self.tools):
            function = tool["function"]
            is_held = function["name"] in (self.names if self.must_call else self.strict_names)
            if is_held and function.get("parameters") is not None:
                try:
                    await engine.prepare(
                        SamplingParams(structured_outputs=StructuredOutput.of({"json": function["parameters"]}))
                    )
                except InvalidRequest as error:
                    at = f"tools.{index} ({function['name']})"
                    return str(error).replace("structured_outputs", at, 1)
        return None


def _name_of(tool: object) -> object:
    match tool:
        case {"function": {"name": name}}:
            return name
        case _:
            return None
