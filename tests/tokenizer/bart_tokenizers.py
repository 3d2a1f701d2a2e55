"""Small tokenizers of BART, mBART and mBART-50 as transformers has them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, ByteLevelBPETokenizer
from transformers import BartTokenizer, MBart50Tokenizer, MBartTokenizer
from transformers.convert_slow_tokenizer import MBartConverter

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


def pieces() -> bytes:
    """A SentencePiece model, whose first pieces are <unk>, <s> and </s>."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=90,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def mbart(model: bytes, **changes: Any) -> MBartTokenizer:
    vocab = MBartConverter.convert_from_spm(scores(model))["vocab"]
    return MBartTokenizer(vocab=vocab, **changes)


def mbart50(model: bytes, **changes: Any) -> MBart50Tokenizer:
    return MBart50Tokenizer(vocab=scores(model), **changes)


def scores(model: bytes) -> list[tuple[str, float]]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    numbers = range(processor.vocab_size())
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in numbers]


def save_pieces(folder: Path, model: bytes, tokenizer: Any) -> None:
    """What the hub has of an mBART: the SentencePiece model instead of a tokenizer.json."""
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "sentencepiece.bpe.model").write_bytes(model)
