"""The text of one row as its tokens come, and the entries of its log-probabilities.

What each token of a row adds to its text, as the tokens come.

Put together the parts are the decoded row without its prompt, and none ends within a character: a
token that does adds nothing, the one that completes the character all of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, Protocol

from launcher_scripts.common.text_deltas import GrowingText
from launcher_scripts.common.tokenizer import Tokenizer
from launcher_scripts.gateway import harmony, tool_calls
from launcher_scripts.gateway.backend import Increment, TokenLogProb
from launcher_scripts.gateway.reasoning import DELIMITERS, StopTexts

# How many tokens of the prompt the first generated ones are decoded with.
_CONTEXT = 32


class TokenTexts(Protocol):
    """The text of one row."""

    def feed(self, ids: Sequence[int], *, finished: bool) -> list[str]:
        """Return the new text of each of the next tokens; with `finished` the last one adds all
        that was held back.

        Without ids at most one part, which is what was held back.
        """
        ...


def token_texts(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> TokenTexts:
    """Return the texts of a row whose text goes on after its prompt's.

    Where a text is its tokens' bytes, the marks around what a model thinks and calls are text,
    even if they are special tokens; and so are those of the format harmony.
    """
    context = prompt_ids[-_CONTEXT:]
    bytes_of = _bytes_of(tokenizer)
    return _Decoded(tokenizer.decode, context) if bytes_of is None else _Joined(bytes_of, context)


@cache
def _bytes_of(tokenizer: Tokenizer) -> Callable[[int], bytes] | None:
    """Return a function from tokens to bytes, cached; None if texts are not the tokens' bytes."""
    joined = tokenizer.joined_bytes
    if joined is None:
        return None
    texts = [*chain(*DELIMITERS), *tool_calls.MARKS]
    if tokenizer.special_id(harmony.CHANNEL) is not None:
        texts += harmony.DELIMITERS
    special = {tokenizer.special_id(mark): mark.encode() for mark in texts}
    return cache(lambda token: special[token] if token in special else joined(token))


class _Joined:
    """Texts of a vocabulary whose text is its tokens' bytes, one after the other."""

    def __init__(self, bytes_of: Callable[[int], bytes], context: Sequence[int]) -> None:
        self._bytes = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.feed(context, finished=False)

    def feed(self, ids: Sequence[int], *, finished: bool) -> list[str]:
        decode = self._decoder.decode
        parts = [decode(self._bytes(token_id)) for token_id in ids]
        if finished:
            tail = decode(b"", final=True)
            parts[-1:] = [parts[-1] + tail if parts else tail]
        return parts


