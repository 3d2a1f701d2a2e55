"""One rank's weights, read from a FasterTransformer-layout checkpoint straight to its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from launcher_scripts.checkpoint.formats.dtypes import BFLOAT16
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.model.experts import Experts, SharedExpert
from launcher_scripts.engine.model.learned_parts import Adapter, IA3Factors
from launcher_scripts.kernels.operands import HeadNorms, Linear, Norm, RelativeBias
from launcher_scripts.kernels.quantization import quantized
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig, WeightSpec
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.learned_parts import (
    ADAPTER_NORM_EPS,
    ATTENTION_ADAPTER,
    FFN_ADAPTER,
    LearnedParts,
    learned_parts_of,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Stored = np.ndarray | Tensor
Reader = Callable[[WeightSpec, int | None], Stored]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms of a pre-norm layer live in the projections that follow them.

    head_norms: of every head's queries and keys, where there are such
    attention_output_norm, mlp_output_norm: of what a branch adds, where it has such
    relative: what a score gains by distance, where the layer has a table of its own
    experts: what takes the place of the MLP, where the model has experts
    """

    query_key_value: Linear
    attention_dense: Linear
    mlp_up: Linear | None
    mlp_gate: Linear | None
    mlp_down: Linear | None
    input_norm: Norm
    post_attention_norm: Norm
    head_norms: HeadNorms | None = None
    attention_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    relative: RelativeBias | None = None
    experts: Experts | None = None
    ia3: IA3Factors | None = None
    attention_adapter: Adapter | None = None
    mlp_adapter: Adapter | None = None


@dataclass(frozen=True)
class GPTWeights:
    """One rank's part of a GPT.

    token_table: [vocab / tp, hidden], ids from first_id on; padded rows are zero
    head:        the output projection with the final norm, on the last pipeline stage
    layers:      by global layer number
    prompt_tables: of every task, [virtual tokens, hidden], on the first pipeline stage
    """

    config: GPTConfig
    first_id: int
    token_table: Tensor | None
    position_table: Tensor | None
    embedding_norm: Norm | None
    layers: dict[int, LayerWeights]
    head: Linear | None
    prompt_tables: tuple[Tensor, ...] = ()

    def bytes(self) -> int:
        """Device bytes of the tables and matrices."""
        found = {id(tensor): tensor for tensor in self._matrices() if tensor is not None}
        return sum(tensor.numel() * tensor.element_size() for tensor in found.values())

    def _matrices(self) -> list[Tensor | None]:
        matrices = [self.token_table, self.position_table]
        matrices.append(None if self.head is None else self.head.weight)
        for layer in self.layers.values():
            for linear in (
                layer.query_key_value,
                layer.attention_dense,
                layer.mlp_up,
                layer.mlp_gate,
                layer.mlp_down,
            ):
                matrices.append(None if linear is None else linear.weight)
            if layer.experts is not None:
                matrices += [layer.experts.up, layer.experts.gate, layer.experts.down]
        return matrices


