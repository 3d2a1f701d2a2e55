"""config.ini of BART, mBART and Agm checkpoints, with the keys of the forks that serve them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.ini_keys import IniKeys, Sections
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.bart import BartConfig

BART_EXTENSION_FIELDS = ("max_positions", "norm_eps", "activation", "logits_bias", "forced_bos_id")
AGM_EXTENSION_FIELDS = ("attention_scale", "norm_eps", "activation", "logits_bias", "pad_id")
# Hugging Face's names of activations, which the forks read; their gelu is the tanh form.
_NAMES = {"gelu": "gelu_new", "gelu_erf": "gelu", "relu": "relu", "silu": "silu"}
_ACTIVATIONS = {name: activation for activation, name in _NAMES.items()}


def bart_sections(config: BartConfig, tp_size: int, weight_data_type: str, name: str) -> Sections:
    """The sections of a BART's config.ini but [extension]."""
    multilingual = config.norm_placement == "pre"
    common = {
        "vocab_size": str(config.vocab_size),
        "d_model": str(config.hidden_size),
        "_name_or_path": name,
        "model_type": "mbart" if multilingual else "bart",
        "weight_data_type": weight_data_type,
        "tensor_para_size": str(tp_size),
    }
    encoder = {
        "encoder_layers": str(config.num_layers),
        "encoder_ffn_dim": str(config.ffn_size),
        "encoder_attention_heads": str(config.num_heads),
    }
    decoder = {
        "decoder_layers": str(config.num_decoder_layers),
        "decoder_ffn_dim": str(config.decoder_ffn_size),
        "decoder_attention_heads": str(config.num_decoder_heads),
        "tie_word_embeddings": str(config.tied_embeddings),
        "pad_token_id": str(config.pad_id),
        "eos_token_id": str(config.end_id),
        "decoder_start_token_id": str(config.start_id),
    }
    return {
        "encoder": encoder | common,
        "decoder": decoder | common,
        "structure": {
            "bart_with_bias": "true",
            "mbart": str(multilingual).lower(),
            "activation_function": _NAMES[config.activation],
            "position_embedding_type": "absolute",
        },
    }


def bart_values(sections: Mapping[str, IniKeys], folder: Path) -> dict[str, Any]:
    """BartConfig's fields from these sections alone."""
    encoder, decoder, structure = (sections[name] for name in ("encoder", "decoder", "structure"))
    positions = folder / "encoder.embed_positions.weight.bin"
    hidden = encoder.number("d_model", None)
    size = 2 if encoder.values.get("weight_data_type") in ("fp16", "bf16") else 4
    rows = positions.stat().st_size // (hidden * size) if positions.is_file() else 1024
    activation = structure.text("activation_function", "gelu", tuple(_ACTIVATIONS))
    return {
        "vocab_size": encoder.number("vocab_size", None),
        "num_layers": encoder.number("encoder_layers", None),
        "hidden_size": hidden,
        "num_heads": encoder.number("encoder_attention_heads", None),
        "ffn_size": encoder.number("encoder_ffn_dim", None),
        "num_decoder_layers": decoder.number("decoder_layers", None),
        "num_decoder_heads": decoder.number("decoder_attention_heads", None),
        "decoder_ffn_size": decoder.number("decoder_ffn_dim", None),
        "max_positions": rows,
        "norm_placement": "pre" if structure.boolean("mbart", False) else "post",
        "activation": _ACTIVATIONS.get(activation, "gelu"),
        "logits_bias": (folder / "final_logits_bias.bin").exists(),
        "tied_embeddings": decoder.boolean("tie_word_embeddings", True),
        "start_id": decoder.number("decoder_start_token_id", 2),
        "end_id": decoder.number("eos_token_id", 2),
        "pad_id": decoder.number("pad_token_id", 1),
    }


def agm_sections(config: AgmConfig, tp_size: int, weight_data_type: str, name: str) -> Sections:
    """The sections of an Agm's config.ini but [extension]."""
    scaled = config.attention_scale != 1.0
    return {
        "decoder": {
            "vocab_size": str(config.vocab_size),
            "d_model": str(config.hidden_size),
            "decoder_ffn_dim": str(config.ffn_size),
            "decoder_layers": str(config.num_layers),
            "decoder_attention_heads": str(config.num_heads),
            "activation_function": _NAMES[config.activation],
            "relative_attention_num_buckets": str(config.num_buckets),
            "relative_attention_max_distance": str(config.max_distance),
            "tie_word_embeddings": str(config.tied_embeddings),
            "decoder_start_token_id": str(config.start_id),
            "eos_token_id": str(config.end_id),
            "_name_or_path": name,
            "weight_data_type": weight_data_type,
            "tensor_para_size": str(tp_size),
        },
        "structure": {
            "agm_with_bias": "true",
            "activation_function": _NAMES[config.activation],
            "position_embedding_type": "relative",
            "scale_attention": str(scaled),
            "mup_scale": str(config.attention_scale == 8 / config.head_size),
            "pad_embedding": "False",
        },
    }


def agm_values(sections: Mapping[str, IniKeys], folder: Path) -> dict[str, Any]:
    """AgmConfig's fields from these sections alone."""
    decoder, structure = sections["decoder"], sections["structure"]
    hidden = decoder.number("d_model", None)
    heads = decoder.number("decoder_attention_heads", None)
    scale = 1.0
    if structure.boolean("scale_attention", False):
        head_size = hidden // heads
        scale = 8 / head_size if structure.boolean("mup_scale", False) else head_size**-0.5
    activation = structure.text("activation_function", "gelu", tuple(_ACTIVATIONS))
    return {
        "vocab_size": decoder.number("vocab_size", None),
        "num_layers": decoder.number("decoder_layers", None),
        "hidden_size": hidden,
        "num_heads": heads,
        "ffn_size": decoder.number("decoder_ffn_dim", None),
        "num_buckets": decoder.number("relative_attention_num_buckets", 32),
        "max_distance": decoder.number("relative_attention_max_distance", 128),
        "attention_scale": scale,
        "activation": _ACTIVATIONS.get(activation, "gelu"),
        "logits_bias": (folder / "final_logits_bias.bin").exists(),
        "tied_embeddings": decoder.boolean("tie_word_embeddings", True),
        "start_id": decoder.number("decoder_start_token_id", 2),
        "end_id": decoder.number("eos_token_id", 2),
        "pad_id": None,
    }
