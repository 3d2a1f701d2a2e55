"""Inputs of layers besides hidden states and their own keys and values; see
launcher_scripts.models.side_streams for the mathematics.

A stage sends what later stages read of it behind its hidden states: all streams, and the keys and
values of the new tokens in layers that later ones share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.layers import (
    MLP,
    ForwardContext,
    Input,
    MixtureOfExperts,
    ParallelSublayers,
    SelfAttention,
    Sublayer,
)
from launcher_scripts.engine.model.weight_loader import WeightLoader
from launcher_scripts.engine.model.weights import (
    AttentionWeights,
    Embedding,
    Experts,
    LayerWeights,
    MLPWeights,
    SideWeights,
    StreamWeights,
    SublayerWeights,
)
from launcher_scripts.kernels.operands import Hidden, LayerCache, Linear, LoRA, Norm
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.kernels.quantization import saturated
from launcher_scripts.kernels.reference import activated
from launcher_scripts.kernels.reference_attention import rotated
from launcher_scripts.models.gpt import GPTConfig

_HALF = 2**-0.5
_SMALLEST_SQUARE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SharingAttentionWeights(AttentionWeights):
    """in_proj makes queries alone.  query_norm: of every head's queries, where there is one"""

    query_norm: Norm | None


@dataclass(frozen=True, kw_only=True)
class LayerInputWeights(SublayerWeights):
    """in_proj makes what the token's input multiplies, out_proj reads the product.

    table: [vocab, inputs / tp];  projection: of the token's embedding, [inputs, hidden];
    input_norm: of what it makes;  embedding_scale: of the table's rows
    """

    table: Tensor
    projection: Linear
    input_norm: Norm
    embedding_scale: float


@dataclass(frozen=True, kw_only=True)
class LaurelWeights(SublayerWeights):
    """A low-rank linear of attention's input, which is added with it."""


@dataclass(frozen=True, kw_only=True)
class CutMLPWeights(MLPWeights):
    """deviations: how far above the mean what the activation reads begins"""

    deviations: float


@dataclass(frozen=True, kw_only=True)
class NormedExperts(Experts):
    """Norms of what the router and the experts read, and of what they and the shared one add.

    expert_scale: multiplies the weights of each expert, float32 [experts]
    """

    router_norm: Norm
    expert_norm: Norm
    expert_output_norm: Norm
    shared_output_norm: Norm
    expert_scale: Tensor


class SharingAttention(SelfAttention):
    """Attention to the keys and values of an earlier layer, which are in its cache."""

    def __init__(self, weights: SharingAttentionWeights, *arguments: Any, **options: Any) -> None:
        super().__init__(weights, *arguments, **options)
        self.query_norm = weights.query_norm

    def store(self, x: Tensor | Hidden, _slots: Tensor, context: ForwardContext[Any]) -> Tensor:
        """Queries [N, heads, head_size]; nothing is stored."""
        queries = self.project(x, context.lora_adapters)
        dtype, size, rotary = queries.dtype, self.heads.head_size, context.rotary[self.table]
        if self.query_norm is not None:
            queries = self.kernels.norm(queries.reshape(-1, size), self.query_norm, dtype)
        queries = queries.view(-1, self.heads.num_heads, size)
        return queries if rotary is None else rotated(queries, *rotary).to(dtype)


class LayerInput(Sublayer):
    """The branch that reads a token's input of the layer."""

    def __init__(
        self, weights: LayerInputWeights, kernels: Ops, communicator: Communicator, activation: str
    ) -> None:
        super().__init__(weights, kernels, communicator)
        self.weights = weights
        self.activation = activation

    def branch(self, x: Input, context: ForwardContext[Input]) -> Tensor:
        """See Sublayer."""
        states = x.exact if isinstance(x, Hidden) else x
        inner = self.kernels.mlp_up(states, self.in_proj, None, self.activation)
        result: Tensor = (inner.float() * self._input(context)).to(inner.dtype)
        return result

    def _input(self, context: ForwardContext[Input]) -> Tensor:
        """This rank's part of the tokens' inputs, float32 [N, inputs / tp]."""
        if context.tokens is None:
            raise ValueError("the pass says nothing of the tokens' embeddings")
        (ids, embedded), weights, kernels = context.tokens, self.weights, self.kernels
        size = weights.table.shape[1]
        made = kernels.project(embedded.to(weights.projection.dtype), weights.projection).float()
        made = made * embedded.shape[1] ** -0.5
        normed = kernels.norm(made, weights.input_norm, torch.float32)
        local = normed[:, self.communicator.tp_rank * size :][:, :size]
        looked_up = kernels.embed(ids, weights.table, 0) * weights.embedding_scale
        result: Tensor = (local + looked_up) * _HALF
        return result


