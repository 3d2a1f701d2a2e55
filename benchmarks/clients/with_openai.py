"""OpenAI's own client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

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
    each = Trials(target)
    found = [
        ("models", each.models),
        ("completion", each.completion),
        ("completion, stream, usage", each.streamed),
        ("completion, logprobs", each.log_probs),
        ("completion, two prompts, n=3", each.several),
        ("chat", each.chat),
        ("chat, stream", each.streamed_chat),
        ("chat, logprobs", each.chat_log_probs),
        ("responses", each.responses),
        ("responses, stream", each.streamed_responses),
        ("async: four completions, a stream", lambda: asyncio.run(each.asynchronously())),
        ("stream closed: rows are freed", each.closed),
        ("timeout: rows are freed", each.timed_out),
        ("embeddings", each.embeddings),
        ("no such model", each.no_such_model),
        ("a wrong parameter", each.wrong_parameter),
    ]
    return found if target.t5 is None else [*found, ("T5: a translation", each.translation)]


class Trials:
    """One method for each; see target.Trial."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.client = openai.OpenAI(base_url=target.openai, api_key="none", max_retries=0)
        self.completions = self.client.completions.create
        self.chats = self.client.chat.completions.create
        self.asked: dict[str, Any] = {
            "model": target.model,
            "max_tokens": TOKENS,
            "temperature": 0,
        }

    def models(self) -> str:
        return check(self.target.model in {m.id for m in self.client.models.list()}, "listed")

    def completion(self) -> str:
        answer = self.completions(**self.asked, prompt=PROMPT)
        return same(answer.choices[0].text, self.target.completion)

    def streamed(self) -> str:
        events = self.completions(
            **self.asked, prompt=PROMPT, stream=True, stream_options={"include_usage": True}
        )
        *pieces, last = events
        check(last.usage.completion_tokens == TOKENS, last.usage)
        return same("".join(piece.choices[0].text for piece in pieces), self.target.completion)

    def log_probs(self) -> str:
        found = self.completions(**self.asked, prompt=PROMPT, logprobs=3).choices[0].logprobs
        check(len(found.tokens) == len(found.top_logprobs) == TOKENS, found)
        check(all(len(top) >= 3 for top in found.top_logprobs), found.top_logprobs)
        # The greedy token is the likeliest one.
        likeliest = [max(top.values()) for top in found.top_logprobs]
        check(likeliest == found.token_logprobs, found)
        return same("".join(found.tokens), self.target.completion)

    def several(self) -> str:
        asked = {**self.asked, "temperature": 1}
        answer = self.completions(**asked, prompt=[PROMPT, "A"], n=3, seed=1)
        return check(
            [choice.index for choice in answer.choices] == list(range(6)),
            f"{len(answer.choices)} choices",
        )

    def chat(self) -> str:
        answer = self.chats(**self.asked, messages=MESSAGES)
        return same(answer.choices[0].message.content or "", self.target.chat)

    def streamed_chat(self) -> str:
        events = self.chats(**self.asked, messages=MESSAGES, stream=True)
        texts = [event.choices[0].delta.content or "" for event in events]
        return same("".join(texts), self.target.chat)

    def responses(self) -> str:
        return same(self.client.responses.create(**self._response()).output_text, self.target.chat)

    def streamed_responses(self) -> str:
        with self.client.responses.stream(**self._response()) as stream:
            *others, last = stream
        deltas = [event.delta for event in others if event.type == "response.output_text.delta"]
        check(last.response.output_text == "".join(deltas), last)
        return same(last.response.output_text, self.target.chat)

    def _response(self) -> dict[str, Any]:
        asked = {"model": self.target.model, "max_output_tokens": TOKENS, "temperature": 0}
        return {**asked, "input": MESSAGES}

    def chat_log_probs(self) -> str:
        answer = self.chats(**self.asked, messages=MESSAGES, logprobs=True, top_logprobs=2)
        entries = answer.choices[0].logprobs.content
        return check(
            all(len(entry.top_logprobs) == 2 for entry in entries), f"{len(entries)} tokens"
        )

    async def asynchronously(self) -> str:
        async with openai.AsyncOpenAI(base_url=self.target.openai, api_key="none") as other:
            answers = await asyncio.gather(
                *(other.completions.create(**self.asked, prompt=PROMPT) for _ in range(4))
            )
            asked = {**self.asked, "messages": MESSAGES, "stream": True}
            events = await other.chat.completions.create(**asked)
            chat = "".join([event.choices[0].delta.content or "" async for event in events])
        same(chat, self.target.chat)
        texts = {answer.choices[0].text for answer in answers}
        return same("".join(texts), self.target.completion)

    def closed(self) -> str:
        events = self.completions(**self._endless(), n=4, stream=True)
        next(iter(events))
        check(self.target.rows_running() == 4, self.target.rows_running())
        events.close()
        return freed(self.target)

    def timed_out(self) -> str:
        hurried = self.client.with_options(timeout=1.0)
        failed = raises(
            openai.APITimeoutError, lambda: hurried.completions.create(**self._endless())
        )
        return f"{failed}; {freed(self.target)}"

    def embeddings(self) -> str:
        return raises(
            openai.NotFoundError,
            lambda: self.client.embeddings.create(model=self.target.model, input="a"),
        )

    def no_such_model(self) -> str:
        return raises(openai.NotFoundError, lambda: self.completions(model="none", prompt="a"))

    def wrong_parameter(self) -> str:
        return raises(
            openai.BadRequestError,
            lambda: self.completions(model=self.target.model, prompt="a", temperature=-1),
        )

    def translation(self) -> str:
        answer = self.completions(
            model=self.target.t5, prompt=SENTENCE, temperature=0, max_tokens=40
        )
        text = answer.choices[0].text
        return check(text, text)

    def _endless(self) -> dict[str, Any]:
        """A request that takes longer than anybody waits for it."""
        asked = {"model": self.target.model, "prompt": "a", "max_tokens": _LONG}
        return {**asked, "extra_body": {"ignore_eos": True}}


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
