"""The projections of fused.py for tokens of any number, behind norms of their own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.kernels.cuda.device_traits import traits_of
from launcher_scripts.kernels.cuda.fused_rows import ALONE, norm
from launcher_scripts.kernels.cuda.int8_kernels import dense
from launcher_scripts.kernels.cuda.row_products import row_product
from launcher_scripts.kernels.operands import Hidden, Linear
from launcher_scripts.kernels.reference import ACTIVATIONS


def project(x: Tensor, linear: Linear) -> Tensor:
    """See reference.project."""
    if x.shape[0] == 1:
        return _row(x, linear, linear.dtype, "plain")
    linear = dense(linear)
    return functional.linear(_normalized(x, linear), linear.weight, linear.bias)


def project_add(x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
    """See reference.project_add."""
    if x.shape[0] == 1:
        return _row(x, linear, torch.float32, "add", onto=Hidden(residual, residual))
    linear = dense(linear)
    return residual + functional.linear(x, linear.weight, linear.bias)


def mlp_up(x: Tensor, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """See reference.mlp_up."""
    if x.shape[0] == 1:
        kind = "up" if gate is None else "gated"
        without = None if gate is None else gate.without_norm()
        return _row(x, up, up.dtype, kind, gate=without, activation=activation)
    up, gate = dense(up), gate and dense(gate)
    normalized = _normalized(x, up)
    hidden = ACTIVATIONS[activation](functional.linear(normalized, up.weight, up.bias))
    if gate is None:
        return hidden
    return hidden * functional.linear(normalized, gate.weight, gate.bias)


def logits(x: Tensor, head: Linear) -> Tensor:
    """See reference.logits."""
    if x.shape[0] == 1:
        return _row(x, head, torch.float32, "plain")
    head = dense(head)
    normalized = _normalized(x, head)
    if normalized.dtype == torch.float32 or not traits_of(x.device).adds_in_float32:
        bias = None if head.bias is None else head.bias.float()
        return functional.linear(normalized.float(), head.weight.float(), bias)
    out = torch.mm(normalized, head.weight.t(), out_dtype=torch.float32)
    return out if head.bias is None else out + head.bias


def _normalized(x: Tensor, linear: Linear) -> Tensor:
    if linear.norm is None:
        return x.to(linear.dtype)
    return norm(x, linear.norm, linear.dtype)


def _row(x: Tensor, linear: Linear, dtype: torch.dtype, kind: str, **more: object) -> Tensor:
    """One row through a projection behind a norm of its own: [1, out] of `dtype`."""
    out = torch.empty(1, linear.weight.shape[0], dtype=dtype, device=x.device)
    operand = _normalized(x, linear)
    row_product(Hidden(x, operand), linear.without_norm(), out, kind, launch=ALONE, **more)
    return out
