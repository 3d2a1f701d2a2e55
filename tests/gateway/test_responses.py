"""/v1/responses over an engine that answers as told, as OpenAI's own client reads it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from launcher_scripts.gateway.served_model import ChatTemplate
from tests.gateway.fakes import CHATML, GPT2, FakeBackend, client_of, saying, served, until
from tests.gateway.test_chat import ROOM, chat_client
from tests.gateway.test_completions import IDS, WORDS
from tests.gateway.test_tool_calls import BERLIN, TOOLS, hermes
from tests.lazy_modules import LazyModule

responses = LazyModule("openai.types.responses")
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ROUTE = "/v1/responses"


def asked(backend: FakeBackend, **body: Any) -> Any:
    answer = chat_client(backend).post(ROUTE, json={"input": "Hi", **body})
    assert answer.status_code == 200, answer.text
    return responses.Response.model_validate(answer.json())


def streamed(backend: FakeBackend, **body: Any) -> list[dict[str, Any]]:
    """The events of an answer, each by its name, numbered, and as OpenAI's client takes it."""
    client = chat_client(backend)
    answer = client.post(ROUTE, json={"input": "Hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    found = []
    for number, event in enumerate(answer.text.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        said = json.loads(data.removeprefix("data: "))
        assert name == f"event: {said['type']}" and said["sequence_number"] == number
        found.append(said)
    return found


def test_an_answer_whole() -> None:
    backend = FakeBackend()
    answer = asked(backend, instructions="Be short.", max_output_tokens=40, metadata={"a": "b"})
    assert (answer.status, answer.output_text, answer.store) == ("completed", WORDS, False)
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert answer.usage.output_tokens == len(IDS) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + len(IDS) + 1
    assert answer.metadata == {"a": "b"} and answer.instructions == "Be short."
    (request,) = backend.requests
    assert request.max_tokens == 40
    text = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert GPT2.decode(request.prompt_ids) == text + "<|im_start|>assistant\n"


def test_cached_tokens_are_counted() -> None:
    answer = asked(FakeBackend(cached=lambda _: 3))
    assert answer.usage.input_tokens_details.cached_tokens == 3


def test_what_agents_send_beside_the_conversation_is_taken() -> None:
    notes = {"store": False, "prompt_cache_key": "a", "safety_identifier": "b"}
    notes |= {"service_tier": "auto", "metadata": {"a": "b"}}
    more = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    assert asked(saying("Hi"), **notes, **more).metadata == {"a": "b"}
    client = chat_client(saying("Hi"))
    body = {"messages": [{"role": "user", "content": "Hi"}], **notes}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_an_answer_that_was_cut_off() -> None:
    answer = asked(FakeBackend(), max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


def test_a_conversation_with_calls_becomes_messages() -> None:
    backend, seen = FakeBackend(), []
    client = chat_client(backend)
    call = {"type": "function_call", "call_id": "a", "name": "clock", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "One"},
        {"role": "user", "content": [{"type": "input_text", "text": "Two"}]},
        {"type": "reasoning_is_unknown"},
    ]
    wrong = client.post(ROUTE, json={"input": items})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input"
    items[2:] = [
        {**call, "id": "fc_1", "status": "completed"},
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "noon"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "Noon.", "annotations": []}],
        },
    ]
    template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    model = chat_client(backend, template=template_of(template))
    assert model.post(ROUTE, json={"input": items}).status_code == 200
    seen = [json.loads(line) for line in GPT2.decode(backend.requests[-1].prompt_ids).splitlines()]
    assert [each["role"] for each in seen] == ["system", "user", "assistant", "tool", "assistant"]
    assert seen[1]["content"] == "Two" and seen[3] == {
        "role": "tool",
        "tool_call_id": "a",
        "content": "noon",
    }
    assert [each["id"] for each in seen[2]["tool_calls"]] == ["a", "b"]
    assert seen[2]["tool_calls"][0]["function"] == {"name": "clock", "arguments": {}}


def template_of(text: str) -> Any:
    from launcher_scripts.gateway.served_model import ChatTemplate

    return ChatTemplate({"default": text or CHATML}, {})


