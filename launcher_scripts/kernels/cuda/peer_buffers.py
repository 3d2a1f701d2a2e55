"""A projection's sum over GPUs that write into each other's memory, in the Triton language.

Every rank has a buffer that its peers can address: two halves, each of one lane per rank. A rank
writes its part of a value into its own lane of every rank's buffer, as a word of 8 bytes that holds
the value and the number of the exchange. The receiver waits for words with that number; words of 8
bytes arrive whole, so nothing else needs to synchronize. Exchanges use the halves in turn: a rank
that sends for the next but one has received the next from every rank, and each of them had read its
buffer before it sent that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options, row_tile
from launcher_scripts.kernels.cuda.elementwise import scales_of
from launcher_scripts.kernels.cuda.gemv import begin, multiply, vector
from launcher_scripts.kernels.cuda.lora import add_delta, load_inner, load_up, lora_arguments
from launcher_scripts.kernels.cuda.norm import (
    empty_stats,
    load_expected,
    norm_code,
    part_eps,
    prescale,
)
from launcher_scripts.kernels.cuda.peer_rows import SHARE, add_lanes, missing, send
from launcher_scripts.kernels.operands import Hidden, Linear, Norm, PeerBuffers


@triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["adapters"])
def gemv_to_peers(
    x,
    weight,
    scales,
    lora_up,
    lora_inner,
    adapters,
    addresses,
    exchanges,
    rank,
    lane_words,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,
    LORA: tl.constexpr,
    USE_PDL: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """W x of this rank's part of x, to the buffers at the addresses. LORA: see lora_arguments."""
    if USE_PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    even: tl.constexpr = OUT % ROWS == 0
    started = begin(weight, scales, rows, OUT, IN, even, BLOCK)
    row_scale = scales_of(scales, weight, rows, OUT)
    mask = rows < OUT
    up, _ = load_up(lora_up, adapters, rows, rows, mask, LORA, False)
    if USE_PDL:
        gdc_wait()
    number = tl.load(exchanges + rows // SHARE, mask=mask, other=0, cache_modifier=".cg") + 1
    inner, _ = load_inner(lora_inner, rows, rows, mask, LORA, False)
    value, _ = multiply(x, started, started, OUT, IN, False, ROLLED, even, USE_PDL)
    value = add_delta(value * row_scale, up, inner, LORA)
    send(value, number, mask, rows, addresses, rank, lane_words, RANKS)


@triton.jit
def add_from_peers(
    buffer,
    exchanges,
    offsets,
    residual,
    residual_stats,
    gain,
    exact,
    operand,
    row_stats,
    part_eps,
    lane_words,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    SHARE: tl.constexpr,
    OFFSET: tl.constexpr,
    PRESCALED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: SHARE values of residual + the sum of what all ranks sent + offsets.

    `operand` gets them in its type; with PRESCALED, the code of a norm behind, as the operand for
    that norm (see norm.py), whose gain is `gain`; their statistics, with part_eps,
    go to `row_stats`.
    LANES is RANKS as a power of two.
    """
    if USE_PDL:
        gdc_launch_dependents()
    part = tl.program_id(0)
    columns = part * SHARE + tl.arange(0, SHARE)
    mask = columns < SIZE
    gains = vector(gain, columns, SIZE, PRESCALED > 0)
    added = vector(offsets, columns, SIZE, OFFSET)
    if USE_PDL:
        gdc_wait()
    added += tl.load(residual + columns, mask=mask, other=0.0)
    shift, unit = load_expected(residual_stats, PRESCALED)
    number = tl.load(exchanges + part, cache_modifier=".cg") + 1
    added += add_lanes(buffer, number, columns, mask, lane_words, RANKS, LANES)
    tl.store(exchanges + part, number)
    tl.store(exact + columns, added, mask=mask)
    if PRESCALED > 0:
        added = prescale(added, mask, gains, shift, unit, row_stats, part_eps)
    tl.store(operand + columns, added.to(operand.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rank"])
def exchange_best(
    values,
    ids,
    tokens,
    buffer,
    addresses,
    exchanges,
    rank,
    lane_words,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    SHARE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: the id of a row's largest value of all ranks', the lowest rank's of equal ones.

    A row's value and its id are the first two words of its SHARE.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    number = tl.load(exchanges + row, cache_modifier=".cg") + 1
    half = (number & 1) * RANKS
    tag = number.to(tl.int64) << 32
    bits = tl.load(values + row).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    local_id = tl.load(ids + row)
    for receiver in tl.static_range(RANKS):
        target = tl.load(addresses + receiver).to(tl.pointer_type(tl.int64))
        target += (half + rank) * lane_words + row * SHARE
        tl.store(target, tag | bits)
        tl.store(target + 1, tag | local_id)
    lanes = tl.arange(0, LANES)
    awaited = lanes < RANKS
    words = buffer + (half + lanes) * lane_words + row * SHARE
    result = tl.load(words, mask=awaited, other=0, volatile=True)
    indices = tl.load(words + 1, mask=awaited, other=0, volatile=True)
    while missing((result >> 32 != number) | (indices >> 32 != number), awaited):
        result = tl.load(words, mask=awaited, other=0, volatile=True)
        indices = tl.load(words + 1, mask=awaited, other=0, volatile=True)
    value = tl.where(awaited, result.to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    _, winner = tl.max(value, 0, return_indices=True)
    tl.store(exchanges + row, number)
    tl.store(tokens + row, tl.sum(tl.where(lanes == winner, indices & 0xFFFFFFFF, 0), 0))


def send_product(x: Tensor, linear: Linear, buffers: PeerBuffers) -> None:
    """linear(x) [1, out] without its bias, to every rank's buffer."""
    out_size, in_size = linear.weight.shape[0], linear.in_size
    tile = row_tile("add", out_size, in_size, linear.quantization)
    launcher(gemv_to_peers, (triton.cdiv(out_size, tile.rows),))(
        x,
        weight=linear.weight,
        scales=x if linear.scale is None else linear.scale,
        addresses=buffers.addresses,
        exchanges=buffers.exchanges,
        rank=buffers.rank,
        lane_words=buffers.lane_words,
        OUT=out_size,
        IN=in_size,
        RANKS=buffers.ranks,
        SHARE=SHARE,
        ROLLED=tile.rolled,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=1,
        **lora_arguments(x, linear),
        **pdl_options(x),
    )


def receive_sum(
    bias: Tensor | None, residual: Hidden, norm_of_next: Norm | None, buffers: PeerBuffers
) -> Hidden:
    """Hidden states [1, hidden] plus what all ranks sent and a bias, for the next projection."""
    size = residual.exact.shape[1]
    programs = triton.cdiv(size, SHARE)
    exact, operand = torch.empty_like(residual.exact), torch.empty_like(residual.operand)
    row_stats = None if norm_of_next is None else empty_stats(programs, exact.device)
    launcher(add_from_peers, (programs,))(
        buffers.local,
        buffers.exchanges,
        exact if bias is None else bias,
        residual.exact,
        exact if norm_of_next is None else residual.row_stats,
        exact if norm_of_next is None else norm_of_next.weight,
        exact,
        operand,
        exact if row_stats is None else row_stats,
        part_eps(norm_of_next, size, programs),
        buffers.lane_words,
        SIZE=size,
        RANKS=buffers.ranks,
        LANES=triton.next_power_of_2(buffers.ranks),
        SHARE=SHARE,
        OFFSET=bias is not None,
        PRESCALED=norm_code(norm_of_next),
        num_warps=1,
        **pdl_options(exact),
    )
    return Hidden(exact, operand, row_stats)


def max_exchanged_rows(buffers: PeerBuffers) -> int:
    """Maximum number of rows that can exchange a few words each."""
    return buffers.lane_words // SHARE


def exchange_largest(values: Tensor, ids: Tensor, buffers: PeerBuffers) -> Tensor:
    """reference.largest_of_ranks for up to most_rows rows; every rank calls it."""
    tokens = torch.empty_like(ids)
    launcher(exchange_best, (values.shape[0],))(
        values,
        ids,
        tokens,
        buffers.local,
        buffers.addresses,
        buffers.exchanges,
        buffers.rank,
        buffers.lane_words,
        RANKS=buffers.ranks,
        LANES=triton.next_power_of_2(buffers.ranks),
        SHARE=SHARE,
        num_warps=1,
        **pdl_options(values),
    )
    return tokens
