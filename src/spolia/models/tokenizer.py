"""Text to token ids and back, from what a model file says about its own vocabulary.

The encoding runs in the `tokenizers` library; this module builds it from a GGUF's metadata (byte-level BPE, and
SentencePiece's BPE) or from a folder's `tokenizer.json`. Decoding is done here, from one table of bytes, because a
token is bytes and not text: a character may be spread over several tokens, and a stream must see where it ends.

    text  --encode-->  ids  --token_bytes-->  bytes  --UTF-8, U+FFFD for what is not-->  text
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from spolia.errors import InvalidRequest, ModelError
from spolia.models.tokenizer_pre import pre_tokenizer
from spolia.models.tokenizer_spm import merges_from_scores

__all__ = ["SpecialTokens", "Spelling", "TokenKind", "Tokenizer", "tokenizer_from_folder", "tokenizer_from_gguf"]

_SPACE = "\u2581"  # how SentencePiece spells a space


class TokenKind(enum.IntEnum):
    """What a token is for; the values are GGUF's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Steers the model (`<|im_end|>`): recognised in text only on request, left out of decoded text."""
    USER_DEFINED = 4
    """Ordinary text that is always one token (`<tool_call>`)."""
    UNUSED = 5
    """Fills the vocabulary up to the size of the embedding; never produced, decodes to nothing."""
    BYTE = 6


