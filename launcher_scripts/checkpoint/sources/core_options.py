"""Options of a training of Megatron-LM core, and a GPT's hyperparameters from them.

Three tools write it in three ways: Megatron-LM as the arguments of its command line, Megatron
Bridge as `run_config.yaml`, NeMo 2 as `context/model.yaml`. Bridge and NeMo name the fields of the
core's configuration; `of_arguments` gives Megatron-LM's arguments the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.checkpoint.sources.core_layers import (
    HYBRID_DEFAULTS,
    PLAIN_LAYERS,
    branches_of,
    core_experts,
    pattern_of,
)
from launcher_scripts.checkpoint.sources.rotary_scaling import mscale_of, yarn
from launcher_scripts.checkpoint.sources.training_options import NO_EXPERTS, TrainingOptions
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.common.quantization import CLAMP
from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_nemo import core_dialects

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
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "multi_query_attention": (None, False),
    "project_size": (None, 0),
    "qk_l2_norm": (None, False),
    "rotary_interleaved": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "softmax_type": (None, "vanilla", "learnable"),
    "scale_embedding": (None, False),
    "use_mup": (None, False),
    "retro_add_retriever": (None, False),
    "enable_mhc_connections": (None, False),
    "embedding_multiplier": (None, 1, 1.0),
}
# The same of latent attention; without norms its latent vectors would be multiplied as they are.
_KNOWN_VALUES_OF_LATENT: dict[str, tuple[Any, ...]] = {
    "qk_layernorm": (True,),
    "layernorm_zero_centered_gamma": (None, False),
    "position_embedding_type": ("rope",),
    "add_bias_linear": (False,),
    "add_qkv_bias": (None, False),
    "rotary_percent": (None, 1, 1.0),
    "rope_scaling": (None, False),
    "mla_down_proj_fusion": (None, False),
    "softmax_scale": (None,),
}
# How the others are gated, and what gpt-oss's quick_gelu needs.
_PLAIN_GATE = {"glu_linear_offset": (None, 0, 0.0), "activation_func_clamp_value": (None,)}
_CLAMPED_GATE = {
    "gated_linear_unit": (True,),
    "glu_linear_offset": (1, 1.0),
    "activation_func_clamp_value": (CLAMP,),
}
_ORIGINAL_POSITIONS = "original_max_position_embeddings"
_MSCALE_OF_SCORES = "mscale_of_scores"  # not an option of any tool
# Norms that are modules of their own -> where both of a layer are; the first that is there says it.
_SEPARATE_NORMS = {".input_layernorm.": "mcore_local", ".pre_mlp_layernorm.": "mcore_experts"}
# What only layers of the core's own GPTs can have.
CORE_ONLY: dict[str, tuple[Any, ...]] = {
    **NO_EXPERTS,
    **PLAIN_LAYERS,
    "multi_latent_attention": (None, False),
    "softmax_type": (None, "vanilla"),
    "window_size": (None,),
    "softmax_scale": (None,),
    "no_rope_freq": (None,),
}
_IGNORED_FACTOR = (
    "the training was asked for rope_scaling_factor {}, but Megatron-LM's models always have 8: "
    "so has this one"
)


# Classes of Megatron Bridge's providers and NeMo 2's configurations that build the core's GPT or T5
# from their settings alone, and functions that specify the core's own layers. Others may change the
# network in code.
_HYBRIDS = r"Hybrid|SSM|(Base|NVIDIA)?Mamba(Hybrid)?"
_PACKAGES = ("megatron.bridge.", "megatron.core.", "nemo.collections.llm.")
_CLASSES = re.compile(
    r"(GPT|GPTOSS|T5|Llama(2|3|31|32|33)?|CodeLlama|Qwen(15|2|25|3)?(MoE)?|Mi[sx]tral|MistralSmall3"
    r"|MistralNe[Mm]o|(Code)?Gemma|Nemotron(3|4)?|Star[Cc]oder2?|OlMoE|GLM45(Air)?|GLMMoE|Phi3"
    r"|Baichuan2|MLA|DeepSeek(V2(Lite)?|V3)?|Moonlight|KimiK2|Qwen3Next|Nemotron(H|Nano|3Nano)"
    r"|LlamaNemotronHeterogeneous|Llama3[13]Nemotron(Nano|Super|Ultra)?(\d+B)?|" + _HYBRIDS + r")"
    r"(Model)?(Provider|Config)(Base|\d+(x\d+)?[BM](v\d)?(_A\d+B)?)?"
)
_HYBRID = re.compile(rf"({_HYBRIDS}|Nemotron(H|Nano|3Nano))(Model)?(Provider|Config).*")
_SPECS = (
    "default_layer_spec",
    "get_default_hybrid_stack_spec",
    "get_default_mamba_stack_spec",
    "get_gpt_decoder_block_spec",
    "get_gpt_heterogeneous_layer_spec",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_t5_decoder_with_local_block_spec",
    "get_t5_decoder_with_transformer_engine_block_spec",
    "get_t5_encoder_with_local_block_spec",
    "get_t5_encoder_with_transformer_engine_block_spec",
    "get_transformer_block_with_experimental_attention_variant_spec",
    "heterogeneous_layer_spec",
    "hybrid_stack_spec",
    "local_layer_spec",
    "mamba_stack_spec",
    "modelopt_hybrid_stack_spec",
    "modelopt_mamba_stack_spec",
    "transformer_engine_full_layer_spec",
    "transformer_engine_hybrid_stack_spec",
    "transformer_engine_layer_spec",
    "transformer_engine_mamba_stack_spec",
)
# Options that name such a function.
_SPEC_OPTIONS = ("transformer_layer_spec", "hybrid_stack_spec", "mamba_stack_spec")
# Arguments of these functions that choose kernels, or parts that the tensors show.
_SPEC_ARGUMENTS = (
    "fp8",
    "moe_grouped_gemm",
    "normalization",
    "num_experts",
    "qk_layernorm",
    "use_te_op_fuser",
    "use_transformer_engine",
    "vp_stage",
)


class CoreOptions(TrainingOptions):
    """Options of the training, under the names of the core's configuration."""

    @property
    def plus_one(self) -> bool:
        """Return whether norms' scales are stored as their distance from one."""
        return self.flag("layernorm_zero_centered_gamma", False)

    @property
    def tied_embeddings(self) -> bool:
        return self.flag("share_embeddings_and_output_weights", True)

    def normalization(self) -> str:
        return str(self.choice("normalization", "layernorm", _NORMALIZATIONS))

    def activation(self) -> str:
        """The fused kernel's GELU is the tanh form, torch's own is the exact one."""
        result = str(self.choice("activation_func", "gelu", _ACTIVATIONS))
        if result == "gelu_erf" and (
            self.flag("openai_gelu", False) or self.flag("bias_activation_fusion", True)
        ):
            return "gelu"
        return result

    def reject_unknown(self, supported_values: Mapping[str, tuple[Any, ...]]) -> None:
        """Note fields that change the network in ways this project does not know.

        supported_values: fields besides those of every model, see refuse_others
        """
        self._reject_code()
        clamped = str(self.get("activation_func")).lower() == "quick_gelu"
        gate = _CLAMPED_GATE if clamped else _PLAIN_GATE
        self.reject_others({**_SUPPORTED_VALUES, **gate, **supported_values})

    def _reject_code(self) -> None:
        """Note classes and functions that may change the network in code."""
        provider = self.get("_target_")
        package, _, name = str(provider).rpartition(".")
        is_allowed = f"{package}.".startswith(_PACKAGES) and _CLASSES.fullmatch(name)
        if provider is not None and not is_allowed:
            message = "_target_: models of this class are not supported"
            self.problems.add(message, got=provider)
        for option in _SPEC_OPTIONS:
            spec = self.get(option)
            function = spec.get("_target_") if isinstance(spec, Mapping) else spec
            others = {
                key: value
                for key, value in (spec.items() if isinstance(spec, Mapping) else ())
                if value and not key.startswith("_") and key not in _SPEC_ARGUMENTS
            }
            if spec and (others or not _is_plain_spec(function)):
                message = f"{option} is not supported, which may change the network"
                self.problems.add(message, got=spec, choices=_SPECS)
        pair = self.get("spec") or []  # of Megatron-LM: a module and its function
        pair = pair if isinstance(pair, (list, tuple)) else [pair]
        if pair not in ([], ["local"]) and not _is_plain_spec(".".join(map(str, pair))):
            self.problems.add("spec is not supported", got=pair, choices=(["local"], *_SPECS))


