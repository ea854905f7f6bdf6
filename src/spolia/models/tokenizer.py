"""Text to token ids and back, from what a model says about its own vocabulary.

tokenizer_core    the Tokenizer: encoding by the `tokenizers` library, decoding from one table of bytes
tokenizer_gguf    built from a GGUF's metadata: byte-level BPE, and SentencePiece's BPE
tokenizer_pre     ... how each byte-level vocabulary cuts text into words
tokenizer_spm     ... SentencePiece's scores restated as merges
tokenizer_folder  built from a folder's `tokenizer.json`
"""

from spolia.models.tokenizer_core import SpecialTokens, Tokenizer, TokenKind
from spolia.models.tokenizer_folder import tokenizer_from_folder
from spolia.models.tokenizer_gguf import tokenizer_from_gguf

__all__ = ["SpecialTokens", "TokenKind", "Tokenizer", "tokenizer_from_folder", "tokenizer_from_gguf"]
