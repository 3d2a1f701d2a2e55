"""/v1/completions and /v1/chat/completions: from a request's body to OpenAI's answer or events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from launcher_scripts.gateway.admission import ThreadsOfClient
from launcher_scripts.gateway.api_errors import ApiError, bad_request, unsupported
from launcher_scripts.gateway.generation import (
    Generation,
    GenerationOptions,
    Prompt,
    RequestLimits,
    RequestRecord,
    check_rows,
)
from launcher_scripts.gateway.harmony import REASONING, HarmonyText
from launcher_scripts.gateway.reasoning import NAMES, Reasoning, ReasoningText
from launcher_scripts.gateway.row_text import TextIncrement, of_chat, of_completion, token_names
from launcher_scripts.gateway.schemas import ChatBody, CompletionBody, NamedTool, SamplingBody
from launcher_scripts.gateway.served_model import ServedModel
from launcher_scripts.gateway.tool_calls import ToolCall, ToolText


class AnswerText:
    """Reads the text of one answer as it comes."""

    def __init__(
        self,
        reasoning: Reasoning | None,
        tools: Sequence[Mapping[str, Any]],
        *,
        lists_only: bool = False,
        must_call: bool = False,
    ) -> None:
        """tools, lists_only, must_call: see ToolText"""
        self._reasoning = None if reasoning is None else ReasoningText(reasoning)
        more = {"lists_only": lists_only, "must_call": must_call}
        self._tools = ToolText(tools, **more) if tools else None

    @property
    def calls(self) -> list[ToolCall]:
        """Complete calls."""
        return [] if self._tools is None else self._tools.calls

    def feed(self, text: str, *, finished: bool) -> dict[str, Any]:
        """Return the new part of a message, without its calls. finished: no more text comes"""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text, finished=finished)
        if self._tools is not None:
            text, _ = self._tools.feed(text, finished=finished)
        delta: dict[str, Any] = dict.fromkeys(NAMES, reasoning) if reasoning else {}
        return {**delta, "content": text} if text else delta


# OpenAI's default for completions.
_DEFAULT_TOKENS = 16
DONE = b"data: [DONE]\n\n"
_SOME_TEXT = "some text"  # in whose place the texts are written


class RequestAnswer(ABC):
    """One request on its way to its answer. Subclasses know the form of the answer."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: ServedModel, body: SamplingBody, generation: Generation) -> None:
        self.model = model
        self.body = body
        self.generation = generation
        self.names = token_names(model.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self.created = int(time.time())
        self._head = {
            "id": f"{self.prefix}-{generation.record.request_id}",
            "created": self.created,
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }
        if version := (model.current_digests or {}).get("weights_version"):
            self._head["weights_version"] = version
        opening = to_json({**self._head, "object": self.chunk_kind})
        self._opening = b"data: " + opening[:-1] + b',"choices":'
        self._frames: dict[int, list[bytes]] = {}

    async def full(self) -> dict[str, Any]:
        """The answer. Raises ApiError."""
        result: dict[int, list[TextIncrement]] = {}
        async with aclosing(self.generation.pieces()) as pieces:
            async for choice, piece in pieces:
                if piece.begins_again:
                    result[choice] = []
                else:
                    result.setdefault(choice, []).append(piece)
        answers = {choice: _joined(parts) for choice, parts in result.items()}
        size = sum(len(answer.entries) for answer in answers.values())
        size *= 1 + (self.generation.options.log_probs or 0)
        choices = await self.generation.threads.run(lambda: self._choices(answers), size)
        usage = self.generation.record.usage()
        head = {**self._head, **self._weights(), "object": self.kind}
        return {**head, "choices": choices, "usage": usage}

    def _choices(self, answers: Mapping[int, TextIncrement]) -> list[dict[str, Any]]:
        return [
            {"index": index, **self.choice(answers[choice])}
            for index, choice in enumerate(self._best(answers))
        ]

    def _weights(self) -> dict[str, Any]:
        """Return the fields of an answer whose weights are not those of the server's start."""
        weights = self.generation.record.weights
        if weights is None:
            return {}
        result: dict[str, Any] = {"system_fingerprint": weights.fingerprint}
        if weights.version is not None:
            result["weights_version"] = weights.version
        return {**result, "mixed_weights": True} if weights.mixed else result

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. Raises ApiError before the first one or, as the last
        event, says it.
        """
        options = self.body.stream_options
        counts = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        record = self.generation.record
        started: set[int] = set()
        try:
            async with aclosing(self.generation.pieces()) as pieces:
                async for choice, piece in pieces:
                    if choice not in started:
                        started.add(choice)
                        for first in self.first_deltas():
                            usage = _usage(None) if counts else b""
                            yield self._event(to_json([{"index": choice, **first}]), usage)
                    texts, last = piece.by_token()
                    if not texts and last is None:
                        continue
                    usage = _usage(record.usage() if always else None) if counts or always else b""
                    events = [self._event(text, usage) for text in self._of_texts(choice, texts)]
                    if last is not None:
                        for delta in self.last_deltas(choice, last):
                            choices = to_json([{"index": choice, **delta}])
                            events.append(self._event(choices, usage))
                    yield b"".join(events)
        except ApiError as error:
            if not started:
                raise
            yield self.failed(error)
        else:
            weights = self._weights()
            if weights.get("mixed_weights") or weights.items() - self._head.items():
                last_words = {**self._head, **weights, "object": self.chunk_kind, "choices": []}
                yield b"data: " + to_json(last_words) + b"\n\n"
            if counts:
                yield self._event(b"[]", _usage(record.usage()))
            yield DONE

    @staticmethod
    def failed(error: ApiError) -> bytes:
        """The end of a stream that has begun and cannot go on."""
        return b"data: " + to_json(error.body()) + b"\n\n" + DONE

    @abstractmethod
    def choice(self, answer: TextIncrement) -> dict[str, Any]:
        """A whole answer without its index."""

    def first_deltas(self) -> Sequence[dict[str, Any]]:
        """Return the deltas before a choice's first text."""
        return ()

    @abstractmethod
    def delta(self, piece: TextIncrement) -> dict[str, Any]:
        """Return the new part of a choice, without its index."""

    def last_deltas(self, choice: int, piece: TextIncrement) -> Sequence[dict[str, Any]]:  # noqa: ARG002
        """Return the new parts of a choice whose delta has more than text."""
        return (self.delta(piece),)

    def _event(self, choices: bytes, usage: bytes) -> bytes:
        """A server-sent event. choices: JSON;  usage: of `_usage`, or nothing"""
        return b"".join((self._opening, choices, usage, b"}\n\n"))

    def _of_texts(self, choice: int, texts: Sequence[str]) -> Iterator[bytes]:
        """The choices of an event, for tokens that add these texts and nothing else.

        Every token of a streamed answer passes here, so what surrounds the text is made once.
        """
        if texts and choice not in self._frames:
            choices = [{"index": choice, **self.delta(TextIncrement(_SOME_TEXT))}]
            self._frames[choice] = to_json(choices).split(to_json(_SOME_TEXT))
        for text in texts:
            yield to_json(text).join(self._frames[choice])

    def _best(self, answers: Mapping[int, TextIncrement]) -> list[int]:
        """The choices that are shown: of every prompt's rows the n likeliest per token."""
        rows, num_choices = self.generation.options.rows, self.body.n
        result = []
        for start in range(0, len(self.generation.prompts) * rows, rows):
            row = [choice for choice in range(start, start + rows) if choice in answers]
            if rows > num_choices and not self.body.use_beam_search:
                row.sort(key=lambda choice: _mean(answers[choice]), reverse=True)
            result += row[:num_choices]
        return result


class Completion(RequestAnswer):
    """Responses of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"
    body: CompletionBody

    @classmethod
    async def of(
        cls, model: ServedModel, body: CompletionBody, record: RequestRecord, limits: RequestLimits
    ) -> Completion:
        """Raises ApiError for what cannot be done."""
        max_tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        rows = body.n if body.best_of is None else body.best_of
        check_rows(len(body.prompt), rows, limits.admission)
        model = model.between(body.source_language, body.target_language)
        prompts = await _prompts(model, body, limits.threads.of(record.client))
        options = GenerationOptions(max_tokens, rows, body.logprobs, body.echo)
        generation = await Generation.of(model, body, prompts, options, record, limits)
        return cls(model, body, generation)

    def choice(self, answer: TextIncrement) -> dict[str, Any]:
        return self.delta(answer)

    def delta(self, piece: TextIncrement) -> dict[str, Any]:
        top = self.body.logprobs
        return {
            "text": piece.text,
            "logprobs": None if top is None else of_completion(piece.entries, self.names, top),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }


class Chat(RequestAnswer):
    """Responses of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    body: ChatBody

    @classmethod
    async def of(
        cls, model: ServedModel, body: ChatBody, record: RequestRecord, limits: RequestLimits
    ) -> Chat:
        """Raises ApiError for what cannot be done."""
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs need logprobs", "top_logprobs")
        if body.tool_choice == "none":
            body = body.model_copy(update={"tools": None})
        elif body.tool_choice not in (None, "auto") and not body.tools:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if body.tools and body.stream and body.logprobs:
            raise unsupported("logprobs", "a stream with tools has no log-probabilities")
        if model.encodes:
            raise unsupported("messages", f"{model.name} is an encoder-decoder: no chat model")
        check_rows(1, body.n, limits.admission)
        threads = limits.threads.of(record.client)
        text = await model.chat_text(body, threads)
        (ids,) = await model.encode_aside([text], threads, special_tokens=body.add_special_tokens)
        requested = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        if body.max_completion_tokens not in (None, requested):
            message = f"max_tokens is another name for it; got {body.max_completion_tokens} and "
            raise bad_request(f"{message}{requested}", "max_completion_tokens")
        if requested is None:
            max_tokens = limits.chat_tokens if model.max_len is None else model.max_len - len(ids)
            requested = max(1, min(max_tokens, limits.chat_tokens))
        top = (body.top_logprobs or 0) if body.logprobs else None
        reasoning = None
        harmony = model.template is not None and model.template.writes_harmony
        if harmony:
            reasoning = REASONING
        elif model.template is not None:
            continues = body.continue_final_message
            reasoning = Reasoning.after(text, model.template.text, continues=continues)
        options = GenerationOptions(requested, body.n, top, reasoning=reasoning)
        prompts = [Prompt(ids, text)]
        generation = await Generation.of(model, body, prompts, options, record, limits)
        if body.tools or reasoning is not None:
            return ReadChat(model, body, generation, reasoning, text if harmony else None)
        return cls(model, body, generation)

    def choice(self, answer: TextIncrement) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text}
        return {"message": message, **self._common(answer)}

    def deltas(self, _choice: int, text: str, *, finished: bool) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the deltas of a response's next text. finished: it is the last one"""
        return [{"content": text}] if text else []

    def first_deltas(self) -> Sequence[dict[str, Any]]:
        first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return ({**first, "logprobs": None},)

    def delta(self, piece: TextIncrement) -> dict[str, Any]:
        content = {"content": piece.text} if piece.text or piece.entries else {}
        return {"delta": content, **self._common(piece)}

    def _common(self, piece: TextIncrement) -> dict[str, Any]:
        log_probs = None
        if self.body.logprobs:
            top = self.body.top_logprobs or 0
            log_probs = of_chat(piece.entries, self.model.tokenizer, self.names, top)
        return {
            "logprobs": log_probs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }


