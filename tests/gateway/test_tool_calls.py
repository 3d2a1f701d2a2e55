"""Calls of tools, as the text of an answer has them and as OpenAI's clients get them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.harmony import HarmonyText
from launcher_scripts.gateway.tool_calls import ToolText, schema_of_any, schema_of_one
from tests.gateway.fakes import GPT2, FakeBackend, saying
from tests.gateway.test_chat import HI, chat_client, refused
from tests.gateway.test_completions import events

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "code": {"type": "string"}},
            "required": ["city"],
            "$defs": {"City": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
BERLIN, PARIS = {"city": "Berlin"}, {"city": "Paris"}


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def llama(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def deepseek(call: str) -> str:
    """A call between DeepSeek's marks, which have a wide bar, and a block for a blank."""
    text = f"<|tool_calls_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_end|>"
    return (
        text.replace("|", "\uff5c")
        .replace("tool_calls_", "tool\u2581calls\u2581")
        .replace("tool_call_", "tool\u2581call\u2581")
        .replace("tool_sep", "tool\u2581sep")
    )


# text of an answer -> its content, and what it calls
TEXTS: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    "plain": ("It is sunny.", "It is sunny.", []),
    "empty": ("", "", []),
    "hermes": (hermes("weather", BERLIN), "", [("weather", BERLIN)]),
    "hermes behind words": (
        "Let me see.\n" + hermes("clock", {}),
        "Let me see.\n",
        [("clock", {})],
    ),
    "hermes twice": (
        hermes("weather", BERLIN) + "\n" + hermes("weather", PARIS),
        "",
        [("weather", BERLIN), ("weather", PARIS)],
    ),
    "hermes, not closed": (
        hermes("weather", BERLIN).removesuffix("</tool_call>"),
        "",
        [("weather", BERLIN)],
    ),
    "hermes, not JSON": ("<tool_call>what?</tool_call>", "<tool_call>what?</tool_call>", []),
    "hermes, another function": (hermes("other", {}), hermes("other", {}), []),
    "hermes, half a mark": ("a < b <tool", "a < b <tool", []),
    "llama": (llama("weather", BERLIN), "", [("weather", BERLIN)]),
    "llama twice": (
        llama("weather", BERLIN) + "; " + llama("clock", {}),
        "",
        [("weather", BERLIN), ("clock", {})],
    ),
    "llama's mark": ("<|python_tag|>" + llama("clock", {}), "", [("clock", {})]),
    "mistral": (
        "[TOOL_CALLS] " + json.dumps([{"name": "weather", "arguments": PARIS}]),
        "",
        [("weather", PARIS)],
    ),
    "a list without its mark": (json.dumps([{"name": "clock"}]), "", [("clock", {})]),
    "GLM": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Berlin</arg_value>\n</tool_call>",
        "",
        [("weather", BERLIN)],
    ),
    "GLM without arguments": ("<tool_call>clock</tool_call>", "", [("clock", {})]),
    "a function's name without marks": ("clock", "clock", []),
    "GLM, another function": ("<tool_call>other</tool_call>", "<tool_call>other</tool_call>", []),
    "Qwen Coder": (
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBerlin\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=code>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        "I look.\n",
        [("weather", {"city": "Berlin", "days": 3, "code": "3"})],
    ),
    "Seed": (
        "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
        "",
        [("clock", {})],
    ),
    "MiniMax": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Berlin</parameter>\n'
        '</invoke>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        "",
        [("weather", BERLIN), ("clock", {})],
    ),
    "Nemotron": (
        f"<TOOLCALL>[{llama('weather', BERLIN)}, {llama('clock', {})}]</TOOLCALL>",
        "",
        [("weather", BERLIN), ("clock", {})],
    ),
    "Kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Berlin"}<|tool_call_end|><|tool_call_begin|>'
        "functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [("weather", BERLIN), ("clock", {})],
    ),
    "DeepSeek V3": (
        deepseek('function<|tool_sep|>weather\n```json\n{"city": "Berlin"}\n```'),
        "",
        [("weather", BERLIN)],
    ),
    "DeepSeek V3.1": (
        "I look." + deepseek('weather<|tool_sep|>{"city": "Berlin"}'),
        "I look.",
        [("weather", BERLIN)],
    ),
    "Mistral with names": (
        'Yes.[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[CALL_ID]ab1[ARGS]{}',
        "Yes.",
        [("weather", PARIS), ("clock", {})],
    ),
    "Granite": (
        "<|tool_call|>" + json.dumps([{"name": "weather", "arguments": PARIS}]),
        "",
        [("weather", PARIS)],
    ),
    "LFM2": (
        '<|tool_call_start|>[weather(city="Berlin"), clock()]<|tool_call_end|>',
        "",
        [("weather", BERLIN), ("clock", {})],
    ),
    "OLMo": (
        '<function_calls>weather(city="Berlin", code=true)\nclock()</function_calls>',
        "",
        [("weather", {"city": "Berlin", "code": True}), ("clock", {})],
    ),
    "Llama 4": ('[weather(city="Berlin")]', "", [("weather", BERLIN)]),
    "a list of Python that calls nothing": ("[weather, clock]", "[weather, clock]", []),
    "a name in brackets": ("[Note] it rains", "[Note] it rains", []),
    "Command A": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"city": "Berlin"}}]<|END_ACTION|>',
        "",
        [("weather", BERLIN)],
    ),
    "Apertus": (
        '<|tools_prefix|>[{"weather": {"city": "Berlin"}}]<|tools_suffix|>',
        "",
        [("weather", BERLIN)],
    ),
    "Gemma 4": (
        '<|tool_call>call:weather{city:<|"|>Ber"lin<|"|>,days:3}<tool_call|>',
        "",
        [("weather", {"city": 'Ber"lin', "days": 3})],
    ),
    "tags with words between": (
        "<tool_call><function=clock></function> or <function=clock></function></tool_call>",
        "<tool_call><function=clock></function> or <function=clock></function></tool_call>",
        [],
    ),
    "a tag that is not closed": (
        "<tool_call><function=clock><parameter=a>b</function></tool_call>",
        "<tool_call><function=clock><parameter=a>b</function></tool_call>",
        [],
    ),
    "JSON that is an answer": ('{"city": "Berlin"}', '{"city": "Berlin"}', []),
    "JSON that is cut off": ('{"name": "weather", "par', '{"name": "weather", "par', []),
    "JSON behind words": ("See: " + llama("clock", {}), "See: " + llama("clock", {}), []),
    "a number": ("[1] is the source", "[1] is the source", []),
}


