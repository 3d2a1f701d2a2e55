"""The text of one row as its tokens come, and the entries of its log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from launcher_scripts.gateway.backend import Increment, TokenLogProb
from launcher_scripts.gateway.stops import StopTexts
from launcher_scripts.text_deltas import GrowingText
from launcher_scripts.tokenizer import Tokenizer

# How many tokens of the prompt the first generated ones are decoded with.
_CONTEXT = 32


@dataclass(frozen=True)
class LogProbEntry:
    """A token in an answer. offset: characters of the text before it; None: it has no log p."""

    token_id: int
    offset: int
    log_prob: TokenLogProb | None


@dataclass(frozen=True)
class Piece:
    """What is new of a row's answer.

    tokens:        generated so far, those of a stop text included
    finish_reason: stop, length, or None while more may come
    stop_reason:   the stop text or the further end token that was met
    begins_again:  the pieces before this one do not count
    parts:         the text by its tokens, where it is asked for and known
    """

    text: str = ""
    entries: tuple[LogProbEntry, ...] = ()
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    begins_again: bool = False
    parts: tuple[str, ...] = ()

    def by_token(self) -> list[Piece]:
        """The piece as one for each token that completes a character, where its parts are known."""
        if len(self.parts) < 2:
            return [self]
        first = [Piece(part) for part in self.parts[:-1] if part]
        return [*first, replace(self, text=self.parts[-1], parts=())]


class RowText:
    """Turns the increments of one row into pieces of its text.

    Pieces put together are the whole text without the stop text, and none ends within a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: StopTexts,
        end_id: int | None,
        stop_ids: Sequence[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        offset: int = 0,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        """end_id, stop_ids: tokens that end the row; see RowRequest

        max_tokens: a row that has fewer when the engine ends it was complete
        min_tokens: stop texts count from there on
        offset:     characters of the answer before the row's own
        token_bytes: what a token stands for, for pieces that know their parts
        """
        context = list(prompt_ids[-_CONTEXT:])
        self._text = GrowingText(tokenizer.decode)
        self._text.take(0, context, prompt=len(context), finished=False)
        self._prompt = len(context)
        self._stops = stops
        self._end_id = end_id
        self._stop_ids = tuple(stop_ids)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._offset = offset
        self._token_bytes = token_bytes
        self._tokens = 0

    def take(self, increment: Increment) -> Piece:
        """The next piece."""
        if not increment.log_probs:
            piece = self._take(increment.token_ids, increment.finished)
            if self._token_bytes is None or len(increment.token_ids) < 2:
                return piece
            tokens = map(self._token_bytes, increment.token_ids)
            return replace(piece, parts=_by_token(piece.text, list(tokens)))
        text, entries, piece = "", [], Piece(tokens=self._tokens)
        last = len(increment.token_ids) - 1
        for place, token_id in enumerate(increment.token_ids):
            offset = self._offset + len(self._text.text)
            entries.append(LogProbEntry(token_id, offset, increment.log_probs[place]))
            piece = self._take((token_id,), increment.finished and place == last)
            text += piece.text
            if piece.finish_reason is not None:
                break
        return Piece(text, tuple(entries), piece.tokens, piece.finish_reason, piece.stop_reason)

    def _take(self, token_ids: Sequence[int], finished: bool) -> Piece:
        place = self._prompt + self._tokens
        self._text.take(place, token_ids, prompt=self._prompt, finished=finished)
        self._tokens += len(token_ids)
        text = self._text.news()
        if self._tokens >= self._min_tokens:
            text = self._stops.take(text, finished=finished)
        if self._stops.found is not None:
            return Piece(text, (), self._tokens, "stop", self._stops.found)
        if not finished:
            return Piece(text, (), self._tokens)
        last = token_ids[-1] if token_ids else None
        if last is not None and last in (self._end_id, *self._stop_ids):
            reason = None if last == self._end_id else last
            return Piece(text, (), self._tokens, "stop", reason)
        return Piece(
            text, (), self._tokens, "length" if self._tokens >= self._max_tokens else "stop"
        )


def _by_token(text: str, tokens: Sequence[bytes]) -> tuple[str, ...]:
    """The text by the tokens that it begins; () where their bytes are not those of the text.

    A token that ends within a character has nothing, the one that ends it the character.
    """
    left = text.encode()
    if not b"".join(tokens).startswith(left):
        return ()
    decoder, parts = codecs.getincrementaldecoder("utf-8")(), []
    for token in tokens:
        if not left:
            break
        parts.append(decoder.decode(left[: len(token)]))
        left = left[len(token) :]
    return tuple(parts)


def prompt_entries(
    tokenizer: Tokenizer, ids: Sequence[int], log_probs: Sequence[TokenLogProb | None]
) -> tuple[LogProbEntry, ...]:
    """Those of an echoed prompt."""
    text = GrowingText(tokenizer.decode)
    entries = []
    for place, (token_id, log_prob) in enumerate(zip(ids, log_probs, strict=True)):
        entries.append(LogProbEntry(token_id, len(text.text), log_prob))
        text.take(place, [token_id], prompt=0, finished=False)
        text.news()
    return tuple(entries)
