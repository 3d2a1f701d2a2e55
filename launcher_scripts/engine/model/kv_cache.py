"""Keys and values of every row in flight: one pool of tokens, planned when the model is loaded.

The pool is divided into blocks, of which a row has as many as its tokens need, anywhere. So memory
use is known at load, long and short rows share the pool, and rows that begin alike share blocks; a
row that finds no room waits.

The kinds of state that a layer keeps of a row, by which memory is planned and states travel.

Attention keeps something of every token, as keys and values or a latent; a window only limits what
is read of it. What recurs keeps the same whatever the row's length: a state, and the last inputs of
a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launcher_scripts.engine.messages.plan import AssignedBlocks, StateCopy, first_address
from launcher_scripts.kernels.operands import TABLE_PADDING, BlockTable, LayerCache


@dataclass(frozen=True)
class TokenState:
    """What a layer keeps of each token, in the cache's type: keys and values are two parts."""

    parts: int
    heads: int
    width: int

    @property
    def values(self) -> int:
        return self.parts * self.heads * self.width


@dataclass(frozen=True)
class RowState:
    """What a layer keeps of each row.  dtype: None for the compute type"""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def bytes(self, dtype: torch.dtype) -> int:
        """Of one row; dtype: the compute type."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer, on one rank."""

    token: TokenState | None = None
    row: tuple[RowState, ...] = ()


States = Mapping[int, LayerStates]


def bytes_per_token(states: Iterable[LayerStates], dtype: torch.dtype) -> int:
    """Bytes that one token takes in all layers of a rank."""
    return sum(layer.token.values * dtype.itemsize for layer in states if layer.token)


def bytes_per_row(states: Iterable[LayerStates], dtype: torch.dtype) -> int:
    """Bytes that one row takes in all layers of a rank besides those of its tokens."""
    return sum(state.bytes(dtype) for layer in states for state in layer.row)


# Of the memory for states, and of each row in flight: sessions hold one, found prefixes the rest.
SNAPSHOT_SHARE = 0.1
SNAPSHOTS_PER_ROW = 4


def plan_snapshots(slots: int, row_bytes: int, memory: int) -> int:
    """How many copies of rows' states there is room for."""
    capacity = int(memory * SNAPSHOT_SHARE) // max(row_bytes, 1)
    return max(1, min(SNAPSHOTS_PER_ROW * slots, capacity))


