"""Tokenizer classes of transformers, and how they split a text, as rows of a table.

A class says what its files leave open: how text is normalized and cut into words, which tokens are
special by default, and what stands around a text. Since transformers 5 this is so beside a
tokenizer.json as well: that file then gives vocabulary, merges and the tokens around a text. The
rows are those of transformers 5.23 (src/transformers/models/*/tokenization_*.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher_scripts.checkpoint.tokenizers.vocabularies import PRE_TOKENIZERS
from launcher_scripts.common.tokenizer.base import FAIRSEQ_TOKENS, MASK, languages_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BACKEND = "TokenizersBackend"
SPACE = "▁"
# The slow forms of tokenizers. fairseq's pieces have other ids than the model's.
MODEL_FILE = "tokenizer.model"
FAIRSEQ_FILE = "sentencepiece.bpe.model"
PAIR_FILES = ("vocab.json", "merges.txt")
_END_OF_TEXT = "<|endoftext|>"
_FAIRSEQ = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


@dataclass(frozen=True)
class Vocabulary:
    """The contents of a tokenizer's files.

    tokens:   token -> id, of byte pairs
    scores:   the tokens and scores of a unigram model, in the order of their ids
    merges:   the pairs that are merged, first ones first
    charsmap: SentencePiece's compiled normalization
    """

    tokens: dict[str, int] = field(default_factory=dict)
    scores: list[tuple[str, float]] = field(default_factory=list)
    merges: Sequence[tuple[str, str]] = ()
    charsmap: bytes = b""


# (vocabulary, options of tokenizer_config.json, role -> special token) -> the tokenizer, without
# added tokens
Build = Callable[[Vocabulary, Mapping[str, Any], Mapping[str, str]], "Tokenizer"]
# (a SentencePiece model's pieces and scores, options) -> those of the vocabulary
Pieces = Callable[[list[tuple[str, float]], Mapping[str, Any]], list[tuple[str, float]]]


@dataclass(frozen=True)
class TokenizerClass:
    """A row of CLASSES.

    build:   makes the tokenizer
    unigram: it has scores instead of merges
    roles:   role -> the token that has it by default
    extra:   further special tokens, by the options of tokenizer_config.json
    pieces:  a SentencePiece model's pieces -> the vocabulary, in the order of the ids
    surround: the tokens around a text ("$A" in it), by the roles; (): what add_bos_token and
             add_eos_token say; None: what tokenizer.json says, else these two
    slow:    the files of its slow form, as an export names them: a SentencePiece model, or
             vocabulary and merges; (): that form is not read
    mask_strips: the mask that it has by default takes the space before it
    """

    build: Build
    unigram: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    extra: Callable[[Mapping[str, Any]], list[str]] = lambda _: []
    pieces: Pieces = lambda pieces, _: pieces
    surround: Sequence[str] | None = None
    slow: tuple[str, ...] = (MODEL_FILE,)
    mask_strips: bool = False


def _byte_level(name: str, *, splits: bool = False, composed: bool = False) -> Build:
    """Byte pairs of GPT-2 and what came after it.

    name:     a row of PRE_TOKENIZERS, for the expressions
    splits:   they are not GPT-2's, which ByteLevel has built in
    composed: the text is normalized first (NFC)
    """

    def build(vocabulary: Vocabulary, options: Mapping[str, Any], _: Mapping[str, str]) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
        from tokenizers.models import BPE

        tokenizer = Tokenizer(BPE(vocabulary.tokens, list(vocabulary.merges)))
        if composed:
            tokenizer.normalizer = normalizers.NFC()
        prefixed = bool(options.get("add_prefix_space"))
        expressions = [*PRE_TOKENIZERS[name].splits]
        if not splits:
            expressions.pop()
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=not splits))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    return build


def _llama(*, legacy: bool = True) -> Build:
    """Byte pairs of SentencePiece with pieces of bytes, spaces becoming visible.

    legacy: the option of that name counts: every text between special tokens starts with a space
    """

    def build(vocabulary: Vocabulary, options: Mapping[str, Any], roles: Mapping[str, str]) -> Any:
        from tokenizers import Tokenizer, pre_tokenizers
        from tokenizers.models import BPE

        unknown = None if legacy else roles["unk_token"]
        model = BPE(
            vocabulary.tokens,
            list(vocabulary.merges),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        prefixed = options.get("add_prefix_space") is not False
        always = legacy and bool(options.get("legacy"))
        scheme = ("always" if always else "first") if prefixed else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
        tokenizer.decoder = _visible_spaces(strip=prefixed or not legacy)
        return tokenizer

    return build


def _gemma(vocabulary: Vocabulary, _: Mapping[str, Any], roles: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    model = BPE(
        vocabulary.tokens,
        list(vocabulary.merges),
        unk_token=roles["unk_token"],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = _visible_spaces(strip=False)
    return tokenizer


def _nllb(vocabulary: Vocabulary, _: Mapping[str, Any], roles: Mapping[str, str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    merges = list(vocabulary.merges)
    model = BPE(vocabulary.tokens, merges, unk_token=roles["unk_token"], fuse_unk=True)
    tokenizer = Tokenizer(model)
    if vocabulary.charsmap:
        tokenizer.normalizer = normalizers.Sequence(
            [
                normalizers.Precompiled(vocabulary.charsmap),
                normalizers.Replace(Regex(" {2,}"), " "),
            ]
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always")
    tokenizer.decoder = decoders.Metaspace(SPACE, "always")
    return tokenizer


def _visible_spaces(*, strip: bool) -> Any:
    """The decoder of pieces that may be bytes; strip: without the space that every text got."""
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def _unigram(
    *,
    unknown: int | None = 3,
    words: bool = False,
    charsmap: bool = True,
    spaces: bool = True,
    lines: bool = False,
) -> Build:
    """SentencePiece's unigram models.

    unknown:  the id of the unknown token; None: by its role
    words:    the text is cut at white space, which is dropped; else only spaces count
    charsmap: the compiled normalization counts
    spaces:   several are one
    lines:    without a compiled normalization, a line break is a space
    """

    def build(vocabulary: Vocabulary, options: Mapping[str, Any], roles: Mapping[str, str]) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
        from tokenizers.models import Unigram

        tokens = [token for token, _ in vocabulary.scores]
        unk_id = tokens.index(roles["unk_token"]) if unknown is None else unknown
        tokenizer = Tokenizer(Unigram(vocabulary.scores, unk_id))
        steps: list[Any] = []
        if charsmap and vocabulary.charsmap:
            steps.append(normalizers.Precompiled(vocabulary.charsmap))
        elif lines:
            steps.append(normalizers.Replace(Regex(r"\n"), " "))
        if spaces:
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if steps:
            tokenizer.normalizer = normalizers.Sequence(steps)
        scheme = "never" if options.get("add_prefix_space") is False and not words else "always"
        visible = pre_tokenizers.Metaspace(SPACE, scheme)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), visible])
            if words
            else visible
        )
        tokenizer.decoder = decoders.Metaspace(SPACE, scheme)
        return tokenizer

    return build


def _sentinels(options: Mapping[str, Any]) -> list[str]:
    """T5's, whose last one follows the pieces."""
    number = options.get("extra_ids", 100)
    return [f"<extra_id_{index}>" for index in range(number)]


