"""An encoder on one rank: rows of different lengths in, their hidden states out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.adapters import scaled, token_tasks, with_virtual_tokens
from launcher_scripts.engine.model.embedding import embed
from launcher_scripts.engine.model.layers import Chunk, ParallelLayer, Scores
from launcher_scripts.engine.model.network import Encoded
from launcher_scripts.engine.model.rotary import encoder_decoder_rotary
from launcher_scripts.engine.model.t5_weights import EncoderLayerWeights, T5Weights
from launcher_scripts.engine.model.weights import Embedding
from launcher_scripts.kernels.operands import Heads, Spans, span_blocks
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.t5 import T5Config


def through_stage(
    communicator: Communicator,
    shape: tuple[int, int],
    device: torch.device,
    start: Callable[[], Tensor] | None,
    layers: Callable[[Tensor], Tensor],
) -> Tensor:
    """One pipeline stage: `start` on the first, what the stage before sent on the others, where
    start is None; then `layers`, passed on. Hidden states between stages are float32 [N, hidden],
    which is `shape`.
    """
    if start is not None:
        x = start()
    else:
        x = communicator.from_previous_stage(torch.empty(shape, device=device))
    x = layers(x)
    if not communicator.is_last_stage:
        communicator.to_next_stage(x)
    return x


class SpanScores(Scores):
    """What becomes of q.k, as attention of rows to themselves takes it."""

    window: int


class EncoderLayer(ParallelLayer):
    """Self attention in both directions and MLP, with norms before them."""

    def __init__(
        self,
        config: T5Config | BartConfig,
        layer: int,
        weights: EncoderLayerWeights,
        heads: Heads,
        kernels: Ops,
        communicator: Communicator,
    ) -> None:
        self.config = config
        self.weights = weights
        self.heads = heads
        self.kernels = kernels
        self.communicator = communicator
        self.window = config.window(layer)

    def forward(
        self,
        x: Tensor,
        counts: list[int],
        spans: Spans,
        attentions: list[Tensor] | None,
        tasks: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """x float32 [N, hidden] of rows with `counts` tokens -> float32 [N, hidden].

        spans:      the same rows
        attentions: takes the layer's attention, float32 [heads, n, n] of every row
        tasks:      [N], each token's row of the IA3 factors
        rotary:     cosines and sines of the tokens' positions, float32 [N, head_size / 2]
        """
        weights, ia3, mlp = self.weights, self.weights.ia3, self.weights.mlp
        qkv = self.kernels.project(x, weights.query_key_value)  # [N, 3 * heads * size]
        qkv = scaled(qkv, ia3 and ia3.qkv, tasks)
        heads = self.heads
        if rotary is not None:
            qkv = self.kernels.apply_rotary(qkv, heads, rotary)
        scores: SpanScores = {
            "scale": self.config.attention_scale,
            "relative": weights.relative,
            "window": self.window,
            "softcap": self.config.attention_softcap,
        }
        attended = self.kernels.attend_spans(qkv, heads, spans, **scores)
        if attentions is not None:
            sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
            for row in qkv.split(counts):
                query, key, _ = row.view(1, len(row), -1, heads.head_size).split(sizes, dim=2)
                key = key.transpose(1, 2)
                attentions += self.kernels.source_attention_weights(query, key, **scores)
        x = self.row_parallel(
            attended,
            weights.attention_dense,
            x,
            weights.attention_adapter,
            weights.attention_output_norm,
        )
        x = self.normed(x, weights.attention_norm)
        hidden = self.kernels.mlp_up(x, mlp.up, mlp.gate, self.config.activation)
        hidden = scaled(hidden, ia3 and ia3.mlp, tasks)
        x = self.row_parallel(hidden, mlp.down, x, weights.mlp_adapter, mlp.output_norm)
        return self.normed(x, mlp.norm)


class Encoder:
    """The encoder's layers of one pipeline stage."""

    def __init__(
        self,
        weights: T5Weights,
        heads: Heads,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.config = weights.config
        self.weights = weights
        self.heads = heads
        self.kernels = kernels
        self.communicator = communicator
        self.device = device
        self._layers = [
            EncoderLayer(self.config, layer, layer_weights, heads, kernels, communicator)
            for layer, layer_weights in weights.encoder_layers.items()
        ]
        self._rotary = encoder_decoder_rotary(self.config, device)

    def tasks(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Every source token's row of the IA3 factors, [N]; None without IA3."""
        tasks = [chunk.ia3_task for chunk in chunks]
        counts = [chunk.source for chunk in chunks]
        return token_tasks(self.config, tasks, counts, self.device)

    def forward(self, ids: Tensor, chunks: Sequence[Chunk], *, attentions: bool) -> Encoded:
        """Run ids [N] of the chunks' sources; every rank gets the result."""
        counts = [chunk.source for chunk in chunks]
        spans = Spans(torch.tensor(span_blocks(counts)).to(self.device, non_blocking=True))
        tasks = self.tasks(chunks)
        positions = torch.cat([torch.arange(count) for count in counts])
        positions = positions.to(self.device, non_blocking=True)
        rotary = None
        if self._rotary is not None:
            rotary = self._rotary.tables(self.kernels, positions, None)
        embedding, start = self.weights.encoder_embedding, None
        if embedding is not None:
            start = partial(self._embed, embedding, ids, positions, chunks)
        collected: list[list[Tensor]] = []

        def layers(x: Tensor) -> Tensor:
            for layer in self._layers:
                collected.append([])
                wanted = collected[-1] if attentions else None
                x = layer.forward(x, counts, spans, wanted, tasks, rotary)
            return x

        x = through_stage(
            self.communicator,
            (ids.shape[0], self.config.hidden_size),
            self.device,
            start,
            layers,
        )
        if self.weights.encoder_norm is not None:
            x = self.kernels.norm(x, self.weights.encoder_norm, torch.float32)
        hidden = self.communicator.from_last_stage(x.contiguous())
        if not attentions:
            return Encoded(hidden)
        rows = [self._gathered([layer[row] for layer in collected]) for row in range(len(counts))]
        return Encoded(hidden, rows)

    def _embed(
        self, embedding: Embedding, ids: Tensor, positions: Tensor, chunks: Sequence[Chunk]
    ) -> Tensor:
        counts = [chunk.source for chunk in chunks]
        prompts = [chunk.prompt for chunk in chunks]
        return embed(
            embedding,
            ids,
            positions,
            self.kernels,
            self.communicator,
            lambda x: with_virtual_tokens(x, ids, prompts, counts, self.weights.prompt_tables),
        )

    def _gathered(self, own: list[Tensor]) -> Tensor:
        """One row's attention in all layers and heads, [layers, heads, n, n], on every rank.

        own: [heads / tp, n, n] of this stage's layers
        """
        communicator, size = self.communicator, own[0].shape[-1]
        whole = communicator.tp_concat(torch.stack(own).flatten(1))
        whole = whole.view(len(own), self.config.num_heads, size, size)
        if not communicator.is_first_stage:
            first = min(self.weights.encoder_layers)
            earlier = whole.new_empty(first, *whole.shape[1:])
            whole = torch.cat([communicator.from_previous_stage(earlier), whole])
        if not communicator.is_last_stage:
            communicator.to_next_stage(whole)
            whole = whole.new_empty(self.config.num_layers, *whole.shape[1:])
        return communicator.from_last_stage(whole)
