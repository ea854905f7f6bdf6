"""A request's processors, in order.

    biases -> penalties -> bans -> lengths -> own -> form -> temperature -> filters -> draw

The tables below are the order, and the names. A factory returns None where the request does not ask for it, so that a
request without processors has no pipeline, and costs what it did before there were any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spolia.errors import Bug, InvalidRequest
from spolia.generation.decisions import DecisionLog
from spolia.generation.history import History
from spolia.generation.params import FILTER_NAMES, SamplingParams
from spolia.generation.processors import biases, filters, length, penalties
from spolia.generation.processors.base import Filter, Logits, Processor, Telling
from spolia.generation.processors.candidates import Candidates, Scratch
from spolia.generation.processors.dola import Depth, Dola
from spolia.generation.processors.green_list import GreenList
from spolia.generation.processors.guidance import Guidance
from spolia.generation.processors.own import own_processor
from spolia.generation.processors.synthid import SynthId
from spolia.generation.processors.watermark import Watermark
from spolia.generation.reasoning import ThinkingBudget
from spolia.generation.structured import GrammarMask
from spolia.generation.vocabulary import Vocabulary

__all__ = ["FILTERS", "PROCESSORS", "Pipeline", "build_pipeline", "filters_of"]


class Asked(NamedTuple):
    """What a processor is made from."""

    params: SamplingParams
    vocabulary: Vocabulary
    max_tokens: int
    depth: Depth


Factory = Callable[[Asked], Processor | None]
_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)


def _guidance(asked: Asked) -> Processor | None:
    return Guidance(asked.params.guidance_scale) if asked.params.guidance_scale != 1 else None


def _dola(asked: Asked) -> Processor | None:
    layers = asked.params.dola_layers
    return None if layers is None else Dola(layers, asked.depth)


def _sequence_bias(asked: Asked) -> Processor | None:
    return biases.SequenceBias(asked.params.sequence_bias) if asked.params.sequence_bias else None


def _logit_bias(asked: Asked) -> Processor | None:
    return biases.LogitBias(asked.params.logit_bias) if asked.params.logit_bias else None


def _last_n(params: SamplingParams) -> int | None:
    return None if params.repeat_last_n < 0 else params.repeat_last_n


def _encoder_repetition_penalty(asked: Asked) -> Processor | None:
    penalty = asked.params.encoder_repetition_penalty
    return penalties.PromptRepetitionPenalty(penalty) if penalty != 1 else None


def _repetition_penalty(asked: Asked) -> Processor | None:
    params = asked.params
    if params.repetition_penalty == 1 or params.repeat_last_n == 0:
        return None
    return penalties.RepetitionPenalty(params.repetition_penalty, _last_n(params))


def _presence_frequency(asked: Asked) -> Processor | None:
    params = asked.params
    if not (params.presence_penalty or params.frequency_penalty) or params.repeat_last_n == 0:
        return None
    return penalties.PresenceFrequencyPenalty(params.presence_penalty, params.frequency_penalty, _last_n(params))


def _no_repeat_ngram(asked: Asked) -> Processor | None:
    size = asked.params.no_repeat_ngram_size
    return penalties.NoRepeatNgram(size) if size else None


def _encoder_no_repeat_ngram(asked: Asked) -> Processor | None:
    size = asked.params.encoder_no_repeat_ngram_size
    return penalties.PromptNoRepeatNgram(size) if size else None


def _dry(asked: Asked) -> Processor | None:
    params = asked.params
    if not params.dry_multiplier or not params.dry_penalty_last_n:
        return None
    vocabulary = asked.vocabulary
    breakers = np.zeros(vocabulary.size, np.bool_)
    for text in params.dry_sequence_breakers:
        breakers[vocabulary.ids_containing(text)] = True
    longer = [tuple(vocabulary.encode(text)) for text in params.dry_sequence_breakers]
    return penalties.Dry(
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        None if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n,
        breakers,
        [sequence for sequence in longer if len(sequence) > 1],
    )


def _bad_words(asked: Asked) -> Processor | None:
    params, vocabulary = asked.params, asked.vocabulary
    sequences = dict.fromkeys(params.bad_words_ids)
    for word in params.bad_words:
        for spelling in (word, word.lstrip(), " " + word.lstrip()):
            if ids := tuple(vocabulary.encode(spelling)):
                sequences[ids] = None
    if not sequences:
        return None
    return biases.SequenceBias([(ids, -np.inf) for ids in sequences])


def _allowed(asked: Asked) -> Processor | None:
    ids = asked.params.allowed_token_ids
    return None if ids is None else biases.Allowed(ids)


def _suppress(asked: Asked) -> Processor | None:
    return biases.Suppress(asked.params.suppress_tokens) if asked.params.suppress_tokens else None


def _begin_suppress(asked: Asked) -> Processor | None:
    ids = asked.params.begin_suppress_tokens
    return biases.SuppressAtBegin(ids) if ids else None


def _prefix_constrained(asked: Asked) -> Processor | None:
    function = asked.params.prefix_allowed_tokens_fn
    return None if function is None else biases.PrefixConstrained(function)


def _min_length(asked: Asked) -> Processor | None:
    num_tokens = asked.params.min_length
    return length.MinLength(num_tokens, asked.vocabulary.eos_token_ids) if num_tokens else None


def _forced_bos(asked: Asked) -> Processor | None:
    token_id = asked.params.forced_bos_token_id
    return None if token_id is None else length.ForcedFirst(token_id)


def _forced_eos(asked: Asked) -> Processor | None:
    ids = asked.params.forced_eos_token_id
    return None if ids is None else length.ForcedLast((ids,) if isinstance(ids, int) else ids, asked.max_tokens)


def _exponential_decay(asked: Asked) -> Processor | None:
    pair = asked.params.exponential_decay_length_penalty
    return None if pair is None else length.ExponentialDecay(*pair, asked.vocabulary.eos_token_ids)


def _watermark(asked: Asked) -> Processor | None:
    settings = asked.params.watermark
    return None if settings is None else Watermark(**settings)


def _remove_invalid(asked: Asked) -> Processor | None:
    return filters.RemoveInvalid() if asked.params.remove_invalid_values else None


def _thinking_budget(asked: Asked) -> Processor | None:
    params, encode = asked.params, asked.vocabulary.encode
    if params.thinking_budget is None:
        return None
    opening, closing = (encode(tag) for tag in params.reasoning_tags)
    return ThinkingBudget(params.thinking_budget, opening, closing, asked.vocabulary.token_bytes)


PROCESSORS: dict[str, Factory] = {
    "remove_invalid_values": _remove_invalid,
    "guidance_scale": _guidance,
    "dola_layers": _dola,
    "sequence_bias": _sequence_bias,
    "logit_bias": _logit_bias,
    "encoder_repetition_penalty": _encoder_repetition_penalty,
    "repetition_penalty": _repetition_penalty,
    "presence_frequency_penalty": _presence_frequency,
    "no_repeat_ngram_size": _no_repeat_ngram,
    "encoder_no_repeat_ngram_size": _encoder_no_repeat_ngram,
    "dry": _dry,
    "bad_words": _bad_words,
    "min_length": _min_length,
    "prefix_allowed_tokens_fn": _prefix_constrained,
    "allowed_token_ids": _allowed,
    "exponential_decay_length_penalty": _exponential_decay,
    "suppress_tokens": _suppress,
    "begin_suppress_tokens": _begin_suppress,
    "watermark": _watermark,
    "thinking_budget": _thinking_budget,
    "forced_bos_token_id": _forced_bos,
    "forced_eos_token_id": _forced_eos,
}


def _temperature(params: SamplingParams) -> Filter | None:
    if params.dynatemp_range:
        low = max(params.temperature - params.dynatemp_range, 0.0)
        return filters.DynamicTemperature(low, params.temperature + params.dynatemp_range, params.dynatemp_exponent)
    return filters.Temperature(params.temperature) if params.temperature != 1 else None


FILTERS: dict[str, Callable[[SamplingParams], Filter | None]] = {
    "temperature": _temperature,
    "top_n_sigma": lambda p: filters.TopNSigma(p.top_n_sigma) if p.top_n_sigma > 0 else None,
    "top_h": lambda p: filters.TopH(p.top_h) if p.top_h else None,
    "top_k": lambda p: filters.TopK(p.top_k) if p.top_k > 0 else None,
    "top_p": lambda p: filters.TopP(p.top_p) if p.top_p < 1 else None,
    "min_p": lambda p: filters.MinP(p.min_p) if p.min_p else None,
    "typical_p": lambda p: filters.Typical(p.typical_p) if 0 < p.typical_p < 1 else None,
    "epsilon_cutoff": lambda p: filters.Epsilon(p.epsilon_cutoff) if p.epsilon_cutoff else None,
    "eta_cutoff": lambda p: filters.Eta(p.eta_cutoff) if p.eta_cutoff else None,
    "xtc": lambda p: filters.Xtc(p.xtc_probability, p.xtc_threshold) if p.xtc_probability else None,
    "mirostat": lambda p: filters.Mirostat(p.mirostat_tau, p.mirostat_eta) if p.mirostat else None,
}
_PLAIN_FILTERS = {"temperature", "top_k", "top_p", "min_p"}  # those that `Sampler` knows a faster way for


class Pipeline:
    """One sequence's processors and filters, with their state.

    Attributes:
        has_filters: the draw is from `candidates`; else it is by the request's own parameters, from the whole row.
        guidance: wants the logits of another prompt before each token; None: there is none.
        dola: wants the logits of earlier layers before each token; None: there is none.
        log: notes of each decision, where asked for.
        trouble: why no token can be drawn from the last row: a processor raised, or left nothing; None if one can.
    """

    def __init__(
        self,
        params: SamplingParams,
        processors: Sequence[tuple[str, Processor]],
        filters: Sequence[tuple[str, Filter]],
        vocab_size: int,
        form: GrammarMask | None,
    ) -> None:
        self._processors = processors
        self._filters = filters
        # Those that the draw has built in are here only to be explained.
        self.has_filters = not _is_plain(params)
        self._form = form
        self._vocab_size = vocab_size
        candidates = params.explain_candidates
        self.log = None if candidates is None else DecisionLog(candidates, vocab_size)
        self.guidance = next((it for _, it in processors if isinstance(it, Guidance)), None)
        self.dola = next((it for _, it in processors if isinstance(it, Dola)), None)
        self.trouble: str | None = None
        self._history: History | None = None

    def follow(self, token_ids: NDArray[np.int32], num_prompt_tokens: int, *, seed: int) -> None:
        """Say which sequence this is for: its buffer of ids, which grows in place."""
        self._history = History(token_ids, num_prompt_tokens, vocab_size=self._vocab_size, seed=seed)
        if self._form is not None:
            self._form.take(self._history)

    def advance(self, num_tokens: int) -> bool:
        """Take notice of a token that was drawn; whether it completed the form that the answer must have."""
        if self._form is None or self._history is None:
            return False
        self._history.num_tokens = num_tokens
        self._form.take(self._history)
        return self._form.is_complete

    def note_dropped(self, num_tokens: int, *, num_prompt_tokens: int, num_of_answer: int, seed: int) -> None:
        """So many of the buffer's tokens are gone, because the context was full; the others have moved up."""
        before = self._history
        if before is None:
            raise Bug("tokens were dropped of a text that no pipeline follows")
        self._history = after = History(before.buffer, num_prompt_tokens, vocab_size=self._vocab_size, seed=seed)
        after.num_tokens = before.num_tokens - num_tokens
        after.num_dropped_tokens = before.num_dropped_tokens + num_tokens
        after.num_dropped_of_answer = before.num_dropped_of_answer + num_of_answer
        if self._form is not None:
            self._form.note_dropped(num_tokens)

    def fork(self, token_ids: NDArray[np.int32], num_prompt_tokens: int, *, seed: int) -> Pipeline:
        """Another, for a text that goes on from this one's in its own way: a beam. Processors are the same objects."""
        forked = copy(self)
        forked._history = History(token_ids, num_prompt_tokens, vocab_size=self._vocab_size, seed=seed)
        forked._history.num_tokens = len(token_ids)
        if self.log is not None:
            forked.log = self.log.fork()
        if self._form is not None:
            form = forked._form = self._form.fork()
            forked._processors = [(name, form if it is self._form else it) for name, it in self._processors]
            form.take(forked._history)
        return forked

    @property
    def is_complete(self) -> bool:
        """Nothing more may follow: the answer has the form that it must have."""
        return self._form is not None and self._form.is_complete

    @property
    def has_form(self) -> bool:
        """The answer must have a form."""
        return self._form is not None

    def forced_ids(self) -> list[int]:
        """Tokens that the form of the answer leaves no choice about; often none."""
        ids = [] if self._form is None else self._form.forced_ids()
        return list(takewhile(lambda token_id: token_id < self._vocab_size, ids))  # an end may be none of the model's

    def process(self, logits: Logits, position: int, banned_ids: NDArray[np.int32] = _NO_IDS) -> None:
        """Change a row in place; all but the filters.

        Args:
            logits: `[1, vocab_size]`.
            position: of the token to draw.
            banned_ids: ends that must not come yet (`min_tokens`), which are forbidden before anything else.
        """
        history = self._history
        if history is None:
            raise Bug("a pipeline was asked to process before it was told what to follow")
        history.num_tokens = position
        rows = (history,)
        if self.log is not None:
            self.log.note("model", Candidates.of(logits[0]))
        if len(banned_ids):
            logits[0, banned_ids] = -np.inf
            if self.log is not None:
                self.log.note("min_tokens", Candidates.of(logits[0]))
        try:
            for name, processor in self._processors:
                processor.process(logits, rows)
                if self.log is not None:
                    self._note(self.log, name, processor, Candidates.of(logits[0]))
        except InvalidRequest as error:
            logits[:] = -np.inf
            self.trouble = str(error)
        except Exception as error:  # a user's processor; what it did to this row is nobody else's concern
            logits[:] = -np.inf
            self.trouble = f"{type(processor).__name__} failed: {type(error).__name__}: {error}"

    def note_nothing_left(self) -> None:
        """All tokens of the row are forbidden."""
        if self.trouble is None:
            self.trouble = (
                "what this request forbids leaves no token to go on with; loosen its constraints (allowed_token_ids, "
                "bad_words, min_tokens, ...)"
            )

    def candidates(self, row: Logits, scratch: Scratch) -> Candidates:
        """What the filters leave of a processed row, which has a finite best and is not changed."""
        left = Candidates.of(row)
        history = self._history
        if history is None:
            raise Bug("a pipeline was asked for candidates before it was told what to follow")
        for name, filter_ in self._filters:
            left = filter_.apply(left, history, scratch)
            if self.log is not None:
                self._note(self.log, name, filter_, left)
        return left

    def _note(self, log: DecisionLog, name: str, stage: Processor | Filter, left: Candidates) -> None:
        form = self._form.state() if self._form is not None and stage is self._form else None
        log.note(name, left, form, stage.tell(log.num_candidates) if isinstance(stage, Telling) else {})


