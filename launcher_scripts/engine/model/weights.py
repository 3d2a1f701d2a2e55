"""One rank's weights of a model, as its layers read them.

Adapters of a finished model at work: virtual tokens, IA3 and bottlenecks.

In the engine's ids a virtual token is a negative number: -1 - n is row n of its row's prompt table.
It has a position and a place in the cache as any other token does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from launcher_scripts.common.quantization import FOUR_BITS
from launcher_scripts.engine.messages.plan import NO_TASK
from launcher_scripts.kernels.operands import (
    HeadNorms,
    Linear,
    LoRA,
    Norm,
    RelativeBias,
    Router,
    XIELUCurve,
)


@dataclass(frozen=True)
class Adapter:
    """down(silu(up(x))), its layer norm before `up` (in it) or after `down`.

    up: [size / tp, hidden];  down: [hidden, size / tp]
    """

    up: Linear
    down: Linear
    norm_after: Norm | None = None


def scaled(x: Tensor, factors: Tensor | None, tasks: Tensor | None) -> Tensor:
    """x [N, width], each row times its task's factors; tasks [N]."""
    return x if factors is None or tasks is None else x * factors[tasks]


def token_tasks(rows: Sequence[tuple[int, int]], device: torch.device) -> Tensor | None:
    """Every token's row of the IA3 factors, int64 [N]; None where no row has a task.

    rows: task and new tokens of each
    """
    if all(task == NO_TASK for task, _ in rows):
        return None
    counts = torch.tensor([count for _, count in rows])
    tasks = torch.tensor([task for task, _ in rows]).repeat_interleave(counts)
    return tasks.to(device, non_blocking=True)


@dataclass(frozen=True)
class Embedding:
    """tokens: [vocab / tp, hidden], ids from first_id on; positions: [max_positions, hidden].

    Padded rows of tokens are zero. norm: of the sum of both; scale: of the tokens' part
    """

    first_id: int
    tokens: Tensor
    positions: Tensor | None
    norm: Norm | None = None
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class SublayerWeights:
    """A residual branch: in_proj reads the hidden states, behind its norm where it has one, and
    out_proj adds to them.

    output_norm: of what the branch adds, where there is such;  norm: one that comes after the sum
    scale:       of what the sum is then, where it is multiplied
    adapter:     is given what the branch adds, and adds its own
    ia3:         factors of IA3 by task, [tasks + 1, width] (Liu et al. 2022)
    lora_in, lora_out: what adapters add to the two projections; of a gated MLP, lora_in also what
                 they add to the gate, behind up
    """

    in_proj: Linear
    out_proj: Linear
    output_norm: Norm | None = None
    norm: Norm | None = None
    scale: float | None = None
    adapter: Adapter | None = None
    ia3: Tensor | None = None
    lora_in: LoRA | None = None
    lora_out: LoRA | None = None

    def linears(self) -> Iterator[Linear]:
        """The projections, without the adapter's."""
        values = (getattr(self, field.name) for field in fields(self))
        return (value for value in values if isinstance(value, Linear))


@dataclass(frozen=True, kw_only=True)
class AttentionWeights(SublayerWeights):
    """Attention of tokens to each other; in_proj makes their queries, keys and values.

    head_norms: of every head's queries and keys, where there are such
    relative:   what a score gains by distance
    query_scale: multiplies queries after they turn, float32 [head_size]
    sinks:      a score of every head that is of no token, float32 [heads]
    ia3:        of queries (ones), keys and values
    gate:       reads what in_proj does; its sigmoid multiplies what attention gives
    lora_gate:  what adapters add to it
    value_norm: of every head's values, where there is one
    clip:       where queries and keys, behind their norms, and values are cut off
    """

    head_norms: HeadNorms | None = None
    query_scale: Tensor | None = None
    sinks: Tensor | None = None
    relative: RelativeBias | None = None
    gate: Linear | None = None
    lora_gate: LoRA | None = None
    value_norm: Norm | None = None
    clip: float | None = None
    reads_source: bool = False


@dataclass(frozen=True, kw_only=True)
class LinearWeights(SublayerWeights):
    """A linear layer in place of a branch; in_proj has its norm, and out_proj its weights."""


@dataclass(frozen=True, kw_only=True)
class CrossAttentionWeights(SublayerWeights):
    """Attention to the encoder's states; in_proj makes the queries.

    key_value: reads the encoder's states as they are;  ia3: of what it makes
    relative:  what a score gains by distance
    """

    key_value: Linear
    relative: RelativeBias | None = None


