"""OpenAI's and Anthropic's own clients call a tool and send its result back, on every route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.clients.scripted import ANSWER, GREETING, MODEL, instance, scripted_app, serving

QUESTION = "How warm is it?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "temperature", "description": "of a city", "parameters": PARAMETERS}
FORM = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}


def temperature(arguments: str) -> str:
    return f"20 C in {json.loads(arguments)['city']}"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(scripted_app()[0]) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [False, True])
def test_a_tool_in_a_chat(client: Any, stream: bool, form: bool) -> None:
    """Each answer goes back as the client's own object, with all its nulls."""
    body: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}]}
    if form:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "p", "schema": FORM},
        }

    def ask(messages: list[Any]) -> Any:
        if not stream:
            return client.chat.completions.create(messages=messages, **body).choices[0].message
        with client.chat.completions.stream(messages=messages, **body) as events:
            return events.get_final_completion().choices[0].message

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = ask(messages)
    assert not message.content
    (call,) = message.tool_calls
    result = temperature(call.function.arguments)
    messages += [
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    expected = json.dumps(instance(FORM)) if form else ANSWER + "20 C in Rome"
    assert ask(messages).content == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_in_a_response(client: Any, stream: bool) -> None:
    tools = [{"type": "function", **FUNCTION, "strict": False}, {"type": "web_search"}]

    def ask(items: list[Any]) -> Any:
        body = {"model": MODEL, "input": items, "tools": tools, "store": False}
        if not stream:
            return client.responses.create(**body)
        with client.responses.stream(**body) as events:
            return events.get_final_response()

    items: list[Any] = [{"role": "user", "content": QUESTION}]
    response = ask(items)
    (call,) = response.output
    items += [item.model_dump() for item in response.output]
    result = {"call_id": call.call_id, "output": temperature(call.arguments)}
    assert ask([*items, {"type": "function_call_output", **result}]).output_text == (
        ANSWER + "20 C in Rome"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_in_a_message(address: str, stream: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    tool = {"name": "temperature", "input_schema": PARAMETERS, "cache_control": {"type": "any"}}
    tools = [tool, {"type": "web_search_20250305", "name": "web_search"}]

    def ask(messages: list[Any]) -> Any:
        body = {"model": MODEL, "max_tokens": 200, "messages": messages, "tools": tools}
        if not stream:
            return client.messages.create(**body)
        with client.messages.stream(**body) as events:
            return events.get_final_message()

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = ask(messages)
    (call,) = message.content
    assert (message.stop_reason, call.input) == ("tool_use", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 C in Rome"}
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert ask(messages).content[0].text == ANSWER + "20 C in Rome"


def test_it_greets_without_tools_and_calls_the_one_in_the_question(client: Any) -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION)
    assert answer.output_text == GREETING
    tools = [
        {"type": "function", "name": name, "parameters": PARAMETERS} for name in ("first", "second")
    ]
    question = 'Call second with {"city": "Oslo"}'
    (call,) = client.responses.create(model=MODEL, input=question, tools=tools).output
    assert (call.name, json.loads(call.arguments)) == ("second", {"city": "Oslo"})
    assert instance({"anyOf": [{"$ref": "#/$defs/A"}]}, {"$defs": {"A": {"enum": [3]}}}) == 3
