"""One rank's weights of an Agm, as those of a GPT whose layers have a bias by distance."""

from __future__ import annotations

import torch

from launcher_scripts.engine.model.gpt_weights import GPTWeights, LayerWeights
from launcher_scripts.engine.model.relative_bias import relative_bias
from launcher_scripts.engine.model.weights import Embedding, MLPWeights, WeightLoader
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.models.agm import AgmConfig


class AgmWeightLoader(WeightLoader):
    """See WeightLoader."""

    config: AgmConfig

    def load(self) -> GPTWeights:
        """Everything this rank needs, and nothing else, is read."""
        config = self.config
        first = self.pp_rank == 0
        last = self.pp_rank == self.parallelism.pp_size - 1
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
        return GPTWeights(config, embedding, layers, head)

    def _layer(self, layer: int) -> LayerWeights:
        stem = "decoder.layers.*"
        attention = f"{stem}.self_attn"
        before_attention = self._norm(f"{attention}_layer_norm", layer)
        before_mlp = self._norm(f"{stem}.final_layer_norm", layer)
        name = f"{attention}.relative_attention_bias.weight"
        table = self._tensor(name, torch.float32, layer)  # [heads / tp, buckets]
        up = self._linear(f"{stem}.fc1", layer, before_mlp)
        return LayerWeights(
            query_key_value=self._linear(f"{attention}.qkv", layer, before_attention),
            attention_dense=self._linear(f"{attention}.o", layer),
            mlp=MLPWeights(up, None, self._linear(f"{stem}.fc2", layer)),
            input_norm=before_attention,
            post_attention_norm=before_mlp,
            relative=relative_bias(table, self.config.max_distance, bidirectional=False),
        )
