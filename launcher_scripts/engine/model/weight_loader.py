"""One rank's weights, read from a FasterTransformer-layout checkpoint straight to its device."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16, copied
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import FOUR_BITS, Quantization
from launcher_scripts.engine.model.weights import Adapter, Experts, LoRAKey, ModelWeights
from launcher_scripts.kernels.four_bits import PERIOD
from launcher_scripts.kernels.operands import Linear, LoRA, Norm, Router
from launcher_scripts.kernels.quantization import dequantized, quantized, with_alike_scales
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import ADAPTER_NORM_EPS, Adapters, adapters_of
from launcher_scripts.models.family import ModelConfig, WeightSpec

MAX_UPLOAD_THREADS = 8
UPLOAD_CHUNK = 64 << 20  # bytes; smaller ones leave threads without work between two chunks
CHUNKS_UNDER_WAY = 3


class Uploads:
    """Copies of arrays on a device, also of read-only and memory-mapped ones.

    To a GPU large arrays go chunk by chunk through pinned memory that is kept: several threads copy
    a chunk there, out of the page cache, while the GPU reads the one before. One thread, through
    fresh pageable memory, copies at a tenth of that rate.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0

    def upload(self, values: Stored, dtype: torch.dtype) -> Tensor:
        """The values on the device in `dtype`."""
        if isinstance(values, Tensor):
            return values.to(device=self._device, dtype=dtype)
        if values.ndim == 2 and values.flags.f_contiguous and not values.flags.c_contiguous:
            return self.upload(values.T, dtype).t()  # a copy in another order would be slow
        if values.dtype == BFLOAT16:
            return self._copied(values.view("<i2")).view(torch.bfloat16).to(dtype)
        return self._copied(values).to(dtype)

    def _copied(self, values: NDArray[Any]) -> Tensor:
        if self._device.type != "cuda" or values.nbytes < UPLOAD_CHUNK // MAX_UPLOAD_THREADS:
            return torch.from_numpy(copied(values)).to(self._device)
        source = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        result = torch.empty(len(source), dtype=torch.uint8, device=self._device)
        for first in range(0, len(source), UPLOAD_CHUNK):
            chunk = source[first : first + UPLOAD_CHUNK]
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % CHUNKS_UNDER_WAY
            buffer.read.synchronize()  # the copy to the device that was in it
            staged = buffer.pinned[: len(chunk)]
            parts = (np.array_split(x, MAX_UPLOAD_THREADS) for x in (staged.numpy(), chunk))
            list(self._threads.map(np.copyto, *parts))
            result[first : first + len(chunk)].copy_(staged, non_blocking=True)
            buffer.read.record()
        empty = torch.from_numpy(np.empty(0, values.dtype))
        return result.view(empty.dtype).view(values.shape)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(MAX_UPLOAD_THREADS, len(os.sched_getaffinity(0))))

    @cached_property
    def _buffers(self) -> list[UploadBuffer]:
        return [
            UploadBuffer(
                torch.empty(UPLOAD_CHUNK, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
            )
            for _ in range(CHUNKS_UNDER_WAY)
        ]


class UploadBuffer(NamedTuple):
    """Pinned memory, uint8 [UPLOAD_CHUNK], and when the device has read it."""

    pinned: Tensor
    read: torch.cuda.Event


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
        self._uploads = Uploads(device)
        self.loras: dict[LoRAKey, LoRA] = {}
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
        factors = torch.cat([parts[0].new_ones(parts[0].shape[0], ones), *parts], dim=1)
        return torch.cat([factors, torch.ones_like(factors[:1])])

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

    def _local(self, num_layers: int) -> range:
        return self.parallelism.layers(num_layers, self.pp_rank)

    def _linear(self, name: str, layer: int, norm: Norm | None = None) -> Linear:
        return self._stored(self._full(name, layer, norm), self._quantization_of([name]))

    def _unquantized(self, name: str, layer: int) -> Linear:
        """A small projection that decides much."""
        linear = self._full(name, layer)
        return replace(linear, weight=linear.weight.to(self.dtype))

    def _stored(self, linear: Linear, quantization: Quantization | None) -> Linear:
        """As the device keeps it."""
        if quantization is None:
            return linear
        return quantized(linear, self.dtype, quantization)

    def _quantization_of(self, names: Sequence[str]) -> Quantization | None:
        """Of projections that are one. In four bits matrices keep the compute type whose inputs are
        no full groups; in mxfp4 those of a mixture of experts beside the experts do, as in gpt-oss.

        Raises ConfigError where only the ranks' parts of the inputs are no full groups.
        """
        if self.quantization not in FOUR_BITS:
            return self.quantization
        is_mixture = bool(getattr(self.config, "num_experts", None))
        if self.quantization == "mxfp4" and is_mixture and ".experts." not in names[0]:
            return None
        spec, tp_size = self._specs[f"{names[0]}.weight"], self.parallelism.tp_size
        full, local = (spec.shape_on(self.config, size)[0] for size in (1, tp_size))
        if full % PERIOD:
            return None
        if local % PERIOD:
            raise ConfigError(
                problem(
                    f"{self.quantization}: a rank's part of {names[0]} must have full groups",
                    got=f"{local} of {full} inputs with tensor_para_size {tp_size}",
                    choices=[f"multiples of {PERIOD} inputs"],
                    change="tensor_para_size, or quantization in config.pbtxt",
                )
            )
        return self.quantization

    def _full(self, name: str, layer: int, norm: Norm | None = None) -> Linear:
        """A projection that is not quantized yet; float32 where it will be."""
        dtype = torch.float32 if self._quantization_of([name]) else self.dtype
        weight = self._tensor(f"{name}.weight", dtype, layer)
        bias = None
        if f"{name}.bias" in self._specs:
            bias = self._tensor(f"{name}.bias", self.dtype, layer)
        return Linear(weight.t().contiguous(), bias, norm)

    def _joined(self, names: list[str], layer: int, norm: Norm | None = None) -> Linear:
        """Projections of one input as one, their outputs side by side."""
        parts = [self._full(name, layer) for name in names]
        weight, bias = torch.cat([part.weight for part in parts]), None
        if any(part.bias is not None for part in parts):
            zeros = weight.new_zeros(len(weight), dtype=self.dtype)
            bias = torch.cat(
                [zeros[: len(part.weight)] if part.bias is None else part.bias for part in parts]
            )
        return self._stored(Linear(weight, bias, norm), self._quantization_of(names))

    def _stacked(self, names: Sequence[str], layer: int, norm: Norm | None = None) -> Linear:
        """Projections of experts as one, along a first axis; read one after the other."""
        parts = (self._linear(name, layer) for name in names)
        first = next(parts)
        stack = replace(first, weight=first.weight.new_empty(len(names), *first.weight.shape))
        stack = replace(stack, norm=norm)
        for kind in ("bias", "scale"):
            one = getattr(first, kind)
            if one is not None:
                stack = replace(stack, **{kind: one.new_empty(len(names), *one.shape)})
        for expert, part in enumerate(itertools.chain([first], parts)):
            if part.scale is not None and stack.scale is not None:
                part, stack = with_alike_scales(part, stack)
            for kind in ("weight", "bias", "scale"):
                if getattr(stack, kind) is not None:
                    getattr(stack, kind)[expert] = getattr(part, kind)
        return stack

    def _ungated_experts(
        self, stem: str, ends: tuple[str, str], layer: int, norm: Norm | None, router: Router
    ) -> Experts:
        """MLPs without gates.  ends: of the names of what each one has behind its number"""
        stems = [f"{stem}.{expert}" for expert in range(self.config.num_experts or 0)]
        up, down = (
            self._stacked([f"{name}.{end}" for name in stems], layer, before)
            for end, before in zip(ends, (norm, None), strict=True)
        )
        if down.bias is not None and self.tp_rank:  # the sum over the ranks has it once
            down = replace(down, bias=torch.zeros_like(down.bias))
        return Experts(router=router, in_proj=up, out_proj=down)

    def _norm(self, name: str, layer: int | None = None) -> Norm:
        bias = None
        if f"{name}.bias" in self._specs:
            bias = self._tensor(f"{name}.bias", torch.float32, layer)
        weight = self._tensor(f"{name}.weight", torch.float32, layer)
        if getattr(self.config, "zero_centered_norm", None):
            weight = weight + 1
        return Norm(self.config.normalization, weight, bias, self.config.norm_eps)

    def _table(self, name: str, size: str = "vocab_size") -> Tensor:
        """This rank's part of a vocabulary table or vector; what is past the vocabulary is zero."""
        spec = self._specs[name]
        full = self._read(spec, None)
        rows = self.config.local_size(size, self.parallelism.tp_size)
        first = self.tp_rank * rows
        part = full[first : first + rows]
        table = torch.zeros(rows, *full.shape[1:], dtype=self.dtype, device=self.device)
        table[: part.shape[0]] = self._uploads.upload(part, self.dtype)
        return table

    def _tensor(self, name: str, dtype: torch.dtype, layer: int | None = None) -> Tensor:
        return self._uploads.upload(self._read(self._specs[name], layer), dtype)


def scaled_norm(norm: Norm, scale: float) -> Norm:
    """The norm with its result multiplied."""
    bias = None if norm.bias is None else norm.bias * scale
    return replace(norm, weight=norm.weight * scale, bias=bias)


def scaled_rows(linear: Linear, scales: str | float | None, widths: Sequence[int] = ()) -> Linear:
    """The projection with its outputs multiplied: by a number, or by one for each of the blocks of
    them, which a text has with commas between.
    """
    if scales in (None, 1.0):
        return linear
    factors = _factors(scales, widths, linear.weight.device)
    bias = None if linear.bias is None else (linear.bias.float() * factors).to(linear.bias.dtype)
    if linear.quantization in FOUR_BITS:
        weight = dequantized(linear.weight, linear.scale, linear.dtype) * factors.view(-1, 1)
        return quantized(
            replace(linear, weight=weight, bias=bias), linear.dtype, linear.quantization
        )
    if linear.scale is not None:
        return replace(linear, scale=linear.scale * factors, bias=bias)
    weight = (linear.weight.float() * factors.view(-1, 1)).to(linear.weight.dtype)
    return replace(linear, weight=weight, bias=bias)


def scaled_lora(lora: LoRA, scales: str | float | None) -> LoRA:
    """Return what adapters add to such a projection."""
    if scales in (None, 1.0):
        return lora
    factors = _factors(scales, lora.widths if isinstance(scales, str) else (), lora.up.device)
    return replace(lora, up=(lora.up.float() * factors).to(lora.up.dtype))


def _factors(scales: str | float | None, widths: Sequence[int], device: torch.device) -> Tensor:
    factors = torch.tensor([float(number) for number in str(scales).split(",")], device=device)
    return factors.repeat_interleave(torch.tensor(widths, device=device)) if widths else factors
