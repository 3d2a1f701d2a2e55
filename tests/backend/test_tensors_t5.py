"""Tensors of the T5 contracts to rows, and answers back to tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from launcher_scripts.backends.fastertransformer import request_tensors
from launcher_scripts.backends.fastertransformer.answer_tensors import (
    ANSWER_TENSORS,
    Shape,
    encoder_tensors,
    t5_tensors,
)
from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import (
    NO_TOKEN,
    Beam,
    GenerateOutput,
    GenerateRequest,
    SamplingParameters,
)

WANTED = frozenset(tensor.name for tensor in CONTRACTS["T5"].outputs)
to_requests = partial(request_tensors.to_requests, CONTRACTS["T5"])


def shape(end_id: int) -> Shape:
    return Shape(0, end_id, torch.float32, 0, WANTED)


def sent(**more: object) -> dict[str, torch.Tensor]:
    values = {
        "input_ids": [[5, 6, 7, 8], [9, 3, 0, 0]],
        "sequence_length": [4, 2],
        "max_output_len": [[3], [6]],
        **more,
    }
    floats = ("runtime_top_p", "temperature")
    return {
        name: torch.tensor(value, dtype=torch.float32 if name in floats else torch.int64)
        for name, value in values.items()
    }


def test_every_contract_has_a_conversion():
    assert ANSWER_TENSORS.keys() == CONTRACTS.keys()


def test_rows_take_defaults_for_what_is_left_out():
    assert to_requests(sent()) == [
        GenerateRequest((5, 6, 7, 8), 3),
        GenerateRequest((9, 3), 6),
    ]


def test_every_parameter_is_per_row():
    rows = to_requests(
        sent(
            runtime_top_k=[1, 40],
            temperature=[1.0, 0.5],
            start_id=[1, 2],
            end_id=[3, 4],
            is_return_log_probs=[False, True],
            is_return_context_logits=[True, False],
            decoder_input_ids=[[0, 8, 9], [0, NO_TOKEN, NO_TOKEN]],
        )
    )
    assert rows[0] == GenerateRequest(
        (5, 6, 7, 8),
        3,
        SamplingParameters(top_k=1),
        start_id=1,
        end_id=3,
        return_context_logits=True,
        decoder_input_ids=(0, 8, 9),
    )
    assert rows[1] == GenerateRequest(
        (9, 3),
        6,
        SamplingParameters(top_k=40, temperature=0.5),
        start_id=2,
        end_id=4,
        return_log_probs=True,
        decoder_input_ids=(0,),
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sequence_length": [5, 2]}, "sequence_length must be within input_ids; got 5"),
        ({"max_output_len": [[3]]}, "max_output_len needs one value per row"),
        ({"decoder_input_ids": [[0]]}, "decoder_input_ids needs one row per row"),
        ({"decoder_input_ids": [0, 0]}, r"decoder_input_ids must be \[batch, time\]"),
        ({"ia3_tasks": [0]}, "ia3_tasks needs one value per row"),
        ({"request_prompt_lengths": [1, 1]}, "comes without request_prompt_embedding"),
    ],
)
def test_what_is_wrong_is_named(wrong, message):
    with pytest.raises(RequestError, match=message):
        to_requests(sent(**wrong))


def test_answers_hold_what_was_generated():
    """The row's end id up to the longest row's end, then zeros; no start token."""
    requests = [GenerateRequest((5,), 6), GenerateRequest((5,), 2, end_id=(1 << 32) - 1)]
    outputs = [GenerateOutput((7, 8, 9, 1)), GenerateOutput((4,))]
    answer = t5_tensors(requests, outputs, shape(end_id=1))
    assert {tensor.dtype for tensor in answer.values()} == {torch.int32}
    assert answer["output_ids"].tolist() == [[[7, 8, 9, 1, 0, 0]], [[4, -1, -1, -1, 0, 0]]]
    assert answer["sequence_length"].tolist() == [[4], [1]]


def test_answers_carry_what_was_asked_for():
    requests = [
        GenerateRequest((5,), 2, return_log_probs=True),
        GenerateRequest((5,), 2, return_context_logits=True),
    ]
    outputs = [
        GenerateOutput((7, 8), -1.5, (-0.5, -1.0)),
        GenerateOutput((4,), context_logits=torch.ones(3, 5)),
    ]
    answer = t5_tensors(requests, outputs, shape(end_id=1))
    assert answer["cum_log_probs"].tolist() == [[-1.5], [0.0]]
    assert answer["output_log_probs"].tolist() == [[[-0.5, -1.0]], [[0.0, 0.0]]]
    assert answer["context_logits"].sum((1, 2)).tolist() == [0.0, 15.0]


def test_nothing_to_generate_still_has_a_column():
    answer = t5_tensors([GenerateRequest((5,), 0)], [GenerateOutput(())], shape(end_id=1))
    assert answer["output_ids"].tolist() == [[[0]]]
    assert answer["sequence_length"].tolist() == [[0]]


def test_encoder_rows_and_answers():
    tensors = {name: value for name, value in sent().items() if name != "max_output_len"}
    tensors["is_return_attentions"] = torch.tensor([[True], [False]])
    requests = request_tensors.to_requests(CONTRACTS["T5-Encoder"], tensors)
    assert requests == [
        GenerateRequest((5, 6, 7, 8), 0, return_hidden_state=True, return_attentions=True),
        GenerateRequest((9, 3), 0, return_hidden_state=True),
    ]
    outputs = [
        GenerateOutput((), hidden_state=torch.ones(4, 3), attentions=torch.ones(2, 5, 4, 4)),
        GenerateOutput((), hidden_state=torch.ones(2, 3)),
    ]
    answer = encoder_tensors(requests, outputs, Shape(1, 1, torch.bfloat16, 0, WANTED))
    assert {tensor.dtype for tensor in answer.values()} == {torch.bfloat16}
    assert answer["output_hidden_state"].sum((1, 2)).tolist() == [12.0, 6.0]
    assert answer["output_attentions"].shape == (2, 2, 5, 5, 5)
    assert answer["output_attentions"].sum((1, 2, 3, 4)).tolist() == [160.0, 0.0]


def test_beams_have_zeros_after_their_ends():
    beams = (Beam((1, 2, 3)), Beam((4, 5)))
    requests = [GenerateRequest((5,), 4), GenerateRequest((6,), 4, end_id=7)]
    outputs = [GenerateOutput((1, 2, 3), beams=beams), GenerateOutput((8, 7))]
    answer = t5_tensors(requests, outputs, shape(end_id=9))
    assert answer["output_ids"].tolist() == [
        [[1, 2, 3, 0], [4, 5, 0, 0]],
        [[8, 7, 7, 0], [0, 0, 0, 0]],
    ]
    assert answer["sequence_length"].tolist() == [[3, 2], [2, 0]]
    assert answer["sequence_length"].dtype == torch.int32
