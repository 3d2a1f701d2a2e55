"""Slots, blocks of the cache and copies of states: what rows have while they run.

When the states of rows that do not depend on their length are copied: to what a prefix is found
by later, and to and from what a session keeps of them between its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from launcher_scripts.engine.core.prefix_cache import CachedPrefix, PrefixCache
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.core.statistics import Statistics
from launcher_scripts.engine.messages.plan import (
    AssignedBlocks,
    Move,
    PrefillPart,
    StateCopy,
    first_address,
)
from launcher_scripts.engine.model.kv_cache import Block

# Of prompts and answers: the interval of snapshots, and how many of it one prompt takes.
SNAPSHOT_TOKENS = 128
MAX_SNAPSHOTS = 8


def borders(first: int, end: int, block_tokens: int) -> list[int]:
    """Behind how many tokens of a prompt, of which `first` are there, its states are kept.

    Behind all blocks that the same prompt could be found by, and at multiples of an interval that
    others share.
    """
    last = (end - 1) // block_tokens * block_tokens
    interval = SNAPSHOT_TOKENS
    while last - first > MAX_SNAPSHOTS * interval:
        interval *= 2
    result = range(first // interval * interval + interval, last, interval)
    return [*result, *([last] if last > first else [])]


class StateCopies:
    """What a step copies before it runs, and what its prompts leave on their way.

    cache: without snapshots where rows have no such states; then nothing is copied
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._enabled = cache.snapshots is not None
        self._planned: list[StateCopy] = []

    def planned(self) -> tuple[StateCopy, ...]:
        """Those that were decided on since the last step, in order."""
        copies, self._planned = tuple(self._planned), []
        return copies

    def begin(self, row: Row, result: CachedPrefix) -> None:
        """The row's prompt begins behind what is found of it."""
        if result.snapshot >= 0:
            self._planned.append(StateCopy(result.snapshot, row.slot))
        size = self._cache.block_tokens
        row.borders = borders(result.tokens, row.prefill_length, size) if self._enabled else ()

    def saves(self, row: Row, end: int) -> tuple[tuple[int, int], ...]:
        """Where the states of a row are kept on the way of its prompt to so many tokens."""
        if row.prefix is None or not row.borders:
            return ()
        requested = [n for n in row.borders if row.prefilled < n <= end]
        blocks = {n: row.full_blocks(n)[-1] for n in requested}
        used = [
            (n, self._cache.take_snapshot(block))
            for n, block in blocks.items()
            if block.digest is not None
        ]
        # A later one may have taken the place of an earlier one.
        return tuple(
            (n, item) for n, item in used if item is not None and blocks[n].snapshot == item
        )

    def save_decoding(self, row: Row) -> None:
        """Keep the states of a row that decodes, where an interval of its tokens ends."""
        if row.prefix is None or not self._enabled or row.width > 1:
            return
        if row.cached > row.prefill_length and row.cached % SNAPSHOT_TOKENS == 0:
            snapshot = self._cache.take_snapshot(row.full_blocks(row.cached)[-1])
            if snapshot is not None:
                self._planned.append(StateCopy(row.slot, snapshot))

    def has_room(self, session: Session) -> bool:
        """Return whether there is room for the session's states between its requests, which is
        taken."""
        if self._enabled and session.snapshot is None:
            session.snapshot = self._cache.pin_snapshot()
        return not self._enabled or session.snapshot is not None

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


# Of the cache, what rows that wait leave to those that grow: with less, more rows run, but more are
# computed again: of a simulated 1.3B 0.8 a second of 272, and with 0.03 0.3 of 267.
SPARE_SHARE = 0.01
# What another row computes now is worth waiting for if it takes about a step: so many tokens.
TOKENS_WORTH_A_STEP = 64


def _is_worth_it(prefix: CachedPrefix) -> bool:
    """Return True if a row begins behind what is found of its prompt now."""
    return prefix.coming - prefix.tokens < TOKENS_WORTH_A_STEP


