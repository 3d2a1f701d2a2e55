"""The kinds of state that a layer keeps of a row, by which memory is planned and states travel.

Attention keeps something of every token, as keys and values or a latent; a window only limits what
is read of it. What recurs keeps the same whatever the row's length: a state, and the last inputs of
a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.messages.plan import StateCopy


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
