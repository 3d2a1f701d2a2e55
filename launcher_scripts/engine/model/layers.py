"""A transformer layer on one rank: sublayers that add to the hidden states, one after the other.

There are two ways through a sublayer. The general one, `forward`, takes and gives the residual
stream, and does what any model asks for. The fused one, `step`, hands on hidden states in the form
that the first projection of the next sublayer reads. What the tokens attend to is up to the pass:
each kind of pass has a context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import NO_TASK, Prompt
from launcher_scripts.engine.model.rotary import RotaryTables
from launcher_scripts.engine.model.weights import (
    Adapter,
    AttentionWeights,
    CrossAttentionWeights,
    Experts,
    MLPWeights,
    SublayerWeights,
    scaled,
)
from launcher_scripts.kernels.operands import (
    AttentionScores,
    ExpertMLPs,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
)
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.kernels.reference import norm_heads, norm_values, xielu


@dataclass(frozen=True)
class Chunk:
    """Consecutive new tokens of one row in a prefill step.

    start:  the row's first address;  past: tokens of the row that are already there
    source: tokens of the encoder's input, whose keys and values lie right before `start`
    prompt: where the row's virtual tokens come from;  ia3_task: its row of the IA3 factors
    dropped: earlier tokens of the row that are no longer there, but count as positions
    window: how many tokens attention covers, the token's own included; 0: all
    prompt_end, most: positions of the row after its prompt, and the most it may come to have
    slot: of the row;  saves: see PrefillPart;  draft: whether the tokens may have to be taken back
    """

    start: int
    past: int
    count: int
    source: int = 0
    prompt: Prompt | None = None
    ia3_task: int = NO_TASK
    dropped: int = 0
    window: int = 0
    prompt_end: int = 0
    maximum: int = 0
    slot: int = 0
    saves: tuple[tuple[int, int], ...] = ()
    draft: bool = False


# What a pass hands from sublayer to sublayer: Tensor on the general path, Hidden on the fused one.
Stream = TypeVar("Stream", contravariant=True)
Input = TypeVar("Input", Tensor, Hidden)


class Recurrent(Protocol):
    """A branch that keeps a state of each row; see recurrent.py."""

    def prompts(self, projected: Tensor, chunks: tuple[Chunk, ...], /) -> Tensor: ...

    def decode(self, projected: Tensor, slots: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class ForwardContext(ABC, Generic[Stream]):
    """State that the sublayers of one pass share.

    rotary:    of the new tokens' positions; of a StepContext, of all positions
    ia3_tasks: [N], each token's row of the IA3 factors; None without IA3
    lora_adapters: int64 [N], each token's LoRA adapter, NO_TASK: none; None where no token has one
    tokens:    ids [N] and their embeddings [N, hidden], where layers read them
    """

    rotary: RotaryTables = (None,)
    ia3_tasks: Tensor | None = None
    lora_adapters: Tensor | None = None
    tokens: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def attend(self, x: Stream, layer: SelfAttention) -> Tensor:
        """Attention of the new tokens to their rows: [N, heads * head_size]."""

    def attend_source(self, _x: Stream, _layer: CrossAttention, /) -> Tensor:
        """Attention of the new tokens to the encoder's inputs: [N, heads * head_size]."""
        raise ValueError("such a pass has no encoder's inputs")

    def recur(self, _projected: Tensor, _branch: Recurrent, /) -> Tensor:
        """What out_proj of such a branch reads of the new tokens: float32 [N, its inputs]."""
        raise ValueError("such a pass knows no states of rows")


