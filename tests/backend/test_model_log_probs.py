"""Log-probabilities, biases and penalties between the contract's tensors and rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from launcher_scripts.backends.fastertransformer.answer_tensors import ANSWER_TENSORS, Shape
from launcher_scripts.backends.fastertransformer.request_tensors import to_requests
from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import (
    Beam,
    GenerateOutput,
    GenerateRequest,
    ModelLogProbs,
    SamplingParameters,
)

LENGTHS = {
    "GPT": {"input_lengths": [3, 2], "request_output_len": [[4], [2]]},
    "T5": {"sequence_length": [3, 2], "max_output_len": [4, 2]},
    "BART": {"sequence_length": [3, 2], "max_output_len": [4, 2]},
    "Agm": {"sequence_length": [3, 2], "max_output_len": [7, 4]},
}
MODELS = list(LENGTHS)


def requests(model: str, **more: Any) -> list[GenerateRequest]:
    given = {"input_ids": [[5, 6, 7], [8, 9, 0]], **LENGTHS[model]}
    tensors = {name: torch.tensor(values) for name, values in given.items()}
    return to_requests(CONTRACTS[model], {**tensors, **more})


def to_tensors(model: str, outputs: list[GenerateOutput], *names: str) -> dict[str, torch.Tensor]:
    contract = [tensor.name for tensor in CONTRACTS[model].outputs]
    shape = Shape(0, 66, torch.float32, 67, names or contract)
    return ANSWER_TENSORS[model](requests(model), outputs, shape)


def scores(tokens: int, count: int) -> ModelLogProbs:
    """Numbers that tell where they are from."""
    values = torch.arange(tokens * (1 + count)).view(tokens, 1 + count)
    own, top = values[:, 0], values[:, 1:]
    return ModelLogProbs(-own.float() / 4, own.int() + 1, top.int(), -top.float() / 8)


@pytest.mark.parametrize("model", MODELS)
def test_every_row_has_its_own_values(model):
    rows = requests(
        model,
        frequency_penalty=torch.tensor([0.5, 0.0]),
        output_presence_penalty=torch.tensor([[0.0], [-0.25]]),
        min_p=torch.tensor([0.125, 1.0]),
        num_log_probs=torch.tensor([-1, 5], dtype=torch.int32),
        num_prompt_log_probs=torch.tensor([[0], [-1]], dtype=torch.int32),
        logit_bias_ids=torch.tensor([[3, -1, 9], [-1, -1, -1]], dtype=torch.int32),
        logit_bias_values=torch.tensor([[0.5, 7.0, -2.0], [0.0, 0.0, 0.0]]),
    )
    first, second = (row.sampling for row in rows)
    assert first == SamplingParameters(frequency_penalty=0.5, min_p=0.125)
    assert second == SamplingParameters(output_presence_penalty=-0.25, min_p=1.0)
    assert [row.logit_bias for row in rows] == [((3, 0.5), (9, -2.0)), ()]
    assert [row.num_log_probs for row in rows] == [-1, 5]
    assert [row.num_prompt_log_probs for row in rows] == [0, -1]


def test_biases_without_a_batch_axis_are_every_rows():
    rows = requests("GPT", logit_bias_ids=torch.tensor([3]), logit_bias_values=torch.tensor([0.5]))
    assert [row.logit_bias for row in rows] == [((3, 0.5),)] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"logit_bias_ids": [[3], [4]]},
            r"logit_bias_ids and logit_bias_values must come together.*; got \[\[2, 1\]\]",
        ),
        ({"logit_bias_values": [[3.0], [4.0]]}, "must come together"),
        (
            {"logit_bias_ids": [[3, 4], [4, 5]], "logit_bias_values": [[1.0], [1.0]]},
            r"in one shape; got \[\[2, 2\], \[2, 1\]\]",
        ),
        (
            {"logit_bias_ids": [[3], [4], [5]], "logit_bias_values": [[1.0]] * 3},
            r"must be \[2, n\]; got \[3, 1\]",
        ),
        ({"num_log_probs": [1, 2, 3]}, "num_log_probs needs one value per row"),
    ],
)
def test_wrong_tensors_are_named(wrong, message):
    with pytest.raises(RequestError, match=message):
        requests("GPT", **{name: torch.tensor(value) for name, value in wrong.items()})


@pytest.mark.parametrize("model", MODELS)
def test_outputs_fit_the_contract_and_are_0_beyond_what_was_asked(model):
    given = [
        GenerateOutput((1, 2, 3, 4), token_log_probs=scores(4, 1), prompt_log_probs=scores(3, 2)),
        GenerateOutput((1, 2), token_log_probs=scores(2, 3)),
    ]
    made = to_tensors(model, given)
    contract = {tensor.name: tensor for tensor in CONTRACTS[model].outputs}
    kinds = {"FP32": torch.float32, "INT32": torch.int32}
    for name, tensor in made.items():
        if contract[name].extension:
            assert tensor.dtype == kinds[contract[name].dtype]
            assert tensor.dim() == 1 + len(contract[name].dims)
            assert tensor.is_contiguous()
    assert made["token_log_probs"].tolist() == [[[0, -0.5, -1, -1.5]], [[0, -1, 0, 0]]]
    assert made["token_ranks"].tolist() == [[[1, 3, 5, 7]], [[1, 5, 0, 0]]]
    assert made["top_log_prob_ids"].tolist() == [
        [[[1, 0, 0], [3, 0, 0], [5, 0, 0], [7, 0, 0]]],
        [[[1, 2, 3], [5, 6, 7], [0, 0, 0], [0, 0, 0]]],
    ]
    assert made["top_log_probs"].tolist() == (made["top_log_prob_ids"] / -8).tolist()
    assert made["prompt_log_probs"].tolist() == [[0, -0.75, -1.5], [0, 0, 0]]
    assert made["prompt_ranks"].tolist() == [[1, 4, 7], [0, 0, 0]]
    assert made["prompt_top_ids"].tolist() == [[[1, 2], [4, 5], [7, 8]], [[0, 0]] * 3]
    assert made["prompt_top_log_probs"].tolist() == (made["prompt_top_ids"] / -8).tolist()


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_made_that_nobody_asked_for(model):
    asked = {"token_log_probs", "token_ranks", "prompt_log_probs", "prompt_ranks"}
    given = [
        GenerateOutput((1,), token_log_probs=scores(1, 0), prompt_log_probs=scores(3, 0)),
        GenerateOutput((1,)),
    ]
    known = {tensor.name for tensor in CONTRACTS[model].outputs}
    extensions = {name for name in known if "log_prob" in name or "rank" in name or "_top_" in name}
    assert to_tensors(model, given).keys() & extensions == asked
    assert to_tensors(model, [GenerateOutput((1,))] * 2).keys() & extensions == set()
    assert to_tensors(model, given, "token_ranks").keys() & extensions == {"token_ranks"}


def test_beside_a_beam_search_they_are_the_first_beams():
    beams = (Beam((1, 2)), Beam((3, 4)))
    given = [
        GenerateOutput((1, 2), beams=beams, prompt_log_probs=scores(3, 0)),
        GenerateOutput((5,), token_log_probs=scores(1, 1)),
    ]
    made = to_tensors("GPT", given)
    assert made["token_ranks"].shape == (2, 2, 4)
    assert made["token_ranks"].nonzero().tolist() == [[1, 0, 0]]
    assert made["prompt_ranks"].tolist() == [[1, 2, 3], [0, 0, 0]]


def test_an_empty_prompt_has_one_place():
    given = [GenerateOutput((1,), prompt_log_probs=scores(0, 2))] * 2
    assert to_tensors("GPT", given)["prompt_top_ids"].tolist() == [[[0, 0]], [[0, 0]]]
    assert math.prod(to_tensors("GPT", given)["prompt_ranks"].shape) == 2
