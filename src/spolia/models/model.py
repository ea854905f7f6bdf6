"""From a source to a model that can run: the files are found, read, checked and turned into a program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spolia.errors import ModelError
from spolia.kernels.program import Program, Weight
from spolia.models.arch import ARCHITECTURES, BY_MODEL_TYPE
from spolia.models.architecture import Architecture
from spolia.models.config import ModelConfig, config_from_gguf, config_from_json
from spolia.models.gguf import read_gguf
from spolia.models.safetensors import read_folder, read_json, rename, spelt
from spolia.models.weights import Weights

if TYPE_CHECKING:
    from spolia.models.chat_template import ChatTemplate
    from spolia.models.tokenizer import Tokenizer

__all__ = ["Model", "load"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A model that was read; nothing of its weights is in memory yet but what the page cache holds.

    Attributes:
        name: the source as it was asked for, less its folders and suffix.
        program: what it computes; its weights are views of the mapped files.
        chat_template: None for a base model.
        paths: the weight files, and config.json where there is one: what the digest is taken of.
        tensors: all of them, as in the files.
    """

    name: str
    config: ModelConfig
    program: Program
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    paths: tuple[Path, ...]
    tensors: Mapping[str, Weight]

    @property
    def architecture(self) -> str:
        """GGUF's name of it."""
        return self.config.architecture

    @property
    def context_length(self) -> int:
        """Tokens that the model is made for."""
        return self.config.context_length

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Each of them ends a reply."""
        return self.tokenizer.end_ids

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 over the contents of `paths`, 32 bytes. Read once; remembered by path, size and time of change."""
        from blake3 import blake3

        from spolia.models.digest import file_digest

        return blake3(b"".join(file_digest(path) for path in self.paths)).digest()

    @property
    def file_bytes(self) -> int:
        """Size of `paths`."""
        return sum(path.stat().st_size for path in self.paths)

    @property
    def num_parameters(self) -> int:
        """Values in all tensors."""
        return sum(math.prod(weight.shape) for weight in self.tensors.values())

    @property
    def main_type(self) -> str:
        """The storage type that most bytes are in."""
        num_bytes: Counter[str] = Counter()
        for weight in self.tensors.values():
            num_bytes[weight.type] += weight.data.nbytes
        return num_bytes.most_common(1)[0][0]

    def describe(self) -> str:
        """One line for people: `llama, 135M parameters, Q4_1, 98 MB, context 8192`."""
        size = _with_unit(self.num_parameters, (1e9, "B"), (1e6, "M"), (1e3, "K"))
        on_disk = _with_unit(self.file_bytes, (1e9, " GB"), (1e6, " MB"), (1e3, " kB"))
        return f"{self.architecture}, {size} parameters, {self.main_type}, {on_disk}, context {self.context_length}"


def _with_unit(count: int, *units: tuple[float, str]) -> str:
    for size, unit in units:
        if count >= size:
            return f"{count / size:.{1 if count < 10 * size else 0}f}{unit}"
    return str(count)


def load(source: str | Path) -> Model:
    """Read the model at `source`: a GGUF file, a folder in Hugging Face's layout, `hf:repo[/file]` or a built-in name.

    Fetches what is not there yet. Takes milliseconds beyond that: weights are mapped, not read.

    Raises:
        ModelError: it cannot be found, read or supported; says what is wrong, in one line.
    """
    from spolia.models.sources import resolve

    path = resolve(source)
    name = str(source).rstrip("/")
    if Path(name).exists():
        name = Path(name).name.removesuffix(".gguf")
    return _load_folder(path, name) if path.is_dir() else _load_gguf(path, name)


def _load_gguf(path: Path, name: str) -> Model:
    from spolia.models.chat_template import chat_template_from_gguf
    from spolia.models.tokenizer import tokenizer_from_gguf

    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: weights alone are no model; name the folder, with its config.json and tokenizer")
    file = read_gguf(path)
    architecture_name = file.metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(architecture_name) if isinstance(architecture_name, str) else None
    if architecture is None:
        raise ModelError(
            f"{path}: architecture {architecture_name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    weights = Weights(path, file.tensors)
    config = config_from_gguf(file.metadata, architecture, weights)
    if architecture.gguf_interleaves_rope:
        _undo_interleaving(weights, config)
    tokenizer = tokenizer_from_gguf(file.metadata)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(f"{path}: has {tokenizer.vocab_size} tokens and embeddings for {config.vocab_size}")
    return Model(
        name=name,
        config=config,
        program=_build(architecture, config, weights),
        tokenizer=tokenizer,
        chat_template=chat_template_from_gguf(file.metadata, tokenizer),
        paths=file.paths,
        tensors=file.tensors,
    )


def _load_folder(folder: Path, name: str) -> Model:
    from spolia.models.chat_template import chat_template_from_folder
    from spolia.models.tokenizer import tokenizer_from_folder

    config_path = folder / "config.json"
    raw = read_json(config_path)
    model_type = raw.get("model_type")
    architecture = BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        raise ModelError(
            f"{config_path}: model_type {model_type!r} is not supported; supported are {', '.join(BY_MODEL_TYPE)}"
        )
    if "quantization_config" in raw:
        raise ModelError(f"{config_path}: quantised safetensors are not supported; take the GGUF file of this model")
    if isinstance(raw.get("text_config"), dict):  # a model of text and images, of which we run the former
        raw = {**raw, **raw["text_config"]}
    config = config_from_json(config_path, raw, architecture)
    files = read_folder(folder)
    tied = raw.get("tie_word_embeddings")
    tensors = rename(files, architecture, tied=bool(tied))
    if tied is False and "output.weight" not in tensors:
        raise ModelError(f"{folder}: tensor 'lm_head.weight' is missing, and tie_word_embeddings is false")
    tokenizer = tokenizer_from_folder(folder)
    return Model(
        name=name,
        config=config,
        program=_build(architecture, config, Weights(folder, tensors, spelt=partial(spelt, architecture=architecture))),
        tokenizer=tokenizer,
        chat_template=chat_template_from_folder(folder, tokenizer),
        paths=(config_path, *files.paths),
        tensors=tensors,
    )


def _build(architecture: Architecture, config: ModelConfig, weights: Weights) -> Program:
    try:
        program = architecture.build(config, weights)
    except ValueError as error:  # the builder's: shapes that agree with the config and not with each other
        raise ModelError(f"{weights.path}: {error}") from error
    if unused := weights.unused():
        raise ModelError(
            f"{weights.path}: tensor {unused[0]!r} is not used by architecture {architecture.name} "
            f"({len(unused)} such tensors): a variant that is not supported"
        )
    return program


def _undo_interleaving(weights: Weights, config: ModelConfig) -> None:
    """Put the rows of each head of Q and K back: the file has the pair of i and i + head_dim / 2 at 2i and 2i + 1."""
    for index, layer in enumerate(config.layers):
        for part, num_heads in ("attn_q", layer.num_heads), ("attn_k", layer.num_kv_heads):
            rows = np.arange(num_heads * config.head_dim)
            order = rows.reshape(num_heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
            weights.reorder_rows(f"blk.{index}.{part}.weight", order)
            weights.reorder_rows(f"blk.{index}.{part}.bias", order)