class Sublayer(ABC):
    """One residual branch: attention or an MLP, with the norms about it.

    window: how many tokens attention covers, the token's own included; 0: all
    """

    window = 0
    gate: Linear | None = None

    def __init__(self, weights: SublayerWeights, kernels: Ops, communicator: Communicator) -> None:
        self.in_proj = weights.in_proj
        self.out_proj = weights.out_proj
        self.output_norm = weights.output_norm
        self.norm = weights.norm
        self.scale = weights.scale
        self.adapter = weights.adapter
        self.ia3 = weights.ia3
        self.lora_in = weights.lora_in
        self.lora_out = weights.lora_out
        self.kernels = kernels
        self.communicator = communicator

    @property
    def input_norm(self) -> Norm | None:
        """Norm of the branch's input; None without one."""
        return self.in_proj.norm

    def prepare(self) -> None:
        """Make what fused steps want to know of the weights beforehand."""
        self.in_proj = self.kernels.prepare(self.in_proj)
        self.gate = self.gate and self.kernels.prepare(self.gate)

    @abstractmethod
    def branch(self, x: Input, context: ForwardContext[Input], /) -> Tensor:
        """Return the input of out_proj: [N, its inputs]."""

    def forward(self, x: Tensor, context: ForwardContext[Tensor]) -> Tensor:
        """x float32 [N, hidden] plus what the branch adds: the same."""
        return self.add(self.branch(x, context), x, context.lora_adapters)

    def step(self, x: Hidden, context: ForwardContext[Hidden], norm_of_next: Norm | None) -> Hidden:
        """`forward` of hidden states, in the form that norm_of_next asks for."""
        return self.accumulate(self.branch(x, context), x, norm_of_next, context.lora_adapters)

    def input_projection(self, adapters: Tensor | None) -> Linear:
        """in_proj with what the tokens' adapters [N] add to it."""
        return self.in_proj.with_lora(self.lora_in, adapters)

    def output_projection(self, adapters: Tensor | None) -> Linear:
        """out_proj with what the tokens' adapters [N] add to it."""
        return self.out_proj.with_lora(self.lora_out, adapters)

    def project(self, x: Tensor | Hidden, adapters: Tensor | None = None) -> Tensor:
        """input_projection of the normalized x: [N, out]."""
        return self._projected(x, self.input_projection(adapters))

    def _projected(self, x: Tensor | Hidden, linear: Linear) -> Tensor:
        if isinstance(x, Hidden):
            return self.kernels.project_hidden(x, linear)
        return self.kernels.project(x, linear)

    def _normalized(self, x: Tensor | Hidden) -> Tensor:
        if isinstance(x, Hidden):
            if x.row_stats is None:
                return x.operand
            x = x.exact
        norm, dtype = self.input_norm, self.in_proj.dtype
        return x.to(dtype) if norm is None else self.kernels.norm(x, norm, dtype)

    def add(self, inner: Tensor, residual: Tensor, adapters: Tensor | None, /) -> Tensor:
        """residual + out_proj(inner), where both are split over the ranks: float32 [N, hidden]."""
        linear = self.output_projection(adapters)
        if self.communicator.tp_size == 1 and self.adapter is None and self.output_norm is None:
            x = self.kernels.project_add(inner, linear, residual)
        else:
            part = self.kernels.project(inner, replace(linear, bias=None))
            x = self._add(self.communicator.tp_sum(part), residual)
        x = x if self.norm is None else self.kernels.norm(x, self.norm, torch.float32)
        return x if self.scale is None else x * self.scale

    def _add(self, out: Tensor, residual: Tensor) -> Tensor:
        """residual plus what the branch adds, of out_proj(inner) without its bias."""
        kernels, linear = self.kernels, self.out_proj
        if self.output_norm is not None:
            out = out if linear.bias is None else out + linear.bias
            return residual + kernels.norm(out, self.output_norm, torch.float32)
        if self.adapter is not None:
            residual = kernels.add_residual(self._adapted(out, self.adapter), None, residual)
        return kernels.add_residual(out, linear.bias, residual)

    def _adapted(self, x: Tensor, adapter: Adapter) -> Tensor:
        inner = self.kernels.mlp_up(x, adapter.up, None, "silu")
        out = self.communicator.tp_sum(self.kernels.project(inner, adapter.down))
        norm = adapter.norm_after
        return out if norm is None else self.kernels.norm(out, norm, out.dtype)

    def accumulate(
        self, inner: Tensor, x: Hidden, norm_of_next: Norm | None, adapters: Tensor | None, /
    ) -> Hidden:
        """Hidden states x plus out_proj(inner), in the form that norm_of_next asks for."""
        kernels, linear = self.kernels, self.output_projection(adapters)
        if self.output_norm is not None:
            out = kernels.product_over_ranks(inner, linear, self.communicator)
            return kernels.hidden(self._add(out, x.exact), norm_of_next, x.operand.dtype)
        if self.communicator.tp_size == 1:
            return kernels.accumulate(inner, linear, x, norm_of_next)
        return kernels.accumulate_over_ranks(inner, linear, x, norm_of_next, self.communicator)


