"""A few rows of a weight times a vector: the inside of the gemv kernels.

The weight is read in wide pieces, each once.

A weight in bytes is q * scale of its row. One instruction makes float16 of two e4m3. None makes
numbers of int8 at the speed they are read. But the bits of a small integer are a float32, too,
of that many of its smallest steps of 2^-149; multipliers take those as they are. So the kernel
multiplies the numbers whose bits are q + 128, of which none is negative, with an x made large, and
takes 128 times the sum of x off.
"""

from __future__ import annotations

import triton
import triton.language as tl

RAISED = tl.constexpr(2.0**80)  # times x: its products with steps of 2^-149 are normal numbers
LOWERED = tl.constexpr(2.0 ** (149 - 80))
ZERO_POINT = tl.constexpr(128)
PER_LOAD = tl.constexpr(8)  # columns a thread holds side by side: 16 bytes of x


@triton.jit
def row_places(rows, columns, IN: tl.constexpr):
    """Where columns [1, BLOCK] of the rows are; threads are to hold bytes as they hold x."""
    return tl.max_contiguous(rows[:, None].to(tl.int64) * IN + columns, [1, PER_LOAD])


@triton.jit
def load_tile(
    weight, base, rows, columns, first, OUT: tl.constexpr, IN: tl.constexpr, WHOLE: tl.constexpr
):
    """Columns from `first` on of the rows of a weight; zeros outside. WHOLE: none is outside."""
    if WHOLE:
        tile = tl.load(weight + base + first, eviction_policy="evict_first")
    else:
        mask = (rows < OUT)[:, None] & (first + columns < IN)
        tile = tl.load(weight + base + first, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def begin(
    weight, rows, OUT: tl.constexpr, IN: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """What `multiply` takes of a weight: where it is, some of its rows, and their first tile [ROWS,
    BLOCK]. EVEN: all rows are of the weight."""
    columns = tl.arange(0, BLOCK)[None, :]
    base = row_places(rows, columns, IN)
    whole: tl.constexpr = EVEN and BLOCK <= IN
    return weight, rows, load_tile(weight, base, rows, columns, 0, OUT, IN, whole)


@triton.jit
def _without_sign(tile, PACKED: tl.constexpr):
    """int8 q as q + 128. With PACKED four at a time, as they were loaded: the compiler does not
    see that by itself."""
    if tile.dtype == tl.int8:
        if PACKED:
            tile = tl.inline_asm_elementwise(
                "xor.b32 $0, $1, 0x80808080;", "=r,r", [tile], dtype=tl.uint8, is_pure=True, pack=4
            )
        else:
            tile = (tile ^ -ZERO_POINT).to(tl.uint8, bitcast=True)
    return tile


@triton.jit
def _eighths(tile, piece, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Products summed eight at a time, as the threads hold them; of int8 without a sign, with the
    numbers whose bits they are."""
    if tile.dtype == tl.uint8:
        values = tile.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        values = tile.to(tl.float32)
    return tl.sum(tl.reshape(values * piece, [ROWS, BLOCK // PER_LOAD, PER_LOAD]), 2)


@triton.jit
def multiply(
    x,
    begun,
    other_begun,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PAIRED: tl.constexpr,
    ROLLED: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """(W x, W' x) of rows that were begun.

    The scales of a weight in bytes are not applied. x has the type of any other weight, so that
    both are held by the threads in the same way: another one costs up to a third. W' are more rows
    of the same or another weight, with PAIRED. With ROLLED a loop fetches the next tile while it
    multiplies one; without, the compiler sees them all. EVEN: all rows are of the weight.
    """
    weight, rows, tile = begun
    other_weight, other_rows, other_tile = other_begun
    ROWS: tl.constexpr = tile.shape[0]
    BLOCK: tl.constexpr = tile.shape[1]
    columns = tl.arange(0, BLOCK)[None, :]
    base = row_places(rows, columns, IN)
    other_base = row_places(other_rows, columns, IN)
    is_int8: tl.constexpr = weight.dtype.element_ty == tl.int8
    product = tl.zeros([ROWS, BLOCK // PER_LOAD], tl.float32)
    other = tl.zeros([ROWS, BLOCK // PER_LOAD], tl.float32)
    zeros = tl.zeros([1, BLOCK // PER_LOAD], tl.float32)
    tile = _without_sign(tile, PACKED)
    other_tile = _without_sign(other_tile, PACKED)
    if ROLLED:
        for first in tl.range(0, IN, BLOCK):
            coming = load_tile(weight, base, rows, columns, first + BLOCK, OUT, IN, False)
            coming = _without_sign(coming, PACKED)
            piece = _piece(x, columns, first, IN, IN % BLOCK == 0)
            if is_int8:
                zeros += _eighths(piece, 1.0, 1, BLOCK)
                piece *= RAISED
            product += _eighths(tile, piece, ROWS, BLOCK)
            if PAIRED:
                other += _eighths(other_tile, piece, ROWS, BLOCK)
                after = first + BLOCK
                other_tile = load_tile(
                    other_weight, other_base, other_rows, columns, after, OUT, IN, False
                )
                other_tile = _without_sign(other_tile, PACKED)
            tile = coming
    else:
        for first in tl.static_range(0, IN, BLOCK):
            inside = first + BLOCK <= IN
            if first > 0:
                whole = EVEN and inside
                tile = load_tile(weight, base, rows, columns, first, OUT, IN, whole)
                tile = _without_sign(tile, PACKED)
                if PAIRED:
                    other_tile = load_tile(
                        other_weight, other_base, other_rows, columns, first, OUT, IN, whole
                    )
                    other_tile = _without_sign(other_tile, PACKED)
            piece = _piece(x, columns, first, IN, inside)
            if is_int8:
                zeros += _eighths(piece, 1.0, 1, BLOCK)
                piece *= RAISED
            product += _eighths(tile, piece, ROWS, BLOCK)
            if PAIRED:
                other += _eighths(other_tile, piece, ROWS, BLOCK)
    if is_int8:
        product = product * LOWERED - zeros * ZERO_POINT
        other = other * LOWERED - zeros * ZERO_POINT
    return tl.sum(product, 1), tl.sum(other, 1)


@triton.jit
def _piece(x, columns, first, IN: tl.constexpr, WHOLE: tl.constexpr):
    """Part of x in float32; zeros behind its end. WHOLE: no column is behind it."""
    if WHOLE:
        piece = tl.load(x + first + columns)
    else:
        piece = tl.load(x + first + columns, mask=first + columns < IN, other=0.0)
    return piece.to(tl.float32)


@triton.jit
def vector(values, rows, OUT: tl.constexpr, PRESENT: tl.constexpr):
    """One float32 per row of the weight; zeros where there is no such vector."""
    found = tl.zeros(rows.shape, tl.float32)
    if PRESENT:
        found = tl.load(values + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    return found


@triton.jit
def scales_of(scales, weight, rows, out):
    """What the products of a weight's rows are multiplied by: ones, but for a weight in bytes.

    out: how many rows there are
    """
    found = tl.full(rows.shape, 1.0, tl.float32)
    if weight.dtype.element_ty.primitive_bitwidth == 8:
        found = tl.load(scales + rows, mask=rows < out, other=0.0)
    return found
