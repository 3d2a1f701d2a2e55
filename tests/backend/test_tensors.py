"""The contract's tensors to rows and back, shapes and padding included."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from launcher_scripts.backends.fastertransformer import request_tensors
from launcher_scripts.backends.fastertransformer.answer_tensors import Shape, gpt_tensors
from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import (
    REQUEST_FIELDS,
    SAMPLING_FIELDS,
    TASK_FIELDS,
    Beam,
    GenerateOutput,
    GenerateRequest,
    SamplingParameters,
)
from launcher_scripts.contract.tensors import GPT_INPUTS, GPT_OUTPUTS

WANTED = frozenset(tensor.name for tensor in GPT_OUTPUTS)
DTYPES = {
    "UINT8": torch.uint8,
    "UINT32": torch.uint32,
    "INT32": torch.int32,
    "UINT64": torch.uint64,
    "FP32": torch.float32,
    "BOOL": torch.bool,
    "FP16": torch.float16,
}


to_requests = partial(request_tensors.to_requests, CONTRACTS["GPT"])


def shape(end_id: int, padding: int = 0) -> Shape:
    return Shape(padding, end_id, torch.float32, prompt_start_id=100, requested=WANTED)


def tensors(**values: object) -> dict[str, torch.Tensor]:
    """Contract tensors of the contract's types."""
    kinds = {spec.name: DTYPES[spec.dtype] for spec in GPT_INPUTS}
    return {name: torch.tensor(value).to(kinds[name]) for name, value in values.items()}


def basic(**more: object) -> dict[str, torch.Tensor]:
    return tensors(
        **{
            "input_ids": [[5, 6, 7, 8], [9, 3, 0, 0]],
            "input_lengths": [4, 2],
            "request_output_len": [[3], [6]],
            **more,
        }
    )


def test_rows_take_defaults_for_what_is_left_out():
    assert to_requests(basic()) == [
        GenerateRequest((5, 6, 7, 8), 3),
        GenerateRequest((9, 3), 6),
    ]


@pytest.mark.parametrize("model", CONTRACTS)
def test_rows_have_the_contracts_defaults(model):
    """A tensor that was not sent is left to the row's own default."""
    row, known = GenerateRequest((), 0), CONTRACTS[model].by_name
    own = {name: getattr(row.sampling, field) for name, field in SAMPLING_FIELDS.items()}
    own |= {name: getattr(row, field) for name, field in (REQUEST_FIELDS | TASK_FIELDS).items()}
    shared = own.keys() & known.keys()
    assert {name: own[name] for name in shared} == {name: known[name].default for name in shared}


def test_every_parameter_is_per_row():
    rows = to_requests(
        basic(
            runtime_top_k=[1, 40],
            runtime_top_p=[0.0, 0.5],
            temperature=[1.0, 0.5],
            repetition_penalty=[1.0, 1.25],
            presence_penalty=[0.5, 0.0],
            min_length=[0, 2],
            top_p_decay=[1.0, 0.5],
            top_p_min=[0.25, 0.125],
            top_p_reset_ids=[7, 8],
            beam_width=[1, 1],
            len_penalty=[0.0, 1.0],
            beam_search_diversity_rate=[0.0, 0.5],
            start_id=[1, 2],
            end_id=[3, 4],
            is_return_log_probs=[False, True],
            is_return_context_logits=[True, False],
        )
    )
    second = SamplingParameters(
        top_k=40,
        top_p=0.5,
        temperature=0.5,
        repetition_penalty=1.25,
        min_length=2,
        top_p_decay=0.5,
        top_p_min=0.125,
        top_p_reset_id=8,
        len_penalty=1.0,
        beam_search_diversity_rate=0.5,
    )
    assert rows[1] == GenerateRequest(
        (9, 3), 6, second, start_id=2, end_id=4, return_log_probs=True
    )
    assert rows[0].sampling.presence_penalty == 0.5
    assert (rows[0].return_log_probs, rows[0].return_context_logits) == (False, True)


def test_seeds_are_64_bits():
    seed = (1 << 63) + 12345
    sent = basic()
    sent["random_seed"] = torch.tensor([seed - (1 << 64), 7]).view(torch.uint64)
    assert [row.sampling.random_seed for row in to_requests(sent)] == [seed, 7]
    sent["cache_salt"] = sent["random_seed"]
    assert [row.cache_salt for row in to_requests(sent)] == [seed, 7]


def test_scalars_may_keep_their_axis():
    rows = to_requests(basic(input_lengths=[[4], [2]], runtime_top_k=[[2], [3]]))
    assert [row.sampling.top_k for row in rows] == [2, 3]


