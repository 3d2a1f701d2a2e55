"""A request of the load test as the token model's tensors, and what its answers count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher_scripts.clients.connection import Tensors
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.evaluation.load.plan import LoadRequest
from launcher_scripts.evaluation.tensors import request_tensors

# An id that no vocabulary has, so that no token ends an answer.
NO_END_ID = (1 << 31) - 1
OUTPUTS = ("sequence_length",)


@dataclass(frozen=True)
class TokenRequest:
    """How one served model is asked. model_type: as its config.pbtxt says it."""

    model_name: str
    model_type: str

    def tensors(self, request: LoadRequest) -> Tensors:
        row = GenerateRequest(request.prompt_ids, request.output_len, end_id=NO_END_ID)
        return request_tensors([row], self.model_type)

    def generated(self, answer: Mapping[str, Any], request: LoadRequest) -> int:
        """The tokens generated so far, of an answer with `sequence_length`."""
        total = int(np.ravel(answer["sequence_length"])[0])
        prompt = CONTRACTS[self.model_type].returns_prompts
        return total - len(request.prompt_ids) if prompt else total
