"""One token of rows with states of a fixed size, in the Triton language: Mamba-2 and gated delta
nets; see reference_recurrence.py.

A step is two kernels. The first reads a state once, and writes it where it was; every program makes
the outputs of the convolution that it needs, from inputs that the second kernel moves on, when all
of the first have read them. The second has the gate and the norm, too. Where there are many states,
these are the bound: there a kernel of its own makes the convolution, and moves its inputs on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options
from launcher_scripts.kernels.cuda.convolution import (
    CHANNELS,
    convolved,
    convolved_rows,
    earlier_inputs,
    move_inputs,
)
from launcher_scripts.kernels.reference_recurrence import (
    DeltaOperands,
    Gating,
    Mamba2Operands,
    RecurrenceOperands,
)

STATE_TILE = 4096  # numbers of a program's part of a state


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as exact for a small exp(x)."""
    grown = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + grown
    small = tl.where(above == 1.0, grown, tl.log(above) * (grown / (above - 1.0)))
    return tl.where(x > 20.0, x, tl.where(above == 1.0, grown, small))


@triton.jit
def mamba2_rows(
    mixed,
    projected,
    slots,
    states,
    tails,
    conv,
    conv_bias,
    rates,
    step_bias,
    skip,
    out,
    stride,
    min_step,
    max_step,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    CONVOLVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one row, one head, BLOCK_P rows of its state [SIZE, COLUMNS].

    CONVOLVED: the convolution's outputs are in `mixed`
    """
    if USE_PDL:
        gdc_launch_dependents()
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    INNER: tl.constexpr = HEADS * SIZE
    WIDTH: tl.constexpr = INNER + 2 * GROUPS * COLUMNS
    slot = tl.load(slots + row)
    p, s = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    of_p, of_s = p < SIZE, s < COLUMNS
    mask = of_p[:, None] & of_s[None, :]
    where = (slot * HEADS + head) * (SIZE * COLUMNS) + p[:, None] * COLUMNS + s[None, :]
    state = tl.load(states + where, mask=mask, other=0.0)
    tail = tails + slot * (TAPS - 1) * WIDTH
    at_x = head * SIZE + p
    at_b = INNER + (head // (HEADS // GROUPS)) * COLUMNS + s
    at_c = at_b + GROUPS * COLUMNS
    if not CONVOLVED:
        x, x_weight = earlier_inputs(tail, conv, conv_bias, at_x, of_p, WIDTH, TAPS, BIAS)
        b, b_weight = earlier_inputs(tail, conv, conv_bias, at_b, of_s, WIDTH, TAPS, BIAS)
        c, c_weight = earlier_inputs(tail, conv, conv_bias, at_c, of_s, WIDTH, TAPS, BIAS)
    rate, bias, direct = (
        tl.load(rates + head),
        tl.load(step_bias + head),
        tl.load(skip + head),
    )
    if USE_PDL:
        gdc_wait()
    source = projected + row * stride + INNER
    step = softplus(tl.load(source + WIDTH + head).to(tl.float32) + bias)
    step = tl.minimum(tl.maximum(step, min_step), max_step)
    if CONVOLVED:
        line = mixed + row * WIDTH
        x = tl.load(line + at_x, mask=of_p, other=0.0)
        b = tl.load(line + at_b, mask=of_s, other=0.0)
        c = tl.load(line + at_c, mask=of_s, other=0.0)
    else:
        x = convolved(x, x_weight, source + at_x, of_p)
        b = convolved(b, b_weight, source + at_b, of_s)
        c = convolved(c, c_weight, source + at_c, of_s)
    state = state * tl.exp(rate * step) + (x * step)[:, None] * b[None, :]
    tl.store(states + where, state, mask=mask)
    y = tl.sum(state * c[None, :], 1) + x * direct
    tl.store(out + row * INNER + at_x, y, mask=of_p)


@triton.jit
def delta_rows(
    mixed,
    projected,
    slots,
    states,
    tails,
    conv,
    rates,
    step_bias,
    out,
    stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TAPS: tl.constexpr,
    BETA: tl.constexpr,
    DECAY: tl.constexpr,
    OF_KEYS: tl.constexpr,
    CONVOLVED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one row, one head, BLOCK_V columns of its state [KEYS, VALUES].

    BETA, DECAY: the first columns of b and of decays;  OF_KEYS: every key has decays of its own
    CONVOLVED: the convolution's outputs are in `mixed`
    """
    if USE_PDL:
        gdc_launch_dependents()
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    SHARED: tl.constexpr = KEY_HEADS * KEYS
    WIDTH: tl.constexpr = 2 * SHARED + HEADS * VALUES
    slot = tl.load(slots + row)
    k, v = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    of_k, of_v = k < KEYS, v < VALUES
    mask = of_k[:, None] & of_v[None, :]
    where = (slot * HEADS + head) * (KEYS * VALUES) + k[:, None] * VALUES + v[None, :]
    state = tl.load(states + where, mask=mask, other=0.0)
    tail = tails + slot * (TAPS - 1) * WIDTH
    at_q = (head // (HEADS // KEY_HEADS)) * KEYS + k
    at_k, at_v = SHARED + at_q, 2 * SHARED + head * VALUES + v
    if not CONVOLVED:
        query, query_weight = earlier_inputs(tail, conv, conv, at_q, of_k, WIDTH, TAPS, False)
        key, key_weight = earlier_inputs(tail, conv, conv, at_k, of_k, WIDTH, TAPS, False)
        value, value_weight = earlier_inputs(tail, conv, conv, at_v, of_v, WIDTH, TAPS, False)
    rate = tl.load(rates + head)
    if OF_KEYS:
        bias = tl.load(step_bias + head * KEYS + k, mask=of_k, other=0.0)
    else:
        bias = tl.load(step_bias + head)
    if USE_PDL:
        gdc_wait()
    source = projected + row * stride
    if CONVOLVED:
        line = mixed + row * WIDTH
        query = tl.load(line + at_q, mask=of_k, other=0.0)
        key = tl.load(line + at_k, mask=of_k, other=0.0)
        value = tl.load(line + at_v, mask=of_v, other=0.0)
    else:
        query = convolved(query, query_weight, source + at_q, of_k)
        key = convolved(key, key_weight, source + at_k, of_k)
        value = convolved(value, value_weight, source + at_v, of_v)
    query *= scale * tl.rsqrt(tl.sum(query * query, 0) + 1e-6)
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(source + BETA + head).to(tl.float32)))
    if OF_KEYS:
        raw = tl.load(source + DECAY + head * KEYS + k, mask=of_k, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * softplus(raw + bias))[:, None]
    else:
        raw = tl.load(source + DECAY + head).to(tl.float32)
        state = state * tl.exp(rate * softplus(raw + bias))
    added = beta * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * added[None, :]
    tl.store(states + where, state, mask=mask)
    tl.store(
        out + row * (HEADS * VALUES) + head * VALUES + v, tl.sum(state * query[:, None], 0), of_v
    )


