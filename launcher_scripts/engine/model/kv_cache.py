"""Keys and values of every row in flight: one pool of tokens, planned when the model is loaded.

A row owns an extent, a run of consecutive tokens. So memory use is known at load, and long and
short rows share the pool; a row that finds no room waits.

The kinds of state that a layer keeps of a row, by which memory is planned and states travel.

Attention keeps something of every token, as keys and values or a latent; a window only limits what
is read of it. What recurs keeps the same whatever the row's length: a state, and the last inputs of
a convolution.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launcher_scripts.engine.messages.plan import Copy, Move, StateCopy
from launcher_scripts.kernels.operands import LayerCache


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


COPIED_TOKENS = 4096


class ExtentAllocator:
    """First-fit allocation of extents among `capacity` tokens; neighbours merge when freed."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = [(0, capacity)] if capacity else []  # (start, length), ascending

    @property
    def free_tokens(self) -> int:
        return sum(length for _, length in self._free)

    def allocate(self, length: int) -> int | None:
        """Start of a free extent, now taken; None when no gap is long enough."""
        for position, (start, gap) in enumerate(self._free):
            if gap >= length:
                remaining = (start + length, gap - length)
                self._free[position : position + 1] = [remaining] if remaining[1] else []
                return start
        return None

    def take(self, start: int, length: int) -> bool:
        """Take the `length` tokens from `start` on, if all of them are free."""
        position = bisect.bisect(self._free, (start, self.capacity)) - 1
        if position < 0:
            return False
        first, gap = self._free[position]
        before, after = start - first, first + gap - (start + length)
        if after < 0:
            return False
        remnants = ((first, before), (start + length, after))
        self._free[position : position + 1] = [remnant for remnant in remnants if remnant[1]]
        return True

    def free(self, start: int, length: int) -> None:
        """Give an extent back."""
        position = bisect.bisect(self._free, (start, 0))
        self._free.insert(position, (start, length))
        for left in (position, position - 1):
            if 0 <= left < len(self._free) - 1:
                (first, size), (second, more) = self._free[left : left + 2]
                if first + size == second:
                    self._free[left : left + 2] = [(first, size + more)]

    def slides(self, movable: Mapping[int, int], length: int) -> list[tuple[int, int]] | None:
        """Return the moves of extents, front to back, that leave a gap of `length` tokens.

        movable: start -> tokens of the extents that may move. Of all gaps that can be gathered the
        one for which fewest tokens move; None where there is none.
        """
        gaps = dict(self._free)
        best: list[int] | None = None
        first, fewest = 0, self.capacity + 1
        for start in gaps:
            position, gap, moved, passed = start, 0, 0, []
            while gap < length and moved < fewest:
                if position in gaps:
                    gap, position = gap + gaps[position], position + gaps[position]
                elif position in movable:
                    passed.append(position)
                    moved, position = moved + movable[position], position + movable[position]
                else:
                    break
            if gap >= length and moved < fewest:
                first, fewest, best = start, moved, passed
        if best is None:
            return None
        positions = itertools.accumulate((movable[index] for index in best), initial=first)
        return list(zip(best, positions, strict=False))


class KVCache:
    """The pools of one rank's layers by their kinds of state, and the ids of the tokens they hold.

    One more token than `capacity` is kept as a place where padding rows of a step may write.
    pools: [layers, parts, heads, capacity + 1, width] of all layers with such a TokenState; keys
           and values are two parts, and `layers` are views of them
    row_states:  what is kept of rows whatever their length
    features: [capacity + 1, hidden], hidden states that a draft head reads; None without one
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
    ) -> None:
        """arrivals: of a layer, see LayerCache"""
        self.capacity = capacity
        self.token_bytes = bytes_per_token(states.values(), dtype)
        counts = torch.zeros(arrivals, dtype=torch.int32, device=device)
        self.pools: list[Tensor] = []
        self.layers: dict[int, LayerCache] = {}
        kinds: dict[TokenState, list[int]] = {}
        for layer, local in states.items():
            if local.token is not None:
                kinds.setdefault(local.token, []).append(layer)
        for kind, layers in kinds.items():
            shape = (len(layers), kind.parts, kind.heads, capacity + 1, kind.width)
            pool = torch.empty(shape, dtype=dtype, device=device)
            self.pools.append(pool)
            for layer, parts in zip(layers, pool, strict=True):
                self.layers[layer] = LayerCache(parts[0], parts[-1], counts)
        self.ids: Tensor = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
        self.features: Tensor | None = None
        self.row_states = row_states or RowStatePool({}, 0, 0, dtype, device)

    @property
    def scratch(self) -> int:
        """The token that belongs to no row."""
        return self.capacity

    @property
    def pools_with_ids(self) -> list[tuple[Tensor, Tensor | None]]:
        """Each pool, and with one of them the ids, for what goes through both."""
        if not self.pools:
            return [(self.ids.view(1, 1, 1, -1, 1), None)]
        return [(self.pools[0], self.ids), *((pool, None) for pool in self.pools[1:])]

    def shift(self, moves: Sequence[Move]) -> None:
        """Bring what sessions still attend to to the front of their extents."""
        self.copy_runs(Copy(move.start + move.by, move.start, move.count) for move in moves)

    def copy_runs(self, copies: Iterable[Copy]) -> None:
        """Copy runs of tokens, one after the other; a run may overlap what lies before it."""
        for run in copies:
            for first in range(0, run.count, COPIED_TOKENS):
                some = min(COPIED_TOKENS, run.count - first)
                overlaps = run.source - some < run.target < run.source
                features = () if self.features is None else (self.features,)
                for pool in (*(pool.movedim(3, 0) for pool in self.pools), self.ids, *features):
                    read = pool[run.source + first :][:some]
                    pool[run.target + first :][:some] = read.clone() if overlaps else read


def plan_capacity(requested: int, token_bytes: int, memory: int) -> int:
    """Return the number of tokens of the pool: as many as wanted, as far as `memory` bytes
    allow."""
    return max(0, min(requested, memory // max(token_bytes, 1)))


def available_memory(device: torch.device, share: float) -> int:
    """Bytes that the cache may take: `share` of what the device has free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * share)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(int(fields["MemAvailable"].split()[0]) * 1024 * share)
