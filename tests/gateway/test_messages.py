"""/v1/messages over an engine that answers as told, as Anthropic's own client reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from launcher_scripts.gateway.served_model import ChatTemplate
from tests.gateway.fakes import GPT2, FakeBackend, client_of, listening, saying, served
from tests.gateway.test_chat import chat_client
from tests.gateway.test_completions import IDS, WORDS
from tests.gateway.test_reasoning import ANSWER, HYBRID, THOUGHT, WHOLE
from tests.gateway.test_tool_calls import BERLIN, TOOLS, hermes
from tests.lazy_modules import LazyModule

anthropic = LazyModule("anthropic")
ROUTE = "/v1/messages"
KEY = "sk-alice-0123"
HI = [{"role": "user", "content": "Hi"}]
OWN = [
    {"name": each["name"], "input_schema": each.get("parameters", {"type": "object"})}
    for each in (tool["function"] for tool in TOOLS)
]
SHOWN = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"


class Asking:
    """Anthropic's client before a gateway, which its backend may be changed of."""

    def __init__(self, address: str, backend: FakeBackend) -> None:
        self.backend = backend
        self._messages = anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0).messages

    def __call__(self, text: str, *, stream: bool = False, **more: Any) -> Any:
        """Its message, which it puts together itself of a stream."""
        self.backend.ids = lambda _: GPT2.encode(text)
        body = {"model": "tiny", "max_tokens": 500, "messages": HI, **more}
        if not stream:
            return self._messages.create(**body)
        with self._messages.stream(**body) as events:
            return events.get_final_message()

    def count(self, **body: Any) -> int:
        return self._messages.count_tokens(model="tiny", **body).input_tokens


@pytest.fixture(scope="module")
def asking() -> Iterator[Asking]:
    backend = FakeBackend()
    template = ChatTemplate({"default": HYBRID}, {})
    app = client_of(served(backend, max_len=1000, template=template), keys={"alice": KEY}).app
    with listening(app) as address:
        yield Asking(address, backend)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer(asking: Asking, stream: bool) -> None:
    more = {"temperature": 0.5, "context_management": {"edits": []}}
    message = asking(WORDS, stream=stream, system="Be short.", extra_body=more)
    assert [(block.type, block.text) for block in message.content] == [("text", WORDS)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.role, message.model) == ("assistant", "tiny")
    request = asking.backend.requests[-1]
    assert message.usage.output_tokens == len(IDS) + 1
    assert message.usage.input_tokens == len(request.prompt_ids)
    prompt = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert GPT2.decode(request.prompt_ids) == prompt + "<|im_start|>assistant\n"
    assert request.max_tokens == 500


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_told_apart(asking: Asking, stream: bool) -> None:
    asking.backend.cached = lambda _: 3
    usage = asking(WORDS, stream=stream).usage
    asking.backend.cached = lambda _: 0
    total = len(asking.backend.requests[-1].prompt_ids)
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (total - 3, 3)
    assert usage.cache_creation_input_tokens == 0
    assert asking(WORDS, stream=stream).usage.cache_read_input_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_an_answer(asking: Asking, stream: bool) -> None:
    assert asking(WORDS, stream=stream, max_tokens=2).stop_reason == "max_tokens"
    message = asking("one two three", stream=stream, stop_sequences=["thr", " two"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " two")
    assert message.content[0].text == "one"
    assert asking("", stream=stream).content == []


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_thought_and_called(asking: Asking, stream: bool) -> None:
    text = WHOLE + hermes("weather", BERLIN) + hermes("clock", {})
    message = asking(text, stream=stream, tools=OWN)
    thought, said, first, second = message.content
    assert (thought.type, thought.thinking) == ("thinking", THOUGHT)
    assert (said.type, said.text) == ("text", ANSWER)
    assert (first.type, first.name, first.input) == ("tool_use", "weather", BERLIN)
    assert (second.name, second.input) == ("clock", {}) and first.id != second.id
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called(asking: Asking, stream: bool) -> None:
    must: dict[str, Any] = {"tools": OWN, "tool_choice": {"type": "tool", "name": "weather"}}
    message = asking(json.dumps(BERLIN), stream=stream, **must)
    (call,) = message.content
    assert (call.name, call.input, message.stop_reason) == ("weather", BERLIN, "tool_use")
    calls = json.dumps([{"name": "clock", "parameters": {}}])
    anyone = {"type": "any", "disable_parallel_tool_use": True}
    message = asking(calls, stream=stream, tools=OWN, tool_choice=anyone)
    assert [block.name for block in message.content] == ["clock"]
    assert json.loads(asking.backend.requests[-1].grammar)["json_schema"]["maxItems"] == 1
    cut = asking('{"city": "Be', stream=False, **must, max_tokens=4)
    assert cut.stop_reason == "max_tokens" and "arguments" in cut.content[0].input
    assert asking(hermes("clock", {}), tools=OWN, tool_choice={"type": "none"}).content[0].text


def test_a_text_of_a_given_form(asking: Asking) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    config = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    assert asking("{}", output_config=config).content[0].text == "{}"
    grammar = json.loads(asking.backend.requests[-1].grammar)
    assert grammar.pop("reasoning") == {"begin": "<think>", "end": "</think>"}
    assert grammar == {"json_schema": schema}


def test_a_conversation_becomes_messages() -> None:
    backend = saying(ANSWER)
    client = chat_client(backend, max_len=2000, template=ChatTemplate({"default": SHOWN}, {}))
    call = {"type": "tool_use", "id": "a", "name": "clock", "input": {"zone": 1}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": THOUGHT, "signature": ""},
                {"type": "text", "text": "Two"},
                call,
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "noon"}],
                },
                {"type": "text", "text": "Three"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "short."}]
    body = {"messages": turns, "system": system, "max_tokens": 9, "metadata": {"user_id": "me"}}
    assert client.post(ROUTE, json=body).status_code == 200
    lines = GPT2.decode(backend.requests[-1].prompt_ids).splitlines()
    function = {"name": "clock", "arguments": {"zone": 1}}
    thought = {"reasoning": THOUGHT, "reasoning_content": THOUGHT}
    assert [json.loads(line) for line in lines] == [
        {"role": "system", "content": "Be\nshort."},
        {"role": "user", "content": "One"},
        {
            "role": "assistant",
            "content": "Two",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
            **thought,
        },
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "user", "content": "Three"},
    ]