class RowStatePool:
    """The states of every row in flight by its slot, those of padding rows, and snapshots.

    layers: of each layer that has any [slots + 1 + snapshots, *shape], views of `pools`, which have
            a first axis of all layers with such a state
    """

    def __init__(
        self,
        states: States,
        slots: int,
        snapshots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.snapshots = snapshots
        self.pools: list[Tensor] = []
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        result: dict[int, dict[int, Tensor]] = {}
        kinds: dict[tuple[int, RowState], list[int]] = {}
        for layer, local in states.items():
            for index, state in enumerate(local.row):
                kinds.setdefault((index, state), []).append(layer)
        for (index, state), layers in kinds.items():
            shape = (len(layers), slots + 1 + snapshots, *state.shape)
            pool = torch.zeros(shape, dtype=state.dtype or dtype, device=device)
            self.pools.append(pool)
            for layer, view in zip(layers, pool, strict=True):
                result.setdefault(layer, {})[index] = view
        self.layers = {
            layer: tuple(local[index] for index in sorted(local)) for layer, local in result.items()
        }

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy whole states, one after the other."""
        for one in copies:
            for pool in self.pools:
                pool[:, one.target] = pool[:, one.source]

    def gather(self, targets: Tensor, sources: Tensor) -> None:
        """Let the slots [B] have the states of others [B], all of which are read before."""
        for pool in self.pools:
            pool.index_copy_(1, targets, pool.index_select(1, sources))


class KVCache:
    """The pools of one rank's layers by their kinds of state, and the ids of the tokens they hold.

    They are divided into blocks, which rows find by the table: a row's tokens have consecutive
    addresses (see first_address), block by block. One block more than `capacity` has is for what
    padding rows of a step write.

    pools: [layers, parts, heads, capacity + a block, width] of all layers with such a TokenState;
           keys and values are two parts, and `layers` are views of them
    row_states:  what is kept of rows whatever their length
    dtype: of keys and values;  token_bytes: what one token takes of them
    """

    def __init__(
        self,
        states: States,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        row_states: RowStatePool | None = None,
        arrivals: int = 1,
        *,
        slots: int = 1,
        table: BlockTable | None = None,
    ) -> None:
        """capacity: a multiple of a block's tokens;  arrivals: of a layer, see LayerCache;
        slots: of rows;  table: another cache's of the same capacity, whose blocks these are, too
        """
        self.capacity = capacity
        self.slots = slots
        self.token_bytes = bytes_per_token(states.values(), dtype)
        self.table = table or _block_table(capacity, slots, device)
        counts = torch.zeros(arrivals, dtype=torch.int32, device=device)
        tokens = capacity + self.table.tokens
        self.pools: list[Tensor] = []
        self.layers: dict[int, LayerCache] = {}
        kinds: dict[TokenState, list[int]] = {}
        for layer, local in states.items():
            if local.token is not None:
                kinds.setdefault(local.token, []).append(layer)
        for kind, layers in kinds.items():
            shape = (len(layers), kind.parts, kind.heads, tokens, kind.width)
            pool = torch.empty(shape, dtype=dtype, device=device)
            self.pools.append(pool)
            for layer, parts in zip(layers, pool, strict=True):
                self.layers[layer] = LayerCache(parts[0], parts[-1], counts, self.table)
        self.ids: Tensor = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.row_states = row_states or RowStatePool({}, 0, 0, dtype, device)

    @property
    def scratch(self) -> int:
        """The address of a token that belongs to no row."""
        return first_address(self.slots, self.capacity)

    @property
    def pools_with_ids(self) -> list[tuple[Tensor, Tensor | None]]:
        """Each pool, and with one of them the ids, for what goes through both."""
        if not self.pools:
            return [(self.ids.view(1, 1, 1, -1, 1), None)]
        return [(self.pools[0], self.ids), *((pool, None) for pool in self.pools[1:])]

    def assign(self, changes: Sequence[AssignedBlocks]) -> None:
        """Let rows have their tokens in these blocks; an entry's last change counts."""
        entries: dict[int, int] = {}
        for change in changes:
            first = first_address(change.slot, self.capacity) // self.table.tokens + change.first
            entries.update(enumerate(change.blocks, first))
        packed = torch.tensor([list(entries), list(entries.values())])
        packed = packed.to(self.ids.device, non_blocking=True)
        self.table.entries.index_copy_(0, packed[0], packed[1].int())


@dataclass(eq=False)
class Block:
    """Consecutive tokens of the cache.

    rows:     how many rows and sessions use it
    digest:   what it is found by, None: by nothing
    computed: whether its tokens are there once everything launched has run
    read:     whether they are in the draft model's cache, too
    snapshot: where what is left of a row's states behind it is, -1: nowhere
    """

    number: int
    rows: int = 0
    digest: bytes | None = None
    computed: bool = False
    read: bool = False
    snapshot: int = -1


# Of the device's kind. Smaller ones leave less room empty and share more of a prefix; kernels look
# tiles up block by block.
BLOCK_TOKENS = {"cpu": 16, "cuda": 16}


def block_tokens(device: torch.device) -> int:
    """Return the number of tokens of a block."""
    return BLOCK_TOKENS.get(device.type, BLOCK_TOKENS["cuda"])


def _block_table(capacity: int, slots: int, device: torch.device) -> BlockTable:
    """Return the table of so many rows, and of one for padding; no block is assigned yet, so that
    the first addresses are those of the cache.
    """
    size = block_tokens(device)
    blocks = capacity // size
    entries = torch.arange(2 * blocks * (slots + 1) + TABLE_PADDING, dtype=torch.int32)
    entries %= max(blocks, 1)
    entries[first_address(slots, capacity) // size - blocks :] = blocks
    return BlockTable(entries.to(device), size)


def plan_capacity(requested: int, token_bytes: int, memory: int, block: int, slots: int) -> int:
    """Return the number of tokens of the pool in whole blocks: as many as wanted, as far as
    `memory` bytes allow, of which the table of so many rows takes some, too."""
    token_bytes += -(-2 * (slots + 1) * torch.int32.itemsize // block)
    blocks = min(-(-requested // block), memory // token_bytes // block - 1)
    return max(0, blocks) * block


def available_memory(device: torch.device, share: float) -> int:
    """Bytes that the cache may take: `share` of what the device has free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * share)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(int(fields["MemAvailable"].split()[0]) * 1024 * share)
