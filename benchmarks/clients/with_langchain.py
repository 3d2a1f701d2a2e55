"""LangChain's OpenAI and ChatOpenAI."""

from __future__ import annotations

from functools import partial

from langchain_openai import ChatOpenAI, OpenAI

from benchmarks.clients.target import PROMPT, QUESTION, TOKENS, Target, Trial, check, same

PACKAGES = ("langchain-openai", "openai")


def trials(target: Target) -> list[Trial]:
    common = {"base_url": target.openai, "api_key": "none", "model": target.model}
    common |= {"temperature": 0, "max_tokens": TOKENS}
    text, chat = OpenAI(**common), ChatOpenAI(**common)

    def log_probs() -> str:
        answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
        entries = answer.response_metadata["logprobs"]["content"]
        return check(all(len(entry["top_logprobs"]) == 2 for entry in entries), f"{len(entries)}")

    schema = {"title": "City", "type": "object", "required": ["large"]}
    schema |= {"properties": {"large": {"type": "boolean"}}, "additionalProperties": False}

    def structured(method: str) -> str:
        city = chat.bind(max_tokens=40).with_structured_output(schema, method=method)
        answer = city.invoke("Is Paris large? Answer as JSON.")
        return check(type(answer["large"]) is bool, answer)

    def tools() -> str:
        one = {"tool_choice": "any", "parallel_tool_calls": False, "max_tokens": 120}
        (call,) = chat.bind_tools([schema], **one).invoke("Is Paris large?").tool_calls
        return check(call["name"] == "City" and type(call["args"]["large"]) is bool, call)

    return [
        ("OpenAI.invoke", lambda: same(text.invoke(PROMPT), target.completion)),
        ("OpenAI.stream", lambda: same("".join(text.stream(PROMPT)), target.completion)),
        ("OpenAI.batch", lambda: same(text.batch([PROMPT, "A"])[0], target.completion)),
        ("ChatOpenAI.invoke", lambda: same(str(chat.invoke(QUESTION).content), target.chat)),
        (
            "ChatOpenAI.stream",
            lambda: same("".join(str(one.content) for one in chat.stream(QUESTION)), target.chat),
        ),
        (
            "ChatOpenAI.batch",
            lambda: same(str(chat.batch(["Hello", QUESTION])[1].content), target.chat),
        ),
        ("ChatOpenAI, logprobs", log_probs),
        *(
            (f"ChatOpenAI, with_structured_output, {method}", partial(structured, method))
            for method in ("json_schema", "function_calling")
        ),
        ("ChatOpenAI, bind_tools, any", tools),
    ]
