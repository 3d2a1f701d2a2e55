"""Mixtures of experts in the Triton language: each expert times the tokens that chose it.

A choice is a token's expert: token * experts_per_token + place, of N * experts_per_token in all.
Choices of the same expert are grouped into blocks, and a program multiplies some rows of that
expert's weight by one block. How many blocks there are does not depend on what the router says, so
that passes can be recorded; blocks without choices end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.activation import ACTIVATION_CODES, activate, activate_gated
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options, traits_of
from launcher_scripts.kernels.cuda.dot import MOST_ROWS, SMALLEST_BATCH, add_pieces, halves
from launcher_scripts.kernels.cuda.gemv_tile import scales_of
from launcher_scripts.kernels.cuda.tiles import DotTile
from launcher_scripts.kernels.operands import ExpertMLPs, Linear, Router

NONE = -1  # the expert of a block without choices, and a choice that a block has no more of
MOST_TOKENS = 2048  # whose results lie side by side before they are summed
BLOCK_OF_MANY = 64  # choices, where there are more tokens than MOST_ROWS
FEW_TILE = DotTile(64, 128, 4, 4, 1)
MANY_TILE = DotTile(128, 64, 4, 3, 1)


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
    inside = experts < EXPERTS
    total = tl.zeros([BLOCK], tl.float32)
    if OFFSET:
        total += tl.load(offsets + experts, inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(logits + (part * count + token) * EXPERTS + experts, inside, other=0.0)
    if SIGMOID:
        scores = tl.sigmoid(total)
    else:
        total = tl.where(inside, total, -float("inf"))
        scores = tl.exp(total - tl.max(total, 0))
        scores /= tl.sum(scores, 0)
    ranks = scores
    if BIASED:
        ranks += tl.load(bias + experts, mask=inside, other=0.0)
    ranks = tl.where(inside, ranks, -float("inf"))
    lanes = tl.arange(0, LANES)
    best = tl.zeros([LANES], tl.float32)
    places = tl.zeros([LANES], tl.int64)
    for lane in tl.static_range(PER_TOKEN):
        score, place = tl.max(ranks, 0, return_indices=True)
        if BIASED:
            score = tl.sum(tl.where(experts == place, scores, 0.0), 0)
        best = tl.where(lanes == lane, score, best)
        places = tl.where(lanes == lane, tl.minimum(place, EXPERTS - 1), places)
        ranks = tl.where(experts == place, -float("inf"), ranks)
    if NORMALIZED:
        best /= tl.sum(best, 0)
    target = token * PER_TOKEN + lanes
    tl.store(chosen + target, places, mask=lanes < PER_TOKEN)
    tl.store(weights + target, best * scaling_factor, mask=lanes < PER_TOKEN)


@triton.jit
def group_few(
    chosen,
    experts,
    choices,
    count,
    PER_TOKEN: tl.constexpr,
    OF_CHOICE: tl.constexpr,
    USE_PDL: tl.constexpr,
    LANES: tl.constexpr,
    BATCH: tl.constexpr,
):
    """One program: a block, whose lane n has the choice of its expert that token n made.

    The expert has the block's number, or, with OF_CHOICE, is that of the choice with this number,
    if no earlier choice is of the same. LANES is PER_TOKEN as a power of two.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    tokens = tl.arange(0, BATCH)[:, None]
    places = tl.arange(0, LANES)[None, :]
    there = (tokens < count) & (places < PER_TOKEN)
    choice = tokens * PER_TOKEN + places
    found = tl.load(chosen + choice, mask=there, other=-1)
    expert = block.to(tl.int64)
    if OF_CHOICE:
        expert = tl.load(chosen + block)
    same = there & (found == expert)
    first = tl.min(tl.where(same, choice, BATCH * LANES), None)
    empty = first != block if OF_CHOICE else first == BATCH * LANES
    tl.store(choices + block * BATCH + tl.arange(0, BATCH), tl.max(tl.where(same, choice, -1), 1))
    tl.store(experts + block, tl.where(empty, -1, expert))


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
    USE_PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
):
    """act(W x) * (W2 x) of the block's expert and its choices' tokens: out [choices, OUT].

    BIASED: each product plus its expert's bias.
    With DOWN the inputs are the choices' own, and what W makes of them is multiplied by the
    choices' factors: out [PER_TOKEN, count, OUT].
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(experts + block)
    if expert < 0:
        return
    own: tl.constexpr = ROWS // 2 if GATED else ROWS
    even: tl.constexpr = OUT % own == 0 and IN % BLOCK == 0
    rows = part * own + tl.arange(0, own)
    lines = tl.arange(0, ROWS)[:, None]
    held = part * own + lines % own < OUT
    place = (expert * OUT + tl.minimum(part * own + lines % own, OUT - 1)) * IN
    starts = weight + place
    if GATED:
        starts = tl.where(lines < own, starts, gate_weight + place)
    choice = tl.load(choices + block * BATCH + tl.arange(0, BATCH)).to(tl.int64)
    there = choice >= 0
    read = choice if DOWN else choice // PER_TOKEN
    inputs = x + tl.where(there, read, 0)[None, :] * IN
    value = add_pieces(inputs, there[None, :], starts, held, 0, IN, IN, even, ROWS, BLOCK, BATCH)
    scaled = rows + expert * OUT
    ends = (expert + 1) * OUT
    if GATED:
        value, gate = halves(value, ROWS, BATCH)
        gate *= scales_of(gate_scales, gate_weight, scaled, ends)[:, None]
        value *= scales_of(scales, weight, scaled, ends)[:, None]
        if BIASED:
            value += tl.load(bias + scaled, mask=rows < OUT, other=0.0).to(tl.float32)[:, None]
            gate += tl.load(gate_bias + scaled, mask=rows < OUT, other=0.0).to(tl.float32)[:, None]
        value = activate_gated(value, gate, ACTIVATION)
    else:
        value *= scales_of(scales, weight, scaled, ends)[:, None]
        if BIASED:
            value += tl.load(bias + scaled, mask=rows < OUT, other=0.0).to(tl.float32)[:, None]
        value = activate(value, ACTIVATION)
    target = choice
    if DOWN:
        value *= tl.load(factors + choice, mask=there, other=0.0)[None, :]
        target = choice % PER_TOKEN * count + choice // PER_TOKEN
    mask = (rows < OUT)[:, None] & there[None, :]
    target = out + target[None, :] * OUT + rows[:, None]
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)


def pick_experts(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """reference.route of the router's logits in parts and without its linear's bias, float32
    [P, N, experts]."""
    (parts, count, experts), offsets = logits.shape, router.linear.bias
    chosen = torch.empty(count, router.per_token, dtype=torch.int64, device=logits.device)
    weights = torch.empty(count, router.per_token, device=logits.device)
    launcher(choose_experts, (count,))(
        logits,
        logits if offsets is None else offsets,
        logits if router.bias is None else router.bias,
        chosen,
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
    return chosen, weights


def mixture(x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertMLPs) -> Tensor:
    """See reference.mixture. There is a part for each of a token's experts where tokens are few."""
    count, per_token = chosen.shape
    if count > MOST_TOKENS:
        starts = range(0, count, MOST_TOKENS)
        pieces = [slice(start, start + MOST_TOKENS) for start in starts]
        sums = [mixture(x[piece], chosen[piece], weights[piece], experts) for piece in pieces]
        return torch.cat(sums, dim=1)
    blocks = _blocks(chosen, experts.count)
    inner = x.new_empty(chosen.numel(), experts.up.weight.shape[1])
    up, gate, activation = experts.up, experts.gate, experts.activation
    _launch(x, up, inner, chosen, blocks, gate=gate, activation=activation)
    parts = torch.empty(per_token, count, experts.down.weight.shape[1], device=x.device)
    _launch(inner, experts.down, parts, chosen, blocks, factors=weights)
    return parts if count <= MOST_ROWS else parts.sum(0, keepdim=True)


