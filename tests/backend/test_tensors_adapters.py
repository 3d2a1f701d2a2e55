"""Prompts and IA3 in a request's tensors, and virtual tokens in its answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher_scripts.backends.fastertransformer.answer_tensors import Shape, gpt_tensors
from launcher_scripts.backends.fastertransformer.request_tensors import to_requests
from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.contract.tensors import GPT_OUTPUTS

START = 100
WANTED = frozenset(tensor.name for tensor in GPT_OUTPUTS)
TABLE = torch.arange(12.0).reshape(1, 3, 4).repeat(3, 1, 1)


def gpt(**more: Any) -> list[GenerateRequest]:
    tensors = {
        "input_ids": torch.tensor([[100, 101, 5, 6], [7, 8, 0, 0], [9, 0, 0, 0]]),
        "input_lengths": torch.tensor([[4], [2], [1]]),
        "request_output_len": torch.tensor([[3]] * 3),
    }
    return to_requests(CONTRACTS["GPT"], tensors | more)


def columns(*values: int) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def test_tasks_are_per_row() -> None:
    rows = gpt(
        prompt_learning_task_name_ids=columns(1, 0, 2),
        ia3_tasks=columns(0, -1, 1),
        lora_task_id=columns(-1, 2, 0),
    )
    assert [row.prompt_task for row in rows] == [1, 0, 2]
    assert [row.ia3_task for row in rows] == [0, None, 1]
    assert [row.lora_adapter for row in rows] == [None, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_embeddings_are_cut_to_their_length_and_typed_per_row(dtype: torch.dtype) -> None:
    given = TABLE.to(dtype, copy=True)
    rows = gpt(
        request_prompt_embedding=given,
        request_prompt_lengths=columns(2, 3, 1),
        request_prompt_type=columns(3, 0, 1),
    )
    given.zero_()  # the request's memory is not the row's
    assert rows[0].prompt_embedding.tolist() == TABLE[0, :2].tolist()
    assert rows[1].prompt_embedding is None
    assert rows[2].prompt_embedding.dtype == torch.float32
    assert [row.soft_prompt for row in rows] == [False, False, True]


def test_t5_takes_embeddings_without_a_type() -> None:
    tensors = {
        "input_ids": torch.tensor([[100, 5], [7, 8]]),
        "sequence_length": columns(2, 2),
        "request_prompt_embedding": TABLE[:2],
        "request_prompt_lengths": columns(3, 0),
        "ia3_tasks": columns(1, 0),
    }
    rows = to_requests(CONTRACTS["T5"], tensors | {"max_output_len": columns(1, 1)})
    assert [row.prompt_embedding is None for row in rows] == [False, True]
    assert not any(row.soft_prompt for row in rows)
    encoder = to_requests(CONTRACTS["T5-Encoder"], tensors)
    assert [row.ia3_task for row in encoder] == [1, 0]
    assert encoder[0].prompt_embedding.shape == (3, 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"request_prompt_type": columns(2, 0, 0)}, "request_prompt_type is not supported; got 2"),
        ({"request_prompt_embedding": TABLE}, "needs request_prompt_lengths and request_prompt_ty"),
        (
            {"request_prompt_embedding": TABLE, "request_prompt_lengths": columns(1, 1, 1)},
            "needs request_prompt_lengths and request_prompt_type",
        ),
        (
            {
                "request_prompt_embedding": TABLE,
                "request_prompt_lengths": columns(1, 4, 1),
                "request_prompt_type": columns(1, 1, 1),
            },
            "request_prompt_lengths must be within request_prompt_embedding; got 4; choices: 0-3",
        ),
        (
            {
                "request_prompt_embedding": TABLE[0],
                "request_prompt_lengths": columns(1, 1, 1),
                "request_prompt_type": columns(1, 1, 1),
            },
            r"must be \[3, virtual tokens, hidden size\]",
        ),
        ({"prompt_learning_task_name_ids": columns(1)}, "needs one value per row"),
    ],
)
def test_what_is_wrong_is_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        gpt(**more)


def test_answers_leave_virtual_tokens_out() -> None:
    requests = [
        GenerateRequest((100, 101, 5, 6), 3, prompt_task=0),
        GenerateRequest((100, 7), 2, prompt_embedding=torch.ones(1, 4)),
        GenerateRequest((8,), 2, prompt_embedding=torch.ones(2, 4), soft_prompt=True),
    ]
    outputs = [GenerateOutput((1, 2, 3)), GenerateOutput((4, 5)), GenerateOutput((6,))]
    answer = gpt_tensors(requests, outputs, Shape(1, 0, torch.float32, START, WANTED))
    assert answer["response_input_lengths"].tolist() == [[2], [1], [1]]
    assert answer["sequence_length"].tolist() == [[5], [3], [2]]
    rows = answer["output_ids"].long().squeeze(1).tolist()
    assert rows == [[5, 6, 1, 2, 3, 0], [7, 4, 5, 0, 0, 0], [8, 6, 0, 0, 0, 0]]
