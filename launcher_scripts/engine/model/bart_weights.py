"""One rank's weights of a BART or its kin, in the terms of a T5's: norms after sums or before."""

from __future__ import annotations

from torch import Tensor

from launcher_scripts.engine.model.model_weights import (
    AttentionWeights,
    CrossAttentionWeights,
    Embedding,
    LayerWeights,
    MLPWeights,
    ModelWeights,
    StackWeights,
)
from launcher_scripts.engine.model.weights import WeightLoader
from launcher_scripts.kernels.operands import Linear, Norm
from launcher_scripts.models.bart import BartConfig


class BartWeightLoader(WeightLoader):
    """See WeightLoader."""

    config: BartConfig

    def load(self) -> ModelWeights:
        """See WeightLoader."""
        config, first, last = self.config, self.is_first_stage, self.is_last_stage
        final = last and self._pre
        table = self._table("shared.weight") if first else None
        layers, decoder_layers = self._own(config.num_layers), self._own(config.num_decoder_layers)
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
        return LayerWeights(
            AttentionWeights(
                in_proj=self._joined(names, layer, before),
                out_proj=self._linear(f"{attention}.out_proj", layer),
                norm=after,
            ),
            self._mlp(stem, layer),
        )

    def _decoder_layer(self, layer: int) -> LayerWeights:
        stem = "decoder.layers.*"
        own, source = f"{stem}.self_attn", f"{stem}.encoder_attn"
        before, after = self._norms(f"{own}_layer_norm", layer)
        before_source, after_source = self._norms(f"{source}_layer_norm", layer)
        keys_and_values = [f"{source}.{part}_proj" for part in "kv"]
        return LayerWeights(
            AttentionWeights(
                in_proj=self._linear(f"{own}.qkv", layer, before),
                out_proj=self._linear(f"{own}.out_proj", layer),
                norm=after,
            ),
            self._mlp(stem, layer),
            CrossAttentionWeights(
                in_proj=self._linear(f"{source}.q_proj", layer, before_source),
                key_value=self._joined(keys_and_values, layer),
                out_proj=self._linear(f"{source}.out_proj", layer),
                norm=after_source,
            ),
        )

    def _norms(self, name: str, layer: int) -> tuple[Norm | None, Norm | None]:
        """A sublayer's norm as the one before it, or as the one after the sum."""
        norm = self._norm(name, layer)
        return (norm, None) if self._pre else (None, norm)

    def _mlp(self, stem: str, layer: int) -> MLPWeights:
        before, after = self._norms(f"{stem}.final_layer_norm", layer)
        up = self._linear(f"{stem}.fc1", layer, before)
        return MLPWeights(in_proj=up, out_proj=self._linear(f"{stem}.fc2", layer), norm=after)

    def _output(self) -> Linear:
        bias = self._table("final_logits_bias") if self.config.logits_bias else None
        norm = self._norm("decoder.layer_norm") if self._pre else None
        return Linear(self._table("lm_head.weight"), bias, norm)
