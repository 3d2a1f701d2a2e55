"""The parameters of the published request schemas are supported, ignored or rejected."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from launcher_scripts.gateway import parameters
from launcher_scripts.gateway.messages import ConversationBody, MessagesBody
from launcher_scripts.gateway.parameters import StrictBody
from launcher_scripts.gateway.responses_schemas import ResponsesBody
from launcher_scripts.gateway.schemas import ChatBody, CompletionBody, EmbeddingsBody
from launcher_scripts.gateway.served_model import ChatTemplate
from tests.gateway.fakes import GPT2, FakeBackend, client_of, served
from tests.gateway.test_chat import HI, chat_client

BODIES: dict[str, type[StrictBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": ConversationBody,
    "/v1/responses": ResponsesBody,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "gateway-parameters.md"
INTRODUCTION = """\
Which parameters of a request does the gateway act on? A *supported* one has its effect; the ranges
of its values are in [gateway.md](gateway.md). The others are accepted if they change nothing. A
parameter that is not listed is rejected by its name. `null` counts as absent, and 8.0 as 8.

The tables are made of `launcher_scripts/gateway/parameters.py` and of the classes of the requests'
bodies. A test compares them with the types of the packages `openai` and `anthropic`.
"""


def supported(body: type[StrictBody]) -> set[str]:
    return {field.alias or name for name, field in body.model_fields.items()}


def document() -> str:
    """The text of docs/gateway-parameters.md."""
    lines = ["# Parameters of the gateway's requests", "", INTRODUCTION]
    for path, body in BODIES.items():
        rows = dict.fromkeys(supported(body), "supported")
        rows |= {name: row.effect for name, row in body.unused.items()}
        lines += [f"## {path}", "", "| parameter | effect |", "|---|---|"]
        lines += [f"| `{name}` | {rows[name]} |" for name in sorted(rows)] + [""]
    return "\n".join(lines)


def published() -> dict[str, set[str]]:
    """Path -> the parameters that the SDKs' types have, also those of groups of options."""
    openai_types = pytest.importorskip("openai.types")
    anthropic_types = pytest.importorskip("anthropic.types")
    chat, responses = openai_types.chat, openai_types.responses
    beta = anthropic_types.beta

    def names(*kinds: Any, **groups: Any) -> set[str]:
        found = {name for kind in kinds for name in get_type_hints(kind)}
        return found | {f"{group}.{key}" for group in groups for key in names(groups[group])}

    return {
        "/v1/chat/completions": names(
            chat.completion_create_params.CompletionCreateParamsBase,
            stream_options=chat.ChatCompletionStreamOptionsParam,
        ),
        "/v1/completions": names(
            openai_types.completion_create_params.CompletionCreateParamsBase,
            stream_options=chat.ChatCompletionStreamOptionsParam,
        ),
        "/v1/embeddings": names(openai_types.EmbeddingCreateParams),
        "/v1/responses": names(
            responses.response_create_params.ResponseCreateParamsBase,
            text=responses.ResponseTextConfigParam,
            reasoning=openai_types.shared_params.Reasoning,
        ),
        "/v1/messages": names(
            anthropic_types.message_create_params.MessageCreateParamsBase,
            beta.message_create_params.MessageCreateParamsBase,
            output_config=beta.BetaOutputConfigParam,
        ),
        "/v1/messages/count_tokens": names(
            anthropic_types.MessageCountTokensParams,
            beta.MessageCountTokensParams,
            output_config=beta.BetaOutputConfigParam,
        ),
    }


@pytest.mark.parametrize("path", BODIES)
def test_the_tables_have_every_published_parameter(path: str) -> None:
    body = BODIES[path]
    fields = supported(body)
    for group in ("stream_options", "text", "reasoning", "output_config"):
        if group in body.model_fields:
            kind = body.model_fields[group].annotation
            kinds = [kind, *getattr(kind, "__args__", ())]
            (model,) = (each for each in kinds if hasattr(each, "model_fields"))
            fields |= {f"{group}.{key}" for key in supported(model)}
    assert published()[path] - fields == body.unused.keys() & (published()[path] - fields)
    assert not fields & body.unused.keys()
    extensions = {*parameters.VLLM, "documents", "echo", "client_metadata", "metadata"}
    extensions |= {name for name in parameters.CHAT if "prompt_cache" in name}
    extensions |= {"safety_identifier", "service_tier", "store", "betas"}
    extensions |= {"chat_template", "include_reasoning"}
    assert body.unused.keys() - published()[path] <= extensions


def test_the_document_has_the_tables() -> None:
    assert DOCUMENT.read_text("utf-8") == document()


