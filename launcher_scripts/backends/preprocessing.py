"""Text to the inputs of a FasterTransformer model, as a model of Triton's Python backend.

Runs in the server, as model.py, from a repository folder that also holds the package tokenizer,
text_*.py and the tokenizer's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from text_tensors import (
    BadRequestError,
    Tensors,
    answer_each,
    pad_right,
    require_working_arrays,
    to_word_lists,
)
from tokenizer import SpecialIds, load_tokenizer


class TritonPythonModel:
    """QUERY, words as comma separated text -> padded ids, their lengths, word lists.

    The parameters opening_id and closing_id, where there are such, are tokens around every query.
    """

    def initialize(self, args: dict[str, str]) -> None:
        require_working_arrays()
        self.tensors = Tensors(args["model_config"])
        self.tokenizer = load_tokenizer(Path(__file__).parent)
        self.pad_id = int(self.tensors.parameters["pad_id"])
        self.special = SpecialIds.of(self.tensors.parameters)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answer_each(requests, self.answer)

    def answer(self, request: Any) -> list[Any]:
        request = self.tensors.complete(request)
        queries = self.tensors.texts(request, "QUERY")
        if queries is None:
            raise BadRequestError("QUERY is required")
        rows = [self.special.surround(self.tokenizer.encode(query)) for query in queries]
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
                "STOP_WORDS_IDS",
                self.word_list(request, "STOP_WORDS_DICT", len(rows), self.special.ends),
            ),
            self.tensors.tensor("REQUEST_OUTPUT_LEN", output_len.astype(np.uint32)),
            self.tensors.tensor("RETURN_PROGRESS", np.ones((len(rows), 1), dtype=np.bool_)),
        ]

    def word_list(
        self, request: Any, name: str, rows: int, more: Sequence[int] = ()
    ) -> NDArray[Any]:
        lines = self.tensors.texts(request, name) or [""] * rows
        if len(lines) != rows:
            raise BadRequestError(f"{name} takes one row per query; got {len(lines)} for {rows}")
        return to_word_lists(lines, self.tokenizer, more)
