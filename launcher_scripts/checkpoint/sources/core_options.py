"""What a training of Megatron-LM core says about its model, and a GPT's hyperparameters.

Three tools write it in three ways: Megatron-LM as the arguments of its command line, Megatron
Bridge as `run_config.yaml`, NeMo 2 as `context/model.yaml`. Bridge and NeMo name the fields of the
core's configuration; `of_arguments` gives Megatron-LM's arguments the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.checkpoint.sources import core_experts
from launcher_scripts.checkpoint.sources.nemo_gpt import core_dialects
from launcher_scripts.checkpoint.sources.nemo_options import (
    choice,
    flag,
    real,
    refuse_others,
    size,
)
from launcher_scripts.checkpoint.sources.rotary_factors import yarn
from launcher_scripts.checkpoint.sources.training_keys import TrackedMapping, check_keys
from launcher_scripts.common.clamped_swiglu import CLAMP
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import GPTConfig

_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}
_NORMALIZATIONS = {name: name for name in ("layernorm", "rmsnorm")}
# The last part of a function's name -> the activation; the fused kernel's "gelu" is another one.
_ACTIVATIONS = {
    "gelu": "gelu_erf",
    "openai_gelu": "gelu",
    "silu": "silu",
    "squared_relu": "squared_relu",
    "relu": "relu",
    "quick_gelu": "clamped_swiglu",
}
# Fields whose other values change the network in ways this project does not know.
_KNOWN_VALUES: dict[str, tuple[Any, ...]] = {
    "multi_query_attention": (None, False),
    "project_size": (None, 0),
    "multi_latent_attention": (None, False),
    "qk_l2_norm": (None, False),
    "rotary_interleaved": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "attention_output_gate": (None, False),
    "softmax_type": (None, "vanilla", "learnable"),
    "is_hybrid_model": (None, False),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "heterogeneous_block_specs": (None, False),
    "scale_embedding": (None, False),
    "use_mup": (None, False),
    "retro_add_retriever": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "spec": (None,),
    "embedding_multiplier": (None, 1, 1.0),
}
# How the others are gated, and what gpt-oss's quick_gelu needs.
_PLAIN_GATE = {"glu_linear_offset": (None, 0, 0.0), "activation_func_clamp_value": (None,)}
_CLAMPED_GATE = {
    "gated_linear_unit": (True,),
    "glu_linear_offset": (1, 1.0),
    "activation_func_clamp_value": (CLAMP,),
}
# Norms that are modules of their own -> where both of a layer are; the first that is there says it.
_NORMS_ALONE = {".input_layernorm.": "mcore_local", ".pre_mlp_layernorm.": "mcore_experts"}
# What only layers of the core's own GPTs can have.
CORE_ALONE: dict[str, tuple[Any, ...]] = {
    **core_experts.NO_EXPERTS,
    "softmax_type": (None, "vanilla"),
    "window_size": (None,),
    "softmax_scale": (None,),
    "no_rope_freq": (None,),
}
_IGNORED_FACTOR = (
    "the training was asked for rope_scaling_factor {}, but Megatron-LM's models always have 8: "
    "so has this one"
)


@dataclass(frozen=True)
class CoreOptions:
    """What the training says, under the names of the core's configuration.

    origin: where it says so, for errors
    notes:  what a user should know about the model
    """

    raw: TrackedMapping
    origin: str
    notes: tuple[str, ...] = ()

    def check_keys(self) -> tuple[str, ...]:
        """What a user should know, once the model is read; a CheckpointError for what was not."""
        problems = Problems(self.origin)
        notes = (*self.notes, *check_keys(self.raw, problems))
        problems.raise_if_any(CheckpointError)
        return notes

    @property
    def plus_one(self) -> bool:
        """Whether norms' scales are stored as their distance from one."""
        return flag(self.raw, "layernorm_zero_centered_gamma", False)

    @property
    def tied_embeddings(self) -> bool:
        return flag(self.raw, "share_embeddings_and_output_weights", True)


@dataclass(frozen=True)
class CoreGPT:
    """What the training says.

    fields:   GPTConfig's but vocab_size (the table's rows) and the token ids
    plus_one: norms' scales are stored as their distance from one
    """

    fields: Mapping[str, Any]
    plus_one: bool

    def dialects(self, names: Iterable[str]) -> tuple[str, ...]:
        """Dialects of the weight table for tensors of these names, first choice first."""
        alone = {part for name in names for part in _NORMS_ALONE if part in name}
        norms = _NORMS_ALONE[min(alone)] if alone else "mcore"
        return core_dialects(self.fields["gated"], norms, self.plus_one)

    def config(self, vocab_size: int) -> GPTConfig:
        return GPTConfig(vocab_size=vocab_size, **self.fields)


