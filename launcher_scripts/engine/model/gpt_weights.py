"""One rank's weights of a GPT, read from a FasterTransformer-layout checkpoint to its device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.engine.model.adapters import Adapter, IA3Factors
from launcher_scripts.engine.model.experts import Experts, SharedExpert
from launcher_scripts.engine.model.weights import Embedding, MLPWeights, WeightLoader
from launcher_scripts.kernels.operands import HeadNorms, Linear, Norm, RelativeBias
from launcher_scripts.models.adapters import ATTENTION_ADAPTER, FFN_ADAPTER
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.gpt import GPTConfig


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms of a pre-norm layer live in the projections that follow them.

    head_norms: of every head's queries and keys, where there are such
    attention_output_norm: of what attention adds, where it has such
    relative: what a score gains by distance, where the layer has a table of its own
    """

    query_key_value: Linear
    attention_dense: Linear
    mlp: MLPWeights | Experts
    input_norm: Norm
    post_attention_norm: Norm
    head_norms: HeadNorms | None = None
    attention_output_norm: Norm | None = None
    relative: RelativeBias | None = None
    ia3: IA3Factors | None = None
    attention_adapter: Adapter | None = None
    mlp_adapter: Adapter | None = None


@dataclass(frozen=True)
class GPTWeights:
    """One rank's part of a GPT.

    embedding: on the first pipeline stage
    layers:    by global layer number
    head:      the output projection with the final norm, on the last pipeline stage
    prompt_tables: of every task, [virtual tokens, hidden], on the first pipeline stage
    """

    config: GPTConfig | AgmConfig
    embedding: Embedding | None
    layers: dict[int, LayerWeights]
    head: Linear | None
    prompt_tables: tuple[Tensor, ...] = ()

    def bytes(self) -> int:
        """Device bytes of the tables and matrices."""
        found = {id(tensor): tensor for tensor in self._matrices() if tensor is not None}
        return sum(tensor.numel() * tensor.element_size() for tensor in found.values())

    def _matrices(self) -> list[Tensor | None]:
        matrices: list[Tensor | None] = []
        if self.embedding is not None:
            matrices += [self.embedding.tokens, self.embedding.positions]
        linears = [self.head]
        for layer in self.layers.values():
            linears += [layer.query_key_value, layer.attention_dense]
            mlp = layer.mlp
            if isinstance(mlp, MLPWeights):
                linears += [mlp.up, mlp.gate, mlp.down]
            else:
                matrices += [mlp.up, mlp.gate, mlp.down]
        return matrices + [linear.weight for linear in linears if linear is not None]


class GPTWeightLoader(WeightLoader):
    """See WeightLoader."""

    config: GPTConfig

    def load(self) -> GPTWeights:
        """Everything this rank needs, and nothing else, is read."""
        config = self.config
        first = self.pp_rank == 0
        last = self.pp_rank == self.parallelism.pp_size - 1
        table = self._table("wte") if first or (last and config.tied_embeddings) else None
        return GPTWeights(
            config=config,
            embedding=self._embedding(table) if first and table is not None else None,
            layers={layer: self._layer(layer) for layer in self._own(config.num_layers)},
            head=self._head(table) if last else None,
            prompt_tables=self._prompt_tables() if first else (),
        )

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
        return Linear(table, bias, _scaled(norm, self.config.logits_scale))

    def _layer(self, layer: int) -> LayerWeights:
        input_norm = self._norm("layers.*.input_layernorm", layer)
        post_attention = self._norm("layers.*.post_attention_layernorm", layer)
        pre = self.config.norm_placement != "post"
        stem, sandwich = "layers.*.attention", self.config.norm_placement == "sandwich"
        mlp: MLPWeights | Experts
        if self.config.num_experts:
            mlp = self._experts(layer, post_attention, self.config.num_experts)
        else:
            output_norm = self._norm("layers.*.mlp.output_norm", layer) if sandwich else None
            mlp = self._mlp("layers.*.mlp", layer, post_attention if pre else None, output_norm)
        width = self.config.local_size("q_size", self.parallelism.tp_size)
        return LayerWeights(
            query_key_value=self._linear(
                f"{stem}.query_key_value", layer, input_norm if pre else None
            ),
            attention_dense=self._linear(f"{stem}.dense", layer),
            mlp=mlp,
            input_norm=input_norm,
            post_attention_norm=post_attention,
            head_norms=self._head_norms(layer),
            attention_output_norm=self._norm(f"{stem}.output_norm", layer) if sandwich else None,
            ia3=self._ia3(stem, "layers.*.mlp", layer, width),
            attention_adapter=self._adapter(f"layers.*.{ATTENTION_ADAPTER}", layer),
            mlp_adapter=self._adapter(f"layers.*.{FFN_ADAPTER}", layer),
        )

    def _mlp(
        self,
        name: str,
        layer: int,
        norm: Norm | None = None,
        output_norm: Norm | None = None,
    ) -> MLPWeights:
        gate = None
        if self.config.gated:
            gate = self._linear(f"{name}.dense_h_to_4h_2", layer, norm)
        up = self._linear(f"{name}.dense_h_to_4h", layer, norm)
        return MLPWeights(up, gate, self._linear(f"{name}.dense_4h_to_h", layer), output_norm)

    def _experts(self, layer: int, norm: Norm, count: int) -> Experts:
        config = self.config
        if self.int8:
            raise CheckpointError("int8_mode is not supported for a model with experts")

        def stacked(name: str) -> Tensor:
            parts = (
                self._whole(f"layers.*.mlp.experts.{expert}.{name}", layer).weight
                for expert in range(count)
            )
            first = next(parts)
            whole = first.new_empty(count, *first.shape)
            whole[0] = first
            for expert, part in enumerate(parts, start=1):
                whole[expert] = part
            return whole

        shared = None
        if config.shared_expert_size is not None:
            scale = None
            if config.shared_expert_gate is not False:
                scale = self._linear("layers.*.mlp.shared_expert_gate", layer)
            shared = SharedExpert(self._mlp("layers.*.mlp.shared_expert", layer), scale)
        return Experts(
            self._linear("layers.*.mlp.router", layer),
            norm,
            stacked("dense_h_to_4h"),
            stacked("dense_h_to_4h_2") if config.gated else None,
            stacked("dense_4h_to_h"),
            config.experts_per_token or 1,
            bool(config.normalized_experts),
            shared,
        )

    def _head_norms(self, layer: int) -> HeadNorms | None:
        if not self.config.qk_norm:
            return None
        stem = "layers.*.attention"
        return HeadNorms(
            self._norm(f"{stem}.query_norm", layer), self._norm(f"{stem}.key_norm", layer)
        )


def _scaled(norm: Norm | None, scale: float | None) -> Norm | None:
    """The norm with its result multiplied."""
    if norm is None or scale is None:
        return norm
    bias = None if norm.bias is None else norm.bias * scale
    return replace(norm, weight=norm.weight * scale, bias=bias)
