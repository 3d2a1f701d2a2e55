"""One rank's weights of a T5, read from a FasterTransformer-layout checkpoint to its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from launcher_scripts.engine.model.rotary import relative_bias
from launcher_scripts.engine.model.weight_loader import WeightLoader, scaled_norm
from launcher_scripts.engine.model.weights import (
    AttentionWeights,
    CrossAttentionWeights,
    Embedding,
    LayerWeights,
    MLPWeights,
    ModelWeights,
    StackWeights,
)
from launcher_scripts.kernels.operands import HeadNorms, Linear, Norm, RelativeBias, Router
from launcher_scripts.models.adapters import ATTENTION_ADAPTER, FFN_ADAPTER
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.t5 import T5Config

# By layer.
Biases = Mapping[int, RelativeBias | None]


class T5WeightLoader(WeightLoader):
    """See WeightLoader."""

    config: T5Config

    def load(self) -> ModelWeights:
        """See WeightLoader."""
        config, first, last = self.config, self.is_first_stage, self.is_last_stage
        decodes = not config.encoder_only
        encoder = self._embedding("shared.weight_T", "shared.ape") if first else None
        decoder = encoder
        if first and not config.shared_embeddings:
            decoder = self._embedding(
                "decoder.embed_tokens.weight", "decoder.embed_positions.weight"
            )
        prompt_tables = self._prompt_tables() if first else ()
        return ModelWeights(
            config,
            encoder=StackWeights(encoder, self._encoder_layers(), prompt_tables),
            encoder_norm=self._norm("encoder.final_layer_norm") if last else None,
            decoder=StackWeights(
                decoder if decodes else None, self._decoder_layers() if decodes else {}
            ),
            head=self._output(decoder) if last and decodes else None,
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

    def _encoder_layers(self) -> dict[int, LayerWeights]:
        layers = self._local(self.config.num_layers)
        relative = self._biases("encoder", "layer.0.SelfAttention", layers, True)
        return {layer: self._encoder_layer(layer, relative[layer]) for layer in layers}

    def _decoder_layers(self) -> dict[int, LayerWeights]:
        layers = self._local(self.config.num_decoder_layers)
        biases = self._biases("decoder", "layer.0.SelfAttention", layers, False)
        source: Biases = dict.fromkeys(layers)
        if self.config.cross_attention_relative_bias:
            source = self._biases("decoder", "layer.1.EncDecAttention", layers, True)
        return {layer: self._decoder_layer(layer, biases[layer], source[layer]) for layer in layers}

    def _encoder_layer(self, layer: int, relative: RelativeBias | None) -> LayerWeights:
        stem = "encoder.block.*.layer.0"
        names = [f"{stem}.SelfAttention.{part}" for part in "qkv"]
        in_proj = self._joined(names, layer, self._norm(f"{stem}.layer_norm", layer))
        attention = self._attention("encoder", layer, in_proj, relative)
        return LayerWeights.of(attention, self._mlp("encoder", 1, layer))

    def _decoder_layer(
        self, layer: int, relative: RelativeBias | None, source_relative: RelativeBias | None
    ) -> LayerWeights:
        stem = "decoder.block.*.layer"
        norm = self._norm(f"{stem}.0.layer_norm", layer)
        in_proj = self._linear(f"{stem}.0.SelfAttention.qkv", layer, norm)
        if self.config.merged_attention:
            attention = self._attention("decoder", layer, in_proj, relative)
            merged = replace(attention, reads_source=True)
            return LayerWeights.of(merged, self._mlp("decoder", 1, layer))
        source = f"{stem}.1.EncDecAttention"
        source_kv = [f"{source}.{part}" for part in "kv"]
        return LayerWeights.of(
            self._attention("decoder", layer, in_proj, relative),
            CrossAttentionWeights(
                in_proj=self._linear(
                    f"{source}.q", layer, self._norm(f"{stem}.1.layer_norm", layer)
                ),
                key_value=self._joined(source_kv, layer),
                out_proj=self._linear(f"{source}.o", layer),
                output_norm=self._output_norm(f"{stem}.1", layer),
                relative=source_relative,
                ia3=self._ia3(source_kv, layer),
            ),
            self._mlp("decoder", 2, layer),
        )

    def _attention(
        self, side: str, layer: int, in_proj: Linear, relative: RelativeBias | None
    ) -> AttentionWeights:
        stem = f"{side}.block.*.layer.0"
        attention = f"{stem}.SelfAttention"
        width = self.config.local_size("inner_size", self.parallelism.tp_size)  # of the queries
        return AttentionWeights(
            in_proj=in_proj,
            out_proj=self._linear(f"{attention}.o", layer),
            output_norm=self._output_norm(stem, layer),
            relative=relative,
            head_norms=self._head_norms(attention, layer),
            ia3=self._ia3([f"{attention}.{part}" for part in "kv"], layer, width),
            adapter=self._adapter(f"{side}.block.*.{ATTENTION_ADAPTER}", layer),
        )

    def _head_norms(self, attention: str, layer: int) -> HeadNorms | None:
        if not self.config.qk_norm:
            return None
        query, key = (self._norm(f"{attention}.{part}_norm", layer) for part in "qk")
        return HeadNorms(query, key)

    def _output_norm(self, stem: str, layer: int) -> Norm | None:
        return self._norm(f"{stem}.output_norm", layer) if self.config.sandwich_norms else None

    def _mlp(self, side: str, index: int, layer: int) -> MLPWeights:
        """index: among the sublayers"""
        stem = f"{side}.block.*.layer.{index}"
        norm, inner = self._norm(f"{stem}.layer_norm", layer), f"{stem}.DenseReluDense"
        if getattr(self.config, f"{side}_has_experts")(layer):
            router = self._unquantized(f"{inner}.router", layer)
            choice = Router(router, 1, normalized=False)
            return self._ungated_experts(f"{inner}.experts", ("wi", "wo"), layer, norm, choice)
        return MLPWeights(
            in_proj=self._linear(f"{inner}.wi", layer, norm),
            gate=self._linear(f"{inner}.wi2", layer, norm) if self.config.gated else None,
            out_proj=self._linear(f"{inner}.wo", layer),
            output_norm=self._output_norm(stem, layer),
            ia3=self._ia3([inner], layer),
            adapter=self._adapter(f"{side}.block.*.{FFN_ADAPTER}", layer),
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
        return {layer: RelativeBias(bias.table * (layer + 1)) for layer, bias in biases.items()}

    def _output(self, embedding: Embedding | None) -> Linear:
        """The head with the last norm, whose gain takes the logits' scale, and the logits' bias."""
        config = self.config
        if config.tied_embeddings and embedding is not None:
            weight = embedding.tokens
        else:
            weight = self._table("lm_head.weight")
        norm = scaled_norm(self._norm("decoder.final_layer_norm"), config.logits_scale)
        bias = self._table("shared.bias") if config.logits_bias else None
        return Linear(weight, bias, norm)


class BartWeightLoader(WeightLoader):
    """See WeightLoader."""

    config: BartConfig

    def load(self) -> ModelWeights:
        """See WeightLoader."""
        config, first, last = self.config, self.is_first_stage, self.is_last_stage
        final = last and self._pre
        table = self._table("shared.weight") if first else None
        layers, decoder_layers = (
            self._local(config.num_layers),
            self._local(config.num_decoder_layers),
        )
        return ModelWeights(
            config,
            encoder=StackWeights(
                self._embedding("encoder", table),
                {layer: self._encoder_layer(layer) for layer in layers},
            ),
            encoder_norm=self._norm("encoder.layer_norm") if final else None,
            decoder=StackWeights(
                self._embedding("decoder", table),
                {layer: self._decoder_layer(layer) for layer in decoder_layers},
            ),
            head=self._output() if last else None,
        )

    @property
    def _pre(self) -> bool:
        return self.config.norm_placement == "pre"

    def _embedding(self, side: str, table: Tensor | None) -> Embedding | None:
        if table is None:
            return None
        return Embedding(
            self.tp_rank * table.shape[0],
            table,
            self._tensor(f"{side}.embed_positions.weight", self.dtype),
            self._norm(f"{side}.layernorm_embedding") if self.config.embedding_norm else None,
        )

    def _encoder_layer(self, layer: int) -> LayerWeights:
        stem = "encoder.layers.*"
        attention = f"{stem}.self_attn"
        before, after = self._norms(f"{attention}_layer_norm", layer)
        names = [f"{attention}.{part}_proj" for part in "qkv"]
        return LayerWeights.of(
            AttentionWeights(
                in_proj=self._joined(names, layer, before),
                out_proj=self._linear(f"{attention}.out_proj", layer),
                norm=after,
            ),
            self._mlp(stem, layer),
        )

    def _decoder_layer(self, layer: int) -> LayerWeights:
        stem = "decoder.layers.*"
        self_attention, source = f"{stem}.self_attn", f"{stem}.encoder_attn"
        before, after = self._norms(f"{self_attention}_layer_norm", layer)
        before_source, after_source = self._norms(f"{source}_layer_norm", layer)
        keys_and_values = [f"{source}.{part}_proj" for part in "kv"]
        return LayerWeights.of(
            AttentionWeights(
                in_proj=self._linear(f"{self_attention}.qkv", layer, before),
                out_proj=self._linear(f"{self_attention}.out_proj", layer),
                norm=after,
            ),
            CrossAttentionWeights(
                in_proj=self._linear(f"{source}.q_proj", layer, before_source),
                key_value=self._joined(keys_and_values, layer),
                out_proj=self._linear(f"{source}.out_proj", layer),
                norm=after_source,
            ),
            self._mlp(stem, layer),
        )

    def _norms(self, name: str, layer: int) -> tuple[Norm | None, Norm | None]:
        """A sublayer's norm as the one before it, or as the one after the sum."""
        norm = self._norm(name, layer)
        return (norm, None) if self._pre else (None, norm)

    def _mlp(self, stem: str, layer: int) -> MLPWeights:
        before, after = self._norms(f"{stem}.final_layer_norm", layer)
        if getattr(self.config, f"{stem.partition('.')[0]}_has_experts")(layer):
            config = self.config
            choice = Router(
                self._unquantized(f"{stem}.router", layer),
                config.experts_per_token or 1,
                scaling_factor=config.expert_scale or 1.0,
            )
            return self._ungated_experts(f"{stem}.experts", ("fc1", "fc2"), layer, before, choice)
        up = self._linear(f"{stem}.fc1", layer, before)
        return MLPWeights(in_proj=up, out_proj=self._linear(f"{stem}.fc2", layer), norm=after)

    def _output(self) -> Linear:
        bias = self._table("final_logits_bias") if self.config.logits_bias else None
        norm = self._norm("decoder.layer_norm") if self._pre else None
        return Linear(self._table("lm_head.weight"), bias, norm)