class Spelling(enum.Enum):
    """How the vocabulary writes bytes."""

    BYTE_LEVEL = "byte-level"
    """One printable character a byte, as GPT-2 does."""
    SENTENCEPIECE = "sentencepiece"
    """As text, a space as U+2581, and bytes that form no piece as `<0xNN>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens with a role; None where the model has none."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unk: int | None = None
    pad: int | None = None
    fim_prefix: int | None = None
    fim_suffix: int | None = None
    fim_middle: int | None = None
    fim_pad: int | None = None
    fim_repo: int | None = None
    fim_file: int | None = None


class Tokenizer:
    """One model's vocabulary. Immutable after its birth; any thread may call.

    Attributes:
        special: ids of the tokens with a role.
        end_ids: the tokens that end a reply: EOS, end of turn and end of message.
        adds_bos: `encode` begins with BOS unless told otherwise.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        pieces: Sequence[str],
        kinds: Sequence[int],
        spelling: Spelling,
        special: SpecialTokens,
        end_ids: frozenset[int],
        adds_bos: bool,
        prefixes_space: bool,
    ) -> None:
        """Args:
        backend: encodes, with control and user-defined tokens added, and BOS and EOS put by its post-processor.
        pieces: every token as the vocabulary spells it, by id.
        kinds: a `TokenKind` for each.
        prefixes_space: encoding puts a space before the text, which decoding takes off again.
        """
        self.special = special
        self.end_ids = end_ids
        self.adds_bos = adds_bos
        self._backend = backend
        self._pieces = pieces
        self._kinds = kinds
        self._spelling = spelling
        self._prefixes_space = prefixes_space

    @property
    def vocab_size(self) -> int:
        """Number of ids that mean something here; a model's logits may be wider."""
        return len(self._pieces)

    @property
    def bos_id(self) -> int | None:
        return self.special.bos

    @property
    def eos_id(self) -> int | None:
        return self.special.eos

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any Unicode text; it is not normalised unless the model's own `tokenizer.json` says so.
            add_special: put BOS before and EOS after it where the model wants them. False for a rendered chat
                template, which writes its own.
            parse_special: `<|im_end|>` in the text becomes that token; otherwise it is spelt out like any other text.

        Raises:
            InvalidRequest: the text has a lone surrogate, which no bytes can spell.
        """
        backend = self._backend if parse_special else self._plain_backend
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special).ids
        except TypeError:
            # The library's message for text that is not UTF-8 is "must be str", which it is.
            position = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if position is None:
                raise
            raise InvalidRequest(
                f"the text has a lone surrogate (U+{ord(text[position]):04X}) at character {position}: "
                f"half of a pair, which is not a character; send the whole pair or leave it out"
            ) from None
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text that ids stand for; bytes that are not UTF-8 become U+FFFD.

        A text that starts with BOS loses the space that `encode` put there. Ids that do not are taken to go on from
        something, and keep theirs.

        Args:
            skip_special: leave control tokens out.
        """
        ids = list(ids)
        content = b"".join(
            self.token_bytes(token_id) for token_id in ids if not (skip_special and self.is_special(token_id))
        )
        text = content.decode("utf-8", errors="replace")
        if self._prefixes_space and ids and ids[0] == self.special.bos:
            opening = "" if skip_special else self.token_text(ids[0])
            text = opening + text[len(opening) :].removeprefix(" ")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: part of a character, perhaps; nothing for an id without a token.

        Raises:
            InvalidRequest: the id is negative.
        """
        if (known := self._token_bytes.get(token_id)) is None:
            known = self._token_bytes[token_id] = self._spell_out(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token for a human to read: its text, U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token is one that steers and does not read."""
        return 0 <= token_id < self.vocab_size and self._kinds[token_id] in (TokenKind.CONTROL, TokenKind.UNKNOWN)

    def token_id(self, text: str) -> int | None:
        """The id of the token spelt exactly so in the vocabulary, such as `<|im_start|>`; None if there is none."""
        found: int | None = self._backend.token_to_id(text)
        return found

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        return {}

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A second front to the same vocabulary that does not recognise control tokens."""
        plain = tokenizers.Tokenizer(self._backend.model)  # shares the model, copies nothing
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(plain, part, value)
        added = self._backend.get_added_tokens_decoder()
        plain.add_tokens([added[token_id] for token_id in sorted(added) if not added[token_id].special])
        return plain

    def _spell_out(self, token_id: int) -> bytes:
        if token_id < 0:
            raise InvalidRequest(f"token id {token_id} is negative; ids are 0 to {self.vocab_size - 1}")
        if token_id >= self.vocab_size:
            return b""
        piece, kind = self._pieces[token_id], self._kinds[token_id]
        if kind == TokenKind.UNUSED:
            return b""
        if kind == TokenKind.BYTE:
            return bytes.fromhex(piece[3:5])
        if kind == TokenKind.NORMAL and self._spelling is Spelling.SENTENCEPIECE:
            return piece.replace(_SPACE, " ").encode()
        if kind == TokenKind.NORMAL:
            try:
                return bytes(map(_BYTE_OF_CHARACTER.__getitem__, piece))
            except KeyError:  # a token that was added as text and not marked so
                return piece.encode()
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where it prints, and else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()

# ---------------------------------------------------------------------------------------------------------- from GGUF

# Roles that older files do not state; then the control token of that name has the role.
_ROLE_BY_NAME = {
    "eot": ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"),
    "eom": ("<|eom_id|>",),
    "fim_prefix": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    "fim_suffix": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    "fim_middle": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    "fim_repo": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_file": ("<|file_sep|>",),
}
_ENDS_BY_NAME = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|end_of_text|>", "<EOT>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
)
_GGUF_ROLES = {
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
    "prefix": "fim_prefix",
    "suffix": "fim_suffix",
    "middle": "fim_middle",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer from the keys `tokenizer.ggml.*` of a GGUF file.

    Raises:
        ModelError: a kind of tokenizer or pre-tokenizer that is not supported, or keys that contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level_backend, "llama": _sentencepiece_backend}.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise ModelError(
            f"tokenizer.ggml.model is {kind!r}, which is not supported; supported: 'gpt2' (byte-level BPE) and "
            f"'llama' (SentencePiece BPE)"
        )
    vocabulary = _Vocabulary.read(metadata)
    special = vocabulary.special_tokens(metadata)
    backend, adds_bos, prefixes_space = build(metadata, vocabulary, special)
    backend.add_special_tokens(
        [AddedToken(vocabulary.pieces[i], special=True, normalized=False) for i in vocabulary.ids(TokenKind.CONTROL)]
    )
    # With a space put before each text the library would put one before the token's own spelling too, if normalised.
    normalized = kind == "llama" and not prefixes_space
    backend.add_tokens(
        [
            AddedToken(vocabulary.pieces[i], special=False, normalized=normalized)
            for i in vocabulary.ids(TokenKind.USER_DEFINED)
        ]
    )
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and special.bos is not None
    adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and special.eos is not None
    _frame(
        backend,
        bos=(vocabulary.pieces[special.bos], special.bos) if adds_bos and special.bos is not None else None,
        eos=(vocabulary.pieces[special.eos], special.eos) if adds_eos and special.eos is not None else None,
    )
    return Tokenizer(
        backend,
        pieces=vocabulary.pieces,
        kinds=vocabulary.kinds,
        spelling=Spelling.BYTE_LEVEL if kind == "gpt2" else Spelling.SENTENCEPIECE,
        special=special,
        end_ids=vocabulary.end_ids(special),
        adds_bos=adds_bos,
        prefixes_space=prefixes_space,
    )


@dataclass(frozen=True)
class _Vocabulary:
    """The token list of a GGUF file."""

    pieces: list[str]
    kinds: list[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        pieces = metadata.get("tokenizer.ggml.tokens")
        if pieces is None or not len(pieces):
            raise ModelError("the file has no tokenizer: tokenizer.ggml.tokens is missing")
        kinds = metadata.get("tokenizer.ggml.token_type")
        kinds = [int(TokenKind.NORMAL)] * len(pieces) if kinds is None else list(map(int, kinds))
        if len(kinds) != len(pieces):
            raise ModelError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(pieces)} tokens")
        return cls(list(pieces), kinds)

    @cached_property
    def id_of(self) -> dict[str, int]:
        """Ids by spelling, without what only fills the vocabulary up; the first of two that are spelt the same."""
        ids = dict(zip(self.pieces, range(len(self.pieces)), strict=True))
        if len(ids) < len(self.pieces):
            ids = {}
            for token_id, piece in enumerate(self.pieces):
                ids.setdefault(piece, token_id)
        for token_id in self.ids(TokenKind.UNUSED):
            ids.pop(self.pieces[token_id], None)
        return ids

    def ids(self, kind: TokenKind) -> list[int]:
        return [token_id for token_id, its_kind in enumerate(self.kinds) if its_kind == kind]

    def special_tokens(self, metadata: Mapping[str, Any]) -> SpecialTokens:
        roles: dict[str, int] = {}
        for key, role in _GGUF_ROLES.items():
            token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is None or role in roles:
                continue
            if not 0 <= int(token_id) < len(self.pieces):
                raise ModelError(
                    f"tokenizer.ggml.{key}_token_id is {token_id}, but the vocabulary has {len(self.pieces)} tokens"
                )
            roles[role] = int(token_id)
        if metadata["tokenizer.ggml.model"] == "llama":
            roles = {"bos": 1, "eos": 2, "unk": 0} | roles  # what SentencePiece models have unless they say otherwise
        return SpecialTokens(**self._named(roles))

    def _named(self, roles: dict[str, int]) -> dict[str, int]:
        for role, names in _ROLE_BY_NAME.items():
            if role not in roles and (found := self._controls(names)):
                roles[role] = found[0]
        return roles

    def _controls(self, names: Iterable[str]) -> list[int]:
        """Ids of those of the names that are control tokens: Gemma's `</s>` is HTML, and ends nothing."""
        ids = (self.id_of.get(name) for name in names)
        return [token_id for token_id in ids if token_id is not None and self.kinds[token_id] == TokenKind.CONTROL]

    def end_ids(self, special: SpecialTokens) -> frozenset[int]:
        stated = {token_id for token_id in (special.eos, special.eot, special.eom) if token_id is not None}
        return frozenset(stated | set(self._controls(_ENDS_BY_NAME)))


