"""The branches of a layer that keep a state of a fixed size: Mamba-2, the gated delta net, gated
short convolutions. Each has a scan over tokens of one row, and a step of one token of every row.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.kv_cache import RowState
from launcher_scripts.engine.model.layers import Chunk, ForwardContext, Input, Sublayer
from launcher_scripts.engine.model.weights import SublayerWeights
from launcher_scripts.kernels.operands import Linear, LoRA
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.kernels.reference_recurrence import (
    ConvOperands,
    DeltaOperands,
    Gating,
    Mamba2Operands,
    States,
)
from launcher_scripts.models.gpt import GPTConfig


@dataclass(frozen=True, kw_only=True)
class RecurrentWeights(SublayerWeights):
    """A branch with a state of a fixed size, of a gated short convolution: its weights are
    [channels, taps], the oldest tap first, in the compute type.
    """

    conv: Tensor
    conv_bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DeltaWeights(RecurrentWeights):
    """A gated delta net; in_proj makes queries, keys, values, z, b and a.

    rates, step_bias: float32 [heads]; the logarithm of a decay is rate * softplus(a + bias)
    norm_weight: float32 [head size]
    """

    rates: Tensor
    step_bias: Tensor
    norm_weight: Tensor


@dataclass(frozen=True, kw_only=True)
class KimiDeltaWeights(DeltaWeights):
    """A delta net whose keys decay each at a rate of its own; in_proj makes queries, keys, values
    and b, and what decay_up and gate_up read.

    rates: [heads, 1];  step_bias: [heads, key size]
    lora_decay_up, lora_gate_up: what adapters add to them
    """

    decay_up: Linear
    gate_up: Linear
    lora_decay_up: LoRA | None = None
    lora_gate_up: LoRA | None = None


@dataclass(frozen=True, kw_only=True)
class Mamba2Weights(RecurrentWeights):
    """Mamba-2; in_proj makes z, x, B, C and dt.

    rates, step_bias: float32 [heads]; the logarithm of a decay is rate * softplus(dt + bias)
    skip: float32 [heads], what of x goes on;  norm_weight: float32 [inner], where there is a norm
    """

    rates: Tensor
    step_bias: Tensor
    skip: Tensor
    norm_weight: Tensor | None = None


@dataclass(frozen=True)
class Recurrence:
    """What such branches are besides their weights.

    states: [slots, ...] of this layer, of every row by its slot
    groups: of all ranks, whose channels are normalized together
    """

    states: States
    groups: int = 1
    norm_eps: float = 1e-5
    norm: str = "gated"
    min_step: float | None = None
    max_step: float | None = None


class RecurrentBranch(Sublayer):
    """A branch with states of rows."""

    def __init__(
        self,
        weights: RecurrentWeights,
        kernels: Ops,
        communicator: Communicator,
        recurrence: Recurrence,
    ) -> None:
        super().__init__(weights, kernels, communicator)
        self.weights = weights
        self.states = recurrence.states
        self.recurrence = recurrence
        self._drafted: list[tuple[Tensor, int]] = []

    def branch(self, x: Input, context: ForwardContext[Input]) -> Tensor:
        projected = self.project(x, context.lora_adapters)
        return context.recur(projected, self).to(self.out_proj.dtype)

    def prompts(self, projected: Tensor, chunks: tuple[Chunk, ...]) -> Tensor:
        """What out_proj reads of the tokens of several rows, one row after the other."""
        if any(chunk.draft for chunk in chunks):
            self._drafted = []
        parts = projected.split([chunk.count for chunk in chunks])
        outputs = [self._prompt(part, chunk) for part, chunk in zip(parts, chunks, strict=True)]
        return torch.cat(outputs)

    def _prompt(self, projected: Tensor, chunk: Chunk) -> Tensor:
        states = tuple(state[chunk.slot] for state in self.states)
        if not chunk.past + chunk.dropped:  # whatever the slot's last row has left there
            states = tuple(torch.zeros_like(state) for state in states)
        if chunk.draft:
            self._drafted.append((projected, chunk.slot))
            return self.scan(projected, states)[0]
        outputs, first = [], 0
        for border, snapshot in (*chunk.saves, (chunk.past + chunk.count, chunk.slot)):
            end = border - chunk.past
            if end > first:
                y, states = self.scan(projected[first:end], states)
                outputs.append(y)
            for retained, state in zip(self.states, states, strict=True):
                retained[snapshot] = state
            first = end
        return torch.cat(outputs)

    def settle_drafts(self, counts: Tensor) -> None:
        """Keep the states behind the first counts [R] tokens of the drafts that ran last."""
        for (projected, slot), count in zip(self._drafted, counts, strict=True):
            states = tuple(state[slot] for state in self.states)
            _, states = self.scan(projected, states, count)
            for retained, state in zip(self.states, states, strict=True):
                retained[slot] = state
        self._drafted = []

    @abstractmethod
    def decode(self, projected: Tensor, slots: Tensor) -> Tensor:
        """What out_proj reads of one token of each of the rows in slots [B]."""

    @abstractmethod
    def scan(
        self, projected: Tensor, states: States, count: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """What out_proj reads of one row's tokens [N, its inputs], and the states behind the first
        `count` of them.
        """


class Mamba2(RecurrentBranch):
    """Its states are the heads' and the convolution's."""

    weights: Mamba2Weights

    def __init__(
        self,
        weights: Mamba2Weights,
        kernels: Ops,
        communicator: Communicator,
        recurrence: Recurrence,
    ) -> None:
        super().__init__(weights, kernels, communicator, recurrence)
        local = recurrence.groups % communicator.tp_size == 0
        self.layer = Mamba2Operands(
            conv=weights.conv,
            conv_bias=weights.conv_bias,
            tails=self.states[1],
            states=self.states[0],
            rates=weights.rates,
            step_bias=weights.step_bias,
            gating=Gating(
                weights.norm_weight,
                recurrence.norm_eps,
                recurrence.groups // communicator.tp_size,
                gate_first=recurrence.norm != "before_gate",
            )
            if local or weights.norm_weight is None
            else None,
            skip=weights.skip,
            min_step=recurrence.min_step,
            max_step=recurrence.max_step,
        )

    def scan(
        self, projected: Tensor, states: States, count: Tensor | None = None
    ) -> tuple[Tensor, States]:
        y, states = self.kernels.scan_mamba2(projected, self.layer, states, count)
        return self._normalized_over_ranks(y, projected), states

    def decode(self, projected: Tensor, slots: Tensor) -> Tensor:
        y = self.kernels.step_mamba2(projected, self.layer, slots)
        return self._normalized_over_ranks(y, projected)

    def _normalized_over_ranks(self, y: Tensor, projected: Tensor) -> Tensor:
        """Gated outputs y [N, inner], where ranks have parts of the groups of their norm."""
        weight, groups = self.weights.norm_weight, self.recurrence.groups
        if self.layer.gating is not None or weight is None:
            return y
        tokens, inner = y.shape
        opened = functional.silu(projected[:, :inner].float())
        if gate_first := self.recurrence.norm != "before_gate":
            y = y * opened
        size = inner * self.communicator.tp_size // groups  # channels of a group
        first = self.communicator.tp_rank * inner
        group = (first + torch.arange(inner, device=y.device)) // size
        squares = torch.zeros(tokens, groups, device=y.device).index_add_(1, group, y.square())
        mean = self.communicator.tp_sum(squares) / size
        y = y * torch.rsqrt(mean + self.recurrence.norm_eps)[:, group] * weight
        return y if gate_first else y * opened


class GatedDelta(RecurrentBranch):
    """Its states are the heads' and the convolution's."""

    weights: DeltaWeights
    activation = "silu"

    def __init__(
        self,
        weights: DeltaWeights,
        kernels: Ops,
        communicator: Communicator,
        recurrence: Recurrence,
    ) -> None:
        super().__init__(weights, kernels, communicator, recurrence)
        heads = self.states[0].shape[1]
        self.layer = DeltaOperands(
            conv=weights.conv,
            tails=self.states[1],
            states=self.states[0],
            rates=weights.rates,
            step_bias=weights.step_bias,
            gating=Gating(
                weights.norm_weight, recurrence.norm_eps, heads, activation=self.activation
            ),
        )

    def scan(
        self, projected: Tensor, states: States, count: Tensor | None = None
    ) -> tuple[Tensor, States]:
        return self.kernels.scan_delta(projected, self.layer, states, count)

    def decode(self, projected: Tensor, slots: Tensor) -> Tensor:
        return self.kernels.step_delta(projected, self.layer, slots)


class KimiDelta(GatedDelta):
    """See GatedDelta; decays are of every key."""

    weights: KimiDeltaWeights
    activation = "sigmoid"

    def branch(self, x: Input, context: ForwardContext[Input]) -> Tensor:
        w, projected = self.weights, self.project(x, context.lora_adapters)
        decay, gate = w.decay_up.in_size, w.gate_up.in_size
        widths = [projected.shape[1] - decay - gate, decay, gate]
        mixed, of_decay, of_gate = (part.contiguous() for part in projected.split(widths, dim=1))
        decays = self.kernels.project(
            of_decay, w.decay_up.with_lora(w.lora_decay_up, context.lora_adapters)
        )
        gates = self.kernels.project(
            of_gate, w.gate_up.with_lora(w.lora_gate_up, context.lora_adapters)
        )
        expanded = torch.cat([mixed, decays, gates], dim=1)
        return context.recur(expanded, self).to(self.out_proj.dtype)


class ShortConv(RecurrentBranch):
    """A convolution of B * x, which C multiplies; its state is the convolution's."""

    def __init__(
        self,
        weights: RecurrentWeights,
        kernels: Ops,
        communicator: Communicator,
        recurrence: Recurrence,
    ) -> None:
        super().__init__(weights, kernels, communicator, recurrence)
        self.layer = ConvOperands(
            conv=weights.conv, conv_bias=weights.conv_bias, tails=self.states[0]
        )

    def scan(
        self, projected: Tensor, states: States, count: Tensor | None = None
    ) -> tuple[Tensor, States]:
        return self.kernels.scan_short_conv(projected, self.layer, states, count)

    def decode(self, projected: Tensor, slots: Tensor) -> Tensor:
        return self.kernels.step_short_conv(projected, self.layer, slots)