def test_a_stream() -> None:
    found = streamed(FakeBackend())
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert {*kinds[4:-4]} == {"output_text.delta"}
    assert "".join(event["delta"] for event in found[4:-4]) == WORDS
    whole = responses.Response.model_validate(found[-1]["response"])
    assert whole.output_text == WORDS and whole.usage.output_tokens == len(IDS) + 1
    assert found[0]["response"]["status"] == "in_progress" and not found[0]["response"]["output"]


def test_a_stream_without_text_has_an_empty_message() -> None:
    found = streamed(saying(""))
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(stream: bool) -> None:
    backend = saying("Wait. " + hermes("weather", BERLIN) + hermes("clock", {}))
    body = {"tools": FLAT, "max_output_tokens": 500}
    if stream:
        events = streamed(backend, **body)
        answer = responses.Response.model_validate(events[-1]["response"])
        deltas = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
        assert [json.loads(delta) for delta in deltas] == [BERLIN, {}]
    else:
        answer = asked(backend, **body)
    message, first, second = answer.output
    assert message.content[0].text == "Wait. "
    assert (first.type, first.name, json.loads(first.arguments)) == (
        "function_call",
        "weather",
        BERLIN,
    )
    assert second.name == "clock" and {first.status, second.status} == {"completed"}


