"""Text to the inputs of a FasterTransformer model, as a model of Triton's Python backend.

Runs in the server from a repository folder that also holds tokenizer.py, text_tensors.py and the
tokenizer's files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from text_tensors import BadRequestError, Tensors, answer_each, require_working_arrays
from tokenizer import Tokenizer, load_tokenizer

# CSV ends its rows at these, which no word should; no text that was UTF-8 has the others.
HIDDEN = {ord("\n"): 0xD800, ord("\r"): 0xD801}
SHOWN = {hidden: shown for shown, hidden in HIDDEN.items()}


class TritonPythonModel:
    """QUERY, words as comma separated text -> padded ids, their lengths, word lists.

    The parameter closing_id, where there is one, is a token that ends every query.
    """

    def initialize(self, args: dict[str, str]) -> None:
        require_working_arrays()
        self.tensors = Tensors(args["model_config"])
        self.tokenizer = load_tokenizer(Path(__file__).parent)
        parameters = json.loads(args["model_config"])["parameters"]
        self.pad_id = int(parameters["pad_id"]["string_value"])
        self.closing = [
            int(parameters[name]["string_value"]) for name in ("closing_id",) if name in parameters
        ]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answer_each(requests, self.answer)

    def answer(self, request: Any) -> list[Any]:
        queries = self.tensors.texts(request, "QUERY")
        if queries is None:
            raise BadRequestError("QUERY is required")
        rows = [[*self.tokenizer.encode(query), *self.closing] for query in queries]
        lengths = np.array([[len(row)] for row in rows], dtype=np.uint32)
        encoded = [
            self.tensors.tensor("INPUT_ID", pad_right(rows, self.pad_id)),
            self.tensors.tensor("REQUEST_INPUT_LEN", lengths),
        ]
        output_len = self.tensors.array(request, "REQUEST_OUTPUT_LEN")
        if output_len is None:  # nothing is to be generated
            return encoded
        return [
            *encoded,
            self.tensors.tensor(
                "BAD_WORDS_IDS", self.word_list(request, "BAD_WORDS_DICT", len(rows))
            ),
            self.tensors.tensor(
                "STOP_WORDS_IDS", self.word_list(request, "STOP_WORDS_DICT", len(rows))
            ),
            self.tensors.tensor("REQUEST_OUTPUT_LEN", output_len.astype(np.uint32)),
            self.tensors.tensor("RETURN_PROGRESS", np.ones((len(rows), 1), dtype=np.bool_)),
        ]

    def word_list(self, request: Any, name: str, rows: int) -> np.ndarray:
        lines = self.tensors.texts(request, name) or [""] * rows
        if len(lines) != rows:
            raise BadRequestError(f"{name} takes one row per query; got {len(lines)} for {rows}")
        return to_word_lists(lines, self.tokenizer)


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> np.ndarray:
    """UINT32 [rows, longest]; at least one column, since Triton refuses empty axes."""
    width = max(1, *(len(row) for row in rows))
    padded = np.full((len(rows), width), pad_id, dtype=np.uint32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def to_word_lists(lines: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """INT32 [rows, 2, L]: the ids of a row's words, zero-padded; their end offsets, -1-padded.

    A line holds comma separated words (CSV: a word in double quotes may hold commas). Words keep
    their leading blanks, which matter to byte-pair tokenizers; empty words are left out.
    """
    words = [
        [ids for word in split_words(line) if (ids := word_ids(word, tokenizer))] for line in lines
    ]
    width = max(1, *(sum(map(len, row)) for row in words))
    table = np.zeros((len(lines), 2, width), dtype=np.int32)
    table[:, 1] = -1
    for target, row in zip(table, words, strict=True):
        ids = [token_id for word in row for token_id in word]
        target[0, : len(ids)] = ids
        target[1, : len(row)] = np.cumsum([len(word) for word in row])
    return table


def word_ids(word: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of `word` as it is met in the middle of a text.

    SentencePiece begins any text with a blank. Where no piece holds that and what follows, it is
    a piece of its own, which a full stop or a line break did not ask for: "." would only match
    " .". It stays before what stands apart in a text, too.
    """
    ids = tokenizer.encode(word)
    rest = ids[1:]
    if not rest or stands_apart(word):
        return ids
    blank = tokenizer.decode([*rest, *ids]) != tokenizer.decode([*rest, *rest])
    return rest if blank and tokenizer.decode(rest) == tokenizer.decode(ids) else ids


def stands_apart(word: str) -> bool:
    """Whether a blank comes before it: to a word of a script that has blanks, or as given."""
    first = word[0]
    return first == " " or (first.isalnum() and not "\u2e80" <= first <= "\u9fff")


def split_words(line: str) -> list[str]:
    """The words of a CSV line; line breaks are characters of words like any other."""
    try:
        rows = list(csv.reader([line.translate(HIDDEN)]))
    except csv.Error as error:
        raise BadRequestError(f"the words are no comma separated text: {error}") from error
    return [word.translate(SHOWN) for words in rows for word in words if word]
