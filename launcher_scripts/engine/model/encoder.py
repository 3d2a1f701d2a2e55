"""An encoder on one rank: rows of different lengths in, their hidden states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.forward_context import EncodeContext
from launcher_scripts.engine.model.layers import MLP, AttentionOptions, Chunk, Layer, SelfAttention
from launcher_scripts.engine.model.model_weights import LayerWeights, StackWeights
from launcher_scripts.engine.model.rotary import rotaries, rotary_tables
from launcher_scripts.engine.model.stack import Stack
from launcher_scripts.kernels.operands import (
    AttentionScores,
    Heads,
    LayerCache,
    Norm,
    Spans,
    span_blocks,
)
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.t5 import T5Config


class Encoder:
    """The encoder's layers of one pipeline stage.

    norm: after the last layer, on the last stage
    """

    def __init__(
        self,
        config: T5Config | BartConfig,
        weights: StackWeights,
        norm: Norm | None,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.config = config
        self.weights = weights
        self.norm = norm
        self.kernels = kernels
        self.communicator = communicator
        self.device = device
        self._rotaries = rotaries(config, device)
        layers = [self._layer(layer, own) for layer, own in weights.layers.items()]
        self.stack = Stack(weights, layers, config.hidden_size, kernels, communicator, device)

    def _layer(self, layer: int, weights: LayerWeights) -> Layer:
        config, shared = self.config, (self.kernels, self.communicator)
        tp_size = self.communicator.tp_size
        heads = Heads(config.num_heads // tp_size, config.kv_heads // tp_size, config.head_size)
        nothing = torch.empty(heads.num_kv_heads, 0, heads.head_size, device=self.device)
        attention = SelfAttention(
            weights.attention,
            *shared,
            AttentionOptions(
                LayerCache(nothing, nothing),
                heads,
                AttentionScores(config.attention_scale, config.attention_softcap),
            ),
            window=config.window(layer),
        )
        return Layer(attention, MLP(weights.mlp, *shared, config.activation))

    def context(self, spans: Spans, positions: Tensor) -> EncodeContext:
        """What a pass over rows with positions [N] shares."""
        tables = rotary_tables(self._rotaries, self.kernels, positions)
        return EncodeContext(spans=spans, rotary=tables)

    def normed(self, x: Tensor) -> Tensor:
        """Hidden states float32 [N, hidden] after the last layer's norm, where that is here."""
        return x if self.norm is None else self.kernels.norm(x, self.norm, torch.float32)

    def forward(
        self, ids: Tensor, chunks: Sequence[Chunk], tasks: Tensor | None, *, attentions: bool
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Run ids [N] of the chunks' sources; every rank gets the result, as `Encoded` has it.

        tasks: [N], each token's row of the IA3 factors
        """
        counts = [chunk.source for chunk in chunks]
        spans = Spans(torch.tensor(span_blocks(counts)).to(self.device, non_blocking=True))
        positions = torch.cat([torch.arange(count) for count in counts])
        positions = positions.to(self.device, non_blocking=True)
        found: list[Tensor] = []
        context = replace(
            self.context(spans, positions),
            ia3_tasks=tasks,
            counts=counts,
            attentions=found if attentions else None,
        )
        prompts = [(chunk.prompt, chunk.source) for chunk in chunks]
        x = self.stack.forward(ids, positions, context, prompts)
        hidden = self.communicator.from_last_stage(self.normed(x).contiguous())
        if not attentions:
            return hidden, None
        return hidden, [self._gathered(found[row :: len(counts)]) for row in range(len(counts))]

    def _gathered(self, own: list[Tensor]) -> Tensor:
        """One row's attention in all layers and heads, [layers, heads, n, n], on every rank.

        own: [heads / tp, n, n] of this stage's layers
        """
        communicator, size = self.communicator, own[0].shape[-1]
        whole = communicator.tp_concat(torch.stack(own).flatten(1))
        whole = whole.view(len(own), self.config.num_heads, size, size)
        if not communicator.is_first_stage:
            first = min(self.weights.layers)
            earlier = whole.new_empty(first, *whole.shape[1:])
            whole = torch.cat([communicator.from_previous_stage(earlier), whole])
        if not communicator.is_last_stage:
            communicator.to_next_stage(whole)
            whole = whole.new_empty(self.config.num_layers, *whole.shape[1:])
        return communicator.from_last_stage(whole)