class WeightLoader:
    """Turns stored tensors ([in, out], one file per rank) into a rank's operands ([out, in]).

    read:  the stored tensor of a WeightSpec and layer, as this rank's file holds it
    int8:  quantize the matrices of the layers, each output channel by its own scale
    """

    def __init__(
        self,
        config: ModelConfig,
        parallelism: Parallelism,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        read: Reader,
        *,
        int8: bool = False,
    ) -> None:
        self.config = config
        self.parallelism = parallelism
        self.tp_rank = parallelism.tp_rank(rank)
        self.pp_rank = parallelism.pp_rank(rank)
        self.dtype = dtype
        self.device = device
        self.int8 = int8
        self._read = read
        self._specs = {spec.name: spec for spec in family_of(config).weights(config)}

    def load(self) -> GPTWeights:
        """Everything this rank needs, and nothing else, is read."""
        config = self.config
        first = self.pp_rank == 0
        last = self.pp_rank == self.parallelism.pp_size - 1
        tied = config.tied_embeddings
        table = self._table("wte") if first or (last and tied) else None
        learned = config.position_embedding == "learned"
        return GPTWeights(
            config=config,
            first_id=self.tp_rank * config.local_size("vocab_size", self.parallelism.tp_size),
            token_table=table if first else None,
            position_table=self._tensor("wpe", self.dtype) if first and learned else None,
            embedding_norm=self._norm("pre_decoder_layernorm")
            if first and config.embedding_norm
            else None,
            layers={
                layer: self._layer(layer)
                for layer in self.parallelism.layers(config.num_layers, self.pp_rank)
            },
            head=self._head(table) if last else None,
            prompt_tables=self._prompt_tables() if first else (),
        )

    @property
    def _parts(self) -> LearnedParts:
        return learned_parts_of(self.config)

    def _prompt_tables(self) -> tuple[Tensor, ...]:
        return tuple(
            self._tensor(f"prompt_table.{task.name}.weight", self.dtype)
            for task in self._parts.prompt_tasks
        )

    def _ia3(
        self, attention: str, mlp: str, layer: int, queries: int, source: str | None = None
    ) -> IA3Factors | None:
        """queries: width of this rank's;  source: the attention to an encoder's states"""
        if not self._parts.ia3_num_tasks:
            return None
        return IA3Factors(
            self._factors([f"{attention}.{part}" for part in "kv"], layer, queries),
            self._factors([mlp], layer),
            self._factors([f"{source}.{part}" for part in "kv"], layer) if source else None,
        )

    def _factors(self, stems: list[str], layer: int, ones: int = 0) -> Tensor:
        """`ones` columns of ones, then the vectors [tasks, width] of `stems`; one row of ones more,
        for rows without a task.
        """
        parts = [self._tensor(f"{stem}.ia3.weight", self.dtype, layer) for stem in stems]
        whole = torch.cat([parts[0].new_ones(parts[0].shape[0], ones), *parts], dim=1)
        return torch.cat([whole, torch.ones_like(whole[:1])])

    def _adapters(self, stem: str, layer: int) -> dict[str, Adapter | None]:
        return {
            "attention_adapter": self._adapter(f"{stem}.{ATTENTION_ADAPTER}", layer),
            "mlp_adapter": self._adapter(f"{stem}.{FFN_ADAPTER}", layer),
        }

    def _adapter(self, stem: str, layer: int) -> Adapter | None:
        if not self._parts.adapter_size:
            return None
        weight, bias = (
            self._tensor(f"{stem}.layer_norm.{part}", torch.float32, layer)
            for part in ("weight", "bias")
        )
        norm = Norm("layernorm", weight, bias, ADAPTER_NORM_EPS)
        before = self._parts.adapter_norm_position == "pre"
        up = self._linear(f"{stem}.DenseSiluDense.wi", layer, norm if before else None)
        down = self._linear(f"{stem}.DenseSiluDense.wo", layer)
        return Adapter(up, down, None if before else norm)

    def _own(self, num_layers: int) -> range:
        return self.parallelism.layers(num_layers, self.pp_rank)

    def _head(self, table: Tensor | None) -> Linear:
        weight = table if self.config.tied_embeddings else self._table("lm_head.weight")
        norm = self._norm("final_layernorm") if self.config.final_norm else None
        bias = self._table("lm_head.bias") if self.config.logits_bias else None
        return Linear(weight, bias, _scaled(norm, self.config.logits_scale))

    def _layer(self, layer: int) -> LayerWeights:
        input_norm = self._norm("layers.*.input_layernorm", layer)
        post_attention = self._norm("layers.*.post_attention_layernorm", layer)
        pre = self.config.norm_placement != "post"
        sandwich = self.config.norm_placement == "sandwich"
        up_norm = post_attention if pre else None
        mlp = (None, None, None)
        if not self.config.num_experts:
            mlp = self._mlp("layers.*.mlp", layer, up_norm)
        return LayerWeights(
            query_key_value=self._linear(
                "layers.*.attention.query_key_value", layer, input_norm if pre else None
            ),
            attention_dense=self._linear("layers.*.attention.dense", layer),
            mlp_up=mlp[0],
            mlp_gate=mlp[1],
            mlp_down=mlp[2],
            experts=self._experts(layer, post_attention) if self.config.num_experts else None,
            input_norm=input_norm,
            post_attention_norm=post_attention,
            head_norms=self._head_norms(layer),
            attention_output_norm=self._norm("layers.*.attention.output_norm", layer)
            if sandwich
            else None,
            mlp_output_norm=self._norm("layers.*.mlp.output_norm", layer) if sandwich else None,
            ia3=self._ia3(
                "layers.*.attention",
                "layers.*.mlp",
                layer,
                self.config.local_size("q_size", self.parallelism.tp_size),
            ),
            **self._adapters("layers.*", layer),
        )

    def _mlp(
        self, name: str, layer: int, norm: Norm | None = None
    ) -> tuple[Linear, Linear | None, Linear]:
        """Up, gate where there is one, and down."""
        gate = None
        if self.config.gated:
            gate = self._linear(f"{name}.dense_h_to_4h_2", layer, norm)
        up = self._linear(f"{name}.dense_h_to_4h", layer, norm)
        return up, gate, self._linear(f"{name}.dense_4h_to_h", layer)

    def _experts(self, layer: int, norm: Norm) -> Experts:
        config = self.config
        if self.int8:
            raise CheckpointError("int8_mode is not supported for a model with experts")

        def stacked(name: str) -> Tensor:
            whole = None
            for expert in range(config.num_experts):
                part = self._whole(f"layers.*.mlp.experts.{expert}.{name}", layer).weight
                if whole is None:
                    whole = part.new_empty(config.num_experts, *part.shape)
                whole[expert] = part
            return whole

        shared = None
        if config.shared_expert_size is not None:
            scale = None
            if config.shared_expert_gate is not False:
                scale = self._linear("layers.*.mlp.shared_expert_gate", layer)
            shared = SharedExpert(*self._mlp("layers.*.mlp.shared_expert", layer), scale)
        return Experts(
            self._linear("layers.*.mlp.router", layer),
            norm,
            stacked("dense_h_to_4h"),
            stacked("dense_h_to_4h_2") if config.gated else None,
            stacked("dense_4h_to_h"),
            config.experts_per_token,
            bool(config.normalized_experts),
            shared,
        )

    def _linear(self, name: str, layer: int, norm: Norm | None = None) -> Linear:
        return self._stored(self._whole(name, layer, norm))

    def _stored(self, linear: Linear) -> Linear:
        """As the device keeps it."""
        return quantized(linear, self.dtype) if self.int8 else linear

    def _whole(self, name: str, layer: int, norm: Norm | None = None) -> Linear:
        """A projection that is not quantized yet; float32 where it will be."""
        dtype = torch.float32 if self.int8 else self.dtype
        weight = self._tensor(f"{name}.weight", dtype, layer)
        bias = None
        if f"{name}.bias" in self._specs:
            bias = self._tensor(f"{name}.bias", self.dtype, layer)
        return Linear(weight.t().contiguous(), bias, norm)

    def _joined(self, names: list[str], layer: int, norm: Norm | None = None) -> Linear:
        """Projections of one input as one, their outputs side by side."""
        parts = [self._whole(name, layer) for name in names]
        biases = [part.bias for part in parts if part.bias is not None]
        weight = torch.cat([part.weight for part in parts])
        return self._stored(Linear(weight, torch.cat(biases) if biases else None, norm))

    def _norm(self, name: str, layer: int | None = None) -> Norm:
        bias = None
        if f"{name}.bias" in self._specs:
            bias = self._tensor(f"{name}.bias", torch.float32, layer)
        weight = self._tensor(f"{name}.weight", torch.float32, layer)
        if getattr(self.config, "zero_centered_norm", None):
            weight = weight + 1
        return Norm(self.config.normalization, weight, bias, self.config.norm_eps)

    def _head_norms(self, layer: int) -> HeadNorms | None:
        if not self.config.qk_norm:
            return None
        stem = "layers.*.attention"
        return HeadNorms(
            self._norm(f"{stem}.query_norm", layer), self._norm(f"{stem}.key_norm", layer)
        )

    def _table(self, name: str) -> Tensor:
        """This rank's part of a vocabulary table or vector; what is past the vocabulary is zero."""
        spec = self._specs[name]
        whole = self._read(spec, None)
        rows = self.config.local_size("vocab_size", self.parallelism.tp_size)
        first = self.tp_rank * rows
        part = whole[first : first + rows]
        table = torch.zeros(rows, *whole.shape[1:], dtype=self.dtype, device=self.device)
        table[: part.shape[0]] = _tensor(part, self.dtype, self.device)
        return table

    def _tensor(self, name: str, dtype: torch.dtype, layer: int | None = None) -> Tensor:
        return _tensor(self._read(self._specs[name], layer), dtype, self.device)


def _scaled(norm: Norm | None, scale: float | None) -> Norm | None:
    """The norm with its result multiplied."""
    if norm is None or scale is None:
        return norm
    bias = None if norm.bias is None else norm.bias * scale
    return replace(norm, weight=norm.weight * scale, bias=bias)


def _tensor(array: Stored, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy of a (possibly read-only, memory-mapped) array on the device in `dtype`."""
    if isinstance(array, Tensor):
        return array.to(device=device, dtype=dtype)
    if array.dtype == BFLOAT16:
        host = torch.from_numpy(np.array(array.view("<i2"))).view(torch.bfloat16)
    else:
        host = torch.from_numpy(np.array(array))
    return host.to(device=device, dtype=dtype)
