"""What may come next in a row whose text has to follow a grammar."""

from __future__ import annotations

from typing import Protocol


class Guide(Protocol):
    """One row's grammar and how far its text has come; the engine's thread alone asks it."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        ...

    def mask(self) -> bytes:
        """Which ids may come next: a bit each, 1 for those, the first id's the lowest of the first
        32-bit word. As many words as the vocabulary needs, or more.
        """
        ...

    def accept(self, token: int) -> bool:
        """A token has come. False: it is none that may."""
        ...
