"""Keys and values of prompts that begin alike: found in the cache, they are copied, not computed.

A text is found by its blocks. The digest of a block is of its ids, of all blocks before it and of
what else decides its keys and values, so one digest says all that stands up to there, and ids are
not compared again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from launcher_scripts.common.files import block_digests
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.requests import ENCODER_DECODERS
from launcher_scripts.engine.model.kv_cache import ExtentAllocator
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig

BLOCK_TOKENS = 16


@dataclass(eq=False)
class Prefix:
    """The beginning of an extent, block by block.

    salt:     of the first block
    digests:  of the blocks that are there or will be, as far as computed says
    start:    first cache token;  computed: tokens there once everything launched has run
    read:     how many of them are in the draft model's cache, too
    max_tokens: tokens of the text that others may find; None: all
    snapshots: behind how many tokens what is left of a row's states is kept, and where
    """

    salt: bytes
    digests: list[bytes] = field(default_factory=list)
    start: int = -1
    computed: int = 0
    read: int = 0
    max_tokens: int | None = None
    snapshots: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Cache tokens of the blocks."""
        return BLOCK_TOKENS * len(self.digests)

    def set_text(self, ids: Sequence[int]) -> None:
        """The blocks are those that `ids` fill; they begin as the text before did, or end there."""
        ids = ids[: self.max_tokens]
        del self.digests[len(ids) // BLOCK_TOKENS :]
        digest = self.digests[-1] if self.digests else self.salt
        self.digests += block_digests(ids[self.tokens :], BLOCK_TOKENS, digest)


class CachedPrefix(NamedTuple):
    """Location in the cache of the first `tokens` tokens of a prompt.

    coming: how many will be there in a few steps; no fewer than `tokens`
    read:   how many of them are in the draft model's cache, too
    snapshot: what is left of the states behind them, where rows have such states
    """

    start: int = -1
    tokens: int = 0
    coming: int = 0
    read: int = 0
    snapshot: int = -1


class Snapshots:
    """Room for `count` copies of rows' states, from slot `first` on, of which those that were not
    used for longest give way. Each is behind some tokens of a prefix, or of a session, which gives
    it back itself.
    """

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))[::-1]
        self._used: dict[int, tuple[Prefix, int]] = {}

    def take(self, of: tuple[Prefix, int] | None) -> tuple[int, tuple[Prefix, int] | None] | None:
        """A copy's place, and what has lost it; None where sessions have all."""
        before = None
        if self._free:
            snapshot = self._free.pop()
        elif self._used:
            snapshot = next(iter(self._used))
            before = self._used.pop(snapshot)
        else:
            return None
        if of is not None:
            self._used[snapshot] = of
        return snapshot, before

    def use(self, snapshot: int) -> None:
        """The snapshot of a prefix counts as used now."""
        self._used[snapshot] = self._used.pop(snapshot)

    def release(self, snapshot: int) -> None:
        """Give a place back."""
        self._used.pop(snapshot, None)
        self._free.append(snapshot)


