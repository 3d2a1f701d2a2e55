"""A transformer layer of a GPT decoder on one rank, and what every decoder's layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.adapters import (
    NO_TASK,
    Adapter,
    Prompt,
    scaled,
    token_tasks,
)
from launcher_scripts.engine.model.experts import Experts, mixture
from launcher_scripts.engine.model.gpt_weights import LayerWeights
from launcher_scripts.engine.model.rotary import Tables
from launcher_scripts.kernels.operands import (
    Heads,
    LayerCache,
    Linear,
    Norm,
    RelativeBias,
    VarlenBatch,
)
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.gpt import GPTConfig


@dataclass(frozen=True)
class Chunk:
    """Consecutive new tokens of one row in a prefill step.

    start:  the row's first cache token;  past: tokens of the row that are already there
    source: tokens of the encoder's input, whose keys and values lie right before `start`
    prompt: where the row's virtual tokens come from;  ia3_task: its row of the IA3 factors
    dropped: earlier tokens of the row that are no longer there, but count as positions
    window: how many tokens attention covers, the token's own included; 0: all
    prompt_end, most: positions of the row after its prompt, and the most it may come to have
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
    most: int = 0


def new_token_tasks(config: object, chunks: Sequence[Chunk], device: torch.device) -> Tensor | None:
    """Every new token's row of the IA3 factors, int64 [N]; None for a model without IA3."""
    tasks = [chunk.ia3_task for chunk in chunks]
    counts = [chunk.count for chunk in chunks]
    return token_tasks(config, tasks, counts, device)


@dataclass(frozen=True)
class SourceRows:
    """The encoder's inputs of a decode step's rows: first cache tokens and lengths, both [B], and
    what bounds the lengths. Hypotheses of one beam search share theirs.
    """

    starts: Tensor
    lengths: Tensor
    longest: int


@dataclass(frozen=True)
class Rows:
    """The rows of a decode step: first cache tokens, and tokens in the cache so far, both [B].

    longest bounds the lengths, the new tokens included. ia3_tasks [B] are the rows of the IA3
    factors. positions [B] are those of the new tokens where they are not the lengths; most [B] how
    many positions a row may come to have. source: where there is an encoder
    """

    starts: Tensor
    lengths: Tensor
    longest: int
    source: SourceRows | None = None
    ia3_tasks: Tensor | None = None
    positions: Tensor | None = None
    most: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """What every layer of one forward pass shares.

    slots:     [N], the cache token of each new token
    positions: [N], of each new token; a relative bias counts from them
    rotary:    cosines and sines [N, rotary_size / 2], or None; local_rotary those of layers that
               turn at speeds of their own
    ia3_tasks: [N], each token's row of the IA3 factors; None without IA3
    """

    slots: Tensor
    positions: Tensor
    rotary: Tables | None = None
    local_rotary: Tables | None = None
    ia3_tasks: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillContext(ForwardContext):
    """chunks: the rows of a prefill step, in order;  spans: which of its tokens are whose"""

    chunks: tuple[Chunk, ...]
    spans: VarlenBatch


@dataclass(frozen=True, kw_only=True)
class DecodeContext(ForwardContext):
    """starts, lengths, longest: the rows of a decode step (see decode_attention)"""

    starts: Tensor
    lengths: Tensor
    longest: int

    def within(self, window: int) -> tuple[Tensor, Tensor, int]:
        """Starts, lengths and longest of the last `window` tokens; 0: of all."""
        if not window or window >= self.longest:
            return self.starts, self.lengths, self.longest
        outside = (self.lengths - window).clamp(min=0)
        return self.starts + outside, self.lengths - outside, window


class ParallelLayer:
    """What tensor-parallel layers share."""

    kernels: Ops
    communicator: Communicator

    def row_parallel(
        self,
        x: Tensor,
        linear: Linear,
        residual: Tensor,
        adapter: Adapter | None = None,
        norm: Norm | None = None,
    ) -> Tensor:
        """residual + linear(x), where x and the weight's inputs are split over the ranks.

        adapter: is given linear(x) without its bias, and added to it
        norm:    of linear(x) before it is added
        """
        if self.communicator.tp_size == 1 and adapter is None and norm is None:
            return self.kernels.project_add(x, linear, residual)
        out = self.communicator.tp_sum(self.kernels.project(x, replace(linear, bias=None)))
        if norm is not None:
            out = out if linear.bias is None else out + linear.bias
            return residual + self.kernels.norm(out, norm, torch.float32)
        if adapter is not None:
            residual = self.kernels.add_residual(self._adapted(out, adapter), None, residual)
        return self.kernels.add_residual(out, linear.bias, residual)

    def normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """x float32 [N, hidden] after the norm that follows a sum, where there is one."""
        return x if norm is None else self.kernels.norm(x, norm, torch.float32)

    def _adapted(self, x: Tensor, adapter: Adapter) -> Tensor:
        inner = self.kernels.mlp_up(x, adapter.up, None, "silu")
        out = self.communicator.tp_sum(self.kernels.project(inner, adapter.down))
        if adapter.norm_after is None:
            return out
        return self.kernels.norm(out, adapter.norm_after, out.dtype)


