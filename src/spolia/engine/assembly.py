"""A model and settings to an engine: measure, allocate, put together."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spolia import __version__
from spolia.engine.admission import Admission
from spolia.engine.calibration import NUM_TOKENS, measure_step_s
from spolia.engine.config import EngineConfig
from spolia.engine.core import EngineCore, Observer
from spolia.engine.draft_model import DraftModel, check_vocabularies
from spolia.engine.drafter import make_drafter
from spolia.engine.memory import default_num_threads, split_blocks
from spolia.engine.storage import build_cache, open_tiers
from spolia.errors import InvalidRequest
from spolia.generation import import_processor
from spolia.kernels import BLOCK_SIZE, Executable, KvCodec, allocate_pool, get_backend
from spolia.kvcache import GroupSpec, KVCache, make_policy, namespace_key
from spolia.models import Model, Tokenizer, load

__all__ = ["Engine", "build_engine"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Engine:
    """An engine's parts, ready to step.

    Attributes:
        config: as resolved: nothing that was to be measured is None.
        fingerprint: of all that an answer depends on besides its request: model file, KV type, numerics, version. Two
            engines with one fingerprint give one answer to a request with a seed.
    """

    model: Model
    config: EngineConfig
    admission: Admission
    core: EngineCore
    fingerprint: str


def build_engine(
    model: str | Path | Model,
    config: EngineConfig | None = None,
    *,
    observer: Observer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load `model` and make an engine for it.

    Raises:
        ModelError: the model cannot be had or read.
        InvalidRequest: a setting that is impossible with this model or on this machine.
    """
    config = config or EngineConfig()
    model = model if isinstance(model, Model) else load(model)
    max_context = config.max_context or model.context_length
    if max_context > model.context_length:
        raise InvalidRequest(
            f"max_context is {max_context}; this model is made for {model.context_length} tokens at most",
            param="max_context",
        )
    max_sequences = min(config.max_sequences, config.max_batch_tokens)
    try:
        policy = make_policy(config.kv_policy)
    except ValueError as error:
        raise InvalidRequest(f"kv_policy: {error}", param="kv_policy") from None
    num_threads = config.num_threads or default_num_threads()
    drafting = None if config.draft_model is None else _load_drafting(config.draft_model, model)
    models = [model] if drafting is None else [model, drafting]
    executables = [_executable(each, config, num_threads) for each in models]
    executable = executables[0]
    windows = [group.window for each in models for group in each.program.cache_groups]
    block_bytes = [each.block_bytes(group) for each, m in zip(executables, models, strict=True) for group in _groups(m)]
    num_blocks = split_blocks(
        config.kv_memory,
        block_bytes,
        windows,
        max_context=max_context,
        max_sequences=max_sequences,
        max_batch_tokens=config.max_batch_tokens,
    )
    all_pools = [allocate_pool(count, size) for count, size in zip(num_blocks, block_bytes, strict=True)]
    all_groups = [GroupSpec(count, window) for count, window in zip(num_blocks, windows, strict=True)]
    num_own = len(_groups(model))
    pools, groups = all_pools[:num_own], all_groups[:num_own]
    executable.bind_kv(pools)
    layout = f"{executable.numerics}/{config.kv_dtype}"
    codec = None if config.kv_offload_dtype == "exact" else KvCodec(model.program, executable, config.kv_offload_dtype)
    uses, config = open_tiers(config)
    cache, tiering = build_cache(
        groups,
        pools,
        uses,
        layout=layout,
        codec=codec,
        clock=clock,
        policy=policy,
        fetch=config.kv_fetch,
        fetch_timeout_s=config.kv_fetch_timeout_s,
    )
    fitting_tokens = _fitting_tokens(cache, max_context, config.max_batch_tokens)
    if config.max_context is None:
        max_context = min(max_context, fitting_tokens)
    draft_model = None
    if drafting is not None:
        executables[1].bind_kv(all_pools[num_own:])
        draft_model = DraftModel(
            executables[1],
            KVCache(all_groups[num_own:], clock=clock),
            vocab_size=executable.vocab_size,
            max_batch_tokens=config.max_batch_tokens,
            max_context=drafting.context_length,
        )
    core = EngineCore(
        executable,
        cache,
        token_bytes=_text_bytes(model.tokenizer),
        special_token_bytes=model.tokenizer.token_bytes,
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=max_sequences,
        max_context=max_context,
        clock=clock,
        observer=observer,
        tiering=tiering,
        drafter=make_drafter(config.speculation, cache, model=draft_model, clock=clock),
        check=config.check,
    )
    if uses and config.kv_fetch == "planned":
        step_s = measure_step_s(executable, cache, clock)
        if step_s is not None:
            tiering.note_step(NUM_TOKENS, step_s)
    # Everything that KV bits depend on besides the tokens. The digest covers weights and config.
    owner = {
        "model": model.digest,
        "kv_dtype": config.kv_dtype,
        "block_size": BLOCK_SIZE,
        "numerics": executable.numerics,
        "engine_salt": config.cache_salt,
    }
    # What was rounded in a tier is nobody's who asked for exact KV, and the other way round.
    usual = owner if codec is None else {**owner, "kv_offload_dtype": codec.name}
    admission = Admission(
        tokenizer=model.tokenizer,
        vocab_size=executable.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_context=max_context,
        fitting_tokens=fitting_tokens,
        namespace=lambda salt: namespace_key(**usual, salt=salt),
        exact_namespace=None if codec is None else lambda salt: namespace_key(**owner, salt=salt),
        clock=clock,
        processors={
            name: import_processor(path) for name, _, path in (entry.partition("=") for entry in config.processors)
        },
    )
    resolved = replace(
        config,
        num_threads=num_threads,
        max_context=max_context,
        max_sequences=max_sequences,
        kv_memory=sum(count * size for count, size in zip(num_blocks, block_bytes, strict=True)),
    )
    facts = {**usual, "engine_salt": "", "version": __version__}  # the salt decides who shares, not what is answered
    fingerprint = f"spolia-{namespace_key(**facts).hex()[:16]}"
    return Engine(model=model, config=resolved, admission=admission, core=core, fingerprint=fingerprint)


def _load_drafting(source: str | Path, model: Model) -> Model:
    """The model at `source`, which has the tokens of `model`."""
    drafting = load(source)
    check_vocabularies(model.tokenizer, drafting.tokenizer, drafting.name)
    return drafting


def _executable(model: Model, config: EngineConfig, num_threads: int) -> Executable:
    try:
        return get_backend(config.backend)(model.program, kv_dtype=config.kv_dtype, num_threads=num_threads)
    except ValueError as error:  # SPOLIA_ISA names a level that is not there, or the system starts no more threads
        raise InvalidRequest(f"the {config.backend} backend cannot be started: {error}") from error


def _groups(model: Model) -> range:
    return range(len(model.program.cache_groups))


def _fitting_tokens(cache: KVCache, max_context: int, max_batch_tokens: int) -> int:
    """Most tokens of prompt and answer that fit when they have all pools to themselves; the last one has no KV."""
    return bisect_left(range(1, max_context), True, key=lambda kept: not cache.fits(kept, max_batch_tokens)) + 1


def _text_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The bytes that a generated token adds to the text: none for those that steer and do not read."""
    known: dict[int, bytes] = {}

    def text_bytes(token_id: int) -> bytes:
        text = known.get(token_id)
        if text is None:
            text = known[token_id] = b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
        return text

    return text_bytes
