"""Kernels of one program per row, in the Triton language: lookup, norm, rotary, argmax."""

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
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
):
    """One program: one head of one token, turned where it is a query or key, put in its place."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    features = tl.arange(0, BLOCK)
    held = features < SIZE
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head).to(tl.int64) * SIZE
    out = tl.load(source + features, mask=held, other=0.0).to(tl.float32)
    if HALF > 0:  # noqa: SIM102 - decided when the kernel is compiled, the next when it runs
        if head < HEADS + KV_HEADS:
            turns = features < 2 * HALF
            upper = features >= HALF
            partner = tl.where(upper, features - HALF, features + HALF)
            pair = tl.where(upper, features - HALF, features)
            other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
            cosine = tl.load(cosines + token * HALF + pair, mask=turns, other=1.0)
            sine = tl.load(sines + token * HALF + pair, mask=turns, other=0.0)
            out = out * cosine + tl.where(upper, other, -other) * sine
    if head < HEADS:
        target = query + (token * HEADS + head) * SIZE + features
        tl.store(target, out.to(query.dtype.element_ty), mask=held)
    else:
        pool_head = (head - HEADS) % KV_HEADS
        slot = tl.load(slots + token).to(tl.int64)
        place = (pool_head * pool_tokens.to(tl.int64) + slot) * SIZE + features
        if head < HEADS + KV_HEADS:
            tl.store(keys + place, out.to(keys.dtype.element_ty), mask=held)
        else:
            tl.store(values + place, out.to(values.dtype.element_ty), mask=held)


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
