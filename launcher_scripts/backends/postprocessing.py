"""The outputs of a FasterTransformer model to text, as a model of Triton's Python backend.

Runs in the server, as model.py, from a repository folder that also holds the package tokenizer,
text_*.py and the tokenizer's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from text_deltas import RowText
from text_tensors import BadRequestError, Tensors, answer_each, require_working_arrays
from tokenizer import load_tokenizer


class TritonPythonModel:
    """TOKENS_BATCH [B, beam, time] -> OUTPUT and OUTPUT_DELTA [B, beam, 1], one text per beam.

    A model that streams sends its tokens again and again, each time with more: OUTPUT is then the
    text so far, OUTPUT_DELTA what it has gained.
    """

    def initialize(self, args: dict[str, str]) -> None:
        require_working_arrays()
        self.tensors = Tensors(args["model_config"])
        self.tokenizer = load_tokenizer(Path(__file__).parent)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answer_each(requests, self.answer)

    def answer(self, request: Any) -> list[Any]:
        request = self.tensors.complete(request)
        tokens = self.tensors.array(request, "TOKENS_BATCH")  # [B, beam, time]
        if tokens is None or tokens.ndim != 3:
            shape = None if tokens is None else tokens.shape
            raise BadRequestError(f"TOKENS_BATCH must have shape [batch, beam, time]; got {shape}")
        beams = tokens.shape[:2]
        lengths = self.per_beam(request, "sequence_length", beams, tokens.shape[2])
        prompts = self.per_beam(request, "RESPONSE_INPUT_LENGTHS", beams, 0)
        streamed = self.per_beam(request, "streamed_length", beams, 0)
        finished = self.per_beam(request, "is_finished", beams, True)
        starts = self.per_beam(request, "text_start", beams, prompts)
        texts, deltas = (np.empty((*beams, 1), dtype=np.object_) for _ in range(2))
        for row in np.ndindex(beams):
            ids = tokens[row][: int(lengths[row])].tolist()
            text = RowText(self.tokenizer.decode, ids, prompt=int(prompts[row]))
            ended, seen = bool(finished[row]), int(prompts[row] + streamed[row])
            text_so_far = text.text(finished=ended, with_prompt=starts[row] == 0)
            texts[row][0] = text_so_far.encode("utf-8")
            deltas[row][0] = text.delta(seen, finished=ended).encode("utf-8")
        return [self.tensors.tensor("OUTPUT", texts), self.tensors.tensor("OUTPUT_DELTA", deltas)]

    def per_beam(
        self, request: Any, name: str, beams: tuple[int, ...], default: int | bool | NDArray[Any]
    ) -> NDArray[Any]:
        """The input `name` [B, beam], or `default` where it is left out."""
        values = self.tensors.array(request, name)
        if values is None:
            return np.full(beams, default)
        if values.shape != beams:
            raise BadRequestError(
                f"{name} must have shape {beams} for these tokens; got {values.shape}"
            )
        return values