class RowAllocator:
    """Gives rows their slots, blocks and states.

    running: the rows that have them, by slot, in the order they came
    reading: those of them whose prompts have not been launched
    free_slots: slots of no row
    """

    def __init__(self, slots: int, cache: PrefixCache, statistics: Statistics) -> None:
        self.cache = cache
        self.states = StateCopies(cache)
        self.running: dict[int, Row] = {}
        self.reading: dict[int, Row] = {}
        self.free_slots = list(range(slots))[::-1]
        self._statistics = statistics
        self._changes: list[AssignedBlocks] = []
        self._moves: list[Move] = []

    @property
    def used_tokens(self) -> int:
        """Tokens of the cache that belong to rows and sessions."""
        return self.cache.capacity - self.cache.free_blocks * self.cache.block_tokens

    def planned(self) -> tuple[tuple[Move, ...], tuple[AssignedBlocks, ...]]:
        """Return what the ranks have to do since the last step."""
        result = tuple(self._moves), tuple(self._changes)
        self._moves, self._changes = [], []
        return result

    def has_room(self, row: Row) -> bool:
        """Return True if there are enough slots and blocks for the row, of which none is found."""
        return row.width <= len(self.free_slots) and self._needed(row) <= self.cache.free_blocks

    def admit(self, row: Row) -> bool:
        """Let the row run, if there is room for it; it begins behind what is found of its prompt,
        unless it is better to wait for more of that (see begin_waiting).
        """
        if row.session is not None and not self.states.has_room(row.session):
            return False
        prefix = self._find(row)
        begins = _is_worth_it(prefix)
        blocks = prefix.blocks if begins else ()
        if row.width > len(self.free_slots) or not self._allocate(row, blocks):
            return False
        row.slots = tuple(self.free_slots.pop() for _ in range(row.width))
        row.start = first_address(row.slot, self.cache.capacity)
        row.spacing = 2 * self.cache.capacity
        self.running[row.slot] = self.reading[row.slot] = row
        if row.session is not None:
            self.states.resume(row.session, row)
        self.slide(row, row.prefill_length)
        if begins:
            self._begin(row, prefix)
        return True

    def begin_waiting(self) -> None:
        """Let rows begin that have waited for what others compute, if it is there now."""
        for row in self.reading.values():
            if not row.started and _is_worth_it(prefix := self._find(row)):
                self._adopt(row, prefix.blocks)
                self._begin(row, prefix)

    def _find(self, row: Row) -> CachedPrefix:
        """Return the prompt's longest prefix in the cache; its last token has to be computed."""
        if row.prefix is None or row.request.asks_of_prompt:
            return CachedPrefix()
        count = (row.prefill_length - 1) // self.cache.block_tokens
        return self.cache.find(row.prefix.digests[:count])

    def _allocate(self, row: Row, shared: Sequence[Block]) -> bool:
        """Let the row have blocks, those of a prefix first; its session's, which it shares with
        nobody. False if there are not enough.
        """
        cache, session = self.cache, row.session
        if session is not None:
            if session.blocks is None:
                session.blocks = cache.allocate(session.max_blocks(cache.block_tokens))
            if session.blocks is None:
                return False
            row.blocks = session.blocks
        else:
            cache.share(shared)
            needed = self._needed(row) - len(shared)
            spare = SPARE_SHARE * cache.capacity // cache.block_tokens
            waits = row.grows and self.running and cache.free_blocks < needed + spare
            blocks = None if waits else cache.allocate(needed)
            if blocks is None:
                cache.free(shared)
                return False
            self._divide(row, [*shared, *blocks])
        row.reserve(len(row.blocks) * cache.block_tokens)
        return True

    def _needed(self, row: Row) -> int:
        """Return the number of blocks of the row at first, with those that are found."""
        source, length, shared = self._sizes(row)
        return source + length + (row.width - 1) * (length - shared)

    def _sizes(self, row: Row) -> tuple[int, int, int]:
        """Blocks of the source, of each hypothesis, and of these what all hypotheses share."""
        tokens = row.row_capacity
        if row.grows:
            tokens = min(tokens, row.prefill_length + 1)
        shared = len(row.prompt) // self.cache.block_tokens
        return self.cache.blocks(len(row.source)), self.cache.blocks(tokens), shared

    def _divide(self, row: Row, blocks: list[Block]) -> None:
        source, length, shared = self._sizes(row)
        row.blocks, blocks = blocks[:length], blocks[length:]
        row.source_blocks, blocks = blocks[:source], blocks[source:]
        count = length - shared
        for index in range(row.width - 1):
            self.cache.share(row.blocks[:shared])
            private = blocks[index * count : (index + 1) * count]
            row.copies.append([*row.blocks[:shared], *private])

    def _adopt(self, row: Row, shared: Sequence[Block]) -> None:
        """Let the blocks of a prefix take the place of a row's first ones, of each hypothesis."""
        for blocks in (row.blocks, *row.copies):
            self.cache.share(shared)
            self.cache.free(blocks[: len(shared)])
            blocks[: len(shared)] = shared

    def _begin(self, row: Row, prefix: CachedPrefix) -> None:
        """Begin a prompt after what is found of it, whose blocks the row has, and let others find
        the rest. So rows that wait for it do not wait indefinitely.
        """
        row.started = True
        self._assign(row)
        if row.prefix is None:
            return
        self.cache.publish(row.blocks, row.prefix.digests)
        self.states.begin(row, prefix)
        row.prefilled, row.read_by_draft = prefix.tokens, prefix.read
        if row.num_cached_tokens is None:  # what it had before a preemption is its own
            row.num_cached_tokens = prefix.tokens
        if not row.request.asks_of_prompt:
            self._statistics.find_prefix(row.prefill_length, prefix.tokens)

    def _assign(self, row: Row, first: int = 0) -> None:
        """Send the ranks the row's blocks, from block `first` on."""
        for slot, blocks in zip(row.slots, (row.blocks, *row.copies), strict=True):
            numbers = tuple(block.number for block in blocks[first:])
            self._changes.append(AssignedBlocks(slot, first, numbers))
        if row.source_blocks and not first:
            numbers = tuple(block.number for block in row.source_blocks)
            self._changes.append(AssignedBlocks(row.slot, -len(numbers), numbers))

    def grow(self, preempt: Callable[[Row], None]) -> None:
        """Let every row have room for the token that it computes next, and perhaps for drafts.

        preempt: called for the rows that have to give theirs up, those that came last first
        """
        for row in tuple(self.running.values()):
            while row.launched >= row.fits and row.decodes and not self._extend(row):
                preempt(next(item for item in reversed(self.running.values()) if item.grows))
            drafts = row.request.num_speculative_tokens if row.decodes else 0
            if drafts and row.fits <= row.launched + drafts < row.request.output_len:
                self._extend(row)

    def _extend(self, row: Row) -> bool:
        """Let the row have one more block; False if there is none."""
        blocks = self.cache.allocate(1)
        if blocks is None:
            return False
        row.blocks += blocks
        row.reserve(row.reserved + self.cache.block_tokens)
        self._assign(row, len(row.blocks) - 1)
        return True

    @property
    def ready(self) -> list[Row]:
        """Rows of whose prompts the next tokens can be computed."""
        return [
            row for row in self.reading.values() if row.started and (row.encoded or not row.source)
        ]

    def prefill(self, shares: Iterable[tuple[Row, int]], step: int) -> tuple[PrefillPart, ...]:
        """Return the next tokens of prompts in a step; shares: rows, and how many of theirs."""
        parts = []
        for row, count in shares:
            if row.begins_decoding:
                row.prefilled = count
                del self.reading[row.slot]
                continue
            saves = self.states.saves(row, row.prefilled + count)
            parts.append(PrefillPart(row.slot, row.past + row.prefilled, count, saves))
            row.prefilled += count
            for block in row.full_blocks(row.prefilled):
                block.computed = True
            if row.prefilled == row.prefill_length:
                del self.reading[row.slot]
                row.launch(step)
        return tuple(parts)

    def slide(self, row: Row, tokens: int) -> None:
        """Let the window of the row's session slide on, if `tokens` more need the room."""
        if row.session is None:
            return
        move = row.session.make_room(row.cached, tokens, row.slot, self.cache.block_tokens)
        if move is not None:
            self._moves.append(move)
            self._assign(row)

    def release(self, row: Row) -> None:
        """Take the row's slots and blocks back; others find what it has computed.

        Steps already launched may still write there; they run before anything launched later.
        """
        del self.running[row.slot]
        self.reading.pop(row.slot, None)
        self.free_slots += row.slots[::-1]
        if row.session is None:
            if row.prefix is not None and row.started:
                row.prefix.set_text((*row.ids[: row.prefilled], *row.tokens[row.resumed : -1]))
                self.cache.publish(row.blocks, row.prefix.digests)
                for block in row.blocks[: len(row.prefix.digests)]:
                    block.computed = True
            for blocks in (*row.copies, row.source_blocks, row.blocks):
                self.cache.free(blocks)
        row.blocks, row.source_blocks, row.copies = [], [], []

    def preempt(self, row: Row) -> None:
        """Take the row's slots and blocks back, so that it begins again later."""
        self.release(row)
        row.slots, row.start, row.started = (), -1, False
        row.prefilled = row.read_by_draft = 0

    def end_turn(self, row: Row, session: Session) -> None:
        """The session keeps what the row has brought into the cache."""
        complete = row.request.output_len == 0 and not row.future.cancelled()
        has_tokens = bool(row.tokens) or complete
        if has_tokens and self.states.keep(session, row):
            session.enter_turn(len(row.prompt), row.tokens, row.end_id)
        else:
            session.abort_turn()

    def end_session(self, session: Session) -> None:
        """Take the session's blocks and states back."""
        if session.blocks is not None:
            self.cache.free(session.blocks)
            session.blocks = None
        self.states.close(session)
