"""Prompts of gated delta nets (Yang et al. 2024) in the Triton language; see scans.py, and
reference_recurrence.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from launcher_scripts.kernels import reference_recurrence as reference
from launcher_scripts.kernels.cuda.attention_tile import MIN_SIDE
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.recurrence import gate_and_move
from launcher_scripts.kernels.cuda.scans import Chunks, in_chunks, power, remaining, rows_of
from launcher_scripts.kernels.reference_recurrence import DeltaOperands, States

DELTA_CHUNK, KEY_CHUNK = 64, 16  # tokens; the second where every key has decays of its own


@triton.jit
def decayed_products(query, key, full, local, CHUNK: tl.constexpr):
    """Products of queries and earlier keys, of what cumulated logarithms leave of every number of
    a key; of later keys zeros.

    The logarithms' differences are taken before exp, which those of a chunk alone would overflow.
    """
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    for source in range(CHUNK):
        this = (local == source)[:, None]
        earlier = tl.sum(tl.where(this, full, 0.0), 0)[None, :]
        left = tl.exp(tl.where((local >= source)[:, None], full - earlier, -float("inf")))
        left *= tl.sum(tl.where(this, key, 0.0), 0)[None, :]
        column = tl.sum(query * left, 1)
        products += tl.where((local == source)[None, :], column[:, None], 0.0)
    return products


@triton.jit
def delta_chunks(
    mixed,
    betas,
    decays,
    news,
    erased,
    tokens,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OF_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: of one chunk and head, the values that its tokens would add to a state of zeros,
    and the keys by which those of another state are taken off.

    decays: [heads, chunks * CHUNK], or OF_KEYS [chunks * CHUNK, heads, KEYS]
    news: [chunks * CHUNK, heads, VALUES];  erased: [chunks * CHUNK, heads, KEYS]
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    SHARED: tl.constexpr = KEY_HEADS * KEYS
    WIDTH: tl.constexpr = 2 * SHARED + HEADS * VALUES
    local, k, v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    rows, of_k, of_v = chunk * CHUNK + local, k < KEYS, v < VALUES
    line = head * (tl.num_programs(0) * CHUNK)
    where = rows[:, None].to(tl.int64) * HEADS + head
    beta = tl.load(betas + line + rows)
    at_k = SHARED + (head // (HEADS // KEY_HEADS)) * KEYS
    key = rows_of(mixed, at_k, rows, tokens, k, of_k, WIDTH)
    if OF_KEYS:
        decay = tl.load(decays + where * KEYS + k[None, :], mask=of_k[None, :], other=0.0)
        exact = key.to(tl.float32)
        lower = decayed_products(exact, exact, decay, local, CHUNK)
        lower = tl.where(local[:, None] > local[None, :], lower, 0.0)
        grown = tl.exp(decay)
    else:
        decay = tl.load(decays + line + rows)
        lower = remaining(decay, local[:, None] > local[None, :])
        lower *= tl.dot(key, tl.trans(key), input_precision=PRECISION)
        grown = tl.exp(decay)[:, None]
    lower *= beta[:, None]
    inverse = tl.where(local[:, None] == local[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):  # of the inverse of lower plus the identity
        this = (local == row)[:, None]
        factors = tl.sum(tl.where(this, lower, 0.0), 0)
        inverse -= tl.where(this, tl.sum(factors[:, None] * inverse, 0)[None, :], 0.0)
    value = rows_of(mixed, 2 * SHARED + head * VALUES, rows, tokens, v, of_v, WIDTH)
    new = tl.dot(inverse, value.to(tl.float32) * beta[:, None], input_precision=PRECISION)
    target = news + where * VALUES + v[None, :]
    tl.store(target, new.to(news.dtype.element_ty), mask=of_v[None, :])
    scaled = key.to(tl.float32) * grown * beta[:, None]
    key = tl.dot(inverse, scaled, input_precision=PRECISION)
    target = erased + where * KEYS + k[None, :]
    tl.store(target, key.to(erased.dtype.element_ty), mask=of_k[None, :])


@triton.jit
def delta_states(
    mixed,
    decays,
    news,
    erased,
    states,
    before,
    after,
    tokens,
    chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OF_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_V columns of a head's state, from chunk to chunk: the state before each,
    [chunks, heads, KEYS, VALUES], and the values that its tokens add.
    """
    head = tl.program_id(0)
    local, k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    of_k, of_v = k < KEYS, v < VALUES
    mask = of_k[:, None] & of_v[None, :]
    SHARED: tl.constexpr = KEY_HEADS * KEYS
    WIDTH: tl.constexpr = 2 * SHARED + HEADS * VALUES
    at_k = SHARED + (head // (HEADS // KEY_HEADS)) * KEYS
    part = head * (KEYS * VALUES) + k[:, None] * VALUES + v[None, :]
    state = tl.load(before + part, mask=mask, other=0.0)
    line = decays if OF_KEYS else decays + head * (chunks * CHUNK)
    kind: tl.constexpr = mixed.dtype.element_ty
    for chunk in range(chunks):
        rows = chunk * CHUNK + local
        where = rows[:, None].to(tl.int64) * HEADS + head
        tl.store(states + part, state.to(kind), mask=mask)
        states += HEADS * KEYS * VALUES
        key = tl.load(erased + where * KEYS + k[None, :], mask=of_k[None, :], other=0.0)
        target = news + where * VALUES + v[None, :]
        new = tl.load(target, mask=of_v[None, :], other=0.0).to(tl.float32)
        new -= tl.dot(key, state.to(kind), input_precision=PRECISION)
        tl.store(target, new.to(kind), mask=of_v[None, :])
        key = rows_of(mixed, at_k, rows, tokens, k, of_k, WIDTH)
        if OF_KEYS:
            decay = tl.load(line + where * KEYS + k[None, :], mask=of_k[None, :], other=0.0)
            last = tl.sum(tl.where((local == CHUNK - 1)[:, None], decay, 0.0), 0)
            key = (key.to(tl.float32) * tl.exp(last[None, :] - decay)).to(kind)
            state *= tl.exp(last)[:, None]
        else:
            decay, last = tl.load(line + rows), tl.load(line + chunk * CHUNK + CHUNK - 1)
            new *= tl.exp(last - decay)[:, None]
            state *= tl.exp(last)
        state = tl.dot(tl.trans(key), new.to(kind), state, input_precision=PRECISION)
    tl.store(after + part, state, mask=mask)


@triton.jit
def delta_outputs(
    mixed,
    decays,
    news,
    states,
    out,
    tokens,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OF_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one chunk's outputs of one head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    SHARED: tl.constexpr = KEY_HEADS * KEYS
    WIDTH: tl.constexpr = 2 * SHARED + HEADS * VALUES
    local, k, v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    rows, of_k, of_v = chunk * CHUNK + local, k < KEYS, v < VALUES
    at_q = (head // (HEADS // KEY_HEADS)) * KEYS
    query = rows_of(mixed, at_q, rows, tokens, k, of_k, WIDTH)
    where = (chunk.to(tl.int64) * HEADS + head) * (KEYS * VALUES)
    where = where + k[:, None] * VALUES + v[None, :]
    state = tl.load(states + where, mask=of_k[:, None] & of_v[None, :], other=0.0)
    key = rows_of(mixed, SHARED + at_q, rows, tokens, k, of_k, WIDTH)
    where = rows[:, None].to(tl.int64) * HEADS + head
    if OF_KEYS:
        decay = tl.load(decays + where * KEYS + k[None, :], mask=of_k[None, :], other=0.0)
        exact = query.to(tl.float32)
        grown = (exact * tl.exp(decay)).to(state.dtype)
        y = tl.dot(grown, state, input_precision=PRECISION)
        weights = decayed_products(exact, key.to(tl.float32), decay, local, CHUNK)
    else:
        decay = tl.load(decays + head * (tl.num_programs(0) * CHUNK) + rows)
        y = tl.dot(query, state, input_precision=PRECISION) * tl.exp(decay)[:, None]
        weights = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weights *= remaining(decay, local[:, None] >= local[None, :])
    new = tl.load(news + where * VALUES + v[None, :], mask=of_v[None, :], other=0.0)
    y = tl.dot(weights.to(new.dtype), new, y, input_precision=PRECISION)
    mask = (rows < tokens)[:, None] & of_v[None, :]
    tl.store(out + where * VALUES + v[None, :], y.to(out.dtype.element_ty), mask=mask)


def scan_delta(
    projected: Tensor, layer: DeltaOperands, states: States, count: Tensor | None = None
) -> tuple[Tensor, States]:
    """See reference_recurrence.scan_delta."""
    (before, tail), (heads, keys, values) = states, layer.states.shape[1:]
    inner, (gate, beta, decay) = heads * values, layer.columns
    size = KEY_CHUNK if layer.of_keys else DELTA_CHUNK
    parts = in_chunks(projected, layer, tail, count, size, (0, beta, decay), inner)
    rows, tokens = parts.number * parts.size, projected.shape[0]
    decays = parts.decays
    if layer.of_keys:
        decays = _of_keys(projected[:, decay : decay + heads * keys], layer, count, parts)
    news, erased = (projected.new_empty(rows, heads, size) for size in (values, keys))
    of_chunks = projected.new_empty(parts.number, heads, keys, values)
    after = torch.empty(heads, keys, values, device=projected.device)
    block_v = max(MIN_SIDE, power(values))
    narrow, warps = min(block_v, 32), 8 if parts.precision == "ieee" else 4
    sizes = {
        "HEADS": heads,
        "KEY_HEADS": (layer.conv.shape[0] - inner) // (2 * keys),
        "KEYS": keys,
        "VALUES": values,
        "CHUNK": parts.size,
        "BLOCK_K": max(MIN_SIDE, power(keys)),
        "OF_KEYS": layer.of_keys,
        "PRECISION": parts.precision,
    }
    launcher(delta_chunks, (parts.number, heads))(
        *(parts.mixed, parts.steps, decays, news, erased, tokens),
        BLOCK_V=block_v,
        num_warps=warps,
        **sizes,
    )
    launcher(delta_states, (heads, triton.cdiv(values, narrow)))(
        *(parts.mixed, decays, news, erased, of_chunks, before.contiguous(), after),
        *(tokens, parts.number),
        BLOCK_V=narrow,
        num_warps=warps,
        num_stages=2,
        **sizes,
    )
    launcher(delta_outputs, (parts.number, heads))(
        *(parts.mixed, decays, news, of_chunks, parts.out, tokens),
        BLOCK_V=block_v,
        num_warps=warps,
        **sizes,
    )
    return gate_and_move(parts.out, projected, layer, None, (gate, 0)), (after, parts.tail)


def _of_keys(raw: Tensor, layer: DeltaOperands, count: Tensor | None, parts: Chunks) -> Tensor:
    """Logarithms of every key's decays, cumulated in each chunk: [chunks * size, heads, keys]."""
    decays = reference.logarithms(raw, layer)
    if count is not None:
        present = torch.arange(len(decays), device=raw.device) < count
        decays = decays * present[:, None, None]
    padded = functional.pad(decays, (0, 0, 0, 0, 0, parts.number * parts.size - len(decays)))
    full: Tensor = padded.unflatten(0, (parts.number, parts.size)).cumsum(1).flatten(0, 1)
    return full