@dataclass(frozen=True)
class AttentionOptions:
    """Common options of a layer's attentions; an encoder's cache holds no tokens."""

    cache: LayerCache
    heads: Heads
    scores: AttentionScores


class Attention(Sublayer):
    """Attention to tokens in the cache."""

    def __init__(
        self,
        weights: AttentionWeights | CrossAttentionWeights,
        kernels: Ops,
        communicator: Communicator,
        options: AttentionOptions,
    ) -> None:
        super().__init__(weights, kernels, communicator)
        self.cache = options.cache
        self.heads = options.heads
        self.scores = replace(options.scores, relative=weights.relative)


class SelfAttention(Attention):
    """Attention of a row's tokens to each other.

    table: index of the layer's rotary table among the context's
    """

    def __init__(
        self,
        weights: AttentionWeights,
        kernels: Ops,
        communicator: Communicator,
        options: AttentionOptions,
        *,
        window: int = 0,
        table: int = 0,
    ) -> None:
        super().__init__(weights, kernels, communicator, options)
        self.head_norms = weights.head_norms
        self.gate = weights.gate
        self.lora_gate = weights.lora_gate
        self.value_norm = weights.value_norm
        self.scores = replace(self.scores, sinks=weights.sinks)
        self.window = window
        self.table = table
        self.query_scale = weights.query_scale
        self.clip = weights.clip

    def branch(self, x: Input, context: ForwardContext[Input]) -> Tensor:
        attended = context.attend(x, self)
        if self.gate is None:
            return attended
        gate = self._projected(x, self.gate.with_lora(self.lora_gate, context.lora_adapters))
        return (attended.float() * gate.float().sigmoid()).to(attended.dtype)

    def store(self, x: Tensor | Hidden, slots: Tensor, context: ForwardContext[Any]) -> Tensor:
        """Queries [N, heads, head_size]; keys and values go to the cache tokens slots [N]."""
        kernels = self.kernels
        qkv = self.project(x, context.lora_adapters)  # [N, q + k + v]
        qkv = scaled(qkv, self.ia3, context.ia3_tasks)
        heads, norms, rotary = self.heads, self.head_norms, context.rotary[self.table]
        if self.value_norm is not None:
            qkv = norm_values(qkv, heads, self.value_norm, kernels.norm)
        over_ranks = norms is not None and norms.joint and self.communicator.tp_size > 1
        if norms is not None and (over_ranks or norms.scales is not None or self.clip):
            norm = self._norm_over_ranks if over_ranks else kernels.norm
            qkv, norms = norm_heads(qkv, heads, norms, norm), None
        qkv = qkv if self.clip is None else qkv.clamp(-self.clip, self.clip)
        query = kernels.store_kv(qkv, heads, rotary, slots, self.cache, norms)
        return query if self.query_scale is None else (query * self.query_scale).to(query.dtype)

    def _norm_over_ranks(self, x: Tensor, weights: Norm, dtype: torch.dtype) -> Tensor:
        """An RMS norm of rows of which each rank has a part; see Ops.norm."""
        squares = self.communicator.tp_sum(x.float().square().sum(1, keepdim=True))
        mean = squares / (x.shape[1] * self.communicator.tp_size)
        return (x.float() * torch.rsqrt(mean + weights.eps) * weights.weight).to(dtype)


