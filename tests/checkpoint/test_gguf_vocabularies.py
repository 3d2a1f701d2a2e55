"""GGUF's tokenizers token by token: published test vectors, transformers, and SentencePiece."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer
from transformers.utils import sentencepiece_model_pb2_new

from launcher_scripts.checkpoint.sources.gguf_tokenizer import build_tokenizer
from launcher_scripts.checkpoint.tokenizers.vocabularies import PRE_TOKENIZERS

FILE = Path(__file__).parents[1] / "data" / "gguf" / "vocabularies.json"
VOCABULARIES: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
TEXTS = [
    "",
    " ",
    "   three   spaces ",
    "tabs\t\tand\r\nlines\n\n\nend\n",
    "I'm, you'RE, we'Ve, it'\u017f",
    "12 345 6789 0.5 1,000 ½ ² ٣٤",
    "naïve cafe\u0301 Ångström",
    "日本語のテキスト 中文 한국어",
    "Здравствуй, мир! שלום नमस्ते",
    "🙂👩‍👩‍👧‍👦🇩🇪 ok",
    "snake_case camelCase HTTPServer x=y+1;",
    "a\u00a0b\u2003c\u200bd",
    "\x00\x7f\ufffd",
]
TRANSFORMERS = {
    "gpt-2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
}


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", sorted(VOCABULARIES))
def test_published_vectors(name: str) -> None:
    vocabulary = VOCABULARIES[name]
    tokenizer = build_tokenizer(vocabulary["metadata"])
    found = [
        [vocabulary["ids"][token] for token in ids(tokenizer, text)] for text in vocabulary["texts"]
    ]
    assert found == vocabulary["expected"]


# Name of a cut -> words, joined by |, of texts that tell it from the others.
WORDS = {
    "afmoe": ["1|234|567|漢字かな|ABC", " |한국어| |ไทย", "=y|/\n"],
    "bailingmoe": ["It|'S| |1|2", "a|=y|/\n", "a|;'|x"],
    "chameleon": ["IMGIMGAIZ|a|  |b|'|s|\n|\n"],
    "cohere2moe": ["1|234|567| It's|camel|Case|/\n"],
    "deepseek-llm": ["a| B|1234|漢字|ABC| é|;|\n|\n| x", " |ბ|a", "a|  "],
    "exaone-moe": ["漢字 é abc|1|2|;\n|\n|a"],
    "glm4": ["It|'S| |123|4|;\n\n| x"],
    "gpt3-finnish": ["It's| 1234|,| x=y/"],
    "grok-2": ["It|'S| |1|2|;\n\n| x"],
    "hunyuan-dense": ["123|4|漢字かな|ABC|.com|=|12"],
    "jais-2": ["a|" + " " * 8 + "|  | z", "It|'S| |123|4"],
    "kimi-k2": ["漢字|かなABCdef| camel|Case| it's|123|4|;\n|/\n"],
    "laguna": ["It|'S| |1|/|\n\n|a"],
    "llama4": ["It's| |123|4|camel|Case|/\n"],
    "minicpm5": ["It|'S| |123|4|;\n\n| x"],
    "seed-coder": ["It|'S| |1|2|;|\n\n| x"],
    "spark2_5": ["1|2|3|4|漢字|ABC|;|\n|\n| x"],
    "stablelm2": ["It|'S| |1|2|;\n\n| x"],
    "superbpe": ["a b |12|345|678| c, d"],
    "tiny_aya": ["1|234|567| It's|camel|Case|/\n"],
    "trillion": ["It|'s| 1234|;|\n|\n|x"],
    "ufakzeka": ["Ankara|'da|'ya| |1|2"],
    "viking": ["It's| |1|2|,| x=y/"],
    "youtu": ["한국어|\uff0c\u3002|漢字かな|It's| |1|2|camel|Case"],
}


@pytest.mark.parametrize("name", sorted(WORDS))
def test_cuts_into_words(name: str) -> None:
    """The expressions stand in llama.cpp's list of pre-tokenizers, too (src/llama-vocab.cpp)."""
    tokenizer = build_tokenizer(
        {"model": "gpt2", "pre": name, "tokens": [], "merges": [], "token_type": []}
    )
    cut = tokenizer.pre_tokenizer
    assert cut is not None and PRE_TOKENIZERS[name].normalized is False
    for joined in WORDS[name]:
        text = joined.replace("|", "")
        words = [text[start:end] for _, (start, end) in cut.pre_tokenize_str(text)]
        assert words == joined.split("|")


