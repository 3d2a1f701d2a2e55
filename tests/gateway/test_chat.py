"""/v1/chat/completions and the routes about tokens, over an engine that answers as told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from launcher_scripts.common.tokenizer import SpecialIds
from launcher_scripts.gateway.served_model import ChatTemplate
from tests.gateway.fakes import CHATML, GPT2, FakeBackend, client_of, served
from tests.gateway.test_completions import IDS, WORDS, events
from tests.tokenizer.panics import PANIC_ID, PANIC_TEXT, fragile_tokenizer

HI = [{"role": "user", "content": "Hi"}]
HI_TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
ROOM = 1000  # positions that the small vocabulary needs for the names of a chat


def chat_client(backend: FakeBackend, **more: Any) -> TestClient:
    return client_of(served(backend, **{"max_len": ROOM, **more}))


def refused(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_a_chat_is_rendered_and_answered() -> None:
    backend = FakeBackend()
    answer = chat_client(backend).post("/v1/chat/completions", json={"messages": HI}).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": WORDS}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    (request,) = backend.requests
    assert GPT2.decode(request.prompt_ids) == HI_TEXT
    assert request.max_tokens == ROOM - len(request.prompt_ids)
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_ids)


def test_the_templates_own_start_token_is_not_doubled() -> None:
    backend = FakeBackend()
    client = chat_client(backend, special=SpecialIds((1,)))
    client.post("/v1/chat/completions", json={"messages": HI})
    client.post("/v1/chat/completions", json={"messages": HI, "add_special_tokens": True})
    first, second = backend.requests
    assert second.prompt_ids == (1, *first.prompt_ids)


def test_parts_of_text_are_a_text_to_the_template() -> None:
    template = "{{ messages[0].content | map(attribute='text') | join('+') }}"
    backend = FakeBackend()
    client = chat_client(backend, template=ChatTemplate({"default": template}, {}))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert GPT2.decode(backend.requests[0].prompt_ids) == "one+two"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson | trim('\"') }}{% endfor %}",
    ],
)
def test_parts_are_one_text_for_a_template_that_knows_texts_alone(template: str) -> None:
    backend = FakeBackend()
    client = chat_client(backend, template=ChatTemplate({"default": template}, {}))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": " the"}]
    answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    expected = "<user>one\ntwo<user> the"
    if "tojson" in template:
        expected = expected.replace("\n", "\\n")
    assert GPT2.decode(backend.requests[0].prompt_ids) == expected


@pytest.mark.parametrize(("known", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_to_a_template_that_knows_none(known: str, role: str) -> None:
    backend = FakeBackend()
    text = known + "{% for m in messages %}[{{ m.role }}]{% endfor %}"
    template = ChatTemplate({"default": text}, {})
    client = chat_client(backend, max_len=100, template=template)
    messages = [{"role": "developer", "content": "Be short."}, *HI]
    assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert GPT2.decode(backend.requests[0].prompt_ids) == f"[{role}][user]"


def test_a_chat_that_does_not_say_how_long_is_bounded() -> None:
    backend = FakeBackend()
    for max_len in (ROOM, None):
        client = client_of(served(backend, max_len=max_len), chat_tokens=20)
        client.post("/v1/chat/completions", json={"messages": HI})
    assert [request.max_tokens for request in backend.requests] == [20, 20]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_most_tokens(name: str) -> None:
    backend = FakeBackend()
    answer = chat_client(backend).post("/v1/chat/completions", json={"messages": HI, name: 2})
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert backend.requests[0].max_tokens == 2


def test_log_probabilities_of_a_chat() -> None:
    answer = chat_client(FakeBackend()).post(
        "/v1/chat/completions",
        json={"messages": HI, "logprobs": True, "top_logprobs": 2, "max_tokens": 2},
    )
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == [GPT2.decode([each]) for each in IDS[:2]]
    for token_id, each in zip(IDS, content, strict=False):
        assert bytes(each["bytes"]).decode() == each["token"]
        assert each["logprob"] == -0.5 - token_id / 1000
        assert [top["logprob"] for top in each["top_logprobs"]] == [-0.5, -1.5]


def test_a_streamed_chat_begins_with_its_role() -> None:
    client = chat_client(FakeBackend())
    found = events(
        client,
        "/v1/chat/completions",
        messages=HI,
        n=2,
        logprobs=True,
        stream_options={"include_usage": True},
    )
    *pieces, last = found
    deltas: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for event in pieces:
        assert event["object"] == "chat.completion.chunk"
        (choice,) = event["choices"]
        deltas[choice["index"]].append(choice)
    for choices in deltas.values():
        first, *others = (choice["delta"] for choice in choices)
        assert first == {"role": "assistant", "content": ""}
        assert "".join(each["content"] for each in others) == WORDS
        assert choices[-1]["finish_reason"] == "stop"
        assert [each["finish_reason"] for each in choices[:-1]] == [None] * (len(choices) - 1)
    assert last["usage"]["completion_tokens"] == 2 * (len(IDS) + 1)


def test_tools_are_the_templates() -> None:
    backend = FakeBackend()
    template = ChatTemplate({"default": "{{ tools | tojson if tools else 'none' }}"}, {})
    client = chat_client(backend, template=template)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for more in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        client.post("/v1/chat/completions", json={"messages": HI, "tools": tools, **more})
    texts = [GPT2.decode(request.prompt_ids) for request in backend.requests]
    shown = '[{"type": "function", "function": {"name": "f"}}]'
    assert texts == [shown, shown, "none"]


CONCATENATES = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if 'tool_calls' in m %}[{{ m.tool_calls | length }}{{ m.tool_calls[0].function.arguments"
    " | tojson }}]{% endif %}{% if 'reasoning' in m %}{{ '(' + m['reasoning'] + ')' }}{% endif %}"
    "{% endfor %}"
)
CALL: dict[str, Any] = {"id": "abcdefghi", "type": "function", "function": {"name": "f"}}
USED = {"type": "tool_use", "id": "abcdefghi", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "abcdefghi"}


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (
            "/v1/chat/completions",
            [
                {"role": "assistant", "content": content, "tool_calls": [CALL], "refusal": None}
                for content in (None, "", [])
            ]
            + [
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"arguments": ""}}]},
                {"role": "tool", "tool_call_id": "abcdefghi", "content": None},
                {"role": "assistant", "reasoning": None, "tool_calls": None, "audio": None},
                {"role": "assistant", "tool_calls": [], "reasoning_content": "r"},
                {"role": "user", "content": [{"type": "text", "text": ""}]},
            ],
            "<assistant>[1{}]" * 4 + "<tool><assistant><assistant>(r)<user>",
        ),
        (
            "/v1/responses",
            [
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""},
                {"type": "function_call_output", "call_id": "a", "output": []},
                {"type": "function_call_output", "call_id": "a"},
                {"type": "message", "role": "assistant", "content": []},
                {"type": "message", "role": "user", "content": None},
                {"role": "user"},
                {"type": "reasoning", "content": None},
            ],
            "<assistant>[1{}]<tool><tool><assistant><user><user>",
        ),
        (
            "/v1/messages",
            [
                {"role": "assistant", "content": [USED]},
                {"role": "user", "content": [RESULT, {**RESULT, "content": None}]},
                {"role": "assistant", "content": []},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}]},
                {"role": "user"},
            ],
            "<assistant>[1{}]<tool><tool><assistant><assistant>(r)<user>",
        ),
    ],
)
def test_a_message_without_a_text_has_an_empty_one(
    path: str, body: list[dict[str, Any]], prompt: str
) -> None:
    backend = FakeBackend()
    client = chat_client(backend, template=ChatTemplate({"default": CONCATENATES}, {}))
    name = "input" if path == "/v1/responses" else "messages"
    limit = {} if path == "/v1/responses" else {"max_tokens": 4}
    answer = client.post(path, json={name: body, **limit})
    assert answer.status_code == 200, answer.text
    assert GPT2.decode(backend.requests[0].prompt_ids) == prompt
    if path == "/v1/chat/completions":
        tokens = client.post("/tokenize", json={name: body}).json()["tokens"]
        assert tuple(tokens) == backend.requests[0].prompt_ids


def test_calls_of_tools_are_not_continued() -> None:
    messages = [*HI, {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}]
    error = refused(chat_client(FakeBackend()), messages=messages, continue_final_message=True)
    assert (error["param"], "tool calls" in error["message"]) == ("continue_final_message", True)


def test_arguments_of_earlier_calls_are_values_to_the_template() -> None:
    """OpenAI's clients send them as JSON, and templates write them as JSON themselves."""
    text = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    template = ChatTemplate({"default": text + "{% endfor %}{% endfor %}"}, {})
    backend = FakeBackend()
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": said}}
        for said in ('{"a": 1}', "no JSON")
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    chat_client(backend, template=template).post(
        "/v1/chat/completions", json={"messages": [*HI, message]}
    )
    shown = '{"name": "f", "arguments": {"a": 1}}{"name": "f", "arguments": "no JSON"}'
    assert GPT2.decode(backend.requests[0].prompt_ids) == shown


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "it is empty"),
        ({"messages": [{"content": "a"}]}, "messages", "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "image_url",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "content"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format", "text"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": "any"}, "tool_choice", "none"),
        ({"functions": [{"name": "f"}]}, "functions", "tools replaces it"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "another name"),
        ({"echo": True}, "echo", "not supported"),
        ({"max_tokens": ROOM}, "max_tokens", "maximum context length is"),
        (
            {"messages": [{"role": "user", "content": "a" * ROOM}]},
            "messages",
            "maximum context length is",
        ),
    ],
)
def test_wrong_parameters_are_named(body: dict[str, Any], param: str, words: str) -> None:
    error = refused(chat_client(FakeBackend()), **body)
    assert error["param"] == param
    assert words in error["message"]


