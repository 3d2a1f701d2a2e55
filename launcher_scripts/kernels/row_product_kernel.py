"""A few rows of a weight times a vector: the inside of the kernels in gemv_kernels.py.

The weight is read in wide pieces, each once.

A norm before a projection needs no kernel of its own. With gain g and bias b,
W (g (x - mean) / deviation + b) = (W g x - mean * W g) / deviation + W b: the program sums x and
its squares while it multiplies; W g and W b plus the bias are known when the model is loaded.

A weight in bytes is q * scale of its row, kept as the byte q + 128 (see quantization.py). No
instruction makes numbers of bytes at the speed they are read. But the bits of a small integer are
a float32, too, of that many of its smallest steps of 2^-149; multipliers take those as they are.
So the kernel multiplies such numbers with an x made large, and takes 128 times the sum of x off.
"""

from __future__ import annotations

import triton
import triton.language as tl

from launcher_scripts.kernels.quantization import ZERO_POINT

RAISED = tl.constexpr(2.0**80)  # times x: its products with steps of 2^-149 are normal numbers
LOWERED = tl.constexpr(2.0 ** (149 - 80))
ZERO = tl.constexpr(float(ZERO_POINT))
PER_LOAD = tl.constexpr(8)  # columns a thread holds side by side: 16 bytes of x


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a code in fused.ACTIVATION_CODES."""
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    elif ACTIVATION == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 4:
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 5:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit
def load_tile(
    weight, base, rows, columns, first, OUT: tl.constexpr, IN: tl.constexpr, EVEN: tl.constexpr
):
    """Columns from `first` on of the rows of a weight; zeros outside."""
    base = tl.max_contiguous(base, [1, PER_LOAD])  # bytes, too, are held as x is
    if EVEN:
        tile = tl.load(weight + base + first, eviction_policy="evict_first")
    else:
        mask = (rows < OUT)[:, None] & (first + columns < IN)
        tile = tl.load(weight + base + first, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _eighths(tile, piece, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Products summed eight at a time, as the threads hold them."""
    if tile.dtype == tl.uint8:
        values = tile.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        values = tile.to(tl.float32)
    return tl.sum(tl.reshape(values * piece, [ROWS, BLOCK // PER_LOAD, PER_LOAD]), 2)


@triton.jit
def multiply(
    x,
    gain,
    weight,
    rows,
    other_weight,
    other_rows,
    tile,
    other_tile,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    GAIN: tl.constexpr,
    PAIRED: tl.constexpr,
    ROLLED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(W g x, W' g x, sum of x, sum of squares), whose first tiles are there already.

    The scales of a weight in bytes are not applied. x has the type of any other weight, so that
    both are held by the threads in the same way: another one costs up to a third. W' are more rows
    of the same or another weight, with PAIRED. With ROLLED a loop fetches the next tile while it
    multiplies one; without, the compiler sees them all.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    base = rows[:, None].to(tl.int64) * IN + columns
    other_base = other_rows[:, None].to(tl.int64) * IN + columns
    bytes_held: tl.constexpr = weight.dtype.element_ty == tl.uint8
    product = tl.zeros([ROWS, BLOCK // PER_LOAD], tl.float32)
    other = tl.zeros([ROWS, BLOCK // PER_LOAD], tl.float32)
    taken_off = tl.zeros([1, BLOCK // PER_LOAD], tl.float32)
    total = tl.zeros([1, BLOCK], tl.float32)
    squares = tl.zeros([1, BLOCK], tl.float32)
    if ROLLED:
        for first in tl.range(0, IN, BLOCK):
            coming = load_tile(weight, base, rows, columns, first + BLOCK, OUT, IN, False)
            piece, weighed = _pieces(x, gain, columns, first, IN, GAIN, BLOCK)
            if bytes_held:
                taken_off += _eighths(weighed, ZERO, 1, BLOCK)
                weighed *= RAISED
            product += _eighths(tile, weighed, ROWS, BLOCK)
            if PAIRED:
                other += _eighths(other_tile, weighed, ROWS, BLOCK)
                other_tile = load_tile(
                    other_weight, other_base, other_rows, columns, first + BLOCK, OUT, IN, False
                )
            if NORM > 0:
                total += piece
                squares += piece * piece
            tile = coming
    else:
        for first in tl.static_range(0, IN, BLOCK):
            if first > 0:
                tile = load_tile(weight, base, rows, columns, first, OUT, IN, EVEN)
                if PAIRED:
                    other_tile = load_tile(
                        other_weight, other_base, other_rows, columns, first, OUT, IN, EVEN
                    )
            piece, weighed = _pieces(x, gain, columns, first, IN, GAIN, BLOCK)
            if bytes_held:
                taken_off += _eighths(weighed, ZERO, 1, BLOCK)
                weighed *= RAISED
            product += _eighths(tile, weighed, ROWS, BLOCK)
            if PAIRED:
                other += _eighths(other_tile, weighed, ROWS, BLOCK)
            if NORM > 0:
                total += piece
                squares += piece * piece
    if bytes_held:
        product = product * LOWERED - taken_off
        other = other * LOWERED - taken_off
    return tl.sum(product, 1), tl.sum(other, 1), total, squares


@triton.jit
def _pieces(x, gain, columns, first, IN: tl.constexpr, GAIN: tl.constexpr, BLOCK: tl.constexpr):
    """Part of x in float32, and the same times the norm's gain."""
    if IN % BLOCK == 0:
        piece = tl.load(x + first + columns).to(tl.float32)
    else:
        inside = first + columns < IN
        piece = tl.load(x + first + columns, mask=inside, other=0.0).to(tl.float32)
    weighed = piece
    if GAIN:
        if IN % BLOCK == 0:
            held = tl.load(gain + first + columns)
        else:
            held = tl.load(gain + first + columns, mask=first + columns < IN, other=0.0)
        weighed = piece * held.to(tl.float32)
    return piece, weighed


@triton.jit
def _add_both(first, second, other_first, other_second):
    return first + other_first, second + other_second


@triton.jit
def normalized(value, sums, total, squares, eps, IN: tl.constexpr, NORM: tl.constexpr):
    """W g x as it would be of the normalized x, but for the offset."""
    if NORM == 1:
        whole, whole_squares = tl.reduce((total, squares), 1, _add_both)
        mean = tl.sum(whole, 0) / IN
        variance = tl.sum(whole_squares, 0) / IN - mean * mean
        value = (value - mean * sums) * tl.rsqrt(variance + eps)
    elif NORM == 2:
        value = value * tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / IN + eps)
    return value


@triton.jit
def vector(values, rows, OUT: tl.constexpr, PRESENT: tl.constexpr):
    """One float32 per row of the weight; zeros where there is no such vector."""
    found = tl.zeros(rows.shape, tl.float32)
    if PRESENT:
        found = tl.load(values + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    return found


@triton.jit
def scales(values, weight, rows, OUT: tl.constexpr):
    """What a weight's rows are multiplied by: ones, but for a weight in bytes."""
    found = tl.full(rows.shape, 1.0, tl.float32)
    if weight.dtype.element_ty == tl.uint8:
        found = tl.load(values + rows, mask=rows < OUT, other=0.0)
    return found
