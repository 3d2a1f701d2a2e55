"""One rank's weights, read from a FasterTransformer-layout checkpoint straight to its device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher_scripts.checkpoint.formats.dtypes import BFLOAT16
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import Quantization
from launcher_scripts.engine.model.adapters import Adapter
from launcher_scripts.engine.model.model_weights import ModelWeights
from launcher_scripts.kernels.operands import Linear, LoRA, Norm
from launcher_scripts.kernels.quantization import quantized
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import ADAPTER_NORM_EPS, LORA_TARGETS, Adapters, adapters_of
from launcher_scripts.models.family import ModelConfig, WeightSpec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Stored = NDArray[Any] | Tensor
Reader = Callable[[WeightSpec, int | None], Stored]


class WeightLoader(ABC):
    """Turns stored tensors ([in, out], one file per rank) into a rank's operands ([out, in]).

    read:  the stored tensor of a WeightSpec and layer, as this rank's file holds it
    quantization: of the matrices of the layers, each output channel by its own scale
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
        quantization: Quantization | None = None,
    ) -> None:
        self.config = config
        self.parallelism = parallelism
        self.tp_rank = parallelism.tp_rank(rank)
        self.pp_rank = parallelism.pp_rank(rank)
        self.is_first_stage = self.pp_rank == 0
        self.is_last_stage = self.pp_rank == parallelism.pp_size - 1
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self._read = read
        self._specs = {spec.name: spec for spec in family_of(config).weights(config)}

    @abstractmethod
    def load(self) -> ModelWeights:
        """The rank's weights; everything it needs, and nothing else, is read."""

    @property
    def _parts(self) -> Adapters:
        return adapters_of(self.config)

    def _prompt_tables(self) -> tuple[Tensor, ...]:
        return tuple(
            self._tensor(f"prompt_table.{task.name}.weight", self.dtype)
            for task in self._parts.prompt_tasks
        )

    def _ia3(self, stems: list[str], layer: int, ones: int = 0) -> Tensor | None:
        """`ones` columns of ones, then the vectors [tasks, width] of `stems`; one row of ones more,
        for rows without a task.
        """
        if not self._parts.ia3_num_tasks:
            return None
        parts = [self._tensor(f"{stem}.ia3.weight", self.dtype, layer) for stem in stems]
        whole = torch.cat([parts[0].new_ones(parts[0].shape[0], ones), *parts], dim=1)
        return torch.cat([whole, torch.ones_like(whole[:1])])

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

    def _lora(self, stem: str, layer: int) -> LoRA | None:
        """What adapters add to the projection called `stem` within a layer."""
        parts = self._parts
        if stem not in parts.lora_targets:
            return None
        down = self._tensor(f"layers.*.{stem}.lora_in.weight", self.dtype, layer)
        up = self._tensor(f"layers.*.{stem}.lora_out.weight", self.dtype, layer)
        target = LORA_TARGETS[stem]
        tp_size = self.parallelism.tp_size
        widths = tuple(self.config.local_size(block, tp_size) for block in target.blocks)
        count = len(parts.lora_names)
        return LoRA(
            down.t().contiguous().view(count, -1, down.shape[0]),
            up.view(count, parts.lora_rank, -1),
            widths or (up.shape[1],),
        )

    def _own(self, num_layers: int) -> range:
        return self.parallelism.layers(num_layers, self.pp_rank)

    def _linear(self, name: str, layer: int, norm: Norm | None = None) -> Linear:
        return self._stored(self._whole(name, layer, norm))

    def _unquantized(self, name: str, layer: int) -> Linear:
        """A small projection that decides much."""
        linear = self._whole(name, layer)
        return replace(linear, weight=linear.weight.to(self.dtype))

    def _stored(self, linear: Linear) -> Linear:
        """As the device keeps it."""
        if self.quantization is None:
            return linear
        return quantized(linear, self.dtype, self.quantization)

    def _whole(self, name: str, layer: int, norm: Norm | None = None) -> Linear:
        """A projection that is not quantized yet; float32 where it will be."""
        dtype = torch.float32 if self.quantization else self.dtype
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


def scaled_norm(norm: Norm, scale: float) -> Norm:
    """The norm with its result multiplied."""
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