class ReadChat(Chat):
    """Responses of /v1/chat/completions whose text is parsed for reasoning and for tool calls."""

    def __init__(
        self,
        model: ServedModel,
        body: ChatBody,
        generation: Generation,
        reasoning: Reasoning | None,
        harmony: str | None,
    ) -> None:
        """harmony: the prompt of a model that writes it"""
        super().__init__(model, body, generation)
        choice = body.tool_choice
        self._named = choice.function.name if isinstance(choice, NamedTool) else None
        self._reasoning = reasoning
        self._harmony = harmony
        self._texts: dict[int, AnswerText | HarmonyText] = {}
        self._named_started: set[int] = set()

    def choice(self, answer: TextIncrement) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        text = self._new_text()
        message |= text.feed(answer.text, finished=True)
        calls = text.calls
        if self._named is not None:
            calls = [ToolCall(self._named, message["content"])]
            message["content"] = ""
        if calls:
            entries = [call.entry() for call in calls]
            message |= {"content": message["content"] or None, "tool_calls": entries}
        return {"message": message, **self._common(answer), **self._reason(answer, bool(calls))}

    def last_deltas(self, choice: int, piece: TextIncrement) -> Sequence[dict[str, Any]]:
        deltas = self.deltas(choice, piece.text, finished=piece.finish_reason is not None)
        if self.body.tools or not deltas:
            deltas.append({})
        called = choice in self._named_started or bool(self._texts[choice].calls)
        before = [{"delta": delta, **self._common(TextIncrement())} for delta in deltas[:-1]]
        return [
            *before,
            {"delta": deltas[-1], **self._common(piece), **self._reason(piece, called)},
        ]

    def _of_texts(self, choice: int, texts: Sequence[str]) -> Iterator[bytes]:
        for text in texts:
            for delta in self.deltas(choice, text, finished=False):
                yield to_json([{"index": choice, "delta": delta, **self._common(TextIncrement())}])

    def deltas(self, choice: int, text: str, *, finished: bool) -> list[dict[str, Any]]:
        texts = self._texts.setdefault(choice, self._new_text())
        num_calls = len(texts.calls)
        new = texts.feed(text, finished=finished)
        if self._named is not None:
            entries = self._named_call(choice, self._named, new.pop("content", ""), finished)
        else:
            entries = [call.entry(index) for index, call in enumerate(texts.calls)][num_calls:]
        return [delta for delta in (new, {"tool_calls": entries} if entries else {}) if delta]

    def _named_call(
        self, choice: int, name: str, arguments: str, finished: bool
    ) -> list[dict[str, Any]]:
        """Return the deltas of a forced call: its name once, its arguments as they come."""
        first = choice not in self._named_started
        if not arguments and not (first and finished):
            return []
        self._named_started.add(choice)
        entry: dict[str, Any] = ToolCall(name, "").entry(0) if first else {"index": 0}
        name_delta = {"name": name} if first else {}
        return [{**entry, "function": {**name_delta, "arguments": arguments}}]

    def _new_text(self) -> AnswerText | HarmonyText:
        tools = () if self._named else self.body.tools or ()
        must_call = bool(tools) and self.body.tool_choice == "required"
        lists = must_call or (bool(tools) and self.body.calls_are_lists)
        if self._harmony is None:
            return AnswerText(self._reasoning, tools, lists_only=lists, must_call=must_call)
        return HarmonyText(self._harmony, tools, lists_only=lists, must_call=must_call)

    @staticmethod
    def _reason(piece: TextIncrement, called: bool) -> dict[str, Any]:
        """An answer that ended by itself with calls ended because of them."""
        is_stop = piece.finish_reason == "stop" and called
        return {"finish_reason": "tool_calls"} if is_stop else {}


