"""Weights of four bits with a scale for every GROUP or QUARTER inputs: int4, MXFP4 and NVFP4.

mxfp4: e2m1 times a power of two (e8m0), as OCP Microscaling 1.0 and gpt-oss have it.
nvfp4: e2m1 times a bfloat16, for every QUARTER inputs, in place of an e4m3 times a float32 of the
       matrix.
int4:  an integer of four bits less a zero point, times a scale in the compute type.

Of 64 columns lie the codes of four, which are 16 apart, in one half of a word, so that a kernel
needs no shuffle to separate them. Three of four e2m1 codes lie as bfloat16 has sign, exponent and
mantissa, but for a shift; see `_FLOATS` and kernels/cuda/packed.py.

scale: int16 of mxfp4, the bits of 2^RAISED times the scale in bfloat16, of which nvfp4 has four in
       an int64;  of int4 in the compute
       type, where zero points are 8;  int32 where there are others: the scale's float32 with the
       zero point in its lowest four bits

A weight that had four bits in its checkpoint keeps them: a power of two is found as it was, and
`_restored` finds the integers and scales of int4 in numbers that were rounded to the compute type,
`to_nvfp4` the codes of nvfp4.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from launcher_scripts.common.quantization import Quantization

GROUP = 32
PERIOD = 2 * GROUP  # columns whose codes lie in GROUP neighbouring bytes
QUARTER = PERIOD // 4
ZERO_POINT = 8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
RAISED = 94
BIAS = 127 + RAISED  # of the exponents of mxfp4's scales
VALUES_AT_ONCE = 1 << 24
SAMPLE = 1024  # groups, of which one at least has few values where a matrix has four bits
NEAR = 2.0**-7  # relative; two roundings to bfloat16
# Where the bits 0 to 3 of a half's codes lie, which are QUARTER columns apart.
_INTEGERS = tuple(tuple(range(first, first + 4)) for first in (0, 8, 4, 12))
_FLOATS = (6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14)
# The powers of two that leave e2m1 in bfloat16 while a kernel widens it.
MIN_EXPONENT, MAX_EXPONENT = -90, 33


@cache
def _table(is_float: bool, device: torch.device) -> Tensor:
    """Bits of the 16 codes at each of the 4 positions of a half, int16 [4, 16]."""
    halves = [
        [
            sum((code >> bit & 1) << position for bit, position in enumerate(positions))
            for code in range(16)
        ]
        for positions in (_FLOATS if is_float else _INTEGERS)
    ]
    return torch.tensor(halves, device=device).to(torch.int16)


def packed(codes: Tensor, is_float: bool) -> Tensor:
    """uint8 [out, in / 2] of codes [out, in] from 0 to 15; is_float: of e2m1."""
    table = _table(is_float, codes.device)
    columns = codes.long().unflatten(1, (-1, 4, QUARTER)).unbind(2)
    first, *others = (bits[column] for bits, column in zip(table, columns, strict=True))
    for other in others:
        first |= other
    result: Tensor = first.flatten(1).view(torch.uint8)
    return result


def unpacked(weight: Tensor, is_float: bool) -> Tensor:
    """The codes, int64 [out, in]."""
    halves = weight.contiguous().view(torch.int16).long().unflatten(1, (-1, QUARTER))
    codes = [
        torch.stack(
            [(halves >> position & 1) << bit for bit, position in enumerate(positions)]
        ).sum(0)
        for positions in (_FLOATS if is_float else _INTEGERS)
    ]
    return torch.stack(codes, 2).flatten(1)


def dequantized(weight: Tensor, scale: Tensor, compute: torch.dtype) -> Tensor:
    """float32 [out, in] of packed weights; products with scales are rounded to `compute`."""
    is_float = scale.dtype in (torch.int16, torch.int64)
    scale = scale.contiguous().view(torch.int16) if is_float else scale
    codes = unpacked(weight, is_float).unflatten(1, (scale.shape[1], -1))
    if is_float:
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)], device=weight.device)[codes]
        factors = scale.view(torch.bfloat16).float() * 2.0**-RAISED
    elif scale.dtype == torch.int32:
        numbers = (codes - (scale & 15)[..., None]).float()
        factors = (scale & -16).view(torch.float32)
    else:
        numbers, factors = (codes - ZERO_POINT).float(), scale.float()
    return (numbers * factors[..., None]).to(compute).float().flatten(1)


def empty(
    values: Tensor, compute: torch.dtype, quantization: Quantization
) -> tuple[Tensor, Tensor]:
    """Packed weights and scales for values [out, in], without numbers."""
    rows, size = values.shape
    kind = {"mxfp4": torch.int16, "nvfp4": torch.int64}.get(quantization, compute)
    per_scale = PERIOD if quantization == "nvfp4" else GROUP
    return (
        values.new_empty(rows, size // 2, dtype=torch.uint8),
        values.new_empty(rows, size // per_scale, dtype=kind),
    )


def to_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Packed weights [out, in / 2] and scales [out, in / GROUP] of values [out, in].

    The largest of a group becomes 4 or 6: values that are MXFP4 already stay as they are.
    """
    groups = values.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2)
    exponent = torch.frexp(largest).exponent - 3
    exponent += (torch.ldexp(largest, -exponent) > 7).int()
    exponent = torch.where(largest > 0, exponent, 0).clamp(MIN_EXPONENT, MAX_EXPONENT)
    codes = _e2m1_codes(torch.ldexp(groups, -exponent[..., None]))
    return packed(codes.flatten(1), True), ((exponent + BIAS) << 7).to(torch.int16)


