"""Answers of a form: JSON of a schema, a regular expression, one of some texts, a grammar.

    StructuredOutput  --GrammarCompiler.compile-->  GrammarMask, a processor
      what is asked     once per text, then copied      one request's place in the grammar

After each token the mask for the next one is computed on another thread, while the model computes. `llguidance` does
the parsing; it is imported when the first request asks for a form.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from spolia.errors import Bug, InvalidRequest
from spolia.generation.decisions import FormState
from spolia.generation.form_errors import between_slashes, explain_gbnf, explain_lark, explain_regex
from spolia.generation.history import History
from spolia.generation.processors.base import Logits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["GrammarCompiler", "GrammarMask", "StructuredOutput", "between_slashes", "form_rule", "json_rule"]

# One space, or a new line and its indentation: enough to print JSON prettily, and no way to go on for ever.
_WHITESPACE = r"( |\n[ \t]{0,32})?"
_NUM_CACHED = 128
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_PARAM = "structured_outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form of an answer; exactly one kind.

    Attributes:
        json: a JSON Schema, as a mapping or as text.
        json_object: any JSON object.
        regex: a regular expression (of Rust's `regex`, no look-around) that the whole answer matches.
        choice: texts, of which the answer is one.
        grammar: Lark, as llguidance extends it, or llama.cpp's GBNF, told by its `::=`.
        whitespace_pattern: a regular expression for the white space between JSON's parts; None: a space, or a line
            break and indentation, or nothing.
        after: the form begins after this text, before which may come any: what closes thoughts that the prompt opens.

    Raises:
        InvalidRequest: none, several, or of the wrong type.
    """

    json: Mapping[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.append("json")
        if len(given) != 1:
            named = f"{' and '.join(given)} are given" if given else "nothing is given"
            raise _refusal(f"{named}; give one of {', '.join(_KINDS)}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _refusal(f"{name} is {value!r}; it must be text, and not empty")
        if not isinstance(self.json, Mapping | str | bool | None) or not isinstance(self.json_object, bool):
            raise _refusal(
                f"{given[0]} is {getattr(self, given[0])!r}; it must be a JSON Schema, or for json_object true"
            )
        if self.choice is not None:
            choice = (self.choice,) if isinstance(self.choice, str) else self.choice
            if not isinstance(choice, Sequence) or not choice or not all(isinstance(c, str) and c for c in choice):
                raise _refusal(f"choice is {self.choice!r}; it must be a list of texts that are not empty")
            object.__setattr__(self, "choice", tuple(choice))

    @classmethod
    def of(cls, value: Any) -> StructuredOutput:
        """`value` itself, or one made of a mapping's items.

        Raises:
            InvalidRequest: it is neither, or as the class.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _refusal(f"it is {value!r}; give StructuredOutput(...) or a mapping with one of {', '.join(_KINDS)}")
        known = (*_KINDS, "whitespace_pattern")
        if unknown := [name for name in value if name not in known]:
            raise _refusal(f"it has {unknown[0]!r}; known are {', '.join(known)}")
        return cls(**{name: item for name, item in value.items() if item is not None})


class GrammarMask:
    """Forbids what the form does not allow next; a processor with state.

    The matcher is used by one thread at a time: by the pool's from `take` until the mask is there, else the caller's.

    Attributes:
        is_complete: nothing more may follow.
    """

    def __init__(self, matcher: LLMatcher, pool: ThreadPoolExecutor, vocab_size: int) -> None:
        self._matcher = matcher
        self._pool = pool
        self._vocab_size = vocab_size
        self._num_seen: int | None = None  # tokens of the history that the matcher knows
        self._next: Future[NDArray[np.bool_]] | None = None
        self._forced: list[int] = []
        self.is_complete = False

    def fork(self) -> GrammarMask:
        """Another, at the same place."""
        if self._next is not None:
            self._next.exception()  # waits
        forked = GrammarMask(self._matcher.deep_copy(), self._pool, self._vocab_size)
        forked._num_seen, forked._forced, forked.is_complete = self._num_seen, self._forced, self.is_complete
        return forked

    def take(self, history: History) -> None:
        """Follow the history to its end, and begin to compute what may come next."""
        if self._num_seen is None:
            self._num_seen = history.num_prompt_tokens
        if self._num_seen == history.num_tokens and self._next is not None:
            return
        if self._next is not None:
            self._next.exception()  # waits; what it raised was told by `process`
        for token_id in history.buffer[self._num_seen : history.num_tokens].tolist():
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)
        self._num_seen = history.num_tokens
        self.is_complete = self._matcher.is_stopped() and not self._matcher.is_error()
        # Quick, unlike the mask, which nobody waits for before the step.
        has_end = self.is_complete or self._matcher.is_error()
        self._forced = [] if has_end else self._matcher.compute_ff_tokens()
        self._next = self._pool.submit(self._forbidden)

    def state(self) -> FormState:
        """Where the answer is in the form."""
        if self._next is not None:
            self._next.exception()  # waits
        return FormState(self._matcher.is_accepting(), len(self._forced))

    def note_dropped(self, num_tokens: int) -> None:
        """The history has lost so many tokens that the matcher knows, and goes on."""
        self._num_seen = None if self._num_seen is None else self._num_seen - num_tokens

    def forced_ids(self) -> list[int]:
        """Tokens that must follow, as the model's own tokenizer would cut them; a guess, as other cuts are allowed."""
        return self._forced

    def process(self, logits: Logits, rows: Sequence[History]) -> None:
        (history,) = rows
        self.take(history)
        assert self._next is not None
        np.copyto(logits[0], -np.inf, where=self._next.result())

    def _forbidden(self) -> NDArray[np.bool_]:
        mask = np.frombuffer(b"" if self._matcher.is_error() else self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # it grew too complex, or a token came that it did not allow: there is no way on
            raise InvalidRequest(f"the form goes no further: {self._matcher.get_error().splitlines()[0]}")
        bits = np.unpackbits(mask, bitorder="little", count=min(8 * len(mask), self._vocab_size))
        forbidden = np.ones(self._vocab_size, np.bool_)
        forbidden[: len(bits)] = bits == 0
        return forbidden


def _limits() -> LLParserLimits:
    """Ten times llguidance's own for what one token may cost: masks are computed beside the step.

    With those, an answer to a schema with 500 optional properties, or of 2,000 choices, could not begin.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=20_000, step_max_items=500_000, step_lexer_fuel=2_000_000)


class GrammarCompiler:
    """Turns forms into masks for one vocabulary. Any thread may call.

    The first call makes tables of the vocabulary, which takes up to some seconds; `warm` makes them ahead.

    Args:
        tokens: every token's bytes; those that steer are marked by a first byte 0xFF, and come about in no text.
        encode: a text's ids.
    """

    def __init__(
        self,
        size: int,
        *,
        tokens: Callable[[], list[bytes]],
        eos_token_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self._size = size
        self._tokens = tokens
        self._eos_token_ids = eos_token_ids
        self._encode = encode
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._pool = ThreadPoolExecutor(2, "spolia-grammar")

    def compile(self, form: StructuredOutput) -> GrammarMask:
        """A mask at the form's beginning. The same form is compiled once.

        Raises:
            InvalidRequest: the form cannot be compiled; the message says where it is wrong.
        """
        with self._lock:
            grammar = self._grammar(form)
            matcher = self._matcher(grammar, form)
            if form.after is not None:
                matcher = self._matcher(_begun_after(form.after, grammar), form)
            return GrammarMask(matcher.deep_copy(), self._pool, self._size)

    def _matcher(self, grammar: str, form: StructuredOutput) -> LLMatcher:
        """At the beginning of a grammar, which is that of `form`; to be copied."""
        from llguidance import LLMatcher

        matcher = self._compiled.get(grammar)
        if matcher is None:
            tokenizer = self._tables()
            if error := self._error(grammar):
                raise _refusal(self._explain(form, error))
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
            if not matcher.is_error():
                matcher.compute_bitmask()  # what is too large for any answer to begin is known here
            if matcher.is_error():
                raise _refusal(self._explain(form, matcher.get_error()))
            self._compiled[grammar] = matcher
            if len(self._compiled) > _NUM_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return matcher

    def warm(self) -> None:
        """Make what every form needs, if it is not there."""
        with self._lock:
            self._tables()

    def _tables(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def _make_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokens = self._tokens()
        eos = list(self._eos_token_ids)
        if not eos:  # a model that never ends: an id that it does not have stands for the end
            eos = [len(tokens)]
            tokens.append(b"\xff<end>")
        return LLTokenizer(_Wrapper(tokens, eos[0], self._encode), eos_token=eos)  # type: ignore[arg-type]

    def _grammar(self, form: StructuredOutput) -> str:
        from llguidance import LLMatcher, grammar_from

        if form.regex is not None:
            return LLMatcher.grammar_from_regex(form.regex)
        if form.choice is not None:
            return grammar_from("choice", json.dumps(form.choice))
        if form.grammar is not None:
            try:
                return grammar_from("grammar" if _is_gbnf(form.grammar) else "lark", form.grammar)
            except ValueError as error:
                raise _refusal(self._explain(form, str(error))) from None
        return self._json_grammar({"type": "object"} if form.json_object else self._schema(form), form)

    def _schema(self, form: StructuredOutput) -> Any:
        if not isinstance(form.json, str):
            return form.json
        try:
            return json.loads(form.json)
        except json.JSONDecodeError as error:
            raise _refusal(f"json is text that is no JSON: {error}") from None

    def _json_grammar(self, schema: Any, form: StructuredOutput) -> str:
        from llguidance import LLMatcher

        if schema is False:
            raise _refusal("json is false, a schema that nothing satisfies")
        schema = {} if schema is True else schema
        options = {"whitespace_pattern": form.whitespace_pattern or _WHITESPACE}
        try:
            return LLMatcher.grammar_from_json_schema(json.dumps(_held_bounds(schema)), overrides=options)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise _refusal(f"json: {error}") from None

    def _explain(self, form: StructuredOutput, error: str) -> str:
        """Where a form is wrong. For a schema: the innermost part that is wrong by itself."""
        if form.regex is not None:
            return f"regex cannot be compiled: {explain_regex(form.regex, error)}"
        if form.grammar is not None:
            where = explain_gbnf(form.grammar, error) if _is_gbnf(form.grammar) else explain_lark(error)
            return f"grammar cannot be compiled: {where}"
        if form.json is None:
            return f"{'json_object' if form.json_object else 'choice'} cannot be compiled: {explain_lark(error)}"
        root = self._schema(form)
        path, part = "#", root
        while found := next(self._wrong_parts(path, part, root, form), None):
            path, part, error = found
        return f"the JSON Schema cannot be compiled: at {path}: {error}"

    def _wrong_parts(self, path: str, schema: Any, root: Any, form: StructuredOutput) -> Iterator[tuple[str, Any, str]]:
        definitions = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, dict) and key in root}
        for below, part in _subschemas(schema):
            alone = {**definitions, **part} if isinstance(part, dict) else part
            if error := self._error(self._json_grammar(alone, form)):
                yield f"{path}/{below}", part, error

    def _error(self, grammar: str) -> str | None:
        """Why a grammar cannot be compiled; None if it can."""
        from llguidance import LLMatcher

        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        return messages[0] if is_error else None


class _Wrapper:
    """A vocabulary as llguidance wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = [index for index, token in enumerate(tokens) if token[:1] == b"\xff"]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


def _is_gbnf(grammar: str) -> bool:
    return "::=" in grammar


def _begun_after(text: str, grammar: str) -> str:
    """llguidance's grammar of an answer that has the form of `grammar` after `text`."""
    ending = between_slashes(re.escape(text))
    before = [
        "%llguidance {}",
        "start: before SPACE @form",
        r"SPACE: /[ \t\r\n]{0,32}/",
        rf"before[lazy]: /(.|\n)*{ending}/",
    ]
    # Either is what `grammar` may be: Lark, or a list of one.
    (form,) = json.loads(grammar)["grammars"] if grammar.startswith('{"grammars"') else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(before)}, {**form, "name": "form"}]})