def _t5_pieces(
    pieces: list[tuple[str, float]], options: Mapping[str, Any]
) -> list[tuple[str, float]]:
    return [*pieces, *((token, 0.0) for token in reversed(_sentinels(options)))]


def _unused(options: Mapping[str, Any]) -> list[str]:
    """The tokens that only Pegasus' training knew."""
    return ["<mask_1>", *(f"<unk_{index}>" for index in range(2, options.get("offset", 103)))]


def _pegasus_pieces(
    pieces: list[tuple[str, float]], options: Mapping[str, Any]
) -> list[tuple[str, float]]:
    first = [("<pad>", 0.0), ("</s>", 0.0), ("<mask_1>", 0.0), ("<mask_2>", 0.0)]
    unused = [(token, -100.0) for token in _unused(options)[1:]]
    return [*first, *unused, *pieces[2:]]


def _fairseq_pieces(*after: str) -> Pieces:
    """Numbered as fairseq does: the special tokens, the pieces from the fourth on, then `after`."""

    def pieces(model: list[tuple[str, float]], _: Mapping[str, Any]) -> list[tuple[str, float]]:
        first = [(token, 0.0) for token in FAIRSEQ_TOKENS]
        return [*first, *model[3:], *((token, 0.0) for token in after)]

    return pieces


def _translator(name: str, build: Build) -> TokenizerClass:
    """An mBART's, whose languages and mask follow the pieces; name: a key of TRANSLATORS"""
    languages = languages_of(name)
    roles = {**_FAIRSEQ, "mask_token": MASK}
    if name == "MBart50":
        del roles["bos_token"]
    return TokenizerClass(
        build,
        unigram=True,
        roles=roles,
        mask_strips=True,
        extra=lambda _: [*languages],
        pieces=_fairseq_pieces(*languages, MASK),
        slow=(FAIRSEQ_FILE,),
    )


_GPT2_ROLES = {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT}
_GPT2 = TokenizerClass(_byte_level("gpt-2"), roles=_GPT2_ROLES, slow=PAIR_FILES)
_ROBERTA = TokenizerClass(
    _byte_level("gpt-2"),
    roles={**_FAIRSEQ, "mask_token": "<mask>"},
    surround=("cls_token", "$A", "sep_token"),
    slow=PAIR_FILES,
)
_LLAMA_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_LLAMA_INFILLING = ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>", "<FILL_ME>")

