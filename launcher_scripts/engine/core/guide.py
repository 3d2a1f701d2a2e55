"""Guides: the allowed next tokens of a row whose text must follow a grammar."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from launcher_scripts.common.errors import RequestError, problem
from launcher_scripts.engine.messages.plan import TokenMask

if TYPE_CHECKING:
    from launcher_scripts.engine.core.row import Row

MASK_SECONDS = 0.02  # a step waits for masks: usual ones take less than 1 ms
MAX_MASK_SECONDS = 10.0


class Guide(Protocol):
    """One row's grammar and how far its text has come; the engine's thread alone asks it."""

    @property
    def finished(self) -> bool:
        """Return whether the text is complete and nothing can follow it."""
        ...

    def is_ready(self, timeout: float) -> bool:
        """True if the next mask is there, waiting for it up to `timeout` seconds.

        Raises RequestError for a grammar that cannot be followed further.
        """
        ...

    def mask(self) -> bytes:
        """Return the allowed next ids: a bit each, the first id's the lowest of the first 32-bit
        word. As many words as the vocabulary needs, or more.
        """
        ...

    def accept(self, token: int) -> bool:
        """A token has come. False: it is none that may."""
        ...


def with_masks(rows: Iterable[Row]) -> list[Row]:
    """The rows without those whose guides still compute their masks.

    A step waits for all masks together MASK_SECONDS at most, and not for a row that is late
    already. A row gets an error if its guide fails, or is late by MAX_MASK_SECONDS.
    """
    deadline = time.perf_counter() + MASK_SECONDS
    return [row for row in rows if row.guide is None or _has_mask(row, row.guide, deadline)]


def _has_mask(row: Row, guide: Guide, deadline: float) -> bool:
    now = time.perf_counter()
    try:
        ready = guide.is_ready(0.0 if row.late_since else max(0.0, deadline - now))
    except RequestError as error:
        row.error = error
        return False
    if ready:
        row.late_since = 0.0
        return True
    row.late_since = row.late_since or now
    if now - row.late_since > MAX_MASK_SECONDS:
        message = "guided_grammar is too complex: which tokens may come next is not known in time"
        row.error = RequestError(problem(message, choices=(f"at most {MAX_MASK_SECONDS:g} s",)))
    return False


def new_masks(rows: Iterable[Row]) -> Iterator[TokenMask]:
    """Iterate over the masks of guided rows that get a token in the step that is planned."""
    for row in rows:
        if row.guide is not None and row.launched > row.masked:
            row.masked = row.launched
            yield TokenMask(row.slot, row.guide.mask())
