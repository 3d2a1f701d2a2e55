"""Requests as tensors and back, beyond what the client's tests send."""

import dataclasses

import numpy as np
import pytest
from torch import from_numpy

from launcher_scripts.backends.fastertransformer.request_tensors import to_requests
from launcher_scripts.clients import contract_tensors
from launcher_scripts.clients.contract_tensors import (
    output_names,
    request_tensors,
    row_outputs,
    word_lists,
)
from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import Beam, GenerateRequest, SamplingParameters
from launcher_scripts.contract.tensors import GPT_INPUTS

# A value other than the contract's default for every field of a request.
SAMPLING = SamplingParameters(
    top_k=4,
    top_p=0.5,
    temperature=0.7,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.4,
    output_presence_penalty=0.6,
    min_p=0.1,
    min_length=3,
    random_seed=2**40,
    top_p_decay=0.9,
    top_p_min=0.01,
    top_p_reset_id=5,
    beam_width=2,
    len_penalty=0.6,
    beam_search_diversity_rate=0.1,
    no_repeat_ngram_size=3,
)
REQUEST = GenerateRequest(
    (1, 2),
    output_len=4,
    sampling=SAMPLING,
    start_id=8,
    end_id=9,
    bad_words=((5, 6), (7,)),
    stop_words=((3,),),
    logit_bias=((4, -1.5),),
    guided_grammar='{"regex": "a+"}',
    return_log_probs=True,
    num_log_probs=2,
    num_prompt_log_probs=0,
    return_context_logits=True,
    return_context_embeddings=True,
    prompt_task=1,
    prompt_embedding=np.ones((3, 4), np.float16),
    soft_prompt=True,
    ia3_task=2,
    lora_adapter=1,
    cache_salt=2**63,
    num_speculative_tokens=3,
)
OF_AN_ENCODER = ("decoder_input_ids", "return_hidden_state", "return_attentions")


def test_every_field_of_a_request_becomes_a_tensor_of_the_contract():
    sent = request_tensors([REQUEST])
    contract = {tensor.name: tensor for tensor in GPT_INPUTS}
    fields = len(dataclasses.fields(SamplingParameters)) + len(dataclasses.fields(REQUEST))
    fields -= len(OF_AN_ENCODER)
    # Prompt and biases are two tensors, `sampling` is none, an embedding with soft_prompt three.
    assert len(sent) == fields + 2 - 1 + 1
    for name, array in sent.items():
        tensor = contract[name]
        assert array.dtype == contract_tensors.NUMPY_TYPES[tensor.dtype], name
        assert array.ndim == 1 + len(tensor.dims), name
        fixed = [size for size in tensor.dims if size != -1]
        assert [size for size in array.shape[1:] if size in fixed][: len(fixed)] == fixed, name
    assert sent["random_seed"].tolist() == [[2**40]]
    assert sent["top_p_reset_ids"].tolist() == [[5]]
    assert sent["cache_salt"].tolist() == [[2**63]]


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ({"decoder_input_ids": (0,)}, "decoder_input_ids"),
        ({"return_attentions": True}, "is_return_attentions"),
        ({"return_hidden_state": True}, "return_hidden_state"),
    ],
)
def test_what_only_an_encoder_answers_is_refused(field, name):
    with pytest.raises(RequestError, match=f"type GPT has no input for this; got '{name}'"):
        request_tensors([REQUEST, dataclasses.replace(REQUEST, **field)])


def test_what_a_family_has_no_tensor_for_is_refused(monkeypatch):
    inputs = tuple(tensor for tensor in CONTRACTS["T5"].inputs if "prompt" not in tensor.name)
    monkeypatch.setitem(CONTRACTS, "T5", dataclasses.replace(CONTRACTS["T5"], inputs=inputs))
    assert "input_ids" in request_tensors([GenerateRequest((1,), 1)], "T5")
    with pytest.raises(RequestError, match="no input for this; got 'prompt_learning_task"):
        request_tensors([GenerateRequest((1,), 1, prompt_task=0)], "T5")


def test_an_encoder_alone_generates_nothing():
    with pytest.raises(RequestError, match="generates no tokens; got 'T5-Encoder'"):
        request_tensors([GenerateRequest((1,), 1)], "T5-Encoder")


def test_rows_for_an_encoder_and_decoder():
    rows = [
        GenerateRequest((1, 2), 4, decoder_input_ids=(0, 7), ia3_task=1),
        GenerateRequest((3,), 5, decoder_input_ids=(0,), ia3_task=0),
    ]
    sent = request_tensors(rows, "T5")
    assert {name: array.tolist() for name, array in sent.items()} == {
        "input_ids": [[1, 2], [3, 0]],
        "sequence_length": [[2], [1]],
        "max_output_len": [[4], [5]],
        "ia3_tasks": [[1], [0]],
        "decoder_input_ids": [[0, 7], [0, 2**32 - 1]],
    }
    assert output_names(rows, "T5") == ("output_ids", "sequence_length")
    answer = {
        "output_ids": np.array([[[8, 9, 0]], [[5, 6, 7]]], np.int32),
        "sequence_length": np.array([[2], [3]], np.int32),
    }
    assert [output.output_ids for output in row_outputs(rows, answer)] == [(8, 9), (5, 6, 7)]


