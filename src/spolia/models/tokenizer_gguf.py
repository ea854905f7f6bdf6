"""A tokenizer from the metadata of a GGUF file, which has the vocabulary but no `tokenizer.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from spolia.errors import ModelError
from spolia.models.tokenizer_core import (
    SPACE,
    SpecialTokens,
    Spelling,
    Tokenizer,
    TokenKind,
    ends_by_name,
    frame,
    roles_by_name,
)
from spolia.models.tokenizer_pre import pre_tokenizer
from spolia.models.tokenizer_spm import merges_from_scores

__all__ = ["tokenizer_from_gguf"]

_KEY = "tokenizer.ggml."
_ROLES = {
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "eom": "eom",
    "unknown": "unk",
    "padding": "pad",
    "fim_pre": "fim_prefix",
    "fim_suf": "fim_suffix",
    "fim_mid": "fim_middle",
    "fim_pad": "fim_pad",
    "fim_rep": "fim_repo",
    "fim_sep": "fim_file",
    "prefix": "fim_prefix",  # names of older files
    "suffix": "fim_suffix",
    "middle": "fim_middle",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer from the keys `tokenizer.ggml.*`.

    `gpt2` is byte-level BPE, cut into words as `tokenizer.ggml.pre` says; `llama` is SentencePiece's BPE. Text is never
    normalised: a GGUF does not say that its model's own tokenizer did (Qwen's composes accents), so what a user types
    is what the model reads, and decoding gives it back.

    Raises:
        ModelError: a kind of tokenizer or of cutting that is not supported, or keys that contradict each other.
    """
    kind = metadata.get(f"{_KEY}model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{_KEY}model is {kind!r}, which is not supported; supported: 'gpt2' (byte-level BPE) and 'llama' "
            f"(SentencePiece BPE)"
        )
    vocabulary = _Vocabulary.read(metadata)
    special = vocabulary.special_tokens(metadata)
    built = _byte_level(metadata, vocabulary) if kind == "gpt2" else _sentencepiece(metadata, vocabulary, special.unk)
    built.backend.add_special_tokens(
        [AddedToken(vocabulary.pieces[i], special=True, normalized=False) for i in vocabulary.ids(TokenKind.CONTROL)]
    )
    built.backend.add_tokens(
        [
            AddedToken(vocabulary.pieces[i], special=False, normalized=built.normalizes_user_defined)
            for i in vocabulary.ids(TokenKind.USER_DEFINED)
        ]
    )
    adds_bos = bool(metadata.get(f"{_KEY}add_bos_token", built.adds_bos)) and special.bos is not None
    adds_eos = bool(metadata.get(f"{_KEY}add_eos_token", False))
    frame(
        built.backend,
        vocabulary.pieces,
        bos=special.bos if adds_bos else None,
        eos=special.eos if adds_eos else None,
    )
    stated_ends = {token_id for token_id in (special.eos, special.eot, special.eom) if token_id is not None}
    return Tokenizer(
        built.backend,
        pieces=vocabulary.pieces,
        kinds=vocabulary.kinds,
        spelling=built.spelling,
        special=special,
        end_ids=frozenset(stated_ends | ends_by_name(vocabulary.control_id)),
        adds_bos=adds_bos,
        prefixes_space=built.prefixes_space,
    )


