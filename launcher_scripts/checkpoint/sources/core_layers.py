"""The layers of a GPT of Megatron-LM core: their branches and experts as GPTConfig's fields, and
their tensors under names that do not depend on a layer's kind.

Hybrids (the core's HybridModel, once MambaModel) have one branch a layer, by the letters of a
pattern; a GPT may have gated delta nets in some layers; heterogeneous models have the layers of a
Llama-Nemotron, see huggingface_hybrids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, concatenated
from launcher_scripts.checkpoint.layout.source_checkpoint import renamed
from launcher_scripts.checkpoint.sources.huggingface_hybrids import heterogeneous_layers
from launcher_scripts.checkpoint.sources.training_options import NO_EXPERTS, TrainingOptions
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.files import mapping, parse_json
from launcher_scripts.models.family import branches_text, layer_list
from launcher_scripts.models.gpt import SCORE_FUNCTIONS, GPTConfig, expert_groups

# Options that say something of such layers -> their values in a model without.
PLAIN_LAYERS: dict[str, tuple[Any, ...]] = {
    "attention_output_gate": (None, False),
    "is_hybrid_model": (None, False),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "heterogeneous_block_specs": (None, False),
    "heterogeneous_layers_config_path": (None, ""),
    "heterogeneous_layers_config_encoded_json": (None, ""),
}
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
_ENCODED = "heterogeneous_layers_config_encoded_json"
_DELTA_NETS = ("gdn", "gated_delta_net")
# A letter of a hybrid's pattern -> the branch.
_LETTERS = {
    "M": "mamba2",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "G": "gated_delta",
}
# Part of a layer's tensors' names -> the letter; the first that is there counts.
_SIGNS = {
    ".mixer.": "M",
    ".self_attention.in_proj.": "G",
    ".self_attention.": "*",
    ".mlp.router.": "E",
    ".mlp.": "-",
}
# The core's Mamba-2 has these whatever the training says.
_MAMBA_CONV, _MAMBA_EPS = 4, 1e-5
# Values of a training of a hybrid that says nothing: the providers of Bridge and NeMo 2 have these.
HYBRID_DEFAULTS: dict[str, Any] = {
    "add_bias_linear": False,
    "is_hybrid_model": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "none",
    "share_embeddings_and_output_weights": False,
}

# Settings whose other values route tokens, or compute experts, in ways that the engine does not.
_KNOWN_VALUES_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "moe_apply_probs_on_input": (None, False),
    "moe_mlp_glu_interleave_size": (None, 0),
    "moe_router_force_biased": (None, 0, 0.0),
    "moe_router_force_load_balancing": (None, False),
    "moe_router_quantile_balancing_ema": (None, 0, 0.0),
    "moe_router_topk_limited_devices": (None, 0),
    "moe_shared_expert_glu_interleave_size": (None, 0),
}
# How a training balances its experts, without a part in what the router chooses.
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def core_experts(options: TrainingOptions, layers: int, letters: str | None) -> dict[str, Any]:
    """GPTConfig's fields of a model with experts, {} of one without.

    letters: of a hybrid, see pattern_of
    """
    name = next((key for key in NO_EXPERTS if options.get(key)), None)
    if name is None or (letters is not None and "E" not in letters):
        return {}
    _refuse_experts(options)
    biased = options.flag("add_bias_linear", True) or None
    fields = {
        "num_experts": options.size(name),
        "router_bias": biased,
        **_router(options),
    }
    dense = _dense_layers(options, layers) if letters is None else None
    if dense is not None or "-" in (letters or ""):
        local = options.size("ffn_hidden_size", 4 * options.size("hidden_size"))
        fields |= {"dense_layers": dense, "dense_ffn_size": local}
    sizes = {
        "ffn_size": "moe_ffn_hidden_size",
        "shared_expert_size": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
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
    flags = _flags(options, "moe_layer_freq", frequency, layers, lambda n: n % frequency == 0)
    return layer_list(layer for layer, mark in enumerate(flags) if mark == 0)


def _flags(
    options: TrainingOptions, name: str, value: Any, layers: int, rule: Callable[[int], bool]
) -> list[int]:
    """0 or 1 for each layer: of a list, or by the rule of a number."""
    flags = list(value) if isinstance(value, (list, tuple)) else []
    if type(value) is int and value > 0:
        flags = [int(rule(layer)) for layer in range(layers)]
    if len(flags) != layers or any(flag not in (0, 1) for flag in flags):
        choices = ["a number above 0", f"a list of {layers}, 0 or 1 for each layer"]
        options.problems.add(f"{name} is not supported", got=value, choices=choices)
    return flags


def _refuse_experts(options: TrainingOptions) -> None:
    """Note what the engine does not compute."""
    options.reject_others(_KNOWN_VALUES_OF_EXPERTS, " of a model with experts")
    balancing = options.get("moe_router_load_balancing_type") or "none"
    kinds = balancing if isinstance(balancing, (list, tuple)) else [balancing]
    if not set(map(str, kinds)) <= {*_BALANCING}:
        message = "moe_router_load_balancing_type is not supported"
        options.problems.add(message, got=balancing, choices=_BALANCING)


def pattern_of(options: TrainingOptions, names: Iterable[str]) -> str | None:
    """The letters of a hybrid's layers, of which every one has a single branch; None of another.

    names: of the tensors, which show the layers of a training that said ratios of them
    """
    pattern = next((options.get(key) for key in _PATTERNS if options.get(key)), None)
    hybrid = options.flag("is_hybrid_model", False)
    if pattern is None and not hybrid:
        return None
    for key in ("hybrid_attention_ratio", "hybrid_mlp_ratio", "mtp_hybrid_override_pattern"):
        options.get(key)
    letters = str(pattern or _letters_of(names)).split("/", 1)[0].replace("|", "")
    others = sorted({*letters} - _LETTERS.keys())
    if others or not letters:
        options.problems.add(
            f"{_PATTERNS[0]} has layers that are not supported",
            got=others or pattern,
            choices=tuple(_LETTERS),
        )
        return "M"
    return letters


def predicts_more(options: TrainingOptions) -> bool:
    """True for a model with layers for multi-token prediction, which a pattern has after a /."""
    return bool(options.get("mtp_num_layers")) or any(
        "/" in str(options.get(key)) for key in _PATTERNS
    )


def _letters_of(names: Iterable[str]) -> str:
    layers: dict[int, set[str]] = {}
    for name in names:
        match = re.match(r"decoder\.layers\.(\d+)(\..+)", name)
        if match:
            signs = [letter for sign, letter in _SIGNS.items() if sign in match[2]]
            layers.setdefault(int(match[1]), set()).update(signs[:1])
    order = list(_SIGNS.values())
    return "".join(min(layers[layer], key=order.index) for layer in sorted(layers) if layers[layer])


def branches_of(
    options: TrainingOptions, layers: int, letters: str | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of a model whose layers do not all have attention and an MLP; {} of another.

    fields: of the model so far
    """
    variant = options.get("experimental_attention_variant")
    encoded = options.get(_ENCODED)
    result: dict[str, Any] = {}
    if options.flag("attention_output_gate", False):
        result["attention_output_gate"] = True
    if variant is not None and variant not in _DELTA_NETS:
        message = "experimental_attention_variant is not supported"
        options.problems.add(message, got=variant, choices=_DELTA_NETS)
    if letters is not None:
        result |= _hybrid(options, letters)
    elif variant is not None:
        result |= _delta_layers(options, layers, fields)
    elif options.get("linear_attention_freq") is not None:
        message = "linear_attention_freq needs experimental_attention_variant"
        options.problems.add(message, got=options.get("linear_attention_freq"))
    if encoded:
        result |= _heterogeneous(options, str(encoded), layers)
    elif options.flag("heterogeneous_block_specs", False):
        options.problems.add(f"heterogeneous_block_specs needs {_ENCODED}", got=encoded)
    else:
        options.get("heterogeneous_layers_config_path")
    branches = "layer_branches" in result
    if branches and (
        options.flag("multi_latent_attention", False)
        or (encoded and (letters is not None or variant is not None or fields.get("num_experts")))
    ):
        options.problems.add(
            "layers of several kinds together with multi_latent_attention, or heterogeneous ones "
            "with experts or of a hybrid, are not supported"
        )
    return result


