"""The text of one row as its tokens come, and the entries of its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher_scripts.gateway.backend import Increment, TokenLogProb
from launcher_scripts.gateway.stops import StopTexts
from launcher_scripts.gateway.token_texts import TokenTexts


@dataclass(frozen=True)
class LogProbEntry:
    """A token in an answer. offset: characters of the text before it; None: it has no log p."""

    token_id: int
    offset: int
    log_prob: TokenLogProb | None


class Piece(NamedTuple):
    """What is new of a row's answer.

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

    def by_token(self) -> tuple[list[str], Piece | None]:
        """The texts of the tokens that add text alone, and the last token's piece if it says more.

        Tokens are told apart where `parts` are known.
        """
        if self.entries:
            return [], self
        texts = [text for text in self.parts or (self.text,) if text]
        if self.finish_reason is None:
            return texts, None
        return texts[:-1], self._replace(text="".join(texts[-1:]), parts=())


class RowText:
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

    def take(self, increment: Increment) -> Piece:
        """The next piece."""
        ids, finished = increment.token_ids, increment.finished
        parts = self._texts.take(ids, finished=finished)
        if not increment.log_probs and not self._stops.texts:
            return self._piece(parts, ids, finished)
        text, entries, piece = "", [], Piece(tokens=self._tokens)
        for place, part in enumerate(parts):
            if increment.log_probs:
                entries.append(LogProbEntry(ids[place], self._offset, increment.log_probs[place]))
                self._offset += len(part)
            last = place == len(parts) - 1
            piece = self._piece([part], ids[place : place + 1], finished and last)
            text += piece.text
            if piece.finish_reason is not None:
                break
        return piece._replace(text=text, entries=tuple(entries), parts=())

    def _piece(self, parts: list[str], ids: Sequence[int], finished: bool) -> Piece:
        self._tokens += len(ids)
        text = "".join(parts)
        if self._tokens >= self._min_tokens:
            text = self._stops.take(text, finished=finished)
        piece = Piece(text, tokens=self._tokens, parts=tuple(parts))
        if self._stops.found is not None:
            return piece._replace(finish_reason="stop", stop_reason=self._stops.found)
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
    """Those of an echoed prompt. texts: of a row without a prompt"""
    entries, offset = [], 0
    for token_id, part, log_prob in zip(
        ids, texts.take(ids, finished=False), log_probs, strict=True
    ):
        entries.append(LogProbEntry(token_id, offset, log_prob))
        offset += len(part)
    return tuple(entries)