def _launch(
    x: Tensor,
    linear: Linear,
    out: Tensor,
    chosen: Tensor,
    blocks: tuple[Tensor, Tensor],
    *,
    gate: Linear | None = None,
    activation: str | None = None,
    factors: Tensor | None = None,
) -> None:
    count, per_token = chosen.shape
    experts, choices = blocks
    batch = choices.shape[1]
    _, out_size, in_size = linear.weight.shape
    tile = FEW_TILE if count <= MOST_ROWS else MANY_TILE
    width = x.element_size()
    tile = tile._replace(block=tile.block * 2 // width)
    shared_bytes = traits_of(x.device).shared_bytes
    tile = tile.fitting(batch * width // 2, linear.weight.element_size(), shared_bytes)
    own = tile.rows if gate is None else tile.rows // 2
    launcher(expert_rows, (triton.cdiv(out_size, own), len(experts)))(
        x,
        linear.weight,
        linear.weight if gate is None else gate.weight,
        x if linear.scale is None else linear.scale,
        x if gate is None or gate.scale is None else gate.scale,
        x if linear.bias is None else linear.bias,
        x if gate is None or gate.bias is None else gate.bias,
        x if factors is None else factors,
        experts,
        choices,
        out,
        count,
        OUT=out_size,
        IN=in_size,
        PER_TOKEN=per_token,
        DOWN=factors is not None,
        ACTIVATION=ACTIVATION_CODES[activation],
        GATED=gate is not None,
        BIASED=linear.bias is not None,
        ROWS=tile.rows,
        BLOCK=tile.block,
        BATCH=batch,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(x),
    )


def _blocks(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The blocks' experts, int64 [blocks], and their choices, int32 [blocks, choices]."""
    count, per_token = chosen.shape
    if count > MOST_ROWS:
        return _blocks_of_many(chosen.flatten(), experts)
    blocks = min(chosen.numel(), experts)
    batch = max(SMALLEST_BATCH, triton.next_power_of_2(count))
    owners = torch.empty(blocks, dtype=torch.int64, device=chosen.device)
    choices = torch.empty(blocks, batch, dtype=torch.int32, device=chosen.device)
    launcher(group_few, (blocks,))(
        chosen,
        owners,
        choices,
        count,
        PER_TOKEN=per_token,
        OF_CHOICE=blocks < experts,
        LANES=triton.next_power_of_2(per_token),
        BATCH=batch,
        num_warps=1 if count * per_token <= 128 else 4,
        **pdl_options(chosen),
    )
    return owners, choices


def _blocks_of_many(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """An expert's choices fill one block after the other; chosen is flat."""
    size, device = BLOCK_OF_MANY, chosen.device
    order = chosen.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    blocks = (counts + size - 1) // size
    ends = blocks.cumsum(0)
    # A choice's place is its expert's first block's, and as far on as it is among its expert's.
    ahead = (ends - blocks) * size - (counts.cumsum(0) - counts)
    places = ahead[chosen[order]] + torch.arange(chosen.numel(), device=device)
    most = chosen.numel() // size + experts
    choices = torch.full((most * size,), NONE, dtype=torch.int32, device=device)
    choices[places] = order.int()
    owners = torch.searchsorted(ends, torch.arange(most, device=device), right=True)
    return owners.masked_fill(owners == experts, NONE), choices.view(most, size)