LayerContext = PrefillContext | DecodeContext


class Scores(TypedDict):
    """What becomes of q.k, as attention takes it."""

    scale: float
    relative: RelativeBias | None
    softcap: float | None


class DecoderLayer(ParallelLayer):
    """Self attention and MLP with their norms: before them (pre), after the sums (post), or before
    them and before the sums (sandwich).

    window: how many tokens attention covers, the token's own included; 0: all
    """

    def __init__(
        self,
        config: GPTConfig | AgmConfig,
        layer: int,
        weights: LayerWeights,
        cache: LayerCache,
        heads: Heads,
        slopes: Tensor | None,
        kernels: Ops,
        communicator: Communicator,
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.heads = heads
        self.slopes = slopes
        self.kernels = kernels
        self.communicator = communicator
        self.post_norm = config.norm_placement == "post"
        self.window = config.window(layer)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """x float32 [N, hidden] -> float32 [N, hidden]."""
        weights = self.weights
        ia3, tasks = weights.ia3, context.ia3_tasks
        qkv = self.kernels.project(x, weights.query_key_value)  # [N, q + k + v]
        qkv = scaled(qkv, ia3 and ia3.qkv, tasks)
        qkv = self.kernels.norm_heads(qkv, self.heads, weights.head_norms, self.kernels.norm)
        local = self.window and self.config.rotary_local_base
        rotary = context.local_rotary if local else context.rotary
        query = self.kernels.store_kv(qkv, self.heads, rotary, context.slots, self.cache)
        attended = self._attend(query, context)
        before = x
        x = self.row_parallel(
            attended,
            weights.attention_dense,
            x,
            weights.attention_adapter,
            weights.attention_output_norm,
        )
        if self.post_norm:
            x = self.kernels.norm(x, weights.input_norm, torch.float32)
        x = self._with_mlp(before if self.config.parallel_residual else x, x, context)
        if self.post_norm:
            x = self.kernels.norm(x, weights.post_attention_norm, torch.float32)
        return x

    def _with_mlp(self, x: Tensor, residual: Tensor, context: LayerContext) -> Tensor:
        """residual plus what the MLP, or the experts, make of x."""
        weights, mlp, activation = self.weights, self.weights.mlp, self.config.activation
        if isinstance(mlp, Experts):
            few = isinstance(context, DecodeContext)
            added = mixture(self.kernels, x, mlp, activation, few=few)
            return residual + self.communicator.tp_sum(added)
        hidden = self.kernels.mlp_up(x, mlp.up, mlp.gate, activation)  # [N, ffn / tp]
        hidden = scaled(hidden, weights.ia3 and weights.ia3.mlp, context.ia3_tasks)
        return self.row_parallel(hidden, mlp.down, residual, weights.mlp_adapter, mlp.output_norm)

    def _attend(self, query: Tensor, context: LayerContext) -> Tensor:
        scores: Scores = {
            "scale": self.config.attention_scale,
            "relative": self.weights.relative,
            "softcap": self.config.attention_softcap,
        }
        if isinstance(context, DecodeContext):
            return self.kernels.decode_attention(
                query,
                self.cache,
                *context.within(self.window),
                self.slopes,
                positions=context.positions,
                **scores,
            )
        if not any(chunk.window for chunk in context.chunks):
            return self.kernels.prompt_attention(
                query, self.cache, context.spans, self.slopes, window=self.window, **scores
            )
        parts = query.split([chunk.count for chunk in context.chunks])
        outputs = [
            self.kernels.context_attention(
                part,
                self.cache,
                chunk.start,
                chunk.past,
                self.slopes,
                window=min(filter(None, (chunk.window, self.window)), default=0),
                **scores,
            )
            for part, chunk in zip(parts, context.chunks, strict=True)
        ]
        return torch.cat(outputs)


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of every head (Press et al. 2022), also where num_heads is no power of two.

    The largest power of two p <= num_heads gives p slopes 2^(-8 i / p); the rest are every other
    slope of 2 p heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    rest = [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return first + rest
