"""A model and settings to an engine: measure, allocate, put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spolia import __version__
from spolia.engine.admission import Admission
from spolia.engine.calibration import NUM_TOKENS, measure_step_s
from spolia.engine.config import EngineConfig
from spolia.engine.core import EngineCore, Observer
from spolia.engine.draft_model import DraftModel, check_vocabularies
from spolia.engine.drafter import make_drafter
from spolia.engine.kv_gate import GATE_TEXT, check_kv_dtype
from spolia.engine.memory import available_bytes, default_num_threads, split_blocks
from spolia.engine.resizing import PoolSizes, fitting_tokens
from spolia.engine.storage import build_cache, open_tiers
from spolia.engine.tuning import machine_key, quickest_num_threads, waited_for_cores_s
from spolia.errors import InvalidRequest
from spolia.generation import Depth, import_processor
from spolia.kernels import BLOCK_SIZE, Executable, KvCodec, allocate_pool, get_backend
from spolia.kvcache import GroupSpec, KVCache, make_policy, namespace_key
from spolia.models import Model, Tokenizer, load

__all__ = ["Engine", "build_engine"]

_GROWTH_SHARE = 0.75
"""Part of the available memory that is reserved, and not taken, so that the cache can grow while it is used."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Engine:
    """An engine's parts, ready to step.

    Attributes:
        config: as resolved: nothing that was to be measured is None.
        fingerprint: of all that an answer depends on besides its request: model file, KV type, numerics, version. Two
            engines with one fingerprint give one answer to a request with a seed.
        sizes: of the KV pools, which can be changed.
    """

    model: Model
    config: EngineConfig
    admission: Admission
    core: EngineCore
    fingerprint: str
    sizes: PoolSizes


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
    processors = {
        name: import_processor(path) for name, _, path in (entry.partition("=") for entry in config.processors)
    }
    num_threads = config.num_threads or default_num_threads()
    drafting = None if config.draft_model is None else _load_drafting(config.draft_model, model)
    models = [model] if drafting is None else [model, drafting]
    executables = [_executable(each, config, num_threads) for each in models]
    executable = executables[0]
    if config.kv_dtype == "int8":
        check_kv_dtype(
            executable, len(_groups(model)), model.tokenizer.encode(GATE_TEXT)[:max_context], config.kv_dtype
        )
    windows = [group.window for each in models for group in each.program.cache_groups]
    block_bytes = [each.block_bytes(group) for each, m in zip(executables, models, strict=True) for group in _groups(m)]
    split = partial(
        split_blocks,
        block_bytes=block_bytes,
        windows=windows,
        max_context=max_context,
        max_sequences=max_sequences,
        max_batch_tokens=config.max_batch_tokens,
    )
    num_blocks = split(config.kv_memory)
    num_own = len(_groups(model))
    most = max(int(available_bytes() * _GROWTH_SHARE), config.kv_memory or 0)
    pools = _allocate(num_blocks[:num_own], split(most)[:num_own], block_bytes[:num_own])
    executable.bind_kv(pools)
    groups = [GroupSpec(len(pool), window) for pool, window in zip(pools, windows[:num_own], strict=True)]
    layout = f"{executable.numerics}/{config.kv_dtype}"
    codec = None
    if config.kv_offload_dtype != "exact" and config.kv_offload_dtype != config.kv_dtype:
        # An int8 pool's blocks are in 8 bits as they are.
        codec = KvCodec(model.program, executable, config.kv_offload_dtype)
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
    cache.resize(num_blocks[:num_own])
    if config.num_threads is None and config.backend == "cpu":
        key = machine_key(model.digest, executable.numerics, num_threads)
        num_threads = quickest_num_threads(executable, cache, num_threads, clock, waited_for_cores_s, key=key)
        for each in executables[1:]:
            each.set_num_threads(num_threads)
    num_fitting = fitting_tokens(cache, max_context, config.max_batch_tokens)
    draft_model = None
    if drafting is not None:
        draft_pools = _allocate(num_blocks[num_own:], num_blocks[num_own:], block_bytes[num_own:])
        executables[1].bind_kv(draft_pools)
        draft_windows = windows[num_own:]
        draft_groups = [GroupSpec(len(pool), each) for pool, each in zip(draft_pools, draft_windows, strict=True)]
        draft_model = DraftModel(
            executables[1],
            KVCache(draft_groups, clock=clock),
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
        fitting_tokens=num_fitting,
        max_sequences=max_sequences,
        model_tokens=model.context_length,
        namespace=lambda salt: namespace_key(**usual, salt=salt),
        exact_namespace=None if codec is None else lambda salt: namespace_key(**owner, salt=salt),
        clock=clock,
        has_exact_kv=config.kv_dtype != "int8",
        depth=Depth(executable.num_layers, model.program.has_tied_head),
        processors=processors,
    )
    resolved = replace(
        config,
        num_threads=num_threads,
        max_context=max_context if config.max_context is not None else min(max_context, num_fitting),
        max_sequences=max_sequences,
        kv_memory=sum(count * size for count, size in zip(num_blocks, block_bytes, strict=True)),
    )
    facts = {**usual, "engine_salt": "", "version": __version__}  # the salt decides who shares, not what is answered
    fingerprint = f"spolia-{namespace_key(**facts).hex()[:16]}"
    sizes = PoolSizes(
        pools=pools,
        windows=windows[:num_own],
        max_context=max_context,
        max_sequences=max_sequences,
        max_batch_tokens=config.max_batch_tokens,
    )
    return Engine(model=model, config=resolved, admission=admission, core=core, fingerprint=fingerprint, sizes=sizes)


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


def _allocate(num_blocks: Seq[int], most: Seq[int], block_bytes: Seq[int]) -> list[NDArray[np.uint8]]:
    """Pools that can grow to `most` blocks, or, where the system does not reserve memory freely, of `num_blocks`."""
    capacity = [max(now, later) for now, later in zip(num_blocks, most, strict=True)]
    try:
        return [allocate_pool(count, size) for count, size in zip(capacity, block_bytes, strict=True)]
    except OSError:
        return [allocate_pool(count, size) for count, size in zip(num_blocks, block_bytes, strict=True)]


def _text_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The bytes that a generated token adds to the text: none for those that steer and do not read."""
    known: dict[int, bytes] = {}

    def text_bytes(token_id: int) -> bytes:
        text = known.get(token_id)
        if text is None:
            text = known[token_id] = b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
        return text

    return text_bytes
