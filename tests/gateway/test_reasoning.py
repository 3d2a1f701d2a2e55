"""What a model thinks before it answers, as OpenAI's clients get it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.gateway.reasoning import DELIMITERS, Reasoning, ReasoningText
from launcher_scripts.gateway.row_text import token_texts
from launcher_scripts.gateway.served_model import ChatTemplate
from tests.gateway.fakes import CHATML, GPT2, FakeBackend, saying
from tests.gateway.test_chat import HI, chat_client
from tests.gateway.test_completions import events
from tests.gateway.test_responses import ROUTE, responses
from tests.gateway.test_tool_calls import BERLIN, TOOLS, hermes

# As Qwen 3's: an answer of the conversation is shown without what was thought before it.
HYBRID = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
OPENED = HYBRID.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")  # as DeepSeek R1's
CHATS = "/v1/chat/completions"
THOUGHT = "They say hi. I say hi."
ANSWER = "Hi!"
WHOLE = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"

# an answer's text -> what was thought, what is said
TEXTS = {
    "both": (WHOLE, THOUGHT, ANSWER),
    "nothing thought": (f"<think>\n\n</think>\n\n{ANSWER}", "", ANSWER),
    "no marks": (f"\n{ANSWER} a < b", "", f"\n{ANSWER} a < b"),
    "cut off": (f"<think>{THOUGHT} </thi", f"{THOUGHT} </thi", ""),
    "marks in the answer": (f"{WHOLE} </think> <think>", THOUGHT, f"{ANSWER} </think> <think>"),
    "blanks within": ("<think>a\n\n b</think>c \n d", "a\n\n b", "c \n d"),
    "half a mark": ("<thi", "", "<thi"),
    "empty": ("", "", ""),
}


def client_of(template: str, text: str) -> tuple[FakeBackend, Any]:
    backend = saying(text)
    client = chat_client(backend, template=ChatTemplate({"default": template}, {}))
    return backend, client


def message(template: str, text: str, **body: Any) -> dict[str, Any]:
    _, client = client_of(template, text)
    request = {"messages": HI, "max_tokens": 500, **body}
    answer = client.post(CHATS, json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_a_text_whole_and_as_it_comes(name: str, size: int) -> None:
    text, thought, said = TEXTS[name]
    assert read(ReasoningText(Reasoning("<think>", "</think>")), text, size) == (thought, said)
    if text.startswith("<think>"):
        for once in (text, text.removeprefix("<think>")):
            begun = ReasoningText(Reasoning("<think>", "</think>", started=True))
            assert read(begun, once, size) == (thought, said)


def read(reader: ReasoningText, text: str, size: int) -> tuple[str, str]:
    """What was thought and what is said of a text that comes in pieces."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found = [reader.feed(piece, finished=False) for piece in pieces]
    found.append(reader.feed("", finished=True))
    return "".join(thought for thought, _ in found), "".join(said for _, said in found)


def test_words_are_not_held_back() -> None:
    reader = ReasoningText(Reasoning("<think>", "</think>"))
    assert reader.feed("<think>\nI ", finished=False) == ("I", "")
    assert reader.feed("am", finished=False) == (" am", "")
    assert reader.feed("</thin", finished=False) == ("", "")
    assert reader.feed("k>\nSo", finished=False) == ("", "So")
    assert reader.feed(" <", finished=False) == ("", " <")


def test_a_template_tells_whether_a_model_thinks() -> None:
    assert Reasoning.after("a prompt", CHATML) is None
    assert Reasoning.after("<think>?", HYBRID) == Reasoning("<think>", "</think>")
    assert Reasoning.after("assistant\n<think>\n", OPENED) == Reasoning("<think>", "</think>", True)
    closed = Reasoning.after("<think>\n\n</think>\n\n", OPENED, continues=True)
    assert closed == Reasoning("<think>", "</think>")
    within = Reasoning.after("</think> <think> I am", OPENED, continues=True)
    assert within == Reasoning("<think>", "</think>", True)