class AgmWeightLoader(WeightLoader):
    """See WeightLoader."""

    config: AgmConfig

    def load(self) -> ModelWeights:
        """See WeightLoader."""
        config, first, last = self.config, self.is_first_stage, self.is_last_stage
        table = self._table("shared.weight") if first or (last and config.tied_embeddings) else None
        head = None
        if last:
            bias = self._table("final_logits_bias") if config.logits_bias else None
            name = "lm_head.decoder.weight"
            weight = table if config.tied_embeddings and table is not None else self._table(name)
            head = Linear(weight, bias, self._norm("decoder.layernorm_output"))
        embedding = None
        if first and table is not None:
            embedding = Embedding(self.tp_rank * table.shape[0], table, None)
        layers = {layer: self._layer(layer) for layer in self._local(config.num_layers)}
        return ModelWeights(config, StackWeights(embedding, layers), head)

    def _layer(self, layer: int) -> LayerWeights:
        stem = "decoder.layers.*"
        attention = f"{stem}.self_attn"
        before_mlp = self._norm(f"{stem}.final_layer_norm", layer)
        name = f"{attention}.relative_attention_bias.weight"
        table = self._tensor(name, torch.float32, layer)  # [heads / tp, buckets]
        return LayerWeights.of(
            AttentionWeights(
                in_proj=self._linear(
                    f"{attention}.qkv", layer, self._norm(f"{attention}_layer_norm", layer)
                ),
                out_proj=self._linear(f"{attention}.o", layer),
                relative=relative_bias(table, self.config.max_distance, bidirectional=False),
            ),
            MLPWeights(
                in_proj=self._linear(f"{stem}.fc1", layer, before_mlp),
                out_proj=self._linear(f"{stem}.fc2", layer),
            ),
        )
