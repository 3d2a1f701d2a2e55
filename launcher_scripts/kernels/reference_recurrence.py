"""The plain definition of what carries a state from token to token: convolutions over the last few,
Mamba-2, and the gated delta rule. States are float32.

Each has two forms. A scan takes the tokens of one row, in chunks of CHUNK tokens: within a chunk
all at once, from chunk to chunk by the state. A step takes one token of every row. Both give the
same but for rounding. Decays are differences of logarithms, which never overflow.

A count, int64 [], says how many of a scan's tokens there are: those behind change no state.

The operations of ops.py take what a branch's first projection makes of each token, and give what
its last one reads. Their scans take a row's states and give those behind; their steps take the
slots [B] of the rows, whose states they change in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
KEY_CHUNK = 16  # where every key has decays of its own, [tokens, tokens, keys]

States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Gating:
    """The gate of a branch's outputs, and the RMS norm of `groups` groups of their channels.

    weight: float32 [channels], or of one group, for all of them; None without a norm
    gate_first: the norm follows the gate;  activation: of the gate, silu or sigmoid
    """

    weight: Tensor | None
    eps: float = 1e-6
    groups: int = 1
    gate_first: bool = False
    activation: str = "silu"


@dataclass(frozen=True, kw_only=True)
class ConvOperands:
    """A convolution of channels; what is projected are B, C and x, all of as many channels.

    conv: [channels, K], the oldest tap first;  tails: of all slots [slots, K - 1, channels]
    """

    conv: Tensor
    conv_bias: Tensor | None = None
    tails: Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrenceOperands(ConvOperands):
    """What follows a convolution.

    states: float32, of all slots
    rates, step_bias: float32 [heads]; the logarithm of a decay is rate * softplus(step + bias)
    gating: None: the caller's
    """

    states: Tensor
    rates: Tensor
    step_bias: Tensor
    gating: Gating | None


@dataclass(frozen=True, kw_only=True)
class Mamba2Operands(RecurrenceOperands):
    """Mamba-2; what is projected are z, x, B, C and dt.

    states: [slots, heads, size, columns];  skip: float32 [heads], of x itself
    """

    skip: Tensor
    min_step: float | None = None
    max_step: float | None = None


@dataclass(frozen=True, kw_only=True)
class DeltaOperands(RecurrenceOperands):
    """A gated delta net; what is projected are queries, keys, values, z, b and a; of decays of
    every key: queries, keys, values, b, decays, z.

    states: [slots, heads, key size, value size]
    rates: also [heads, 1] and step_bias [heads, key size], of decays of every key
    """

    @property
    def of_keys(self) -> bool:
        """Return whether every key has decays of its own."""
        return self.step_bias.dim() == 2

    @property
    def columns(self) -> tuple[int, int, int]:
        """The first columns of gates, of b, and of decays."""
        heads, keys, values = self.states.shape[1:]
        first = self.conv.shape[0]
        if self.of_keys:
            return first + heads * (1 + keys), first, first + heads
        return first, first + heads * values, first + heads * (values + 1)


def scan_short_conv(
    projected: Tensor, layer: ConvOperands, states: States, count: Tensor | None = None
) -> tuple[Tensor, States]:
    """C * conv(B * x) of one row's tokens: [N, channels]."""
    b, c, x = projected.chunk(3, dim=1)
    y, tail = conv_scan(b * x, layer.conv, layer.conv_bias, states[0], count)
    return c * y, (tail,)


def step_short_conv(projected: Tensor, layer: ConvOperands, slots: Tensor) -> Tensor:
    """The same of one token of each row."""
    b, c, x = projected.chunk(3, dim=1)
    y, tails = conv_step(b * x, layer.conv, layer.conv_bias, layer.tails[slots])
    layer.tails.index_copy_(0, slots, tails)
    return c * y


