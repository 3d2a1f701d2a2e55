"""Large requests: their work is done by threads of their client, and what they keep is bounded."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from launcher_scripts.gateway import app as gateway_app
from launcher_scripts.gateway import parameters
from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.app import make_app
from launcher_scripts.gateway.generation import RequestRecord
from launcher_scripts.gateway.middleware import BodyBudget, Keys
from tests.gateway.fakes import SETTINGS, FakeBackend, client_of, served

MANY = 60_000
WRONG = {
    "/v1/chat/completions": {"messages": [{"role": 1}] * MANY},
    "/v1/completions": {"prompt": "a", "stop": [1] * MANY},
    "/v1/responses": {"input": [{"type": "message", "role": "user", "content": 1}] * (MANY // 4)},
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": 1}] * (MANY // 3)},
    "/v1/embeddings": {"input": [1] * MANY + [{}]},
    "/detokenize": {"tokens": ["a"] * MANY},
    "/tokenize": {"messages": [{"role": "user", "content": [{"type": "x"}]}] * (MANY // 4)},
}


@pytest.mark.parametrize("path", WRONG)
def test_many_errors_are_told_by_a_few(path: str) -> None:
    """Each would be compared with all others."""
    response = client_of(served(FakeBackend()), max_body=4 << 20).post(path, json=WRONG[path])
    assert response.status_code == 400
    assert len(response.json()["error"]["message"]) < 1000


def test_schemas_with_many_dependent_properties_are_read_in_time() -> None:
    """Each added to a list that was copied for all of them."""
    names = {f"{number:x}": [] for number in range(20_000)}
    schema = {"type": "object", "dependentRequired": names}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"prompt": "a", "max_tokens": 1, "response_format": form}
    backend = FakeBackend()
    assert client_of(served(backend)).post("/v1/completions", json=body).status_code == 200
    assert json.loads(backend.requests[0].grammar)["json_schema"] == schema


def test_warnings_with_a_clients_words_are_one_short_header() -> None:
    formats = [{"type": "string", "format": f"é☃\r\nSet-Cookie: {number}"} for number in range(999)]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anyOf": formats}}}
    body = {"prompt": "a", "max_tokens": 1, "response_format": form}
    response = client_of(served(FakeBackend())).post("/v1/completions", json=body)
    assert response.status_code == 200 and "set-cookie" not in response.headers
    warning = response.headers["X-Warning"]
    assert warning.startswith(r"response_format: the format \xe9\u2603\r\nSet-Cookie: 0 is ignored")
    assert len(warning) <= 1000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_others_are_answered_while_a_large_body_is_parsed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing it, and each of its conversions, is done by a thread."""
    parse, validate = parameters.parse_body, parameters.validated
    started, gate, threads = threading.Event(), threading.Event(), set()

    def slow(body: bytes) -> Any:
        started.set()
        assert gate.wait(60)
        return parse(body)

    def observed(*arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return validate(*arguments)

    monkeypatch.setattr(parameters, "parse_body", slow)
    for name in ("parameters", "responses", "messages"):
        monkeypatch.setattr(f"launcher_scripts.gateway.{name}.validated", observed)
    messages, ignored = [{"role": "user", "content": "a"}], {"a": "b" * 20_000}
    values = {"messages": messages, "max_tokens": 1, "metadata": ignored}
    if path == "/v1/responses":
        values = {"input": messages, "metadata": ignored}

    async def main() -> None:
        transport = httpx.ASGITransport(make_app([served(FakeBackend())], SETTINGS))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            large = asyncio.create_task(client.post(path, json=values))
            assert await asyncio.to_thread(started.wait, 60)
            assert (await client.get("/health")).status_code == 200
            assert not large.done()
            gate.set()
            response = await large
            assert response.status_code == 200, response.text

    asyncio.run(main())
    assert threads and threading.main_thread() not in threads


def test_the_bodies_of_one_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_app, "MAX_BODIES", 2)
    backend = FakeBackend(waits=True)
    app = make_app([served(backend)], SETTINGS, Keys({"alice": "a", "bob": "b"}))
    size = SETTINGS.max_body * 3 // 4
    body = {"prompt": "Hello", "max_tokens": 4, "user": "u" * size}

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            def post(key: str) -> asyncio.Task[httpx.Response]:
                headers = {"Authorization": f"Bearer {key}"}
                return asyncio.create_task(
                    client.post("/v1/completions", json=body, headers=headers)
                )

            tasks = [post("a"), post("a"), post("b")]
            while backend.running < 3:
                await asyncio.sleep(0.01)
            refused = await post("a")
            assert refused.status_code == 429 and "bodies" in refused.json()["error"]["message"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while backend.running:
                await asyncio.sleep(0.01)
            assert not app.state.gateway.bodies._bytes

    asyncio.run(main())


def test_a_budget_counts_parts_and_forgets_what_has_ended() -> None:
    budget = BodyBudget(10)
    first, second = (RequestRecord(name, "client") for name in ("a", "b"))
    budget.add(first, 4)
    budget.add(second, 4)
    with pytest.raises(ApiError, match="have 8 bytes"):
        budget.add(second, 4)
    budget.add(RequestRecord("c", "another"), 10)
    budget.remove(first)
    budget.remove(first)
    budget.add(second, 6)


def test_the_description_of_the_interface_is_made_once() -> None:
    client = client_of(served(FakeBackend()))
    first = client.get("/openapi.json")
    gateway = client.app.state.gateway
    assert first.json()["paths"] and gateway._document is gateway._document
    assert client.get("/openapi.json").content == first.content == gateway._document
