"""The answers of gpt-oss, whose text is several messages with headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.gateway.harmony import DELIMITERS, HarmonyText, conversation
from launcher_scripts.gateway.row_text import token_texts
from tests.gateway.fakes import GPT2
from tests.gateway.test_chat import HI
from tests.gateway.test_completions import events
from tests.gateway.test_reasoning import CHATS, client_of
from tests.gateway.test_tool_calls import BERLIN, TOOLS

# Of gpt-oss's own what the gateway looks at: how messages are written, and what it reads of them.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}"
    "{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THOUGHT, ANSWER = "They say hi.\nI say hi.", "Hi! a < b"
NEXT = "<|end|><|start|>assistant"


def thinks(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}"


def answers(text: str) -> str:
    return f"<|channel|>final<|message|>{text}"


def calls(name: str, arguments: dict[str, Any]) -> str:
    to = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{to}<|message|>{json.dumps(arguments)}"


CALL = calls("weather", BERLIN)
# an answer's text -> what was thought, what is said, the functions called
TEXTS: dict[str, tuple[str, str, str, list[str]]] = {
    "both": (thinks(THOUGHT) + NEXT + answers(ANSWER), THOUGHT, ANSWER, []),
    "nothing thought": (answers(ANSWER), "", ANSWER, []),
    "no header": (ANSWER, "", ANSWER, []),
    "empty": ("", "", "", []),
    "a mark is cut": (thinks(f"{THOUGHT}<|en"), f"{THOUGHT}<|en", "", []),
    "a header is cut": (thinks(THOUGHT) + NEXT + "<|channel|>fi", THOUGHT, "", []),
    "a call": (thinks(THOUGHT) + NEXT + CALL, THOUGHT, "", ["weather"]),
    "two calls": (CALL + NEXT + calls("clock", {}), "", "", ["weather", "clock"]),
    "words before a call": (
        f"{thinks(THOUGHT)}{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{CALL}",
        THOUGHT,
        "I look.",
        ["weather"],
    ),
    "the recipient is first": (
        " to=functions.clock<|channel|>commentary json<|message|>{}",
        "",
        "",
        ["clock"],
    ),
    "a call without an end": (
        CALL + "<|start|>assistant" + answers(ANSWER),
        "",
        ANSWER,
        ["weather"],
    ),
    "no tool of the request": (calls("rain", BERLIN), json.dumps(BERLIN), "", []),
    "two thoughts": (thinks("a") + NEXT + thinks("b") + NEXT + answers("c"), "a\nb", "c", []),
}


@pytest.mark.parametrize("size", [1, 3, 10**6])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_whole_and_as_it_comes(name: str, size: int) -> None:
    text, thought, content, called = TEXTS[name]
    reader = HarmonyText(PROMPT, TOOLS)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found = [reader.feed(piece, finished=False) for piece in pieces]
    found.append(reader.feed("", finished=True))
    assert "".join(each.get("reasoning", "") for each in found) == thought
    assert "".join(each.get("content", "") for each in found) == content
    assert [call.name for call in reader.calls] == called
    assert all(json.loads(call.arguments) in (BERLIN, {}) for call in reader.calls)


def test_words_are_not_held_back() -> None:
    reader = HarmonyText(PROMPT, TOOLS)
    assert reader.feed(thinks("I "), finished=False)["reasoning"] == "I "
    assert reader.feed("am<|e", finished=False)["reasoning"] == "am"
    assert reader.feed(NEXT[3:] + answers("So"), finished=False) == {"content": "So"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(stream: bool) -> None:
    for text, more, reason in (
        (thinks(THOUGHT) + NEXT + answers(ANSWER), {}, "stop"),
        (thinks(THOUGHT) + NEXT + CALL, {"tools": TOOLS}, "tool_calls"),
    ):
        _, client = client_of(TEMPLATE, text)
        body = {"messages": HI, "max_tokens": 500, **more}
        if stream:
            choices = [each["choices"][0] for each in events(client, CHATS, **body, stream=True)]
            said = [choice["delta"] for choice in choices]
        else:
            choices = client.post(CHATS, json=body).json()["choices"]
            said = [choices[0]["message"]]
        assert choices[-1]["finish_reason"] == reason
        assert "".join(each.get("reasoning") or "" for each in said) == THOUGHT
        content = "".join(each.get("content") or "" for each in said)
        called = [call["function"] for each in said for call in each.get("tool_calls") or ()]
        if more:
            assert (content, [each["name"] for each in called]) == ("", ["weather"])
            assert json.loads(called[0]["arguments"]) == BERLIN
        else:
            assert (content, called) == (ANSWER, [])


def test_a_text_of_a_given_form_is_the_answer() -> None:
    written = thinks(THOUGHT) + NEXT + answers('[{"name": "clock", "parameters": {}}]')
    backend, client = client_of(TEMPLATE, written)
    body = {"messages": HI, "max_tokens": 500, "tools": TOOLS, "tool_choice": "required"}
    (choice,) = client.post(CHATS, json=body).json()["choices"]
    marks = json.loads(backend.requests[0].grammar)["reasoning"]
    assert marks == {"begin": thinks(""), "end": NEXT + answers("")}
    assert written.startswith(marks["begin"]) and marks["end"] in written
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": "{}"}
    named = {"type": "function", "function": {"name": "clock"}}
    _, client = client_of(TEMPLATE, thinks(THOUGHT) + NEXT + answers("{}"))
    (choice,) = client.post(CHATS, json={**body, "tool_choice": named}).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}


def test_an_answer_that_is_continued() -> None:
    backend, client = client_of(TEMPLATE, " you!")
    turn = {"role": "assistant", "content": "Hi", "reasoning": THOUGHT}
    body = {
        "messages": [*HI, turn],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    answer = client.post(CHATS, json=body).json()
    prompt = GPT2.decode(backend.requests[0].prompt_ids)
    assert prompt.endswith(f"{thinks(THOUGHT)}{NEXT}{answers('Hi')}")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": " you!"}


def call_of(call_id: str) -> dict[str, Any]:
    function = {"name": "clock", "arguments": "{}"}
    return {"id": call_id, "type": "function", "function": function}


def test_what_was_said_before_a_call_is_thought() -> None:
    """The template refuses both beside a call, and text that is null."""
    for thought, said, thinking in (
        (THOUGHT, "I look.", f"{THOUGHT}\nI look."),
        (THOUGHT, None, THOUGHT),
        (None, "I look.", None),
    ):
        turn = {"role": "assistant", "content": said, "tool_calls": [call_of("a")]}
        (found,) = conversation([{**turn, "reasoning": thought}])
        assert found.get("thinking") == thinking
        assert found["content"] == ("" if thought else said)
    turn = {"role": "assistant", "content": ANSWER, "reasoning": THOUGHT, "tool_calls": []}
    (found,) = conversation([turn])
    assert "tool_calls" not in found
    assert (found["content"], found["thinking"]) == (ANSWER, THOUGHT)


def test_several_calls_are_messages_each_before_what_it_gave() -> None:
    """The template shows the first call of a message, and takes it for that of all results."""
    first, second = call_of("a"), call_of("b")
    turn = {"role": "assistant", "content": None, "reasoning": THOUGHT}
    results = [
        {"role": "tool", "tool_call_id": call_id, "content": call_id} for call_id in ("b", "a", "c")
    ]
    user = {"role": "user", "content": "Hi"}
    found = conversation([user, {**turn, "tool_calls": [first, second]}, *results, user])
    assert [each["role"] for each in found] == [
        *("user", "assistant", "tool", "assistant", "tool", "tool", "user")
    ]
    assert [each["tool_calls"] for each in found if "tool_calls" in each] == [[first], [second]]
    assert [each["content"] for each in found if each["role"] == "tool"] == ["a", "b", "c"]
    assert [each.get("thinking") for each in found] == [None, THOUGHT, *[None] * 5]


@pytest.mark.parametrize("calls", [None, [], {}, "weather", 3, [{}], [3, None], [{"id": []}, "x"]])
def test_calls_that_are_none_are_the_templates(calls: Any) -> None:
    turn = {"role": "assistant", "content": "Hi", "tool_calls": calls}
    found = conversation([turn, {"role": "tool", "content": "a"}])
    assert len(found) == 2 + (isinstance(calls, list) and len(calls) == 2)
    _, client = client_of(TEMPLATE, ANSWER)
    body = {"messages": [*HI, turn, *HI], "max_tokens": 9}
    assert client.post(CHATS, json=body).status_code in (200, 400)


def test_its_marks_are_text_where_they_are_special_tokens(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(GPT2.to_json())
    library.add_special_tokens([*DELIMITERS, "<|return|>", "<|call|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    text = thinks(THOUGHT) + NEXT + CALL
    ids = tokenizer.encode(text + "<|call|>")
    assert "<|" not in tokenizer.decode(ids)
    assert "".join(token_texts(tokenizer, ()).feed(ids, finished=True)) == text
