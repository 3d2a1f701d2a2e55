"""What followed the last tokens the last time they came: drafts of the next ones.

Prompt lookup decoding (Saxena 2023): answers often repeat parts of their prompts, or of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

NGRAMS = (3, 2)  # lengths of the texts that are looked for, the longest first


class PromptLookup:
    """The ids of one row, and what came after each run of a few of them.

    most: how many tokens a draft has at most
    """

    def __init__(self, most: int, ids: Iterable[int]) -> None:
        self._most = most
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

    def draft(self, most: int) -> tuple[int, ...]:
        """Tokens that may come next, no more than `most`; none where nothing is known."""
        for size in NGRAMS:
            place = self._following.get(tuple(self._ids[-size:]))
            if place is not None:
                found = self._ids[place : place + max(0, min(most, self._most))]
                return tuple(takewhile(lambda token: token >= 0, found))  # virtual ones are below
        return ()
