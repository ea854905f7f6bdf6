"""SentencePiece itself, for a vocabulary in a GGUF: what a SentencePiece model's ids are by definition."""

from __future__ import annotations

from typing import Any

import sentencepiece


def sentencepiece_of(metadata: dict[str, Any]) -> sentencepiece.SentencePieceProcessor:
    """The model file that a SentencePiece vocabulary in a GGUF once was."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    columns = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(*columns, strict=True):
        # GGUF writes user-defined pieces with real spaces; and has UNKNOWN as CONTROL sometimes.
        piece = token.replace(" ", "\u2581") if kind == 4 else token
        model.pieces.add(piece=piece, score=float(score), type=2 if token == "<unk>" else int(kind))
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id = metadata["tokenizer.ggml.unknown_token_id"]
    model.trainer_spec.bos_id = metadata["tokenizer.ggml.bos_token_id"]
    model.trainer_spec.eos_id = metadata["tokenizer.ggml.eos_token_id"]
    model.trainer_spec.pad_id = metadata["tokenizer.ggml.padding_token_id"]
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = metadata["tokenizer.ggml.add_space_prefix"]
    model.normalizer_spec.remove_extra_whitespaces = False
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.SerializeToString())
    return processor
