"""Tensors of the Agm contract to rows, and answers back to tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from launcher_scripts.backends.fastertransformer import request_tensors
from launcher_scripts.backends.fastertransformer.answer_tensors import Shape, agm_tensors
from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters

WANTED = frozenset(tensor.name for tensor in CONTRACTS["Agm"].outputs)
to_requests = partial(request_tensors.to_requests, CONTRACTS["Agm"])
DTYPES = {"INT32": torch.int32, "FP32": torch.float32}


def sent(**more: object) -> dict[str, torch.Tensor]:
    values = {
        "input_ids": [[5, 6, 7, 8], [9, 3, 0, 0]],
        "sequence_length": [4, 2],
        "max_output_len": [[7], [2]],
        **more,
    }
    return {name: torch.tensor(value) for name, value in values.items()}


def test_the_prompt_counts() -> None:
    assert to_requests(sent(no_repeat_ngram_size=[2, 0])) == [
        GenerateRequest((5, 6, 7, 8), 3, SamplingParameters(no_repeat_ngram_size=2)),
        GenerateRequest((9, 3), 0),
    ]
    with pytest.raises(RequestError, match="counts the prompt's tokens, too; got 3; choices: at l"):
        to_requests(sent(max_output_len=[[3], [2]]))


def test_answers_hold_prompt_and_output() -> None:
    requests = to_requests(sent(is_return_log_probs=[True, True]))
    outputs = [GenerateOutput((1, 2), -1.0, (-0.5, -0.5)), GenerateOutput((), 0.0, ())]
    answer = agm_tensors(requests, outputs, Shape(1, 9, torch.float32, 0, WANTED))
    assert answer["output_ids"].tolist() == [[[5, 6, 7, 8, 1, 2, 9]], [[9, 3, 9, 9, 9, 9, 9]]]
    assert answer["sequence_length"].tolist() == [[6], [2]]
    assert answer["response_input_lengths"].tolist() == [[4], [2]]
    kinds = {tensor.name: tensor.dtype for tensor in CONTRACTS["Agm"].outputs}
    for name, tensor in answer.items():
        assert tensor.dtype == DTYPES[kinds[name]], name


def test_the_contract_has_no_prompts() -> None:
    names = [tensor.name for tensor in CONTRACTS["Agm"].inputs]
    assert names[:3] == ["input_ids", "sequence_length", "max_output_len"]
    assert "no_repeat_ngram_size" in names
    assert not [name for name in names if "request_" in name or "ia3" in name]
