"""When the states of rows that do not depend on their length are copied: to what a prefix is found
by later, and to and from what a session keeps of them between its requests.
"""

from __future__ import annotations

from launcher_scripts.engine.core.prefix_cache import BLOCK_TOKENS, CachedPrefix, PrefixCache
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.messages.plan import StateCopy

# Of prompts and answers: the interval of snapshots, and how many of it one prompt takes.
SNAPSHOT_TOKENS = 128
MOST_SNAPSHOTS = 8


def borders(first: int, end: int) -> list[int]:
    """Behind how many tokens of a prompt, of which `first` are there, its states are kept.

    Behind all blocks that the same prompt could be found by, and at multiples of an interval that
    others share.
    """
    last = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    interval = SNAPSHOT_TOKENS
    while last - first > MOST_SNAPSHOTS * interval:
        interval *= 2
    result = range(first // interval * interval + interval, last, interval)
    return [*result, *([last] if last > first else [])]


class StateCopies:
    """What a step copies before it runs, and what its prompts leave on their way.

    cache: without snapshots where rows have no such states; then nothing is copied
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._there = cache.snapshots is not None
        self._planned: list[StateCopy] = []

    def planned(self) -> tuple[StateCopy, ...]:
        """Those that were decided on since the last step, in order."""
        copies, self._planned = tuple(self._planned), []
        return copies

    def begin(self, row: Row, result: CachedPrefix) -> None:
        """The row's prompt begins behind what is found of it."""
        if result.snapshot >= 0:
            self._planned.append(StateCopy(result.snapshot, row.slot))
        row.borders = borders(result.tokens, row.prefill_length) if self._there else ()

    def saves(self, row: Row, end: int) -> tuple[tuple[int, int], ...]:
        """Where the states of a row are kept on the way of its prompt to so many tokens."""
        prefix = row.prefix
        if prefix is None or not row.borders:
            return ()
        requested = [n for n in row.borders if row.prefilled < n <= end]
        used = [(n, self._cache.take_snapshot(prefix, n)) for n in requested]
        present = prefix.snapshots  # a later one may have taken the place of an earlier one
        return tuple((n, item) for n, item in used if item is not None and present.get(n) == item)

    def save_decoding(self, row: Row) -> None:
        """Keep the states of a row that decodes, where an interval of its tokens ends."""
        if row.prefix is None or not self._there or row.width > 1:
            return
        if row.cached > row.prefill_length and row.cached % SNAPSHOT_TOKENS == 0:
            snapshot = self._cache.take_snapshot(row.prefix, row.cached)
            if snapshot is not None:
                self._planned.append(StateCopy(row.slot, snapshot))

    def has_room(self, session: Session) -> bool:
        """Return whether there is room for the session's states between its requests, which is
        taken."""
        if self._there and session.snapshot is None:
            session.snapshot = self._cache.pin_snapshot()
        return not self._there or session.snapshot is not None

    def resume(self, session: Session, row: Row) -> None:
        """The row goes on where the session is."""
        if session.snapshot is not None and session.positions:
            self._planned.append(StateCopy(session.snapshot, row.slot))

    def keep(self, session: Session, row: Row) -> bool:
        """Return whether the session can have what the row leaves: not where its states have got
        tokens that the session does not get.
        """
        if session.snapshot is None or not row.slots:
            return True
        exact = row.cached == row.past + len(row.prompt) + max(len(row.tokens) - 1, 0)
        if exact:
            self._planned.append(StateCopy(row.slot, session.snapshot))
        return exact

    def close(self, session: Session) -> None:
        """The session has ended."""
        if self._cache.snapshots is not None and session.snapshot is not None:
            self._cache.snapshots.release(session.snapshot)
            session.snapshot = None
