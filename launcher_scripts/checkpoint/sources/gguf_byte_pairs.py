"""Byte pairs of a GGUF file (`tokenizer.ggml.model` gpt2): GPT-2's and what came after it.

Of how text is cut into words before byte pairs merge, a file says only the name
(`tokenizer.ggml.pre`). The expressions are those of the tokenizers that llama.cpp gave the names
to, as their own tokenizer.json has them; llama.cpp's forms of them, which mean the same, are in its
src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


@dataclass(frozen=True)
class PreTokenizer:
    """A row of PRE_TOKENIZERS.

    splits:        expressions that cut the text one after the other; what matches is a word, and
                   what lies between two matches is one too
    normalized:    the text is composed first (NFC)
    ignore_merges: a word that is a token is not merged from its bytes
    starts:        texts start with the start token, unless the file says otherwise
    """

    splits: tuple[str, ...]
    normalized: bool = False
    ignore_merges: bool = False
    starts: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """The expression of GPT-4, from which the later ones differ little."""
    symbols = letters.strip("[]")
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?[^\s{symbols}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(digits: str, contractions: str) -> str:
    """The expression of GPT-4o: a word ends where capitals begin again."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{upper}*{lower}+{contractions}|{start}{upper}+{lower}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Stops and commas of other scripts.
_STOPS = "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_LLAMA3 = _words(r"\p{N}{1,3}")
_GPT2_ROW = PreTokenizer((_GPT2,))
_NEOX_ROW = PreTokenizer((_GPT2,), normalized=True)
_DIGITS_ROW = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_ROW = PreTokenizer((_LLAMA3,), ignore_merges=True, starts=True)
_GPT4_ROW = PreTokenizer((_LLAMA3,))
_QWEN2_ROW = PreTokenizer((_words(r"\p{N}"),), normalized=True)
_GPT4O_ROW = PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "bloom": PreTokenizer((rf" ?[^(\s|.,!?{_STOPS})]+",)),
    "command-r": PreTokenizer((r"\p{N}", _GPT2), normalized=True),
    "dbrx": _GPT4_ROW,
    "deepseek-coder": PreTokenizer(
        (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            _CJK,
            r"\p{N}",
        )
    ),
    "deepseek-r1-qwen": _QWEN2_ROW,
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u30ff]+",
            rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "falcon3": _LLAMA3_ROW,
    "gpt-2": _GPT2_ROW,
    "gpt-4o": _GPT4O_ROW,
    "llama-bpe": _LLAMA3_ROW,
    "llama-v3": _LLAMA3_ROW,
    "llama3": _LLAMA3_ROW,
    "mpt": _NEOX_ROW,
    "olmo": _NEOX_ROW,
    "phi-2": _GPT2_ROW,
    "qwen2": _QWEN2_ROW,
    "qwen35": PreTokenizer((_words(r"\p{N}", letters=r"[\p{L}\p{M}]"),)),
    "refact": _DIGITS_ROW,
    "smaug-bpe": _GPT4_ROW,
    "smollm": _DIGITS_ROW,
    "starcoder": _DIGITS_ROW,
    "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, starts=True),
}


if TYPE_CHECKING:
    from tokenizers import Tokenizer


def byte_pairs(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer by the file's tokens and merges; no token is special yet.

    Raises what `tokenizers` raises where merges and tokens disagree.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    row = PRE_TOKENIZERS[metadata["pre"]]
    vocab = {token: index for index, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=row.ignore_merges))
    if row.normalized:
        tokenizer.normalizer = normalizers.NFC()
    splits = [Split(Regex(expression), "isolated") for expression in row.splits]
    tokenizer.pre_tokenizer = Sequence(
        [*splits, ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
