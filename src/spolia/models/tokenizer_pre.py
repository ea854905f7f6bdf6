r"""How a byte-level vocabulary cuts text into words before BPE, by the name that GGUF gives it.

BPE never merges across a cut, so the cuts are part of the vocabulary as much as its merges are: with the wrong ones a
model still answers, only worse. A GGUF stores just a name (`tokenizer.ggml.pre`), so an unknown name is an error and
not a guess.

Each pattern is the one of the model's own `tokenizer.json`, in Oniguruma's syntax, which is what `tokenizers` runs.
Patterns apply in turn: each cuts the pieces that the one before it left, and what it does not match stays a piece.

Source: `tokenizer.json` of the models concerned; the names and which names share a pattern, llama.cpp's
`src/llama-vocab.cpp`. Where its patterns are restated for a weaker regex engine, the original is used here.
"""

from __future__ import annotations

from dataclasses import dataclass

from spolia.errors import ModelError

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "pre_tokenizer"]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting.

    Attributes:
        patterns: regular expressions, applied in turn.
        ignore_merges: a piece that is itself a token is taken whole, whatever the merges say.
        adds_bos: text begins with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _contractions_first(digits: str, *, letters: str = r"\p{L}", not_symbol: str = r"\s\p{L}\p{N}") -> str:
    """The family of cl100k, Llama 3 and Qwen: they differ in how many digits stay together and in what a letter is."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^{not_symbol}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, *, contraction: str = "") -> str:
    """The family of o200k and Tekken: a word starts where the case rises."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


# The cased letters as DeepSeek LLM lists them: an older Unicode than a property class would give.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_MARKED_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_GPT2 = PreTokenizer((_WORDS,))
_DIGITS_APART = PreTokenizer((r"\p{N}", _WORDS))
_LLAMA3 = PreTokenizer((_contractions_first(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_CL100K = PreTokenizer((_contractions_first(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_contractions_first(r"\p{N}"),))
_QWEN35 = PreTokenizer((_contractions_first(r"\p{N}", letters=r"[\p{L}\p{M}]", not_symbol=r"\s\p{L}\p{M}\p{N}"),))
_GPT4O = PreTokenizer((_cased(r"\p{N}{1,3}", contraction=_CONTRACTION + "?"),))
_TEKKEN = PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, adds_bos=True)
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}",
    )
)
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _CJK_AND_KANA, _MARKED_WORDS))
_FALCON = PreTokenizer((r"[\p{P}$+<=>^~|`]+", _WORDS, r"[0-9][0-9][0-9]"))
_SEED_CODER = PreTokenizer(
    (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # A file from before the names existed says nothing or "default": GPT-2's pattern is the common ancestor.
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4"), _GPT2),
    **dict.fromkeys(("a.x-4.0", "mellum", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_APART),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "tekken": _TEKKEN,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "falcon": _FALCON,
    "seed-coder": _SEED_CODER,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The cuts that `tokenizer.ggml.pre` names.

    Raises:
        ModelError: the name is not known; the message lists those that are.
    """
    if (found := PRE_TOKENIZERS.get(name)) is not None:
        return found
    raise ModelError(
        f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that is not supported, and a guess would give wrong tokens; "
        f"supported: {', '.join(sorted(PRE_TOKENIZERS))}"
    )