def _is_plain_spec(function: Any) -> bool:
    """True for a function that specifies the core's own layers, by its full name."""
    package, _, name = str(function).rpartition(".")
    return name in _SPECS and f"{package}.".startswith(_PACKAGES)


@dataclass(frozen=True)
class CoreGPT:
    """A GPT's hyperparameters from the options of the training.

    fields:   GPTConfig's but vocab_size (the table's rows) and the token ids
    plus_one: norms' scales are stored as their distance from one
    """

    fields: Mapping[str, Any]
    plus_one: bool

    def dialects(self, names: Iterable[str]) -> tuple[str, ...]:
        """Dialects of the weight table for tensors of these names, first choice first."""
        names = list(names)
        if "layer_branches" in self.fields:
            return core_dialects(self.fields["gated"], "mcore_branches", self.plus_one)
        prefixes = {part for name in names for part in _SEPARATE_NORMS if part in name}
        latent: list[str] = []
        if self.fields["kv_lora_rank"] is not None:
            latent = ["mcore_latent"]
            if any(".kv_layernorm." in name for name in names):
                latent.insert(0, "mcore_latent_local")
            if any(".linear_fc1.layer_norm_weight" in name for name in names):
                prefixes -= {min(_SEPARATE_NORMS)}  # that of latent attention is alone anyway
        norms = _SEPARATE_NORMS[min(prefixes)] if prefixes else "mcore"
        return (*latent, *core_dialects(self.fields["gated"], norms, self.plus_one))

    def config(self, vocab_size: int) -> GPTConfig:
        return GPTConfig(vocab_size=vocab_size, **self.fields)