class Laurel(Sublayer):
    """Stands beside attention."""

    def branch(self, x: Input, _context: ForwardContext[Input], /) -> Tensor:
        """This rank's inner numbers, and the normalized input."""
        normed = self._normalized(x)
        inner = self.kernels.project(normed, replace(self.in_proj, norm=None))
        return torch.cat([inner, normed], 1)

    def add(self, inner: Tensor, residual: Tensor, _adapters: Tensor | None, /) -> Tensor:
        """See Sublayer."""
        inner, normed = inner.split((self.out_proj.in_size, residual.shape[1]), 1)
        part = self.kernels.project(inner.contiguous(), self.out_proj)
        total: Tensor = self._add(self.communicator.tp_sum(part), residual) + normed
        return total if self.scale is None else total * self.scale


class CutMLP(MLP):
    """A gated MLP that drops most of what its activation reads."""

    def __init__(self, weights: CutMLPWeights, *arguments: Any) -> None:
        super().__init__(weights, *arguments)
        self.deviations = weights.deviations

    def branch(self, x: Input, context: ForwardContext[Input]) -> Tensor:
        """See Sublayer."""
        inner = self.project(x, context.lora_adapters).float()
        count = inner.shape[1] * self.communicator.tp_size
        mean = self.communicator.tp_sum(inner.sum(1, keepdim=True)) / count
        squares = self.communicator.tp_sum((inner - mean).square().sum(1, keepdim=True))
        cut = (inner - mean - (squares / count).sqrt() * self.deviations).relu()
        factors = None if self.gate is None else self._projected(x, self.gate).float()
        return activated(cut, factors, self.activation).to(self.in_proj.dtype)


class NormedMixture(MixtureOfExperts):
    """Experts and a shared one, each behind norms of its own."""

    def __init__(self, weights: NormedExperts, *arguments: Any) -> None:
        super().__init__(weights, *arguments)
        self.weights = weights

    def branch(self, x: Input, _context: ForwardContext[Input], /) -> Tensor:
        """This rank's sums of the experts and of the shared one: float32 [2, N, hidden]."""
        states = x.exact if isinstance(x, Hidden) else x
        weights, kernels, dtype = self.weights, self.kernels, self.in_proj.dtype
        selected, factors = kernels.route(
            kernels.norm(states, weights.router_norm, dtype), self.router
        )
        factors = factors * weights.expert_scale[selected]
        read = kernels.norm(states, weights.expert_norm, dtype)
        mixed = kernels.mixture(read, selected, factors, self.experts).sum(0)
        if self.shared is None:
            raise ValueError("such experts have a shared one beside them")
        mlp = self.shared.mlp
        inner = kernels.mlp_up(self._normalized(x), mlp.in_proj, mlp.gate, self.activation)
        return torch.stack([mixed, kernels.project(inner, mlp.out_proj).float()])

    def add(self, inner: Tensor, residual: Tensor, _adapters: Tensor | None, /) -> Tensor:
        """See Sublayer."""
        sums = self.communicator.tp_sum(inner)
        norms = self.weights.expert_output_norm, self.weights.shared_output_norm
        parts = [
            self.kernels.norm(part, norm, torch.float32)
            for part, norm in zip(sums, norms, strict=True)
        ]
        total = parts[0] + parts[1]
        if self.output_norm is not None:
            total = self.kernels.norm(total, self.output_norm, torch.float32)
        total = residual + total
        return total if self.scale is None else total * self.scale


