"""The branches of a layer that keep a state of a fixed size: Mamba-2, the gated delta net, gated
short convolutions. Each has a scan over tokens of one row, and a step of one token of every row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.kv_cache import RowState
from launcher_scripts.engine.model.layers import Chunk, ForwardContext, Input, Sublayer
from launcher_scripts.engine.model.weights import SublayerWeights
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.kernels.ops import Ops
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
    """

    decay_up: Linear
    gate_up: Linear


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


# What a branch keeps of one row, or of several.
States = tuple[Tensor, ...]


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

    fused = False

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

    def decode(self, projected: Tensor, slots: Tensor) -> Tensor:
        """What out_proj reads of one token of each of the rows in slots [B]."""
        y, states = self.advance(projected, tuple(state[slots] for state in self.states))
        for retained, state in zip(self.states, states, strict=True):
            retained.index_copy_(0, slots, state.to(retained.dtype))
        return y

    @abstractmethod
    def scan(
        self, projected: Tensor, states: States, count: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """What out_proj reads of one row's tokens, float32 [N, its inputs], and the states behind
        the first `count` of them.
        """

    @abstractmethod
    def advance(self, projected: Tensor, states: States) -> tuple[Tensor, States]:
        """The same of one token of each row, with a first axis of rows in all states."""

    def _group_norm(self, y: Tensor, weight: Tensor) -> Tensor:
        """An RMS norm of this rank's channels [N, inner], those of a group together, of which other
        ranks may have some.
        """
        groups, tp_size, rank = (
            self.recurrence.groups,
            self.communicator.tp_size,
            self.communicator.tp_rank,
        )
        tokens, inner = y.shape
        if groups % tp_size == 0:
            parts = y.view(tokens, groups // tp_size, -1)
            mean = parts.square().mean(-1, keepdim=True)
            parts = parts * torch.rsqrt(mean + self.recurrence.norm_eps)
            return parts.reshape(tokens, inner) * weight
        size = inner * tp_size // groups  # channels of a group
        group = (rank * inner + torch.arange(inner, device=y.device)) // size
        squares = torch.zeros(tokens, groups, device=y.device).index_add_(1, group, y.square())
        mean = self.communicator.tp_sum(squares) / size
        return y * torch.rsqrt(mean + self.recurrence.norm_eps)[:, group] * weight


class Mamba2(RecurrentBranch):
    """See kernels/reference_recurrence.py; its states are the heads' and the convolution's."""

    weights: Mamba2Weights

    def scan(
        self, projected: Tensor, states: States, count: Tensor | None = None
    ) -> tuple[Tensor, States]:
        w, (state, tail) = self.weights, states
        gate, mixed, steps = self._split(projected)
        mixed, tail = self.kernels.conv_scan(mixed, w.conv, w.conv_bias, tail, count)
        x, b, c = self._parts(mixed)
        steps = self._steps(steps)
        y, state = self.kernels.mamba2_scan(x, steps, w.rates, b, c, w.skip, state, count)
        return self._gated(y.flatten(1), gate), (state, tail)

    def advance(self, projected: Tensor, states: States) -> tuple[Tensor, States]:
        w, (state, tail) = self.weights, states
        gate, mixed, steps = self._split(projected)
        mixed, tail = self.kernels.conv_step(mixed, w.conv, w.conv_bias, tail)
        x, b, c = self._parts(mixed)
        y, state = self.kernels.mamba2_step(x, self._steps(steps), w.rates, b, c, w.skip, state)
        return self._gated(y.flatten(1), gate), (state, tail)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        conv, heads = self.weights.conv.shape[0], self.weights.rates.shape[0]
        gate = projected.shape[1] - conv - heads
        return tuple(projected.split([gate, conv, heads], dim=1))

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, heads, size], B and C [N, groups, state] of what the convolution makes."""
        heads, size, columns = self.states[0].shape[1:]
        inner = heads * size
        group = (mixed.shape[1] - inner) // 2
        x, b, c = functional.silu(mixed).split([inner, group, group], dim=1)
        return (
            x.unflatten(1, (heads, size)),
            b.unflatten(1, (-1, columns)),
            c.unflatten(1, (-1, columns)),
        )

    def _steps(self, raw: Tensor) -> Tensor:
        """Time steps, float32 [N, heads]."""
        minimum, maximum = self.recurrence.min_step, self.recurrence.max_step
        steps = functional.softplus(raw.float() + self.weights.step_bias)
        return steps if minimum is None and maximum is None else steps.clamp(minimum, maximum)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        kind, weight = self.recurrence.norm, self.weights.norm_weight
        opened = functional.silu(gate.float())
        if weight is None:
            return y * opened
        if kind == "before_gate":
            return self._group_norm(y, weight) * opened
        return self._group_norm(y * opened, weight)


class GatedDelta(RecurrentBranch):
    """See kernels/reference_recurrence.py; its states are the heads' and the convolution's."""

    weights: DeltaWeights
    opened: Callable[[Tensor], Tensor] = staticmethod(functional.silu)

    def scan(
        self, projected: Tensor, states: States, count: Tensor | None = None
    ) -> tuple[Tensor, States]:
        (state, tail), (mixed, gate, beta, decay) = states, self._split(projected)
        mixed, tail = self.kernels.conv_scan(mixed, self.weights.conv, None, tail, count)
        operands = (*self._parts(mixed), self._decay(decay), beta.float().sigmoid())
        y, state = self.kernels.delta_scan(*operands, state, count)
        return self._gated(y, gate), (state, tail)

    def advance(self, projected: Tensor, states: States) -> tuple[Tensor, States]:
        (state, tail), (mixed, gate, beta, decay) = states, self._split(projected)
        mixed, tail = self.kernels.conv_step(mixed, self.weights.conv, None, tail)
        operands = (*self._parts(mixed), self._decay(decay), beta.float().sigmoid())
        y, state = self.kernels.delta_step(*operands, state)
        return self._gated(y, gate), (state, tail)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """What goes through the convolution, z, b and a."""
        heads, _, size = self.states[0].shape[1:]
        widths = [self.weights.conv.shape[0], heads * size, heads, heads]
        return tuple(projected.split(widths, dim=1))

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [N, key heads, size], normalized, and values [N, heads, size]."""
        heads, keys, values = self.states[0].shape[1:]
        size = (mixed.shape[1] - heads * values) // 2
        query, key, value = functional.silu(mixed).split([size, size, heads * values], dim=1)
        query, key = (_normalized(part.unflatten(1, (-1, keys))) for part in (query, key))
        return query * keys**-0.5, key, value.unflatten(1, (heads, values))

    def _decay(self, raw: Tensor) -> Tensor:
        """Logarithms, float32 [N, heads], or of every key [N, heads, size]."""
        return self.weights.rates * functional.softplus(raw.float() + self.weights.step_bias)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        mean = y.square().mean(-1, keepdim=True)
        y = y * torch.rsqrt(mean + self.recurrence.norm_eps) * self.weights.norm_weight
        return y.flatten(1) * self.opened(gate.float())


class KimiDelta(GatedDelta):
    """See GatedDelta; decays are of every key."""

    weights: KimiDeltaWeights
    opened = staticmethod(torch.sigmoid)

    def branch(self, x: Input, context: ForwardContext[Input]) -> Tensor:
        w, projected = self.weights, self.project(x, context.lora_adapters)
        decay, gate = w.decay_up.weight.shape[1], w.gate_up.weight.shape[1]
        widths = [projected.shape[1] - decay - gate, decay, gate]
        mixed, of_decay, of_gate = (part.contiguous() for part in projected.split(widths, dim=1))
        decays = self.kernels.project(of_decay, w.decay_up)
        expanded = torch.cat([mixed, decays, self.kernels.project(of_gate, w.gate_up)], dim=1)
        return context.recur(expanded, self).to(self.out_proj.dtype)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        heads, keys, values = self.states[0].shape[1:]
        widths = [self.weights.conv.shape[0], heads, heads * keys, heads * values]
        mixed, beta, decay, gate = projected.split(widths, dim=1)
        return mixed, gate, beta, decay.unflatten(1, (heads, keys))


def _normalized(x: Tensor) -> Tensor:
    """Vectors of length 1, as far as transformers' epsilon lets them."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class ShortConv(RecurrentBranch):
    """A convolution of B * x, which C multiplies; its state is the convolution's."""

    def scan(
        self, projected: Tensor, states: States, count: Tensor | None = None
    ) -> tuple[Tensor, States]:
        b, c, x = projected.chunk(3, dim=1)
        w = self.weights
        y, tail = self.kernels.conv_scan(b * x, w.conv, w.conv_bias, states[0], count)
        return c * y, (tail,)

    def advance(self, projected: Tensor, states: States) -> tuple[Tensor, States]:
        b, c, x = projected.chunk(3, dim=1)
        w = self.weights
        y, tail = self.kernels.conv_step(b * x, w.conv, w.conv_bias, states[0])
        return c * y, (tail,)


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