def test_rows_with_and_without_own_prompts():
    table = np.arange(8, dtype=np.float16).reshape(2, 4)
    rows = [
        GenerateRequest((1, 2), 1, prompt_embedding=table[:1]),
        GenerateRequest((1,), 1, ia3_task=0),
        GenerateRequest((1,), 1, prompt_embedding=table, soft_prompt=True),
    ]
    sent = request_tensors(rows)
    assert sent["request_prompt_lengths"].tolist() == [[1], [0], [2]]
    assert sent["request_prompt_type"].tolist() == [[3], [0], [1]]
    assert sent["request_prompt_embedding"][:, 0, 1].tolist() == [1, 0, 1]
    assert sent["ia3_tasks"].tolist() == [[-1], [0], [-1]]


def test_answers_hold_no_virtual_tokens():
    row = GenerateRequest((9, 10, 5), 2, prompt_task=0, return_context_logits=True)
    assert "response_input_lengths" in contract_tensors.output_names([row])
    answer = {
        "output_ids": np.array([[[5, 7, 8]]]),
        "sequence_length": np.array([[3]]),
        "response_input_lengths": np.array([[1]]),
        "context_logits": np.zeros((1, 3, 4)),
    }
    (output,) = row_outputs([row], answer)
    assert output.output_ids == (7, 8)
    assert output.context_logits.shape == (3, 4)


def test_defaults_are_left_out():
    assert request_tensors([GenerateRequest((1,), 1)]).keys() == {
        "input_ids",
        "input_lengths",
        "request_output_len",
    }


def test_rows_must_agree_on_leaving_a_value_to_the_checkpoint():
    rows = [GenerateRequest((1,), 1, end_id=2), GenerateRequest((1,), 1)]
    with pytest.raises(RequestError, match=r"say end_id or none; got \[2, None\]"):
        request_tensors(rows)


def test_word_lists_are_packed_as_the_contract_packs_them():
    packed = word_lists([[(5, 6), (7,)], [], [(1,)]])
    assert packed.dtype == np.int32
    assert packed.tolist() == [
        [[5, 6, 7], [2, 3, -1]],
        [[0, 0, 0], [-1, -1, -1]],
        [[1, 0, 0], [1, -1, -1]],
    ]
    assert word_lists([[]]).tolist() == [[[0], [-1]]]


def test_outputs_are_cut_to_each_rows_length_and_best_beam():
    rows = [
        GenerateRequest((1, 2, 3), 2, return_log_probs=True, return_context_logits=True),
        GenerateRequest((4,), 2, return_context_embeddings=True),
    ]
    assert output_names(rows)[-2:] == ("context_logits", "context_embeddings")
    logits = np.arange(2 * 3 * 2, dtype=np.float32).reshape(2, 3, 2)
    first, second = row_outputs(
        rows,
        {
            "output_ids": np.array(
                [[[1, 2, 3, 7, 0], [9] * 5], [[4, 5, 6, 0, 0], [9] * 5]], np.uint32
            ),
            "sequence_length": np.array([[4, 5], [3, 5]], np.int32),
            "cum_log_probs": np.array([[-0.5, -9], [-1, -9]], np.float32),
            "output_log_probs": np.array([[[-0.5, 0], [-9, -9]]] * 2, np.float32),
            "context_logits": logits,
            "context_embeddings": np.array([[[0, 0]], [[3, 4]]], np.float32),
            "response_input_lengths": np.array([[3], [1]], np.int32),
        },
    )
    assert (first.output_ids, second.output_ids) == ((7,), (5, 6))
    assert (first.cum_log_probs, first.output_log_probs) == (-0.5, (-0.5,))
    np.testing.assert_array_equal(first.context_logits, logits[0])
    assert first.context_embeddings is None and second.context_embeddings.tolist() == [3, 4]
    assert second.context_logits is None and second.cum_log_probs is None


def test_biases_are_filled_up():
    sent = request_tensors(
        [GenerateRequest((1,), 1, logit_bias=((3, 0.5), (9, -2.0))), GenerateRequest((1,), 1)]
    )
    assert sent["logit_bias_ids"].tolist() == [[3, 9], [-1, -1]]
    assert sent["logit_bias_values"].tolist() == [[0.5, -2.0], [0, 0]]


