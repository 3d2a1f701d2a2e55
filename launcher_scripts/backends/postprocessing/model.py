"""The outputs of a FasterTransformer model to text, as a model of Triton's Python backend.

Runs in the server from a repository folder that also holds tokenizer.py, text_tensors.py and the
tokenizer's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from text_tensors import BadRequestError, answer_each, array, require_working_arrays, tensor
from tokenizer import load_tokenizer


class TritonPythonModel:
    """TOKENS_BATCH [B, beam, time] -> OUTPUT [B, beam, 1], one text per beam."""

    def initialize(self, args: dict[str, str]) -> None:  # noqa: ARG002 - the backend passes it
        require_working_arrays()
        self.tokenizer = load_tokenizer(Path(__file__).parent)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answer_each(requests, self.answer)

    def answer(self, request: Any) -> list[Any]:
        tokens = array(request, "TOKENS_BATCH")  # [B, beam, time]
        if tokens is None or tokens.ndim != 3:
            shape = None if tokens is None else tokens.shape
            raise BadRequestError(f"TOKENS_BATCH must have shape [batch, beam, time]; got {shape}")
        lengths = array(request, "sequence_length")  # [B, beam]
        if lengths is None:
            lengths = np.full(tokens.shape[:2], tokens.shape[2])
        if lengths.shape != tokens.shape[:2]:
            raise BadRequestError(
                f"sequence_length must have shape {tokens.shape[:2]} for these tokens; "
                f"got {lengths.shape}"
            )
        outputs = np.empty((*tokens.shape[:2], 1), dtype=np.object_)
        for row in np.ndindex(lengths.shape):
            ids = tokens[row][: int(lengths[row])].tolist()
            outputs[row][0] = self.tokenizer.decode(ids).encode("utf-8")
        return [tensor("OUTPUT", outputs)]
