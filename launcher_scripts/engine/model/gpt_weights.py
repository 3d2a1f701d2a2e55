"""One rank's weights of a GPT, read from a FasterTransformer-layout checkpoint to its device."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from launcher_scripts.engine.model.weights import (
    AttentionWeights,
    Embedding,
    Experts,
    LayerWeights,
    MLPWeights,
    ModelWeights,
    SharedExpert,
    StackWeights,
    WeightLoader,
    relative_bias,
    scaled_norm,
)
from launcher_scripts.kernels.operands import HeadNorms, Linear, LoRA, Norm, Router
from launcher_scripts.models.adapters import ATTENTION_ADAPTER, FFN_ADAPTER
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_dialects import EXPERT_BIAS


class GPTWeightLoader(WeightLoader):
    """See WeightLoader."""

    config: GPTConfig

    def load(self) -> ModelWeights:
        """See WeightLoader."""
        config, first, last = self.config, self.is_first_stage, self.is_last_stage
        table = self._table("wte") if first or (last and config.tied_embeddings) else None
        decoder = StackWeights(
            self._embedding(table) if first and table is not None else None,
            {layer: self._layer(layer) for layer in self._own(config.num_layers)},
            self._prompt_tables() if first else (),
        )
        return ModelWeights(config, decoder, self._head(table) if last else None)

    def _embedding(self, table: Tensor) -> Embedding:
        config = self.config
        learned = config.position_embedding == "learned"
        return Embedding(
            self.tp_rank * table.shape[0],
            table,
            self._tensor("wpe", self.dtype) if learned else None,
            self._norm("pre_decoder_layernorm") if config.embedding_norm else None,
            config.embedding_scale,
        )

    def _head(self, table: Tensor | None) -> Linear:
        if not self.config.tied_embeddings or table is None:
            table = self._table("lm_head.weight")
        norm = self._norm("final_layernorm") if self.config.final_norm else None
        bias = self._table("lm_head.bias") if self.config.logits_bias else None
        if norm is not None and self.config.logits_scale is not None:
            norm = scaled_norm(norm, self.config.logits_scale)
        return Linear(table, bias, norm)

    def _layer(self, layer: int) -> LayerWeights:
        config, stem, mlp = self.config, "layers.*.attention", "layers.*.mlp"
        input_norm = post_attention = None
        if config.norm_placement != "branch":
            input_norm = self._norm("layers.*.input_layernorm", layer)
            post_attention = self._norm("layers.*.post_attention_layernorm", layer)
        after = config.norm_placement == "post"
        width = config.local_size("q_size", self.parallelism.tp_size)
        attention = AttentionWeights(
            in_proj=self._linear(f"{stem}.query_key_value", layer, None if after else input_norm),
            out_proj=self._linear(f"{stem}.dense", layer),
            output_norm=self._output_norm(stem, layer),
            norm=input_norm if after else None,
            head_norms=self._head_norms(layer),
            sinks=self._sinks(stem, layer),
            ia3=self._ia3([f"{stem}.{part}" for part in "kv"], layer, width),
            adapter=self._adapter(f"layers.*.{ATTENTION_ADAPTER}", layer),
            lora_in=self._lora("attention.query_key_value", layer),
            lora_out=self._lora("attention.dense", layer),
        )
        if config.num_experts and config.has_experts(layer):
            return LayerWeights(attention, self._experts(layer, post_attention, config.num_experts))
        plain = self._mlp(mlp, layer, None if after else post_attention)
        return LayerWeights(
            attention,
            replace(
                plain,
                output_norm=self._output_norm(mlp, layer),
                norm=post_attention if after else None,
                ia3=self._ia3([mlp], layer),
                adapter=self._adapter(f"layers.*.{FFN_ADAPTER}", layer),
                lora_in=self._lora_of_up(layer),
                lora_out=self._lora("mlp.dense_4h_to_h", layer),
            ),
        )

    def _lora_of_up(self, layer: int) -> LoRA | None:
        """Of up, and of the gate behind it; zeros for one that no adapter has."""
        stems = ["mlp.dense_h_to_4h", "mlp.dense_h_to_4h_2"]
        parts = [self._lora(stem, layer) for stem in stems[: 1 + self.config.gated]]
        some = next((part for part in parts if part is not None), None)
        if some is None:
            return None
        nothing = replace(some, down=torch.zeros_like(some.down), up=torch.zeros_like(some.up))
        whole = [part or nothing for part in parts]
        return LoRA(
            torch.cat([part.down for part in whole], dim=1),
            torch.cat([part.up for part in whole], dim=2),
            tuple(width for part in whole for width in part.widths),
        )

    def _output_norm(self, stem: str, layer: int) -> Norm | None:
        normed = self.config.norm_placement in ("sandwich", "branch")
        return self._norm(f"{stem}.output_norm", layer) if normed else None

    def _mlp(self, name: str, layer: int, norm: Norm | None = None) -> MLPWeights:
        gate = None
        if self.config.gated:
            gate = self._linear(f"{name}.dense_h_to_4h_2", layer, norm)
        up = self._linear(f"{name}.dense_h_to_4h", layer, norm)
        down = self._linear(f"{name}.dense_4h_to_h", layer)
        return MLPWeights(in_proj=up, gate=gate, out_proj=down)

    def _experts(self, layer: int, norm: Norm | None, count: int) -> Experts:
        config = self.config

        def stacked(name: str, norm: Norm | None = None) -> Linear:
            stem = "layers.*.mlp.experts"
            parts = (self._linear(f"{stem}.{each}.{name}", layer) for each in range(count))
            first = next(parts)
            room = first.weight.new_empty(count, *first.weight.shape)
            whole = replace(first, weight=room, norm=norm)
            for kind in ("bias", "scale"):
                one = getattr(first, kind)
                if one is not None:
                    whole = replace(whole, **{kind: one.new_empty(count, *one.shape)})
            for expert, part in enumerate(itertools.chain([first], parts)):
                for kind in ("weight", "bias", "scale"):
                    if getattr(whole, kind) is not None:
                        getattr(whole, kind)[expert] = getattr(part, kind)
            return whole

        down = stacked("dense_4h_to_h")
        if down.bias is not None and self.tp_rank:  # the sum over the ranks has it once
            down = replace(down, bias=torch.zeros_like(down.bias))

        shared = None
        if config.shared_expert_size is not None:
            scale = None
            if config.shared_expert_gate is not False:
                scale = self._unquantized("layers.*.mlp.shared_expert_gate", layer)
            shared = SharedExpert(self._mlp("layers.*.mlp.shared_expert", layer), scale)
        return Experts(
            router=self._router(layer),
            in_proj=stacked("dense_h_to_4h", norm),
            gate=stacked("dense_h_to_4h_2") if config.gated else None,
            out_proj=down,
            shared=shared,
        )

    def _router(self, layer: int) -> Router:
        config, bias = self.config, None
        if config.expert_bias:
            bias = self._tensor(EXPERT_BIAS, torch.float32, layer).sum(0)
        return Router(
            self._unquantized("layers.*.mlp.router", layer),
            config.experts_per_token or 1,
            config.router_score_function or "softmax",
            normalized=bool(config.normalized_experts),
            scaling_factor=config.router_scaling_factor or 1.0,
            bias=bias,
        )

    def _sinks(self, stem: str, layer: int) -> Tensor | None:
        if not self.config.attention_sinks:
            return None
        return self._tensor(f"{stem}.sinks", torch.float32, layer)

    def _head_norms(self, layer: int) -> HeadNorms | None:
        if not self.config.qk_norm:
            return None
        stem = "layers.*.attention"
        return HeadNorms(
            self._norm(f"{stem}.query_norm", layer),
            self._norm(f"{stem}.key_norm", layer),
            joint=bool(self.config.joint_qk_norm),
        )


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
