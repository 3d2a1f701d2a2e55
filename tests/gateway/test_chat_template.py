"""Chat templates as transformers renders them, for templates in the style of published ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.limited_process import LimitedProcesses, WorkLimits
from launcher_scripts.gateway import served_model
from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.served_model import LIMITS, ChatTemplate

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SYSTEM = {"role": "system", "content": "Be short. <b>&amp;</b>"}
USER = {"role": "user", "content": "  Grüße, 漢字 🙂 'quoted' \"too\"\n"}
ANSWER = {"role": "assistant", "content": "<think>so</think>\nYes.  "}
AGAIN = {"role": "user", "content": "And then?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "content": '{"degrees": 7}', "tool_call_id": "call00001"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city <now>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "several": [USER, ANSWER, AGAIN],
    "all": [SYSTEM, USER, ANSWER, AGAIN],
    "tools": [USER, CALL, RESULT],
    "parts": [PARTS],
    "answered": [USER, ANSWER],
}
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def of_transformers(text: str, chat: list[dict[str, Any]], **more: Any) -> str | None:
    """transformers' rendering; None where the template refuses the chat."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    try:
        rendered, _ = utils.render_jinja_template(
            conversations=[chat], chat_template=text, **TOKENS, **more
        )
    except Exception:
        return None
    return rendered[0]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "with_tools"])
def test_a_chat_reads_as_transformers_renders_it(name: str, chat: str, tools: Any) -> None:
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate({"default": text}, TOKENS)
    for generates in (True, False):
        expected = of_transformers(text, CHATS[chat], tools=tools, add_generation_prompt=generates)
        if expected is None:
            with pytest.raises(ApiError, match="chat template") as refused:
                template.render(CHATS[chat], tools=tools, add_generation_prompt=generates)
            assert (refused.value.status, refused.value.param) == (400, "messages")
            continue
        found = template.render(CHATS[chat], tools=tools, add_generation_prompt=generates)
        assert found == expected


def test_every_template_renders_most_chats() -> None:
    """So that the comparison above is one of texts, not of refusals."""
    assert len(NAMES) >= 10
    for name in NAMES:
        text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        found = [of_transformers(text, chat, add_generation_prompt=True) for chat in CHATS.values()]
        assert sum(each is not None for each in found) >= 3, name


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen_tools", "zephyr"])
def test_a_last_message_is_continued_as_transformers_does(name: str) -> None:
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    chat = [USER, {"role": "assistant", "content": "Once upon"}]
    found = ChatTemplate({"default": text}, TOKENS).render(
        chat, add_generation_prompt=False, continue_final_message=True
    )
    assert found == of_transformers(text, chat, continue_final_message=True)
    assert found.endswith("Once upon")


def test_further_values_reach_the_template() -> None:
    text = (TEMPLATES / "qwen_tools.jinja").read_text(encoding="utf-8")
    template = ChatTemplate({"default": text}, TOKENS)
    found = template.render([USER], more={"enable_thinking": False})
    assert found == of_transformers(text, [USER], add_generation_prompt=True, enable_thinking=False)
    assert found.endswith("<think>\n\n</think>\n\n")
    reads = ChatTemplate({"default": "{{ documents | length if documents else 'none' }}"}, {})
    assert reads.render([USER], more={"self": 1}) == "none"
    assert reads.render([USER], more={"documents": [{"title": "a", "text": "b"}]}) == "1"


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with {{ tools | length }}"}, {})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=TOOLS) == "with 1"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.items() }}",
        "{{ range(100000000) | list | length }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(text: str) -> None:
    with pytest.raises(ApiError, match="chat template"):
        ChatTemplate({"default": text}, {}).render([USER])


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FILL = "{% set n = namespace(t='x' * 999) %}{% for i in range(99) %}{% set n.t = n.t * 2 %}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (LOOP, "more than 0.5 s of a processor"),
        (f"{FILL}{{% endfor %}}", "more than 256 MiB of memory"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "longer than 16777216 charac"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_is_limited_and_the_next_chat_is_not(monkeypatch, body, message) -> None:
    limits = replace(LIMITS, cpu_seconds=0.5) if body == LOOP else LIMITS
    monkeypatch.setattr(served_model, "_processes", lambda: processes_with(limits))
    text = f"{{% if messages[0].content == 'go' %}}{body}{{% endif %}}{{{{ messages[0].content }}}}"
    template = ChatTemplate({"default": text}, {})
    with pytest.raises(ApiError, match=message) as refused:
        template.render([{"role": "user", "content": "go"}])
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert template.render([USER]) == USER["content"]


@pytest.mark.parametrize("text", [LOOP, "{{ 'x' * 9999999999 }}", "{{ " + "(" * 9999])
def test_a_template_is_limited_when_it_is_loaded(monkeypatch, text) -> None:
    limits = replace(LIMITS, cpu_seconds=0.5) if text == LOOP else LIMITS
    monkeypatch.setattr(served_model, "_processes", lambda: processes_with(limits))
    try:
        assert not ChatTemplate({"default": text}, {}).takes_parts
    except ValueError as error:
        assert str(error)


@cache
def processes_with(limits: WorkLimits) -> LimitedProcesses:
    function = "launcher_scripts.common.rendering:make_renderer"
    return LimitedProcesses(function, None, limits, count=1)


def test_a_damaged_template_says_where() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate({"default": "a\n{% for %}"}, {})
