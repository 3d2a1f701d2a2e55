"""Norms: kernels of their own, and folded into the kernels around them for steps of one row.

A norm gives the same of (x - shift) * unit as of x; only its eps has to be times unit**2. So the
kernel that makes x stores the operand (x - shift) * unit * gain, in the type of the weights, where
shift and unit are known before: all its programs have the same, and the operand is rounded as a
normalized x would be. Each program stores the sums of its part of (x - shift) * unit and of its
squares as well. The projection behind adds those up and knows what mean and scale are missing: with
gain g and bias b, y = (W operand - mean * W g) * scale + W b. W g and W b are known when the model
is loaded.

Shift and unit of a row whose norm is a kernel of its own (the embeddings) are its mean and its
deviation. For the two or three rows that follow, one program beside those of the attention finds
them in the row's parts: nothing waits for it. They follow most channels, not all: the shift is
their mean, and the unit makes them measure USUAL. A channel that is a million times larger comes
or goes in one sublayer; it takes the mean and the deviation along, but not these. And float16,
which holds less than 2**16 and nothing below 2**-24, has room for it beside the others' bits.

Statistics of a row, float32 [4 + 2 * parts]: shift and unit of its operand; shift and unit of the
rows that come after it; the parts' sums, then their sums of squares with eps * unit**2 for each
value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options
from launcher_scripts.kernels.cuda.peer_rows import OWNED, SHARE, receive_row
from launcher_scripts.kernels.operands import FoldedNorm, Hidden, Linear, Norm, PeerBuffers
from launcher_scripts.kernels.quantization import dequantized

NORM_CODES = {"layernorm": 1, "rmsnorm": 2}
FOLDED_AT_ONCE = 1 << 26
FULL_ROW_PARTS = 64
FEW_ROWS = 64  # which leave multiprocessors idle: more warps share a row
TYPICAL = tl.constexpr(2.0**-8)  # what most of an operand measures, its gain aside
FAR = tl.constexpr(64.0)  # a part's mean square, in the usual one, from which it is not of most
LENGTH_WEIGHT = tl.constexpr(2.0**-40)  # keeps a row's length times its unit below 2**12
MIN_VARIANCE = tl.constexpr(2.0**-22)  # in the mean square: less is rounding
MIN_SUM = tl.constexpr(2.0**-100)  # a sum of squares whose logarithm is taken
MAX_UNIT = tl.constexpr(2.0**30)  # of a row of zeros, without eps
SUMS = tl.constexpr(4)  # where the parts' sums begin


@triton.jit
def load_row_stats(row_stats, NORM: tl.constexpr, PARTS: tl.constexpr, SPREAD: tl.constexpr):
    """The sums and sums of squares of an operand's parts; SPREAD is PARTS as a power of two."""
    parts = tl.arange(0, SPREAD)
    total = tl.zeros([SPREAD], tl.float32)
    squares = tl.zeros([SPREAD], tl.float32)
    if NORM > 0:
        squares = tl.load(row_stats + SUMS + PARTS + parts, mask=parts < PARTS, other=0.0)
    if NORM == 1:
        total = tl.load(row_stats + SUMS + parts, mask=parts < PARTS, other=0.0)
    return total, squares


@triton.jit
def load_expected(row_stats, PRESCALED: tl.constexpr):
    """Shift and unit for the row that comes after the one with these statistics. PRESCALED is the
    code of the norm behind it: an RMS norm takes no mean."""
    shift = 0.0
    unit = 1.0
    if PRESCALED == 1:
        shift = tl.load(row_stats + 2)
    if PRESCALED > 0:
        unit = tl.load(row_stats + 3)
    return shift, unit


@triton.jit
def _store_shift(row_stats, shift, unit, stores):
    words = tl.arange(0, 4)
    tl.store(row_stats + words, tl.where(words % 2 == 0, shift, unit), mask=(words < SUMS) & stores)


