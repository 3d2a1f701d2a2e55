"""Blocks of the cache, and which of them hold what: prompts that begin alike share theirs.

A text is found by its blocks. The digest of a block is of its ids, of all blocks before it and of
what else decides its keys and values, so one digest says all that stands up to there, and ids are
not compared again. A block is shared only when it is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from launcher_scripts.common.files import block_digests
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.requests import ENCODER_DECODERS
from launcher_scripts.engine.model.kv_cache import Block
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig


@dataclass(eq=False)
class Prefix:
    """The text of a row as others may find it.

    salt:    of the first block;  block_tokens: of each
    digests: of the blocks that are there or will be
    max_tokens: tokens of the text that others may find; None: all
    """

    salt: bytes
    block_tokens: int
    digests: list[bytes] = field(default_factory=list)
    max_tokens: int | None = None

    def set_text(self, ids: Sequence[int]) -> None:
        """The blocks are those that `ids` fill; they begin as the text before did, or end there."""
        ids, size = ids[: self.max_tokens], self.block_tokens
        del self.digests[len(ids) // size :]
        digest = self.digests[-1] if self.digests else self.salt
        self.digests += block_digests(ids[size * len(self.digests) :], size, digest)


class CachedPrefix(NamedTuple):
    """The first `tokens` tokens of a prompt, which are in the cache.

    coming: how many will be there in a few steps; no fewer than `tokens`
    read:   how many of them are in the draft model's cache, too
    snapshot: what is left of the states behind them, where rows have such states
    """

    blocks: tuple[Block, ...] = ()
    tokens: int = 0
    coming: int = 0
    read: int = 0
    snapshot: int = -1


class Snapshots:
    """Room for `count` copies of rows' states, from slot `first` on, of which those that were not
    used for longest give way. Each is behind a block, or of a session, which gives it back itself.
    """

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))[::-1]
        self._used: dict[int, Block] = {}

    def take(self, block: Block | None) -> int | None:
        """Return room for a copy, behind a block or of a session; None where sessions have all."""
        if self._free:
            snapshot = self._free.pop()
        elif self._used:
            snapshot = next(iter(self._used))
            self._used.pop(snapshot).snapshot = -1
        else:
            return None
        if block is not None:
            block.snapshot = snapshot
            self._used[snapshot] = block
        return snapshot

    def use(self, snapshot: int) -> None:
        """The snapshot of a block counts as used now."""
        self._used[snapshot] = self._used.pop(snapshot)

    def release(self, snapshot: int) -> None:
        """Give a place back."""
        self._used.pop(snapshot, None)
        self._free.append(snapshot)


class PrefixCache:
    """Blocks of the cache, of which rows share those that hold the same.

    A block that no row uses any more can be found as long as nobody needs the room: it counts as
    free, and those that were not used for longest are given up first.

    capacity:  in tokens, a multiple of a block's
    snapshots: where rows have states beside those of their tokens, room for copies of them; then a
                prefix is only found as far as it has one
    unit:      tokens of which a multiple is found, in whole blocks; None: a block's
    """

    def __init__(
        self,
        capacity: int,
        block_tokens: int,
        snapshots: Snapshots | None = None,
        unit: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.block_tokens = block_tokens
        self._unit = max(1, (unit or block_tokens) // block_tokens)
        self.snapshots = snapshots
        self._free = [Block(number) for number in range(capacity // block_tokens)][::-1]
        self._unused: dict[Block, None] = {}  # that can be found, the least recently used first
        self._by_digest: dict[bytes, Block] = {}

    @property
    def free_blocks(self) -> int:
        """Return the number of blocks that no row uses."""
        return len(self._free) + len(self._unused)

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that so many tokens need."""
        return -(-tokens // self.block_tokens)

    def find(self, digests: Sequence[bytes]) -> CachedPrefix:
        """Return the longest prefix of a text with such blocks, a multiple of `unit` tokens."""
        blocks: list[Block] = []
        count = coming = 0
        computed = True
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            blocks.append(block)
            computed = computed and block.computed
            is_whole = len(blocks) % self._unit == 0
            if is_whole and (self.snapshots is None or block.snapshot >= 0):
                coming = len(blocks)
                count = coming if computed else count
        size = self.block_tokens
        snapshot = -1
        if self.snapshots is not None and count:
            snapshot = blocks[count - 1].snapshot
            self.snapshots.use(snapshot)
        read = next((n for n in range(count) if not blocks[n].read), count)
        return CachedPrefix(
            tuple(blocks[:count]), size * count, size * coming, size * read, snapshot
        )

    def allocate(self, count: int) -> list[Block] | None:
        """Return so many blocks, now a row's; None where there are fewer."""
        if count > self.free_blocks:
            return None
        result: list[Block] = []
        for _ in range(count):
            if not self._free:
                block = next(iter(self._unused))
                del self._unused[block]
                self._release(block)
            result.append(self._free.pop())
            result[-1].rows = 1
        return result

    def share(self, blocks: Iterable[Block]) -> None:
        """Let one row more use blocks."""
        for block in blocks:
            block.rows += 1
            self._unused.pop(block, None)

    def free(self, blocks: Sequence[Block]) -> None:
        """Let one row less use blocks; of what nobody uses any more the last ones are given up
        first.
        """
        for block in reversed(blocks):
            block.rows -= 1
            if block.rows:
                continue
            if block.digest is not None and block.computed:
                self._unused[block] = None
            else:
                self._release(block)

    def publish(self, blocks: Sequence[Block], digests: Sequence[bytes]) -> None:
        """Let the blocks of a text be found, but for those which others are already found for."""
        for block, digest in zip(blocks, digests, strict=False):
            if block.digest is None and digest not in self._by_digest:
                block.digest = digest
                self._by_digest[digest] = block

    def clear(self) -> None:
        """Let nothing be found any more of what is there, also of rows that run.

        Their prefixes must not be used afterwards.
        """
        for block in list(self._by_digest.values()):
            self._forget(block)
        for block in self._unused:
            self._release(block)
        self._unused.clear()

    def take_snapshot(self, block: Block) -> int | None:
        """Return room for what is left of the states behind a block; what was not used for longest
        gives way. None where there is none, or the block has one.
        """
        if self.snapshots is None or block.snapshot >= 0:
            return None
        return self.snapshots.take(block)

    def pin_snapshot(self) -> int | None:
        """Room for the states of a session, which nothing else takes until it is given back."""
        return None if self.snapshots is None else self.snapshots.take(None)

    def _release(self, block: Block) -> None:
        self._forget(block)
        block.computed = block.read = False
        self._free.append(block)

    def _forget(self, block: Block) -> None:
        if block.digest is not None:
            del self._by_digest[block.digest]
            block.digest = None
        if block.snapshot >= 0 and self.snapshots is not None:
            self.snapshots.release(block.snapshot)
            block.snapshot = -1


def prefix_of(
    request: GenerateRequest,
    prompt: Sequence[int],
    max_tokens: int,
    config: ModelConfig,
    block_tokens: int,
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
    prefix = Prefix(blake2b(repr(key).encode()).digest(), block_tokens)
    if chunk:
        prefix.max_tokens = len(prompt) // chunk * chunk
    prefix.set_text(prompt)
    return prefix
