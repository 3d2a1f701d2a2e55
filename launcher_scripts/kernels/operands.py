"""What the operations work on: a layer's tensors, grouped as they are used together."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """y = x W^T + b, optionally of a normalized x.

    weight:      [out, in] in the compute type
    bias:        [out] in the compute type
    norm:        applied to x first
    column_sums: float32 [out], W g: what a mean of one contributes (layer norm only)
    offsets:     float32 [out], W beta + b
    The last two let one pass over x give both its statistics and the product:
    W norm(x) + b = (W (g x) - mean W g) / std + (W beta + b).
    """

    weight: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    column_sums: Tensor | None = None
    offsets: Tensor | None = None

    def folded(self) -> Linear:
        """The same projection with column_sums and offsets filled in; exact up to rounding."""
        offsets = None if self.bias is None else self.bias.float()
        column_sums = None
        if self.norm is not None and self.norm.kind == "layernorm":
            column_sums = _times(self.weight, self.norm.weight)
            if self.norm.bias is not None:
                shift = _times(self.weight, self.norm.bias)
                offsets = shift if offsets is None else offsets + shift
        return replace(self, column_sums=column_sums, offsets=offsets)


def _times(weight: Tensor, vector: Tensor) -> Tensor:
    """W v in float32, a few rows at a time so that no float32 copy of W is ever whole."""
    return torch.cat([part.float() @ vector for part in weight.split(4096)])


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