@pytest.mark.parametrize("path", REQUESTS)
def test_values_without_effect_are_accepted(path: str) -> None:
    """All of them in one request, and 8.0 for 8."""
    body: dict[str, Any] = {**REQUESTS[path], "max_tokens": 8.0, "temperature": 1}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    elif path == "/v1/chat/completions":
        body["max_completion_tokens"] = 8
    elif path.endswith("count_tokens"):
        del body["max_tokens"], body["temperature"]
    for name, row in BODIES[path].unused.items():
        group, _, key = name.rpartition(".")
        value = "any" if row.ignored else [None, *row.neutral][-1]
        if group:
            body.setdefault(group, {})[key] = value
        else:
            body[name] = value
    options = body.pop("stream_options", None)
    client = chat_client(FakeBackend())
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "X-Warning" not in answer.headers
    if isinstance(options, dict):
        body |= {"stream": True, "stream_options": options}
        assert client.post(path, json=body).status_code == 200


@pytest.mark.parametrize("path", REQUESTS)
def test_parameters_that_need_more_are_rejected_with_a_reason(path: str) -> None:
    client = chat_client(FakeBackend())
    for name, row in BODIES[path].unused.items():
        if row.ignored:
            continue
        group, _, key = name.rpartition(".")
        for value in ("else", 7, True, [{}]):
            if row.is_neutral(value):
                continue
            said = {group: {key: value}} if group else {name: value}
            answer = client.post(path, json={**REQUESTS[path], **said})
            error = answer.json()["error"]
            assert answer.status_code == 400, (name, value)
            assert (error["param"], error["code"]) == (group or key, "unsupported_parameter")
            assert row.reason in error["message"]


TOOL_TYPES = {
    "/v1/chat/completions": [{"type": "custom", "custom": {"name": "c"}}],
    "/v1/messages": [{"type": "web_search_20250305", "name": "w"}, {"type": "bash_1", "name": "b"}],
    "/v1/messages/count_tokens": [{"type": "memory_20250818", "name": "m"}],
    "/v1/responses": [
        {"type": "namespace", "name": "n", "tools": []},
        {"type": "web_search"},
        {"type": "local_shell"},
        {"type": "a name\r\nX-Other: header"},
    ],
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "f"}},
    "/v1/messages": {"name": "f", "input_schema": {}},
    "/v1/messages/count_tokens": {"name": "f", "input_schema": {}},
    "/v1/responses": {"type": "function", "name": "f", "parameters": None, "strict": False},
}


