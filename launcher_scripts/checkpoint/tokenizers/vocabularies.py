"""Vocabularies in GGUF files and SentencePiece models.

How the vocabularies of a GGUF file become tokenizers, by `tokenizer.ggml.model`.

llama: byte pairs of SentencePiece (Llama 2, Gemma, Phi-3; Kudo and Richardson, 2018,
https://arxiv.org/abs/1808.06226). `tokenizers` wants merges: the two pieces that make a third merge
the earlier the higher its score.
t5: SentencePiece's unigram model, which takes the pieces of the highest sum of scores.
gpt2: byte pairs of GPT-2 and what came after it. Of how text is cut into words before byte pairs
merge, a file says only the name (`tokenizer.ggml.pre`). The expressions are those of the tokenizers
that llama.cpp gave the names to, as their own tokenizer.json has them; llama.cpp's forms of them,
which mean the same, are in its src/llama-vocab.cpp.

SentencePiece models: the pieces and settings of `tokenizer.model` and its kin.

The file is one message of Protocol Buffers, ModelProto of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. Its few fields
are read here from the wire format (https://protobuf.dev/programming-guides/encoding): the library
sentencepiece does not give its normalization, and the code that it generates needs a newer protobuf
than Triton's client allows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Values of tokenizer.ggml.token_type.
_SPACE = "▁"
CHARSMAP = "precompiled_charsmap"


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


def _cased_words(digits: str, contractions: str, but: str = "", slash: str = "/") -> str:
    """The expression of GPT-4o: a word ends where capitals begin again.

    but: what is taken out of the sets of letters;  slash: what may follow symbols besides new lines
    """
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
    )
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{upper}*{lower}+{contractions}|{start}{upper}+{lower}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*|{_SPACES}"
    )


_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_KANA = "[\u4e00-\u9fa5\u3040-\u30ff]+"
# Letters that have a case, without what Unicode has added to these blocks since DeepSeek LLM.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7ff"
    r"\uab30-\uab68\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df1e}]]"
)
_ASCII_STOPS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
# Stops and commas of other scripts.
_STOPS = "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
# Groups of three digits, counted from a number's end.
_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_SYMBOLS = (
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e00-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _KANA
)
_WIDE_SPACES = "|".join(
    rf"\s{{{width}}}(?!\S)" for width in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")
)
_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_BLOOM = rf" ?[^(\s|.,!?{_STOPS})]+"
_GPT2_ROW = PreTokenizer((_GPT2,))
_NEOX_ROW = PreTokenizer((_GPT2,), normalized=True)
_DIGITS_ROW = PreTokenizer((r"\p{N}", _GPT2))
_BLOOM_ROW = PreTokenizer((_BLOOM,))
_LLAMA3_ROW = PreTokenizer((_LLAMA3,), ignore_merges=True, starts=True)
_GPT4_ROW = PreTokenizer((_LLAMA3,))
_QWEN2_ROW = PreTokenizer((_QWEN2,), normalized=True)
_PLAIN_QWEN2_ROW = PreTokenizer((_QWEN2,))
_GPT4O_ROW = PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))
_AYA_ROW = PreTokenizer((_THOUSANDS, _cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")))
_DEEPSEEK3_ROW = PreTokenizer((r"\p{N}{1,3}", _KANA, rf"{_SYMBOLS}[\r\n]*|{_SPACES}"))
_BAILING_ROW = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"
        r"|\s+(?!\S)|\s+",
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "a.x-4.0": _GPT2_ROW,
    "afmoe": PreTokenizer((_THOUSANDS, _AFMOE_SCRIPTS, rf"{_SYMBOLS}[\r\n]*|{_SPACES}")),
    "bailingmoe": _BAILING_ROW,
    "bailingmoe2": _BAILING_ROW,
    "bloom": _BLOOM_ROW,
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        starts=True,
    ),
    "chatglm-bpe": _GPT4_ROW,
    "codeshell": _DIGITS_ROW,
    "cohere2moe": _AYA_ROW,
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
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            rf"\s?{_ASCII_STOPS}+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-r1-qwen": _QWEN2_ROW,
    "deepseek-v3": _DEEPSEEK3_ROW,
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "exaone": _DIGITS_ROW,
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "exaone4": _GPT2_ROW,
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "falcon-h1": _LLAMA3_ROW,
    "falcon3": _LLAMA3_ROW,
    "gigachat": _GPT2_ROW,
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "gpt-2": _GPT2_ROW,
    "gpt-4o": _GPT4O_ROW,
    "gpt3-finnish": _BLOOM_ROW,
    "granite-docling": _GPT2_ROW,
    "grok-2": _PLAIN_QWEN2_ROW,
    "hunyuan": _PLAIN_QWEN2_ROW,
    "hunyuan-dense": _DEEPSEEK3_ROW,
    "hy_v4": _DEEPSEEK3_ROW,
    "jais": _GPT2_ROW,
    "jais-2": PreTokenizer((_LLAMA3.replace(r"|\s+(?!\S)|\s+", rf"|{_WIDE_SPACES}|\s"),)),
    "joyai-llm": _DEEPSEEK3_ROW,
    "kanana2": _GPT4O_ROW,
    "kimi-k2": PreTokenizer(
        (
            r"\p{Han}+",
            _cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?", r"&&[^\p{Han}]", slash=""),
        )
    ),
    "kormo": _PLAIN_QWEN2_ROW,
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "lfm2": _LLAMA3_ROW,
    "llada-moe": _BAILING_ROW,
    "llama-bpe": _LLAMA3_ROW,
    "llama-v3": _LLAMA3_ROW,
    "llama3": _LLAMA3_ROW,
    "llama4": _GPT4O_ROW,
    "megrez": _PLAIN_QWEN2_ROW,
    "mellum": _GPT2_ROW,
    "mellum2": _DIGITS_ROW,
    "midm-2.0": _LLAMA3_ROW,
    "minerva-7b": _DIGITS_ROW,
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    "minimax-m2": _GPT4O_ROW,
    "mpt": _NEOX_ROW,
    "olmo": _NEOX_ROW,
    "phi-2": _GPT2_ROW,
    "pixtral": _LLAMA3_ROW,
    "poro-chat": _BLOOM_ROW,
    "qwen2": _QWEN2_ROW,
    "qwen35": PreTokenizer((_words(r"\p{N}", letters=r"[\p{L}\p{M}]"),)),
    "refact": _DIGITS_ROW,
    "seed-coder": PreTokenizer(
        (_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),)
    ),
    "smaug-bpe": _GPT4_ROW,
    "smollm": _DIGITS_ROW,
    "solar-open": _PLAIN_QWEN2_ROW,
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _KANA, rf"{_SYMBOLS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "stablelm2": _PLAIN_QWEN2_ROW,
    "starcoder": _DIGITS_ROW,
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "talkie": _GPT4O_ROW,
    "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, starts=True),
    "tiny_aya": _AYA_ROW,
    "trillion": _GPT2_ROW,
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(f"{_CONTRACTIONS}|"),)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "youtu": PreTokenizer(
        (_YOUTU_SCRIPTS, _cased_words(r"\p{N}", f"{_CONTRACTIONS}?")), ignore_merges=True
    ),
}


def byte_pairs(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer by the file's tokens and merges; no token is special yet.

    Raises what `tokenizers` raises where merges and tokens disagree.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    row = PRE_TOKENIZERS[metadata["pre"]]
    vocab = {token: index for index, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=row.ignore_merges))
    if row.normalized:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in row.splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pieces(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer by the file's pieces and scores; no token is special yet."""
    tokens, kinds = metadata["tokens"], metadata["token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return _of_pieces(metadata, _merges(vocab, metadata["scores"], kinds))


def merged_pieces(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer by the file's pieces and merges, which end at new lines: that of Gemma 4. No
    token is special yet."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [(merge, merge.find(" ", 1)) for merge in metadata["merges"]]
    merges = [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]
    tokenizer = _of_pieces({**metadata, "add_space_prefix": False}, merges)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return tokenizer


def _of_pieces(metadata: Mapping[str, Any], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    tokens, kinds = metadata["tokens"], metadata["token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next(
        (token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None
    )
    model = BPE(vocab, list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    return _with_visible_spaces(Tokenizer(model), metadata)


def unigram(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer by the file's pieces and scores; no token is special yet."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram

    kinds = metadata["token_type"]
    model = Unigram(
        list(zip(metadata["tokens"], metadata["scores"], strict=True)),
        kinds.index(UNKNOWN) if UNKNOWN in kinds else None,
        byte_fallback=BYTE in kinds,
    )
    return _with_visible_spaces(Tokenizer(model), metadata)


def _with_visible_spaces(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> Tokenizer:
    """Normalize as SentencePiece does, spaces becoming visible in the end."""
    from tokenizers import Regex, decoders, normalizers

    steps: list[Any] = []
    if charsmap := metadata.get(CHARSMAP):
        steps.append(normalizers.Precompiled(bytes(value & 0xFF for value in charsmap)))
    if metadata.get("remove_extra_whitespaces"):
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" +"), " "),
        ]
    # A text starts with a space, unless the file says that it does not.
    prefixed = metadata.get("add_space_prefix", True) is not False
    if prefixed:
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    return tokenizer


def _merges(
    vocab: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best first."""
    merges = []
    for token, index in vocab.items():
        if kinds[index] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], index, left, right, token, cut))
    merges.sort(key=lambda row: row[:4])
    return [(token[:cut], token[cut:]) for *_, token, cut in merges]


# Values of a piece's type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}
# The fields of ModelProto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
# The fields of TrainerSpec: name -> number, default.
_OF_TRAINER: dict[str, tuple[int, Any]] = {
    "algorithm": (3, UNIGRAM),
    "byte_fallback": (35, False),
    "unk_id": (40, 0),
    "bos_id": (41, 1),
    "eos_id": (42, 2),
    "unk_piece": (45, "<unk>"),
    "bos_piece": (46, "<s>"),
    "eos_piece": (47, "</s>"),
}
_CHARSMAP = 2


@dataclass(frozen=True)
class VocabularyPiece:
    """text, score and type (NORMAL, ...); its id is its index."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a ModelProto that say how text becomes ids.

    algorithm:     UNIGRAM or BPE (or words or characters, 3 and 4)
    byte_fallback: characters without a piece become pieces of bytes
    charsmap:      the compiled normalization; b"" without one
    """

    pieces: tuple[VocabularyPiece, ...]
    charsmap: bytes
    algorithm: int
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    unk_piece: str
    bos_piece: str
    eos_piece: str

    @classmethod
    def parse(cls, content: bytes) -> SentencePieceModel:
        """Raises ValueError for a file that is not such a model, or is truncated."""
        pieces: list[VocabularyPiece] = []
        trainer: dict[int, Any] = {}
        charsmap = b""
        for number, value in _fields(memoryview(content)):
            if number == _PIECES:
                pieces.append(_piece(_message(value)))
            elif number == _TRAINER:
                trainer = dict(_fields(_message(value)))
            elif number == _NORMALIZER:
                charsmap = bytes(_message(dict(_fields(_message(value))).get(_CHARSMAP, b"")))
        if not pieces:
            raise ValueError("it is not a SentencePiece model: it has no pieces")
        values = {
            name: _converted(trainer.get(number, default), type(default))
            for name, (number, default) in _OF_TRAINER.items()
        }
        return cls(tuple(pieces), charsmap, **values)


def _piece(content: Any) -> VocabularyPiece:
    fields = dict(_fields(content))
    score = fields.get(2, b"\0\0\0\0")
    if not isinstance(score, memoryview | bytes) or len(score) != 4:
        raise ValueError("it is not a SentencePiece model: a score is not a float")
    text = _converted(fields.get(1, ""), str)
    return VocabularyPiece(
        text, struct.unpack("<f", score)[0], _converted(fields.get(3, NORMAL), int)
    )


def _message(value: Any) -> Any:
    """The bytes of a field that must have some."""
    if isinstance(value, int):
        raise ValueError("it is not a SentencePiece model: a message is a number")
    return value


def _converted(value: Any, kind: type) -> Any:
    """A field's value as `kind`; numbers of 64 bits may be negative."""
    if kind is str:
        return value if isinstance(value, str) else bytes(_message(value)).decode("utf-8")
    if not isinstance(value, int):
        raise ValueError("it is not a SentencePiece model: a number is a message")
    return kind(value - 2**64 if value >= 2**63 else value)


def _fields(content: Any) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field: an int for a varint, else its bytes."""
    offset, size = 0, len(content)
    while offset < size:
        key, offset = _varint(content, offset)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, offset = _varint(content, offset)
            yield number, value
            continue
        if kind == _BYTES:
            length, offset = _varint(content, offset)
        elif kind in _SIZES:
            length = _SIZES[kind]
        else:
            raise ValueError(f"it is not a SentencePiece model: a field of wire type {kind}")
        if length > size - offset:
            raise ValueError(f"it is truncated: a field has {length} bytes, {size - offset} remain")
        yield number, content[offset : offset + length]
        offset += length


def _varint(content: Any, offset: int) -> tuple[int, int]:
    """The number at `offset`, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(content):
            raise ValueError("it is truncated: a number is not complete")
        byte = content[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError("it is not a SentencePiece model: a number has more than 64 bits")
