"""One rank's weights, read from a FasterTransformer-layout checkpoint straight to its device.

Adapters of a finished model at work: virtual tokens, IA3 and bottlenecks.

In the engine's ids a virtual token is a negative number: -1 - n is row n of its row's prompt table.
It has a position and a place in the cache as any other token does.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import Quantization
from launcher_scripts.engine.messages.plan import NO_TASK
from launcher_scripts.kernels.operands import (
    HeadNorms,
    Linear,
    LoRA,
    Norm,
    RelativeBias,
    Router,
    XIELUCurve,
)
from launcher_scripts.kernels.quantization import quantized
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import ADAPTER_NORM_EPS, Adapters, adapters_of
from launcher_scripts.models.family import ModelConfig, WeightSpec


@dataclass(frozen=True)
class Adapter:
    """down(silu(up(x))), its layer norm before `up` (in it) or after `down`.

    up: [size / tp, hidden];  down: [hidden, size / tp]
    """

    up: Linear
    down: Linear
    norm_after: Norm | None = None


def scaled(x: Tensor, factors: Tensor | None, tasks: Tensor | None) -> Tensor:
    """x [N, width], each row times its task's factors; tasks [N]."""
    return x if factors is None or tasks is None else x * factors[tasks]


def token_tasks(rows: Sequence[tuple[int, int]], device: torch.device) -> Tensor | None:
    """Every token's row of the IA3 factors, int64 [N]; None where no row has a task.

    rows: task and new tokens of each
    """
    if all(task == NO_TASK for task, _ in rows):
        return None
    counts = torch.tensor([count for _, count in rows])
    tasks = torch.tensor([task for task, _ in rows]).repeat_interleave(counts)
    return tasks.to(device, non_blocking=True)


@dataclass(frozen=True)
class Embedding:
    """tokens: [vocab / tp, hidden], ids from first_id on; positions: [max_positions, hidden].

    Padded rows of tokens are zero. norm: of the sum of both; scale: of the tokens' part
    """

    first_id: int
    tokens: Tensor
    positions: Tensor | None
    norm: Norm | None = None
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class SublayerWeights:
    """A residual branch: in_proj reads the hidden states, behind its norm where it has one, and
    out_proj adds to them.

    output_norm: of what the branch adds, where there is such;  norm: one that comes after the sum
    scale:       of what the sum is then, where it is multiplied
    adapter:     is given what the branch adds, and adds its own
    ia3:         factors of IA3 by task, [tasks + 1, width] (Liu et al. 2022)
    lora_in, lora_out: what adapters add to the two projections; of a gated MLP, lora_in also what
                 they add to the gate, behind up
    """

    in_proj: Linear
    out_proj: Linear
    output_norm: Norm | None = None
    norm: Norm | None = None
    scale: float | None = None
    adapter: Adapter | None = None
    ia3: Tensor | None = None
    lora_in: LoRA | None = None
    lora_out: LoRA | None = None

    def linears(self) -> Iterator[Linear]:
        """The projections, without the adapter's."""
        values = (getattr(self, field.name) for field in fields(self))
        return (value for value in values if isinstance(value, Linear))


@dataclass(frozen=True, kw_only=True)
class AttentionWeights(SublayerWeights):
    """Attention of tokens to each other; in_proj makes their queries, keys and values.

    head_norms: of every head's queries and keys, where there are such
    relative:   what a score gains by distance
    query_scale: multiplies queries after they turn, float32 [head_size]
    sinks:      a score of every head that is of no token, float32 [heads]
    ia3:        of queries (ones), keys and values
    gate:       reads what in_proj does; its sigmoid multiplies what attention gives
    lora_gate:  what adapters add to it
    value_norm: of every head's values, where there is one
    """

    head_norms: HeadNorms | None = None
    query_scale: Tensor | None = None
    sinks: Tensor | None = None
    relative: RelativeBias | None = None
    gate: Linear | None = None
    lora_gate: LoRA | None = None
    value_norm: Norm | None = None


@dataclass(frozen=True, kw_only=True)
class LinearWeights(SublayerWeights):
    """A linear layer in place of a branch; in_proj has its norm, and out_proj its weights."""


@dataclass(frozen=True, kw_only=True)
class CrossAttentionWeights(SublayerWeights):
    """Attention to the encoder's states; in_proj makes the queries.

    key_value: reads the encoder's states as they are;  ia3: of what it makes
    relative:  what a score gains by distance
    """

    key_value: Linear
    relative: RelativeBias | None = None