def _e2m1_codes(numbers: Tensor) -> Tensor:
    """The codes that are nearest."""
    sizes = numbers.abs().clamp(max=E2M1[-1])
    steps = 0.5 * 2.0 ** ((sizes >= 2).int() + (sizes >= 4).int())
    rounded = ((sizes / steps).round() * steps).contiguous()
    codes = torch.searchsorted(torch.tensor(E2M1, device=numbers.device), rounded)
    return codes + 8 * (numbers < 0)


def to_nvfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Packed weights [out, in / 2] and scales [out, in / PERIOD] of values [out, in].

    The largest of a group becomes 6, or the number with which every number of the group is e2m1
    times a scale, as far as roundings to bfloat16 go.
    """
    rows = max(1, VALUES_AT_ONCE // values.shape[1])
    codes, scales = (
        torch.cat(parts)
        for parts in zip(*(_nvfp4(part) for part in values.split(rows)), strict=True)
    )
    bits = scales.bfloat16().view(torch.int16) + (RAISED << 7)
    return packed(codes.flatten(1), True), bits.view(torch.int64)


def _nvfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [out, groups, QUARTER] and scales [out, groups] of some rows."""
    groups = values.float().reshape(-1, QUARTER)
    largest = groups.abs().amax(1)
    codes, scales, error = _as_e2m1(groups, largest, E2M1[-1])
    if bool((error[:SAMPLE] < NEAR).any()):
        for number in E2M1[-2:0:-1]:
            others = _as_e2m1(groups, largest, number)
            better = (error >= NEAR) & (others[2] < NEAR)
            for target, part in zip((codes, scales, error), others, strict=True):
                target[better] = part[better]
    shape = (values.shape[0], -1)
    return codes.view(*shape, QUARTER), scales.view(shape)