class MergedAttention(SelfAttention):
    """One softmax over a decoder's tokens and the encoder's inputs, whose states become keys and
    values by the same projection and do not turn.
    """

    @cached_property
    def key_value(self) -> Linear:
        """The part of in_proj behind the queries, without a norm."""
        linear, first = self.in_proj, self.heads.num_heads * self.heads.head_size
        bias, scale = (
            part if part is None else part[first:] for part in (linear.bias, linear.scale)
        )
        return replace(linear.without_norm(), weight=linear.weight[first:], bias=bias, scale=scale)

    def store_source(self, states: Tensor, slots: Tensor, tasks: Tensor | None = None) -> None:
        """See CrossAttention."""
        kernels, heads, norms = self.kernels, self.heads, self.head_norms
        ia3 = None if self.ia3 is None else self.ia3[:, -len(self.key_value.weight) :]
        key_value = scaled(kernels.project(states, self.key_value), ia3, tasks)
        if norms is not None:
            key, value = key_value.chunk(2, 1)
            rows = key.reshape(-1, heads.head_size)
            key = kernels.norm(rows, norms.key, key.dtype).view(len(key), -1)
            key_value = torch.cat([key, value], 1)
        only = Heads(0, heads.num_kv_heads, heads.head_size)
        kernels.store_kv(key_value, only, None, slots, self.cache)


class CrossAttention(Attention):
    """Attention to the encoder's inputs, whose keys and values are in the cache."""

    def __init__(
        self,
        weights: CrossAttentionWeights,
        kernels: Ops,
        communicator: Communicator,
        options: AttentionOptions,
    ) -> None:
        super().__init__(weights, kernels, communicator, options)
        self.key_value = weights.key_value

    def branch(self, x: Input, context: ForwardContext[Input]) -> Tensor:
        return context.attend_source(x, self)

    def query(self, x: Tensor | Hidden) -> Tensor:
        """[N, heads, head_size]"""
        query = self.project(x)
        return query.view(query.shape[0], self.heads.num_heads, self.heads.head_size)

    def store_source(self, states: Tensor, slots: Tensor, tasks: Tensor | None = None) -> None:
        """Put keys and values of the encoder's states [N, hidden] at cache tokens slots [N].

        tasks: [N], each state's row of the IA3 factors
        """
        key_value = scaled(self.kernels.project(states, self.key_value), self.ia3, tasks)
        only = Heads(0, self.heads.num_kv_heads, self.heads.head_size)
        self.kernels.store_kv(key_value, only, None, slots, self.cache)


class MLP(Sublayer):
    """Up and down, perhaps gated."""

    def __init__(
        self, weights: MLPWeights, kernels: Ops, communicator: Communicator, activation: str
    ) -> None:
        super().__init__(weights, kernels, communicator)
        self.gate = weights.gate
        self.curve = weights.curve
        self.activation = activation

    def branch(self, x: Input, context: ForwardContext[Input]) -> Tensor:
        if self.curve is not None:
            inner = xielu(self.project(x, context.lora_adapters), self.curve)
            return scaled(inner, self.ia3, context.ia3_tasks)
        up = self.input_projection(context.lora_adapters)
        if isinstance(x, Hidden):
            return self.kernels.expand(x, up, self.gate, self.activation)
        hidden = self.kernels.mlp_up(x, up, self.gate, self.activation)
        return scaled(hidden, self.ia3, context.ia3_tasks)


