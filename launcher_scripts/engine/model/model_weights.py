"""One rank's weights of a model, grouped as its layers use them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from launcher_scripts.engine.model.adapters import Adapter
from launcher_scripts.kernels.operands import HeadNorms, Linear, LoRA, Norm, RelativeBias, Router


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
    adapter:     is given what the branch adds, and adds its own
    ia3:         factors of IA3 by task, [tasks + 1, width] (Liu et al. 2022)
    lora_in, lora_out: what adapters add to the two projections; of a gated MLP, lora_in also what
                 they add to the gate, behind up
    """

    in_proj: Linear
    out_proj: Linear
    output_norm: Norm | None = None
    norm: Norm | None = None
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
    sinks:      a score of every head that is of no token, float32 [heads]
    ia3:        of queries (ones), keys and values
    """

    head_norms: HeadNorms | None = None
    sinks: Tensor | None = None
    relative: RelativeBias | None = None


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
    """in_proj is up, out_proj down; gate where there is one.  ia3: of the inner activations"""

    gate: Linear | None = None


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that every token goes through, weighed by sigmoid(scale(x)) where that is there."""

    mlp: MLPWeights
    scale: Linear | None


@dataclass(frozen=True, kw_only=True)
class Experts(MLPWeights):
    """One rank's parts of a layer's experts: the weights have a first axis of all experts.

    router: reads what the experts do
    """

    router: Router
    shared: SharedExpert | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer; cross_attention where it is a decoder's with an encoder."""

    attention: AttentionWeights
    mlp: MLPWeights
    cross_attention: CrossAttentionWeights | None = None

    @property
    def sublayers(self) -> list[SublayerWeights]:
        """In their order."""
        found = (self.attention, self.cross_attention, self.mlp)
        return [each for each in found if each is not None]


@dataclass(frozen=True)
class StackWeights:
    """The layers of one pipeline stage of a decoder or an encoder, by their global number.

    embedding: on the first stage;  prompt_tables: of every task, [virtual tokens, hidden], there
    """

    embedding: Embedding | None
    layers: dict[int, LayerWeights]
    prompt_tables: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class ModelWeights:
    """One rank's part of a model; an encoder alone has a decoder of nothing.

    head:         the output projection with the final norm, on the last pipeline stage
    encoder_norm: after the encoder's last layer, on the last pipeline stage
    """

    config: Any
    decoder: StackWeights
    head: Linear | None
    encoder: StackWeights | None = None
    encoder_norm: Norm | None = None

    @property
    def stacks(self) -> list[StackWeights]:
        """The encoder first."""
        return [self.decoder] if self.encoder is None else [self.encoder, self.decoder]

    def bytes(self) -> int:
        """Device bytes of the tables and matrices."""
        found = {id(tensor): tensor for tensor in self._matrices() if tensor is not None}
        return sum(tensor.numel() * tensor.element_size() for tensor in found.values())

    def _matrices(self) -> Iterator[Tensor | None]:
        if self.head is not None:
            yield self.head.weight
        for stack in self.stacks:
            if stack.embedding is not None:
                yield from (stack.embedding.tokens, stack.embedding.positions)
            for sublayer in sublayers_of(stack.layers.values()):
                yield from (linear.weight for linear in sublayer.linears())


def sublayers_of(layers: Iterable[LayerWeights]) -> Iterator[SublayerWeights]:
    """The sublayers of all layers."""
    return (sublayer for layer in layers for sublayer in layer.sublayers)