@triton.jit
def prescale(value, mask, gain, shift, unit, row_stats, part_eps):
    """A program's part of the operand; part_eps is the norm's eps for all its values. The part's
    sums go to row_stats."""
    part = tl.program_id(0)
    value = tl.where(mask, (value - shift) * unit, 0.0)
    squares = tl.sum(value * value, 0) + part_eps * unit * unit
    tl.store(row_stats + SUMS + part, tl.sum(value, 0))
    tl.store(row_stats + SUMS + tl.num_programs(0) + part, squares)
    _store_shift(row_stats, shift, unit, part == 0)
    return value * gain


@triton.jit
def standardize(
    values,
    mask,
    row_stats,
    size,
    eps,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A whole row [BLOCK] as the norm has it, but for its gain and bias; with PARTS its statistics
    are left, as those of an operand in so many parts."""
    shift = 0.0
    if NORM == 1:
        shift = tl.sum(values, 0) / size
        values = tl.where(mask, values - shift, 0.0)
    variance = tl.sum(values * values, 0) / size
    unit = 1.0 / tl.sqrt(variance + eps)
    if PARTS > 0:
        unit = tl.minimum(unit, MAX_UNIT)
    values *= unit
    if PARTS > 0:
        parts = tl.arange(0, PARTS)
        tiled = tl.reshape(values, [BLOCK // PARTS, PARTS])
        squares = tl.sum(tiled * tiled, 0) + eps * unit * unit * size / PARTS
        _store_shift(row_stats, shift, unit, True)
        tl.store(row_stats + SUMS + parts, tl.sum(tiled, 0))
        tl.store(row_stats + SUMS + PARTS + parts, squares)
    return values


@triton.jit
def _add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def norm_terms(total, squares, IN: tl.constexpr, NORM: tl.constexpr):
    """Return the norm's mean and factor for an operand [IN], without the gain."""
    mean = 0.0
    scale = 1.0
    if NORM == 1:
        full, length = tl.reduce((total, squares), 0, _add_two)
        mean = full / IN
        length /= IN
        scale = tl.rsqrt(tl.maximum(length - mean * mean, length * MIN_VARIANCE))
    elif NORM == 2:
        scale = tl.rsqrt(tl.sum(squares, 0) / IN)
    return mean, scale


@triton.jit
def store_expected(
    row_stats,
    stores,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Leave shift and unit for the rows that come after the one [IN] with these statistics: those
    of its parts that are not far from most. Only the program with `stores` does."""
    if USE_PDL:
        gdc_wait()
    lanes = tl.arange(0, triton.next_power_of_2(PARTS))
    mask = lanes < PARTS
    total = tl.load(row_stats + SUMS + lanes, mask=mask & stores, other=0.0)
    squares = tl.load(row_stats + SUMS + PARTS + lanes, mask=mask & stores, other=1.0)
    shift = tl.load(row_stats, mask=stores, other=0.0)
    unit = tl.load(row_stats + 1, mask=stores, other=1.0)
    squares = tl.maximum(squares, MIN_SUM)
    length, logs = tl.reduce((tl.where(mask, squares, 0.0), tl.log2(squares)), 0, _add_two)
    near = mask & (squares <= FAR * tl.exp2(logs / PARTS))
    squares = tl.where(near, squares, 0.0)
    total = tl.where(near, total, 0.0)
    squares, total, count = tl.reduce((squares, total, near.to(tl.float32)), 0, _add_three)
    count *= IN / PARTS
    moved = total / count if NORM == 1 else 0.0
    variance = tl.maximum(squares / count - moved * moved, 0.0)
    following = TYPICAL * tl.rsqrt(variance + length * LENGTH_WEIGHT)
    tl.store(row_stats + 2, shift + moved / unit, mask=stores)
    tl.store(row_stats + 3, tl.minimum(unit * following, MAX_UNIT), mask=stores)


@triton.jit
def normalized(value, sums, mean, scale, NORM: tl.constexpr):
    """The product with the normalized x, but for the offset, of that with the operand."""
    if NORM == 1:
        value = (value - mean * sums) * scale
    elif NORM == 2:
        value = value * scale
    return value


@triton.jit
def normalize(
    x,
    gain,
    bias,
    out,
    size,
    eps,
    KIND: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: layer norm (KIND 1) or RMS norm (KIND 2) of one row, statistics in float32."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    values = tl.load(x + row * size + columns, mask=mask, other=0.0).to(tl.float32)
    if KIND == 1:
        values = tl.where(mask, values - tl.sum(values, 0) / size, 0.0)
    variance = tl.sum(values * values, 0) / size
    values *= 1.0 / tl.sqrt(variance + eps)
    values *= tl.load(gain + columns, mask=mask, other=0.0)
    if KIND == 1:
        values += tl.load(bias + columns, mask=mask, other=0.0)
    tl.store(out + row * size + columns, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_and_normalize(
    parts,
    offsets,
    residual,
    gain,
    bias,
    exact,
    operand,
    row_stats,
    buffer,
    exchanges,
    lane_words,
    count,
    size,
    eps,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,
    OWNED: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr,
    NORM: tl.constexpr,
    STATS_PARTS: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row of residual + the sum of parts + offsets, and the same normalized (or,
    with NORM 0, in the operand's type). STATS_PARTS: the only row's is the operand that
    this file's head describes, without the norm's bias; its statistics go to row_stats. With RANKS
    it is the sum over the ranks, which comes to the buffer: PARTS is 0."""
    if USE_PDL:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    local = tl.zeros([BLOCK], tl.float32)
    shift = tl.zeros([BLOCK], tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    if NORM > 0:
        local = tl.load(gain + columns, mask=mask, other=0.0)
    if NORM == 1 and STATS_PARTS == 0:
        shift = tl.load(bias + columns, mask=mask, other=0.0)
    if OFFSET:
        added = tl.load(offsets + columns, mask=mask, other=0.0).to(tl.float32)
    if USE_PDL and RANKS == 0:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    values = added
    if RESIDUAL:
        values += tl.load(residual + row * size + columns, mask=mask, other=0.0)
    if RANKS > 0:
        values += receive_row(
            row, columns, mask, size, buffer, exchanges, lane_words, RANKS, SHARE, OWNED
        )
        if USE_PDL:
            gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        offset = parts + (part * count + row) * size + columns
        total += tl.load(offset, mask=mask, other=0.0).to(tl.float32)
    values += total
    tl.store(exact + row * size + columns, values, mask=mask)
    if NORM > 0:
        values = standardize(values, mask, row_stats, size, eps, NORM, STATS_PARTS, BLOCK)
        values = values * local + shift
    tl.store(operand + row * size + columns, values.to(operand.dtype.element_ty), mask=mask)


def norm_code(norm: Norm | None) -> int:
    """Return the kernels' code of a norm; 0 is none."""
    return 0 if norm is None else NORM_CODES[norm.kind]


def empty_stats(parts: int, device: torch.device) -> Tensor:
    """Statistics of a row made in so many parts; see the head of this file."""
    return torch.empty(4 + 2 * parts, device=device)


def full_row_parts(size: int) -> int:
    """In how many parts a kernel that has a whole row [size] stores its statistics."""
    parts: int = min(FULL_ROW_PARTS, triton.next_power_of_2(size))
    return parts


def parts_of(row_stats: Tensor | None) -> int:
    """In how many parts the row with these statistics was made; 0 without them."""
    return 0 if row_stats is None else row_stats.numel() // 2 - 2


def part_eps(norm: Norm | None, size: int, parts: int) -> float:
    """A norm's eps for all values of one of the parts of a row [size]."""
    return 0.0 if norm is None else norm.eps * size / parts


def fold_norm(linear: Linear) -> FoldedNorm | None:
    """Return the norm's data that the linear's kernels need besides the row's statistics."""
    norm = linear.norm
    if norm is None:
        return None
    sums, offsets = None, None
    if norm.kind == "layernorm":
        sums = _times(linear, norm.weight.float())
    if norm.bias is not None:
        offsets = _times(linear, norm.bias.float())
    if linear.bias is not None:
        offsets = linear.bias.float() + (0 if offsets is None else offsets)
    return FoldedNorm(sums, offsets)


def _times(linear: Linear, vector: Tensor) -> Tensor:
    """Its weight @ vector in float32, a few rows at a time: a copy of all would be large."""
    rows = max(1, FOLDED_AT_ONCE // linear.in_size)
    parts = linear.weight.split(rows)
    scales = [None] * len(parts) if linear.scale is None else linear.scale.split(rows)
    return torch.cat(
        [dequantized(*part, linear.dtype) @ vector for part in zip(parts, scales, strict=True)]
    )


def norm(x: Tensor, weights: Norm, dtype: torch.dtype) -> Tensor:
    """See reference.norm."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(size)
    launcher(normalize, (rows,))(
        x,
        weights.weight,
        weights.weight if weights.bias is None else weights.bias,
        out,
        size,
        weights.eps,
        KIND=NORM_CODES[weights.kind],
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **pdl_options(x),
    )
    return out


def add_parts(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_of_next: Norm | None,
    dtype: torch.dtype,
    buffers: PeerBuffers | None = None,
) -> Hidden:
    """onto [N, hidden] plus the sum of parts [P, N, hidden] and a bias, as a projection behind the
    norm wants it in its type: normalized, but one row without the norm's bias. With peer buffers
    it is the sum of all ranks' parts, which come to them (see peer_rows.py)."""
    _, count, size = parts.shape
    exact = torch.empty(count, size, device=parts.device)
    operand = torch.empty_like(exact, dtype=dtype)
    code = norm_code(norm_of_next)
    prescaled = code > 0 and count == 1
    stats_parts = full_row_parts(size) if prescaled else 0
    row_stats = empty_stats(stats_parts, exact.device) if prescaled else None
    gain = exact if norm_of_next is None else norm_of_next.weight
    shift = None if norm_of_next is None else norm_of_next.bias
    block = triton.next_power_of_2(size)
    columns_of_a_warp, max_warps = (128, 32) if count <= FEW_ROWS else (256, 16)
    launcher(add_and_normalize, (count,))(
        parts,
        exact if bias is None else bias,
        exact if residual is None else residual,
        gain,
        gain if shift is None else shift,
        exact,
        operand,
        exact if row_stats is None else row_stats,
        exact if buffers is None else buffers.local,
        exact if buffers is None else buffers.exchanges,
        0 if buffers is None else buffers.lane_words,
        count,
        size,
        0.0 if norm_of_next is None else norm_of_next.eps,
        RANKS=0 if buffers is None else buffers.ranks,
        SHARE=SHARE,
        OWNED=OWNED,
        PARTS=parts.shape[0] if buffers is None else 0,
        RESIDUAL=residual is not None,
        OFFSET=bias is not None,
        NORM=code,
        STATS_PARTS=stats_parts,
        BLOCK=block,
        num_warps=max(1, min(max_warps, block // columns_of_a_warp)),
        **pdl_options(exact),
    )
    return Hidden(exact, operand, row_stats)


def hidden(exact: Tensor, norm_of_next: Norm | None, dtype: torch.dtype) -> Hidden:
    """See reference.hidden. One row's projections have their norms folded in."""
    if norm_of_next is None:
        return Hidden(exact, exact.to(dtype))
    if exact.shape[0] == 1:
        return add_parts(exact[None][:0], None, exact, norm_of_next, dtype)
    return Hidden(exact, norm(exact, norm_of_next, dtype))