_Built = tuple[tokenizers.Tokenizer, bool, bool]  # backend, adds_bos where the file does not say, prefixes_space


def _byte_level_backend(metadata: Mapping[str, Any], vocabulary: _Vocabulary, special: SpecialTokens) -> _Built:
    cut = pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError("the file has no tokenizer: tokenizer.ggml.merges is missing, which 'gpt2' needs")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = _bpe(vocabulary.id_of, pairs, ignore_merges=cut.ignore_merges)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend, cut.adds_bos, bool(metadata.get("tokenizer.ggml.add_space_prefix", False))


def _sentencepiece_backend(metadata: Mapping[str, Any], vocabulary: _Vocabulary, special: SpecialTokens) -> _Built:
    scores = np.asarray(metadata.get("tokenizer.ggml.scores", ()), np.float32)
    if len(scores) != len(vocabulary.pieces):
        raise ModelError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.pieces)} tokens")
    normal = vocabulary.ids(TokenKind.NORMAL)
    merges = merges_from_scores([vocabulary.pieces[i] for i in normal], scores[normal])
    backend = _bpe(
        vocabulary.id_of,
        merges,
        byte_fallback=bool(vocabulary.ids(TokenKind.BYTE)),
        unk_token=vocabulary.pieces[special.unk] if special.unk is not None else None,
        fuse_unk=True,
    )
    prefixes_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixes_space else spaces
    return backend, True, prefixes_space


def _bpe(id_of: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(id_of, merges, **options))
    except Exception as error:  # the library raises a bare Exception: a merge of something that is no token
        raise ModelError(f"the file's tokenizer contradicts itself: {error}") from error


def _frame(
    backend: tokenizers.Tokenizer, *, bos: tuple[str, int] | None = None, eos: tuple[str, int] | None = None
) -> None:
    """Have `add_special` put BOS before and EOS after a text."""
    parts = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=parts, pair=[*parts, "$B"], special_tokens=[token for token in (bos, eos) if token]
    )
