"""Layers of experts as Megatron-LM core's configuration describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher_scripts.checkpoint.sources.nemo_options import (
    choice,
    flag,
    real,
    refuse_others,
    size,
)
from launcher_scripts.common.errors import Problems
from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import SCORE_FUNCTIONS

# Megatron-LM's argument is called num_experts.
NO_EXPERTS: dict[str, tuple[Any, ...]] = {"num_moe_experts": (None, 0), "num_experts": (None, 0)}
# Settings whose other values route tokens, or compute experts, in ways that the engine does not.
_KNOWN_VALUES: dict[str, tuple[Any, ...]] = {
    "moe_apply_probs_on_input": (None, False),
    "moe_latent_size": (None, 0),
    "moe_mlp_glu_interleave_size": (None, 0),
    "moe_router_force_biased": (None, 0, 0.0),
    "moe_router_force_load_balancing": (None, False),
    "moe_router_group_topk": (None, 0),
    "moe_router_quantile_balancing_ema": (None, 0, 0.0),
    "moe_router_topk_limited_devices": (None, 0),
    "moe_shared_expert_glu_interleave_size": (None, 0),
}
# How a training balances its experts, without a part in what the router chooses.
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def read_experts(raw: Mapping[str, Any], layers: int, problems: Problems) -> dict[str, Any]:
    """GPTConfig's fields of a model with experts, {} of one without."""
    name = next((key for key in NO_EXPERTS if raw.get(key)), None)
    if name is None:
        return {}
    _refuse(raw, problems)
    biased = flag(raw, "add_bias_linear", True) or None
    fields = {
        "num_experts": size(raw, name, problems),
        "router_bias": biased,
        **_router(raw, problems),
    }
    dense = _dense_layers(raw, layers, problems)
    if dense is not None:
        own = size(raw, "ffn_hidden_size", problems, 4 * size(raw, "hidden_size", problems))
        fields |= {"dense_layers": dense, "dense_ffn_size": own}
    sizes = {
        "ffn_size": "moe_ffn_hidden_size",
        "shared_expert_size": "moe_shared_expert_intermediate_size",
    }
    said = {field: size(raw, key, problems) for field, key in sizes.items() if raw.get(key)}
    gated = flag(raw, "moe_shared_expert_gate", False)
    ungated = {"shared_expert_gate": False} if "shared_expert_size" in said and not gated else {}
    return fields | said | ungated


def _router(raw: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """How experts are chosen and weighed.

    With softmax the core weighs those chosen by one over their logits alone, which is one over all
    divided by its sum, unless the softmax comes first (moe_router_pre_softmax). Only with sigmoid
    can there be a bias.
    """
    per_token = size(raw, "moe_router_topk", problems, 2)
    functions = {name: name for name in SCORE_FUNCTIONS}
    function = choice(raw, "moe_router_score_function", "softmax", functions, problems)
    biased = flag(raw, "moe_router_enable_expert_bias", False)
    fields = {
        "experts_per_token": per_token,
        "normalized_experts": not flag(raw, "moe_router_pre_softmax", False),
        "router_scaling_factor": real(raw, "moe_router_topk_scaling_factor", 1.0, problems),
    }
    if function == "sigmoid":
        said = {"router_score_function": function, "expert_bias": biased or None}
        return fields | said | {"normalized_experts": per_token > 1}
    if biased:
        what = "moe_router_enable_expert_bias needs moe_router_score_function sigmoid"
        problems.add(what, got=function)
    return fields


def _dense_layers(raw: Mapping[str, Any], layers: int, problems: Problems) -> str | None:
    """Those without experts, by moe_layer_freq: every so many-th layer has them, from the first
    on, or those of a 1 in a list."""
    said = raw.get("moe_layer_freq") or 1
    marks = said if isinstance(said, (list, tuple)) else ()
    if type(said) is int and said > 0:
        marks = [int(layer % said == 0) for layer in range(layers)]
    if len(marks) != layers or any(mark not in (0, 1) for mark in marks):
        choices = ["a number above 0", f"a list of {layers}, 0 or 1 for each layer"]
        problems.add("moe_layer_freq is not supported", got=said, choices=choices)
    return layer_list(layer for layer, mark in enumerate(marks) if mark == 0)


def _refuse(raw: Mapping[str, Any], problems: Problems) -> None:
    """Note what the engine does not compute."""
    refuse_others(raw, problems, _KNOWN_VALUES, " of a model with experts")
    balancing = raw.get("moe_router_load_balancing_type") or "none"
    kinds = balancing if isinstance(balancing, (list, tuple)) else [balancing]
    if not set(map(str, kinds)) <= {*_BALANCING}:
        what = "moe_router_load_balancing_type is not supported"
        problems.add(what, got=balancing, choices=_BALANCING)