def test_log_probabilities_are_cut_to_what_each_row_asked_for():
    rows = [
        GenerateRequest((1, 2), 3, num_log_probs=1, num_prompt_log_probs=0),
        GenerateRequest((3,), 3, num_log_probs=2),
        GenerateRequest((4,), 3),
    ]
    names = ("token_log_probs", "token_ranks", "top_log_prob_ids", "top_log_probs")
    assert output_names(rows)[3:] == (*names, "prompt_log_probs", "prompt_ranks")
    shapes = ((3, 1, 3), (3, 1, 3), (3, 1, 3, 2), (3, 1, 3, 2))
    arrays = {name: np.arange(np.prod(s)).reshape(s) for name, s in zip(names, shapes, strict=True)}
    first, second, third = row_outputs(
        rows,
        {
            **arrays,
            "output_ids": np.array([[[1, 2, 7, 8, 9]], [[3, 7, 0, 0, 0]], [[4, 7, 0, 0, 0]]]),
            "sequence_length": np.array([[5], [2], [2]]),
            "response_input_lengths": np.array([[2], [1], [1]]),
            "prompt_log_probs": np.array([[0, -1.5], [0, 0], [0, 0]]),
            "prompt_ranks": np.array([[0, 4], [0, 0], [0, 0]]),
        },
    )
    assert first.token_log_probs.log_probs.tolist() == [0, 1, 2]
    assert first.token_log_probs.top_ids.tolist() == [[0], [2], [4]]
    assert first.prompt_log_probs.ranks.tolist() == [0, 4]
    assert first.prompt_log_probs.top_ids.shape == (2, 0)
    assert second.token_log_probs.ranks.tolist() == [3]
    assert second.token_log_probs.top_log_probs.tolist() == [[6, 7]]
    assert (second.prompt_log_probs, third.token_log_probs) == (None, None)


def test_a_beam_searchs_output_holds_every_hypothesis():
    rows = [
        GenerateRequest((1,), 3, SamplingParameters(beam_width=2), return_log_probs=True),
        GenerateRequest((2,), 3, return_log_probs=True),
    ]
    search, plain = row_outputs(
        rows,
        {
            "output_ids": np.array([[[1, 5, 6, 0], [1, 7, 0, 0]], [[2, 8, 9, 4], [0] * 4]]),
            "sequence_length": np.array([[3, 2], [4, 0]]),
            "cum_log_probs": np.array([[-1, -2], [-3, 0]]),
            "output_log_probs": np.array(
                [[[-0.25, -0.75, 0], [-2, 0, 0]], [[-1, -1, -1], [0, 0, 0]]]
            ),
            "response_input_lengths": np.array([[1, 1], [1, 1]]),
        },
    )
    assert search.beams == (Beam((5, 6), -1, (-0.25, -0.75)), Beam((7,), -2, (-2,)))
    assert (search.output_ids, search.cum_log_probs) == ((5, 6), -1)
    assert (plain.output_ids, plain.beams) == ((8, 9, 4), ())


def test_an_agms_output_length_counts_the_prompt():
    """The server takes off what was put on."""
    rows = [GenerateRequest((5, 6, 7), 4), GenerateRequest((8,), 9)]
    sent = request_tensors(rows, "Agm")
    assert sent["max_output_len"].tolist() == [[7], [10]]
    served = to_requests(CONTRACTS["Agm"], {name: from_numpy(sent[name]) for name in sent})
    assert [row.output_len for row in served] == [4, 9]


PROMPT_TABLE = {"prompt_task": 1, "prompt_embedding": REQUEST.prompt_embedding}
FIELDS_OF = {
    "GPT": {
        "return_context_embeddings": True,
        "ia3_task": 2,
        "lora_adapter": 1,
        "soft_prompt": True,
        "cache_salt": 3,
        "num_speculative_tokens": 2,
        **PROMPT_TABLE,
    },
    "T5": {"decoder_input_ids": (0, 7), "ia3_task": 2, **PROMPT_TABLE},
    "Agm": {"cache_salt": 3, "num_speculative_tokens": 2},
    "BART": {"decoder_input_ids": (0,)},
}


@pytest.mark.parametrize("model_type", FIELDS_OF)
def test_the_server_reads_what_the_client_writes(model_type):
    nothing = dict.fromkeys((*FIELDS_OF["GPT"], *FIELDS_OF["T5"]))
    nothing |= {"return_context_embeddings": False, "soft_prompt": False, "decoder_input_ids": ()}
    nothing |= {"cache_salt": 0, "num_speculative_tokens": 0}
    row = dataclasses.replace(REQUEST, **nothing | FIELDS_OF[model_type])
    sent = request_tensors([row, row], model_type)
    assert sent.keys() <= CONTRACTS[model_type].by_name.keys()
    for served in to_requests(CONTRACTS[model_type], {n: from_numpy(v) for n, v in sent.items()}):
        table = served.prompt_embedding
        assert (table is None) == (row.prompt_embedding is None)
        assert table is None or np.array_equal(table.numpy(), row.prompt_embedding)
        same = dataclasses.replace(served, prompt_embedding=row.prompt_embedding)
        sampling = dataclasses.asdict(same.sampling)
        assert sampling == pytest.approx(dataclasses.asdict(SAMPLING))
        assert dataclasses.replace(same, sampling=SAMPLING) == row
