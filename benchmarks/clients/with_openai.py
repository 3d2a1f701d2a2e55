"""OpenAI's own client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import openai

from benchmarks.clients.target import (
    MESSAGES,
    PROMPT,
    SENTENCE,
    TOKENS,
    Target,
    Trial,
    check,
    same,
)

PACKAGES = ("openai",)
_LONG = 2000


def trials(target: Target) -> list[Trial]:
    client = openai.OpenAI(base_url=target.openai, api_key="none", max_retries=0)
    completions, chats = client.completions.create, client.chat.completions.create
    asked = {"model": target.model, "max_tokens": TOKENS, "temperature": 0}

    def streamed() -> str:
        events = completions(
            **asked, prompt=PROMPT, stream=True, stream_options={"include_usage": True}
        )
        *pieces, last = events
        check(last.usage.completion_tokens == TOKENS, last.usage)
        return same("".join(piece.choices[0].text for piece in pieces), target.completion)

    def log_probs() -> str:
        choice = completions(**asked, prompt=PROMPT, logprobs=3).choices[0]
        found = choice.logprobs
        check(len(found.tokens) == len(found.top_logprobs) == TOKENS, found)
        check(all(len(top) >= 3 for top in found.top_logprobs), found.top_logprobs)
        # The greedy token is the likeliest one.
        likeliest = [max(top.values()) for top in found.top_logprobs]
        check(likeliest == found.token_logprobs, found)
        return same("".join(found.tokens), target.completion)

    def chat_log_probs() -> str:
        content = chats(**asked, messages=MESSAGES, logprobs=True, top_logprobs=2)
        entries = content.choices[0].logprobs.content
        return check(
            all(len(entry.top_logprobs) == 2 for entry in entries), f"{len(entries)} tokens"
        )

    def several() -> str:
        answer = completions(**{**asked, "temperature": 1}, prompt=[PROMPT, "A"], n=3, seed=1)
        return check(
            [choice.index for choice in answer.choices] == list(range(6)),
            f"{len(answer.choices)} choices",
        )

    def streamed_chat() -> str:
        events = chats(**asked, messages=MESSAGES, stream=True)
        texts = [event.choices[0].delta.content or "" for event in events]
        return same("".join(texts), target.chat)

    async def asynchronously() -> str:
        async with openai.AsyncOpenAI(base_url=target.openai, api_key="none") as other:
            answers = await asyncio.gather(
                *(other.completions.create(**asked, prompt=PROMPT) for _ in range(4))
            )
            events = await other.chat.completions.create(**asked, messages=MESSAGES, stream=True)
            chat = "".join([event.choices[0].delta.content or "" async for event in events])
        same(chat, target.chat)
        return same("".join({answer.choices[0].text for answer in answers}), target.completion)

    def closed() -> str:
        events = completions(
            model=target.model, prompt="a", max_tokens=_LONG, n=4, stream=True, extra_body=_ENDLESS
        )
        next(iter(events))
        check(target.rows_running() == 4, target.rows_running())
        events.close()
        return freed(target)

    def timed_out() -> str:
        failed = raises(
            openai.APITimeoutError,
            lambda: client.with_options(timeout=1.0).completions.create(
                model=target.model, prompt="a", max_tokens=_LONG, extra_body=_ENDLESS
            ),
        )
        return f"{failed}; {freed(target)}"

    found: list[Trial] = [
        ("models", lambda: check(target.model in {m.id for m in client.models.list()}, "listed")),
        (
            "completion",
            lambda: same(completions(**asked, prompt=PROMPT).choices[0].text, target.completion),
        ),
        ("completion, stream, usage", streamed),
        ("completion, logprobs", log_probs),
        ("completion, two prompts, n=3", several),
        (
            "chat",
            lambda: same(
                chats(**asked, messages=MESSAGES).choices[0].message.content or "", target.chat
            ),
        ),
        ("chat, stream", streamed_chat),
        ("chat, logprobs", chat_log_probs),
        ("async: four completions, a stream", lambda: asyncio.run(asynchronously())),
        ("stream closed: rows are freed", closed),
        ("timeout: rows are freed", timed_out),
        (
            "embeddings",
            lambda: raises(
                openai.NotFoundError,
                lambda: client.embeddings.create(model=target.model, input="a"),
            ),
        ),
        (
            "no such model",
            lambda: raises(openai.NotFoundError, lambda: completions(model="none", prompt="a")),
        ),
        (
            "a wrong parameter",
            lambda: raises(
                openai.BadRequestError,
                lambda: completions(model=target.model, prompt="a", temperature=-1),
            ),
        ),
    ]
    if target.t5 is not None:
        found.append(
            (
                "T5: a translation",
                lambda: check(
                    text := completions(
                        model=target.t5, prompt=SENTENCE, temperature=0, max_tokens=40
                    )
                    .choices[0]
                    .text,
                    text,
                ),
            )
        )
    return found


_ENDLESS = {"ignore_eos": True}


def raises(kind: type[Exception], call: Callable[[], object]) -> str:
    """The name of the error that `call` has to raise."""
    try:
        return check(False, call())
    except kind:
        return kind.__name__


def freed(target: Target) -> str:
    """How long the server has rows after a client has gone."""
    left = time.monotonic()
    while target.rows_running():
        if time.monotonic() > left + 60:
            return check(False, "rows that nobody waits for")
        time.sleep(0.02)
    return f"freed in {time.monotonic() - left:.1f} s"