def test_the_last_answer_is_continued(asking: Asking) -> None:
    asking(WORDS, messages=[*HI, {"role": "assistant", "content": "Well,"}])
    prompt = GPT2.decode(asking.backend.requests[-1].prompt_ids)
    assert prompt.endswith("<|im_start|>assistant\nWell,")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, " "),
        ({"thinking": {"type": "disabled"}}, " False"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, " True"),
        ({"output_config": {"effort": "max"}}, "xhigh True"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "low False"),
    ],
)
def test_a_template_gets_whether_to_think(more: dict[str, Any], told: str) -> None:
    backend = saying(ANSWER)
    template = ChatTemplate({"default": "{{ reasoning_effort }} {{ enable_thinking }}"}, {})
    body = {"messages": HI, "max_tokens": 9, **more}
    assert chat_client(backend, template=template).post(ROUTE, json=body).status_code == 200
    assert GPT2.decode(backend.requests[-1].prompt_ids) == told


def test_tokens_of_a_prompt_are_counted(asking: Asking) -> None:
    asking(WORDS, system="Be short.")
    count = asking.count(messages=HI, system="Be short.")
    assert count == len(asking.backend.requests[-1].prompt_ids)


def test_errors_are_those_of_the_client(asking: Asking) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"1 to 1024"):
        asking(WORDS, stop_sequences=[""])
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
        asking(WORDS, model="other")
    with pytest.raises(anthropic.BadRequestError, match="image"):
        asking(WORDS, messages=[{"role": "user", "content": [{"type": "image"}]}])
    wrong = anthropic.Anthropic(base_url=str(asking._messages._client.base_url), api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError, match="X-Api-Key"):
        wrong.messages.create(model="tiny", max_tokens=1, messages=HI)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "missing"),
        ({"container": "x"}, "container", "not supported"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web"}],
                "tool_choice": {"type": "tool", "name": "web"},
            },
            "tool_choice",
            "tools",
        ),
        (
            {"messages": [{"role": "user", "content": "a" * 1001}]},
            "messages",
            "prompt is too long: ",
        ),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers", "runs no tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "tools"),
        ({"max_tokens": 10**6}, "max_tokens", "exceed context limit"),
        ({"stop_sequences": [""]}, "stop_sequences", "1 to 1024"),
    ],
)
def test_wrong_parameters_are_named(body: dict[str, Any], param: str, words: str) -> None:
    request = {"messages": HI, "max_tokens": 9, **body}
    answer = chat_client(FakeBackend()).post(ROUTE, json=request)
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_models_as_anthropics_client_lists_them() -> None:
    backend = FakeBackend()
    models = [served(backend, "org/one", lora_names=("sql",)), served(backend, "two")]
    with listening(client_of(*models).app) as address:
        client = anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0)
        assert [model.id for model in client.models.list(limit=1)] == ["org/one", "two", "sql"]
        model = client.models.retrieve("org/one")
    assert (model.type, model.display_name, model.created_at.timestamp()) == ("model", "org/one", 1)
    assert anthropic.types.ModelInfo.model_validate(model.to_dict()) == model