def test_a_function_that_must_be_called_and_a_form() -> None:
    backend = saying(json.dumps(BERLIN))
    answer = asked(backend, tools=FLAT, tool_choice={"type": "function", "name": "weather"})
    assert [item.name for item in answer.output] == ["weather"]
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "found", "schema": schema}
    answer = asked(backend, text={"format": form})
    assert json.loads(backend.requests[-1].grammar) == {"json_schema": schema}
    assert answer.text.format.name == "found"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"background": True}, "background", "unless it is false"),
        ({"text": 5}, "text", "expected an object"),
        ({"input": []}, "input", "it is empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "maximum context length is"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "tools",
        ),
        ({"tools": [{}]}, "tools", '"name": ...'),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "name"),
        ({"tools": [{"type": "function"}]}, "tools", "name"),
    ],
)
def test_wrong_parameters_are_named(body: dict[str, Any], param: str, words: str) -> None:
    answer = chat_client(FakeBackend()).post(ROUTE, json={"input": "Hi", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def keyed(key: str) -> dict[str, str]:
    return {"X-Api-Key": key}


def storing(backend: FakeBackend, template: str = CHATML, **settings: Any) -> TestClient:
    """A gateway with two keys that stores responses."""
    values = {"max_stored_responses": 3, **settings}
    model = served(backend, max_len=ROOM, template=ChatTemplate({"default": template}, {}))
    return client_of(model, keys={"alice": "a", "bob": "b"}, **values)


def begun(client: TestClient, key: str = "a", **body: Any) -> dict[str, Any]:
    answer = client.post(ROUTE, json={"input": "Hi", **body}, headers=keyed(key))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_stored_response_is_read_continued_and_deleted() -> None:
    backend = FakeBackend()
    client = storing(backend)
    first = begun(client, instructions="Be short.")
    assert first["store"] is True and first["previous_response_id"] is None
    path = f"{ROUTE}/{first['id']}"
    assert client.get(path, headers=keyed("a")).json() == first
    more = begun(client, input="And?", previous_response_id=first["id"])
    assert more["previous_response_id"] == first["id"]
    chat = [("user", "Hi"), ("assistant", WORDS), ("user", "And?")]
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in chat)
    assert GPT2.decode(backend.requests[-1].prompt_ids) == text + "<|im_start|>assistant\n"
    # Each has its conversation, so that the first is no longer needed.
    answer = client.delete(path, headers=keyed("a"))
    assert answer.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert client.get(path, headers=keyed("a")).status_code == 404
    assert client.delete(path, headers=keyed("a")).status_code == 404
    again = begun(client, input="Why?", previous_response_id=more["id"], stream=False)
    assert GPT2.decode(backend.requests[-1].prompt_ids).count("<|im_start|>user") == 3
    assert client.get(f"{ROUTE}/{again['id']}?stream=true", headers=keyed("a")).status_code == 400


def test_calls_are_a_part_of_a_stored_conversation() -> None:
    backend = saying(hermes("weather", BERLIN))
    client = storing(backend, "{{ messages | tojson }}")
    first = begun(client, tools=FLAT)
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "9"}
    begun(client, input=[output], previous_response_id=first["id"])
    seen = json.loads(GPT2.decode(backend.requests[-1].prompt_ids))
    assert [message["role"] for message in seen] == ["user", "assistant", "tool"]
    assert seen[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": BERLIN}


def test_the_last_event_of_a_stream_is_what_is_stored() -> None:
    client = storing(FakeBackend())
    text = client.post(ROUTE, json={"input": "Hi", "stream": True}, headers=keyed("a")).text
    last = json.loads(text.rstrip().rpartition("data: ")[2])["response"]
    assert client.get(f"{ROUTE}/{last['id']}", headers=keyed("a")).json() == last


def test_a_response_is_its_clients_alone() -> None:
    client = storing(FakeBackend())
    same = {"X-Request-Id": "mine"}
    (first, second) = (
        client.post(ROUTE, json={"input": said}, headers={**keyed(key), **same}).json()
        for key, said in (("a", "Hi"), ("b", "Ho"))
    )
    assert first["id"] == second["id"] == "resp_mine"
    path = f"{ROUTE}/{first['id']}"
    assert client.delete(path, headers=keyed("b")).status_code == 200
    assert client.get(path, headers=keyed("a")).json() == first
    for answer in (
        client.get(path, headers=keyed("b")),
        client.delete(path, headers=keyed("b")),
        client.post(f"{path}/cancel", headers=keyed("b")),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    body = {"input": "Hi", "previous_response_id": first["id"]}
    error = client.post(ROUTE, json=body, headers=keyed("b")).json()["error"]
    assert (error["code"], error["param"]) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    assert client.get(path).status_code == 401


def test_stored_responses_are_bounded() -> None:
    client = storing(FakeBackend())
    ids = [begun(client)["id"] for _ in range(5)]
    states = [client.get(f"{ROUTE}/{each}", headers=keyed("a")).status_code for each in ids]
    assert states == [404, 404, 200, 200, 200]
    store = client.app.state.gateway._stored
    assert store._size == sum(each.size for each in store._stored.values())
    assert begun(client, store=False)["store"] is False
    assert len(store._stored) == 3
    (size, *_) = (each.size for each in store._stored.values())
    client = storing(FakeBackend(), max_stored_bytes=2 * size + 50)
    ids = [begun(client)["id"] for _ in range(3)]
    store = client.app.state.gateway._stored
    assert [key[1] for key in store._stored] == ids[1:] and not store._running
    assert begun(client, metadata={"a": "b" * 3 * size})["store"] is False
    assert [key[1] for key in store._stored] == ids[1:]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_in_progress_is_read_and_cancelled(stream: bool) -> None:
    async def main() -> None:
        backend = FakeBackend(waits=True)
        app = storing(backend).app
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {**keyed("a"), "X-Request-Id": "mine"}
            body = {"input": "Hi", "stream": stream}
            post = asyncio.ensure_future(client.post(ROUTE, json=body, headers=headers))
            await until(lambda: backend.running)
            path = f"{ROUTE}/resp_mine"
            shown = (await client.get(path, headers=keyed("a"))).json()
            assert (shown["status"], shown["store"]) == ("in_progress", True)
            assert (await client.post(f"{path}/cancel", headers=keyed("b"))).status_code == 404
            answer = await client.post(f"{path}/cancel", headers=keyed("a"))
            assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
            ended = await post
            assert ended.status_code == (200 if stream else 409)
            assert "response_cancelled" in ended.text
            await until(lambda: not backend.running)
            again = (await client.get(path, headers=keyed("a"))).json()
            assert again == answer.json() and responses.Response.model_validate(again)
            error = await client.post(f"{path}/cancel", headers=keyed("a"))
            assert (error.status_code, error.json()["error"]["param"]) == (400, "response_id")
        gateway = app.state.gateway
        assert not gateway.life.working and not gateway._stored._running

    asyncio.run(main())