class AlternatingUpdates(ParallelSublayers):
    """A layer of several streams, of which its branches read one."""

    def __init__(
        self,
        weights: StreamWeights,
        inner: Sequence[Sublayer | ParallelSublayers],
        kernels: Ops,
    ) -> None:
        *branches, last = inner
        if not isinstance(last, Sublayer):
            raise TypeError("the input of the layer stands alone")
        self.weights = weights
        self.branches = branches
        self.layer_input = last
        self.kernels = kernels
        self.input_norm = None
        self.window = max(branch.window for branch in branches)

    def prepare(self) -> None:
        """Nothing: no fused step goes through it."""

    def forward(self, x: Tensor, context: ForwardContext[Tensor]) -> Tensor:
        """x float32 [N, streams * hidden]: the same."""
        weights, count = self.weights, self.weights.correction.shape[0]
        streams = x.view(len(x), count, -1)
        mixing = self._modalities(streams[:, weights.active]) @ weights.prediction.t()
        predicted = streams + mixing.view(-1, count, count) @ streams
        active = activated_state = predicted[:, weights.active].contiguous()
        for branch in self.branches:
            activated_state = branch.forward(activated_state, context)
        factors = self._modalities(activated_state) @ weights.correction.t() + 1
        corrected = predicted + (activated_state - active)[:, None] * factors[..., None]
        first = corrected[:, weights.active].contiguous()
        if weights.scale is not None:
            first = first * weights.scale
        inner = self.layer_input.branch(first, context)
        added = self.layer_input.add(inner, torch.zeros_like(first), context.lora_adapters)
        corrected[:, 1:] += added[:, None]
        return corrected.view(len(x), -1)

    def _modalities(self, states: Tensor) -> Tensor:
        normed = self.kernels.norm(states.contiguous(), self.weights.norm, torch.float32)
        return (normed / states.shape[1] @ self.weights.router.t()).tanh()


class SideStreams:
    """Tensors that a stage hands on and takes besides hidden states.

    shared: caches of earlier stages' layers that this or later ones attend to, and of this one's
            and of earlier ones' that later stages do
    """

    def __init__(
        self,
        weights: SideWeights,
        hidden_size: int,
        shared: tuple[Sequence[LayerCache], Sequence[LayerCache]],
        kernels: Ops,
    ) -> None:
        self._weights = weights
        self._kernels = kernels
        self._received, self._sent = shared
        self._stream_size = hidden_size * weights.streams
        widths = [2 * cache.keys.shape[0] * cache.keys.shape[2] for cache in self._received]
        self.received_size = self._stream_size + sum(widths)

    @property
    def embedding(self) -> Embedding | None:
        """The embedding of a stage which does not embed, where its layers read embeddings."""
        return self._weights.embedding

    def enter(self, x: Tensor, slots: Tensor, *, embedded: bool) -> Tensor:
        """The input of the stage's first layer, of hidden states that this stage embedded or of
        what the last one sent; keys and values go to the cache tokens slots [N].
        """
        if embedded:
            return self._spread(x)
        start = self._stream_size
        for cache in self._received:
            for part in (cache.keys, cache.values):
                width = part.shape[0] * part.shape[2]
                values = x[:, start : start + width].view(len(x), part.shape[0], -1)
                part[:, slots] = saturated(values, part.dtype).transpose(0, 1)
                start += width
        return x[:, : self._stream_size].contiguous()

    def leave(self, x: Tensor, slots: Tensor, *, is_last: bool) -> Tensor:
        """Return what the next stage takes, or hidden states [N, hidden] behind the last layer."""
        if is_last:
            return self._joined(x)
        parts = [part[:, slots] for cache in self._sent for part in (cache.keys, cache.values)]
        sent = [part.transpose(0, 1).reshape(len(x), -1).float() for part in parts]
        return torch.cat([x, *sent], 1)

    def _spread(self, x: Tensor) -> Tensor:
        size = x.square().mean(1, keepdim=True).sqrt()
        others = [self._scaled(x, linear, size) for linear in self._weights.inputs]
        return torch.cat([x, *others], 1)

    def _joined(self, x: Tensor) -> Tensor:
        if not self._weights.outputs:
            return x
        first, *others = x.chunk(self._weights.streams, 1)
        size = first.square().mean(1, keepdim=True).sqrt()
        pairs = zip(others, self._weights.outputs, strict=True)
        made = [self._scaled(states.contiguous(), linear, size) for states, linear in pairs]
        return torch.stack([first, *made]).mean(0)

    def _scaled(self, x: Tensor, linear: Linear, size: Tensor) -> Tensor:
        made = self._kernels.project(x.to(linear.dtype), linear).float()
        own = made.square().mean(1, keepdim=True).clamp(min=_SMALLEST_SQUARE).sqrt()
        return made * size / own


