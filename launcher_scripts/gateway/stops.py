"""Texts that end an answer, found where they begin in one token and end in another."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Looks for stop texts in a text that comes in pieces.

    What may still become a stop text is held back. `found` is the one that was met, of `texts`.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """included: the stop text stays at the end of the answer"""
        self.found: str | None = None
        self.texts = tuple(stops)
        self._included = included
        self._held = ""

    def take(self, piece: str, *, finished: bool = False) -> str:
        """What may be shown after the next piece; nothing more once a stop text was found."""
        if not self.texts or self.found is not None:
            return "" if self.found is not None else piece
        text = self._held + piece
        met = [(text.find(stop), -len(stop), stop) for stop in self.texts if stop in text]
        if met:
            place, _, self.found = min(met)
            self._held = ""
            return text[: place + len(self.found) if self._included else place]
        held = 0 if finished else overlap(text, *self.texts)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, *marks: str) -> int:
    """How many characters at the end of a text are the beginning of one of `marks`."""
    sizes = range(min(len(text), max(map(len, marks)) - 1), 0, -1)
    return next((size for size in sizes if any(m.startswith(text[-size:]) for m in marks)), 0)