def scan_mamba2(
    projected: Tensor, layer: Mamba2Operands, states: States, count: Tensor | None = None
) -> tuple[Tensor, States]:
    """Mamba-2 of one row's tokens: [N, inner]."""
    (state, tail), (gate, mixed, raw) = states, _split_mamba2(projected, layer)
    mixed, tail = conv_scan(mixed, layer.conv, layer.conv_bias, tail, count)
    x, b, c = _mamba2_parts(mixed, layer)
    y, state = mamba2_scan(x, time_steps(raw, layer), layer.rates, b, c, layer.skip, state, count)
    return gated(y.flatten(1), gate, layer.gating), (state, tail)


def step_mamba2(projected: Tensor, layer: Mamba2Operands, slots: Tensor) -> Tensor:
    """The same of one token of each row."""
    gate, mixed, raw = _split_mamba2(projected, layer)
    mixed, tails = conv_step(mixed, layer.conv, layer.conv_bias, layer.tails[slots])
    x, b, c = _mamba2_parts(mixed, layer)
    operands = x, time_steps(raw, layer), layer.rates, b, c, layer.skip
    y, states = mamba2_step(*operands, layer.states[slots])
    layer.tails.index_copy_(0, slots, tails)
    layer.states.index_copy_(0, slots, states)
    return gated(y.flatten(1), gate, layer.gating)


def _split_mamba2(projected: Tensor, layer: Mamba2Operands) -> tuple[Tensor, Tensor, Tensor]:
    conv, heads = layer.conv.shape[0], layer.rates.shape[0]
    gate, mixed, raw = projected.split([projected.shape[1] - conv - heads, conv, heads], dim=1)
    return gate, mixed, raw


def _mamba2_parts(mixed: Tensor, layer: Mamba2Operands) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, heads, size], B and C [N, groups, columns] of what the convolution makes."""
    heads, size, columns = layer.states.shape[1:]
    inner = heads * size
    group = (mixed.shape[1] - inner) // 2
    x, b, c = functional.silu(mixed).split([inner, group, group], dim=1)
    b, c = (part.unflatten(1, (-1, columns)) for part in (b, c))
    return x.unflatten(1, (heads, size)), b, c


def time_steps(raw: Tensor, layer: Mamba2Operands) -> Tensor:
    """Time steps, float32 [N, heads]."""
    steps = functional.softplus(raw.float() + layer.step_bias)
    if layer.min_step is None and layer.max_step is None:
        return steps
    return steps.clamp(layer.min_step, layer.max_step)


def scan_delta(
    projected: Tensor, layer: DeltaOperands, states: States, count: Tensor | None = None
) -> tuple[Tensor, States]:
    """A gated delta net of one row's tokens: [N, heads * value size]."""
    (state, tail), (mixed, gate, beta, decay) = states, _split_delta(projected, layer)
    mixed, tail = conv_scan(mixed, layer.conv, layer.conv_bias, tail, count)
    operands = (*_delta_parts(mixed, layer), logarithms(decay, layer), beta.float().sigmoid())
    y, state = delta_scan(*operands, state, count)
    return gated(y.flatten(1), gate, layer.gating), (state, tail)


def step_delta(projected: Tensor, layer: DeltaOperands, slots: Tensor) -> Tensor:
    """The same of one token of each row."""
    mixed, gate, beta, decay = _split_delta(projected, layer)
    mixed, tails = conv_step(mixed, layer.conv, layer.conv_bias, layer.tails[slots])
    operands = (*_delta_parts(mixed, layer), logarithms(decay, layer), beta.float().sigmoid())
    y, states = delta_step(*operands, layer.states[slots])
    layer.tails.index_copy_(0, slots, tails)
    layer.states.index_copy_(0, slots, states)
    return gated(y.flatten(1), gate, layer.gating)


def _split_delta(projected: Tensor, layer: DeltaOperands) -> tuple[Tensor, ...]:
    """What goes through the convolution, z, b and a."""
    heads, keys, values = layer.states.shape[1:]
    decays = heads * (keys if layer.of_keys else 1)
    widths = (heads * values, heads, decays)
    gate, beta, decay = (
        projected[:, first : first + width]
        for first, width in zip(layer.columns, widths, strict=True)
    )
    return projected[:, : layer.conv.shape[0]], gate, beta, decay