class SideStreamLoader(WeightLoader):
    """Reads the weights of such branches."""

    config: GPTConfig

    def _side(self, embedding: Embedding | None) -> SideWeights | None:
        """Return what the stage has of it, if any.  embedding: of a stage that needs it"""
        config = self.config
        if not (config.layer_input_size or config.layer_kv_sources):
            return None
        others = range((config.num_streams or 1) - 1)
        read = {"in": self.is_first_stage, "out": self.is_last_stage}
        inputs, outputs = (
            tuple(self._full_linear(f"streams.{n}.{name}") for n in others if is_read)
            for name, is_read in read.items()
        )
        return SideWeights(config.num_streams or 1, inputs, outputs, embedding)

    def _full_linear(self, name: str) -> Linear:
        return Linear(self._tensor(f"{name}.weight", self.dtype).t().contiguous(), None, None)

    def _layer_input(self, layer: int) -> LayerInputWeights:
        stem, config = "layers.*.layer_input", self.config
        return LayerInputWeights(
            in_proj=self._linear(f"{stem}.gate", layer),
            out_proj=self._linear(f"{stem}.out", layer),
            output_norm=self._norm(f"{stem}.output_norm", layer),
            table=self._tensor(f"{stem}.table", self.dtype, layer),
            projection=self._linear(f"{stem}.projection", layer),
            input_norm=self._norm(f"{stem}.norm", layer),
            embedding_scale=(config.layer_input_size or 1) ** 0.5,
        )

    def _laurel(self, layer: int) -> LaurelWeights:
        norm = self._norm("layers.*.input_layernorm", layer)
        return LaurelWeights(
            in_proj=self._linear("layers.*.laurel.down", layer, norm),
            out_proj=self._linear("layers.*.laurel.up", layer),
            output_norm=self._norm("layers.*.laurel.output_norm", layer),
            scale=_HALF,
        )

    def _streams(self, layer: int) -> StreamWeights | None:
        config, stem = self.config, "layers.*.streams"
        if not config.num_streams:
            return None
        parts = ("router", "prediction", "correction")
        tensors = [self._tensor(f"{stem}.{part}.weight", torch.float32, layer) for part in parts]
        scale = (
            self._tensor(f"{stem}.scale", torch.float32, layer) if config.scaled_stream else None
        )
        norm = self._norm(f"{stem}.norm", layer)
        router, prediction, correction = (tensor.t().contiguous() for tensor in tensors)
        active = config.active_stream or 0
        return StreamWeights(norm, router, prediction, correction, scale, active)

    @abstractmethod
    def lora(
        self, stems: Sequence[str], layer: int, scales: str | float | None = None
    ) -> LoRA | None:
        """Return the adapters of a layer's projections."""

    def _sharing(self, layer: int, before: Norm | None, **shared: Any) -> SharingAttentionWeights:
        """Attention to the keys and values of another layer."""
        stem, norms = "layers.*.attention", self.config.qk_norm
        return SharingAttentionWeights(
            in_proj=self._linear(f"{stem}.query", layer, before),
            query_norm=self._norm(f"{stem}.query_norm", layer) if norms else None,
            lora_in=self.lora(["attention.query"], layer),
            **shared,
        )

    def _cut(self, weights: MLPWeights, layer: int) -> MLPWeights:
        share = self.config.sparsity(layer)
        if not share:
            return weights
        return CutMLPWeights(**_values(weights), deviations=NormalDist().inv_cdf(share))

    def _normed_experts(self, weights: Experts, layer: int) -> Experts:
        if not self.config.expert_norms:
            return weights
        stem = "layers.*.mlp"
        router = self._norm(f"{stem}.router.norm", layer)
        scale = self._tensor(f"{stem}.router.expert_scale", torch.float32, layer)
        return NormedExperts(
            **_values(weights),
            expert_norm=self._norm(f"{stem}.expert_norm", layer),
            expert_output_norm=self._norm(f"{stem}.expert_output_norm", layer),
            shared_output_norm=self._norm(f"{stem}.shared_output_norm", layer),
            router_norm=replace(router, weight=router.weight * self.config.hidden_size**-0.5),
            expert_scale=scale,
        )


def _values(weights: SublayerWeights) -> dict[str, Any]:
    return {item.name: getattr(weights, item.name) for item in fields(weights)}


def shared_layers(config: Any, layers: range) -> tuple[list[int], list[int]]:
    """Layers before these that these or later ones attend to, and layers up to these that later
    ones do.
    """
    if getattr(config, "layer_kv_sources", None) is None:
        return [], []

    def needed(first: int) -> list[int]:
        later = range(first, config.num_layers)
        return sorted({n for n in map(config.kv_source, later) if n < first})

    return needed(layers.start), needed(layers.stop)


def with_streams(
    layer: LayerWeights, inner: Sequence[Sublayer | ParallelSublayers], kernels: Ops
) -> AlternatingUpdates | None:
    """The layer as one of several streams, where it has such."""
    return None if layer.streams is None else AlternatingUpdates(layer.streams, inner, kernels)