def _hybrid(options: TrainingOptions, letters: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "layer_branches": ",".join(_LETTERS[letter] for letter in letters),
        "dense_layers": None,
        "qk_norm": None,
    }
    if "G" in letters:
        fields |= _delta(options)
    if "M" not in letters:
        return fields
    size, hidden = options.size("mamba_head_dim", 64), options.size("hidden_size")
    heads = options.size("mamba_num_heads", max(2 * hidden // size, 1))
    mamba = {
        "conv_kernel": _MAMBA_CONV,
        "conv_bias": True,
        "mamba_num_heads": heads,
        "mamba_head_size": size,
        "mamba_state_size": options.size("mamba_state_dim", 128),
        "mamba_num_groups": options.size("mamba_num_groups", 8),
        "mamba_bias": False,
        "mixer_norm_eps": _MAMBA_EPS,
    }
    eps = options.real("layernorm_epsilon", _MAMBA_EPS)
    if "G" in letters and (fields["conv_kernel"] != _MAMBA_CONV or eps != _MAMBA_EPS):
        options.problems.add(
            "Mamba-2 and gated delta nets of one model must have one width of convolutions and "
            "one epsilon",
            got=(fields["conv_kernel"], eps),
            choices=[(_MAMBA_CONV, _MAMBA_EPS)],
        )
    return fields | mamba


def _delta(options: TrainingOptions) -> dict[str, Any]:
    return {
        "conv_kernel": options.size("linear_conv_kernel_dim", 4),
        "delta_num_heads": options.size("linear_num_value_heads", 32),
        "delta_num_key_heads": options.size("linear_num_key_heads", 16),
        "delta_key_head_size": options.size("linear_key_head_dim", 128),
        "delta_value_head_size": options.size("linear_value_head_dim", 128),
    }


def _delta_layers(
    options: TrainingOptions, layers: int, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Gated delta nets: in all layers but every n-th one, or those with 1 in a list."""
    name = "linear_attention_freq"
    frequency = options.get(name)
    flags = _flags(options, name, frequency, layers, lambda n: (n + 1) % frequency != 0)
    dense = (fields.get("dense_layers") or "").split(",")
    experts = fields.get("num_experts") is not None
    branches = [
        (
            ("gated_delta" if flag else "attention",),
            ("moe" if experts and str(layer) not in dense else "mlp",),
        )
        for layer, flag in enumerate(flags)
    ]
    return {"layer_branches": branches_text(branches), "dense_layers": None, **_delta(options)}


def _heterogeneous(options: TrainingOptions, encoded: str, layers: int) -> dict[str, Any]:
    try:
        blocks = mapping(parse_json(encoded.encode())).get("block_configs")
    except ValueError as error:
        options.problems.add(f"{_ENCODED} is damaged: {error}")
        return {}
    heads, hidden = options.size("num_attention_heads"), options.size("hidden_size")
    return heterogeneous_layers(options.problems, blocks, layers, heads, hidden)


# Names of layers' tensors -> those that they have whatever the kind of the layer.
_NAMES = (
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"\.conv1d_(weight|bias)$", r".conv1d.\1"),
    (r"(\.layers\.\d+)\.norm\.(weight|bias)$", r"\1.input_layernorm.\2"),
    (
        r"\.(?:mixer|self_attention)\.(?:in_proj\.|linear_qkv\.)?layer_norm_(weight|bias)$",
        r".input_layernorm.\1",
    ),
    (r"\.mlp\.(?:linear_fc1\.)?layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
)
# Tensors that are stored in parts, so that ranks can share each part -> the parts in order.
_PART = re.compile(r"(.+\.(?:in_proj|conv1d)(?:\.adapter\.linear_out)?\.(?:weight|bias))\.(\w+)")
_PARTS = (
    ("z", "x", "B", "C", "dt"),
    ("x", "B", "C"),
    ("query", "key", "value", "z", "beta", "alpha"),
    ("query", "key", "value"),
)
# Tensors of tensor-parallel ranks that hold rows of each of these sections, by GPTConfig's names.
_SECTIONS = (
    (
        r"\.mixer\.in_proj\.weight",
        ("mamba_inner_size",) * 2 + ("mamba_group_size",) * 2 + ("mamba_num_heads",),
    ),
    (r"\.mixer\.conv1d\.", ("mamba_inner_size",) + ("mamba_group_size",) * 2),
    (
        r"\.self_attention\.in_proj\.weight",
        ("delta_key_size",) * 2 + ("delta_value_size",) * 2 + ("delta_num_heads",) * 2,
    ),
    (r"\.self_attention\.conv1d\.", ("delta_key_size",) * 2 + ("delta_value_size",)),
    (r"\.(?:self_attention|mlp)\.weight", ("hidden_size",)),
)


def joined_parts(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors, those that are stored in parts as one each.

    Raises CheckpointError for one of which a part is missing.
    """
    result: dict[str, SourceTensor] = {}
    parts: dict[str, dict[str, SourceTensor]] = {}
    for name, tensor in tensors.items():
        match = _PART.fullmatch(name)
        if match is None:
            result[name] = tensor
        else:
            parts.setdefault(match[1], {})[match[2]] = tensor
    for name, stored in parts.items():
        order = next((names for names in _PARTS if {*names} == stored.keys()), None)
        if order is None:
            raise CheckpointError(problem(f"{name} lacks parts, or has others", got=sorted(stored)))
        result[name] = concatenated([stored[part] for part in order], 0)
    return result


def generic_names(tensors: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The tensors of a model with layer_branches, under the names of the dialect mcore_branches.

    origin: where they are from, for errors
    """
    return renamed(((name, _generic_name(name), value) for name, value in tensors.items()), origin)


def _generic_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def joined_ranks(
    shards: Mapping[str, Sequence[SourceTensor]], config: GPTConfig
) -> dict[str, tuple[SourceTensor, ...]]:
    """Shards of tensor-parallel ranks, with those that have several sections as one tensor."""
    result: dict[str, tuple[SourceTensor, ...]] = {}
    for name, tensors in shards.items():
        full = concatenated_ranks(name, tensors, config)
        result[name] = tuple(tensors) if full is None else (full,)
    return result


def concatenated_ranks(
    name: str, shards: Sequence[SourceTensor], config: Any
) -> SourceTensor | None:
    """The tensor whose ranks' shards have rows of several sections each; None for another."""
    for pattern, sections in _SECTIONS:
        if len(shards) > 1 and re.search(pattern, name):
            return concatenated(shards, 0, [int(getattr(config, size)) for size in sections])
    return None
