"""What a tokenizer is, however it was built.

Encoding runs in the `tokenizers` library. Decoding is done here, from one table of bytes, because a token is bytes and
not text: a character may be spread over several tokens, and a stream must see where it ends.

    text  --encode-->  ids  --token_bytes-->  bytes  --UTF-8, U+FFFD for what is not-->  text
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import processors

from spolia.errors import InvalidRequest

__all__ = ["SPACE", "SpecialTokens", "Spelling", "TokenKind", "Tokenizer", "ends_by_name", "frame", "roles_by_name"]

SPACE = "\u2581"  # how SentencePiece spells a space


class TokenKind(enum.IntEnum):
    """What a token is for; the values are GGUF's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Steers the model (`<|im_end|>`): recognised in text only on request, left out of decoded text."""
    USER_DEFINED = 4
    """Ordinary text that is always one token (`<tool_call>`)."""
    UNUSED = 5
    """Fills the vocabulary up to the size of the embedding; decodes to nothing."""
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
    """One model's vocabulary. Never changes after its birth; any thread may call.

    Attributes:
        special: ids of the tokens with a role.
        special_ids: the tokens that steer and have no text.
        end_ids: the tokens that end a reply: EOS, end of turn, end of message.
        adds_bos: `encode` puts BOS first unless told otherwise.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        pieces: Sequence[str],
        kinds: NDArray[np.uint8],
        spelling: Spelling,
        special: SpecialTokens,
        end_ids: frozenset[int],
        adds_bos: bool,
        prefixes_space: bool,
    ) -> None:
        """Take over what a builder has put together.

        Args:
            backend: encodes; knows control and user-defined tokens, and puts BOS and EOS by its post-processor.
            pieces: every token as the vocabulary spells it, by id.
            kinds: [len(pieces)] a `TokenKind` for each.
            prefixes_space: encoding puts a space before the text, which decoding takes off again.
        """
        self.special = special
        self.end_ids = end_ids
        self.adds_bos = adds_bos
        self._backend = backend
        self._pieces = pieces
        self._kinds = kinds
        self.special_ids = frozenset(np.flatnonzero(np.isin(kinds, (TokenKind.CONTROL, TokenKind.UNKNOWN))).tolist())
        self._spelling = spelling
        self._prefixes_space = prefixes_space
        self._bytes: dict[int, bytes] = {}  # filled as ids are met: a quarter of a million at once would cost a start

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
            text: any Unicode text; it is not normalised unless the model's own `tokenizer.json` says so. A byte that a
                byte-level vocabulary lacks is dropped, as the model's own tokenizer does.
            add_special: put BOS before and EOS after it where the model wants them. False for a rendered chat
                template, which writes its own.
            parse_special: `<|im_end|>` in the text becomes that token; otherwise it is spelt out like any other text.

        Raises:
            InvalidRequest: the text has a lone surrogate, which no bytes can spell.
        """
        backend = self._backend if parse_special else self._plain_backend
        try:
            # A batch of one: unlike `encode` it lets other threads run meanwhile, and it does not look for offsets.
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        except TypeError:  # the library's "must be str" for a str that UTF-8 cannot spell
            position = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if position is None:
                raise
            raise InvalidRequest(
                f"the text has a lone surrogate (U+{ord(text[position]):04X}) at character {position}: half of a pair, "
                f"which is not a character; send the whole pair or leave it out"
            ) from None
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text that ids stand for; bytes that are not UTF-8 become U+FFFD.

        Where encoding puts a space before the text, ids that begin with BOS lose it again: they are a text from its
        start. Other ids go on from something, and keep their space.

        Args:
            skip_special: leave control tokens out.

        Raises:
            InvalidRequest: an id is negative.
        """
        ids = list(ids)
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join([self.token_bytes(i) for i in ids if i not in skipped]).decode("utf-8", errors="replace")
        if self._prefixes_space and ids and ids[0] == self.special.bos:
            opening = "" if skip_special else self.token_text(ids[0])
            text = opening + text.removeprefix(opening).removeprefix(" ")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: a part of a character, perhaps; none for an id without a token.

        Raises:
            InvalidRequest: the id is negative.
        """
        if (known := self._bytes.get(token_id)) is None:
            known = self._bytes[token_id] = self._spell_out(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token for people to read: its text, with U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, piece: str) -> int | None:
        """The id of the token that the vocabulary spells exactly so, such as `<|im_start|>`; None if there is none."""
        found: int | None = self._backend.token_to_id(piece)
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers and does not read."""
        return token_id in self.special_ids

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A second front to the same vocabulary, which does not recognise control tokens."""
        plain = tokenizers.Tokenizer(self._backend.model)  # shares the model and copies nothing
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(plain, part, value)
        added = self._backend.get_added_tokens_decoder()
        plain.add_tokens([added[token_id] for token_id in sorted(added) if not added[token_id].special])
        return plain

    def _spell_out(self, token_id: int) -> bytes:
        if token_id < 0:
            raise InvalidRequest(f"token id {token_id} is negative; ids go from 0 to {self.vocab_size - 1}")
        if token_id >= self.vocab_size:
            return b""
        piece = self._pieces[token_id]
        match TokenKind(self._kinds[token_id]):
            case TokenKind.UNUSED:
                return b""
            case TokenKind.BYTE:
                return bytes.fromhex(piece[3:5])
            case TokenKind.NORMAL | TokenKind.USER_DEFINED if self._spelling is Spelling.SENTENCEPIECE:
                return piece.replace(SPACE, " ").encode()
            case TokenKind.NORMAL if _BYTE_OF.keys() >= set(piece):
                return bytes(map(_BYTE_OF.__getitem__, piece))
            case _:  # its own text
                return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte for each of GPT-2's printable characters: its own where that prints, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()

# Files often leave a role out; then a control token of one of these names has it.
# Source: llama.cpp's `src/llama-vocab.cpp`, which found them in the wild.
_NAMES_BY_ROLE = {
    "eot": ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"),
    "eom": ("<|eom_id|>",),
    "fim_prefix": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    "fim_suffix": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    "fim_middle": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    "fim_repo": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_file": ("<|file_sep|>",),
}
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|end_of_text|>", "<EOT>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
)


def roles_by_name(control_id: Callable[[str], int | None]) -> dict[str, int]:
    """Fields of `SpecialTokens` that the names of control tokens tell.

    Args:
        control_id: the id of the control token of a name; None for a token that is ordinary text, as `</s>` is for
            Gemma, which means HTML by it.
    """
    found = {
        role: next((i for name in names if (i := control_id(name)) is not None), None)
        for role, names in _NAMES_BY_ROLE.items()
    }
    return {role: token_id for role, token_id in found.items() if token_id is not None}


def ends_by_name(control_id: Callable[[str], int | None]) -> set[int]:
    """Control tokens whose name says that a reply ends with them."""
    return {token_id for name in _ENDS if (token_id := control_id(name)) is not None}


def frame(backend: tokenizers.Tokenizer, pieces: Sequence[str], *, bos: int | None, eos: int | None) -> None:
    """Have `add_special` put BOS before a text and EOS after it; None for neither."""
    before = [pieces[bos]] if bos is not None else []
    after = [pieces[eos]] if eos is not None else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(pieces[token_id], token_id) for token_id in (bos, eos) if token_id is not None],
    )