def test_models_without_a_template_complete_only() -> None:
    error = refused(chat_client(FakeBackend(), template=None))
    assert (error["code"], error["param"]) == ("no_chat_template", "messages")
    assert "--chat-template" in error["message"]
    assert "encoder-decoder" in refused(chat_client(FakeBackend(), encodes=True))["message"]


def test_tokens_and_texts() -> None:
    client = chat_client(FakeBackend(), special=SpecialIds((1,)))
    found = client.post("/tokenize", json={"prompt": "Hé", "return_token_strs": True}).json()
    assert found["tokens"] == [1, *GPT2.encode("Hé")]
    assert found["count"] == 4
    assert found["max_model_len"] == ROOM
    assert found["token_strs"][1:] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
    body = {"prompt": "Hé", "messages": None, "add_special_tokens": False}
    found = client.post("/tokenize", json=body).json()
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Hé"}
    found = client.post("/tokenize", json={"messages": HI}).json()
    assert GPT2.decode(found["tokens"]) == HI_TEXT
    huge = client.post("/detokenize", json={"tokens": [1 << 40]})
    assert (huge.status_code, huge.json()["error"]["param"]) == (400, "tokens")


def test_what_the_tokenizer_is() -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    found = chat_client(FakeBackend(), token_names=tokens).get("/tokenizer_info").json()
    assert (found["bos_token"], found["eos_token"], found["pad_token"]) == ("<s>", "</s>", None)
    assert found["chat_template"] == CHATML
    assert found["vocab_size"] == GPT2.vocab_size