class MixtureOfExperts(MLP):
    """The experts of a layer, of which each token goes through the few that its router scores best
    (Shazeer et al. 2017).
    """

    def __init__(
        self, weights: Experts, kernels: Ops, communicator: Communicator, activation: str
    ) -> None:
        super().__init__(weights, kernels, communicator, activation)
        self.router = weights.router
        self.shared = weights.shared
        self.scale_input = weights.scale_input
        self.experts = ExpertMLPs(weights.in_proj, weights.gate, weights.out_proj, activation)
        self.latent_in, self.latent_out = weights.latent_in, weights.latent_out

    def prepare(self) -> None:
        """Nothing: the norm of experts is a kernel of its own."""

    def branch(self, x: Input, _context: ForwardContext[Input], /) -> Tensor:
        """Return the sum of this rank's parts of the experts, in parts: float32 [P, N, hidden]."""
        kernels, hidden = self.kernels, self._normalized(x)
        experts, weights = kernels.route(hidden, self.router)
        if self.scale_input:
            parts = self._mixture_of_scaled(hidden, experts, weights)
        elif self.latent_in is None or self.latent_out is None:
            parts = kernels.mixture(hidden, experts, weights, self.experts)
        else:
            latent = kernels.project(hidden, self.latent_in)
            full = kernels.mixture(latent, experts, weights, self.experts).sum(0)
            parts = kernels.project(full.to(hidden.dtype), self.latent_out).float()[None]
        if self.shared is None:
            return parts
        mlp, scale, factor = self.shared.mlp, self.shared.scale, self.shared.factor
        inner = kernels.expand(Hidden(hidden, hidden), mlp.in_proj, mlp.gate, self.activation)
        out, bias = kernels.partial_product(inner, mlp.out_proj), mlp.out_proj.bias
        out = out if bias is None else out + bias
        out = out if scale is None else out * kernels.project(hidden, scale).sigmoid()
        return torch.cat([parts, (out if factor == 1.0 else out * factor)[None]])

    def _mixture_of_scaled(self, hidden: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
        """Ops.mixture, whose weights multiply what the experts read."""
        parts, ones = [], torch.ones_like(weights[:, :1])
        for expert, weight in zip(selected.split(1, 1), weights.split(1, 1), strict=True):
            scaled_hidden = (hidden * weight).to(hidden.dtype)
            parts.append(self.kernels.mixture(scaled_hidden, expert, ones, self.experts))
        return torch.cat(parts)

    def add(self, inner: Tensor, residual: Tensor, _adapters: Tensor | None, /) -> Tensor:
        total = self.communicator.tp_sum(inner.sum(0))
        if self.output_norm is not None:
            total = self.kernels.norm(total, self.output_norm, torch.float32)
        return residual + total

    def accumulate(
        self, inner: Tensor, x: Hidden, norm_of_next: Norm | None, _adapters: Tensor | None, /
    ) -> Hidden:
        if self.output_norm is not None:
            exact = self.add(inner, x.exact, None)
            return self.kernels.hidden(exact, norm_of_next, x.operand.dtype)
        return self.kernels.accumulate_parts(inner, x, norm_of_next, self.communicator)


class ParallelSublayers:
    """Two branches that read the same hidden states, each behind its norm, as attention and MLP."""

    def __init__(self, first: Sublayer, second: Sublayer) -> None:
        self.input_norm = first.input_norm
        self.window = max(first.window, second.window)
        self.first = first
        self.second = second

    def prepare(self) -> None:
        """See Sublayer."""
        self.first.prepare()
        self.second.prepare()

    def forward(self, x: Tensor, context: ForwardContext[Tensor]) -> Tensor:
        """See Sublayer."""
        added = self.first.forward(x, context)
        return self.second.add(self.second.branch(x, context), added, context.lora_adapters)

    def step(self, x: Hidden, context: ForwardContext[Hidden], norm_of_next: Norm | None) -> Hidden:
        """See Sublayer."""
        second = self.second
        local = second.kernels.hidden(x.exact, second.input_norm, x.operand.dtype)
        inner = second.branch(local, context)
        added = self.first.step(x, context, None)
        return second.accumulate(inner, added, norm_of_next, context.lora_adapters)


Branch = TypeVar("Branch", bound=Sublayer)


@dataclass(frozen=True)
class Layer:
    """A layer of a decoder or an encoder.

    branches: one after the other; those of one entry, at most two, read the same hidden states
    """

    branches: tuple[tuple[Sublayer, ...], ...]
    combined: ParallelSublayers | None = None

    @property
    def sublayers(self) -> list[Sublayer | ParallelSublayers]:
        """In their order."""
        if self.combined is not None:
            return [self.combined]
        return [ParallelSublayers(*both) if both[1:] else both[0] for both in self.branches]

    def of_kind(self, kind: type[Branch]) -> list[Branch]:
        """The branches of a kind."""
        return [item for both in self.branches for item in both if isinstance(item, kind)]
