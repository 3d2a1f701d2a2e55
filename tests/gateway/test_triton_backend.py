"""Rows as the token model's tensors, and its responses as increments, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.gateway.api_errors import ApiError, ServerLost
from launcher_scripts.gateway.backend import Increment, RowRequest, ServedLoRA, TokenLogProb
from launcher_scripts.gateway.triton_backend import NO_END_ID, TritonBackend

ROW = RowRequest("mine", (5, 6, 7), 4, end_id=2)


class FakeServer:
    """Takes the place of a TritonServer; answers with the responses it was given."""

    address = "nowhere:1"

    def __init__(self, responses: Sequence[Any]) -> None:
        self.responses = responses
        self.tensors: dict[str, Any] = {}
        self.more: dict[str, Any] = {}
        self.outputs: list[str] = []
        self.finished = False  # the call, by itself

    def _take(self, tensors: Any, outputs: Any, more: Any) -> None:
        self.tensors, self.outputs, self.more = dict(tensors), list(outputs), more

    async def infer(self, _: str, tensors: Any, outputs: Any, **more: Any) -> dict[str, Any]:
        self._take(tensors, outputs, more)
        (response,) = self.responses
        if isinstance(response, Exception):
            raise response
        return response

    async def stream(
        self, _: str, tensors: Any, outputs: Any, **more: Any
    ) -> AsyncIterator[dict[str, Any]]:
        self._take(tensors, outputs, more)
        for response in self.responses:
            if isinstance(response, Exception):
                raise response
            yield response
        self.finished = True


def backend(
    *responses: Any,
    model_type: str = "GPT",
    streams: bool = True,
    without: Sequence[str] = (),
    caching: bool = False,
) -> tuple[TritonBackend, FakeServer]:
    """A model that declares its contract's inputs but for those `without`."""
    server = FakeServer(responses)
    inputs = [
        {"name": tensor.name, "data_type": f"TYPE_{tensor.dtype}"}
        for tensor in CONTRACTS[model_type].inputs
        if tensor.name not in without
    ]
    policy = {"decoupled": streams}
    config = {"name": "tiny", "input": inputs, "model_transaction_policy": policy}
    if caching:
        config["parameters"] = {"enable_prefix_caching": {"string_value": "1"}}
        config["output"] = [{"name": tensor.name} for tensor in CONTRACTS[model_type].outputs]
    return TritonBackend(server, config), server  # type: ignore[arg-type]


def generate(engine: TritonBackend, request: RowRequest = ROW) -> list[Increment]:
    async def all_of_them() -> list[Increment]:
        return [increment async for increment in engine.generate(request)]

    return asyncio.run(all_of_them())


def news(*beams: tuple[int, int, int, bool, list[int]]) -> dict[str, Any]:
    """A response: per beam tokens, prompt, first place, finished, ids."""
    rows = [[total, prompt, place, int(end), *ids] for total, prompt, place, end, ids in beams]
    width = max(map(len, rows))
    return {"news": np.array([[[*row, *[0] * (width - len(row))] for row in rows]], np.int32)}


def test_a_row_becomes_tensors() -> None:
    engine, server = backend(news((4, 3, 0, True, [5, 6, 7, 2])))
    generate(engine, replace(ROW, seed=-1, stop_ids=(8, 9), timeout=1.5))
    given = {name: value.tolist() for name, value in server.tensors.items()}
    assert given == {
        "input_ids": [[5, 6, 7]],
        "input_lengths": [[3]],
        "request_output_len": [[4]],
        "end_id": [[2]],
        "is_return_progress": [[True]],
        "random_seed": [[(1 << 64) - 1]],
        "runtime_top_k": [[0]],
        "runtime_top_p": [[1.0]],
        "temperature": [[1.0]],
        "stop_words_list": [[[8, 9], [1, 2]]],
    }
    declared = {tensor.name: tensor.dtype for tensor in CONTRACTS["GPT"].inputs}
    kinds = {"uint32": "UINT32", "int32": "INT32", "uint64": "UINT64", "bool": "BOOL"}
    kinds["float32"] = "FP32"
    for name, value in server.tensors.items():
        assert kinds[value.dtype.name] == declared[name]
    assert server.more == {"request_id": "mine", "timeout": 1_500_000}
    assert server.outputs == ["news"]


def test_cached_tokens_are_asked_of_models_that_count_them() -> None:
    response = news((4, 3, 0, True, [5, 6, 7, 2])) | {"num_cached_tokens": np.array([[16]])}
    engine, server = backend(response, caching=True)
    assert [each.num_cached_tokens for each in generate(engine)] == [16]
    assert server.outputs == ["news", "num_cached_tokens"]


