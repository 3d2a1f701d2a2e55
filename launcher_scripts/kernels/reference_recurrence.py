"""The plain definition of what carries a state from token to token: convolutions over the last few,
Mamba-2, and the gated delta rule. States are float32.

Each has two forms. A scan takes the tokens of one row, in chunks of CHUNK tokens: within a chunk
all at once, from chunk to chunk by the state. A step takes one token of every row. Both give the
same but for rounding. Decays are differences of logarithms, which never overflow.

A count, int64 [], says how many of a scan's tokens there are: those behind change no state.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
KEY_CHUNK = 16  # where every key has decays of its own, [tokens, tokens, keys]


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