@pytest.mark.parametrize(
    ("template", "text"), [(HYBRID, WHOLE), (OPENED, WHOLE.removeprefix("<think>"))]
)
def test_an_answer_has_its_reasoning_apart(template: str, text: str) -> None:
    thought = {"reasoning": THOUGHT, "reasoning_content": THOUGHT}
    assert message(template, text) == {"role": "assistant", "content": ANSWER, **thought}
    assert message(CHATML, text) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("at_once", [1, 4, 1000])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
def test_a_stream_has_its_reasoning_apart(at_once: int, more: dict[str, Any]) -> None:
    backend, client = client_of(HYBRID, WHOLE)
    backend.at_once = at_once
    request = {"messages": HI, "stream": True, "max_tokens": 500, **more}
    found = {"reasoning": "", "reasoning_content": "", "content": ""}
    entries, reasons = 0, []
    for event in events(client, CHATS, **request):
        (choice,) = event["choices"]
        for name in found:
            found[name] += choice["delta"].get(name) or ""
        entries += len((choice["logprobs"] or {"content": ()})["content"])
        reasons.append(choice["finish_reason"])
    assert found == {"reasoning": THOUGHT, "reasoning_content": THOUGHT, "content": ANSWER}
    assert reasons[-1] == "stop" and not any(reasons[:-1])
    assert entries == (len(GPT2.encode(WHOLE)) + 1 if more else 0)


def test_what_is_thought_calls_no_tool() -> None:
    call = hermes("weather", BERLIN)
    found = message(HYBRID, f"<think>{call}</think>\n{call}", tools=TOOLS)
    assert found["reasoning"] == call.strip() and len(found["tool_calls"]) == 1
    assert found["content"] is None
    named = {"type": "function", "function": {"name": "clock"}}
    (only,) = message(HYBRID, "{}", tools=TOOLS, tool_choice=named)["tool_calls"]
    assert only["function"] == {"name": "clock", "arguments": "{}"}


@pytest.mark.parametrize(
    ("template", "first", "marks"),
    [
        (HYBRID, "<think>", {"begin": "<think>", "end": "</think>"}),
        (OPENED, "", {"end": "</think>"}),
        (CHATML, None, None),
    ],
)
def test_a_text_of_a_given_form_comes_behind_what_is_thought(template, first, marks) -> None:
    text = '{"a": 1}' if first is None else f'{first}{THOUGHT}</think>\n\n{{"a": 1}}'
    backend, client = client_of(template, text)
    request = {"messages": HI, "max_tokens": 500, "response_format": {"type": "json_object"}}
    (choice,) = client.post(CHATS, json=request).json()["choices"]
    assert choice["message"]["content"] == '{"a": 1}'
    assert choice["message"].get("reasoning") == (None if first is None else THOUGHT)
    grammar = {"json_object": True} | ({} if marks is None else {"reasoning": marks})
    assert json.loads(backend.requests[0].grammar) == grammar


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called_behind_what_is_thought(stream: bool) -> None:
    _, client = client_of(OPENED, f'{THOUGHT}</think>\n\n{{"zone": 1}}')
    named = {"type": "function", "function": {"name": "clock"}}
    request = {"messages": HI, "max_tokens": 500, "tools": TOOLS, "tool_choice": named}
    thought, name, arguments = "", "", ""
    if stream:
        found = [each["choices"][0] for each in events(client, CHATS, **request, stream=True)]
        said = [choice["delta"] for choice in found]
        reason = found[-1]["finish_reason"]
    else:
        (choice,) = client.post(CHATS, json=request).json()["choices"]
        said, reason = [choice["message"]], choice["finish_reason"]
    for each in said:
        assert not each.get("content")
        thought += each.get("reasoning") or ""
        for call in each.get("tool_calls") or ():
            name += call["function"].get("name") or ""
            arguments += call["function"]["arguments"]
    assert (thought, name, arguments) == (THOUGHT, "clock", '{"zone": 1}')
    assert reason == "tool_calls"


@pytest.mark.parametrize(("begin", "end"), DELIMITERS)
def test_every_maker_s_marks(begin: str, end: str) -> None:
    template = CHATML + "{# " + begin + end + " #}"
    found = message(template, f"{begin}\n{THOUGHT}{end}{ANSWER}")
    assert (found["reasoning"], found["content"]) == (THOUGHT, ANSWER)


