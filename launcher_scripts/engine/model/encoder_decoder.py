"""A T5 or BART on one rank: an encoder, and a decoder that attends to its own and to the source.

The keys and values of a row's source are computed once per decoder layer and kept in the cache,
in the tokens right before the row's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from launcher_scripts.engine.core.kv_cache import KVCache
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.adapters import layer_adapters, scaled
from launcher_scripts.engine.model.decode_step import (
    MLP,
    DecodeStep,
    SelfAttention,
    SourceAttention,
    StepContext,
    Sublayer,
    capped,
    obstacles,
)
from launcher_scripts.engine.model.embedding import embed
from launcher_scripts.engine.model.encode_step import (
    EncodeStep,
    encode_obstacles,
    encoder_sublayers,
)
from launcher_scripts.engine.model.encoder import Encoder, through_stage
from launcher_scripts.engine.model.heads import decoder_heads, encoder_heads
from launcher_scripts.engine.model.layers import (
    Chunk,
    DecodeContext,
    ParallelLayer,
    PrefillContext,
    Rows,
    Scores,
    SourceRows,
    new_token_tasks,
)
from launcher_scripts.engine.model.network import Encoded
from launcher_scripts.engine.model.rotary import encoder_decoder_rotary
from launcher_scripts.engine.model.t5_weights import CrossLayerWeights, T5Weights
from launcher_scripts.engine.model.weights import Embedding
from launcher_scripts.engine.runner.prompt_batch import PromptBatch
from launcher_scripts.kernels.operands import (
    EmbeddingTables,
    Heads,
    LayerCache,
    Linear,
    RelativeBias,
)
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.t5 import T5Config


@dataclass(frozen=True, kw_only=True)
class CrossContext(DecodeContext):
    """source: cache tokens of the encoder's inputs"""

    source: SourceRows


