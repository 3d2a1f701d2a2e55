"""Mixtures of experts in the Triton language: each expert times the tokens that chose it.

A choice is a token's expert: token * experts_per_token + place, of N * experts_per_token in all.
Choices of the same expert are grouped into blocks, and a program multiplies some rows of that
expert's weight by one block. How many blocks there are does not depend on what the router says, so
that passes can be recorded; blocks without choices end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.common.quantization import FOUR_BITS
from launcher_scripts.kernels.cuda.compiling import DotTile, launcher, pdl_options, traits_of
from launcher_scripts.kernels.cuda.dot import (
    MAX_ROWS,
    MIN_BATCH,
    add_pieces,
    halves,
)
from launcher_scripts.kernels.cuda.elementwise import (
    ACTIVATION_CODES,
    activate,
    activate_gated,
    scales_of,
)
from launcher_scripts.kernels.cuda.packed import LINE_COLUMNS, add_packed, scales_at
from launcher_scripts.kernels.operands import ExpertMLPs, Linear, Router

MAX_TOKENS = 8192  # whose results lie side by side before they are summed
MAX_AT_ONCE = 2048  # choices
MAX_BATCH = 128
FEW_CHOICES = 32  # of an expert, whose weight takes longer to read than to multiply
CACHED = 40 << 20  # bytes of an expert's weight that the L2 cache keeps for its next block
TILES = {  # by the choices of a block
    16: DotTile(64, 128, 4, 4, 1),
    32: DotTile(64, 128, 4, 4, 1),
    64: DotTile(128, 64, 4, 3, 1),
    128: DotTile(128, 64, 4, 3, 1),
}
LONE_TILE = DotTile(32, 320, 2, 4, 1)  # of weights of four bits with one token
PACKED_TILES = {  # the same with more
    16: DotTile(64, 320, 2, 3, 1),
    32: DotTile(64, 192, 2, 3, 1),
    64: DotTile(64, 192, 2, 3, 1),
    128: DotTile(128, 64, 8, 3, 1),
}


@dataclass(frozen=True)
class Blocks:
    """Choices in blocks of one expert each.

    experts: int64, of each block, and perhaps more numbers; -1 where a block has no choices
    choices: int32 [count, size], -1 behind the last of an expert; None: block n has choice n alone
    """

    experts: Tensor
    choices: Tensor | None
    count: int
    size: int


@triton.jit
def _ordered(bits):
    """Integers in the order of the float32 that these bits are; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def choose_experts(
    logits,
    offsets,
    bias,
    chosen,
    weights,
    count,
    scaling_factor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    OFFSET: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PARTS: tl.constexpr,
    USE_PDL: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a token's best experts and their weights, of PARTS of logits that are summed.

    offsets are added to the logits, bias to the scores.  LANES is PER_TOKEN as a power of two.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    mask = experts < EXPERTS
    total = tl.zeros([BLOCK], tl.float32)
    if OFFSET:
        total += tl.load(offsets + experts, mask, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(logits + (part * count + token) * EXPERTS + experts, mask, other=0.0)
    if SIGMOID:
        scores = tl.sigmoid(total)
    else:
        total = tl.where(mask, total, -float("inf"))
        scores = tl.exp(total - tl.max(total, 0))
        scores /= tl.sum(scores, 0)
    ranks = scores
    if BIASED:
        ranks += tl.load(bias + experts, mask=mask, other=0.0)
    # Integers in the order of the ranks: one instruction finds a warp's largest integer.
    ranks = _ordered(tl.where(mask, ranks, -float("inf")).to(tl.int32, bitcast=True))
    lanes = tl.arange(0, LANES)
    best = tl.zeros([LANES], tl.float32)
    indices = tl.zeros([LANES], tl.int64)
    for lane in tl.static_range(PER_TOKEN):
        top = tl.max(ranks, 0)
        index = tl.min(tl.where(ranks == top, experts, EXPERTS - 1), 0)
        if BIASED:
            bits = tl.where(experts == index, scores.to(tl.int32, bitcast=True), 0)
            score = tl.max(bits, 0).to(tl.float32, bitcast=True)
        else:
            score = _ordered(top).to(tl.float32, bitcast=True)
        best = tl.where(lanes == lane, score, best)
        indices = tl.where(lanes == lane, index, indices)
        ranks = tl.where(experts == index, -0x80000000, ranks)
    if NORMALIZED:
        best /= tl.sum(best, 0)
    target = token * PER_TOKEN + lanes
    tl.store(chosen + target, indices, mask=lanes < PER_TOKEN)
    tl.store(weights + target, best * scaling_factor, mask=lanes < PER_TOKEN)


@triton.jit
def group_choices(
    chosen,
    experts,
    choices,
    count,
    USE_PDL: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BATCH: tl.constexpr,
):
    """One program: an expert's blocks, which follow those of the experts before it.

    chosen: the `count` choices;  experts [BLOCKS], choices [blocks, BATCH]: see Blocks
    PIECE: choices read at once.  BINS, PIECE and BLOCKS are powers of two, no smaller than the
    number of experts, one, and that of blocks.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    lanes = tl.arange(0, PIECE)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in tl.range(0, count, PIECE):
        read = start + lanes
        expert_ids = tl.load(chosen + read, mask=read < count, other=0).to(tl.int32)
        counts += tl.histogram(expert_ids, BINS, mask=read < count)
    needed = (counts + BATCH - 1) // BATCH
    first = tl.sum(tl.where(bins < expert, needed, 0), 0)
    end = first + tl.sum(tl.where(bins == expert, needed, 0), 0)
    position = first * BATCH
    for start in tl.range(0, count, PIECE):
        read = start + lanes
        same = tl.load(chosen + read, mask=read < count, other=-1) == expert
        ranks = tl.cumsum(same.to(tl.int32), 0)
        tl.store(choices + position + ranks - 1, read, mask=same)
        position += tl.max(ranks, 0)
    slots = position + tl.arange(0, BATCH)
    tl.store(choices + slots, -1, mask=slots < end * BATCH)
    block = tl.arange(0, BLOCKS)
    tl.store(experts + block, expert, mask=(block >= first) & (block < end))
    if expert == tl.num_programs(0) - 1:
        tl.store(experts + block, -1, mask=block >= end)


@triton.jit
def expert_rows(
    x,
    weight,
    gate_weight,
    scales,
    gate_scales,
    bias,
    gate_bias,
    factors,
    experts,
    choices,
    out,
    count,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    DOWN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    LONE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    USE_PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
):
    """act(W x) * (W2 x) of the block's expert and its choices' tokens: out [choices, OUT].

    BIASED: each product plus its expert's bias.
    LONE: there is one token, whose choices have a block each; choices are not read.
    NEIGHBOURS: how many blocks' programs for the same rows run one after the other, so that those
    of one expert share what they read of a large weight.
    With DOWN the inputs are the choices' own, and what W makes of them is multiplied by the
    choices' factors: out [PER_TOKEN, count, OUT].
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    parts, blocks = tl.num_programs(0), tl.num_programs(1)
    block, part = tl.swizzle2d(tl.program_id(1), tl.program_id(0), blocks, parts, NEIGHBOURS)
    expert = tl.load(experts + block)
    if expert < 0:
        return
    tile_rows: tl.constexpr = ROWS // 2 if GATED else ROWS
    even: tl.constexpr = OUT % tile_rows == 0 and IN % BLOCK == 0
    rows = part * tile_rows + tl.arange(0, tile_rows)
    lines = tl.arange(0, ROWS)[:, None]
    local = part * tile_rows + lines % tile_rows < OUT
    packed: tl.constexpr = weight.dtype.element_ty == tl.uint8
    line_rows = expert * OUT + tl.minimum(part * tile_rows + lines % tile_rows, OUT - 1)
    offset = line_rows * (IN // 2 if packed else IN)
    starts = weight + offset
    if GATED:
        starts = tl.where(lines < tile_rows, starts, gate_weight + offset)
    lanes = tl.arange(0, BATCH)
    if LONE:
        choice = tl.where(lanes == 0, block, -1).to(tl.int64)
    else:
        choice = tl.load(choices + block * BATCH + lanes).to(tl.int64)
    present = choice >= 0
    read = choice if DOWN else choice // PER_TOKEN
    inputs = x + tl.where(present, read, 0)[None, :] * IN
    valid = present[None, :]
    if packed:
        columns: tl.constexpr = (IN + BLOCK - 1) // BLOCK * BLOCK
        kind: tl.constexpr = scales.dtype.element_ty
        at = scales_at(scales, gate_scales, line_rows, lines < tile_rows, IN, GATED)
        value = add_packed(
            inputs, valid, starts, at, local, 0, columns, IN, even, BLOCK, kind, USE_PDL
        )
    else:
        value = add_pieces(inputs, valid, starts, local, 0, IN, IN, even, ROWS, BLOCK, BATCH)
    scaled = rows + expert * OUT
    ends = (expert + 1) * OUT
    if GATED:
        value, gate = halves(value, ROWS, BATCH)
    value *= scales_of(scales, weight, scaled, ends)[:, None]
    if BIASED:
        value += tl.load(bias + scaled, mask=rows < OUT, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate *= scales_of(gate_scales, gate_weight, scaled, ends)[:, None]
        if BIASED:
            gate += tl.load(gate_bias + scaled, mask=rows < OUT, other=0.0).to(tl.float32)[:, None]
        value = activate_gated(value, gate, ACTIVATION)
    else:
        value = activate(value, ACTIVATION)
    target = choice
    if DOWN:
        value *= tl.load(factors + choice, mask=present, other=0.0)[None, :]
        target = choice % PER_TOKEN * count + choice // PER_TOKEN
    mask = (rows < OUT)[:, None] & present[None, :]
    target = out + target[None, :] * OUT + rows[:, None]
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)


def pick_experts(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """reference.route of the router's logits in parts and without its linear's bias, float32
    [P, N, experts]."""
    (parts, count, experts), offsets = logits.shape, router.linear.bias
    selected = torch.empty(count, router.per_token, dtype=torch.int64, device=logits.device)
    weights = torch.empty(count, router.per_token, device=logits.device)
    launcher(choose_experts, (count,))(
        logits,
        logits if offsets is None else offsets,
        logits if router.bias is None else router.bias,
        selected,
        weights,
        count,
        float(router.scaling_factor),
        EXPERTS=experts,
        PER_TOKEN=router.per_token,
        SIGMOID=router.score_function == "sigmoid",
        OFFSET=offsets is not None,
        BIASED=router.bias is not None,
        NORMALIZED=router.normalized,
        PARTS=parts,
        LANES=triton.next_power_of_2(router.per_token),
        BLOCK=triton.next_power_of_2(experts),
        num_warps=1,
        **pdl_options(logits),
    )
    return selected, weights


def mixture(x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertMLPs) -> Tensor:
    """See reference.mixture. There is a part for each of a token's experts where tokens are few;
    of many these have the compute type.
    """
    count, per_token = chosen.shape
    if count > MAX_TOKENS:
        starts = range(0, count, MAX_TOKENS)
        pieces = [slice(start, start + MAX_TOKENS) for start in starts]
        sums = [mixture(x[piece], chosen[piece], weights[piece], experts) for piece in pieces]
        return torch.cat(sums, dim=1)
    blocks = blocks_of(chosen, experts.count)
    inner = x.new_empty(chosen.numel(), experts.up.weight.shape[1])
    up, gate, activation = experts.up, experts.gate, experts.activation
    _launch(x, up, inner, chosen, blocks, gate=gate, activation=activation)
    few = count <= MAX_ROWS
    shape = per_token, count, experts.down.weight.shape[1]
    parts = torch.empty(shape, dtype=torch.float32 if few else x.dtype, device=x.device)
    _launch(inner, experts.down, parts, chosen, blocks, factors=weights)
    return parts if few else parts.sum(0, keepdim=True, dtype=torch.float32)


def _launch(
    x: Tensor,
    linear: Linear,
    out: Tensor,
    chosen: Tensor,
    blocks: Blocks,
    *,
    gate: Linear | None = None,
    activation: str | None = None,
    factors: Tensor | None = None,
) -> None:
    count, per_token = chosen.shape
    out_size, in_size = linear.weight.shape[1], linear.in_size
    packed, lone = linear.quantization in FOUR_BITS, blocks.choices is None
    tile = (PACKED_TILES if packed else TILES)[blocks.size]
    if packed and lone:
        tile = LONE_TILE
    inputs_width, width = x.element_size(), linear.weight.element_size()
    if packed:
        tile = tile.dividing(in_size, LINE_COLUMNS.value)
    else:
        tile = tile._replace(block=tile.block * 2 // inputs_width)
    tile = tile.fitting(blocks.size * inputs_width // 2, width, traits_of(x.device).shared_bytes)
    products = 1 if gate is None else 2
    tile_rows = tile.rows // products
    launcher(expert_rows, (triton.cdiv(out_size, tile_rows), blocks.count))(
        x,
        linear.weight,
        linear.weight if gate is None else gate.weight,
        x if linear.scale is None else linear.scale,
        x if gate is None or gate.scale is None else gate.scale,
        x if linear.bias is None else linear.bias,
        x if gate is None or gate.bias is None else gate.bias,
        x if factors is None else factors,
        blocks.experts,
        blocks.experts if blocks.choices is None else blocks.choices,
        out,
        count,
        OUT=out_size,
        IN=in_size,
        PER_TOKEN=per_token,
        DOWN=factors is not None,
        ACTIVATION=ACTIVATION_CODES[activation],
        GATED=gate is not None,
        BIASED=linear.bias is not None,
        LONE=lone,
        NEIGHBOURS=8 if products * out_size * in_size * width > CACHED else 1,
        ROWS=tile.rows,
        BLOCK=tile.block,
        BATCH=blocks.size,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(x),
    )


def blocks_of(chosen: Tensor, experts: int) -> Blocks:
    """Blocks of the choices [N, experts_per_token] of so many experts."""
    (count, per_token), choices = chosen.shape, chosen.numel()
    size = block_size(count, per_token, experts)
    if count == 1:
        return Blocks(chosen.flatten(), None, choices, size)
    blocks = min(choices, choices // size + experts)
    max_blocks = triton.next_power_of_2(blocks)
    grouped = Blocks(
        torch.empty(max_blocks, dtype=torch.int64, device=chosen.device),
        torch.empty(blocks, size, dtype=torch.int32, device=chosen.device),
        blocks,
        size,
    )
    launcher(group_choices, (experts,))(
        chosen,
        grouped.experts,
        grouped.choices,
        choices,
        BINS=triton.next_power_of_2(experts),
        PIECE=min(MAX_AT_ONCE, triton.next_power_of_2(choices)),
        BLOCKS=max_blocks,
        BATCH=size,
        num_warps=1 if choices <= 128 else 4,
        **pdl_options(chosen),
    )
    return grouped


def block_size(count: int, per_token: int, experts: int) -> int:
    """Return the number of choices of a block: more than an expert has on average, so that few
    experts need a second block, but no more than one expert can have. Of many choices empty places
    cost more than a second block.
    """
    average = triton.cdiv(count * per_token, experts)
    expected = 2 * average if average <= FEW_CHOICES else average * 3 // 2
    size = triton.next_power_of_2(min(expected, count))
    return int(max(MIN_BATCH, min(size, MAX_BATCH)))
