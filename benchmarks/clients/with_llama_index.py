"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from benchmarks.clients.target import PROMPT, QUESTION, TOKENS, Target, Trial, same

PACKAGES = ("llama-index-llms-openai-like", "openai")


def trials(target: Target) -> list[Trial]:
    common = {"api_base": target.openai, "api_key": "none", "model": target.model}
    common |= {"temperature": 0, "max_tokens": TOKENS, "context_window": 2048}
    text = OpenAILike(**common, is_chat_model=False)
    chat = OpenAILike(**common, is_chat_model=True)
    messages = [ChatMessage(role="user", content=QUESTION)]
    return [
        ("complete", lambda: same(text.complete(PROMPT).text, target.completion)),
        (
            "stream_complete",
            lambda: same(list(text.stream_complete(PROMPT))[-1].text, target.completion),
        ),
        ("chat", lambda: same(chat.chat(messages).message.content or "", target.chat)),
        (
            "stream_chat",
            lambda: same(list(chat.stream_chat(messages))[-1].message.content or "", target.chat),
        ),
    ]
