"""GGUF's architectures in terms of Hugging Face's: one row each.

Names are those of gguf's tensor_mapping; what a row says besides, and which tensors are changed, is
as in llama.cpp's conversion/ and src/models/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from launcher_scripts.checkpoint import gguf_restored as restored
from launcher_scripts.checkpoint.gguf_fields import Fields
from launcher_scripts.checkpoint.gguf_restored import Restored
from launcher_scripts.checkpoint.gguf_rope import rope_parameters

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Model:
    """What a row's `config` gets: the fields, and the tensors' names and shapes.

    shapes:  name -> shape, rows first
    factors: the numbers of rope_freqs.weight
    """

    fields: Fields
    shapes: Mapping[str, tuple[int, ...]]
    factors: np.ndarray | None = None


@dataclass(frozen=True)
class GGUFArchitecture:
    """A row of ARCHITECTURES.

    model_type: of Hugging Face
    config:     Model -> what is left to say in config.json
    names:      tensor without its last part -> Hugging Face's, without "model." or "transformer."
    restored:   tensor (with or without its last part) -> what undoes llama.cpp's changes
    """

    model_type: str
    config: Callable[[Model], dict[str, Any]]
    names: Mapping[str, str]
    restored: Mapping[str, Restored] = field(default_factory=dict)


def _common(model: Model) -> dict[str, Any]:
    """What every model says."""
    fields = model.fields
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    table = model.shapes.get("token_embd.weight", (1,))
    if fields.get("vocab_size", table[0]) != table[0]:
        fields.problems.add("vocab_size is not the rows of token_embd.weight", got=table)
    return {
        "vocab_size": int(table[0]),
        "num_hidden_layers": fields.size("block_count"),
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "max_position_embeddings": fields.size("context_length"),
        "tie_word_embeddings": "output.weight" not in model.shapes,
    }


def _rotary(model: Model) -> dict[str, Any]:
    """What models with rotary positions say."""
    fields = model.fields
    common = _common(model)
    usual = max(common["hidden_size"] // common["num_attention_heads"], 1)
    size = fields.size("attention.key_length", usual)
    if fields.size("attention.value_length", size) != size:
        fields.problems.add("attention.value_length is not attention.key_length", got=size)
    rotary = fields.size("rope.dimension_count", size)
    rope = rope_parameters(fields, rotary, model.factors)
    return {
        **common,
        "head_dim": size,
        "rope_parameters": {**rope, "partial_rotary_factor": rotary / size},
    }


def _llama(model: Model) -> dict[str, Any]:
    return {
        **_rotary(model),
        "hidden_act": "silu",
        "rms_norm_eps": model.fields.real("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in model.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in model.shapes,
        "use_sliding_window": False,
    }


def _gpt2(model: Model) -> dict[str, Any]:
    common = _common(model)
    return {
        **common,
        "n_inner": common["intermediate_size"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.fields.real("attention.layer_norm_epsilon"),
    }


def _bloom(model: Model) -> dict[str, Any]:
    common = _common(model)
    if common["intermediate_size"] != 4 * common["hidden_size"]:
        model.fields.problems.add(
            "feed_forward_length of a BLOOM is four times embedding_length",
            got=common["intermediate_size"],
        )
    return {
        **common,
        "n_head": common["num_attention_heads"],
        "seq_length": common["max_position_embeddings"],
        "layer_norm_epsilon": model.fields.real("attention.layer_norm_epsilon"),
    }


_LLAMA_NAMES = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "blk.*.attn_norm": "layers.*.input_layernorm",
    "blk.*.attn_q": "layers.*.self_attn.q_proj",
    "blk.*.attn_k": "layers.*.self_attn.k_proj",
    "blk.*.attn_v": "layers.*.self_attn.v_proj",
    "blk.*.attn_q_norm": "layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "layers.*.self_attn.k_norm",
    "blk.*.attn_output": "layers.*.self_attn.o_proj",
    "blk.*.ffn_norm": "layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "layers.*.mlp.up_proj",
    "blk.*.ffn_down": "layers.*.mlp.down_proj",
}
_HALVES = {"blk.*.attn_q": restored.QUERY_HALVES, "blk.*.attn_k": restored.KEY_HALVES}

_GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output": "lm_head",
    "output_norm": "ln_f",
    "blk.*.attn_norm": "h.*.ln_1",
    "blk.*.attn_qkv": "h.*.attn.c_attn",
    "blk.*.attn_output": "h.*.attn.c_proj",
    "blk.*.ffn_norm": "h.*.ln_2",
    "blk.*.ffn_up": "h.*.mlp.c_fc",
    "blk.*.ffn_down": "h.*.mlp.c_proj",
}

_BLOOM_NAMES = {
    "token_embd": "word_embeddings",
    "token_embd_norm": "word_embeddings_layernorm",
    "output": "lm_head",
    "output_norm": "ln_f",
    "blk.*.attn_norm": "h.*.input_layernorm",
    "blk.*.attn_qkv": "h.*.self_attention.query_key_value",
    "blk.*.attn_output": "h.*.self_attention.dense",
    "blk.*.ffn_norm": "h.*.post_attention_layernorm",
    "blk.*.ffn_up": "h.*.mlp.dense_h_to_4h",
    "blk.*.ffn_down": "h.*.mlp.dense_4h_to_h",
}

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", _llama, _LLAMA_NAMES, _HALVES),
    "qwen2": GGUFArchitecture("qwen2", _llama, _LLAMA_NAMES),
    "qwen3": GGUFArchitecture("qwen3", _llama, _LLAMA_NAMES),
    "gpt2": GGUFArchitecture(
        "gpt2",
        _gpt2,
        _GPT2_NAMES,
        {
            f"blk.*.{name}.weight": restored.TRANSPOSED
            for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        },
    ),
    "bloom": GGUFArchitecture("bloom", _bloom, _BLOOM_NAMES, {"blk.*.attn_qkv": restored.GROUPED}),
}