def _delta_parts(mixed: Tensor, layer: DeltaOperands) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [N, key heads, size], normalized, and values [N, heads, size]."""
    heads, keys, values = layer.states.shape[1:]
    size = (mixed.shape[1] - heads * values) // 2
    query, key, value = functional.silu(mixed).split([size, size, heads * values], dim=1)
    query, key = (unit_vectors(part.unflatten(1, (-1, keys))) for part in (query, key))
    return query * keys**-0.5, key, value.unflatten(1, (heads, values))


def unit_vectors(x: Tensor) -> Tensor:
    """Vectors of length 1, as far as transformers' epsilon lets them."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def logarithms(raw: Tensor, layer: DeltaOperands) -> Tensor:
    """Of decays, float32 [N, heads], or of every key [N, heads, size]."""
    raw = raw.unflatten(1, layer.step_bias.shape) if layer.of_keys else raw
    return layer.rates * functional.softplus(raw.float() + layer.step_bias)


def gated(y: Tensor, gate: Tensor, gating: Gating | None) -> Tensor:
    """Outputs y [N, channels] behind their gate and norm."""
    if gating is None:
        return y
    activation = torch.sigmoid if gating.activation == "sigmoid" else functional.silu
    opened = activation(gate.float())
    if gating.weight is None or gating.gate_first:
        y = y * opened
    if gating.weight is None:
        return y
    parts = y.unflatten(1, (gating.groups, -1))
    mean = parts.square().mean(-1, keepdim=True)
    normalized = parts * torch.rsqrt(mean + gating.eps)
    y = (normalized * gating.weight.view(-1, parts.shape[2])).flatten(1)
    return y if gating.gate_first else y * opened


