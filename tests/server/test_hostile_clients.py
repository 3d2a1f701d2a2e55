"""What strangers send to a server: each gets an error of its own, and the server stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.http_requests import send
from tests.server.processes import RunningStep, running
from tests.server.repositories import NO_TEXT, export
from tests.server.requests import Client, Stream, generated, ids_request, text_rows

pytestmark = pytest.mark.usefixtures("tritonserver")

MANY = 120_000
IDS = {"input_ids": [3, 4], "input_lengths": 2, "request_output_len": 8}


@pytest.fixture
def served(shared_server: RunningStep) -> dict[str, Any]:
    """A server that must live to the end of these tests."""
    return shared_server.ready


def post(served: dict[str, Any], path: str, body: bytes | dict[str, Any]) -> tuple[int, Any]:
    """Status and answer of a POST below /v2/models."""
    response = send(f"{served['http']}/v2/models/{path}", body)
    return response.status_code, response.json()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * MANY,
        b'{"":' * MANY,
        b'{"parameters":{"a":' + b"[" * MANY + b"1" + b"]" * MANY + b"}}",
        b'{"inputs":[{"name":"input_ids","datatype":"UINT32","shape":[1,1],"data":'
        + (b"[" * MANY + b"1" + b"]" * MANY + b"}]}"),
    ],
    ids=["brackets", "braces", "a parameter", "a tensor's data"],
)
@pytest.mark.parametrize("path", ["plain/infer", "plain/generate", "plain_text/generate"])
def test_deep_json_is_an_error(served: dict[str, Any], path: str, body: bytes) -> None:
    status, answer = post(served, path, body)
    assert status in (400, 500) and "error" in answer
    assert post(served, "plain_text/generate", {"text_input": "a", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("missing", ["input_ids", "input_lengths", "request_output_len"])
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_missing_input_is_named_beside_optional_ones(
    served: dict[str, Any], transport: str, missing: str
) -> None:
    more = {"runtime_top_k": 3, "temperature": 1.0, "random_seed": 7}
    tensors = ids_request([(3, 4)], 2, **more)
    del tensors[missing]
    with Client(served, transport) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("plain", **tensors)
    assert f"required inputs are missing: {missing}" in str(caught.value)
    assert ".py" not in str(caught.value)
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_parameters_are_inputs_of_their_names(served: dict[str, Any], transport: str) -> None:
    """Triton itself makes inputs of them in /generate, but not here."""
    parameters = {"runtime_top_k": 40, "random_seed": 11, "is_return_log_probs": True}
    tensors = ids_request([(3, 4), (5, 6)], 8)
    with Client(served, transport) as client:
        given = client.infer("plain", sequence={"parameters": parameters}, **tensors)
        sampled = client.infer("plain", **ids_request([(3, 4), (5, 6)], 8, **parameters))
        greedy = client.infer("plain", **tensors)
    assert given["output_ids"].tolist() == sampled["output_ids"].tolist()
    assert given["cum_log_probs"].tolist() == sampled["cum_log_probs"].tolist()
    assert generated(sampled) != generated(greedy)


def test_parameters_of_a_text_request(served: dict[str, Any]) -> None:
    text = {"text_input": text_rows("Hello the"), "max_tokens": np.array([[12]], np.int32)}
    more = {"top_k": 40, "random_seed": 3, "stop_words": "e"}
    body = {"text_input": "Hello the", "max_tokens": 12, **more}
    prompt = {"QUERY": text_rows("Hello the"), "REQUEST_OUTPUT_LEN": np.array([[5]], np.uint32)}
    words = {"STOP_WORDS_DICT": "e"}
    with Client(served, "grpc") as client:
        given = client.infer("plain_text", sequence={"parameters": more}, **text)
        encoded = client.infer("plain_preprocessing", sequence={"parameters": words}, **prompt)
    for each in (body, {**body, "id": "7", "parameters": {"temperature": 1}}):
        assert post(served, "plain_text/generate", each)[1]["text_output"] == given["text_output"][
            0
        ].decode("utf-8")
    assert encoded["STOP_WORDS_IDS"].shape[1] == 2 and encoded["STOP_WORDS_IDS"].max() > 1


@pytest.mark.parametrize(
    ("model", "parameters", "reason"),
    [
        ("plain", {"temperatur": 1}, "unknown parameter; got 'temperatur'; choices: beam_search_"),
        ("plain", {"runtime_top_k": -1}, "the parameter runtime_top_k takes UINT32; got -1"),
        ("plain", {"is_return_log_probs": 1}, "is_return_log_probs takes BOOL; got 1"),
        ("plain", {"random_seed": 7}, "random_seed came as an input and as a parameter; send one"),
        ("plain", {"input_ids": 3}, "unknown parameter; got 'input_ids'"),
        ("plain_text", {"max_token": 3}, "unknown parameter; got 'max_token'"),
        ("plain_text", {"temperature": "hot"}, "temperature takes FP32; got 'hot'"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(
    served: dict[str, Any], model: str, parameters: dict[str, Any], reason: str
) -> None:
    text = {"text_input": text_rows("Hello the"), "max_tokens": np.array([[12]], np.int32)}
    tensors = text if model == "plain_text" else ids_request([(3, 4)], 2, random_seed=1)
    with Client(served, "http") as client, pytest.raises(InferenceServerException) as caught:
        client.infer(model, sequence={"parameters": parameters}, **tensors)
    assert (caught.value.status(), reason in str(caught.value)) == ("400", True), caught.value


@pytest.mark.parametrize("model", ["plain", "plain_ensemble"])
def test_keys_of_generate_that_mean_nothing_are_refused(served: dict[str, Any], model: str) -> None:
    body = IDS if model == "plain" else {"INPUT_0": "Hello the", "INPUT_1": 3}
    for more in ({"temperatur": 1.5}, {"parameters": {"temperatur": 1.5}}):
        status, answer = post(served, f"{model}/generate", {**body, **more})
        assert (status, "got 'temperatur'" in answer["error"]) == (400, True), answer
    status, answer = post(served, f"{model}/generate", {**body, "timeout": "now"})
    assert (status, "timeout takes microseconds" in answer["error"]) == (400, True), answer


def test_the_timeout_of_generate_holds(served: dict[str, Any]) -> None:
    body = {**IDS, "request_output_len": 8000, "min_length": 8000, "timeout": 1}
    _, answer = post(served, "plain/generate", body)
    assert answer == {"error": "the request's timeout is over"}


def test_an_empty_batch_is_an_error(served: dict[str, Any]) -> None:
    tensors = ids_request([(3, 4)], 2)
    empty = {name: values[:0] for name, values in tensors.items()}
    with Client(served, "grpc") as client, pytest.raises(InferenceServerException):
        client.infer("plain", **{name: np.ascontiguousarray(v) for name, v in empty.items()})


def test_one_client_s_requests_do_not_pile_up(tmp_path: Path) -> None:
    """Hundreds on a stream whose answers nobody reads: most are refused, others are served."""
    settings = export(tmp_path, decoupled=True, tokenizer=NO_TEXT)
    with running(tmp_path / "job", settings.model_repository, max_waiting_rows=4) as step:
        ready = step.wait_until_ready()
        with Stream(ready) as flood:
            for _ in range(600):
                flood.send("tiny", **ids_request([(3, 4)], 60))
            refused = 0
            for _ in range(600):
                try:
                    while not flood.next()[1]:
                        pass
                except InferenceServerException as error:
                    assert "too many rows wait for this model" in str(error)
                    refused += 1
            assert refused > 0
            assert flood.ask("tiny", **ids_request([(3, 4)], 4))
        assert step.stop() == 0, step.err
