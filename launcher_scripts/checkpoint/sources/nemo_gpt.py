"""model_config.yaml of a NeMo GPT: its hyperparameters and the dialect of its weights; what a T5
says in the same words.

Absent keys take NeMo's own defaults. What changed between NeMo's releases is told apart by
`nemo_version`; a file without one is from before 1.18.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.checkpoint.sources.training_options import TrainingOptions
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.models.gpt_nemo import core_dialects, nemo_dialects

# Classic GPTs honour megatron_legacy and know ALiBi since this release.
LEGACY_AND_ALIBI_SINCE = (1, 20)
# activation -> (function, gated); "gelu" is settled by `gelu`.
ACTIVATIONS = {
    "gelu": ("gelu", False),
    "geglu": ("gelu", True),
    "fast-geglu": ("gelu", True),
    "reglu": ("relu", True),
    "fast-reglu": ("relu", True),
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
    "squared-relu": ("squared_relu", False),
}
NORMALIZATIONS = {
    "layernorm": "layernorm",
    "layernorm1p": "layernorm",
    "low_precision_layernorm": "layernorm",
    "rmsnorm": "rmsnorm",
}
POSITIONS = {"learned_absolute": "learned", "rope": "rope", "alibi": "alibi", "none": "none"}
BLOCK_TYPES = {"pre_ln": "pre", "post_ln": "post"}

# Keys whose other values change the network in ways this project does not know, with the only
# values it does know (None: absent or null).
_KNOWN_VALUES: dict[str, tuple[Any, ...]] = {
    "headscale": (None, False),
    "normalize_attention_scores": (None, True),
    "attention_type": (None, "multihead"),
    "num_moe_experts": (None, 0, 1),
    "qk_layernorm": (None, False),
    "rotary_interleaved": (None, False),
    "scale_positional_embedding": (None, False),
    "window_size": (None,),
}


@dataclass(frozen=True)
class NemoModel:
    """What a model_config.yaml says.

    fields:   the family's hyperparameters, but vocab_size (the table's rows) and the token ids
    dialects: dialects of the weight table, the first that has a row wins
    notes:    what a user should know about the model, if anything
    """

    fields: Mapping[str, Any]
    dialects: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_gpt(options: TrainingOptions, *, core: bool, local_norms: bool) -> NemoModel:
    """Translate `options`.

    core:        the weights are Megatron-LM core's
    local_norms: the core's norms are modules of their own
    Raises CheckpointError with everything that is missing or cannot be represented.
    """
    _refuse_unknown(options, core)
    function, gated = options.choice("activation", "gelu", ACTIVATIONS)
    positions = str(options.choice("position_embedding_type", "learned_absolute", POSITIONS))
    placement = options.choice("transformer_block_type", "pre_ln", BLOCK_TYPES)
    normalization = str(options.get("normalization") or "layernorm").lower()
    notes = []
    if positions == "alibi" and not core and nemo_version(options) < LEGACY_AND_ALIBI_SINCE:
        positions = "none"
        notes.append("this release of NeMo had no ALiBi: the model was trained without positions")
    heads = options.size("num_attention_heads")
    hidden = options.size("hidden_size")
    bias = options.flag("bias", True)
    length = (
        "max_position_embeddings"
        if options.get("max_position_embeddings")
        else "encoder_seq_length"
    )
    fields = {
        "num_layers": options.size("num_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": options.size("num_query_groups", heads),
        "head_size": options.size("kv_channels", hidden // heads),
        "ffn_size": options.size("ffn_hidden_size", 4 * hidden),
        "max_positions": options.size(length),
        "position_embedding": positions,
        "rotary_percentage": options.real("rotary_percentage", 1.0),
        "rotary_base": options.real("rotary_base", 10000.0),
        "rotary_interpolation_factor": options.real("seq_len_interpolation_factor", 1.0),
        "alibi_layer_scaling": positions == "alibi"
        and options.flag("apply_query_key_layer_scaling", True),
        "normalization": options.choice("normalization", "layernorm", NORMALIZATIONS),
        "norm_eps": options.real("layernorm_epsilon", 1e-5),
        "norm_placement": placement,
        "final_norm": placement == "pre",
        "activation": gelu(options) if function == "gelu" else function,
        "gated": gated,
        "attention_bias": bias,
        "mlp_bias": bias,
        "embedding_scale": hidden**0.5 if options.flag("apply_embedding_scaling", False) else None,
        "tied_embeddings": options.flag("share_embeddings_and_output_weights", True),
    }
    options.problems.raise_if_any(CheckpointError)
    plus_one = normalization == "layernorm1p" or options.flag(
        "layernorm_zero_centered_gamma", False
    )
    norms = "mcore_local" if local_norms else "mcore"
    dialects = core_dialects(gated, norms, plus_one)
    if not core:
        dialects = nemo_dialects(
            fused=str(options.get("activation") or "").startswith("fast-"),
            legacy=options.flag("megatron_legacy", False)
            and nemo_version(options) >= LEGACY_AND_ALIBI_SINCE,
            plus_one=plus_one,
        )
    return NemoModel(fields, dialects, tuple(notes))


def nemo_version(options: TrainingOptions) -> tuple[int, int]:
    """(major, minor) of the release that wrote the file; (0, 0) when it does not say."""
    match = re.match(r"(\d+)\.(\d+)", str(options.get("nemo_version") or ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def gelu(options: TrainingOptions) -> str:
    """The fused kernel and openai_gelu are the tanh form, torch's own is the exact one."""
    fused = options.flag("bias_activation_fusion", options.flag("bias_gelu_fusion", True))
    return "gelu" if fused or options.flag("openai_gelu", False) else "gelu_erf"


def _refuse_unknown(options: TrainingOptions, core: bool) -> None:
    options.refuse_others(_KNOWN_VALUES)
    problems, blocks = options.problems, options.get("transformer_block_type")
    groups, heads = options.get("num_query_groups"), options.get("num_attention_heads")
    if not core and groups not in (None, heads):
        problems.add("num_query_groups needs mcore_gpt", got=groups, choices=[None, heads])
    if not core and options.get("transformer_engine"):
        problems.add("transformer_engine without mcore_gpt is not supported", got=True)
    if core and options.get("position_embedding_type") == "alibi":
        problems.add("mcore_gpt has no ALiBi", got="alibi", choices=["learned_absolute", "rope"])
    if core and blocks not in (None, "pre_ln"):
        problems.add("mcore_gpt has no other blocks than pre_ln", got=blocks)
    if options.get("add_qkv_bias") and not options.flag("bias", True):
        problems.add("biases of query, key and value alone are not supported", got="add_qkv_bias")