@dataclass(frozen=True, kw_only=True)
class MLPWeights(SublayerWeights):
    """in_proj is up, out_proj down; gate where there is one.  ia3: of the inner activations

    curve: the activation's parameters, if it has such
    """

    gate: Linear | None = None
    curve: XIELUCurve | None = None


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that every token goes through, weighed by sigmoid(scale(x)) where that is there, and
    by a factor."""

    mlp: MLPWeights
    scale: Linear | None
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Experts(MLPWeights):
    """One rank's parts of a layer's experts: the weights have a first axis of all experts.

    router: reads hidden states
    latent_in, latent_out: projections before and behind the experts, where they work in a latent
    scale_input: the router's weights multiply what experts read, not what they add
    """

    router: Router
    scale_input: bool = False
    shared: SharedExpert | None = None
    latent_in: Linear | None = None
    latent_out: Linear | None = None


Kind = TypeVar("Kind", bound=SublayerWeights)


@dataclass(frozen=True)
class LayerWeights:
    """One layer: residual branches one after the other, some of them side by side.

    branches: those of one entry read the same hidden states
    streams:  where there are several hidden states of a token
    """

    branches: tuple[tuple[SublayerWeights, ...], ...]
    streams: StreamWeights | None = None

    @classmethod
    def of(cls, *sublayers: SublayerWeights) -> LayerWeights:
        """A layer of branches one after the other."""
        return cls(tuple((sublayer,) for sublayer in sublayers))

    @property
    def sublayers(self) -> list[SublayerWeights]:
        """In their order."""
        return [sublayer for group in self.branches for sublayer in group]

    @property
    def attention(self) -> AttentionWeights:
        return self._first(AttentionWeights)

    @property
    def mlp(self) -> MLPWeights:
        """The MLP, or the experts."""
        return self._first(MLPWeights)

    def _first(self, kind: type[Kind]) -> Kind:
        """The branch of a kind that the layer has."""
        return next(sublayer for sublayer in self.sublayers if isinstance(sublayer, kind))


@dataclass(frozen=True)
class StreamWeights:
    """A layer's mixing of a token's hidden states, float32 [out, in]; active: the one it reads."""

    norm: Norm
    router: Tensor
    prediction: Tensor
    correction: Tensor
    scale: Tensor | None
    active: int


@dataclass(frozen=True)
class SideWeights:
    """Projections of an embedding to the other streams and back; a later stage's embedding."""

    streams: int
    inputs: tuple[Linear, ...]
    outputs: tuple[Linear, ...]
    embedding: Embedding | None


@dataclass(frozen=True)
class StackWeights:
    """The layers of one pipeline stage of a decoder or an encoder, by their global number.

    embedding: on the first stage;  prompt_tables: of every task, [virtual tokens, hidden], there
    """

    embedding: Embedding | None
    layers: dict[int, LayerWeights]
    prompt_tables: tuple[Tensor, ...] = ()
    side: SideWeights | None = None


@dataclass(frozen=True, kw_only=True)
class HeadAttentionWeights(AttentionWeights):
    """Attention of an EAGLE-3, whose in_proj reads the token's embedding and the hidden states,
    each after a norm; its own is that of the embedding."""

    hidden_norm: Norm


@dataclass(frozen=True)
class DraftHeadWeights:
    """A draft head's weights besides its layer.

    input: projection of the embedding and the hidden state, both normalized; an EAGLE-3's of three
           hidden states
    ids:   of the output projection's rows, int64; None if it has the full vocabulary
    """

    input: Linear
    hidden_norm: Norm
    embedding_norm: Norm | None
    ids: Tensor | None


LoRAKey = tuple[tuple[str, ...], int, str | float | None]


@dataclass(frozen=True)
class ModelWeights:
    """One rank's part of a model; an encoder alone has a decoder of nothing.

    head:         the output projection with the final norm, on the last pipeline stage
    encoder_norm: after the encoder's last layer, on the last pipeline stage
    loras:        the LoRA of layers, by the arguments of GPTWeightLoader.lora
    draft:        of a draft head, whose embedding is the model's, and its `head` unless it has ids
    """

    config: Any
    decoder: StackWeights
    head: Linear | None
    encoder: StackWeights | None = None
    encoder_norm: Norm | None = None
    loras: Mapping[LoRAKey, LoRA] = field(default_factory=dict)
    draft: DraftHeadWeights | None = None

    @property
    def stacks(self) -> list[StackWeights]:
        """The encoder first."""
        return [self.decoder] if self.encoder is None else [self.encoder, self.decoder]

    def bytes(self) -> int:
        """Device bytes of the tables and matrices."""
        tensors = {id(tensor): tensor for tensor in self._matrices() if tensor is not None}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def _matrices(self) -> Iterator[Tensor | None]:
        if self.head is not None:
            yield self.head.weight
        for stack in self.stacks:
            if stack.embedding is not None:
                yield from (stack.embedding.tokens, stack.embedding.positions)
            for sublayer in sublayers_of(stack.layers.values()):
                for linear in sublayer.linears():
                    yield linear.weight
                    yield linear.scale if linear.quantization in FOUR_BITS else None


def sublayers_of(layers: Iterable[LayerWeights]) -> Iterator[SublayerWeights]:
    """The sublayers of all layers."""
    return (sublayer for layer in layers for sublayer in layer.sublayers)


def norms_per_head(query: Tensor, key: Tensor, size: int, kind: str, eps: float) -> HeadNorms:
    """Norms of every head by weights of its own, float32 [heads * head_size], and no bias."""
    ones = torch.ones(size, device=query.device)
    plain = Norm(kind, ones, torch.zeros_like(ones) if kind == "layernorm" else None, eps)
    return HeadNorms(plain, plain, scales=torch.cat([query, key, torch.ones_like(key)]))
