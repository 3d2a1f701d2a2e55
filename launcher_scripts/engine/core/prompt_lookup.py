"""What followed the last tokens the last time they came: drafts of the next ones.

Prompt lookup decoding (Saxena 2023): answers often repeat parts of their prompts, or of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

NGRAMS = (3, 2)  # lengths of the texts that are looked for, the longest first


class PromptLookup:
    """The ids of one row, and what came after each run of a few of them."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}
        self.add(ids)

    def add(self, ids: Iterable[int]) -> None:
        """The row goes on with `ids`."""
        for token in ids:
            place = len(self._ids)
            for size in NGRAMS:
                if place >= size:
                    self._following[tuple(self._ids[-size:])] = place
            self._ids.append(token)

    def draft(self, most: int, least: int = 0) -> tuple[int, ...]:
        """Tokens that may come next, no more than `most`; none where nothing is known.

        least: how many of the last tokens must have come before them, if more than those of NGRAMS
        """
        for size in NGRAMS:
            place = self._following.get(tuple(self._ids[-size:]))
            if place is not None:
                if least and self._ids[max(place - least, 0) : place] != self._ids[-least:]:
                    return ()
                found = self._ids[place : place + most]
                return tuple(takewhile(lambda token: token >= 0, found))  # virtual ones are below
        return ()
