"""What the plain forward passes have in common: layers, prompt tables, IA3, adapters (float32)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from launcher_scripts.models.adapters import ADAPTER_NORM_EPS
from tests.checkpoint.reference_weights import StoredWeights

ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_erf": functional.gelu,
    "silu": functional.silu,
}


def linear(w, name, x):
    """With the bias, if there is one."""
    x = x @ w[f"{name}.weight"]
    return x + w[f"{name}.bias"] if f"{name}.bias" in w else x


def without_bias(w, name, x):
    """The output without its bias, and the bias."""
    bias = w[f"{name}.bias"] if f"{name}.bias" in w else torch.zeros(())
    return x @ w[f"{name}.weight"], bias


def norm(w, config, name, x):
    weight = w[f"{name}.weight"]
    if config.normalization == "layernorm":
        return functional.layer_norm(x, weight.shape, weight, w[f"{name}.bias"], config.norm_eps)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps) * weight


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