def build_pipeline(
    params: SamplingParams,
    vocabulary: Vocabulary,
    *,
    max_tokens: int,
    depth: Depth = Depth(0, has_tied_head=False),  # noqa: B008 - frozen
    known: Mapping[str, Callable[..., Any]] | None = None,
    first: Processor | None = None,
) -> Pipeline | None:
    """The processors that `params` ask for; None if there are none.

    Args:
        max_tokens: most tokens of the answer.
        depth: of the model.
        known: own processors by name.
        first: a processor to run before all others, which the caller has made.

    Raises:
        InvalidRequest: a token id that does not exist, an own processor that cannot be made, a form that cannot be
            compiled.
    """
    asked = Asked(params, vocabulary, max_tokens, depth)
    _check_ids(params, vocabulary.size)
    named = [] if first is None else [("token_healing", first)]
    named += [(name, made) for name, factory in PROCESSORS.items() if (made := factory(asked)) is not None]
    own = [own_processor(entry, known or {}) for entry in params.logits_processors]
    named += [(type(processor).__name__, processor) for processor in own]
    form = None
    if params.structured_outputs is not None:
        form = vocabulary.grammars.compile(params.structured_outputs)
        named.append(("structured_outputs", form))
    if params.is_greedy:  # else they follow the filters
        named += _marks(params).items()
    if params.renormalize_logits:
        named.append(("renormalize_logits", filters.Renormalise()))
    is_explained = params.explain_candidates is not None
    chosen = [] if _is_plain(params) and (params.is_greedy or not is_explained) else filters_of(params)
    if not named and not chosen and not is_explained:
        return None
    return Pipeline(params, named, chosen, vocabulary.size, form)