def json_rule(schema: Mapping[str, Any], whitespace_pattern: str | None = None) -> str:
    """JSON of this schema as a part of a Lark grammar."""
    spaced = {**_held_bounds(schema), "x-guidance": {"whitespace_pattern": whitespace_pattern or _WHITESPACE}}
    return f"%json {json.dumps(spaced)}"


def form_rule(form: StructuredOutput) -> str:
    """An answer of this form, which is no grammar of its own and can be compiled, as a part of a Lark grammar."""
    if form.grammar is not None:
        raise Bug("a grammar cannot be a part of another")
    if form.regex is not None:
        return f"/{between_slashes(form.regex)}/"
    if form.choice is not None:
        return f"({' | '.join(json.dumps(text) for text in form.choice)})"
    schema: Any = json.loads(form.json) if isinstance(form.json, str) else form.json
    return json_rule(
        {"type": "object"} if form.json_object else {} if schema is True else schema, form.whitespace_pattern
    )


_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not")
_NARROW = 1e-9


def _held_bounds(schema: Any) -> Any:
    """A schema whose exclusive bounds hold.

    llguidance lets an exclusive bound through that is a whole number, where the other bound is less than one away from
    it: 0 where 0 < x <= 0.5 is asked for. There the bound becomes an inclusive one beside it.
    """
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            made[key] = {name: _held_bounds(part) for name, part in value.items()}
        elif key in _LISTED and isinstance(value, list):
            made[key] = [_held_bounds(part) for part in value]
        elif key in _SINGLE:
            made[key] = _held_bounds(value)
    if schema.get("type") == "integer":
        return made
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if _is_whole(above) and any(_is_number(end) and 0 < end - above < 1 for end in (high, below)):
        del made["exclusiveMinimum"]
        made["minimum"] = max(above + _NARROW, low if _is_number(low) else above)
    if _is_whole(below) and any(_is_number(end) and 0 < below - end < 1 for end in (low, above)):
        del made["exclusiveMaximum"]
        made["maximum"] = min(below - _NARROW, high if _is_number(high) else below)
    return made


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> TypeGuard[float]:
    return _is_number(value) and value == int(value)


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, each with its path below."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from ((f"{key}/{name}", part) for name, part in value.items())
        elif key in _LISTED and isinstance(value, list):
            yield from ((f"{key}/{index}", part) for index, part in enumerate(value))
        elif key in _SINGLE and isinstance(value, dict):
            yield key, value


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(f"{_PARAM}: {message}", param=_PARAM)