class PrefixCache(ExtentAllocator):
    """Extents, and which prefixes are in them.

    The extent of a row that ended is kept as long as nobody needs the room: it counts as free, and
    those that were not used for longest are given up until a gap is long enough.

    snapshots: where rows have states beside those of their tokens, room for copies of them; then a
               prefix is only found as far as it has one, and what is behind its last is not kept
    unit:      tokens of which a multiple is found
    """

    def __init__(
        self, capacity: int, snapshots: Snapshots | None = None, unit: int = BLOCK_TOKENS
    ) -> None:
        super().__init__(capacity)
        self.unit = unit
        self.snapshots = snapshots
        self._holders: dict[bytes, dict[Prefix, None]] = {}  # by digest
        self._cached: dict[Prefix, None] = {}  # the least recently used first
        self._cached_tokens = 0

    @property
    def free_tokens(self) -> int:
        return super().free_tokens + self._cached_tokens

    def find(self, digests: Sequence[bytes]) -> CachedPrefix:
        """The longest prefix of a text with such blocks, a multiple of `unit` tokens, which counts
        as used."""
        coming = 0
        step = self.unit // BLOCK_TOKENS
        for blocks in range(len(digests) // step * step, 0, -step):
            tokens = BLOCK_TOKENS * blocks
            for prefix in self._holders.get(digests[blocks - 1], ()):
                snapshot = prefix.snapshots.get(tokens, -1)
                if self.snapshots is not None and snapshot < 0:
                    continue
                coming = coming or tokens
                if prefix.computed >= tokens:
                    if prefix in self._cached:
                        self._cached[prefix] = self._cached.pop(prefix)
                    if self.snapshots is not None:
                        self.snapshots.use(snapshot)
                    read = min(prefix.read, tokens)
                    return CachedPrefix(prefix.start, tokens, coming, read, snapshot)
        return CachedPrefix(coming=coming)

    def add(self, prefix: Prefix) -> None:
        """Let the prefix of a row that runs be found."""
        for digest in prefix.digests:
            self._holders.setdefault(digest, {})[prefix] = None

    def keep(self, prefix: Prefix, ids: Sequence[int], length: int) -> None:
        """The row has ended, and `ids` are in its extent of `length` tokens.

        Only whole blocks are kept, unless others have them too.
        """
        self._remove(prefix)
        prefix.set_text(ids)
        if self.snapshots is not None:
            last = max((n for n in prefix.snapshots if n <= prefix.tokens), default=0)
            self._drop_snapshots(prefix, beyond=last)
            del prefix.digests[last // BLOCK_TOKENS :]
        prefix.computed = prefix.tokens
        if self.find(prefix.digests).tokens < prefix.tokens:
            self.add(prefix)
            self._cached[prefix] = None
            self._cached_tokens += prefix.tokens
        else:
            self._drop_snapshots(prefix)
            prefix.digests.clear()
        if prefix.tokens < length:
            self.free(prefix.start + prefix.tokens, length - prefix.tokens)

    def clear(self) -> None:
        """Let nothing be found any more of what is there, also of rows that run.

        Their prefixes must not be used afterwards.
        """
        for prefix in list(self._cached):
            self._abort(prefix)
        for prefix in {prefix: None for holders in self._holders.values() for prefix in holders}:
            self._drop_snapshots(prefix)
        self._holders.clear()

    def spare(self, length: int) -> int | None:
        """Start of a free extent, now taken, for which nothing that is kept is given up."""
        return super().allocate(length)

    def allocate(self, length: int) -> int | None:
        start = super().allocate(length)
        if start is None and self._cached and self._longest_gap() >= length:
            while start is None:
                self._abort(next(iter(self._cached)))
                start = super().allocate(length)
        return start

    def slides(self, movable: Mapping[int, int], length: int) -> list[tuple[int, int]] | None:
        """The least recently used of what is kept is given up until there is a way."""
        result = super().slides(movable, length)
        while result is None and self._cached:
            self._abort(next(iter(self._cached)))
            result = super().slides(movable, length)
        return result

    def _longest_gap(self) -> int:
        """If nothing were kept."""
        ranges = ((prefix.start, prefix.tokens) for prefix in self._cached)
        gaps = sorted([*self._free, *ranges])
        longest, size = gaps[0][1], gaps[0][1]
        for (start, length), (following, more) in pairwise(gaps):
            size = size + more if start + length == following else more
            longest = max(longest, size)
        return longest

    def _abort(self, prefix: Prefix) -> None:
        del self._cached[prefix]
        self._cached_tokens -= prefix.tokens
        self._remove(prefix)
        self._drop_snapshots(prefix)
        self.free(prefix.start, prefix.tokens)

    def _drop_snapshots(self, prefix: Prefix, beyond: int = -1) -> None:
        """Give back those behind more than so many tokens."""
        for tokens in [tokens for tokens in prefix.snapshots if tokens > beyond]:
            snapshot = prefix.snapshots.pop(tokens)
            if self.snapshots is not None:
                self.snapshots.release(snapshot)

    def take_snapshot(self, prefix: Prefix, tokens: int) -> int | None:
        """Room for what is left of the states behind so many tokens of a prefix; what was not used
        for longest gives way.
        """
        if self.snapshots is None or tokens in prefix.snapshots:
            return None
        used = self.snapshots.take((prefix, tokens))
        if used is None:
            return None
        snapshot, before = used
        if before is not None:
            self._lose_snapshot(*before)
        prefix.snapshots[tokens] = snapshot
        return snapshot

    def pin_snapshot(self) -> int | None:
        """Room for the states of a session, which nothing else takes until it is given back."""
        used = None if self.snapshots is None else self.snapshots.take(None)
        if used is None:
            return None
        snapshot, before = used
        if before is not None:
            self._lose_snapshot(*before)
        return snapshot

    def _lose_snapshot(self, prefix: Prefix, tokens: int) -> None:
        """One of a prefix has given way; without any, nobody finds it."""
        del prefix.snapshots[tokens]
        if prefix in self._cached and not prefix.snapshots:
            self._abort(prefix)

    def _remove(self, prefix: Prefix) -> None:
        for digest in prefix.digests:
            holders = self._holders[digest]
            del holders[prefix]
            if not holders:
                del self._holders[digest]


def prefix_of(
    request: GenerateRequest,
    prompt: Sequence[int],
    max_tokens: int,
    config: ModelConfig,
    chunk: int | None = None,
) -> Prefix | None:
    """Return the prefix of a request without a session; None if it cannot be shared.

    max_tokens: how many tokens the row may come to have
    chunk:      tokens of a pass where only full ones of a prompt are shared, see find
    """
    if isinstance(config, ENCODER_DECODERS) or (chunk and config.has_row_states):
        return None
    longer = False
    if isinstance(config, GPTConfig) and config.rotary_scaling in ("longrope", "dynamic"):
        longer = max_tokens > (config.rotary_original_positions or config.max_positions)
        if longer and config.rotary_scaling == "dynamic":
            return None  # every length of a prompt turns its keys in another way
    table = request.prompt_embedding
    if table is not None:
        table = blake2b(table.float().cpu().numpy().tobytes()).digest()
    tuning = (request.ia3_task, request.lora_adapter, request.prompt_task)
    key = (request.cache_salt, *tuning, table, longer)
    prefix = Prefix(blake2b(repr(key).encode()).digest())
    if chunk:
        prefix.max_tokens = len(prompt) // chunk * chunk
    prefix.set_text(prompt)
    return prefix
