"""The text of a row that grows token by token, cut so that pieces put together are the whole.

Copied beside the text models of a repository, so it imports nothing of this project.

A token may end in the middle of a character, and decoders look at a token's neighbours (the
blank before a SentencePiece word, runs of byte tokens). So text is always decoded from the row's
first token, and what may still change is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A growing text is decoded again from CONTEXT tokens before what is new, once it has WINDOW more.
WINDOW = 64
CONTEXT = 16
LONGEST_CHARACTER = 4  # tokens
# What a decoder gives for bytes that are not characters, or not yet.
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class RowText:
    """The tokens of one row as text.

    decode: ids to text
    ids:    the row's tokens so far, its prompt first
    prompt: how many of them are the prompt
    """

    decode: Callable[[Sequence[int]], str]
    ids: Sequence[int]
    prompt: int

    def text(self, *, finished: bool, with_prompt: bool) -> str:
        """All of the row, or all that later tokens cannot change."""
        full_text = self.decode(self.ids) if finished else self.settled(len(self.ids))
        return full_text if with_prompt else _after(full_text, self.settled(self.prompt))

    def delta(self, seen: int, *, finished: bool) -> str:
        """Return the new text since the row had `seen` tokens; the row was not finished then."""
        if seen == len(self.ids):
            return ""
        return _after(self.text(finished=finished, with_prompt=True), self.settled(seen))

    def settled(self, count: int) -> str:
        """The text of the first `count` tokens that no later token can change.

        Some decoders turn a whole run of byte tokens into replacements while its last character
        is incomplete, so what was settled before counts, back to where no character was open.
        """
        open_texts = []
        text = self.decode(self.ids[:count])
        while text.endswith(REPLACEMENT) and count > self.prompt:
            open_texts.append(text)
            count -= 1
            text = self.decode(self.ids[:count])
        settled = text.rstrip(REPLACEMENT)
        for later in reversed(open_texts):
            longer = later.rstrip(REPLACEMENT)
            if longer.startswith(settled):
                settled = longer
        return settled


class GrowingText:
    """The text of one row, as its tokens come.

    text: what has been given out of it since its prompt
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.text = ""
        self._decode = decode
        self._ids: list[int] = []
        self._prompt = 0
        self._start = 0  # the first token that is still decoded
        self._seen = 0
        self._settled: str | None = None  # the text from there to `seen`, where it is known
        self._finished = False
        self._completed = False

    def feed(self, index: int, ids: Sequence[int], *, prompt: int, finished: bool) -> None:
        """The row's tokens from `index` on; with 0 all of them, whatever there was before.

        prompt: how many of the row's tokens are its prompt
        """
        if index == 0:
            self.text = ""
            self._ids, self._prompt = list(ids), prompt
            self._start, self._seen, self._settled, self._completed = 0, prompt, None, False
            self._shorten()
        else:
            self._ids.extend(ids)
        self._finished = finished

    def prompt_text(self) -> str:
        """The prompt as text."""
        return self._row(0).settled(self._prompt)

    def news(self) -> str:
        """Return the new text since the last call."""
        if self._completed or (self._seen == len(self._ids) and not self._finished):
            return ""
        row = self._row(self._start)
        text = row.text(finished=self._finished, with_prompt=True)
        if self._settled is None:
            self._settled = row.settled(self._seen - self._start)
        piece = _after(text, self._settled)
        self._seen, self._settled, self._completed = len(self._ids), text, self._finished
        self.text += piece
        self._shorten()
        return piece

    def _row(self, start: int) -> RowText:
        return RowText(self._decode, self._ids[start:], max(0, self._prompt - start))

    def _shorten(self) -> None:
        """Decode from a later token on, where that makes the same text."""
        if self._seen - self._start <= WINDOW:
            return
        seen = self._decode(self._ids[self._start : self._seen]).rstrip(REPLACEMENT)
        for cut in range(self._seen - CONTEXT, self._seen - CONTEXT - LONGEST_CHARACTER, -1):
            end = self._decode(self._ids[cut : self._seen]).rstrip(REPLACEMENT)
            if end.strip() and REPLACEMENT not in end and seen.endswith(end.lstrip(" ")):
                self._start, self._settled = cut, None
                return


def _after(text: str, start: str) -> str:
    """`text` without its beginning `start`, or what follows the beginning that both share."""
    if text.startswith(start):
        return text[len(start) :]
    shared = next(
        (index for index, (a, b) in enumerate(zip(text, start, strict=False)) if a != b),
        min(len(text), len(start)),
    )
    return text[shared:]