class CrossLayer(ParallelLayer):
    """Self attention, attention to the source, and MLP, with norms before them."""

    def __init__(
        self,
        config: T5Config | BartConfig,
        layer: int,
        weights: CrossLayerWeights,
        cache: LayerCache,
        heads: Heads,
        kernels: Ops,
        communicator: Communicator,
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.heads = heads
        self.kernels = kernels
        self.communicator = communicator
        self.window = config.window(layer)

    def store_source(self, hidden: Tensor, slots: Tensor, tasks: Tensor | None) -> None:
        """Put keys and values of the encoder's states [N, hidden] at cache tokens slots [N].

        tasks: [N], each state's row of the IA3 factors
        """
        ia3 = self.weights.ia3
        key_value = self.kernels.project(hidden, self.weights.source_key_value)
        key_value = scaled(key_value, ia3 and ia3.source, tasks)
        only = Heads(0, self.heads.num_kv_heads, self.heads.head_size)
        self.kernels.store_kv(key_value, only, None, slots, self.cache)

    def forward(self, x: Tensor, context: PrefillContext | CrossContext) -> Tensor:
        """x float32 [N, hidden] -> float32 [N, hidden]."""
        weights, ia3, mlp = self.weights, self.weights.ia3, self.weights.mlp
        qkv = self.kernels.project(x, weights.query_key_value)  # [N, 3 * heads * size]
        qkv = scaled(qkv, ia3 and ia3.qkv, context.ia3_tasks)
        query = self.kernels.store_kv(qkv, self.heads, context.rotary, context.slots, self.cache)
        attended = self._attend(query, context)
        x = self.row_parallel(
            attended,
            weights.attention_dense,
            x,
            weights.attention_adapter,
            weights.attention_output_norm,
        )
        x = self.normed(x, weights.attention_norm)
        query = self.kernels.project(x, weights.source_query).view(query.shape)
        attended = self._attend_source(query, context)
        x = self.row_parallel(attended, weights.source_dense, x, norm=weights.source_output_norm)
        x = self.normed(x, weights.source_norm)
        hidden = self.kernels.mlp_up(x, mlp.up, mlp.gate, self.config.activation)
        hidden = scaled(hidden, ia3 and ia3.mlp, context.ia3_tasks)
        x = self.row_parallel(hidden, mlp.down, x, weights.mlp_adapter, mlp.output_norm)
        return self.normed(x, mlp.norm)

    def _attend(self, query: Tensor, context: PrefillContext | CrossContext) -> Tensor:
        scores = self._scores(self.weights.relative)
        if isinstance(context, CrossContext):
            return self.kernels.decode_attention(
                query,
                self.cache,
                *context.within(self.window),
                None,
                positions=context.positions,
                **scores,
            )
        return self.kernels.prompt_attention(
            query, self.cache, context.spans, None, window=self.window, **scores
        )

    def _scores(self, relative: RelativeBias | None) -> Scores:
        """What becomes of q.k."""
        config = self.config
        return {
            "scale": config.decoder_attention_scale,
            "relative": relative,
            "softcap": config.attention_softcap,
        }

    def _attend_source(self, query: Tensor, context: PrefillContext | CrossContext) -> Tensor:
        scores = self._scores(self.weights.source_relative)
        if isinstance(context, CrossContext):
            source = context.source
            return self.kernels.decode_attention(
                query,
                self.cache,
                source.starts,
                source.lengths,
                source.longest,
                None,
                positions=context.positions,
                **scores,
            )
        parts = query.split([chunk.count for chunk in context.chunks])
        outputs = []
        for part, chunk in zip(parts, context.chunks, strict=True):
            tokens = slice(chunk.start - chunk.source, chunk.start)
            key, value = self.cache.keys[None, :, tokens], self.cache.values[None, :, tokens]
            out = self.kernels.source_attention(part[None], key, value, first=chunk.past, **scores)
            outputs.append(out[0])
        return torch.cat(outputs)


class EncoderDecoder:
    """The layers of one pipeline stage of both stacks; a Network."""

    def __init__(
        self,
        weights: T5Weights,
        cache: KVCache,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.config = weights.config
        self.weights = weights
        self.cache = cache
        self.kernels = kernels
        self.communicator = communicator
        self.device = device
        self.heads = decoder_heads(self.config, communicator.tp_size)
        of_encoder = encoder_heads(self.config, communicator.tp_size)
        self._rotary = encoder_decoder_rotary(self.config, device)
        self._encoder = Encoder(weights, of_encoder, kernels, communicator, device)
        self._layers = [
            CrossLayer(
                self.config,
                layer,
                layer_weights,
                cache.layers[layer],
                self.heads,
                kernels,
                communicator,
            )
            for layer, layer_weights in weights.decoder_layers.items()
        ]
        self.step_obstacles = obstacles(
            self.config,
            communicator,
            layer_adapters(weights.decoder_layers.values()),
        )
        self.step: DecodeStep | None = None
        if weights.decoder_embedding and weights.head and not self.step_obstacles:
            self.step = self._decode_step(weights.decoder_embedding, weights.head)
        self.replays_prompts = False
        self.encode_obstacles = encode_obstacles(weights, communicator)
        self.encode_step: EncodeStep | None = None
        if weights.encoder_embedding and not self.encode_obstacles:
            self.encode_step = self._encode_step(weights.encoder_embedding, of_encoder)

    def encode(self, ids: Tensor, chunks: tuple[Chunk, ...], *, attentions: bool) -> Encoded:
        """See Network."""
        encoded = self._encoder.forward(ids, chunks, attentions=attentions)
        if self._layers:
            spans = [torch.arange(each.start - each.source, each.start) for each in chunks]
            slots = torch.cat(spans).to(self.device, non_blocking=True)
            tasks = self._encoder.tasks(chunks)
            for layer in self._layers:
                layer.store_source(encoded.hidden, slots, tasks)
        return encoded

    def prefill(self, prompts: PromptBatch) -> Tensor:
        """See Network."""
        context = PrefillContext(
            slots=prompts.slots,
            rotary=self._turns(prompts.positions),
            chunks=prompts.chunks,
            spans=prompts.spans,
            positions=prompts.positions,
            ia3_tasks=new_token_tasks(self.config, prompts.chunks, self.device),
        )
        return self._forward(prompts.ids, context)

    def decode(self, ids: Tensor, rows: Rows) -> Tensor:
        """See Network. Rows that only fill a step up have no source, and attend to themselves."""
        if rows.source is None:
            raise ValueError("the step says nothing of the encoder's inputs")
        context = CrossContext(
            slots=rows.starts + rows.lengths,
            rotary=self._turns(rows.lengths),
            starts=rows.starts,
            lengths=rows.lengths + 1,
            longest=rows.longest,
            positions=rows.lengths,
            source=replace(rows.source, lengths=rows.source.lengths.clamp(min=1)),
            ia3_tasks=rows.ia3_tasks,
        )
        return self._forward(ids, context)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Network."""
        if self.weights.head is None:
            raise RuntimeError("only the last pipeline stage has an output projection")
        local = self.kernels.logits(hidden, self.weights.head)
        logits = self.communicator.tp_concat(local)[:, : self.config.vocab_size]
        return capped(logits, self.config.logits_softcap)

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of positions [N], for a model that has such."""
        if self._rotary is None:
            return None
        return self._rotary.tables(self.kernels, positions, None)

    def _decode_step(self, embedding: Embedding, head: Linear) -> DecodeStep:
        config, shared = self.config, (self.kernels, self.communicator)
        scale = config.decoder_attention_scale
        sublayers: list[Sublayer[StepContext]] = []
        for layer in self._layers:
            own = layer.weights
            sublayers += [
                SelfAttention(
                    own.query_key_value,
                    own.attention_dense,
                    *shared,
                    cache=layer.cache,
                    heads=self.heads,
                    bias=own.relative,
                    scale=scale,
                ),
                SourceAttention(
                    own.source_query,
                    own.source_dense,
                    *shared,
                    cache=layer.cache,
                    heads=self.heads,
                    bias=own.source_relative,
                    scale=scale,
                ),
                MLP(own.mlp, *shared, activation=config.activation),
            ]
        tables = EmbeddingTables(embedding.tokens, embedding.first_id, embedding.positions)
        return DecodeStep(
            sublayers,
            head,
            tables,
            embedding.norm,
            (None, None),
            config.vocab_size,
            self.cache.ids,
            *shared,
        )

    def _encode_step(self, embedding: Embedding, heads: Heads) -> EncodeStep:
        readers = [(layer.weights.source_key_value, layer.cache) for layer in self._layers]
        shared = (self.kernels, self.communicator)
        sublayers = encoder_sublayers(self.weights, heads, *shared)
        last_norm = self.weights.encoder_norm
        return EncodeStep(embedding, last_norm, sublayers, readers, self.heads, *shared)

    def _forward(self, ids: Tensor, context: PrefillContext | CrossContext) -> Tensor:
        self.cache.ids[context.slots] = ids
        embedding, start = self.weights.decoder_embedding, None
        if embedding is not None:
            shared = (self.kernels, self.communicator)
            start = partial(embed, embedding, ids, context.positions, *shared)

        def layers(x: Tensor) -> Tensor:
            for layer in self._layers:
                x = layer.forward(x, context)
            return x

        return through_stage(
            self.communicator,
            (ids.shape[0], self.config.hidden_size),
            self.device,
            start,
            layers,
        )