def called(calls: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_a_text_whole_and_as_it_comes(name: str, size: int) -> None:
    text, content, calls = TEXTS[name]
    reader, found, seen = ToolText(TOOLS), "", []
    for start in range(0, len(text), size):
        new, complete = reader.feed(text[start : start + size], finished=False)
        found += new
        seen += complete
    new, complete = reader.feed("", finished=True)
    assert (found + new, called([*seen, *complete])) == (content, calls)
    assert reader.calls == [*seen, *complete]
    ids = [call.call_id for call in reader.calls]
    assert len({*ids}) == len(ids) and all(len(each) == 9 and each.isalnum() for each in ids)


def test_the_whole_text_at_once_is_read_alike() -> None:
    for text, content, calls in TEXTS.values():
        found, complete = ToolText(TOOLS).feed(text, finished=True)
        assert (found, called(complete)) == (content, calls)


@pytest.mark.parametrize(
    "body",
    [
        "weather(" * 9_000 + ")",
        f"[{'weather(city=' * 500}1{')' * 500}]",
        f"weather(city={'[' * 300}{']' * 300})",
        f"weather(city={'9' * 5_000})",
        'weather(city="\\d" "\\p{L}", **x)',
        "weather[ARGS]" + '{"a":' * 5_000,
        "call:weather{" + "a:" * 20_000 + "}",
        "<escape>" * 20_001 + "weather{}",
    ],
    ids=range(8),
)
def test_hostile_calls_are_content_soon(body: str) -> None:
    text = f"<|tool_call|>{body}<|/tool_call|>"
    begun = time.process_time()
    content, calls = ToolText(TOOLS).feed(text, finished=True)
    assert (content, calls) == (text, [])
    assert time.process_time() - begun < 5


def test_words_are_not_held_back() -> None:
    reader = ToolText(TOOLS)
    assert reader.feed("Let me ", finished=False)[0] == "Let me "
    assert reader.feed("see <", finished=False)[0] == "see "
    assert reader.feed("3.", finished=False)[0] == "<3."
    for text in ("[1] is", "{x", "<p", "[TOOLS"):
        assert ToolText(TOOLS).feed(text, finished=False)[0] == text
    for text in ("", "[", " {", '[ {"na', "[TOOL_C", "<|pyth", "<tool"):
        assert ToolText(TOOLS).feed(text, finished=False)[0] == ""


def test_schemas_of_calls() -> None:
    assert schema_of_one(TOOLS, "weather") == WEATHER["function"]["parameters"]
    assert schema_of_one(TOOLS, "clock") == {"type": "object"}
    schema = schema_of_any(TOOLS, several=False)
    assert schema["$defs"] == {"City": {"type": "string"}} and schema["maxItems"] == 1
    assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == [
        "weather",
        "clock",
    ]
    assert "maxItems" not in schema_of_any(TOOLS, several=True)
    other = json.loads(json.dumps(WEATHER).replace('"string"', '"integer"'))
    with pytest.raises(ApiError, match="City"):
        schema_of_any([WEATHER, other], several=True)


def answer(text: str, **body: Any) -> dict[str, Any]:
    request = {"messages": HI, "tools": TOOLS, "max_tokens": 500, **body}
    response = chat_client(saying(text)).post("/v1/chat/completions", json=request)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def test_an_answer_that_calls() -> None:
    choice = answer("Wait. " + hermes("weather", BERLIN))
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Wait. "
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == BERLIN


def test_an_answer_that_does_not_call() -> None:
    choice = answer("It is sunny.")
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "It is sunny."}
    assert "tool_calls" not in answer(hermes("clock", {}), tool_choice="none")["message"]


