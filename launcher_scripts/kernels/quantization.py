"""Numbers of eight and four bits: weights, made of full ones at load; keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from launcher_scripts.common.quantization import FOUR_BITS, Quantization
from launcher_scripts.kernels import four_bits
from launcher_scripts.kernels.operands import Linear


class ByteType(NamedTuple):
    """A type of eight bits, and the largest number that is used of it."""

    dtype: torch.dtype
    largest: int


FP8 = torch.float8_e4m3fn  # (Micikevicius et al. 2022): 4 bits of exponent, 3 of mantissa
BYTE_TYPES: dict[Quantization, ByteType] = {
    "int8": ByteType(torch.int8, 127),
    "fp8": ByteType(FP8, 448),
}


def quantized(linear: Linear, compute: torch.dtype, quantization: Quantization) -> Linear:
    """The projection with a weight of bytes, one scale per output, symmetric around zero; or with
    one of four bits (see four_bits.py).

    compute: the type of the inputs it is multiplied with
    """
    if quantization in FOUR_BITS and linear.weight.is_meta:
        weight, scale = four_bits.empty(linear.weight, compute, quantization)
    elif quantization == "mxfp4":
        weight, scale = four_bits.to_mxfp4(linear.weight)
    elif quantization == "nvfp4":
        weight, scale = four_bits.to_nvfp4(linear.weight)
    elif quantization == "int4":
        weight, scale = four_bits.to_int4(linear.weight, compute)
    else:
        weight, scale = quantized_rows(linear.weight, quantization)
    return replace(linear, weight=weight, scale=scale, compute=compute)


def with_alike_scales(one: Linear, other: Linear) -> tuple[Linear, Linear]:
    """Two linears that a kernel may read at once: both with zero points where one has them."""
    if one.scale is None or other.scale is None or one.scale.dtype == other.scale.dtype:
        return one, other
    scales = map(four_bits.with_zero_points, (one.scale, other.scale))
    return replace(one, scale=next(scales)), replace(other, scale=next(scales))


def quantized_rows(values: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """values [N, size] as bytes and their scales, float32 [N].

    The largest number of a row becomes the type's largest; a row of zeros stays one.
    """
    values = values.float()
    dtype, max_byte = BYTE_TYPES[quantization]
    max_abs = values.abs().amax(dim=1)
    scale = torch.where(max_abs > 0, max_abs, 1.0) / max_byte
    scaled = (values / scale[:, None]).clamp(-max_byte, max_byte)
    return (scaled.round() if quantization == "int8" else scaled).to(dtype), scale


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as a cache of `dtype` keeps them: e4m3 has no infinity, so what is beyond its
    largest number becomes that. There is no scale: those of usual models are well within.
    """
    max_byte = BYTE_TYPES["fp8"].largest
    return (values.clamp(-max_byte, max_byte) if dtype == FP8 else values).to(dtype)


def dequantized(
    weight: Tensor, scale: Tensor | None, compute: torch.dtype = torch.float32
) -> Tensor:
    """Rows of a weight in float32, of bytes or of four bits where they have scales.

    compute: of four bits, the type that their products with scales are rounded to
    """
    if scale is None:
        return weight.float()
    if weight.dtype == torch.uint8:
        return four_bits.dequantized(weight, scale, compute)
    return weight.float() * scale[:, None]
