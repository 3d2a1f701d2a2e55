"""Adapters in the plain forward passes: prompt tables, IA3 vectors, adapters (float32)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from launcher_scripts.models.adapters import ADAPTER_NORM_EPS
from tests.checkpoint.reference_weights import StoredWeights


def embedded(
    w: StoredWeights, config: Any, table: str, ids: torch.Tensor, prompt: str | None
) -> torch.Tensor:
    """Embeddings [B, S, hidden]; ids from prompt_start_id on are rows of the prompt's table."""
    if prompt is None:
        return w[table][ids]
    start = config.parts.prompt_start_id
    virtual = ids >= start
    x = w[table][torch.where(virtual, 0, ids)]
    x[virtual] = w[f"prompt_table.{prompt}.weight"][ids[virtual] - start]
    return x


def scaled(w: StoredWeights, stem: str, x: torch.Tensor, task: int | None) -> torch.Tensor:
    """x [..., width], times the task's IA3 vector."""
    return x if task is None else x * w[f"{stem}.ia3.weight"][task]


def adapted(
    w: StoredWeights,
    config: Any,
    stem: str,
    residual: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """residual + out + bias, with the adapter where NeMo has it."""
    if not config.parts.adapter_size:
        return residual + out + bias
    return residual + out + _adapter(w, config, stem, out) + bias


def _adapter(w: StoredWeights, config: Any, stem: str, x: torch.Tensor) -> torch.Tensor:
    def norm(values: torch.Tensor) -> torch.Tensor:
        weight, offset = w[f"{stem}.layer_norm.weight"], w[f"{stem}.layer_norm.bias"]
        return functional.layer_norm(values, weight.shape, weight, offset, ADAPTER_NORM_EPS)

    before = config.parts.adapter_norm_position == "pre"
    inner = functional.silu((norm(x) if before else x) @ w[f"{stem}.DenseSiluDense.wi.weight"])
    out = inner @ w[f"{stem}.DenseSiluDense.wo.weight"]
    return out if before else norm(out)