def _made_filters(params: SamplingParams) -> dict[str, Filter]:
    names = ("temperature", "mirostat") if params.mirostat else FILTER_NAMES
    made = {name: it for name in names if (it := FILTERS[name](params)) is not None}
    return made | _marks(params)


def _marks(params: SamplingParams) -> dict[str, GreenList | SynthId]:
    """Watermarks that follow all filters."""
    made: dict[str, GreenList | SynthId] = {}
    if params.watermarking_config is not None:
        made["watermarking_config"] = GreenList(**params.watermarking_config)
    if params.synthid is not None:
        made["synthid"] = SynthId(**params.synthid)
    return made


def _is_plain(params: SamplingParams) -> bool:
    """Whether the draw has all filters built in, in their order."""
    if params.is_greedy:
        return True
    return not params.dynatemp_range and not params.filter_order and _made_filters(params).keys() <= _PLAIN_FILTERS


def filters_of(params: SamplingParams) -> list[tuple[str, Filter]]:
    """Filters in their order."""
    made = _made_filters(params)
    moved = iter([name for name in params.filter_order if name in made])
    ordered = [next(moved) if name in params.filter_order else name for name in made]
    return [(name, made[name]) for name in ordered]


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    named: dict[str, Sequence[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "sequence_bias": [token_id for ids, _ in params.sequence_bias for token_id in ids],
        "bad_words_ids": [token_id for ids in params.bad_words_ids for token_id in ids],
        "allowed_token_ids": params.allowed_token_ids or (),
        "suppress_tokens": params.suppress_tokens,
        "begin_suppress_tokens": params.begin_suppress_tokens,
        "forced_bos_token_id": () if params.forced_bos_token_id is None else (params.forced_bos_token_id,),
        "forced_eos_token_id": params.forced_eos_token_id if isinstance(params.forced_eos_token_id, tuple) else (),
    }
    for name, ids in named.items():
        if ids and (largest := max(ids)) >= vocab_size:
            raise InvalidRequest(f"{name} holds {largest}; token ids go up to {vocab_size - 1}", param=name)