def test_marks_that_are_special_tokens_are_text(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(GPT2.to_json())
    library.add_special_tokens(["<think>", "</think>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(WHOLE)
    assert "think" not in tokenizer.decode(ids)
    assert "".join(token_texts(tokenizer, ()).feed(ids, finished=True)) == WHOLE


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_template_gets_what_was_thought_before(name: str) -> None:
    for reads in ("reasoning", "reasoning_content"):
        template = "{% for m in messages %}[{{ m." + reads + " }}]{% endfor %}"
        backend, client = client_of(template, ANSWER)
        turn = {"role": "assistant", "content": ANSWER, name: THOUGHT}
        body = {"messages": [*HI, turn, *HI]}
        assert client.post(CHATS, json=body).status_code == 200
        assert GPT2.decode(backend.requests[0].prompt_ids) == f"[][{THOUGHT}][]"


def test_a_template_gets_the_effort() -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    for body, text in (
        ({}, " "),
        ({"reasoning_effort": "high"}, "high True"),
        ({"reasoning_effort": "none"}, "none False"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 3}}, "low 3"),
    ):
        backend, client = client_of(template, ANSWER)
        client.post(CHATS, json={"messages": HI, **body})
        assert GPT2.decode(backend.requests[0].prompt_ids) == text
    said = client.post(CHATS, json={"messages": HI, "reasoning_effort": "much"})
    assert said.status_code == 400 and "'none', 'minimal'" in said.json()["error"]["message"]


def test_a_response_has_an_item_of_reasoning() -> None:
    _, client = client_of(HYBRID, WHOLE)
    body = {"input": "Hi", "reasoning": {"effort": "high"}}
    answer = responses.Response.model_validate(client.post(ROUTE, json=body).json())
    thought, said = answer.output
    assert (thought.type, thought.status) == ("reasoning", "completed")
    assert [part.text for part in thought.content] == [THOUGHT]
    assert answer.output_text == ANSWER and answer.reasoning.effort == "high"
    assert answer.usage.output_tokens_details.reasoning_tokens == len(GPT2.encode(THOUGHT))
    sent = [item.model_dump() for item in (thought, said)]
    again, empty = {"type": "reasoning", "content": sent[0]["content"]}, {"type": "reasoning"}
    for items, thoughts in (
        (sent, [THOUGHT]),
        (sent[1:], []),
        ([again, empty, *sent], [THOUGHT, "\n", THOUGHT]),
    ):
        reads = "{% for m in messages %}{{ m.role }}[{{ m.reasoning_content }}]{% endfor %}"
        backend, client = client_of(reads, ANSWER)
        question = {"role": "user", "content": "Hi"}
        assert client.post(ROUTE, json={"input": [question, *items]}).status_code == 200
        prompt = GPT2.decode(backend.requests[0].prompt_ids)
        assert prompt == f"user[]assistant[{''.join(thoughts)}]"


def test_a_streamed_response_has_an_item_of_reasoning() -> None:
    _, client = client_of(HYBRID, WHOLE)
    answer = client.post(ROUTE, json={"input": "Hi", "stream": True})
    kinds = [line[len("event: ") :] for line in answer.text.splitlines() if line[:1] == "e"]
    assert [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize("template", [CHATML, HYBRID, OPENED])
@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"guided_choice": ["a", "b"]}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, True),
        ({"tools": TOOLS}, False),
        ({}, False),
    ],
)
def test_drafts_are_refused_by_name_with_a_grammar_alone(
    template: str, body: dict[str, Any], is_refused: bool
) -> None:
    """With reasoning before the grammar, and without."""
    backend, client = client_of(template, ANSWER)
    request = {"messages": HI, "max_tokens": 500, "num_speculative_tokens": 4, **body}
    answer = client.post(CHATS, json=request)
    if is_refused:
        assert answer.json()["error"]["param"] == "num_speculative_tokens"
        assert answer.status_code == 400 and not backend.requests
        return
    assert answer.status_code == 200
    assert [each.num_speculative_tokens for each in backend.requests] == [4]