def test_only_what_is_asked_for_is_sent() -> None:
    engine, server = backend(news((4, 3, 0, True, [5, 6, 7, 2])))
    generate(
        engine,
        replace(
            ROW,
            grammar='{"choice": ["é"]}'.encode(),
            min_p=0.25,
            repetition_penalty=2.0,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={3: 1.5, 4: -100.0},
            min_tokens=2,
            cache_salt=(1 << 64) - 1,
            num_speculative_tokens=4,
            end_id=None,
            client="c0ffee",
        ),
    )
    assert server.more["parameters"] == {"client": "c0ffee"}
    given = {name: value.tolist() for name, value in server.tensors.items()}
    assert bytes(given["guided_grammar"][0]).decode() == '{"choice": ["é"]}'
    assert given["min_p"] == [[0.25]]
    assert given["repetition_penalty"] == [[2.0]]
    # The model's own presence_penalty counts the prompt's tokens, too.
    assert given["output_presence_penalty"] == [[0.5]]
    assert "presence_penalty" not in given
    assert given["frequency_penalty"] == [[-0.5]]
    assert given["logit_bias_ids"] == [[3, 4]]
    assert given["logit_bias_values"] == [[1.5, -100.0]]
    assert given["min_length"] == [[2]]
    assert given["cache_salt"] == [[(1 << 64) - 1]]
    assert given["num_speculative_tokens"] == [[4]]
    assert given["end_id"] == [[NO_END_ID]]


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_p": 0.0}])
def test_greedy_is_the_likeliest_token(changes: dict[str, float]) -> None:
    engine, server = backend(news((4, 3, 0, True, [5, 6, 7, 2])))
    generate(engine, replace(ROW, **changes))
    assert server.tensors["runtime_top_k"].tolist() == [[1]]
    assert "temperature" not in server.tensors


def test_an_empty_prompt_is_its_start_token_alone() -> None:
    engine, server = backend(news((1, 0, 0, True, [2])))
    generate(engine, replace(ROW, prompt_ids=()))
    assert server.tensors["input_ids"].tolist() == [[0]]
    assert server.tensors["input_lengths"].tolist() == [[0]]


@pytest.mark.parametrize("model_type", ["T5", "BART"])
def test_an_encoder_decoder_has_other_names(model_type: str) -> None:
    engine, server = backend(news((1, 0, 0, True, [2])), model_type=model_type)
    generate(engine, replace(ROW, decoder_ids=(1, 9)))
    given = {name: value.tolist() for name, value in server.tensors.items()}
    assert given["sequence_length"] == [[3]]
    assert given["max_output_len"] == [[4]]
    assert given["decoder_input_ids"] == [[1, 9]]
    assert "input_lengths" not in given


def test_what_is_new_comes_in_increments() -> None:
    engine, _ = backend(
        news((5, 3, 0, False, [5, 6, 7, 10, 11])),
        news((6, 3, 5, False, [12])),
        news((7, 3, 6, True, [2])),
        {},
    )
    found = generate(engine)
    assert [increment.token_ids for increment in found] == [(10, 11), (12,), (2,)]
    assert [increment.finished for increment in found] == [False, False, True]


def test_log_probabilities_are_those_of_the_new_tokens() -> None:
    first = {
        **news((4, 3, 0, False, [5, 6, 7, 10])),
        "token_log_probs": np.array([[[-1.0, 0]]], np.float32),
        "token_ranks": np.array([[[1, 0]]], np.int32),
        "top_log_prob_ids": np.array([[[[10, 3], [0, 0]]]], np.int32),
        "top_log_probs": np.array([[[[-1.0, -2.0], [0, 0]]]], np.float32),
        "prompt_log_probs": np.array([[0.0, -3.0, -4.0]], np.float32),
        "prompt_ranks": np.array([[0, 5, 6]], np.int32),
        "prompt_top_ids": np.array([[[0, 0], [1, 2], [3, 4]]], np.int32),
        "prompt_top_log_probs": np.array([[[0, 0], [-0.5, -1.5], [-0.25, -2.0]]], np.float32),
    }
    second = {
        **news((5, 3, 4, True, [2])),
        "token_log_probs": np.array([[[-7.0]]], np.float32),
        "token_ranks": np.array([[[9]]], np.int32),
        "top_log_prob_ids": np.array([[[[8, 9]]]], np.int32),
        "top_log_probs": np.array([[[[-0.5, -4.0]]]], np.float32),
    }
    engine, server = backend(first, second)
    one, two = generate(engine, replace(ROW, log_probs=2, prompt_log_probs=2))
    assert server.tensors["num_log_probs"].tolist() == [[2]]
    assert server.tensors["num_prompt_log_probs"].tolist() == [[2]]
    assert one.log_probs == (TokenLogProb(10, -1.0, 1, ((10, -1.0), (3, -2.0))),)
    assert two.log_probs == (TokenLogProb(2, -7.0, 9, ((8, -0.5), (9, -4.0))),)
    assert one.prompt_log_probs == (
        None,
        TokenLogProb(6, -3.0, 5, ((1, -0.5), (2, -1.5))),
        TokenLogProb(7, -4.0, 6, ((3, -0.25), (4, -2.0))),
    )
    assert two.prompt_log_probs is None


