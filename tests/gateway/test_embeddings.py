"""/v1/embeddings over an encoder that answers as told, as OpenAI's own client reads it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from launcher_scripts.clients.async_connection import ServerFailure
from launcher_scripts.common.tokenizer import SpecialIds
from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.backend import Increment, RowRequest
from launcher_scripts.gateway.triton_backend import TritonBackend
from tests.gateway.fakes import GPT2, FakeBackend, client_of, listening, served
from tests.lazy_modules import LazyModule

openai = LazyModule("openai")
ROUTE = "/v1/embeddings"


@dataclass(eq=False)
class FakeEncoder(FakeBackend):
    """The states of a token are made of its id."""

    async def _increments(self, request: RowRequest) -> AsyncIterator[Increment]:
        if self.waits:
            await asyncio.Event().wait()
        yield Increment(finished=True, states=states(request.prompt_ids))


def states(ids: Any) -> Any:
    return np.float32([[token, 1, -token / 2] for token in ids])


def encoder(backend: FakeBackend | None = None, **more: Any) -> Any:
    values = {"embeds": True, "encodes": True, "special": SpecialIds(closing=(7,)), "max_len": 8}
    return served(backend or FakeEncoder(), "encoder", template=None, **{**values, **more})


def mean(ids: Any) -> Any:
    return states(ids).mean(axis=0)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with listening(client_of(encoder(), served(FakeBackend(), "text")).app) as address:
        yield openai.OpenAI(base_url=address + "v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_texts_become_the_means_of_their_tokens_states(client: Any, encoding: str | None) -> None:
    """OpenAI's client itself asks for base64 where nothing is said, and decodes it."""
    more = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="encoder", input=["Hello", "One two"], **more)
    assert [each.index for each in answer.data] == [0, 1]
    ids = [[*GPT2.encode(text), 7] for text in ("Hello", "One two")]
    for each, expected in zip(answer.data, map(mean, ids), strict=True):
        vector = each.embedding
        if encoding == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        np.testing.assert_array_equal(np.float32(vector), expected)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))


def test_ids_dimensions_and_length(client: Any) -> None:
    def vectors(given: Any, **more: Any) -> list[Any]:
        answer = client.embeddings.create(model="encoder", input=given, extra_body=more)
        return [np.float32(each.embedding) for each in answer.data]

    np.testing.assert_array_equal(vectors([5, 6])[0], mean([5, 6]))
    np.testing.assert_array_equal(vectors([[5], [6]], dimensions=2), [mean([5])[:2], mean([6])[:2]])
    (unit,) = vectors("Hello", normalize=True, add_special_tokens=False)
    expected = mean(GPT2.encode("Hello"))
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"dimensions": 4}, "dimensions", "has 3 dimensions"),
        ({"dimensions": 0}, "dimensions", "greater"),
        ({"input": []}, "input", "a list of texts"),
        ({"input": ["a", [1]]}, "input", "a list of texts"),
        ({"input": "", "add_special_tokens": False}, "input", "empty"),
        ({"input": [5] * 9}, "input", "maximum context length is 8 tokens"),
        ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"model": "other"}, "model", "there is no model"),
    ],
)
def test_wrong_parameters_are_named(body: dict[str, Any], param: str, words: str) -> None:
    request = {"input": "Hello", "model": "encoder", **body}
    answer = client_of(encoder(), served(FakeBackend())).post(ROUTE, json=request)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_encoders_and_models_that_generate_have_their_own_routes() -> None:
    client = client_of(encoder(), served(FakeBackend(), "text"))
    answer = client.post(ROUTE, json={"model": "text", "input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_embeddings")
    assert "encoders are: encoder" in answer.json()["error"]["message"]
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions/render", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 1}),
    ):
        answer = client.post(path, json={"model": "encoder", **body})
        assert answer.status_code == 400, path
        assert "/v1/embeddings" in answer.json()["error"]["message"]


def test_a_request_has_its_time_and_frees_its_places() -> None:
    client = client_of(encoder(backend=FakeEncoder(waits=True)), request_timeout=0.05)
    assert client.post(ROUTE, json={"input": ["a", "b"]}).status_code == 504
    gateway = client.app.state.gateway
    assert (gateway.admission.running, gateway.life.working) == (0, 0)


class FakeServer:
    """One encoder behind Triton."""

    address = "node0:8001"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.tensors: dict[str, Any] = {}

    async def infer(self, _: str, tensors: Any, outputs: Any, **more: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.tensors = tensors
        assert outputs == ["output_hidden_state"] and more == {"request_id": "a"}
        return {"output_hidden_state": states([1, 2])[None].astype(np.float16)}

    async def stream(self, *arguments: Any, **more: Any) -> AsyncIterator[Any]:
        yield await self.infer(*arguments, **more)
        yield {}


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_encoder_behind_triton(decoupled: bool) -> None:
    inputs = [("input_ids", "UINT32"), ("sequence_length", "UINT32"), ("ia3_tasks", "INT32")]
    config = {
        "name": "encoder",
        "input": [{"name": name, "data_type": f"TYPE_{kind}"} for name, kind in inputs],
        "output": [{"name": "output_hidden_state", "data_type": "TYPE_FP16"}],
        "model_transaction_policy": {"decoupled": decoupled},
    }
    request = RowRequest("a", (5, 6), 0)

    async def encode(server: Any) -> list[Increment]:
        return [each async for each in TritonBackend(server, config).generate(request)]

    server = FakeServer()
    (increment,) = asyncio.run(encode(server))
    np.testing.assert_array_equal(increment.states, states([1, 2]))
    assert increment.states.dtype == np.float32 and increment.finished
    assert server.tensors["input_ids"].tolist() == [[5, 6]]
    assert server.tensors["sequence_length"].tolist() == [[2]]
    with pytest.raises(ApiError):
        asyncio.run(encode(FakeServer(ServerFailure("the server is gone", "UNAVAILABLE"))))