@dataclass(frozen=True)
class _Vocabulary:
    """The token list of a GGUF file: spellings, and a `TokenKind` for each."""

    pieces: list[str]
    kinds: NDArray[np.uint8]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        pieces = metadata.get(f"{_KEY}tokens", ())
        if not len(pieces):
            raise ModelError(f"the file has no tokenizer: {_KEY}tokens is missing")
        kinds = np.asarray(metadata.get(f"{_KEY}token_type", [TokenKind.NORMAL] * len(pieces)))
        if len(kinds) != len(pieces):
            raise ModelError(f"{_KEY}token_type has {len(kinds)} entries for {len(pieces)} tokens")
        kinds = np.where(np.isin(kinds, list(TokenKind)), kinds, TokenKind.UNUSED).astype(np.uint8)
        for token_id in np.flatnonzero(kinds == TokenKind.BYTE).tolist():
            if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", pieces[token_id]):
                raise ModelError(f"token {token_id} stands for a byte and is spelt {pieces[token_id]!r}, not <0xNN>")
        return cls(list(pieces), kinds)

    @cached_property
    def id_of(self) -> dict[str, int]:
        """Ids by spelling, without what only fills the vocabulary up; the first of those that are spelt the same."""
        ids = dict(zip(self.pieces, range(len(self.pieces)), strict=True))
        if len(ids) < len(self.pieces):
            ids = dict(zip(reversed(self.pieces), reversed(range(len(self.pieces))), strict=True))
        for token_id in self.ids(TokenKind.UNUSED):
            ids.pop(self.pieces[token_id], None)
        return ids

    def ids(self, kind: TokenKind) -> list[int]:
        found: list[int] = np.flatnonzero(self.kinds == kind).tolist()
        return found

    def control_id(self, name: str) -> int | None:
        token_id = self.id_of.get(name)
        return token_id if token_id is not None and self.kinds[token_id] == TokenKind.CONTROL else None

    def special_tokens(self, metadata: Mapping[str, Any]) -> SpecialTokens:
        stated: dict[str, int] = {}
        for key, role in _ROLES.items():
            token_id = metadata.get(f"{_KEY}{key}_token_id")
            if token_id is None or role in stated:
                continue
            if not 0 <= token_id < len(self.pieces):
                raise ModelError(f"{_KEY}{key}_token_id is {token_id}, but there are {len(self.pieces)} tokens")
            stated[role] = int(token_id)
        # SentencePiece models have these unless they say otherwise.
        assumed = {"unk": 0, "bos": 1, "eos": 2} if metadata[f"{_KEY}model"] == "llama" else {}
        return SpecialTokens(**assumed | roles_by_name(self.control_id) | stated)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """An encoder without its added tokens.

    Attributes:
        adds_bos: unless the file says otherwise.
        normalizes_user_defined: user-defined tokens are looked for in the normalised text, not in the raw one.
    """

    backend: tokenizers.Tokenizer
    spelling: Spelling
    adds_bos: bool
    prefixes_space: bool = False
    normalizes_user_defined: bool = False


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> _Built:
    cut = pre_tokenizer(metadata.get(f"{_KEY}pre", "default"))
    merges = metadata.get(f"{_KEY}merges")
    if merges is None:
        raise ModelError(f"the file has no tokenizer: {_KEY}merges is missing, which {_KEY}model 'gpt2' needs")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = _bpe(vocabulary.id_of, pairs, ignore_merges=cut.ignore_merges)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _Built(backend=backend, spelling=Spelling.BYTE_LEVEL, adds_bos=cut.adds_bos)


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary, unk: int | None) -> _Built:
    scores = np.asarray(metadata.get(f"{_KEY}scores", ()), np.float32)
    if len(scores) != len(vocabulary.pieces):
        raise ModelError(f"{_KEY}scores has {len(scores)} entries for {len(vocabulary.pieces)} tokens")
    normal = vocabulary.ids(TokenKind.NORMAL)
    backend = _bpe(
        vocabulary.id_of,
        merges_from_scores([vocabulary.pieces[i] for i in normal], scores[normal]),
        byte_fallback=bool(vocabulary.ids(TokenKind.BYTE)),
        unk_token=vocabulary.pieces[unk] if unk is not None else None,
        fuse_unk=True,
    )
    prefixes_space = bool(metadata.get(f"{_KEY}add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixes_space else spaces
    return _Built(
        backend=backend,
        spelling=Spelling.SENTENCEPIECE,
        adds_bos=True,
        prefixes_space=prefixes_space,
        # SentencePiece looks for them in the normalised text. The library normalises their own spelling too, which
        # would put a space before it; so where there is one to put, they are looked for in the raw text.
        normalizes_user_defined=not prefixes_space,
    )


def _bpe(id_of: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(id_of, merges, **options))
    except Exception as error:  # the library raises a bare one, for a merge of something that is not a token
        raise ModelError(f"the file's tokenizer contradicts itself: {error}") from error
