"""/v1/responses over an engine that answers as told, as OpenAI's own client reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.fakes import CHATML, GPT2, FakeBackend, saying
from tests.gateway.test_chat import chat_client
from tests.gateway.test_completions import IDS, WORDS
from tests.gateway.test_tool_calls import BERLIN, TOOLS, hermes

responses = pytest.importorskip("openai.types.responses")
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
    from launcher_scripts.gateway.chat_template import ChatTemplate

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
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"background": True}, "background", "unless it is false"),
        ({"text": 5}, "text", "expected an object"),
        ({"input": []}, "input", "at least 1"),
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