def conv_scan(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel: float32 [N, channels], and the inputs that come before
    the next token.

    x: [N, channels];  weight: [channels, K], the oldest tap first
    tail: [K - 1, channels], the inputs before x, zeros before a row's first token
    """
    taps, tokens = weight.shape[1], x.shape[0]
    inputs = torch.cat([tail, x])
    full = inputs.float()
    y = sum(full[tap : tap + tokens] * weight[:, tap].float() for tap in range(taps))
    first = tokens if count is None else count
    positions = first + torch.arange(taps - 1, device=x.device)
    out = y if bias is None else y + bias.float()
    return torch.as_tensor(out), inputs[positions]


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of one token of each row: float32 [B, channels].  tails: [B, K - 1, channels]"""
    inputs = torch.cat([tails, x[:, None]], dim=1)
    y = (inputs.float() * weight.float().t()).sum(1)
    return (y if bias is None else y + bias.float()), inputs[:, 1:]


def mamba2_scan(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    state: Tensor,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-2 over one row's tokens: float32 [N, H, P], and the state behind them.

    x: [N, H, P];  steps: float32 [N, H], above 0;  rates: [H], below 0: the state decays by
    exp(rate * step)
    b, c: [N, G, S], of each group of heads;  skip: [H], of x itself;  state: [H, P, S]
    """
    heads = x.shape[1]
    x, b, c = x.float(), b.float(), c.float()
    if count is not None:
        steps = _counted(steps, count)
    outputs = []
    for first in range(0, x.shape[0], CHUNK):
        local = slice(first, first + CHUNK)
        key, query = (_of_heads(part[local], heads) for part in (b, c))  # [Q, H, S]
        decay = (rates * steps[local]).cumsum(0)  # [Q, H]
        values = x[local] * steps[local][..., None]  # [Q, H, P]
        weights = torch.einsum("qhs,khs->hqk", query, key) * _decays(decay)
        y = torch.einsum("hqk,khp->qhp", weights, values)
        y = y + torch.einsum("qhs,hps->qhp", query * decay.exp()[..., None], state)
        remaining = (decay[-1] - decay).exp()
        state = state * decay[-1].exp()[:, None, None]
        state = state + torch.einsum("khp,khs->hps", values * remaining[..., None], key)
        outputs.append(y)
    return torch.cat(outputs) + x * skip[:, None], state


def mamba2_step(
    x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of one token of each row: float32 [B, H, P].  states: [B, H, P, S]"""
    heads = x.shape[1]
    x, key, query = x.float(), _of_heads(b.float(), heads), _of_heads(c.float(), heads)
    states = states * (rates * steps).exp()[..., None, None]
    states = states + (x * steps[..., None])[..., None] * key[:, :, None]
    y = torch.einsum("bhps,bhs->bhp", states, query)
    return y + x * skip[:, None], states


def delta_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over one row's tokens: float32 [N, H, V], and the state behind them.

    query, key: float32 [N, Hk, K], normalized; each is of H / Hk heads
    value: [N, H, V];  beta: [N, H];  state: [H, K, V]
    decay: float32 [N, H], logarithms, at most 0; or [N, H, K], each key's own
    """
    heads = value.shape[1]
    query, key = _of_heads(query, heads), _of_heads(key, heads)
    value = value.float()
    if count is not None:
        decay, beta = _counted(decay, count), _counted(beta, count)
    outputs = []
    size = CHUNK if decay.dim() == 2 else KEY_CHUNK
    for first in range(0, value.shape[0], size):
        local = slice(first, first + size)
        q, k, v = (part[local].transpose(0, 1) for part in (query, key, value))  # [H, Q, ...]
        b = beta[local].t()[..., None]  # [H, Q, 1]
        full = decay[local].cumsum(0)
        grown = _by_head(full).exp()
        tokens = q.shape[1]
        lower = (b * _decayed(k, k, full)).tril(-1)
        eye = torch.eye(tokens, device=q.device)
        right = torch.cat([b * v, b * grown * k], dim=-1)
        solved = torch.linalg.solve_triangular(eye + lower, right, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        new = u - w @ state
        y = (q * grown) @ state + _decayed(q, k, full) @ new
        remaining = _by_head(full[-1] - full).exp()
        state = state * grown[:, -1, :, None] + (k * remaining).transpose(1, 2) @ new
        outputs.append(y.transpose(0, 1))
    return torch.cat(outputs), state


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of one token of each row: float32 [B, H, V].  states: [B, H, K, V]"""
    heads = value.shape[1]
    query, key = _of_heads(query, heads), _of_heads(key, heads)
    states = states * (decay[..., None] if decay.dim() == 2 else decay).exp()[..., None]
    supported = torch.einsum("bhkv,bhk->bhv", states, key)
    new = beta[..., None] * (value.float() - supported)
    states = states + key[..., None] * new[:, :, None]
    return torch.einsum("bhkv,bhk->bhv", states, query), states


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """[N, groups, ...] as of every head of the groups."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _counted(x: Tensor, count: Tensor) -> Tensor:
    """x [N, H] with zeros from `count` on."""
    present = torch.arange(x.shape[0], device=x.device) < count
    return x * present.view(-1, *[1] * (x.dim() - 1))


def _by_head(decay: Tensor) -> Tensor:
    """Decays [Q, H], or [Q, H, K], as [H, Q, 1 or K]."""
    return (decay[..., None] if decay.dim() == 2 else decay).transpose(0, 1)


def _decayed(query: Tensor, key: Tensor, full: Tensor) -> Tensor:
    """Products of query and key [H, Q, K], of what cumulated logarithms leave of a key by the time
    of a query: [H, Q, Q].
    """
    if full.dim() == 2:
        return query @ key.transpose(1, 2) * _decays(full)
    logarithms = full.transpose(0, 1)
    difference = logarithms[:, :, None] - logarithms[:, None]  # [H, Q, Q, K]
    later = torch.ones_like(difference[0, ..., 0], dtype=torch.bool).triu(1)
    left = difference.masked_fill(later[..., None], -torch.inf).exp()
    return torch.einsum("hqk,hsk,hqsk->hqs", query, key, left)


def _decays(full: Tensor) -> Tensor:
    """How much of token k is left at token q of cumulated logarithms [Q, H]: [H, Q, Q]."""
    logarithms = full.t()
    difference = logarithms[:, :, None] - logarithms[:, None]
    later = torch.ones_like(difference[0], dtype=torch.bool).triu(1)
    return difference.masked_fill(later, -torch.inf).exp()