async def _prompts(
    model: ServedModel, body: CompletionBody, threads: ThreadsOfClient
) -> list[Prompt]:
    """The prompts of a body, which are texts or ids."""
    texts = [item for item in body.prompt if isinstance(item, str)]
    if texts:
        encoded = await model.encode_aside(texts, threads, special_tokens=body.add_special_tokens)
        return list(map(Prompt, encoded, texts))
    rows = [tuple(item) for item in body.prompt if not isinstance(item, str)]
    decode = model.tokenizer.decode if body.echo else lambda _: ""
    texts = await threads.run(lambda: list(map(decode, rows)), sum(map(len, rows)))
    return list(map(Prompt, rows, texts))


def _usage(usage: Mapping[str, int] | None) -> bytes:
    """An event's member `usage`."""
    return b',"usage":' + to_json(usage)


def _joined(parts: Sequence[TextIncrement]) -> TextIncrement:
    """The pieces of one answer as one."""
    entries = tuple(entry for part in parts for entry in part.entries)
    return parts[-1]._replace(text="".join(part.text for part in parts), entries=entries)


def _mean(answer: TextIncrement) -> float:
    """The mean log-probability of the generated tokens, which follow those of an echoed prompt."""
    entries = answer.entries[len(answer.entries) - answer.tokens :]
    values = [entry.log_prob.log_prob for entry in entries if entry.log_prob is not None]
    return sum(values) / len(values) if values else float("-inf")
