"""Several tensor-parallel ranks in one process, so that one rank's sums have the bits of several.

A sum over ranks adds what each made of its shard of a layer. A single rank that multiplies full
matrices adds in another order. Here every layer is computed shard by shard, by the kernels and in
the shapes of the ranks, and their parts are added in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.families import engine_family
from launcher_scripts.engine.model.kv_cache import KVCache
from launcher_scripts.engine.model.layers import ForwardContext, Input, Layer, Sublayer
from launcher_scripts.engine.model.network import Network
from launcher_scripts.engine.model.weights import (
    AttentionWeights,
    LayerWeights,
    MLPWeights,
    ModelWeights,
    SublayerWeights,
)
from launcher_scripts.kernels.operands import Hidden, LayerCache, Linear, Norm
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.gpt import GPTConfig

Weights = TypeVar("Weights", bound=SublayerWeights)


def check_virtual_ranks(
    weights: ModelWeights, size: int, parallelism: Parallelism, *, fixed: bool
) -> None:
    """Raise ConfigError where a model cannot have the bits of `size` ranks.

    fixed: steps are those of a deterministic model, and ranks add by all-reduce
    """
    reason = unsupported_reason(weights, size)
    if not fixed:
        reason = "it needs deterministic, without enable_custom_all_reduce"
    elif parallelism.world_size > 1 or size > 2:
        reason = "one rank can have the bits of two"
    if reason is not None:
        raise ConfigError(
            problem(
                f"the model cannot have the bits of another number of ranks: {reason}",
                got=f"deterministic_ranks {size}",
                choices=[parallelism.tp_size],
                change="deterministic_ranks in config.pbtxt",
            )
        )


def unsupported_reason(weights: ModelWeights, size: int) -> str | None:
    """Return the reason why a model cannot be computed as on `size` ranks; None if it can."""
    config = weights.config
    if not isinstance(config, GPTConfig):
        return "it is no GPT"
    if size not in config.tp_sizes() or config.num_kv_heads % size:
        return f"its heads and sizes are not divided by {size}"
    kinds = {type(part) for layer in weights.decoder.layers.values() for part in layer.sublayers}
    if kinds - {AttentionWeights, MLPWeights} or weights.decoder.side is not None:
        return "its layers have more than attention and an MLP"
    if config.joint_qk_norm or config.parts.ia3_num_tasks or config.parts.adapter_size:
        return "its heads are normalized together, or it has IA3 or adapters"
    if config.parts.loras.count:
        return "it has LoRA adapters"
    linears = [
        linear
        for layer in weights.decoder.layers.values()
        for part in layer.sublayers
        for linear in part.linears()
    ]
    if any(linear.scale is not None for linear in linears):
        return "its weights are quantized, each rank's shards by their own scales"
    return None


class VirtualRank(Communicator):
    """One of several ranks of this process; the last one adds the others' parts to its own."""

    def __init__(self, size: int, rank: int, communicator: Communicator) -> None:
        super().__init__(Parallelism(size, 1), rank, communicator.progress)
        self.others: list[Tensor] = []

    def tp_sum(self, tensor: Tensor) -> Tensor:
        if self.others:
            total = self.others[0]
            for other in self.others[1:]:
                total = total + other
            tensor = total + tensor
            self.others = []
        return tensor


class ShardedSublayer(Sublayer):
    """A sublayer whose shards are computed one after the other.  shards: in the ranks' order"""

    def __init__(self, shards: Sequence[Sublayer], last: VirtualRank) -> None:
        self.shards = shards
        self.last = last
        self.kernels = shards[0].kernels
        self.window = shards[0].window
        self.in_proj = shards[0].in_proj

    def prepare(self) -> None:
        """See Sublayer."""
        for shard in self.shards:
            shard.prepare()
        self.in_proj = self.shards[0].in_proj

    def branch(self, x: Input, context: ForwardContext[Input], /) -> Tensor:
        """Return the input of the last shard's out_proj; the parts of the others are computed."""
        *others, last = self.shards
        self.last.others = [
            self.kernels.product_over_ranks(shard.branch(x, context), shard.out_proj, _ALONE)
            for shard in others
        ]
        return last.branch(x, context)

    def add(self, inner: Tensor, residual: Tensor, adapters: Tensor | None, /) -> Tensor:
        """See Sublayer."""
        return self.shards[-1].add(inner, residual, adapters)

    def accumulate(
        self, inner: Tensor, x: Hidden, norm_of_next: Norm | None, adapters: Tensor | None, /
    ) -> Hidden:
        """See Sublayer."""
        return self.shards[-1].accumulate(inner, x, norm_of_next, adapters)


