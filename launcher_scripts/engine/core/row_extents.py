"""Extents of running rows in the cache: given, lengthened, moved and gathered."""

from __future__ import annotations

from collections.abc import Mapping

from launcher_scripts.engine.core.prefix_cache import PrefixCache
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.messages.plan import Copy

# What a row that grows has beyond what is computed, where cache tokens are scarce.
GROWN_TOKENS = 128
# Of the cache, what rows that wait for a place leave to those that grow: with less, more rows run,
# but move more often; with none, 70 of 230 rows moved in each step of a simulated 1.3B.
SPARE_SHARE = 0.1


class RowExtents:
    """Gives rows their extents of the cache.

    running: the rows that have one, by slot, in the order they came
    copies:  what the step that is planned copies;  moved: the rows that have moved before it
    """

    def __init__(self, cache: PrefixCache, running: Mapping[int, Row]) -> None:
        self.cache = cache
        self._running = running
        self.copies: list[Copy] = []
        self.moved: list[Row] = []

    def begin_step(self) -> None:
        self.copies, self.moved = [], []

    def extend(self, row: Row) -> bool:
        """Let the row's extent be longer, there or elsewhere; False where there is no room."""
        length = min(row.reserved + GROWN_TOKENS, row.capacity)
        if not self.cache.take(row.start + row.reserved, length - row.reserved):
            self.cache.free(row.start, row.reserved)
            start = self.cache.allocate(length)  # which may begin before it and overlap
            if start is None:
                self.cache.take(row.start, row.reserved)
                start = self.gather(length)
                if start is None:
                    return False
                self.cache.free(row.start, row.reserved)
            self.move(row, start)
        row.reserve(length)
        return True

    def gather(self, length: int) -> int | None:
        """An extent made of what rows that grow do not need yet, and of free tokens that lie apart:
        those rows move together.
        """
        self.trim()
        start = self.cache.allocate(length)
        if start is not None or self.cache.free_tokens < length:
            return start
        rows = {row.start: row for row in self._running.values() if row.grows}
        sizes = {start: row.reserved for start, row in rows.items()}
        for old, new in self.cache.slides(sizes, length) or ():
            self.cache.free(old, sizes[old])
            self.cache.take(new, sizes[old])
            self.move(rows[old], new)
        return self.cache.allocate(length)

    def trim(self) -> None:
        """Let rows that grow give back what they do not need yet."""
        for row in self._running.values():
            needed = max(row.touched, row.prefill_length) + GROWN_TOKENS
            if row.grows and row.reserved > needed:
                self.cache.free(row.start + needed, row.reserved - needed)
                row.reserve(needed)

    def spares(self, length: int) -> bool:
        """Whether there is so much room for another row, and enough for those that grow."""
        needed = length + SPARE_SHARE * self.cache.capacity
        if self.cache.free_tokens < needed:
            self.trim()
        return self.cache.free_tokens >= needed

    def move(self, row: Row, start: int) -> None:
        """Let the row be at `start`, with what it has in the cache, its draft included."""
        if row.start == start:
            return
        if row.cached:
            self.copies.append(Copy(row.start, start, row.touched))
        row.start = start
        if row.prefix is not None:
            row.prefix.start = start
        self.moved.append(row)

    def place(self, row: Row) -> int | None:
        """First token of an extent for the row; its session's, which it shares with nobody."""
        session = row.session
        if session is None:
            row.reserve(row.capacity)
            start = self.cache.spare(row.reserved)
            if start is None and row.grows:
                row.reserve(min(row.capacity, row.prefill_length + GROWN_TOKENS))
                if self._running and not self.spares(row.reserved):
                    return None
            start = self.cache.allocate(row.reserved) if start is None else start
            return self.gather(row.reserved) if start is None else start
        if session.start is None:
            session.start = self.cache.allocate(session.extent_tokens)
        return session.start
