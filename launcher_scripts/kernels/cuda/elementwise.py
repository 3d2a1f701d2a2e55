"""Loads in the Triton language: prefetches into L2, and e4m3 values of the KV cache.

A cache of keys and values in e4m3: how its numbers are made and read, in the Triton language.

Numbers are rounded on their bits: ptxas 12.8 confuses neighbours where e4m3 that was just made is
made float32 again. The conversion behind that is exact.

One instruction makes float16 of two e4m3; bfloat16 takes three, two of which are slow. So what is
multiplied on the matrix units is float16: it holds all of e4m3, and more bits of the queries and of
the softmax than bfloat16.

Activations, gates and argmax at the end of a product, in the Triton language.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.common import quantization
from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options

BYTES = tl.constexpr(128)  # that one prefetch brings


@triton.jit
def prefetch(addresses):
    """Prefetch what lies at each of the addresses, which must be valid ones."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_if(addresses, condition):
    """Prefetch what lies at the addresses that are wanted; the others need not be valid."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, condition.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def permuted(bytes, others, SELECTED: tl.constexpr):
    """Words of some of the eight bytes of two words; see PTX's prmt."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + SELECTED + ";",
        "=r,r,r",
        [bytes, others],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def add_bytes(total, codes, bytes, SIGN: tl.constexpr):
    """total plus products of four bytes without a sign with others, which have one if SIGN is s."""
    return tl.inline_asm_elementwise(
        "dp4a.u32." + SIGN + "32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [codes, bytes, total],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def cache_token(table, address, BLOCK_TOKENS: tl.constexpr):
    """Cache tokens at addresses of any shape (see BlockTable); these, where BLOCK_TOKENS is 0."""
    if BLOCK_TOKENS > 0:
        block = tl.load(table + address // BLOCK_TOKENS).to(tl.int64)
        return block * BLOCK_TOKENS + address % BLOCK_TOKENS
    return address


E4M3_MAX = tl.constexpr(448.0)
MIN_NORMAL = tl.constexpr(2.0**-6)
# Next to it float32 has the steps of e4m3's subnormal numbers, 2^-9.
SUBNORMAL_STEPS = tl.constexpr(1.5 * 2.0**14)
FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def of_four_bits(values):
    """float32 rounded to the nearest that e4m3 holds, if that is no subnormal number of it."""
    bits = values.to(tl.int32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)
    return (bits & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def kept(values, KIND: tl.constexpr):
    """float32 as a cache of KIND keeps it: quantization.saturated, of e4m3 still in float32."""
    if tl.float8e4nv == KIND:
        small = (values + SUBNORMAL_STEPS) - SUBNORMAL_STEPS
        rounded = tl.where(tl.abs(values) < MIN_NORMAL, small, of_four_bits(values))
        rounded = tl.minimum(tl.maximum(rounded, -E4M3_MAX), E4M3_MAX)
        rounded_values = tl.where(values == values, rounded, values)  # NaN stays
    else:
        rounded_values = values.to(KIND)
    return rounded_values


@triton.jit
def for_products(queries, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """float32 queries in the type in which they are multiplied with keys of KIND."""
    if tl.float8e4nv == KIND and tl.bfloat16 == COMPUTE:
        limited = tl.minimum(tl.maximum(queries, -FLOAT16_MAX), FLOAT16_MAX)
        products = tl.where(queries == queries, limited, queries).to(tl.float16)
    else:
        products = queries.to(COMPUTE)
    return products


@triton.jit
def in_halves(tile, PTX: tl.constexpr):
    """Keys or values of a cache, those of e4m3 in float16.

    PTX: kernels are compiled. The compiler may not move this instruction, or it would have values
    read byte by byte behind it, in the order of a product.
    """
    if tile.dtype == tl.float8e4nv:
        if PTX:
            tile = tl.inline_asm_elementwise(
                """{
                .reg .b16 low, high;
                mov.b32 {low, high}, $2;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
                }""",
                "=r,=r,r",
                [tile],
                dtype=tl.float16,
                is_pure=False,
                pack=4,
            )
        else:
            tile = tile.to(tl.float16)
    return tile


ACTIVATION_CODES = {
    None: 0,
    "gelu": 1,
    "gelu_erf": 2,
    "relu": 3,
    "silu": 4,
    "squared_relu": 5,
    "clamped_swiglu": 6,
}
CLAMP = tl.constexpr(quantization.CLAMP)
SLOPE = tl.constexpr(quantization.SLOPE)
GATE_BLOCK = 2048


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a code in ACTIVATION_CODES."""
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
    elif ACTIVATION == 6:
        x = x / (1.0 + tl.exp(-SLOPE * x))
    return x


@triton.jit
def activate_gated(x, gate, ACTIVATION: tl.constexpr):
    """See reference.activated."""
    if ACTIVATION == 6:
        x = tl.minimum(x, CLAMP)
        gate = tl.minimum(tl.maximum(gate, -CLAMP), CLAMP) + 1.0
    return activate(x, ACTIVATION) * gate


@triton.jit
def scales_of(scales, weight, rows, out):
    """Return the factors of the products of a weight's rows: ones, but for a weight in bytes.

    out: how many rows there are
    """
    result = tl.full(rows.shape, 1.0, tl.float32)
    if weight.dtype.element_ty.primitive_bitwidth == 8 and weight.dtype.element_ty != tl.uint8:
        result = tl.load(scales + rows, mask=rows < out, other=0.0)
    return result


@triton.jit
def multiply_gate(
    up,
    gate,
    size,
    ACTIVATION: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """up = act(up) * gate, of `size` numbers."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    value = tl.load(up + offsets, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    value = activate_gated(value, factor, ACTIVATION)
    tl.store(up + offsets, value.to(up.dtype.element_ty), mask=mask)


def gated(up: Tensor, gate: Tensor, activation: str) -> Tensor:
    """act(up) * gate of [N, ffn] each, in the place of `up`."""
    launcher(multiply_gate, (triton.cdiv(up.numel(), GATE_BLOCK),))(
        up,
        gate,
        up.numel(),
        ACTIVATION=ACTIVATION_CODES[activation],
        BLOCK=GATE_BLOCK,
        num_warps=8,
        **pdl_options(up),
    )
    return up


ARGMAX_BLOCK = 1024


@triton.jit
def block_argmax(logits, values, places, stride, size, BLOCK: tl.constexpr):
    """One program: the largest of one block of a row and where it is, the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    row_logits = tl.load(logits + row * stride + columns, mask=columns < size, other=-float("inf"))
    max_value, where = tl.max(row_logits, 0, return_indices=True)
    part = row * tl.num_programs(1) + block
    tl.store(values + part, max_value)
    tl.store(places + part, block * BLOCK + where)


@triton.jit
def pick_largest(
    largest,
    places,
    values,
    tokens,
    column,
    slots,
    parts,
    KEEP: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the largest of a row's parts and its place, the first of equal ones.

    KEEP: the place goes to the column of the row's slot, too.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < parts
    value = tl.load(largest + row * parts + columns, mask=mask, other=-float("inf"))
    top, part = tl.max(value, 0, return_indices=True)
    tl.store(values + row, top)
    index = tl.load(places + row * parts + part).to(tl.int64)
    tl.store(tokens + row, index)
    if KEEP:
        tl.store(column + tl.load(slots + row), index)


def argmax(logits: Tensor) -> Tensor:
    """See reference.argmax. Two kernels: of blocks, then of the blocks' results."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, ARGMAX_BLOCK)
    values = torch.empty(rows, blocks, device=logits.device)
    indices = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    launcher(block_argmax, (rows, blocks))(
        logits, values, indices, logits.stride(0), size, BLOCK=ARGMAX_BLOCK, num_warps=4
    )
    return best_of_parts(values, indices)[1]


def best_of_parts(
    found: Tensor, places: Tensor, keep: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The largest of [N, parts] values and the place that belongs to it: [N] each.

    keep: a column and the rows' slots in it, where the places go as well
    """
    rows, parts = found.shape
    values = torch.empty(rows, device=found.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=found.device)
    launcher(pick_largest, (rows,))(
        found,
        places,
        values,
        tokens,
        *((tokens, tokens) if keep is None else keep),
        parts,
        KEEP=keep is not None,
        BLOCK=triton.next_power_of_2(parts),
        num_warps=8 if parts > 1024 else 1,
        **pdl_options(found),
    )
    return values, tokens
