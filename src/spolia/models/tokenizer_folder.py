"""A tokenizer from a folder in Hugging Face's form: `tokenizer.json`, and the settings beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from spolia.errors import ModelError
from spolia.models.tokenizer_core import (
    SpecialTokens,
    Spelling,
    Tokenizer,
    TokenKind,
    ends_by_name,
    frame,
    roles_by_name,
)

__all__ = ["read_json", "token_named", "tokenizer_from_folder"]


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Build a tokenizer from a model's folder.

    `tokenizer.json` decides how text is encoded; `tokenizer_config.json`, which special tokens there are and whether
    BOS and EOS are put; `generation_config.json` and `config.json`, which tokens end a reply.

    Raises:
        ModelError: `tokenizer.json` is missing, broken, or of a kind that is not supported.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
        there = f"; {others[0]} alone is not enough: save the tokenizer with transformers first" if others else ""
        raise ModelError(f"{folder} has no tokenizer.json{there}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare one
        raise ModelError(f"{path} is broken: {error}") from error
    backend.no_truncation()
    backend.no_padding()

    pieces, kinds = _vocabulary(backend)
    decoder = list(_steps(_state(backend.decoder)))
    spelling = _spelling(path, decoder)

    def control_id(name: str) -> int | None:
        token_id = backend.token_to_id(name)
        return token_id if token_id is not None and kinds[token_id] == TokenKind.CONTROL else None

    config = read_json(folder / "tokenizer_config.json")
    stated = {
        role: token_id
        for role in ("bos", "eos", "unk", "pad")
        if (token_id := _id_of(backend, token_named(config, f"{role}_token"))) is not None
    }
    special = SpecialTokens(**roles_by_name(control_id) | stated)
    if isinstance(config.get("add_bos_token"), bool) or isinstance(config.get("add_eos_token"), bool):
        frame(
            backend,
            pieces,
            bos=special.bos if config.get("add_bos_token") else None,
            eos=special.eos if config.get("add_eos_token") else None,
        )
    ends = {token_id for token_id in (special.eos, special.eot, special.eom) if token_id is not None}
    for name in ("generation_config.json", "config.json"):
        ends.update(_as_ids(read_json(folder / name).get("eos_token_id")))
    return Tokenizer(
        backend,
        pieces=pieces,
        kinds=kinds,
        spelling=spelling,
        special=special,
        end_ids=frozenset(ends | ends_by_name(control_id)),
        adds_bos=special.bos is not None and backend.encode("").ids[:1] == [special.bos],
        prefixes_space=any(
            (step["type"] == "Strip" and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in decoder
        ),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file.

    Raises:
        ModelError: the file is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} is broken: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is broken: an object is expected")
    return content


def token_named(config: dict[str, Any], key: str) -> str | None:
    """A special token's text, which the settings give as a string or as an object with its `content`."""
    value = config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    found: int | None = backend.token_to_id(text) if text is not None else None
    return found


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int)]


def _vocabulary(backend: tokenizers.Tokenizer) -> tuple[list[str], Any]:
    """Every token's spelling and kind, by id; ids that are left out are unused."""
    ids = backend.get_vocab(with_added_tokens=True)
    pieces = [""] * (max(ids.values(), default=-1) + 1)
    kinds = np.full(len(pieces), TokenKind.UNUSED, np.uint8)
    for piece, token_id in ids.items():
        pieces[token_id] = piece
    kinds[list(ids.values())] = TokenKind.NORMAL
    if getattr(backend.model, "byte_fallback", False):
        kinds[[ids[name] for byte in range(256) if (name := f"<0x{byte:02X}>") in ids]] = TokenKind.BYTE
    for token_id, token in backend.get_added_tokens_decoder().items():
        kinds[token_id] = TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED
    return pieces, kinds


def _state(decoder: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return state


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The decoder's parts, those of a sequence one by one."""
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    elif decoder:
        yield decoder


def _spelling(path: Path, decoder: list[dict[str, Any]]) -> Spelling:
    types = {step["type"] for step in decoder}
    if "ByteLevel" in types:
        return Spelling.BYTE_LEVEL
    if types & {"Metaspace", "ByteFallback"}:
        return Spelling.SENTENCEPIECE
    raise ModelError(
        f"{path} decodes by {', '.join(sorted(types)) or 'nothing'}, which is not supported; supported: ByteLevel "
        f"(byte-level BPE), and Metaspace or ByteFallback (SentencePiece)"
    )
