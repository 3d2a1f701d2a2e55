"""config.ini of a T5 checkpoint: sections [encoder], [decoder], [structure] and [extension].

The first three hold the keys FasterTransformer's runtime reads, in the order its NeMo converter
writes them; [extension] the hyperparameters it has no words for. docs/checkpoint-format.md lists
them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer import config_ini_parts
from launcher_scripts.checkpoint.fastertransformer.ini_keys import IniKeys, Sections
from launcher_scripts.models.t5 import T5Config

EXTENSION_FIELDS = (
    "num_buckets",
    "max_positions",
    "max_distance",
    "cross_attention_relative_bias",
    "relative_bias_layer_scaling",
    "relative_bias_per_layer",
    "normalization",
    "norm_eps",
    "activation",
    "bias",
    "logits_bias",
    "attention_scale",
    "logits_scale",
    "tied_embeddings",
    "shared_embeddings",
    "encoder_only",
    "num_kv_heads",
    "rotary_base",
    "sandwich_norms",
    "zero_centered_norm",
    "embedding_scale",
    "attention_softcap",
    "logits_softcap",
    "sliding_window",
    "full_attention_layers",
)
POSITIONS = "relative_attention_num_buckets_or_max_pos_seq_len"
_POSITION_TYPES = {"relative": "relative", "learned": "absolute", "rope": "rotary"}
_ACTIVATIONS = {"gelu_erf": "gelu"}


def sections(config: T5Config, tp_size: int, weight_data_type: str, name: str) -> Sections:
    """The sections of config.ini but [extension]."""
    head = {
        "_name_or_path": name,
        "model_type": "T5",
        "weight_data_type": weight_data_type,
        "tensor_para_size": str(tp_size),
        "vocab_size": str(config.vocab_size),
    }
    activation = _ACTIVATIONS.get(config.activation, config.activation)
    relative = config.position_embedding == "relative"
    sizes = {
        "feed_forward_proj": f"gated-{activation}" if config.gated else activation,
        "d_ff": str(config.ffn_size),
        "d_model": str(config.hidden_size),
        "d_kv": str(config.head_size),
        POSITIONS: str(config.num_buckets if relative else config.max_positions),
        "num_heads": str(config.num_heads),
    }
    ids = {
        "decoder_start_token_id": str(config.start_id),
        "eos_token_id": str(config.end_id),
        "pad_id": str(config.pad_id),
    }
    adapters = config_ini_parts.adapter_keys(config.parts)
    encoder = sizes | {"num_layers": str(config.num_layers)} | adapters
    encoder |= config_ini_parts.prompt_keys(config.parts)
    decoder = sizes | {
        "num_layers": str(config.num_decoder_layers),
        "tie_word_embeddings": str(config.logits_scale != 1.0),
        **adapters,
    }
    return {
        "encoder": head | encoder | (ids if config.encoder_only else {}),
        "decoder": {} if config.encoder_only else head | ids | decoder,
        "structure": {
            "t5_with_bias": str(config.bias),
            "position_embedding_type": _POSITION_TYPES[config.position_embedding],
            "use_gated_activation": str(config.gated),
            **config_ini_parts.ia3_keys(config.parts),
        },
        **config_ini_parts.task_sections(config.parts),
    }


def values(sections: Mapping[str, IniKeys], folder: Path) -> dict[str, Any]:
    """T5Config's fields from these sections alone, with the defaults of FasterTransformer.

    t5_with_bias stands for layer norms, biases, scaled attention and a logits bias together.
    """
    encoder, decoder, structure = (sections[name] for name in ("encoder", "decoder", "structure"))
    encoder_only = not decoder.values
    fields: dict[str, Any] = {
        field: encoder.number(key, None)
        for key, field in {
            "vocab_size": "vocab_size",
            "num_layers": "num_layers",
            "d_model": "hidden_size",
            "num_heads": "num_heads",
            "d_kv": "head_size",
            "d_ff": "ffn_size",
        }.items()
    }
    kinds = tuple(_POSITION_TYPES.values())
    kind = structure.text("position_embedding_type", "relative", kinds)
    positions = encoder.number(POSITIONS, 32)
    if kind == "relative":
        fields |= {"position_embedding": "relative", "num_buckets": positions}
    else:
        learned = "learned" if kind == "absolute" else "rope"
        fields |= {"position_embedding": learned, "max_positions": positions}
    activation = encoder.values.get("feed_forward_proj", "relu")
    activation = {"geglu": "gated-gelu", "reglu": "gated-relu"}.get(activation, activation)
    fields["activation"] = activation.removeprefix("gated-")
    fields["gated"] = structure.boolean("use_gated_activation", False)
    bias = structure.boolean("t5_with_bias", False)
    scaled = not bias and decoder.boolean("tie_word_embeddings", True)
    ids = encoder if encoder_only else decoder
    return fields | {
        "num_decoder_layers": 0 if encoder_only else decoder.number("num_layers", None),
        "normalization": "layernorm" if bias else "rmsnorm",
        "bias": bias,
        "logits_bias": bias and not encoder_only,
        "attention_scale": fields["head_size"] ** -0.5 if bias else 1.0,
        "logits_scale": fields["hidden_size"] ** -0.5 if scaled else 1.0,
        "tied_embeddings": not (folder / "lm_head.weight.bin").exists(),
        "encoder_only": encoder_only,
        "start_id": ids.number("decoder_start_token_id", 0),
        "end_id": ids.number("eos_token_id", 1),
        "pad_id": _pad_id(ids),
        **config_ini_parts.read_parts(sections, encoder, structure),
    }


def _pad_id(ids: IniKeys) -> int | None:
    """pad_id as the NeMo converter calls it, pad_token_id as Hugging Face does."""
    for key in ("pad_id", "pad_token_id"):
        if ids.values.get(key, "None") != "None":
            return ids.number(key, None)
    return None