@dataclass(frozen=True, kw_only=True)
class MLPWeights(SublayerWeights):
    """in_proj is up, out_proj down; gate where there is one.  ia3: of the inner activations

    curve: the activation's parameters, if it has such
    """

    gate: Linear | None = None
    curve: XIELUCurve | None = None


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that every token goes through, weighed by sigmoid(scale(x)) where that is there, and
    by a factor."""

    mlp: MLPWeights
    scale: Linear | None
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Experts(MLPWeights):
    """One rank's parts of a layer's experts: the weights have a first axis of all experts.

    router: reads hidden states
    latent_in, latent_out: projections before and behind the experts, where they work in a latent
    scale_input: the router's weights multiply what experts read, not what they add
    """

    router: Router
    scale_input: bool = False
    shared: SharedExpert | None = None
    latent_in: Linear | None = None
    latent_out: Linear | None = None


Kind = TypeVar("Kind", bound=SublayerWeights)


@dataclass(frozen=True)
class LayerWeights:
    """One layer: residual branches one after the other, some of them side by side.

    branches: those of one entry read the same hidden states
    """

    branches: tuple[tuple[SublayerWeights, ...], ...]

    @classmethod
    def of(cls, *sublayers: SublayerWeights) -> LayerWeights:
        """A layer of branches one after the other."""
        return cls(tuple((sublayer,) for sublayer in sublayers))

    @property
    def sublayers(self) -> list[SublayerWeights]:
        """In their order."""
        return [sublayer for group in self.branches for sublayer in group]

    @property
    def attention(self) -> AttentionWeights:
        return self._first(AttentionWeights)

    @property
    def mlp(self) -> MLPWeights:
        """The MLP, or the experts."""
        return self._first(MLPWeights)

    def _first(self, kind: type[Kind]) -> Kind:
        """The branch of a kind that the layer has."""
        return next(sublayer for sublayer in self.sublayers if isinstance(sublayer, kind))


@dataclass(frozen=True)
class StackWeights:
    """The layers of one pipeline stage of a decoder or an encoder, by their global number.

    embedding: on the first stage;  prompt_tables: of every task, [virtual tokens, hidden], there
    """

    embedding: Embedding | None
    layers: dict[int, LayerWeights]
    prompt_tables: tuple[Tensor, ...] = ()


LoRAKey = tuple[tuple[str, ...], int, str | float | None]


@dataclass(frozen=True)
class ModelWeights:
    """One rank's part of a model; an encoder alone has a decoder of nothing.

    head:         the output projection with the final norm, on the last pipeline stage
    encoder_norm: after the encoder's last layer, on the last pipeline stage
    loras:        the LoRA of layers, by the arguments of GPTWeightLoader.lora
    """

    config: Any
    decoder: StackWeights
    head: Linear | None
    encoder: StackWeights | None = None
    encoder_norm: Norm | None = None
    loras: Mapping[LoRAKey, LoRA] = field(default_factory=dict)

    @property
    def stacks(self) -> list[StackWeights]:
        """The encoder first."""
        return [self.decoder] if self.encoder is None else [self.encoder, self.decoder]

    def bytes(self) -> int:
        """Device bytes of the tables and matrices."""
        tensors = {id(tensor): tensor for tensor in self._matrices() if tensor is not None}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def _matrices(self) -> Iterator[Tensor | None]:
        if self.head is not None:
            yield self.head.weight
        for stack in self.stacks:
            if stack.embedding is not None:
                yield from (stack.embedding.tokens, stack.embedding.positions)
            for sublayer in sublayers_of(stack.layers.values()):
                yield from (linear.weight for linear in sublayer.linears())


def sublayers_of(layers: Iterable[LayerWeights]) -> Iterator[SublayerWeights]:
    """The sublayers of all layers."""
    return (sublayer for layer in layers for sublayer in layer.sublayers)


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
        return self._stored(self._full(name, layer, norm))

    def _unquantized(self, name: str, layer: int) -> Linear:
        """A small projection that decides much."""
        linear = self._full(name, layer)
        return replace(linear, weight=linear.weight.to(self.dtype))

    def _stored(self, linear: Linear) -> Linear:
        """As the device keeps it."""
        if self.quantization is None:
            return linear
        return quantized(linear, self.dtype, self.quantization)

    def _full(self, name: str, layer: int, norm: Norm | None = None) -> Linear:
        """A projection that is not quantized yet; float32 where it will be."""
        dtype = torch.float32 if self.quantization else self.dtype
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
        return self._stored(Linear(weight, bias, norm))

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
            for kind in ("weight", "bias", "scale"):
                if getattr(stack, kind) is not None:
                    getattr(stack, kind)[expert] = getattr(part, kind)
        return stack

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
        full = self._read(spec, None)
        rows = self.config.local_size("vocab_size", self.parallelism.tp_size)
        first = self.tp_rank * rows
        part = full[first : first + rows]
        table = torch.zeros(rows, *full.shape[1:], dtype=self.dtype, device=self.device)
        table[: part.shape[0]] = _tensor(part, self.dtype, self.device)
        return table

    def _tensor(self, name: str, dtype: torch.dtype, layer: int | None = None) -> Tensor:
        return _tensor(self._read(self._specs[name], layer), dtype, self.device)


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


def _tensor(array: Stored, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy of a (possibly read-only, memory-mapped) array on the device in `dtype`."""
    if isinstance(array, Tensor):
        return array.to(device=device, dtype=dtype)
    if array.dtype == BFLOAT16:
        host = torch.from_numpy(np.array(array.view("<i2"))).view(torch.bfloat16)
    else:
        host = torch.from_numpy(np.array(array))
    return host.to(device=device, dtype=dtype)
