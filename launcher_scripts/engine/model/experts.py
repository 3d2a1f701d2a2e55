"""Mixtures of experts: each token goes through the few MLPs of a layer that its router scores best
(Shazeer et al. 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from launcher_scripts.engine.model.model_weights import Experts
from launcher_scripts.kernels.operands import ExpertMLPs
from launcher_scripts.kernels.ops import Ops


def mixture(kernels: Ops, hidden: Tensor, experts: Experts, activation: str) -> Tensor:
    """What this rank's parts of the experts add to tokens, of their normalized hidden states
    [N, hidden]: float32 [P, N, hidden], to be summed."""
    chosen, weights = kernels.route(hidden, experts.router)
    mlps = ExpertMLPs(experts.in_proj, experts.gate, experts.out_proj, activation)
    parts = kernels.mixture(hidden, chosen, weights, mlps)
    if experts.shared is None:
        return parts
    shared = experts.shared
    inner = kernels.mlp_up(hidden, shared.mlp.in_proj, shared.mlp.gate, activation)
    result = kernels.project(inner, shared.mlp.out_proj).float()
    if shared.scale is not None:
        result = result * kernels.project(hidden, shared.scale).float().sigmoid()
    return torch.cat([parts, result[None]])
