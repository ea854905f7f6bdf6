"""Models small enough to write in a test: random weights and a vocabulary of bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spolia.kernels import BLOCK_SIZE, Program, StepInputs, Weight, allocate_pool, get_backend
from spolia.kernels.quants import TYPES, quantize

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 256, 8, 2, 32, 256, 2  # 256: a block of the K types
_ALPHABET = [chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174 else None for b in range(256)]
_SPARE = (chr(256 + i) for i in range(256))
BYTE_TOKENS = [char or next(_SPARE) for char in _ALPHABET]  # GPT-2's one printable character a byte
VOCAB = 258  # the bytes, one merge, one control token

VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*BYTE_TOKENS, "th", "<|endoftext|>"],
    "tokenizer.ggml.token_type": [1] * 257 + [3],
    "tokenizer.ggml.merges": ["t h"],
    "tokenizer.ggml.eos_token_id": 257,
}

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
    **VOCABULARY,
}


def llama_tensors(type_name: str = "F32", *, tied: bool = True) -> dict[str, Weight]:
    """Random tensors for `LLAMA`, matrices of type `type_name`."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (FFN, HIDDEN),
            f"blk.{i}.ffn_up": (FFN, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, FFN),
        }
    return {
        f"{name}.weight": quantize(
            rng.standard_normal(shape) * 0.1, type_name if len(shape) == 2 else "F32", f"{name}.weight"
        )
        for name, shape in shapes.items()
    }


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Weight],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a GGUF file as its specification says, to test the reader with; any value of metadata may be a list."""
    header = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    data = bytearray()
    for name, weight in tensors.items():
        dims = weight.shape[::-1]
        header += _string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        header += struct.pack("<IQ", TYPES[weight.type].ggml_id, len(data))
        data += weight.data.tobytes()
        data += bytes(-len(data) % alignment)
    header += bytes(-len(header) % alignment)
    path.write_bytes(header + data)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """Type number and value."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Ii", 5, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list():
            items = [_value(item) for item in value]
            return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    raise TypeError(value)


def logits_of(program: Program, ids: list[int]) -> NDArray[np.float32]:
    """Logits of all positions by the `reference` backend, float32 `[len(ids), vocab]`."""
    executable = get_backend("reference")(program, kv_dtype="f32", num_threads=1)
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    groups = range(len(program.cache_groups))
    executable.bind_kv([allocate_pool(num_blocks, executable.block_bytes(group)) for group in groups])
    rows = np.arange(len(ids), dtype=np.int32)
    logits = np.empty((len(ids), program.vocab_size), np.float32)
    step = StepInputs(
        token_ids=np.array(ids, np.int32),
        positions=rows,
        row_starts=np.array([0, len(ids)], np.int32),
        block_tables=tuple(np.arange(num_blocks, dtype=np.int32)[None] for _ in groups),
        logit_rows=rows,
    )
    executable.run(step, logits)
    return logits


def write_tokenizer(folder: Path) -> None:
    """A `tokenizer.json` with the byte vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(BYTE_TOKENS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
