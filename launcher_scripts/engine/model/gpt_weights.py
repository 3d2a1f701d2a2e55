"""One rank's weights of a GPT, read from a FasterTransformer-layout checkpoint to its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from launcher_scripts.engine.model.latent_attention import LatentAttentionWeights
from launcher_scripts.engine.model.recurrent import (
    DeltaWeights,
    KimiDeltaWeights,
    Mamba2Weights,
    RecurrentWeights,
)
from launcher_scripts.engine.model.side_streams import SideStreamLoader
from launcher_scripts.engine.model.weight_loader import (
    scaled_lora,
    scaled_norm,
    scaled_rows,
)
from launcher_scripts.engine.model.weights import (
    AttentionWeights,
    DraftHeadWeights,
    Embedding,
    Experts,
    HeadAttentionWeights,
    LayerWeights,
    LinearWeights,
    MLPWeights,
    ModelWeights,
    SharedExpert,
    StackWeights,
    SublayerWeights,
    norms_per_head,
)
from launcher_scripts.kernels.operands import (
    ExpertGroups,
    HeadNorms,
    Linear,
    LoRA,
    Norm,
    Router,
    XIELUCurve,
)
from launcher_scripts.kernels.quantization import with_alike_scales
from launcher_scripts.models.adapters import ATTENTION_ADAPTER, FFN_ADAPTER, LORA_TARGETS
from launcher_scripts.models.draft_heads import EAGLE3, IDS
from launcher_scripts.models.family import XIELU, Partition
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_dialects import EXPERT_BIAS


class GPTWeightLoader(SideStreamLoader):
    """See WeightLoader."""

    config: GPTConfig

    def load(self) -> ModelWeights:
        """See WeightLoader."""
        config, first, last = self.config, self.is_first_stage, self.is_last_stage
        if config.draft_head is not None:
            return self._draft_head()
        inputs = bool(config.layer_input_size)
        needs_table = first or inputs or (last and config.tied_embeddings)
        table = self._table("wte") if needs_table else None
        embedding = self._embedding(table) if (first or inputs) and table is not None else None
        decoder = StackWeights(
            embedding if first else None,
            {layer: self._layer(layer) for layer in self._local(config.num_layers)},
            self._prompt_tables() if first else (),
            self._side(None if first else embedding),
        )
        head = self._head(table) if last else None
        return ModelWeights(config, decoder, head, loras=self.loras)

    def _draft_head(self) -> ModelWeights:
        """Return a draft head's weights, without the tables that are the model's."""
        config, layer, hidden_norm = self.config, self._layer(0), self._norm("draft.hidden_norm")
        weight = self._tensor("draft.input.weight", self.dtype).t().contiguous()
        embedding_norm, ids, rows = None, None, weight.new_zeros(0, config.hidden_size)
        if config.draft_head == EAGLE3:
            high, middle, low = self._tensor(IDS, torch.float32).long()
            ids = (high * 256 + middle) * 256 + low
            rows = self._table("lm_head.weight", "draft_vocab_size")
            attention = HeadAttentionWeights(**vars(layer.attention), hidden_norm=hidden_norm)
            layer = replace(layer, branches=((attention,), *layer.branches[1:]))
        else:
            embedding_norm = self._norm("draft.embedding_norm")
        draft = DraftHeadWeights(Linear(weight), hidden_norm, embedding_norm, ids)
        head = Linear(rows, None, self._norm("final_layernorm"))
        return ModelWeights(config, StackWeights(None, {0: layer}), head, draft=draft)

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
        branches = [
            [self._branch(kind, layer) for kind in both] for both in self.config.branches(layer)
        ]
        if self.config.layer_scale and branches:
            scale = float(self._tensor("layers.*.scale", torch.float32, layer))
            branches[-1] = [replace(weights, scale=scale) for weights in branches[-1]]
        return LayerWeights(tuple(map(tuple, branches)), self._streams(layer))

    def _branch(self, kind: str, layer: int) -> SublayerWeights:
        """A branch of a kind of BRANCHES."""
        readers: dict[str, Callable[[int], SublayerWeights]] = {
            "attention": self._attention,
            "linear": partial(self._square, "attention.linear", "input_layernorm"),
            "linear_mlp": partial(self._square, "mlp.linear", "post_attention_layernorm"),
            "mlp": self._plain_mlp,
            "moe": self._experts,
            "mamba2": self._mamba2,
            "gated_delta": self._gated_delta,
            "kimi_delta": self._kimi_delta,
            "short_conv": self._short_conv,
            "layer_input": self._layer_input,
            "laurel": self._laurel,
        }
        return readers[kind](layer)

    def _norms(self, name: str, layer: int) -> tuple[Norm | None, Norm | None]:
        """A branch's norm as the one before it, or as the one after the sum."""
        if self.config.norm_placement == "branch":
            return None, None
        norm = self._norm(f"layers.*.{name}", layer)
        return (None, norm) if self.config.norm_placement == "post" else (norm, None)

    def _attention(self, layer: int) -> AttentionWeights:
        stem = "layers.*.attention"
        before, after = self._norms("input_layernorm", layer)
        config = self.config.of_layer(layer)
        width = config.local_size("q_size", self.parallelism.tp_size)
        latent, shares = config.kv_lora_rank is not None, config.shares_keys(layer)
        of_kind: Callable[..., AttentionWeights]
        of_kind = self._latent_attention if latent else self._sharing if shares else self._plain
        return of_kind(
            layer,
            before,
            out_proj=scaled_rows(
                self._linear(f"{stem}.dense", layer), config.attention_output_scale
            ),
            output_norm=self._output_norm(stem, layer),
            norm=after,
            ia3=self._ia3([f"{stem}.{part}" for part in "kv"], layer, width),
            adapter=self._adapter(f"layers.*.{ATTENTION_ADAPTER}", layer),
            lora_out=self.lora(["attention.dense"], layer, config.attention_output_scale),
        )

    def _square(self, name: str, norm: str, layer: int) -> LinearWeights:
        linear = self._linear(f"layers.*.{name}", layer)
        before, _ = self._norms(norm, layer)
        return LinearWeights(in_proj=replace(linear, norm=before), out_proj=linear)

    def _mamba2(self, layer: int) -> Mamba2Weights:
        stem, config = "layers.*.mamba", self.config
        inner, group = (
            config.local_size(axis, self.parallelism.tp_size)
            for axis in ("mamba_inner_size", "mamba_group_size")
        )
        heads = config.local_size("mamba_num_heads", self.parallelism.tp_size)
        has_norm, name = config.mamba_norm != "none", f"{stem}.norm.weight"
        norm = self._tensor(name, torch.float32, layer) if has_norm else None
        scales = config.mamba_input_scales, config.mamba_output_scale
        around = self._around("mamba", layer, *scales)
        widths = (inner, inner, group, group, heads)
        return Mamba2Weights(
            in_proj=scaled_rows(around.pop("in_proj"), scales[0], widths),
            out_proj=scaled_rows(around.pop("out_proj"), scales[1]),
            **around,
            conv=self._taps(stem, layer),
            conv_bias=self._conv_bias(stem, layer),
            rates=-self._summed(f"{stem}.A_log", layer).exp(),
            step_bias=self._summed(f"{stem}.dt_bias", layer),
            skip=self._summed(f"{stem}.D", layer),
            norm_weight=norm,
        )

    def _gated_delta(self, layer: int) -> DeltaWeights:
        stem = "layers.*.delta"
        return DeltaWeights(
            **self._around("delta", layer),
            conv=self._taps(stem, layer),
            conv_bias=self._conv_bias(stem, layer),
            rates=-self._summed(f"{stem}.A_log", layer).exp(),
            step_bias=self._summed(f"{stem}.dt_bias", layer),
            norm_weight=self._tensor(f"{stem}.norm.weight", torch.float32, layer),
        )

    def _kimi_delta(self, layer: int) -> KimiDeltaWeights:
        stem = "layers.*.kimi_delta"
        norm, _ = self._norms("input_layernorm", layer)
        rates = -self._summed(f"{stem}.A_log", layer).exp()
        parts = [f"kimi_delta.{name}" for name in ("in_proj", "decay_down", "gate_down")]
        return KimiDeltaWeights(
            in_proj=self._joined([f"layers.*.{part}" for part in parts], layer, norm),
            lora_in=self.lora(parts, layer),
            lora_out=self.lora(["kimi_delta.out_proj"], layer),
            lora_decay_up=self.lora(["kimi_delta.decay_up"], layer),
            lora_gate_up=self.lora(["kimi_delta.gate_up"], layer),
            out_proj=self._linear(f"{stem}.out_proj", layer),
            decay_up=self._linear(f"{stem}.decay_up", layer),
            gate_up=self._linear(f"{stem}.gate_up", layer),
            conv=self._taps(stem, layer),
            rates=rates[:, None],
            step_bias=self._summed(f"{stem}.dt_bias", layer).view(len(rates), -1),
            norm_weight=self._tensor(f"{stem}.norm.weight", torch.float32, layer),
        )

    def _short_conv(self, layer: int) -> RecurrentWeights:
        stem = "layers.*.short_conv"
        return RecurrentWeights(
            **self._around("short_conv", layer),
            conv=self._taps(stem, layer),
            conv_bias=self._conv_bias(stem, layer),
        )

    def _around(
        self,
        stem: str,
        layer: int,
        input_scales: str | None = None,
        output_scale: float | None = None,
    ) -> dict[str, Any]:
        """A branch's projections, the first behind the norm of the layer's input, and what adapters
        add to them, which alone is scaled here.
        """
        norm, _ = self._norms("input_layernorm", layer)
        return {
            "in_proj": self._linear(f"layers.*.{stem}.in_proj", layer, norm),
            "out_proj": self._linear(f"layers.*.{stem}.out_proj", layer),
            "lora_in": self.lora([f"{stem}.in_proj"], layer, input_scales),
            "lora_out": self.lora([f"{stem}.out_proj"], layer, output_scale),
        }

    def _taps(self, stem: str, layer: int) -> Tensor:
        """Weights of a convolution as [channels, taps]."""
        return self._tensor(f"{stem}.conv.weight", self.dtype, layer).t().contiguous()

    def _conv_bias(self, stem: str, layer: int) -> Tensor | None:
        name = f"{stem}.conv.bias"
        return self._tensor(name, self.dtype, layer) if name in self._specs else None

    def _summed(self, name: str, layer: int) -> Tensor:
        """A vector that is stored as rows which sum to it, float32."""
        return self._tensor(name, torch.float32, layer).sum(0)

    def _plain_mlp(self, layer: int) -> MLPWeights:
        mlp, ups = "layers.*.mlp", ["mlp.dense_h_to_4h", "mlp.dense_h_to_4h_2"]
        ups, scale = ups[: 1 + self.config.gated], self.config.mlp_gate_scale
        scales = None if scale is None else ",".join([str(scale), *["1"] * (len(ups) - 1)])
        before, after = self._norms("post_attention_layernorm", layer)
        return replace(
            self._cut(self._mlp(mlp, layer, before), layer),
            output_norm=self._output_norm(mlp, layer),
            norm=after,
            ia3=self._ia3([mlp], layer),
            adapter=self._adapter(f"layers.*.{FFN_ADAPTER}", layer),
            lora_in=self.lora(ups, layer, scales),
            lora_out=self.lora(["mlp.dense_4h_to_h"], layer, self.config.mlp_output_scale),
        )

    def _plain(self, layer: int, input_norm: Norm | None, **shared: Any) -> AttentionWeights:
        """Attention whose keys and values are in the cache."""
        stem = "layers.*.attention"
        config, tp_size = self.config.of_layer(layer), self.parallelism.tp_size
        norms, query_scale, gate = self._head_norms(layer), None, None
        if norms is not None and config.qk_norm_after_rope:
            norms, query_scale = norms.before_rope()
        if config.attention_output_gate:
            gate = self._linear(f"{stem}.gate", layer, input_norm)
        width, keys = config.local_size("q_size", tp_size), config.local_size("kv_size", tp_size)
        scales = config.query_key_value_scales, (width, keys, keys)
        return AttentionWeights(
            in_proj=scaled_rows(
                self._linear(f"{stem}.query_key_value", layer, input_norm), *scales
            ),
            gate=gate,
            head_norms=norms,
            query_scale=query_scale,
            clip=config.attention_clip,
            sinks=self._sinks(stem, layer),
            value_norm=self._value_norm(config.head_size),
            lora_gate=None if gate is None else self.lora(["attention.gate"], layer),
            lora_in=self.lora(["attention.query_key_value"], layer, scales[0]),
            **shared,
        )

    def _value_norm(self, size: int) -> Norm | None:
        if not self.config.value_norm:
            return None
        ones = torch.ones(size, device=self.device)
        return Norm("rmsnorm", ones, None, self.config.norm_eps)

    def _latent_attention(
        self, layer: int, input_norm: Norm | None, **shared: Any
    ) -> LatentAttentionWeights:
        """Attention whose latent vectors are in the cache; kv_up is never quantized, because it is
        multiplied from both sides.
        """
        stem, query_up = "layers.*.attention", None
        down = "query" if self.config.q_lora_rank is None else "query_down"
        if self.config.q_lora_rank is not None:
            query_up = self._linear(
                f"{stem}.query_up", layer, self._latent_norm("query_latent_norm", layer)
            )
        return LatentAttentionWeights(
            in_proj=self._joined([f"{stem}.{down}", f"{stem}.kv_down"], layer, input_norm),
            query_up=query_up,
            latent_norm=self._latent_norm("kv_latent_norm", layer),
            kv_up=self._unquantized(f"{stem}.kv_up", layer),
            lora_in=self.lora([f"attention.{down}", "attention.kv_down"], layer),
            lora_query_up=self.lora(["attention.query_up"], layer),
            lora_kv_up=self.lora(["attention.kv_up"], layer),
            **shared,
        )

    def _latent_norm(self, name: str, layer: int) -> Norm:
        norm = self._norm(f"layers.*.attention.{name}", layer)
        return replace(norm, eps=self.config.latent_norm_eps or norm.eps)

    def lora(
        self, stems: Sequence[str], layer: int, scales: str | float | None = None
    ) -> LoRA | None:
        """Return the adapters of a layer's projections of one input, their outputs side by side;
        zeros for one that no adapter has.

        stems: names within the layer;  scales: see scaled_rows
        """
        if not {*stems} & {*self._parts.loras.targets}:
            return None
        parts = [self._lora(stem, layer) for stem in stems]
        lora = LoRA(
            torch.cat([part.down for part in parts], dim=1),
            torch.cat([part.up for part in parts], dim=2),
            tuple(width for part in parts for width in part.widths),
        )
        lora = scaled_lora(lora, scales)
        self.loras[tuple(stems), layer, scales] = lora
        return lora

    def _lora(self, stem: str, layer: int) -> LoRA:
        """Return the adapters of one projection, zeros in the slots that have none."""
        target, parts, tp_size = LORA_TARGETS[stem], self._parts, self.parallelism.tp_size
        slots, config = parts.loras, self.config.of_layer(layer)

        def size(axis: str, partition: Partition) -> int:
            if target.partition is partition:
                return config.local_size(axis, tp_size)
            return int(getattr(config, axis))

        inputs = size(target.inputs, Partition.ROW_PARALLEL)
        widths = tuple(
            size(axis, Partition.COLUMN_PARALLEL) for axis in target.blocks or (target.outputs,)
        )
        shape = slots.count, max(1, len(target.blocks)), slots.rank, inputs
        down = torch.zeros(shape, dtype=self.dtype, device=self.device)
        up = down.new_zeros(slots.count, slots.rank, sum(widths))
        if stem in parts.lora_targets:
            count, rank = len(parts.lora_names), parts.lora_rank
            stored = self._tensor(f"layers.*.{stem}.lora_in.weight", self.dtype, layer)
            down[:count, :, :rank] = stored.t().reshape(count, -1, rank, inputs)
            stored = self._tensor(f"layers.*.{stem}.lora_out.weight", self.dtype, layer)
            up[:count, :rank] = stored.view(count, rank, -1)
        return LoRA(down.flatten(1, 2), up, widths)

    def _output_norm(self, stem: str, layer: int) -> Norm | None:
        normed = self.config.norm_placement in ("sandwich", "branch")
        return self._norm(f"{stem}.output_norm", layer) if normed else None

    def _mlp(self, name: str, layer: int, norm: Norm | None = None) -> MLPWeights:
        gate = None
        if self.config.gated:
            gate = self._linear(f"{name}.dense_h_to_4h_2", layer, norm)
        up = self._linear(f"{name}.dense_h_to_4h", layer, norm)
        if gate is not None:
            up, gate = with_alike_scales(up, gate)
        down = self._linear(f"{name}.dense_4h_to_h", layer)
        curve = None
        if self.config.activation == XIELU:
            curve = XIELUCurve(*self._tensor(f"{name}.activation", torch.float32, layer))
        return MLPWeights(
            in_proj=scaled_rows(up, self.config.mlp_gate_scale),
            gate=gate,
            out_proj=scaled_rows(down, self.config.mlp_output_scale),
            curve=curve,
        )

    def _experts(self, layer: int) -> Experts:
        config, count = self.config, self.config.num_experts or 0
        norm, _ = self._norms("post_attention_layernorm", layer)

        def stacked(name: str, norm: Norm | None = None) -> Linear:
            names = [f"layers.*.mlp.experts.{expert}.{name}" for expert in range(count)]
            return self._stacked(names, layer, norm)

        down = stacked("dense_4h_to_h")
        if down.bias is not None and self.tp_rank:  # the sum over the ranks has it once
            down = replace(down, bias=torch.zeros_like(down.bias))

        shared = None
        if config.shared_expert_size is not None:
            scale = None
            if config.shared_expert_gate is not False:
                scale = self._unquantized("layers.*.mlp.shared_expert_gate", layer)
            factor = config.shared_expert_scale or 1.0
            shared = SharedExpert(self._mlp("layers.*.mlp.shared_expert", layer), scale, factor)
        up, gate = stacked("dense_h_to_4h", norm), None
        if config.gated:
            up, gate = with_alike_scales(up, stacked("dense_h_to_4h_2"))
        result = Experts(
            router=self._router(layer),
            in_proj=up,
            gate=gate,
            out_proj=down,
            shared=shared,
            output_norm=self._output_norm("layers.*.mlp", layer),
            latent_in=self._latent("in", layer),
            latent_out=self._latent("out", layer),
            scale_input=bool(config.experts_scale_input),
        )
        return self._normed_experts(result, layer)

    def _latent(self, side: str, layer: int) -> Linear | None:
        if self.config.moe_latent_size is None:
            return None
        return self._linear(f"layers.*.mlp.latent_{side}", layer)

    def _router(self, layer: int) -> Router:
        config, bias = self.config, None
        if config.expert_bias:
            bias = self._tensor(EXPERT_BIAS, torch.float32, layer).sum(0)
        groups = None
        if config.num_expert_groups is not None:
            groups = ExpertGroups(
                config.num_expert_groups,
                config.groups_per_token or 1,
                config.group_score_experts or 1,
            )
        return Router(
            self._unquantized("layers.*.mlp.router", layer),
            config.experts_per_token or 1,
            config.router_score_function or "softmax",
            normalized=bool(config.normalized_experts),
            scaling_factor=config.router_scaling_factor or 1.0,
            bias=bias,
            jitter=config.router_jitter or 0.0,
            groups=groups,
        )

    def _sinks(self, stem: str, layer: int) -> Tensor | None:
        if not self.config.attention_sinks or not self.config.has_sinks(layer):
            return None
        return self._tensor(f"{stem}.sinks", torch.float32, layer)

    def _head_norms(self, layer: int) -> HeadNorms | None:
        if not self.config.qk_norm or not self.config.normalizes_heads(layer):
            return None
        stem = "layers.*.attention"
        if self.config.qk_norm_per_head:
            query, key = (
                self._tensor(f"{stem}.{part}_norm.weight", torch.float32, layer)
                for part in ("query", "key")
            )
            config = self.config.of_layer(layer)
            return norms_per_head(
                query, key, config.head_size, config.normalization, config.norm_eps
            )
        return HeadNorms(
            self._norm(f"{stem}.query_norm", layer),
            self._norm(f"{stem}.key_norm", layer),
            joint=bool(self.config.joint_qk_norm),
        )
