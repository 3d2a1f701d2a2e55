"""One rank's weights of an Agm, as those of a GPT whose layers have a bias by distance."""

from __future__ import annotations

import torch

from launcher_scripts.engine.model.relative_bias import relative_bias
from launcher_scripts.engine.model.weights import GPTWeights, LayerWeights, WeightLoader
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.models.agm import AgmConfig


class AgmWeightLoader(WeightLoader):
    """See WeightLoader."""

    config: AgmConfig

    def load(self) -> GPTWeights:
        """Everything this rank needs, and nothing else, is read."""
        config, tp_size = self.config, self.parallelism.tp_size
        first = self.pp_rank == 0
        last = self.pp_rank == self.parallelism.pp_size - 1
        tied = config.tied_embeddings
        table = self._table("shared.weight") if first or (last and tied) else None
        head = None
        if last:
            bias = self._table("final_logits_bias") if config.logits_bias else None
            weight = table if tied and table is not None else self._table("lm_head.decoder.weight")
            head = Linear(weight, bias, self._norm("decoder.layernorm_output"))
        return GPTWeights(
            config=config,
            first_id=self.tp_rank * config.local_size("vocab_size", tp_size),
            token_table=table if first else None,
            position_table=None,
            embedding_norm=None,
            layers={
                layer: self._layer(layer)
                for layer in self.parallelism.layers(config.num_layers, self.pp_rank)
            },
            head=head,
        )

    def _layer(self, layer: int) -> LayerWeights:
        stem = "decoder.layers.*"
        attention = f"{stem}.self_attn"
        before_attention = self._norm(f"{attention}_layer_norm", layer)
        before_mlp = self._norm(f"{stem}.final_layer_norm", layer)
        name = f"{attention}.relative_attention_bias.weight"
        table = self._tensor(name, torch.float32, layer)  # [heads / tp, buckets]
        return LayerWeights(
            query_key_value=self._linear(f"{attention}.qkv", layer, before_attention),
            attention_dense=self._linear(f"{attention}.o", layer),
            mlp_up=self._linear(f"{stem}.fc1", layer, before_mlp),
            mlp_gate=None,
            mlp_down=self._linear(f"{stem}.fc2", layer),
            input_norm=before_attention,
            post_attention_norm=before_mlp,
            relative=relative_bias(table, self.config.max_distance, bidirectional=False),
        )
