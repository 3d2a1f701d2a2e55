"""Prompts of rows with states of a fixed size, in the Triton language: what all share, and Mamba-2
(Dao and Gu 2024); see reference_recurrence.py.

Tokens go in chunks. What a chunk adds to a state, and what its tokens make of each other, are
products of matrices; a loop over the chunks leaves the state before each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher_scripts.kernels.cuda.attention_tile import MIN_SIDE
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.convolution import silu
from launcher_scripts.kernels.cuda.recurrence import gate_and_move, softplus
from launcher_scripts.kernels.reference_recurrence import (
    DeltaOperands,
    Mamba2Operands,
    RecurrenceOperands,
    States,
)

MAMBA2_CHUNK, EXACT_CHUNK = 128, 16  # tokens; the second of float32
STATE_BLOCK = 1024  # numbers of a state that go from chunk to chunk together


@triton.jit
def convolve_tokens(
    projected,
    tail,
    weight,
    bias,
    out,
    tokens,
    stride,
    scale,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program: silu of the convolution of BLOCK_T tokens and SIZE channels.

    QUERIES: of delta nets, so many programs have a head's queries, and as many its keys; these are
    normalized, and queries are multiplied by the scale
    """
    part, local = tl.program_id(1), tl.arange(0, BLOCK_C)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = part * SIZE + local
    of_channels = (local < SIZE) & (channels < WIDTH)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIAS:
        total += tl.load(bias + channels, mask=of_channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight + channels * TAPS + tap, mask=of_channels, other=0.0)
        inputs = rows + (tap + 1 - TAPS)
        present = (inputs >= 0) & (inputs < tokens)
        source = projected + inputs[:, None].to(tl.int64) * stride + FIRST + channels[None, :]
        x = tl.load(source, mask=present[:, None] & of_channels[None, :], other=0.0)
        if tl.program_id(0) == 0:
            earlier = (inputs < 0)[:, None] & of_channels[None, :]
            source = tail + (inputs + TAPS - 1)[:, None] * WIDTH + channels[None, :]
            x = tl.where(earlier, tl.load(source, mask=earlier, other=0.0), x)
        total += x.to(tl.float32) * factor.to(tl.float32)[None, :]
    total = silu(total)
    if part < 2 * QUERIES:
        total *= tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None]
        if part < QUERIES:
            total *= scale
    where = out + rows[:, None].to(tl.int64) * WIDTH + channels[None, :]
    mask = (rows < tokens)[:, None] & of_channels[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def chunk_decays(
    projected,
    rates,
    step_bias,
    counts,
    steps,
    decays,
    tokens,
    stride,
    min_step,
    max_step,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    HEADS: tl.constexpr,
    DELTA: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program: one chunk's time steps, or b of DELTA nets, of some heads, and the logarithms of
    decays since the chunk's start: [heads, chunks * CHUNK].  STEP, DECAY: their first columns
    """
    rows = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    of_heads = heads < HEADS
    present = rows < tokens
    if COUNT:
        present = present & (rows < tl.load(counts))
    mask = present[:, None] & of_heads[None, :]
    rate = tl.load(rates + heads, mask=of_heads, other=0.0)
    bias = tl.load(step_bias + heads, mask=of_heads, other=0.0)
    source = projected + rows[:, None].to(tl.int64) * stride + heads[None, :]
    raw = tl.load(source + DECAY, mask=mask, other=0.0).to(tl.float32)
    grown = softplus(raw + bias[None, :])
    if DELTA:
        beta = tl.load(source + STEP, mask=mask, other=0.0).to(tl.float32)
        step = 1.0 / (1.0 + tl.exp(-beta))
    else:
        grown = tl.minimum(tl.maximum(grown, min_step), max_step)
        step = grown
    decay = tl.cumsum(tl.where(mask, grown * rate[None, :], 0.0), 0)
    where = heads[None, :] * (tl.num_programs(0) * CHUNK) + rows[:, None]
    tl.store(steps + where, tl.where(mask, step, 0.0), mask=of_heads[None, :])
    tl.store(decays + where, decay, mask=of_heads[None, :])


@triton.jit
def rows_of(source, first, rows, tokens, columns, held, WIDTH: tl.constexpr):
    """Some columns from `first` on of tokens, zeros behind the last."""
    where = source + rows[:, None].to(tl.int64) * WIDTH + first + columns[None, :]
    return tl.load(where, mask=(rows < tokens)[:, None] & held[None, :], other=0.0)


@triton.jit
def remaining(decay, lower):
    """How much of each token is left at each one behind it."""
    return tl.exp(tl.where(lower, decay[:, None] - decay[None, :], -float("inf")))


@triton.jit
def mamba2_chunks(
    mixed,
    steps,
    decays,
    states,
    tokens,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: what a chunk adds to a head's state; states: [chunks, heads, SIZE, COLUMNS]"""
    chunk, head = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = HEADS * SIZE + 2 * GROUPS * COLUMNS
    rows, p, s = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    of_p, of_s = p < SIZE, s < COLUMNS
    line = head * (tl.num_programs(0) * CHUNK)
    step, decay = tl.load(steps + line + rows), tl.load(decays + line + rows)
    last = tl.load(decays + line + chunk * CHUNK + CHUNK - 1)
    x = rows_of(mixed, head * SIZE, rows, tokens, p, of_p, WIDTH)
    group = HEADS * SIZE + (head // (HEADS // GROUPS)) * COLUMNS
    b = rows_of(mixed, group, rows, tokens, s, of_s, WIDTH)
    scaled = (x.to(tl.float32) * (step * tl.exp(last - decay))[:, None]).to(b.dtype)
    added = tl.dot(tl.trans(scaled), b, input_precision=PRECISION)
    where = (chunk.to(tl.int64) * HEADS + head) * (SIZE * COLUMNS)
    where = where + p[:, None] * COLUMNS + s[None, :]
    tl.store(states + where, added, mask=of_p[:, None] & of_s[None, :])


@triton.jit
def pass_states(
    states,
    decays,
    before,
    after,
    chunks,
    HEADS: tl.constexpr,
    NUMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: some numbers of a head's state, from chunk to chunk. What chunks add to it makes
    room for the states before them.
    """
    head, local = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = local < NUMBERS
    state = tl.load(before + head * NUMBERS + local, mask=mask, other=0.0)
    line = decays + head * (chunks * CHUNK) + CHUNK - 1
    where = states + head * NUMBERS + local
    added = tl.load(where, mask=mask, other=0.0)
    for chunk in range(chunks):
        later = where + HEADS * NUMBERS
        following = tl.load(later, mask=mask & (chunk + 1 < chunks), other=0.0)
        tl.store(where, state, mask=mask)
        state = state * tl.exp(tl.load(line + chunk * CHUNK)) + added
        where, added = later, following
    tl.store(after + head * NUMBERS + local, state, mask=mask)


@triton.jit
def mamba2_outputs(
    mixed,
    steps,
    decays,
    states,
    skip,
    out,
    tokens,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one chunk's outputs of one head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    INNER: tl.constexpr = HEADS * SIZE
    WIDTH: tl.constexpr = INNER + 2 * GROUPS * COLUMNS
    local, p, s = tl.arange(0, CHUNK), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    rows, of_p, of_s = chunk * CHUNK + local, p < SIZE, s < COLUMNS
    line = head * (tl.num_programs(0) * CHUNK)
    step, decay = tl.load(steps + line + rows), tl.load(decays + line + rows)
    group = INNER + (head // (HEADS // GROUPS)) * COLUMNS
    c = rows_of(mixed, group + GROUPS * COLUMNS, rows, tokens, s, of_s, WIDTH)
    where = (chunk.to(tl.int64) * HEADS + head) * (SIZE * COLUMNS)
    where = where + p[None, :] * COLUMNS + s[:, None]
    state = tl.load(states + where, mask=of_p[None, :] & of_s[:, None], other=0.0).to(c.dtype)
    y = tl.dot(c, state, input_precision=PRECISION) * tl.exp(decay)[:, None]
    b = rows_of(mixed, group, rows, tokens, s, of_s, WIDTH)
    x = rows_of(mixed, head * SIZE, rows, tokens, p, of_p, WIDTH)
    left = remaining(decay, local[:, None] >= local[None, :]) * step[None, :]
    weights = tl.dot(c, tl.trans(b), input_precision=PRECISION) * left
    y = tl.dot(weights.to(x.dtype), x, y, input_precision=PRECISION)
    y += x.to(tl.float32) * tl.load(skip + head)
    where = out + rows[:, None].to(tl.int64) * INNER + head * SIZE + p[None, :]
    mask = (rows < tokens)[:, None] & of_p[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=mask)


class Chunks(NamedTuple):
    """Tokens of a row in chunks.

    mixed: what the convolution makes [N, channels];  tail: its inputs before the next token
    steps, decays: see chunk_decays;  out: for the outputs before their gate
    """

    size: int
    number: int
    precision: str
    mixed: Tensor
    tail: Tensor
    steps: Tensor
    decays: Tensor
    out: Tensor


def in_chunks(
    projected: Tensor,
    layer: RecurrenceOperands,
    tail: Tensor,
    count: Tensor | None,
    chunk: int,
    columns: tuple[int, int, int],
    inner: int,
) -> Chunks:
    """columns: the first of the convolution's inputs, of time steps or b, and of decays"""
    tokens, device, (width, taps) = projected.shape[0], projected.device, layer.conv.shape
    exact = projected.dtype == torch.float32
    heads, keys = layer.states.shape[1:3]
    is_delta = isinstance(layer, DeltaOperands)
    size, queries = (keys, (width - inner) // (2 * keys)) if is_delta else (128, 0)
    mixed = projected.new_empty(tokens, width)
    launcher(convolve_tokens, (triton.cdiv(tokens, 16), triton.cdiv(width, size)))(
        projected,
        tail,
        layer.conv,
        layer.conv if layer.conv_bias is None else layer.conv_bias,
        mixed,
        tokens,
        projected.stride(0),
        keys**-0.5,
        FIRST=columns[0],
        WIDTH=width,
        TAPS=taps,
        BIAS=layer.conv_bias is not None,
        SIZE=size,
        QUERIES=queries,
        BLOCK_T=16,
        BLOCK_C=power(size),
        num_warps=4,
    )
    chunk = EXACT_CHUNK if exact else chunk
    chunk = min(chunk, max(MIN_SIDE, power(tokens)))
    number = triton.cdiv(tokens, chunk)
    steps, decays = (torch.empty(heads, number * chunk, device=device) for _ in range(2))
    limits = (layer.min_step, layer.max_step) if isinstance(layer, Mamba2Operands) else (None, None)
    launcher(chunk_decays, (number, triton.cdiv(heads, 16)))(
        projected,
        layer.rates,
        layer.step_bias,
        decays if count is None else count,
        steps,
        decays,
        tokens,
        projected.stride(0),
        limits[0] or 0.0,
        float("inf") if limits[1] is None else limits[1],
        STEP=columns[1],
        DECAY=columns[2],
        HEADS=heads,
        DELTA=is_delta,
        COUNT=count is not None,
        CHUNK=chunk,
        BLOCK_H=16,
        num_warps=4,
    )
    inputs = projected[:, columns[0] : columns[0] + width]
    if count is None:
        tail = torch.cat((tail, inputs[max(0, tokens + 1 - taps) :]))[tail.shape[0] * -1 :]
        tail = tail if taps > 1 else tail[:0]
    else:
        tail = torch.cat((tail, inputs))[count + torch.arange(taps - 1, device=device)]
    kind = torch.float32 if layer.gating is None else projected.dtype
    out = torch.empty(tokens, inner, dtype=kind, device=device)
    precision = "ieee" if exact else "tf32"
    return Chunks(chunk, number, precision, mixed, tail, steps, decays, out)


def scan_mamba2(
    projected: Tensor, layer: Mamba2Operands, states: States, count: Tensor | None = None
) -> tuple[Tensor, States]:
    """See reference_recurrence.scan_mamba2."""
    (before, tail), (heads, size, columns) = states, layer.states.shape[1:]
    inner, width = heads * size, layer.conv.shape[0]
    raw = inner + width
    parts = in_chunks(projected, layer, tail, count, MAMBA2_CHUNK, (inner, raw, raw), inner)
    of_chunks = torch.empty(parts.number, heads, size, columns, device=projected.device)
    after = torch.empty_like(of_chunks[0])
    sizes = {
        "HEADS": heads,
        "GROUPS": (width - inner) // (2 * columns),
        "SIZE": size,
        "COLUMNS": columns,
        "CHUNK": parts.size,
        "BLOCK_P": max(MIN_SIDE, power(size)),
        "BLOCK_S": max(MIN_SIDE, power(columns)),
        "PRECISION": parts.precision,
    }
    tokens, grid = projected.shape[0], (parts.number, heads)
    launcher(mamba2_chunks, grid)(
        parts.mixed, parts.steps, parts.decays, of_chunks, tokens, num_warps=4, **sizes
    )
    numbers = size * columns
    launcher(pass_states, (heads, triton.cdiv(numbers, STATE_BLOCK)))(
        of_chunks,
        parts.decays,
        before.contiguous(),
        after,
        parts.number,
        HEADS=heads,
        NUMBERS=numbers,
        CHUNK=parts.size,
        BLOCK=STATE_BLOCK,
        num_warps=4,
    )
    launcher(mamba2_outputs, grid)(
        *(parts.mixed, parts.steps, parts.decays, of_chunks, layer.skip, parts.out, tokens),
        num_warps=4 if parts.size == 64 else 8,
        **sizes,
    )
    return gate_and_move(parts.out, projected, layer, None, (0, inner)), (after, parts.tail)


def power(size: int) -> int:
    return int(triton.next_power_of_2(size))
