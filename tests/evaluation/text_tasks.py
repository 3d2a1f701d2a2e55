"""What the tests of text tasks share: a tokenizer of words and models with prepared answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher_scripts.common.tokenizer import SpecialIds
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.tasks.task import EvaluatedModel


class Words:
    """A tokenizer that numbers words as it meets them."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        for word in text.split(" "):
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split(" ")]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[index] for index in ids)


class Prepared:
    """Answers the n-th row with the n-th text, whatever was asked; `rows` is what was."""

    def __init__(self, tokenizer: Words, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.rows: list[GenerateRequest] = []
        self.in_flight = 0

    def generate_rows(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        self.in_flight = in_flight
        self.rows = list(rows)
        for text, _ in zip(self.texts, self.rows, strict=True):
            yield GenerateOutput(tuple(self.tokenizer.encode(text)))

    @property
    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(row.input_ids) for row in self.rows]


def asked(texts: Sequence[str], folder: Path, closing: tuple[int, ...] = ()) -> EvaluatedModel:
    """A model that gives these texts one after another."""
    tokenizer = Words()
    return EvaluatedModel(
        Prepared(tokenizer, texts), tokenizer, folder, SpecialIds(closing=closing)
    )


def write_letters(folder: Path, letters: str) -> None:
    """A tokenizer.json of one token a letter, which takes no notice of blanks."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": ""},
        "model": {
            "type": "BPE",
            "vocab": {letter: index for index, letter in enumerate(letters)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def no_progress(done: int, total: int) -> None:
    assert 0 < done <= total
