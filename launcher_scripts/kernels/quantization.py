"""Weights of eight bits, made of whole ones when a model is loaded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import Linear

LARGEST = 127


def quantized(linear: Linear, compute: torch.dtype) -> Linear:
    """The projection with an int8 weight, one scale per output, symmetric around zero.

    The largest weight of an output becomes 127; an output without weights keeps its zeros.
    compute: the type the weight is multiplied in
    """
    weight = linear.weight.float()
    largest = weight.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest, 1.0) / LARGEST
    rounded = (weight / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return replace(linear, weight=rounded, scale=scale, compute=compute)


def dequantized(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Rows of a weight in float32, of int8 where they have scales [rows]."""
    return weight.float() if scale is None else weight.float() * scale[:, None]
