"""One rank's weights of an Agm, as those of a GPT whose layers have a bias by distance."""

from __future__ import annotations

import torch

from launcher_scripts.engine.model.model_weights import (
    AttentionWeights,
    Embedding,
    LayerWeights,
    MLPWeights,
    ModelWeights,
    StackWeights,
)
from launcher_scripts.engine.model.relative_bias import relative_bias
from launcher_scripts.engine.model.weights import WeightLoader
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.models.agm import AgmConfig


class AgmWeightLoader(WeightLoader):
    """See WeightLoader."""

    config: AgmConfig

    def load(self) -> ModelWeights:
        """See WeightLoader."""
        config, first, last = self.config, self.is_first_stage, self.is_last_stage
        tied = config.tied_embeddings
        table = self._table("shared.weight") if first or (last and tied) else None
        head = None
        if last:
            bias = self._table("final_logits_bias") if config.logits_bias else None
            weight = table if tied and table is not None else self._table("lm_head.decoder.weight")
            head = Linear(weight, bias, self._norm("decoder.layernorm_output"))
        embedding = None
        if first and table is not None:
            embedding = Embedding(self.tp_rank * table.shape[0], table, None)
        layers = {layer: self._layer(layer) for layer in self._own(config.num_layers)}
        return ModelWeights(config, StackWeights(embedding, layers), head)

    def _layer(self, layer: int) -> LayerWeights:
        stem = "decoder.layers.*"
        attention = f"{stem}.self_attn"
        before_mlp = self._norm(f"{stem}.final_layer_norm", layer)
        name = f"{attention}.relative_attention_bias.weight"
        table = self._tensor(name, torch.float32, layer)  # [heads / tp, buckets]
        return LayerWeights(
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