_ALONE = Communicator()


class VirtualRanksNetwork(Network):
    """A network on one rank that computes as on `size` ranks."""

    has_copies = True

    def __init__(
        self,
        weights: ModelWeights,
        cache: KVCache,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
        size: int,
    ) -> None:
        self._size = size
        self._gpt: GPTConfig = weights.config
        super().__init__(weights, cache, kernels, communicator, device)

    def _layer(self, layer: int, weights: LayerWeights) -> Layer:
        ranks = [VirtualRank(self._size, rank, self.communicator) for rank in range(self._size)]
        branches = tuple(
            tuple(self._sharded(layer, item, ranks) for item in both) for both in weights.branches
        )
        return Layer(branches)

    def _sharded(
        self, layer: int, weights: SublayerWeights, ranks: Sequence[VirtualRank]
    ) -> ShardedSublayer:
        communicator, heads, full_cache = self.communicator, self.heads, self.cache.layers[layer]
        shards = []
        self.heads = engine_family(self.config).heads(self.config, self._size)
        for rank in ranks:
            self.communicator = rank
            self.cache.layers[layer] = _cache_shard(full_cache, rank.rank, self._size)
            local = shard_of(weights, self._gpt, rank.rank, self._size)
            shards.append(self._branch(layer, local))
        self.communicator, self.heads = communicator, heads
        self.cache.layers[layer] = full_cache
        return ShardedSublayer(shards, ranks[-1])

    def head_shards(self) -> list[Linear]:
        """See Network."""
        head = super().head_shards()[0]
        rows = -(-head.weight.shape[0] // self._size)
        result = []
        for rank in range(self._size):
            part = head.weight[rank * rows : (rank + 1) * rows]
            weight = head.weight.new_zeros(rows, head.weight.shape[1])
            weight[: len(part)] = part
            bias = None
            if head.bias is not None:
                bias = head.bias.new_zeros(rows)
                bias[: len(part)] = head.bias[rank * rows : (rank + 1) * rows]
            result.append(replace(head, weight=weight, bias=bias))
        return result


def shard_of(weights: Weights, config: GPTConfig, rank: int, size: int) -> Weights:
    """Return one rank's shard of a sublayer's weights."""
    if isinstance(weights, AttentionWeights):
        blocks = [config.q_size, config.kv_size, config.kv_size]
        changes: dict[str, object] = {"in_proj": _rows(weights.in_proj, rank, size, blocks)}
        if weights.sinks is not None:
            changes["sinks"] = weights.sinks.chunk(size)[rank].contiguous()
    else:
        changes = {"in_proj": _rows(weights.in_proj, rank, size)}
    gate = getattr(weights, "gate", None)
    if gate is not None:
        changes["gate"] = _rows(gate, rank, size)
    weight = weights.out_proj.weight.chunk(size, 1)[rank].contiguous()
    changes["out_proj"] = replace(weights.out_proj, weight=weight)
    return replace(weights, **changes)  # type: ignore[arg-type]


def _rows(linear: Linear, rank: int, size: int, blocks: Sequence[int] = ()) -> Linear:
    """One rank's rows of each of the blocks of a projection's outputs; none: of all rows."""
    sizes = [*blocks] or [linear.weight.shape[0]]

    def shard(tensor: Tensor) -> Tensor:
        return torch.cat([block.chunk(size)[rank] for block in tensor.split(sizes)])

    bias = None if linear.bias is None else shard(linear.bias)
    return replace(linear, weight=shard(linear.weight), bias=bias)


def _cache_shard(cache: LayerCache, rank: int, size: int) -> LayerCache:
    keys, values = (pool.chunk(size)[rank] for pool in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values)