# The branch of each kind of weights, the most special first.
RECURRENT: dict[type[RecurrentWeights], type[RecurrentBranch]] = {
    Mamba2Weights: Mamba2,
    KimiDeltaWeights: KimiDelta,
    DeltaWeights: GatedDelta,
    RecurrentWeights: ShortConv,
}


def recurrence(config: GPTConfig, states: States) -> Recurrence:
    """What the branches of a model are besides their weights."""
    return Recurrence(
        states,
        config.mamba_num_groups or 1,
        config.mixer_norm_eps or config.norm_eps,
        config.mamba_norm or "gated",
        config.mamba_min_step,
        config.mamba_max_step,
    )


def row_states(config: GPTConfig, kind: str, tp_size: int) -> tuple[RowState, ...]:
    """What a branch of a kind keeps of a row on one of `tp_size` ranks."""
    taps = (config.conv_kernel or 1) - 1
    if kind == "short_conv":
        return (RowState((taps, config.hidden_size // tp_size)),)
    if kind == "mamba2":
        heads, conv = "mamba_num_heads", "mamba_conv_size"
        sizes = (config.mamba_head_size or 0, config.mamba_state_size or 0)
    else:
        heads, conv = "delta_num_heads", "delta_conv_size"
        sizes = (config.delta_key_head_size or 0, config.delta_value_head_size or 0)
    state = (config.local_size(heads, tp_size), *sizes)
    return RowState(state, torch.float32), RowState((taps, config.local_size(conv, tp_size)))