def test_beams_come_at_the_end() -> None:
    engine, server = backend(
        news((4, 3, 0, False, [5, 6, 7, 10]), (4, 3, 0, False, [5, 6, 7, 11])),
        news((5, 3, 0, True, [5, 6, 7, 11, 2]), (4, 3, 0, True, [5, 6, 7, 10])),
    )
    found = generate(engine, replace(ROW, beam_width=2, length_penalty=0.5))
    assert [increment.beams for increment in found] == [(), ((11, 2), (10,))]
    assert server.tensors["beam_width"].tolist() == [[2]]
    assert server.tensors["len_penalty"].tolist() == [[0.5]]


def test_a_model_without_streams_answers_once() -> None:
    engine, _ = backend(news((5, 3, 0, True, [5, 6, 7, 10, 2])), streams=False)
    (increment,) = generate(engine)
    assert (increment.token_ids, increment.finished) == ((10, 2), True)


def test_an_added_adapter_is_loaded_before_its_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that has started again since it was added."""
    engine, server = backend(news((4, 3, 0, True, [5, 6, 7, 2])))
    replies: list[dict[str, Any]] = [{"error": "it is not there", "kind": ""}, {"number": 7}]
    operations = []

    async def operate(operation: Mapping[str, Any]) -> dict[str, Any]:
        operations.append(operation)
        return replies.pop(0)

    monkeypatch.setattr(engine, "operate", operate)
    row = replace(ROW, lora_adapter=1, added_lora=ServedLoRA("law", "/a", 1))
    with pytest.raises(ApiError, match="no adapter law: it is not there") as raised:
        generate(engine, row)
    assert raised.value.status == 503
    for _ in range(2):
        generate(engine, row)
        assert server.tensors["lora_task_id"].tolist() == [[7]]
    assert operations == [{"operation": "load_lora", "name": "law", "path": "/a"}] * 2


@pytest.mark.parametrize(
    ("changes", "tensor", "param"),
    [
        ({"min_p": 0.5}, "min_p", "min_p"),
        ({"presence_penalty": 1.0}, "output_presence_penalty", "presence_penalty"),
        ({"frequency_penalty": 1.0}, "frequency_penalty", "frequency_penalty"),
        ({"logit_bias": {1: 1.0}}, "logit_bias_ids", "logit_bias"),
        ({"grammar": b"{}"}, "guided_grammar", "response_format"),
        ({"log_probs": 0}, "num_log_probs", "logprobs"),
    ],
)
def test_models_of_an_earlier_export_are_named(
    changes: dict[str, Any], tensor: str, param: str
) -> None:
    engine, server = backend(without=[tensor])
    with pytest.raises(ApiError, match="export it again") as refused:
        generate(engine, replace(ROW, **changes))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert server.tensors == {}


def test_a_model_that_shares_nothing_is_told_no_salt() -> None:
    engine, server = backend(news((4, 3, 0, True, [5, 6, 7, 2])), without=["cache_salt"])
    generate(engine, replace(ROW, cache_salt=5))
    assert "cache_salt" not in server.tensors


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        ("StatusCode.INVALID_ARGUMENT", "ids outside of the vocabulary", 400),
        ("StatusCode.UNAVAILABLE", "512 rows are waiting", 503),
        ("StatusCode.UNAVAILABLE", "the request's timeout is over", 504),
        (None, "Request for unknown model: 'tiny' has no available versions", 503),
        ("StatusCode.CANCELLED", "the client cancelled the request", 503),
        ("StatusCode.INTERNAL", "a rank died", 500),
        ("StatusCode.INTERNAL", "Internal error from Core", 503),
    ],
)
def test_the_servers_errors_have_their_status(
    streams: bool, status: str | None, message: str, expected: int
) -> None:
    error = InferenceServerException(message, status)
    if streams:  # the text is all that comes; the token model writes the code before it
        code = (status or "").partition(".")[2].replace("INVALID_ARGUMENT", "INVALID_ARG")
        error = InferenceServerException(f"{code}: {message}")
    engine, _ = backend(error, streams=streams)
    with pytest.raises(ApiError) as failed:
        generate(engine, replace(ROW, timeout=9.0))
    assert failed.value.status == expected
    assert "INVALID_ARG:" not in failed.value.message
    assert ("Retry-After" in failed.value.headers) == (expected == 503)
    assert isinstance(failed.value, ServerLost) == (expected == 503)


@pytest.mark.parametrize(
    ("said", "param", "code"),
    [
        ("- input_ids has ids outside of the vocabulary", "prompt", "invalid_value"),
        ("- stop_words_list has ids outside of it", "stop_token_ids", "invalid_value"),
        ("- logit_bias_values is out of range", "logit_bias", "invalid_value"),
        ("guided_grammar cannot be followed: x", "guided_regex", "invalid_value"),
        (
            "the prompt's 3 tokens and request_output_len 9 need 11 positions, and the model has 8",
            "max_tokens",
            "context_length_exceeded",
        ),
        (
            "the prompt's 3 tokens and max_output_len 9 and beam_width 2 need 22 tokens in the "
            "key/value cache, which holds 8",
            "max_tokens",
            "context_length_exceeded",
        ),
        (
            "input_ids has 9 tokens, and the encoder has 8 positions",
            "prompt",
            "context_length_exceeded",
        ),
        ("decoder_input_ids has ids outside of it", None, "invalid_value"),
    ],
)
def test_what_the_model_refuses_is_named_as_the_client_calls_it(
    said: str, param: str | None, code: str
) -> None:
    engine, _ = backend(InferenceServerException(f"INVALID_ARG: {said}"))
    with pytest.raises(ApiError) as refused:
        sizes = {"prompt_ids": (5, 6, 7), "max_tokens": 9}
        generate(engine, replace(ROW, grammar=b"{}", grammar_parameter="guided_regex", **sizes))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    if code == "context_length_exceeded":
        assert "maximum context length is 8 tokens" in refused.value.message
    elif param is not None:
        assert param in refused.value.message


def test_a_beam_search_that_needs_more_than_the_cache_is_named() -> None:
    said = "max_output_len 9 and beam_width 8 need 88 tokens in the key/value cache, which holds 80"
    engine, _ = backend(InferenceServerException(f"INVALID_ARG: {said}"))
    with pytest.raises(ApiError) as refused:
        generate(engine, replace(ROW, max_tokens=9, beam_width=8))
    assert refused.value.code == "context_length_exceeded" and "88" in refused.value.message


def test_an_empty_prompt_has_no_log_probabilities() -> None:
    answer = {**news((1, 0, 0, True, [2])), "prompt_log_probs": np.zeros((1, 1), np.float32)}
    answer["prompt_ranks"] = np.zeros((1, 1), np.int32)
    engine, _ = backend(answer)
    (increment,) = generate(engine, replace(ROW, prompt_ids=(), prompt_log_probs=0))
    assert increment.prompt_log_probs == ()


def test_what_triton_itself_says_in_a_stream_is_that_it_takes_no_request() -> None:
    engine, _ = backend(InferenceServerException("Server is stopping: no new requests"))
    with pytest.raises(ServerLost, match="Server is stopping: no new requests"):
        generate(engine)


def test_a_call_that_has_its_last_token_ends_by_itself() -> None:
    """Its end and its cancellation at the same time have made servers die."""
    last = news((5, 3, 0, True, [5, 6, 7, 10, 2]))
    engine, server = backend(news((4, 3, 0, False, [5, 6, 7, 10])), last, {})

    async def until_finished() -> None:
        async with aclosing(engine.generate(ROW)) as increments:
            async for increment in increments:
                assert server.finished == increment.finished
                if increment.finished:
                    return

    asyncio.run(until_finished())
    assert server.finished


def test_a_whole_answer_is_one_though_the_server_dies_after_it() -> None:
    last = news((5, 3, 0, True, [5, 6, 7, 10, 2]))
    engine, _ = backend(last, InferenceServerException("Stream removed", "StatusCode.UNAVAILABLE"))
    (increment,) = generate(engine)
    assert increment.finished


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    engine, _ = backend(news((5, 3, 0, False, [5, 6, 7, 10, 11])))
    with pytest.raises(ApiError, match="too early") as failed:
        generate(engine)
    assert failed.value.status == 502
