"""Mixtures of experts: each token goes through the few MLPs of a layer that its router scores best
(Shazeer et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import Linear, Norm

COPY_COST = 3  # what a copied weight costs: it is read, written and read again


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that every token goes through, weighed by sigmoid(scale(x)); gate as in MLP."""

    up: Linear
    gate: Linear
    down: Linear
    scale: Linear


@dataclass(frozen=True)
class Experts:
    """One rank's parts of a layer's experts.

    router: [experts, hidden];  norm: of what router and experts read
    up, gate: [experts, ffn / tp, hidden], `gate` where the MLPs are gated
    down:   [experts, hidden, ffn / tp]
    per_token:  how many experts a token goes through
    normalized: whether their weights, of a softmax over all experts, are divided by their sum
    """

    router: Linear
    norm: Norm
    up: Tensor
    gate: Tensor | None
    down: Tensor
    per_token: int
    normalized: bool
    shared: SharedExpert | None = None

    @property
    def count(self) -> int:
        return self.up.shape[0]


def mixture(
    kernels: ModuleType, x: Tensor, experts: Experts, activation: str, *, few: bool
) -> Tensor:
    """What the experts add to x float32 [N, hidden], before the sum over ranks: the same.

    few: the tokens of a decode step, whose launches must not depend on what the router says, since
    they may be recorded
    """
    hidden = kernels.norm(x, experts.norm, experts.up.dtype)
    chosen, weights = _route(kernels, hidden, experts)
    if not few:
        out = _one_by_one(kernels, hidden, experts, activation, chosen, weights)
    elif COPY_COST * chosen.numel() <= experts.count:
        out = _copied(kernels, hidden, experts, activation, chosen, weights)
    else:
        out = _all(kernels, hidden, experts, activation, chosen, weights)
    if experts.shared is None:
        return out
    shared = experts.shared
    inner = kernels.mlp_up(hidden, shared.up, shared.gate, activation)
    weight = kernels.project(hidden, shared.scale).float().sigmoid()
    return out + weight * kernels.project(inner, shared.down).float()


def _route(kernels: ModuleType, hidden: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Every token's experts, int64 [N, per_token], and what their results are multiplied by."""
    scores = kernels.project(hidden, experts.router).float().softmax(-1)
    weights, chosen = scores.topk(experts.per_token, -1)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights


def _through(
    kernels: ModuleType, hidden: Tensor, experts: Experts, activation: str, expert: int
) -> Tensor:
    """One expert's result for hidden [N, hidden], float32."""
    gate = None if experts.gate is None else Linear(experts.gate[expert])
    inner = kernels.mlp_up(hidden, Linear(experts.up[expert]), gate, activation)
    return kernels.project(inner, Linear(experts.down[expert])).float()


def _one_by_one(
    kernels: ModuleType,
    hidden: Tensor,
    experts: Experts,
    activation: str,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Each expert works on its tokens alone; the host waits for the router."""
    out = torch.zeros(hidden.shape, device=hidden.device)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        result = _through(kernels, hidden[tokens], experts, activation, expert)
        out.index_add_(0, tokens, result * weights[tokens, places, None])
    return out


def _all(
    kernels: ModuleType,
    hidden: Tensor,
    experts: Experts,
    activation: str,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Every expert works on every token; weights are 0 where it was not chosen."""
    whole = weights.new_zeros(hidden.shape[0], experts.count).scatter_(1, chosen, weights)
    out = torch.zeros(hidden.shape, device=hidden.device)
    for expert in range(experts.count):
        result = _through(kernels, hidden, experts, activation, expert)
        out += result * whole[:, expert, None]
    return out


def _copied(
    kernels: ModuleType,
    hidden: Tensor,
    experts: Experts,
    activation: str,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """The chosen experts' weights are copied side by side."""
    inner = torch.einsum("nkfh,nh->nkf", experts.up[chosen], hidden)
    inner = kernels.ACTIVATIONS[activation](inner)
    if experts.gate is not None:
        inner = inner * torch.einsum("nkfh,nh->nkf", experts.gate[chosen], hidden)
    results = torch.einsum("nkhf,nkf->nkh", experts.down[chosen], inner)
    return (results.float() * weights[..., None]).sum(1)
