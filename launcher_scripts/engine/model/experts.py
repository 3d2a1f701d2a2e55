"""Mixtures of experts: each token goes through the few MLPs of a layer that its router scores best
(Shazeer et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.model.model_weights import Experts
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.kernels.ops import Ops

COPY_COST = 3  # what a copied weight costs: it is read, written and read again


def mixture(kernels: Ops, x: Tensor, experts: Experts, activation: str, *, few: bool) -> Tensor:
    """What the experts add to x float32 [N, hidden], before the sum over ranks: the same.

    few: the tokens of a decode step, whose launches must not depend on what the router says, since
    they may be recorded
    """
    norm, dtype = experts.in_proj.norm, experts.in_proj.dtype
    hidden = x.to(dtype) if norm is None else kernels.norm(x, norm, dtype)
    routed = _Routed(kernels, hidden, experts, activation, *_route(kernels, hidden, experts))
    if not few:
        out = routed.one_by_one()
    elif COPY_COST * routed.chosen.numel() <= experts.count:
        out = routed.copied()
    else:
        out = routed.all()
    if experts.shared is None:
        return out
    shared = experts.shared
    inner = kernels.mlp_up(hidden, shared.mlp.in_proj, shared.mlp.gate, activation)
    result = kernels.project(inner, shared.mlp.out_proj).float()
    if shared.scale is not None:
        result = result * kernels.project(hidden, shared.scale).float().sigmoid()
    return out + result


def _route(kernels: Ops, hidden: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Every token's experts, int64 [N, per_token], and what their results are multiplied by."""
    scores = kernels.project(hidden, experts.router).float().softmax(-1)
    weights, chosen = scores.topk(experts.per_token, -1)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights


@dataclass(frozen=True)
class _Routed:
    """Tokens hidden [N, hidden] and their experts; three ways to the same sum, [N, hidden]."""

    kernels: Ops
    hidden: Tensor
    experts: Experts
    activation: str
    chosen: Tensor
    weights: Tensor

    def one_by_one(self) -> Tensor:
        """Each expert works on its tokens alone; the host waits for the router."""
        out = torch.zeros(self.hidden.shape, device=self.hidden.device)
        for expert in self.chosen.unique().tolist():
            tokens, places = (self.chosen == expert).nonzero(as_tuple=True)
            result = self._through(expert, self.hidden[tokens])
            out.index_add_(0, tokens, result * self.weights[tokens, places, None])
        return out

    def all(self) -> Tensor:
        """Every expert works on every token; weights are 0 where it was not chosen."""
        whole = self.weights.new_zeros(self.hidden.shape[0], self.experts.count)
        whole.scatter_(1, self.chosen, self.weights)
        out = torch.zeros(self.hidden.shape, device=self.hidden.device)
        for expert in range(self.experts.count):
            out += self._through(expert, self.hidden) * whole[:, expert, None]
        return out

    def copied(self) -> Tensor:
        """The chosen experts' weights are copied side by side."""
        experts, chosen = self.experts, self.chosen
        inner = torch.einsum("nkfh,nh->nkf", experts.in_proj.weight[chosen], self.hidden)
        inner = self.kernels.ACTIVATIONS[self.activation](inner)
        if experts.gate is not None:
            inner = inner * torch.einsum("nkfh,nh->nkf", experts.gate.weight[chosen], self.hidden)
        results = torch.einsum("nkhf,nkf->nkh", experts.out_proj.weight[chosen], inner)
        return (results.float() * self.weights[..., None]).sum(1)

    def _through(self, expert: int, hidden: Tensor) -> Tensor:
        """One expert's result for hidden [n, hidden], float32."""
        experts, kernels = self.experts, self.kernels
        gate = None if experts.gate is None else Linear(experts.gate.weight[expert])
        up, down = Linear(experts.in_proj.weight[expert]), Linear(experts.out_proj.weight[expert])
        inner = kernels.mlp_up(hidden, up, gate, self.activation)
        return kernels.project(inner, down).float()
