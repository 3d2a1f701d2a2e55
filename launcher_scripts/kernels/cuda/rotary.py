"""Kernels of one program per row, in the Triton language: lookup, norm, rotary, argmax."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.gemv_tile import activate


@triton.jit
def normalize(x, gain, bias, out, size, eps, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """One program: layer norm (KIND 1) or RMS norm (KIND 2) of one row, statistics in float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == 1:
        values = tl.where(inside, values - tl.sum(values, 0) / size, 0.0)
    variance = tl.sum(values * values, 0) / size
    values *= 1.0 / tl.sqrt(variance + eps)
    values *= tl.load(gain + columns, mask=inside, other=0.0)
    if KIND == 1:
        values += tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(out + row * size + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pool_tokens"])
def rotate_and_store(
    qkv,
    query,
    keys,
    values,
    slots,
    cosines,
    sines,
    pool_tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program: AT_ONCE heads of one token, turned where they are queries or keys, put in their
    places."""
    token = tl.program_id(0)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    features = tl.arange(0, BLOCK)[None, :]
    held = (features < SIZE) & (head < HEADS + 2 * KV_HEADS)
    source = qkv + token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * SIZE + head * SIZE
    out = tl.load(source + features, mask=held, other=0.0).to(tl.float32)
    if HALF > 0:
        turns = (features < 2 * HALF) & (head < HEADS + KV_HEADS)
        upper = features >= HALF
        partner = tl.where(upper, features - HALF, features + HALF)
        angle = token * HALF + tl.where(upper, features - HALF, features)
        other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + angle, mask=turns, other=1.0)
        sine = tl.load(sines + angle, mask=turns, other=0.0)
        out = out * cosine + tl.where(upper, other, -other) * sine
    asks = held & (head < HEADS)
    target = query + token.to(tl.int64) * HEADS * SIZE + head * SIZE + features
    tl.store(target, out.to(query.dtype.element_ty), mask=asks)
    slot = tl.load(slots + token).to(tl.int64)
    pool_head = (head - HEADS) % KV_HEADS
    place = (pool_head * pool_tokens.to(tl.int64) + slot) * SIZE + features
    is_key = held & (head >= HEADS) & (head < HEADS + KV_HEADS)
    tl.store(keys + place, out.to(keys.dtype.element_ty), mask=is_key)
    is_value = held & (head >= HEADS + KV_HEADS)
    tl.store(values + place, out.to(values.dtype.element_ty), mask=is_value)


@triton.jit
def multiply_gate(
    up,
    gate,
    size,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """up = act(up) * gate, of `size` numbers."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    value = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    value = activate(value, ACTIVATION)
    value *= tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(up + places, value.to(up.dtype.element_ty), mask=inside)


@triton.jit
def look_up(ids, table, out, first_id, held, size, BLOCK: tl.constexpr):
    """One program: the table's row of one id in float32, zeros for an id of another rank."""
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    local = tl.load(ids + token).to(tl.int64) - first_id
    mine = (local >= 0) & (local < held)
    inside = columns < size
    values = tl.load(table + local * size + columns, mask=inside & mine, other=0.0)
    tl.store(out + token.to(tl.int64) * size + columns, values.to(tl.float32), mask=inside)


@triton.jit
def block_argmax(logits, values, places, stride, size, BLOCK: tl.constexpr):
    """One program: the largest of one block of a row and where it is, the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    row_logits = tl.load(logits + row * stride + columns, mask=columns < size, other=-float("inf"))
    largest, where = tl.max(row_logits, 0, return_indices=True)
    part = row * tl.num_programs(1) + block
    tl.store(values + part, largest)
    tl.store(places + part, block * BLOCK + where)
