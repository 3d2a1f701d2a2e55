"""What the operations work on: a layer's tensors, grouped as they are used together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """A layer norm (`bias` given) or an RMS norm.

    weight, bias: float32 [hidden]
    kind:         "layernorm" or "rmsnorm"
    """

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b, of a normalized x where there is a norm.

    weight:  [out, in] in the compute type, or int8
    bias:    [out] in the compute type
    norm:    applied to x first
    scale:   float32 [out]: what each row of an int8 weight is multiplied by
    compute: the compute type of an int8 weight
    """

    weight: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    scale: Tensor | None = None
    compute: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The compute type."""
        return self.compute or self.weight.dtype


@dataclass(frozen=True)
class Heads:
    """One rank's attention heads: `num_heads` queries share `num_kv_heads` keys and values."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values of every row: [kv_heads, tokens, head_size].

    A row owns a run of consecutive tokens (its extent).
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class RelativeBias:
    """What a score gains by how far its key is from its query (Raffel et al. 2020).

    table: float32 [heads, 2 * reach + 1], for key - query from -reach to reach; keys farther away
           gain what those at the ends do
    """

    table: Tensor

    @property
    def reach(self) -> int:
        return self.table.shape[1] // 2
