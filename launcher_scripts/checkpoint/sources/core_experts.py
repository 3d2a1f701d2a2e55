"""What a training of Megatron-LM core says of a GPT's experts, as GPTConfig's fields."""

from __future__ import annotations

from typing import Any

from launcher_scripts.checkpoint.sources.training_options import NO_EXPERTS, TrainingOptions
from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import SCORE_FUNCTIONS, expert_groups

# Settings whose other values route tokens, or compute experts, in ways that the engine does not.
_KNOWN_VALUES_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "moe_apply_probs_on_input": (None, False),
    "moe_latent_size": (None, 0),
    "moe_mlp_glu_interleave_size": (None, 0),
    "moe_router_force_biased": (None, 0, 0.0),
    "moe_router_force_load_balancing": (None, False),
    "moe_router_quantile_balancing_ema": (None, 0, 0.0),
    "moe_router_topk_limited_devices": (None, 0),
    "moe_shared_expert_glu_interleave_size": (None, 0),
}
# How a training balances its experts, without a part in what the router chooses.
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def experts_of(options: TrainingOptions, layers: int) -> dict[str, Any]:
    """GPTConfig's fields of a model with experts, {} of one without."""
    name = next((key for key in NO_EXPERTS if options.get(key)), None)
    if name is None:
        return {}
    _refuse_experts(options)
    biased = options.flag("add_bias_linear", True) or None
    fields = {
        "num_experts": options.size(name),
        "router_bias": biased,
        **_router(options),
    }
    dense = _dense_layers(options, layers)
    if dense is not None:
        local = options.size("ffn_hidden_size", 4 * options.size("hidden_size"))
        fields |= {"dense_layers": dense, "dense_ffn_size": local}
    sizes = {
        "ffn_size": "moe_ffn_hidden_size",
        "shared_expert_size": "moe_shared_expert_intermediate_size",
    }
    raw = {field: options.size(key) for field, key in sizes.items() if options.get(key)}
    gated = options.flag("moe_shared_expert_gate", False)
    ungated = {"shared_expert_gate": False} if "shared_expert_size" in raw and not gated else {}
    return fields | raw | ungated


def _router(options: TrainingOptions) -> dict[str, Any]:
    """Return the fields of the router: how experts are chosen and weighed.

    With softmax the core weighs those chosen by one over their logits alone, which is one over all
    divided by its sum, unless the softmax comes first (moe_router_pre_softmax). Only with sigmoid
    can there be a bias.
    """
    per_token = options.size("moe_router_topk", 2)
    functions = {name: name for name in SCORE_FUNCTIONS}
    function = options.choice("moe_router_score_function", "softmax", functions)
    biased = options.flag("moe_router_enable_expert_bias", False)
    fields = {
        "experts_per_token": per_token,
        "normalized_experts": not options.flag("moe_router_pre_softmax", False),
        "router_scaling_factor": options.real("moe_router_topk_scaling_factor", 1.0),
    }
    groups, selected = options.get("moe_router_num_groups"), options.get("moe_router_group_topk")
    if selected and not groups:
        message = "moe_router_group_topk needs moe_router_num_groups"
        options.problems.add(message, got=selected)
    elif selected:
        selected = options.size("moe_router_group_topk")
        scores = max(per_token // selected, 1)
        if function == "softmax" and fields["normalized_experts"] and scores > 1:
            message = "moe_router_group_topk of softmax needs moe_router_pre_softmax"
            options.problems.add(message, got=selected, choices=(f"{per_token // 2 + 1} or more",))
        fields |= expert_groups(options.size("moe_router_num_groups"), selected, scores)
    if function == "sigmoid":
        raw = {"router_score_function": function, "expert_bias": biased or None}
        return fields | raw | {"normalized_experts": per_token > 1}
    if biased:
        message = "moe_router_enable_expert_bias needs moe_router_score_function sigmoid"
        options.problems.add(message, got=function)
    return fields


def _dense_layers(options: TrainingOptions, layers: int) -> str | None:
    """Return the layers without experts, by moe_layer_freq: every n-th layer has experts, from the
    first on, or those with 1 in a list."""
    frequency = options.get("moe_layer_freq") or 1
    flags = frequency if isinstance(frequency, (list, tuple)) else ()
    if type(frequency) is int and frequency > 0:
        flags = [int(layer % frequency == 0) for layer in range(layers)]
    if len(flags) != layers or any(mark not in (0, 1) for mark in flags):
        choices = ["a number above 0", f"a list of {layers}, 0 or 1 for each layer"]
        options.problems.add("moe_layer_freq is not supported", got=frequency, choices=choices)
    return layer_list(layer for layer, mark in enumerate(flags) if mark == 0)


def _refuse_experts(options: TrainingOptions) -> None:
    """Note what the engine does not compute."""
    options.reject_others(_KNOWN_VALUES_OF_EXPERTS, " of a model with experts")
    balancing = options.get("moe_router_load_balancing_type") or "none"
    kinds = balancing if isinstance(balancing, (list, tuple)) else [balancing]
    if not set(map(str, kinds)) <= {*_BALANCING}:
        message = "moe_router_load_balancing_type is not supported"
        options.problems.add(message, got=balancing, choices=_BALANCING)