def test_models_are_listed() -> None:
    client = client_of(served(FakeBackend(), "org/one"), served(FakeBackend(), "two"))
    found = client.get("/v1/models").json()
    assert [each["id"] for each in found["data"]] == ["org/one", "two"]
    assert client.get("/v1/models/org/one").json()["id"] == "org/one"
    assert client.get("/v1/models/three").status_code == 404


def test_there_are_no_embeddings() -> None:
    answer = chat_client(FakeBackend()).post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "no_embeddings"
    assert "tiny" in answer.json()["error"]["message"]


_PANICS = {
    "/v1/completions": ({"prompt": PANIC_TEXT}, "prompt"),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": PANIC_TEXT}]}, "prompt"),
    "/v1/responses": ({"input": PANIC_TEXT}, "input"),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": PANIC_TEXT}], "max_tokens": 4},
        "messages",
    ),
    "/tokenize": ({"prompt": PANIC_TEXT}, "prompt"),
    "/detokenize": ({"tokens": [PANIC_ID]}, "tokens"),
}


@pytest.mark.parametrize("path", _PANICS)
def test_a_panic_of_the_tokenizer_is_a_bad_request(path: str, tmp_path: Path) -> None:
    """Whether a thread or the event loop has it, and whatever the interface."""
    tokenizer = fragile_tokenizer(tmp_path, decodes=False)
    client = chat_client(FakeBackend(), tokenizer=tokenizer, max_len=None)
    body, param = _PANICS[path]
    threads = {"prompt": " the" * 2000 + PANIC_TEXT} if path == "/v1/completions" else body
    for each in (body, threads):
        answer = client.post(path, json={"model": "tiny", **each})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["message"].startswith("the tokenizer refuses")
        assert error["param"] == param
    assert client.post("/tokenize", json={"prompt": "the"}).status_code == 200
    gateway = client.app.state.gateway
    assert (gateway.admission.running, gateway.admission.waiting, gateway.life.working) == (0, 0, 0)


def test_an_answer_at_which_the_tokenizer_panics_ends_with_an_error(tmp_path: Path) -> None:
    tokenizer = fragile_tokenizer(tmp_path, decodes=False)
    ids = GPT2.encode("the")
    backend = FakeBackend(lambda _: (*ids, PANIC_ID))
    client = chat_client(backend, tokenizer=tokenizer, end_ids=())
    body = {"model": "tiny", "prompt": "the"}
    answer = client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = client.post("/v1/completions", json={**body, "stream": True})
    assert answer.status_code == 200  # of the words before
    assert "the answer cannot be shown: the tokenizer refuses" in answer.text