def _as_e2m1(groups: Tensor, largest: Tensor, number: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and largest relative errors of groups whose largest becomes a number."""
    scales = _as(largest / number, torch.bfloat16)
    scales = torch.where(largest > 0, scales.clamp(2.0**MIN_EXPONENT, 2.0**MAX_EXPONENT), 1.0)
    numbers = groups / scales[:, None]
    codes = _e2m1_codes(numbers)
    sizes = torch.tensor(E2M1, device=groups.device)[codes % 8]
    error = (sizes - numbers.abs()).abs() / numbers.abs().clamp(min=1e-30)
    return codes, scales, error.amax(1)


def to_int4(values: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """Packed weights and scales of values [out, in]: rounded to the nearest, but a group that has
    four bits already keeps them.
    """
    rows = max(1, VALUES_AT_ONCE // values.shape[1])
    codes, scales, zeros = (
        torch.cat(parts)
        for parts in zip(*(_int4(part, compute) for part in values.split(rows)), strict=True)
    )
    weight = packed(codes.flatten(1), False)
    if bool((zeros == ZERO_POINT).all()):
        return weight, scales.to(compute)
    return weight, with_zero_points(scales, zeros)


def with_zero_points(scales: Tensor, zeros: Tensor | int = ZERO_POINT) -> Tensor:
    """int4's scales as int32, if they are not yet."""
    if scales.dtype == torch.int32:
        return scales
    return (scales.float().view(torch.int32) & -16) | zeros


def _int4(values: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, groups, GROUP], scales and zero points [out, groups] of some rows.

    The largest of a group is -8 of its scale, which may be negative.
    """
    shape = (values.shape[0], -1, GROUP)
    groups = values.float().reshape(-1, GROUP)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0]
    scales = _as(torch.where(largest == 0, 1.0, largest / -ZERO_POINT), compute)
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (groups / scales[:, None]).round().clamp(-8, 7).long() + ZERO_POINT
    zeros = torch.full_like(scales, ZERO_POINT, dtype=torch.int32)
    few = _few_values(groups[:SAMPLE]).nonzero()[:, 0]
    if len(few):
        few = _few_values(groups).nonzero()[:, 0]
        found, *restored = _restored(groups[few], compute)
        few = few[found]
        for target, part in zip((codes, scales, zeros), restored, strict=True):
            target[few] = part[found]
    return codes.view(shape), scales.view(shape[:2]), zeros.view(shape[:2])


def _few_values(groups: Tensor) -> Tensor:
    """True for groups [n, GROUP] with no more different values than four bits have."""
    ordered = groups.sort(1).values
    return (ordered[:, 1:] != ordered[:, :-1]).sum(1) < 16


def _restored(groups: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """True for groups [n, GROUP] of integers of four bits times a scale, as far as rounding to the
    compute type goes; their codes, scales and zero points.

    Every integer that the largest number may stand for is tried. Its quotient is no more than one
    step of the compute type away from the scale.
    """
    count, device = len(groups), groups.device
    best = torch.full((count,), NEAR, device=device)
    codes = torch.zeros(count, GROUP, dtype=torch.int64, device=device)
    scales = torch.ones(count, device=device)
    zeros = torch.full((count,), ZERO_POINT, dtype=torch.int32, device=device)
    largest = groups.abs().amax(1)
    remaining = (largest > 0).nonzero()[:, 0]
    for number in (8, 7, 15, 14, 13, 12, 11, 10, 9, 6, 5, 4, 3, 2, 1):
        for step in (0, -1, 1):
            values = groups[remaining]
            scale = _stepped(_as(largest[remaining] / number, compute), compute, step)
            integers = (values / scale[:, None]).round()
            zero = (-integers.amin(1)).clamp(0, 15)
            fits_eight = (zero <= ZERO_POINT) & (integers.amax(1) < ZERO_POINT)
            zero = torch.where(fits_eight, float(ZERO_POINT), zero)
            shifted = integers + zero[:, None]
            off = (_as(integers * scale[:, None], compute) - values).abs()
            error = (off / values.abs().clamp(min=1e-30)).amax(1)
            better = (error < best[remaining]) & (shifted.amin(1) >= 0) & (shifted.amax(1) <= 15)
            target = remaining[better]
            best[target] = error[better]
            codes[target], scales[target] = shifted[better].long(), scale[better]
            zeros[target] = zero[better].int()
            remaining = remaining[best[remaining] > 0]
    codes[largest == 0], best[largest == 0] = ZERO_POINT, 0.0
    return best < NEAR, codes, scales, zeros


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).float()


def _stepped(values: Tensor, dtype: torch.dtype, steps: int) -> Tensor:
    """Positive numbers of `dtype`, so many of its steps further, in float32."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    return (values.to(dtype).view(bits) + steps).view(dtype).float()