@pytest.mark.parametrize("name", sorted(TRANSFORMERS))
def test_as_transformers_does(name: str) -> None:
    metadata = VOCABULARIES[name]["metadata"]
    tokenizer = build_tokenizer(metadata)
    own = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in own["merges"]]
    kind = getattr(transformers, TRANSFORMERS[name])
    end = metadata["tokens"][0]
    theirs = kind(vocab=own["vocab"], merges=merges, unk_token=end, bos_token=end, eos_token=end)
    for text in TEXTS:
        assert ids(tokenizer, text) == theirs.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids(tokenizer, text)) == theirs.decode(
            theirs.encode(text, add_special_tokens=False)
        )


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    lines = Path(__file__).parents[2] / "launcher_scripts/evaluation/data/lambada_first200.jsonl"
    return [json.loads(line)["text"] for line in lines.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("prefixed", "spaces"), [(True, ""), (False, "▁▁▁"), (False, "   ")])
def test_as_sentencepiece_does(corpus: list[str], prefixed: bool, spaces: str) -> None:
    """spaces: how the file writes the piece that Gemma has for three of them"""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefixed,
        user_defined_symbols=["<tool>", *(["▁▁▁"] if spaces else [])],
        minloglevel=2,
    )
    theirs = SentencePieceProcessor(model_proto=model.getvalue())
    metadata = metadata_of(theirs) | {"add_space_prefix": prefixed}
    metadata["tokens"] = [spaces if token == "▁▁▁" else token for token in metadata["tokens"]]
    tokenizer = build_tokenizer(metadata)
    for text in [*TEXTS, *corpus[:40]]:
        assert ids(tokenizer, text) == theirs.encode(text), text
        assert tokenizer.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert ids(tokenizer, "a<tool>").count(theirs.piece_to_id("<tool>")) == 1
    if prefixed:
        return
    # Gemma 4 has merges instead of scores, and cuts at new lines first.
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    merged = build_tokenizer({**metadata, "model": "gemma4", "merges": merges, "scores": None})
    for text in [*TEXTS, *corpus[:40]]:
        parts = re.findall(r"[^\n]+|\n+", text)
        assert ids(merged, text) == [each for part in parts for each in theirs.encode(part)], text
        assert merged.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))


@pytest.mark.parametrize("bytewise", [True, False])
@pytest.mark.parametrize(
    ("rule", "trimmed", "prefixed"),
    [("nmt_nfkc", True, True), ("identity", True, False), ("nfkc", False, True)],
)
def test_a_unigram_model_is_as_sentencepieces(
    corpus: list[str], rule: str, trimmed: bool, prefixed: bool, bytewise: bool
) -> None:
    """bytewise: whether what is unknown becomes its bytes"""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="unigram",
        vocab_size=900,
        byte_fallback=bytewise,
        normalization_rule_name=rule,
        remove_extra_whitespaces=trimmed,
        add_dummy_prefix=prefixed,
        user_defined_symbols=["<tool>"],
        bos_id=-1,
        minloglevel=2,
    )
    theirs = SentencePieceProcessor(model_proto=model.getvalue())
    proto = sentencepiece_model_pb2_new.ModelProto.FromString(model.getvalue())
    metadata = metadata_of(theirs) | {
        "model": "t5",
        "add_space_prefix": prefixed,
        "remove_extra_whitespaces": trimmed,
        "precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap),
    }
    del metadata["bos_token_id"]
    tokenizer = build_tokenizer(metadata)
    for text in [*TEXTS, *corpus]:
        expected = theirs.encode(text)
        assert ids(tokenizer, text) == expected, text
        if theirs.unk_id() not in expected:
            assert tokenizer.decode(expected) == theirs.decode(expected)
    assert ids(tokenizer, "a<tool>").count(theirs.piece_to_id("<tool>")) == 1
    assert tokenizer.encode("a").ids[-1] == theirs.eos_id()


def metadata_of(processor: SentencePieceProcessor) -> dict[str, Any]:
    """The vocabulary as llama.cpp's converter puts it into a file."""
    kinds = {
        2: processor.is_unknown,
        3: processor.is_control,
        5: processor.is_unused,
        6: processor.is_byte,
    }
    size = range(processor.vocab_size())
    user = ("<tool>", "▁▁▁")
    return {
        "model": "llama",
        "tokens": [processor.id_to_piece(token) for token in size],
        "scores": [processor.get_score(token) for token in size],
        "token_type": [
            4
            if processor.id_to_piece(token) in user
            else next((kind for kind, test in kinds.items() if test(token)), 1)
            for token in size
        ],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    }