def test_word_lists_are_ids_and_end_offsets():
    lists = [[[5, 6, 7, 0], [2, 3, -1, -1]], [[0, 0, 0, 0], [-1, -1, -1, -1]]]
    rows = to_requests(basic(bad_words_list=lists))
    assert [row.bad_words for row in rows] == [((5, 6), (7,)), ()]
    nothing = to_requests(basic(stop_words_list=[[[0], [0]], [[7], [1]]]))
    assert [row.stop_words for row in nothing] == [(), ((7,),)]
    shared = to_requests(basic(stop_words_list=lists[0]))
    assert [row.stop_words for row in shared] == [((5, 6), (7,))] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_lengths": [4, 5]}, "input_lengths must be within input_ids; got 5"),
        ({"input_lengths": [4, 5, 1]}, "input_lengths needs one value per row"),
        ({"runtime_top_k": [[1, 2], [3, 4]]}, "runtime_top_k needs one value per row"),
        ({"input_ids": [5, 6]}, r"input_ids must be \[batch, time\]; got \[2\]"),
        ({"bad_words_list": [[1, 2], [3, 4], [5, 6]]}, r"bad_words_list must be \[2, 2, n\]"),
        ({"bad_words_list": [[1, 2], [2, 1]]}, "ascending end offsets"),
        ({"bad_words_list": [[1, 2], [1, 9]]}, "within its 2 ids"),
        ({"bad_words_list": [[1, 2], [1, 0]]}, "ascending end offsets"),
        ({"request_prompt_lengths": [1, 1]}, "request_prompt_lengths comes without"),
        ({"request_prompt_type": [2, 0]}, "request_prompt_type is not supported; got 2"),
    ],
)
def test_wrong_tensors_are_named(wrong, message):
    with pytest.raises(RequestError, match=message):
        to_requests(basic(**wrong))


def test_what_asks_for_nothing_is_no_problem():
    more = {"request_prompt_type": [0, 0], "is_return_context_embeddings": [False, False]}
    assert len(to_requests(basic(**more))) == 2


def test_output_ids_hold_prompt_generated_and_end_tokens():
    requests = [GenerateRequest((5, 6, 7, 8), 3), GenerateRequest((9, 3), 6, end_id=4)]
    outputs = [GenerateOutput((1, 2)), GenerateOutput((11, 12, 13, 14, 15, 16))]
    answer = gpt_tensors(requests, outputs, shape(end_id=99))
    assert answer["output_ids"].tolist() == [
        [[5, 6, 7, 8, 1, 2, 99, 99, 99, 99]],
        [[9, 3, 11, 12, 13, 14, 15, 16, 4, 4]],
    ]
    assert answer["sequence_length"].tolist() == [[6], [8]]
    assert answer["response_input_lengths"].tolist() == [[4], [2]]
    assert set(answer) == {"output_ids", "sequence_length", "response_input_lengths"}
    wider = gpt_tensors(requests, outputs, shape(end_id=99, padding=1))["output_ids"]
    assert wider.tolist() == [
        [[5, 6, 7, 8, 1, 2, 99, 99, 99, 99, 99]],
        [[9, 3, *range(11, 17), 4, 4, 4]],
    ]


def test_beams_are_an_axis_as_wide_as_the_widest_row():
    beams = (Beam((1, 2), -1.5, (-0.5, -1.0)), Beam((3,), -2.0, (-2.0,)))
    requests = [
        GenerateRequest((5, 6), 2, end_id=4, return_log_probs=True),
        GenerateRequest((9,), 2, return_log_probs=True),
    ]
    outputs = [
        GenerateOutput(beams[0].output_ids, -1.5, (-0.5, -1.0), beams=beams),
        GenerateOutput((8, 7), -3.0, (-1.0, -2.0)),
    ]
    answer = gpt_tensors(requests, outputs, shape(end_id=99))
    assert answer["output_ids"].tolist() == [
        [[5, 6, 1, 2], [5, 6, 3, 4]],
        [[9, 8, 7, 99], [99, 99, 99, 99]],
    ]
    assert answer["sequence_length"].tolist() == [[4, 3], [3, 0]]
    assert answer["response_input_lengths"].tolist() == [[2, 2], [1, 1]]
    assert answer["cum_log_probs"].tolist() == [[-1.5, -2.0], [-3.0, 0.0]]
    assert answer["output_log_probs"].tolist() == [
        [[-0.5, -1.0], [-2.0, 0.0]],
        [[-1.0, -2.0], [0.0, 0.0]],
    ]


def test_context_embeddings_are_each_rows_own():
    requests = [
        GenerateRequest((5, 6), 1, return_context_embeddings=True),
        GenerateRequest((7, 8), 1),
    ]
    outputs = [GenerateOutput((1,), context_embeddings=torch.ones(3)), GenerateOutput((2,))]
    answer = gpt_tensors(requests, outputs, shape(end_id=99))
    assert answer["context_embeddings"].tolist() == [[[1, 1, 1]], [[0, 0, 0]]]


def test_log_probs_and_context_logits_come_when_asked():
    requests = [
        GenerateRequest((5, 6), 2, return_log_probs=True),
        GenerateRequest((9,), 1, return_context_logits=True),
    ]
    outputs = [
        GenerateOutput((1, 2), -1.5, (-0.5, -1.0)),
        GenerateOutput((3,), context_logits=torch.ones(1, 3)),
    ]
    answer = gpt_tensors(requests, outputs, shape(end_id=0))
    assert answer["cum_log_probs"].tolist() == [[-1.5], [0.0]]
    assert answer["output_log_probs"].tolist() == [[[-0.5, -1.0]], [[0.0, 0.0]]]
    assert answer["context_logits"].tolist() == [[[0, 0, 0]], [[1, 1, 1]]]
    for spec in GPT_OUTPUTS:
        if spec.name in answer:
            assert answer[spec.name].dtype == DTYPES[spec.dtype], spec.name
