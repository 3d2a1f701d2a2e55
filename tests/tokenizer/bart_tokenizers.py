"""Small tokenizers of BART and its kin as transformers has them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, ByteLevelBPETokenizer
from transformers import (
    BartTokenizer,
    M2M100Tokenizer,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PegasusTokenizer,
)
from transformers.convert_slow_tokenizer import MBartConverter, PegasusConverter
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from launcher_scripts.common.tokenizer.base import FAIRSEQ_TOKENS

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Der schnelle braune Fuchs springt über den faulen Hund; die Straße ist lang.",
    "Le renard brun et rapide saute par-dessus le chien paresseux, déjà endormi.",
    "A server answers many requests at once: 12 tokens, 345 tokens, 6789 tokens.",
]
TEXTS = ["The quick fox", "Über die Straße, 345 Hunde!", " a  b", "déjà <s> vu"]


def bart() -> BartTokenizer:
    """Byte pairs, with fairseq's special tokens first and the mask, which eats blanks, last."""
    trainer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer.train_from_iterator(LINES, vocab_size=340, min_frequency=1, special_tokens=special)
    merges = [tuple(pair) for pair in json.loads(trainer.to_str())["model"]["merges"]]
    vocab = {**trainer.get_vocab(), "<mask>": trainer.get_vocab_size()}
    mask = AddedToken("<mask>", lstrip=True)
    return BartTokenizer(vocab=vocab, merges=merges, mask_token=mask)


def pieces(**ids: int) -> bytes:
    """A SentencePiece model, whose first pieces are <unk>, <s> and </s>, or as `ids` say."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=90,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **ids,
    )
    return model.getvalue()


def mbart(model: bytes, **changes: Any) -> MBartTokenizer:
    vocab = MBartConverter.convert_from_spm(scores(model))["vocab"]
    return MBartTokenizer(vocab=vocab, **changes)


def mbart50(model: bytes, **changes: Any) -> MBart50Tokenizer:
    return MBart50Tokenizer(vocab=scores(model), **changes)


def m2m_100(folder: Path, model: bytes, **changes: Any) -> M2M100Tokenizer:
    """changes: of the tokenizer, as in the functions below; its files are written to `folder`"""
    codes = FAIRSEQ_LANGUAGE_CODES[changes.get("language_codes", "m2m100")]
    changes["additional_special_tokens"] = [f"__{code}__" for code in codes]
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    names = [*FAIRSEQ_TOKENS, *(piece for piece, _ in scores(model)[3:])]
    return _numbered(M2M100Tokenizer, folder, names, "sentencepiece.bpe.model", **changes)


def marian(folder: Path, model: bytes, **changes: Any) -> MarianTokenizer:
    """A vocabulary that lacks a piece, and has a language and a word of the translation."""
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(model)
    known = [piece for piece, _ in scores(model)[3:-1]]
    names = ["</s>", "<unk>", *known, ">>fra<<", "▁bonjour", "<pad>"]
    return _numbered(MarianTokenizer, folder, names, "source.spm", "target.spm", **changes)


def _numbered(kind: Any, folder: Path, names: list[str], *models: str, **changes: Any) -> Any:
    vocabulary = {name: number for number, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    paths = [str(folder / name) for name in models]
    vocab = str(folder / "vocab.json")
    order = [vocab, *paths] if kind is M2M100Tokenizer else [*paths, vocab]
    return kind(*order, **changes)


def pegasus() -> tuple[PegasusTokenizer, bytes]:
    """The tokenizer, and the SentencePiece model that the hub has of it."""
    model = pieces(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    vocab = PegasusConverter.convert_from_spm(scores(model))["vocab"]
    return PegasusTokenizer(vocab=vocab), model


def nllb(**changes: Any) -> NllbTokenizer:
    """Each character is a token."""
    characters = sorted({*"".join(LINES), "▁"} - {" "})
    names = [*FAIRSEQ_TOKENS, *characters]
    vocab = {name: number for number, name in enumerate(names)}
    return NllbTokenizer(vocab=vocab, merges=[], **changes)


def scores(model: bytes) -> list[tuple[str, float]]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    numbers = range(processor.vocab_size())
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in numbers]


def save_pieces(folder: Path, model: bytes, tokenizer: Any) -> None:
    """What the hub has of an mBART: the SentencePiece model instead of a tokenizer.json."""
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "sentencepiece.bpe.model").write_bytes(model)