def read_core_gpt(
    options: CoreOptions,
    supported_values: Mapping[str, tuple[Any, ...]] | None = None,
    names: Iterable[str] = (),
) -> CoreGPT:
    """The fields of the core's configuration as GPTConfig's.

    supported_values: further fields whose other values are refused
    names:            of the tensors
    Raises CheckpointError with everything that is missing or cannot be represented.
    """
    options.reject_unknown(supported_values or {})
    heads = options.size("num_attention_heads")
    hidden = options.size("hidden_size")
    bias = options.flag("add_bias_linear", True)
    qkv_bias = options.flag("add_qkv_bias", False)
    positions = options.choice("position_embedding_type", "learned_absolute", _POSITIONS)
    letters = pattern_of(options, names)
    layers = options.size("num_layers") if letters is None else len(letters)
    head_size = options.size("kv_channels", max(hidden // heads, 1))
    base = options.real("rotary_base", 10000.0)
    fields = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": options.size("num_query_groups", heads),
        "head_size": head_size,
        "ffn_size": options.size("ffn_hidden_size", 4 * hidden),
        "max_positions": options.size("max_position_embeddings", options.get("seq_length")),
        "position_embedding": positions,
        "rotary_percentage": options.real("rotary_percent", 1.0),
        "rotary_base": base,
        "rotary_interpolation_factor": options.real("seq_len_interpolation_factor", 1.0),
        **_scaling(options),
        **_yarn(options, head_size, base),
        "normalization": options.normalization(),
        "norm_eps": options.real("layernorm_epsilon", 1e-5),
        "activation": options.activation(),
        "gated": options.flag("gated_linear_unit", False),
        "attention_bias": bias or qkv_bias,
        "attention_dense_bias": False if qkv_bias and not bias else None,
        "attention_sinks": options.get("softmax_type") == "learnable" or None,
        "qk_norm": options.flag("qk_layernorm", False) or None,
        "mlp_bias": bias,
        **_attention(options, layers),
        "unrotated_layers": _skipped(
            options, "no_rope_freq", options.get("no_rope_freq") or None, 1, layers
        ),
        **core_experts(options, layers, letters),
        **_latent(options, heads),
        "embedding_scale": _embedding_scale(options, hidden),
        "tied_embeddings": options.tied_embeddings,
    }
    fields |= branches_of(options, layers, letters, fields)
    options.problems.raise_if_any(CheckpointError)
    return CoreGPT(fields, options.plus_one)


def _embedding_scale(options: CoreOptions, hidden: int) -> float | None:
    """The classes of Gemma in NeMo 2 and Megatron Bridge change the network without a setting."""
    gemma = re.search(r"Gemma\w*$", str(options.get("_target_") or ""))
    return float(hidden**0.5) if gemma else None


def _scaling(options: CoreOptions) -> dict[str, Any]:
    """Llama 3.1's rope scaling, where the training had it; Megatron-LM has no arguments for it."""
    if not options.flag("rope_scaling", False):
        return {}
    return {
        "rotary_scaling": "llama3",
        "rotary_scaling_factor": options.real("scale_factor", 8.0),
        "rotary_low_frequency_factor": options.real("low_freq_factor", 1.0),
        "rotary_high_frequency_factor": options.real("high_freq_factor", 4.0),
        "rotary_original_positions": int(options.real("old_context_len", 8192)),
    }


def _yarn(options: CoreOptions, head_size: int, base: float) -> dict[str, Any]:
    """The core turns all dimensions with it."""
    if options.get("position_embedding_type") != "yarn":
        return {}
    options.reject_others({"rotary_percent": (None, 1, 1.0)}, " with yarn")
    fields = {
        name: options.real(f"yarn_{name}", 1.0) if options.get(f"yarn_{name}") else None
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    }
    return yarn(
        max(head_size // 2, 1),
        base,
        options.real("yarn_rotary_scaling_factor", 1.0),
        options.size("yarn_original_max_position_embeddings"),
        truncate=options.flag("yarn_correction_range_round_to_int", True),
        **fields,
    )


def _latent(options: CoreOptions, heads: int) -> dict[str, Any]:
    """Latent attention. Its rotary positions are said by settings of its own, where yarn is what a
    training has that says nothing; the scale of scores is yarn's with any of them.
    """
    if not options.flag("multi_latent_attention", False):
        return {"kv_lora_rank": None}
    options.reject_others(_KNOWN_VALUES_OF_LATENT, " of latent attention")
    kinds = {"rope": "rope", "yarn": "yarn"}
    kind = options.choice("rope_type", "yarn", kinds)
    rope, key = options.size("qk_pos_emb_head_dim", 64), options.size("qk_head_dim", 128)
    factor = options.real("rotary_scaling_factor", 40.0)
    all_dims = options.get("mscale_all_dim") or 0.0
    growth = mscale_of(factor, all_dims)
    of_scores = options.get(_MSCALE_OF_SCORES)
    scores = mscale_of(factor, all_dims if of_scores is None else of_scores)
    fields: dict[str, Any] = {
        "num_kv_heads": heads,
        "head_size": key + rope,
        "qk_norm": None,
        "kv_lora_rank": options.size("kv_lora_rank", 512),
        "q_lora_rank": options.size("q_lora_rank") if options.get("q_lora_rank") else None,
        "rope_head_size": rope,
        "value_head_size": options.size("v_head_dim", 128),
        "softmax_scale": scores**2 / (key + rope) ** 0.5,
        "rotary_interpolation_factor": 1.0,
    }
    if kind == "yarn":
        raw = options.get("mscale")
        concentration = mscale_of(factor, 1.0 if raw is None else raw) / growth
        fields |= yarn(
            rope // 2,
            options.real("rotary_base", 10000.0),
            factor,
            options.size(_ORIGINAL_POSITIONS, 4096),
            beta_fast=options.real("beta_fast", 32.0),
            beta_slow=options.real("beta_slow", 1.0),
            attention_factor=concentration,
        )
    return fields


def _attention(options: CoreOptions, layers: int) -> dict[str, Any]:
    """Return the fields of the attention: scale of the scores, and windows.

    The core's window counts the tokens before a token's own and those after it, here always 0.
    """
    fields: dict[str, Any] = {}
    if options.get("softmax_scale") is not None:
        fields["softmax_scale"] = options.real("softmax_scale", 1.0)
    window, skipped = options.get("window_size"), options.get("window_attn_skip_freq")
    if not window:
        return fields
    pair = list(window) if isinstance(window, (list, tuple)) else []
    if [type(side) for side in pair] != [int, int] or pair[0] < -1 or pair[1] not in (0, -1):
        choices = ["(tokens before a token's own, 0)"]
        options.problems.add("window_size is not supported", got=window, choices=choices)
    elif pair[0] >= 0:
        fields["sliding_window"] = pair[0] + 1
        full_layers = _skipped(options, "window_attn_skip_freq", skipped, 0, layers)
        fields["full_attention_layers"] = full_layers
    return fields


def _skipped(options: CoreOptions, name: str, value: Any, mark: int, layers: int) -> str | None:
    """The layers that a setting leaves out: every `value`-th one, or those of a mark in a list."""
    if value is None:
        return None
    if type(value) is int and value > 0:
        return layer_list(range(value - 1, layers, value))
    flags = value if isinstance(value, (list, tuple)) else ()
    if len(flags) == layers and all(mark in (0, 1) for mark in flags):
        return layer_list(layer for layer, item in enumerate(flags) if item == mark)
    choices = [
        "a number above 0",
        f"a list of {layers}, {mark} for each layer left out, else {1 - mark}",
    ]
    options.problems.add(f"{name} is not supported", got=value, choices=choices)
    return None


def of_arguments(args: Mapping[str, Any], origin: str) -> CoreOptions:
    """Read the options of Megatron-LM: its arguments under the names of the core's
    configuration."""
    factor = args.get("rope_scaling_factor")
    ignored = bool(args.get("use_rope_scaling")) and factor not in (None, 8, 8.0)
    raw = dict(args)
    notes = (_IGNORED_FACTOR.format(factor),) if ignored else ()
    options = CoreOptions(raw, Problems(origin), notes)
    option = options.get
    raw["activation_func"] = "squared_relu" if option("squared_relu") else "gelu"
    if option("swiglu"):
        raw["activation_func"] = "silu"
    if option("quick_geglu"):
        raw["activation_func"] = "quick_gelu"
    raw["gated_linear_unit"] = bool(option("swiglu") or option("quick_geglu"))
    raw["num_query_groups"] = (
        option("num_query_groups") if option("group_query_attention") else None
    )
    raw["layernorm_epsilon"] = option("norm_epsilon") or option("layernorm_epsilon")
    centered = option("layernorm_zero_centered_gamma") or option("apply_layernorm_1p")
    raw["layernorm_zero_centered_gamma"] = centered
    raw["share_embeddings_and_output_weights"] = not option("untie_embeddings_and_output_weights")
    raw["seq_len_interpolation_factor"] = option("rotary_seq_len_interpolation_factor")
    if option("use_rotary_position_embeddings"):
        raw["position_embedding_type"] = "rope"
    raw["rope_scaling"] = option("use_rope_scaling")
    raw["bias_activation_fusion"] = option("bias_gelu_fusion")
    raw["openai_gelu"] = None  # the core has no such function
    raw |= _older_latent(args, "rope_type")
    return options


def _older_latent(raw: Mapping[str, Any], since: str) -> dict[str, Any]:
    """Until release 0.13 the core's latent attention took the model's positions for those before
    yarn, and scaled scores by `mscale`.

    since: an option that all later releases store
    """
    positions = raw.get("max_position_embeddings")
    if since in raw or not raw.get("multi_latent_attention") or positions is None:
        return {}
    return {
        _ORIGINAL_POSITIONS: positions,
        _MSCALE_OF_SCORES: raw.get("mscale"),
    }


def of_bridge(model: Mapping[str, Any], origin: str) -> CoreOptions:
    """Read the options of Megatron Bridge: section `model` of run_config.yaml."""
    raw = {**_plain(model), "scale_factor": model.get("rope_scaling_factor")}
    return CoreOptions(raw, Problems(origin))


def of_nemo2(model: Mapping[str, Any], origin: str) -> CoreOptions:
    """Read the options of NeMo 2: section `config` of model.yaml. Its class alone says whether
    ropes are scaled."""
    raw = {**_plain(model), "rope_scaling": model.get("scale_factor") is not None}
    return CoreOptions(raw, Problems(origin))


def _plain(model: Mapping[str, Any]) -> dict[str, Any]:
    """Functions and types as their names: `_target_` is never called."""
    name = str(model.get("_target_")).rpartition(".")[2]
    defaults = HYBRID_DEFAULTS if _HYBRID.fullmatch(name) else {}
    defaults = defaults | _older_latent(model, _ORIGINAL_POSITIONS)
    return defaults | {
        key: value if key in _SPEC_OPTIONS else _name(value) for key, value in model.items()
    }


def _name(value: Any) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return str(value["_target_"]).rpartition(".")[2]
    return value