CLASSES: dict[str, TokenizerClass] = {
    "BartTokenizer": _ROBERTA,
    "CodeGenTokenizer": _GPT2,
    "CodeLlamaTokenizer": TokenizerClass(
        _llama(legacy=False),
        roles=_LLAMA_ROLES,
        extra=lambda _: [*_LLAMA_INFILLING],
        surround=("bos_token", "$A"),
    ),
    "CohereTokenizer": TokenizerClass(
        _byte_level("command-r", composed=True),
        roles={
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "unk_token": "<UNK>",
            "sep_token": "<SEP>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "mask_token": "<MASK_TOKEN>",
        },
        slow=PAIR_FILES,
    ),
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": TokenizerClass(
        _byte_level("gpt-2", composed=True),
        roles={**_GPT2_ROLES, "pad_token": "<|padding|>"},
        surround=(),
        slow=PAIR_FILES,
    ),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        roles={
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "LlamaTokenizer": TokenizerClass(_llama(), roles=_LLAMA_ROLES),
    "MBart50Tokenizer": _translator("MBart50", _unigram()),
    "MBartTokenizer": _translator("MBart", _unigram(words=True, charsmap=False, spaces=False)),
    "NllbTokenizer": TokenizerClass(
        _nllb, roles={**_FAIRSEQ, "mask_token": MASK}, mask_strips=True, slow=()
    ),
    "PegasusTokenizer": TokenizerClass(
        _unigram(unknown=None, lines=True),
        unigram=True,
        roles={
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask_2>",
        },
        extra=_unused,
        pieces=_pegasus_pieces,
        surround=("$A", "eos_token"),
    ),
    "Qwen2Tokenizer": TokenizerClass(
        _byte_level("qwen2", splits=True, composed=True),
        roles={"eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT},
        slow=PAIR_FILES,
    ),
    "RobertaTokenizer": _ROBERTA,
    "T5Tokenizer": TokenizerClass(
        _unigram(unknown=2, words=True, spaces=False),
        unigram=True,
        roles={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        extra=_sentinels,
        pieces=_t5_pieces,
        surround=("$A", "eos_token"),
    ),
    "XGLMTokenizer": TokenizerClass(
        _unigram(),
        unigram=True,
        roles=_FAIRSEQ,
        extra=lambda _: [f"<madeupword{index}>" for index in range(7)],
        surround=("eos_token", "$A"),
        slow=(),
    ),
}
# Model types of transformers -> the class of their tokenizers where their files name none.
REGISTERED: dict[str, str] = {
    "bart": "RobertaTokenizer",
    "codegen": "GPT2Tokenizer",
    "cohere": "CohereTokenizer",
    "cohere2": "CohereTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neo": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "gptj": "GPT2Tokenizer",
    "internvl": "Qwen2Tokenizer",
    "m2m_100": "M2M100Tokenizer",
    "marian": "MarianTokenizer",
    "mbart": "MBartTokenizer",
    "jais2": "GPT2Tokenizer",
    "mpt": "GPTNeoXTokenizer",
    "mt5": "T5Tokenizer",
    "olmo": "GPTNeoXTokenizer",
    "olmoe": "GPTNeoXTokenizer",
    "opt": "GPT2Tokenizer",
    "pegasus": "PegasusTokenizer",
    "phi": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "longt5": "T5Tokenizer",
    "nllb-moe": "NllbTokenizer",
    "qwen2_5_vl": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen2_vl": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "qwen3_next": "Qwen2Tokenizer",
    "qwen3_vl": "Qwen2Tokenizer",
    "starcoder2": "GPT2Tokenizer",
    "switch_transformers": "T5Tokenizer",
    "t5": "T5Tokenizer",
    "t5gemma": "GemmaTokenizer",
    "t5gemma2": "GemmaTokenizer",
    "xglm": "XGLMTokenizer",
    **dict.fromkeys(
        (
            *("ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "gpt_bigcode", "granite"),
            *("granitemoe", "granitemoeshared", "internlm3", "iquestcoder", "minimax_m2"),
            *("ministral", "ministral3", "mistral", "mistral3", "mixtral", "nemotron", "olmo2"),
            *("olmo3", "phi3", "stablelm", "umt5", "granitemoehybrid", "qwen3_5"),
            *("qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "flex_olmo"),
            *("mimo_v2_flash", "phimoe"),
        ),
        BACKEND,
    ),
}
# Model types whose class counts whatever class their files name.
OVERRULING = ("qwen2",)
# Model types whose files name LlamaTokenizer beside byte-level vocabularies, and mean it.
_MISTRAL = ("ministral", "ministral3", "mistral", "mistral3", "mixtral")
_INCORRECT = (
    *("ernie4_5", "ernie4_5_moe", "internlm3", "iquestcoder", "minimax_m2", "nemotron", "phi3"),
    *("phimoe", "qwen2"),
)


def tokenizer_class_name(model_type: str | None, named: str | None, *, byte_level: bool) -> str:
    """The class by which transformers reads a tokenizer: a key of CLASSES, BACKEND, or unknown.

    named:      what the files name; None: nothing
    byte_level: tokenizer.json is one of bytes
    """
    registered = REGISTERED.get(model_type or "")
    name = None if named is None else named.removesuffix("Fast")
    if name in ("PreTrainedTokenizer", "BloomTokenizer"):
        name = BACKEND
    if name is None:
        return registered or BACKEND
    if name == "LlamaTokenizer" and byte_level and model_type not in (*_MISTRAL, *_INCORRECT):
        return BACKEND
    if registered is None or registered == name:
        return name
    if registered == BACKEND:
        return BACKEND
    return registered if model_type in OVERRULING else name