@pytest.mark.parametrize("path", TOOL_TYPES)
def test_tools_that_the_client_does_not_run_are_skipped(path: str) -> None:
    client = chat_client(FakeBackend())
    types = ["another type" if " " in tool["type"] else tool["type"] for tool in TOOL_TYPES[path]]
    choice = {"type": "auto"} if "messages" in path else "auto"
    for tools in ([FUNCTIONS[path], *TOOL_TYPES[path]], TOOL_TYPES[path]):
        body = {**REQUESTS[path], "tools": tools, "tool_choice": choice}
        for stream in (False, True) if "count" not in path else (None,):
            more = {} if stream is None else {"stream": stream}
            answer = client.post(path, json={**body, **more})
            assert answer.status_code == 200, answer.text
            warning = answer.headers["X-Warning"]
            assert warning.startswith("tools: skipped") and all(each in warning for each in types)
    kept = client.post(path, json={**REQUESTS[path], "tools": [FUNCTIONS[path]]})
    assert kept.status_code == 200 and "X-Warning" not in kept.headers


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
INTERNALS = re.compile(r"\[|tagged|union|function-|Input|instance of|[a-z][A-Z]")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/responses", {"input": [{"role": "user", "content": [IMAGE]}]}, "reads text only"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "a"}]}, "item_reference"),
        ("/v1/responses", {"input": 5}, "input: expected a valid string or a valid list"),
        ("/v1/responses", {"input": [{"role": 5}]}, "input.0.role: expected"),
        ("/v1/responses", {"input": [{"type": "function_call"}]}, "input.0.call_id: it is missing"),
        ("/v1/responses", {"input": [{"type": "message"}]}, "input.0.role"),
        ("/v1/responses", {"input": [5]}, "input.0"),
        ("/v1/responses", {"text": {"format": []}}, "text.format: expected an object"),
        ("/v1/responses", {"tool_choice": {"type": "mcp"}}, "tool_choice.type: expected"),
        ("/v1/responses", {"reasoning": {"effort": "huge"}}, "reasoning.effort: expected 'none'"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content: this model reads text only; got a part of type 'image'",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text: expected a valid string",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages.0.content.0.id: it is missing",
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{}]}]}, "got a part of type"),
        ("/v1/messages", {"system": [5]}, "system.0: expected an object"),
        ("/v1/messages", {"thinking": {"type": "maybe"}}, "thinking.type: expected 'enabled'"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "content: expect"),
        ("/v1/chat/completions", {"tool_choice": {}}, "tool_choice"),
        (
            "/v1/chat/completions",
            {"structured_outputs": {"json": 5}},
            "structured_outputs.json: expect",
        ),
        ("/v1/chat/completions", {"stop": {}}, "stop: expected a valid string or a valid list"),
        ("/v1/completions", {"logit_bias": {"a": "b"}}, "logit_bias.a: expected a valid number"),
    ],
)
def test_errors_show_nothing_of_the_schemas_classes(
    path: str, body: dict[str, Any], words: str
) -> None:
    answer = chat_client(FakeBackend()).post(path, json={**REQUESTS[path], **body})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert words in message and not INTERNALS.search(message), message


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CHOICE = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
ALLOWED = {"type": "allowed_tools", "allowed_tools": CHOICE}
PICTURED = {"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": None}}),
        (CHAT, {"stream_options": {}}),
        (CHAT, {"stream_options": {"include_usage": False}}),
        (CHAT, {"top_logprobs": 0}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
        (CHAT, {"modalities": [], "request_id": "x", "return_token_ids": False}),
        (CHAT, {"tools": [TOOL], "tool_choice": ALLOWED}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}),
        (RESPONSES, {"text": {"format": None}}),
        (RESPONSES, {"input": [{"type": None, "role": "user", "content": "a"}]}),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}),
        (MESSAGES, {"system": [{"type": "text", "text": None}]}),
    ],
)
def test_neutral_values_in_every_place_are_accepted(path: str, body: dict[str, Any]) -> None:
    answer = chat_client(FakeBackend()).post(path, json={**REQUESTS[path], **body})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "tools", "choice"),
    [
        (CHAT, [TOOL, {"type": "function", "function": {"name": "g"}}], {"allowed_tools": CHOICE}),
        (
            RESPONSES,
            [{"type": "function", **FUNCTION}, {"type": "function", "name": "g"}],
            {"mode": "required", "tools": [{"type": "function", "name": "f"}]},
        ),
    ],
)
def test_tool_choice_may_allow_some_tools(path: str, tools: Any, choice: Any) -> None:
    backend = FakeBackend()
    choice = {"type": "allowed_tools", **choice}
    body = {**REQUESTS[path], "tools": tools, "tool_choice": choice}
    assert chat_client(backend).post(path, json=body).status_code == 200
    grammar = json.loads(backend.requests[0].grammar or b"")
    assert '"f"' in json.dumps(grammar) and '"g"' not in json.dumps(grammar)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": []}, "messages: it is empty"),
        (CHAT, {"response_format": {"type": None}}, "response_format.type: it is missing"),
        (RESPONSES, {"input": []}, "input: it is empty"),
        (CHAT, {"tool_choice": ALLOWED}, "tool_choice needs tools"),
        (
            CHAT,
            {"chat_template_kwargs": {"tools": [TOOL]}},
            "chat_template_kwargs: tools is a parameter of the request itself",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [PICTURED]}]},
            "messages.0.content: this model reads text only; got a part of type 'image'",
        ),
    ],
)
def test_errors_are_about_the_clients_values(path: str, body: Any, words: str) -> None:
    answer = chat_client(FakeBackend()).post(path, json={**REQUESTS[path], **body})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, words)


SEARCH = {"type": "web_search_call", "id": "w", "status": "completed"}
PATCH = {"call_id": "c", "name": "apply_patch", "input": "a\nb"}


def test_items_of_other_servers_tools_are_skipped_and_custom_calls_are_read() -> None:
    backend = FakeBackend()
    items = [
        {"role": "user", "content": "Hi"},
        SEARCH,
        {"type": "custom_tool_call", **PATCH},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "patched"},
    ]
    template = ChatTemplate({"default": "{{ messages | tojson }}"}, {})
    client = client_of(served(backend, max_len=1000, template=template))
    answer = client.post(RESPONSES, json={"input": items})
    assert answer.status_code == 200
    assert "web_search_call" in answer.headers["x-warning"]
    user, call, output = json.loads(GPT2.decode(backend.requests[0].prompt_ids))
    assert user["content"] == "Hi" and output["content"] == "patched"
    function = call["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ("apply_patch", {"input": "a\nb"})


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}, "T\nD"),
        (
            {"type": "document", "source": {"type": "content", "content": [{"text": "C"}]}},
            "C",
        ),
        (
            {"type": "search_result", "title": "T", "source": "S", "content": [{"text": "C"}]},
            "T\nS\nC",
        ),
        ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, ""),
        ({"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, ""),
    ],
)
def test_blocks_of_messages_that_have_a_text_are_read(block: dict[str, Any], text: str) -> None:
    backend = FakeBackend()
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 2}
    assert chat_client(backend).post(MESSAGES, json=body).status_code == 200
    prompt = GPT2.decode(backend.requests[0].prompt_ids)
    assert prompt == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    file = {"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}
    body["messages"] = [{"role": "user", "content": [file]}]
    answer = chat_client(backend).post(MESSAGES, json=body)
    assert answer.status_code == 400 and "'document'" in answer.json()["error"]["message"]
