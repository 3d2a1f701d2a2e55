"""One rank's weights of a T5, read from a FasterTransformer-layout checkpoint to its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from launcher_scripts.engine.model.adapters import Adapter, IA3Factors
from launcher_scripts.engine.model.relative_bias import relative_bias
from launcher_scripts.engine.model.weights import Embedding, MLPWeights, WeightLoader
from launcher_scripts.kernels.operands import Linear, Norm, RelativeBias
from launcher_scripts.models.adapters import ATTENTION_ADAPTER, FFN_ADAPTER
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.t5 import T5Config

# By layer.
Biases = Mapping[int, RelativeBias | None]


@dataclass(frozen=True)
class EncoderLayerWeights:
    """One layer; norms before attention and MLP live in the projections that follow them.

    attention_norm: one that comes after the sum instead
    attention_output_norm: one before the sum, besides
    relative: what a score gains by distance
    """

    query_key_value: Linear
    attention_dense: Linear
    mlp: MLPWeights
    relative: RelativeBias | None = None
    ia3: IA3Factors | None = None
    attention_adapter: Adapter | None = None
    mlp_adapter: Adapter | None = None
    attention_norm: Norm | None = None
    attention_output_norm: Norm | None = None


@dataclass(frozen=True, kw_only=True)
class CrossLayerWeights(EncoderLayerWeights):
    """One decoder layer: attention to the encoder's states beside the rest.

    source_key_value reads the encoder's states as they are. source_norm comes after the sum.
    source_relative is what a score of the attention to the source gains by distance.
    """

    source_query: Linear
    source_key_value: Linear
    source_dense: Linear
    source_norm: Norm | None = None
    source_output_norm: Norm | None = None
    source_relative: RelativeBias | None = None


@dataclass(frozen=True)
class T5Weights:
    """One rank's part of a T5 or BART, or of an encoder alone.

    Embeddings are on the first pipeline stage, the encoder's last norm and the head on the last;
    layers go by their global number in their stack. prompt_tables, [virtual tokens, hidden] of
    every task, are with the encoder's embedding.
    """

    config: T5Config | BartConfig
    encoder_embedding: Embedding | None
    encoder_layers: dict[int, EncoderLayerWeights]
    encoder_norm: Norm | None
    decoder_embedding: Embedding | None
    decoder_layers: dict[int, CrossLayerWeights]
    head: Linear | None
    prompt_tables: tuple[Tensor, ...] = ()


class T5WeightLoader(WeightLoader):
    """See WeightLoader."""

    config: T5Config

    def load(self) -> T5Weights:
        """Everything this rank needs, and nothing else, is read."""
        config = self.config
        first = self.pp_rank == 0
        last = self.pp_rank == self.parallelism.pp_size - 1
        decodes = not config.encoder_only
        encoder = self._embedding("shared.weight_T", "shared.ape") if first else None
        decoder = encoder
        if first and not config.shared_embeddings:
            decoder = self._embedding(
                "decoder.embed_tokens.weight", "decoder.embed_positions.weight"
            )
        return T5Weights(
            config=config,
            encoder_embedding=encoder,
            encoder_layers=self._encoder_layers(),
            encoder_norm=self._norm("encoder.final_layer_norm") if last else None,
            decoder_embedding=decoder if decodes else None,
            decoder_layers=self._decoder_layers() if decodes else {},
            head=self._output(decoder) if last and decodes else None,
            prompt_tables=self._prompt_tables() if first else (),
        )

    def _embedding(self, tokens: str, positions: str) -> Embedding:
        rows = self.config.local_size("vocab_size", self.parallelism.tp_size)
        learned = self.config.position_embedding == "learned"
        return Embedding(
            self.tp_rank * rows,
            self._table(tokens),
            self._tensor(positions, self.dtype) if learned else None,
            scale=self.config.embedding_scale,
        )

    def _encoder_layers(self) -> dict[int, EncoderLayerWeights]:
        layers = self._own(self.config.num_layers)
        relative = self._biases("encoder", "layer.0.SelfAttention", layers, True)
        return {layer: self._encoder_layer(layer, relative[layer]) for layer in layers}

    def _decoder_layers(self) -> dict[int, CrossLayerWeights]:
        layers = self._own(self.config.num_decoder_layers)
        own = self._biases("decoder", "layer.0.SelfAttention", layers, False)
        source: Biases = dict.fromkeys(layers)
        if self.config.cross_attention_relative_bias:
            source = self._biases("decoder", "layer.1.EncDecAttention", layers, True)
        return {layer: self._decoder_layer(layer, own[layer], source[layer]) for layer in layers}

    def _encoder_layer(self, layer: int, relative: RelativeBias | None) -> EncoderLayerWeights:
        stem = "encoder.block.*.layer"
        attention = f"{stem}.0.SelfAttention"
        norm = self._norm(f"{stem}.0.layer_norm", layer)
        return EncoderLayerWeights(
            query_key_value=self._joined([f"{attention}.{part}" for part in "qkv"], layer, norm),
            attention_dense=self._linear(f"{attention}.o", layer),
            relative=relative,
            attention_output_norm=self._output_norm(f"{stem}.0", layer),
            mlp=self._mlp(f"{stem}.1", layer),
            ia3=self._ia3(attention, f"{stem}.1.DenseReluDense", layer, self._width),
            attention_adapter=self._adapter(f"encoder.block.*.{ATTENTION_ADAPTER}", layer),
            mlp_adapter=self._adapter(f"encoder.block.*.{FFN_ADAPTER}", layer),
        )

    def _decoder_layer(
        self, layer: int, relative: RelativeBias | None, source_relative: RelativeBias | None
    ) -> CrossLayerWeights:
        stem = "decoder.block.*.layer"
        own, source = f"{stem}.0.SelfAttention", f"{stem}.1.EncDecAttention"
        return CrossLayerWeights(
            query_key_value=self._linear(
                f"{own}.qkv", layer, self._norm(f"{stem}.0.layer_norm", layer)
            ),
            attention_dense=self._linear(f"{own}.o", layer),
            relative=relative,
            attention_output_norm=self._output_norm(f"{stem}.0", layer),
            source_output_norm=self._output_norm(f"{stem}.1", layer),
            source_query=self._linear(
                f"{source}.q", layer, self._norm(f"{stem}.1.layer_norm", layer)
            ),
            source_key_value=self._joined([f"{source}.{part}" for part in "kv"], layer),
            source_dense=self._linear(f"{source}.o", layer),
            source_relative=source_relative,
            mlp=self._mlp(f"{stem}.2", layer),
            ia3=self._ia3(own, f"{stem}.2.DenseReluDense", layer, self._width, source),
            attention_adapter=self._adapter(f"decoder.block.*.{ATTENTION_ADAPTER}", layer),
            mlp_adapter=self._adapter(f"decoder.block.*.{FFN_ADAPTER}", layer),
        )

    @property
    def _width(self) -> int:
        """Of this rank's queries."""
        return self.config.local_size("inner_size", self.parallelism.tp_size)

    def _output_norm(self, stem: str, layer: int) -> Norm | None:
        return self._norm(f"{stem}.output_norm", layer) if self.config.sandwich_norms else None

    def _mlp(self, stem: str, layer: int) -> MLPWeights:
        norm = self._norm(f"{stem}.layer_norm", layer)
        inner = f"{stem}.DenseReluDense"
        return MLPWeights(
            self._linear(f"{inner}.wi", layer, norm),
            self._linear(f"{inner}.wi2", layer, norm) if self.config.gated else None,
            self._linear(f"{inner}.wo", layer),
            self._output_norm(stem, layer),
        )

    def _biases(self, side: str, attention: str, layers: range, bidirectional: bool) -> Biases:
        """By layer; those that share a table share what is made of it, unless they scale it."""
        config = self.config
        if config.position_embedding != "relative":
            return dict.fromkeys(layers)

        def bias(block: str, layer: int | None = None) -> RelativeBias:
            name = f"{side}.block.{block}.{attention}.relative_attention_bias.weight"
            table = self._tensor(name, torch.float32, layer)  # [heads / tp, buckets]
            return relative_bias(table, config.max_distance, bidirectional=bidirectional)

        if config.relative_bias_per_layer:
            biases = {layer: bias("*", layer) for layer in layers}
        else:
            biases = dict.fromkeys(layers, bias("0"))
        if not config.relative_bias_layer_scaling:
            return biases
        return {layer: RelativeBias(each.table * (layer + 1)) for layer, each in biases.items()}

    def _output(self, embedding: Embedding | None) -> Linear:
        """The head with the last norm, whose gain takes the logits' scale, and the logits' bias."""
        config = self.config
        if config.tied_embeddings and embedding is not None:
            weight = embedding.tokens
        else:
            weight = self._table("lm_head.weight")
        norm = self._norm("decoder.final_layer_norm")
        scaled = replace(
            norm,
            weight=norm.weight * config.logits_scale,
            bias=None if norm.bias is None else norm.bias * config.logits_scale,
        )
        bias = self._table("shared.bias") if config.logits_bias else None
        return Linear(weight, bias, scaled)