def read_gpt(
    options: CoreOptions, known_values: Mapping[str, tuple[Any, ...]] | None = None
) -> CoreGPT:
    """The fields of the core's configuration as GPTConfig's.

    known_values: further fields whose other values are refused
    Raises CheckpointError with everything that is missing or cannot be represented.
    """
    raw, problems = options.raw, Problems(options.origin)
    refuse_unknown(raw, problems, known_values or {})
    heads = size(raw, "num_attention_heads", problems)
    hidden = size(raw, "hidden_size", problems)
    bias = flag(raw, "add_bias_linear", True)
    qkv_bias = flag(raw, "add_qkv_bias", False)
    positions = choice(raw, "position_embedding_type", "learned_absolute", _POSITIONS, problems)
    layers = size(raw, "num_layers", problems)
    head_size = size(raw, "kv_channels", problems, max(hidden // heads, 1))
    base = real(raw, "rotary_base", 10000.0, problems)
    fields = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": size(raw, "num_query_groups", problems, heads),
        "head_size": head_size,
        "ffn_size": size(raw, "ffn_hidden_size", problems, 4 * hidden),
        "max_positions": size(raw, "max_position_embeddings", problems, raw.get("seq_length")),
        "position_embedding": positions,
        "rotary_percentage": real(raw, "rotary_percent", 1.0, problems),
        "rotary_base": base,
        "rotary_interpolation_factor": real(raw, "seq_len_interpolation_factor", 1.0, problems),
        **_scaling(raw, problems),
        **_yarn(raw, head_size, base, problems),
        "normalization": normalization_of(raw, problems),
        "norm_eps": real(raw, "layernorm_epsilon", 1e-5, problems),
        "activation": activation_of(raw, problems),
        "gated": flag(raw, "gated_linear_unit", False),
        "attention_bias": bias or qkv_bias,
        "attention_dense_bias": False if qkv_bias and not bias else None,
        "attention_sinks": raw.get("softmax_type") == "learnable" or None,
        "qk_norm": flag(raw, "qk_layernorm", False) or None,
        "mlp_bias": bias,
        **_attention(raw, layers, problems),
        "unrotated_layers": _skipped(
            "no_rope_freq", raw.get("no_rope_freq") or None, 1, layers, problems
        ),
        **core_experts.read_experts(raw, layers, problems),
        "embedding_scale": _embedding_scale(raw, hidden, problems),
        "tied_embeddings": options.tied_embeddings,
    }
    problems.raise_if_any(CheckpointError)
    return CoreGPT(fields, options.plus_one)


def refuse_unknown(
    raw: Mapping[str, Any], problems: Problems, known_values: Mapping[str, tuple[Any, ...]]
) -> None:
    """Note fields that change the network in ways this project does not know."""
    clamped = str(raw.get("activation_func")).lower() == "quick_gelu"
    gate = _CLAMPED_GATE if clamped else _PLAIN_GATE
    refuse_others(raw, problems, {**_KNOWN_VALUES, **gate, **known_values})


def normalization_of(raw: Mapping[str, Any], problems: Problems) -> str:
    return str(choice(raw, "normalization", "layernorm", _NORMALIZATIONS, problems))


def activation_of(raw: Mapping[str, Any], problems: Problems) -> str:
    """The fused kernel's GELU is the tanh form, torch's own is the exact one."""
    found = str(choice(raw, "activation_func", "gelu", _ACTIVATIONS, problems))
    if found == "gelu_erf" and (
        flag(raw, "openai_gelu", False) or flag(raw, "bias_activation_fusion", True)
    ):
        return "gelu"
    return found


def _embedding_scale(raw: Mapping[str, Any], hidden: int, problems: Problems) -> float | None:
    """The classes of Gemma in NeMo 2 and Megatron Bridge change the network without a setting."""
    gemma = re.search(r"Gemma(\w?)\w*$", str(raw.get("_target_") or ""))
    if gemma is None:
        return None
    if gemma[1].isdigit():
        problems.add("models of this class are not supported", got=raw["_target_"])
    return float(hidden**0.5)


def _scaling(raw: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Llama 3.1's rope scaling, where the training had it; Megatron-LM has no arguments for it."""
    if not flag(raw, "rope_scaling", False):
        return {}
    return {
        "rotary_scaling": "llama3",
        "rotary_scaling_factor": real(raw, "scale_factor", 8.0, problems),
        "rotary_low_frequency_factor": real(raw, "low_freq_factor", 1.0, problems),
        "rotary_high_frequency_factor": real(raw, "high_freq_factor", 4.0, problems),
        "rotary_original_positions": int(real(raw, "old_context_len", 8192, problems)),
    }


def _yarn(
    raw: Mapping[str, Any], head_size: int, base: float, problems: Problems
) -> dict[str, Any]:
    """The core turns all dimensions with it."""
    if raw.get("position_embedding_type") != "yarn":
        return {}
    refuse_others(raw, problems, {"rotary_percent": (None, 1, 1.0)}, " with yarn")
    said = {
        name: real(raw, f"yarn_{name}", 1.0, problems) if raw.get(f"yarn_{name}") else None
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    }
    return yarn(
        max(head_size // 2, 1),
        base,
        real(raw, "yarn_rotary_scaling_factor", 1.0, problems),
        size(raw, "yarn_original_max_position_embeddings", problems),
        truncate=flag(raw, "yarn_correction_range_round_to_int", True),
        **said,
    )


def _attention(raw: Mapping[str, Any], layers: int, problems: Problems) -> dict[str, Any]:
    """What scores are multiplied by, and how far the layers attend.

    The core's window counts the tokens before a token's own and those after it, here always 0.
    """
    fields: dict[str, Any] = {}
    if raw.get("softmax_scale") is not None:
        fields["softmax_scale"] = real(raw, "softmax_scale", 1.0, problems)
    window, skipped = raw.get("window_size"), raw.get("window_attn_skip_freq")
    if not window:
        return fields
    pair = list(window) if isinstance(window, (list, tuple)) else []
    if [type(side) for side in pair] != [int, int] or pair[0] < -1 or pair[1] not in (0, -1):
        choices = ["(tokens before a token's own, 0)"]
        problems.add("window_size is not supported", got=window, choices=choices)
    elif pair[0] >= 0:
        fields["sliding_window"] = pair[0] + 1
        whole = _skipped("window_attn_skip_freq", skipped, 0, layers, problems)
        fields["full_attention_layers"] = whole
    return fields


def _skipped(name: str, said: Any, mark: int, layers: int, problems: Problems) -> str | None:
    """The layers that a setting leaves out: every `said`-th one, or those of a mark in a list."""
    if said is None:
        return None
    if type(said) is int and said > 0:
        return layer_list(range(said - 1, layers, said))
    marks = said if isinstance(said, (list, tuple)) else ()
    if len(marks) == layers and all(each in (0, 1) for each in marks):
        return layer_list(layer for layer, each in enumerate(marks) if each == mark)
    choices = [
        "a number above 0",
        f"a list of {layers}, {mark} for each layer left out, else {1 - mark}",
    ]
    problems.add(f"{name} is not supported", got=said, choices=choices)
    return None


def of_arguments(args: Mapping[str, Any], origin: str) -> CoreOptions:
    """Of Megatron-LM: its arguments under the names of the core's configuration."""
    args = raw = TrackedMapping(args)
    raw["activation_func"] = "squared_relu" if args.get("squared_relu") else "gelu"
    if args.get("swiglu"):
        raw["activation_func"] = "silu"
    if args.get("quick_geglu"):
        raw["activation_func"] = "quick_gelu"
    raw["gated_linear_unit"] = bool(args.get("swiglu") or args.get("quick_geglu"))
    raw["num_query_groups"] = (
        args.get("num_query_groups") if args.get("group_query_attention") else None
    )
    raw["layernorm_epsilon"] = args.get("norm_epsilon") or args.get("layernorm_epsilon")
    raw["layernorm_zero_centered_gamma"] = args.get("apply_layernorm_1p")
    raw["share_embeddings_and_output_weights"] = not args.get("untie_embeddings_and_output_weights")
    raw["seq_len_interpolation_factor"] = args.get("rotary_seq_len_interpolation_factor")
    if args.get("use_rotary_position_embeddings"):
        raw["position_embedding_type"] = "rope"
    raw["rope_scaling"] = args.get("use_rope_scaling")
    raw["bias_activation_fusion"] = args.get("bias_gelu_fusion")
    factor = args.get("rope_scaling_factor")
    ignored = bool(args.get("use_rope_scaling")) and factor not in (None, 8, 8.0)
    return CoreOptions(raw, origin, (_IGNORED_FACTOR.format(factor),) if ignored else ())


def of_bridge(model: Mapping[str, Any], origin: str) -> CoreOptions:
    """Of Megatron Bridge: section `model` of run_config.yaml."""
    raw = TrackedMapping({**_plain(model), "scale_factor": model.get("rope_scaling_factor")})
    return CoreOptions(raw, origin)


def of_nemo2(model: Mapping[str, Any], origin: str) -> CoreOptions:
    """Of NeMo 2: section `config` of model.yaml. Its class alone says whether ropes are scaled."""
    scaled = model.get("scale_factor") is not None
    return CoreOptions(TrackedMapping({**_plain(model), "rope_scaling": scaled}), origin)


def _plain(model: Mapping[str, Any]) -> dict[str, Any]:
    """Functions and types as their names: `_target_` is never called."""
    return {key: _name(value) for key, value in model.items()}


def _name(value: Any) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return str(value["_target_"]).rpartition(".")[2]
    return value