class _Decoded:
    """Texts of any other tokenizer, which decodes the tokens together."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._text = GrowingText(decode)
        self._text.feed(0, context, prompt=len(context), finished=False)
        self._prompt = self._count = len(context)

    def feed(self, ids: Sequence[int], *, finished: bool) -> list[str]:
        last = len(ids) - 1
        parts = [
            self._next([token_id], finished and index == last) for index, token_id in enumerate(ids)
        ]
        return parts if ids else [self._next([], finished)]

    def _next(self, ids: Sequence[int], finished: bool) -> str:
        self._text.feed(self._count, ids, prompt=self._prompt, finished=finished)
        self._count += len(ids)
        return self._text.news()


@dataclass(frozen=True)
class LogProbEntry:
    """A token in an answer. offset: characters of the text before it; None: it has no log p."""

    token_id: int
    offset: int
    log_prob: TokenLogProb | None


class TextIncrement(NamedTuple):
    """New text of a row's response.

    tokens:        generated so far, those of a stop text included
    finish_reason: stop, length, or None while more may come
    stop_reason:   the stop text or the further end token that was met
    begins_again:  the pieces before this one do not count
    parts:         the text by its tokens, where it is shown as it came
    """

    text: str = ""
    entries: tuple[LogProbEntry, ...] = ()
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    begins_again: bool = False
    parts: tuple[str, ...] = ()

    def by_token(self) -> tuple[list[str], TextIncrement | None]:
        """The texts of the tokens that add text alone, and the last token's piece if it says more.

        Tokens are told apart where `parts` are known.
        """
        if self.entries:
            return [], self
        texts = [text for text in self.parts or (self.text,) if text]
        if self.finish_reason is None:
            return texts, None
        return texts[:-1], self._replace(text="".join(texts[-1:]), parts=())


class RowTextStream:
    """Turns the increments of one row into pieces of its text.

    Pieces put together are the whole text without the stop text, and none ends within a character.
    """

    def __init__(
        self,
        texts: TokenTexts,
        stops: StopTexts,
        end_id: int | None,
        stop_ids: Sequence[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        offset: int = 0,
    ) -> None:
        """end_id, stop_ids: tokens that end the row; see RowRequest

        max_tokens: a row that has fewer when the engine ends it was complete
        min_tokens: stop texts count from there on
        offset:     characters of the answer before the row's own
        """
        self._texts = texts
        self._stops = stops
        self._end_id = end_id
        self._stop_ids = tuple(stop_ids)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._offset = offset
        self._tokens = 0

    def feed(self, increment: Increment) -> TextIncrement:
        """The next piece."""
        ids, finished = increment.token_ids, increment.finished
        parts = self._texts.feed(ids, finished=finished)
        if not increment.log_probs and not self._stops.texts:
            return self._piece(parts, ids, finished)
        text, entries, piece = "", [], TextIncrement(tokens=self._tokens)
        for index, part in enumerate(parts):
            if increment.log_probs:
                entries.append(LogProbEntry(ids[index], self._offset, increment.log_probs[index]))
                self._offset += len(part)
            last = index == len(parts) - 1
            piece = self._piece([part], ids[index : index + 1], finished and last)
            text += piece.text
            if piece.finish_reason is not None:
                break
        return piece._replace(text=text, entries=tuple(entries), parts=())

    def _piece(self, parts: list[str], ids: Sequence[int], finished: bool) -> TextIncrement:
        self._tokens += len(ids)
        text = "".join(parts)
        if self._tokens >= self._min_tokens:
            text = self._stops.feed(text, finished=finished)
        piece = TextIncrement(text, tokens=self._tokens, parts=tuple(parts))
        if self._stops.match is not None:
            return piece._replace(finish_reason="stop", stop_reason=self._stops.match)
        if not finished:
            return piece
        last = ids[-1] if ids else None
        if last is not None and last in (self._end_id, *self._stop_ids):
            reason = None if last == self._end_id else last
            return piece._replace(finish_reason="stop", stop_reason=reason)
        complete = self._tokens < self._max_tokens
        return piece._replace(finish_reason="stop" if complete else "length")


def prompt_entries(
    texts: TokenTexts, ids: Sequence[int], log_probs: Sequence[TokenLogProb | None]
) -> tuple[LogProbEntry, ...]:
    """Return the entries of an echoed prompt. texts: of a row without a prompt"""
    entries, offset = [], 0
    for token_id, part, log_prob in zip(
        ids, texts.feed(ids, finished=False), log_probs, strict=True
    ):
        entries.append(LogProbEntry(token_id, offset, log_prob))
        offset += len(part)
    return tuple(entries)


# JSON has no infinity.
MIN_LOG_PROB = -9999.0
TokenName = Callable[[int], str]


def token_names(tokenizer: Tokenizer, *, as_ids: bool = False) -> TokenName:
    """Name of a token: its text, `bytes:\\x..` where that is a part of a character.

    as_ids: `token_id:<id>`, which is unambiguous
    """

    def name(token_id: int) -> str:
        raw = tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    return (lambda token_id: f"token_id:{token_id}") if as_ids else name


def of_completion(entries: Sequence[LogProbEntry], name: TokenName, top: int) -> dict[str, Any]:
    """`logprobs` of /v1/completions: parallel lists.

    top: how many of the likeliest tokens; the chosen one is there in any case
    """
    tops: list[dict[str, float] | None] = []
    values: list[float | None] = []
    for entry in entries:
        log_prob = entry.log_prob
        if log_prob is None:
            tops.append(None)
            values.append(None)
            continue
        alternatives: dict[str, float] = {}
        for token_id, value in (*log_prob.top[:top], (log_prob.token_id, log_prob.log_prob)):
            alternatives.setdefault(name(token_id), _finite(value))
        tops.append(alternatives)
        values.append(_finite(log_prob.log_prob))
    return {
        "tokens": [name(entry.token_id) for entry in entries],
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }


def of_chat(
    entries: Sequence[LogProbEntry], tokenizer: Tokenizer, name: TokenName, top: int
) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions: one object per token."""

    def entry_of(token_id: int, value: float) -> dict[str, Any]:
        raw = list(tokenizer.token_bytes(token_id))
        return {"token": name(token_id), "logprob": _finite(value), "bytes": raw}

    content = [
        {
            **entry_of(log_prob.token_id, log_prob.log_prob),
            "top_logprobs": [entry_of(*alternative) for alternative in log_prob.top[:top]],
        }
        for entry in entries
        if (log_prob := entry.log_prob) is not None
    ]
    return {"content": content}


def _finite(value: float) -> float:
    return max(value, MIN_LOG_PROB)