def test_an_answer_that_was_cut_off() -> None:
    choice = answer(hermes("weather", BERLIN), max_tokens=5)
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


def streamed(text: str, **body: Any) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and the reason of a streamed answer, put together as a client does."""
    backend = saying(text)
    request = {"messages": HI, "tools": TOOLS, "stream": True, "max_tokens": 500, **body}
    content, calls, reasons = "", [], []
    for event in events(chat_client(backend), "/v1/chat/completions", **request):
        (choice,) = event["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        for each in delta.get("tool_calls", []):
            if each["index"] == len(calls):
                calls.append({"id": each["id"], **each["function"]})
            else:
                assert "id" not in each
                calls[each["index"]]["arguments"] += each["function"]["arguments"]
    (reason,) = reasons
    return content, calls, reason


def test_a_stream_that_calls() -> None:
    text = "Wait. " + hermes("weather", BERLIN) + hermes("clock", {})
    content, calls, reason = streamed(text)
    assert (content, reason) == ("Wait. ", "tool_calls")
    assert [call["name"] for call in calls] == ["weather", "clock"]
    assert json.loads(calls[0]["arguments"]) == BERLIN


def test_a_stream_that_does_not_call() -> None:
    assert streamed("It is sunny.") == ("It is sunny.", [], "stop")
    assert streamed('{"city": "Berlin"}') == ('{"city": "Berlin"}', [], "stop")


NAMED = {"type": "function", "function": {"name": "weather"}}


def test_a_function_that_must_be_called() -> None:
    """The text is its arguments, by its schema."""
    text = json.dumps(BERLIN)
    choice = answer(text, tool_choice=NAMED)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": text}
    content, calls, _ = streamed(text, tool_choice=NAMED)
    assert content == "" and [(each["name"], each["arguments"]) for each in calls] == [
        ("weather", text)
    ]


@pytest.mark.parametrize(
    ("choice", "parallel", "schema"),
    [
        (NAMED, True, schema_of_one(TOOLS, "weather")),
        ("required", True, schema_of_any(TOOLS, several=True)),
        ("required", False, schema_of_any(TOOLS, several=False)),
    ],
)
def test_what_must_be_called_is_the_texts_grammar(
    choice: Any, parallel: bool, schema: dict[str, Any]
) -> None:
    backend = saying(json.dumps([{"name": "weather", "parameters": BERLIN}]))
    body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    response = chat_client(backend).post("/v1/chat/completions", json={"messages": HI, **body})
    (request,) = backend.requests
    assert json.loads(request.grammar) == {"json_schema": schema}
    assert request.grammar_parameter == "tool_choice"
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


FORM = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": FORM}}
CALLS = [{"name": "weather", "parameters": BERLIN}, {"name": "clock", "parameters": {}}]


@pytest.mark.parametrize(
    ("forms", "parameter", "grammar"),
    [
        ({"response_format": FORMAT}, "response_format", {"json_schema": FORM}),
        ({"response_format": {"type": "json_object"}}, "response_format", {"json_object": True}),
        ({"guided_choice": ["a", "b"]}, "guided_choice", {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs", {"regex": "a+"}),
    ],
)
def test_tools_with_a_form_of_the_text(
    forms: dict[str, Any], parameter: str, grammar: dict[str, Any]
) -> None:
    """auto: a list of calls or the form; required or named: a call; none: the form."""
    backend = saying(json.dumps(CALLS))
    client, schema = chat_client(backend), schema_of_any(TOOLS, several=True)
    expected = {
        "auto": (parameter, {"any_of": [grammar, {"json_schema": schema}]}),
        "required": ("tool_choice", {"json_schema": schema}),
        "none": (parameter, grammar),
    }
    for choice in expected:
        body = {"messages": HI, "tools": TOOLS, "tool_choice": choice, **forms}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        request = backend.requests[-1]
        assert (request.grammar_parameter, json.loads(request.grammar)) == expected[choice]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_has_a_form_is_content_unless_it_is_a_list_of_calls(stream: bool) -> None:
    def read(text: str) -> tuple[str, list[str]]:
        if stream:
            content, calls, _ = streamed(text, response_format=FORMAT)
            return content, [call["name"] for call in calls]
        message = answer(text, response_format=FORMAT)["message"]
        calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
        return message["content"] or "", calls

    assert read(json.dumps(CALLS)) == ("", ["weather", "clock"])
    for text in (
        json.dumps({"name": "clock", "parameters": {}}),
        json.dumps({"answer": hermes("clock", {})}),
        json.dumps([{"name": "other", "parameters": {}}]),
    ):
        assert read(text) == (text, [])


@pytest.mark.parametrize("cut", [1, 20, 60, 75, 80])
def test_a_list_of_calls_that_is_cut_off_is_no_content(cut: int) -> None:
    """The grammar allows nothing else; the calls that are complete are handed out."""
    text = json.dumps(CALLS)[:cut]
    names = ["weather"] if cut >= 60 else []
    assert text.count("}}") == len(names)
    ids = len(GPT2.encode(text))
    choice = answer(text, tool_choice="required", max_tokens=ids)
    message = choice["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
    assert (choice["finish_reason"], message["content"] or "", calls) == ("length", "", names)
    content, streamed_calls, reason = streamed(text, tool_choice="required", max_tokens=ids)
    assert (content, reason) == ("", "length")
    assert [call["name"] for call in streamed_calls] == names
    reader = HarmonyText("<|start|>assistant", TOOLS, lists_only=True, must_call=True)
    assert not reader.feed(f"<|channel|>final<|message|>{text}", finished=True)
    assert [call.name for call in reader.calls] == names


def test_a_form_is_not_held_back_beside_tools() -> None:
    reader = ToolText(TOOLS, lists_only=True)
    assert reader.feed('{"answer": "a', finished=False)[0] == '{"answer": "a'
    assert ToolText(TOOLS, lists_only=True).feed('[{"na', finished=False)[0] == ""


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        (
            {"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "other"}}},
            "tool_choice",
            "choices: weather, clock",
        ),
        (
            {"tools": TOOLS, "guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "one of",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "name"),
        ({"tools": TOOLS, "stream": True, "logprobs": True}, "logprobs", "tools"),
    ],
)
def test_wrong_tools_are_named(body: dict[str, Any], param: str, words: str) -> None:
    error = refused(chat_client(FakeBackend()), **body)
    assert error["param"] == param
    assert words in error["message"]
