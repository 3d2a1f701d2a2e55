"""Layers of experts as Megatron-LM core's configuration describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher_scripts.checkpoint.sources.nemo_options import flag, refuse_others, size
from launcher_scripts.common.errors import Problems

# Megatron-LM's argument is called num_experts.
NO_EXPERTS: dict[str, tuple[Any, ...]] = {"num_moe_experts": (None, 0), "num_experts": (None, 0)}
# Settings whose other values route tokens, or compute experts, in ways that the engine does not.
_KNOWN_VALUES: dict[str, tuple[Any, ...]] = {
    "add_bias_linear": (False,),
    "moe_apply_probs_on_input": (None, False),
    "moe_latent_size": (None, 0),
    "moe_mlp_glu_interleave_size": (None, 0),
    "moe_router_enable_expert_bias": (None, False),
    "moe_router_force_biased": (None, 0, 0.0),
    "moe_router_force_load_balancing": (None, False),
    "moe_router_group_topk": (None, 0),
    "moe_router_quantile_balancing_ema": (None, 0, 0.0),
    "moe_router_score_function": (None, "softmax"),
    "moe_router_topk_limited_devices": (None, 0),
    "moe_router_topk_scaling_factor": (None, 0, 0.0, 1, 1.0),
    "moe_shared_expert_glu_interleave_size": (None, 0),
}
# How a training balances its experts, without a part in what the router chooses.
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def read_experts(raw: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """GPTConfig's fields of a model with experts, {} of one without.

    The core weighs the chosen experts by a softmax over their scores alone, which is one over all
    divided by its sum, unless the softmax comes first (moe_router_pre_softmax).
    """
    name = next((key for key in NO_EXPERTS if raw.get(key)), None)
    if name is None:
        return {}
    _refuse(raw, problems)
    fields = {
        "num_experts": size(raw, name, problems),
        "experts_per_token": size(raw, "moe_router_topk", problems, 2),
        "normalized_experts": not flag(raw, "moe_router_pre_softmax", False),
    }
    sizes = {
        "ffn_size": "moe_ffn_hidden_size",
        "shared_expert_size": "moe_shared_expert_intermediate_size",
    }
    said = {field: size(raw, key, problems) for field, key in sizes.items() if raw.get(key)}
    gated = flag(raw, "moe_shared_expert_gate", False)
    ungated = {"shared_expert_gate": False} if "shared_expert_size" in said and not gated else {}
    return fields | said | ungated


def _refuse(raw: Mapping[str, Any], problems: Problems) -> None:
    """Note what the engine does not compute."""
    refuse_others(raw, problems, _KNOWN_VALUES, " of a model with experts")
    balancing = raw.get("moe_router_load_balancing_type") or "none"
    kinds = balancing if isinstance(balancing, (list, tuple)) else [balancing]
    if not set(map(str, kinds)) <= {*_BALANCING}:
        what = "moe_router_load_balancing_type is not supported"
        problems.add(what, got=balancing, choices=_BALANCING)
    frequency = raw.get("moe_layer_freq") or 1
    marks = frequency if isinstance(frequency, (list, tuple)) else [frequency]
    if any(mark != 1 for mark in marks):
        what = "moe_layer_freq is not supported: every layer has experts, or none has"
        problems.add(what, got=frequency, choices=[1])