@triton.jit
def gate_rows(
    y,
    projected,
    weight,
    out,
    slots,
    tails,
    stride,
    eps,
    GATE: tl.constexpr,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SHARED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    MIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOVED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one row, and SIZE channels behind their gate and norm; from PARTS on, MOVED
    inputs of the convolution that go to the row's tail, if any do.

    GATE, MIXED: the first columns of the gate, and of the convolution's inputs
    SHARED: the norm's weight is that of one part, for all of them
    """
    if USE_PDL:
        gdc_launch_dependents()
    row, part = tl.program_id(0), tl.program_id(1)
    source = projected + row.to(tl.int64) * stride
    if MOVED > 0:  # noqa: SIM102 (a constant, so that without it the other branch is not compiled)
        if part >= PARTS:
            slot = tl.load(slots + row)
            channels = (part - PARTS) * MOVED + tl.arange(0, MOVED)
            if USE_PDL:
                gdc_wait()
            move_inputs(
                tails + slot * (TAPS - 1) * WIDTH,
                source + MIXED + channels,
                *(channels, channels < WIDTH, WIDTH, TAPS),
            )
            return
    local = tl.arange(0, BLOCK)
    channels = part * SIZE + local
    mask = (local < SIZE) & (channels < INNER)
    if NORM:
        factor = tl.load(weight + (local if SHARED else channels), mask=mask, other=0.0)
    if USE_PDL:
        gdc_wait()
    gate = tl.load(source + GATE + channels, mask=mask, other=0.0).to(tl.float32)
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if not SIGMOID:
        opened *= gate
    value = tl.load(y + row.to(tl.int64) * INNER + channels, mask=mask, other=0.0).to(tl.float32)
    if GATE_FIRST or not NORM:
        value *= opened
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * factor
        if not GATE_FIRST:
            value *= opened
    where = out + row.to(tl.int64) * INNER + channels
    tl.store(where, value.to(out.dtype.element_ty), mask=mask)


def step_mamba2(projected: Tensor, layer: Mamba2Operands, slots: Tensor) -> Tensor:
    """See reference_recurrence.step_mamba2."""
    rows, (heads, size, columns) = projected.shape[0], layer.states.shape[1:]
    width, taps = layer.conv.shape
    y = torch.empty(rows, heads * size, device=projected.device)
    mixed = convolved_rows(projected, layer, slots, heads * size)
    block_s = triton.next_power_of_2(columns)
    block_p = _part(size, block_s)
    launcher(mamba2_rows, (rows, heads, triton.cdiv(size, block_p)))(
        y if mixed is None else mixed,
        projected,
        slots,
        layer.states,
        layer.tails,
        layer.conv,
        layer.conv if layer.conv_bias is None else layer.conv_bias,
        layer.rates,
        layer.step_bias,
        layer.skip,
        y,
        projected.stride(0),
        layer.min_step or 0.0,
        float("inf") if layer.max_step is None else layer.max_step,
        HEADS=heads,
        GROUPS=(width - heads * size) // (2 * columns),
        SIZE=size,
        COLUMNS=columns,
        TAPS=taps,
        BIAS=layer.conv_bias is not None,
        CONVOLVED=mixed is not None,
        BLOCK_P=block_p,
        BLOCK_S=block_s,
        num_warps=4,
        **pdl_options(projected),
    )
    return gate_and_move(y, projected, layer, slots if mixed is None else None, (0, heads * size))


def step_delta(projected: Tensor, layer: DeltaOperands, slots: Tensor) -> Tensor:
    """See reference_recurrence.step_delta."""
    rows, (heads, keys, values) = projected.shape[0], layer.states.shape[1:]
    width, taps = layer.conv.shape
    gate, beta, decay = layer.columns
    y = torch.empty(rows, heads * values, device=projected.device)
    mixed = convolved_rows(projected, layer, slots, 0)
    block_k = triton.next_power_of_2(keys)
    block_v = _part(values, block_k)
    launcher(delta_rows, (rows, heads, triton.cdiv(values, block_v)))(
        y if mixed is None else mixed,
        projected,
        slots,
        layer.states,
        layer.tails,
        layer.conv,
        layer.rates,
        layer.step_bias,
        y,
        projected.stride(0),
        keys**-0.5,
        HEADS=heads,
        KEY_HEADS=(width - heads * values) // (2 * keys),
        KEYS=keys,
        VALUES=values,
        TAPS=taps,
        BETA=beta,
        DECAY=decay,
        OF_KEYS=layer.of_keys,
        CONVOLVED=mixed is not None,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
        **pdl_options(projected),
    )
    return gate_and_move(y, projected, layer, slots if mixed is None else None, (gate, 0))


def _part(size: int, other: int) -> int:
    """How much of a state [size, other] a program has."""
    return min(int(triton.next_power_of_2(size)), max(1, STATE_TILE // other))


def gate_and_move(
    y: Tensor,
    projected: Tensor,
    layer: RecurrenceOperands,
    slots: Tensor | None,
    columns: tuple[int, int],
) -> Tensor:
    """reference_recurrence.gated, and the rows' newest inputs in their tails, if there are slots.

    columns: the first of the gate, and of the convolution's inputs
    """
    (rows, inner), (width, taps) = y.shape, layer.conv.shape
    gating = layer.gating or Gating(None)
    normalizes, weight = gating.weight is not None, y if gating.weight is None else gating.weight
    parts, size = triton.cdiv(inner, CHANNELS), CHANNELS
    if normalizes:
        parts, size = gating.groups, inner // gating.groups
    if layer.gating is None:
        parts, out = 0, y
    else:
        out = torch.empty(rows, inner, dtype=projected.dtype, device=y.device)
    moves = 0 if slots is None or taps < 2 else triton.cdiv(width, CHANNELS)
    block = triton.next_power_of_2(size)
    if not parts + moves:
        return out
    launcher(gate_rows, (rows, parts + moves))(
        y,
        projected,
        weight,
        out,
        weight if slots is None else slots,
        layer.tails,
        projected.stride(0),
        gating.eps,
        GATE=columns[0],
        INNER=inner,
        PARTS=parts,
        SIZE=size,
        NORM=normalizes,
        SHARED=normalizes and weight.numel() == size,
        GATE_FIRST=gating.gate_first,
        SIGMOID=gating.activation == "sigmoid",
        MIXED=columns[1],
        WIDTH=width,
        TAPS=taps,
        BLOCK=block,
        MOVED=CHANNELS if moves else 0,
        num_warps=8 if block > 2 * CHANNELS else 4,
        **pdl_options(projected),
    )
    return out
