"""GGUF's architectures in terms of Hugging Face's: one row each.

What a row says, and which tensors are changed, is as in llama.cpp's conversion/ and src/models/.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from launcher_scripts.checkpoint.sources import gguf_gemma as gemma
from launcher_scripts.checkpoint.sources import gguf_hybrids as hybrids
from launcher_scripts.checkpoint.sources import gguf_parameters as tensors
from launcher_scripts.checkpoint.sources.gguf_parameters import (
    GGUFArchitecture,
    Model,
    common,
    count,
    experts,
    has_any,
    head_size,
    llama_config,
    rotary,
    silu_and_rms_norms,
    vocab_size,
)


def _mixtral(model: Model) -> dict[str, Any]:
    return {**llama_config(model), **experts(model), "num_local_experts": count(model)}


def _qwen2moe(model: Model) -> dict[str, Any]:
    shared = model.shapes.get("blk.0.ffn_gate_shexp.weight", (1,))
    return {
        **_qwen3moe(model),
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in model.shapes,
        "shared_expert_intermediate_size": model.fields.size(
            "expert_shared_feed_forward_length", shared[0]
        ),
    }


def _qwen3moe(model: Model) -> dict[str, Any]:
    return {
        **llama_config(model),
        **experts(model),
        "num_experts": count(model),
        "norm_topk_prob": True,
    }


def _gpt_oss(model: Model) -> dict[str, Any]:
    """Every other layer has the window, from the first on; YaRN does not round to whole pairs."""
    raw = {**llama_config(model), **experts(model)}
    return {
        **raw,
        "intermediate_size": raw.get("moe_intermediate_size"),
        "num_local_experts": count(model),
        "rope_parameters": {**raw["rope_parameters"], "truncate": False},
        "sliding_window": model.fields.size("attention.sliding_window"),
    }


def _phi3(model: Model) -> dict[str, Any]:
    raw = llama_config(model)
    return {
        **raw,
        "original_max_position_embeddings": raw["rope_parameters"][
            "original_max_position_embeddings"
        ],
        "sliding_window": model.fields.get("attention.sliding_window", 0) or None,
    }


def _granite(model: Model) -> dict[str, Any]:
    """A multiplier that is 0 is none."""
    fields = model.fields
    raw = llama_config(model)
    if fields.get("rope.scaling.finetuned", True) is not True:
        fields.problems.add("a granite without rotary positions is not supported")
    return {
        **raw,
        "attention_multiplier": fields.real("attention.scale", 0.0) or 1 / sqrt(raw["head_dim"]),
        "embedding_multiplier": fields.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": fields.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": fields.real("logit_scale"),
    }


def _layer_norms(model: Model, key: str, activation: str) -> dict[str, Any]:
    """A model with layer norms and an MLP without gate.  key: of the norms' epsilon"""
    model.fields.get("attention.layer_norm_rms_epsilon", None)  # the converter's double of it
    return {
        **rotary(model),
        "hidden_act": activation,
        key: model.fields.real("attention.layer_norm_epsilon"),
        "attention_bias": "blk.0.attn_output.bias" in model.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in model.shapes,
    }


def _starcoder2(model: Model) -> dict[str, Any]:
    fields = _layer_norms(model, "norm_epsilon", "gelu_pytorch_tanh")
    return {**fields, "use_bias": fields["attention_bias"]}


def _nemotron(model: Model) -> dict[str, Any]:
    return _layer_norms(model, "norm_eps", "relu2")


def _stablelm(model: Model) -> dict[str, Any]:
    """Layers with a norm of the MLP are in turn, whatever the field says, as llama.cpp has it."""
    fields = model.fields
    fields.get("use_parallel_residual", None)
    return {
        **rotary(model),
        "hidden_act": "silu",
        "layer_norm_eps": fields.real("attention.layer_norm_epsilon"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in model.shapes,
        "use_qkv_bias": "blk.0.attn_q.bias" in model.shapes,
    }


def _smollm3(model: Model) -> dict[str, Any]:
    """Every fourth layer does not turn, as llama.cpp has it."""
    return {**llama_config(model), "no_rope_layer_interval": 4}


def _ernie4_5(model: Model) -> dict[str, Any]:
    raw = llama_config(model)
    return {**raw, "use_bias": raw["attention_bias"]}


def _cohere2(model: Model) -> dict[str, Any]:
    """Every fourth layer has no window, as llama.cpp has it."""
    fields = model.fields
    fields.get("attention.layer_norm_rms_epsilon", None)
    return {
        **rotary(model),
        "hidden_act": "silu",
        "layer_norm_eps": fields.real("attention.layer_norm_epsilon"),
        "logit_scale": fields.real("logit_scale"),
        "sliding_window": fields.size("attention.sliding_window"),
        "sliding_window_pattern": 4,
    }


def _mistral3(model: Model) -> dict[str, Any]:
    """Ministral 3: attention's YaRN factor is 1, as mscale is mscale_all_dim."""
    fields = model.fields
    raw = llama_config(model)
    rope = dict(raw["rope_parameters"])
    scale = fields.real("rope.scaling.yarn_log_multiplier", 0.0)
    if scale:
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    beta = fields.real("attention.temperature_scale", 0.0)
    return {**raw, "rope_parameters": {**rope, "llama_4_scaling_beta": beta}}


def _gptneox(model: Model) -> dict[str, Any]:
    return {
        **_layer_norms(model, "layer_norm_eps", "gelu"),
        "use_parallel_residual": model.fields.get("use_parallel_residual"),
    }


def _falcon(model: Model) -> dict[str, Any]:
    raw = rotary(model)
    groups = raw["num_key_value_heads"]
    return {
        **raw,
        "layer_norm_epsilon": model.fields.real("attention.layer_norm_epsilon"),
        "num_kv_heads": groups,
        "ffn_hidden_size": raw["intermediate_size"],
        "multi_query": groups == 1,
        "new_decoder_architecture": groups > 1,
    }


def _falcon_names(model: Model) -> dict[str, str]:
    """Return the names of Falcon's norms: if attention and MLP have one each, the first in the file
    is the MLP's."""
    if "blk.0.attn_norm_2.weight" not in model.shapes:
        return {}
    return {"blk.*.attn_norm": "h.*.ln_mlp", "blk.*.attn_norm_2": "h.*.ln_attn"}


def _gpt2(model: Model) -> dict[str, Any]:
    raw = common(model)
    return {
        **raw,
        "n_inner": raw["intermediate_size"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.fields.real("attention.layer_norm_epsilon"),
    }


def _bloom(model: Model) -> dict[str, Any]:
    raw = common(model)
    if raw["intermediate_size"] != 4 * raw["hidden_size"]:
        model.fields.problems.add(
            "feed_forward_length of a BLOOM is four times embedding_length",
            got=raw["intermediate_size"],
        )
    return {
        **raw,
        "n_head": raw["num_attention_heads"],
        "seq_length": raw["max_position_embeddings"],
        "layer_norm_epsilon": model.fields.real("attention.layer_norm_epsilon"),
    }


def _deci(model: Model) -> dict[str, Any]:
    """Llama-Nemotron: a layer without heads of keys has a linear layer if it has any heads."""
    fields = model.fields
    raw = rotary(model, mixed=True)
    blocks = []
    for layer in range(raw["num_hidden_layers"]):
        heads, groups, width = (
            fields.of_layer(name, layer, 0)
            for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
        )
        linear = heads > 0 == groups
        attention = {
            "no_op": heads == 0,
            "replace_with_linear": linear,
            "num_query_groups": groups or None,
        }
        ffn = {"no_op": width == 0, "replace_with_linear": False, "ffn_hidden_size": width or None}
        blocks.append({"attention": attention, "ffn": ffn})
        full = raw["num_attention_heads"]
        if heads not in (0, full):
            fields.problems.add("attention.head_count differs between layers", got=heads)
    return {
        **raw,
        "block_configs": blocks,
        "num_key_value_heads": None,
        "intermediate_size": None,
        **silu_and_rms_norms(fields),
    }


def _deci_names(model: Model) -> dict[str, str]:
    """A linear layer in place of attention is called like the output projection."""
    return {
        f"blk.{layer}.attn_output.weight": f"layers.{layer}.self_attn.linear_attn.weight"
        for layer in range(model.fields.size("block_count"))
        if f"blk.{layer}.attn_output.weight" in model.shapes
        and f"blk.{layer}.attn_q.weight" not in model.shapes
    }


def _t5(model: Model) -> dict[str, Any]:
    """T5 and mT5, whose MLP is gated by GELU or not gated; the distance is that of all T5s."""
    fields = model.fields
    fields.get("attention.layer_norm_epsilon", None)  # the converter's double of it
    layers, heads = fields.size("block_count"), fields.size("attention.head_count")
    fields.get("context_length", None)  # positions are relative
    fields.get("attention.head_count_kv", heads)
    separate = "output.weight" in model.shapes
    result = {
        "vocab_size": vocab_size(model),
        "d_model": fields.size("embedding_length"),
        "d_ff": fields.size("feed_forward_length"),
        "d_kv": head_size(fields),
        "num_layers": layers,
        "num_heads": heads,
        "relative_attention_num_buckets": fields.size("attention.relative_buckets_count"),
        "layer_norm_epsilon": fields.real("attention.layer_norm_rms_epsilon"),
        "feed_forward_proj": "gated-gelu" if has_any(model, "ffn_gate.weight") else "relu",
        "tie_word_embeddings": not separate,
    }
    if fields.architecture == "t5encoder":
        return result | {"architectures": ["T5EncoderModel"], "is_encoder_decoder": False}
    return result | {
        "num_decoder_layers": fields.size("decoder_block_count", layers),
        "decoder_start_token_id": fields.get("decoder_start_token_id", 0),
    }


def _t5_row(model: Model) -> GGUFArchitecture | None:
    """A umT5 has a relative bias in every layer."""
    return _UMT5 if "enc.blk.1.attn_rel_b.weight" in model.shapes else None


_T5_PARTS = {
    "attn_norm": "layer.0.layer_norm",
    **{f"attn_{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"},
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
}
_T5_CROSS = {
    "cross_attn_norm": "layer.1.layer_norm",
    **{f"cross_attn_{part}": f"layer.1.EncDecAttention.{part}" for part in "qkvo"},
}


def _t5_names(gated: bool) -> dict[str, str]:
    up = {"ffn_gate": "wi_0", "ffn_up": "wi_1"} if gated else {"ffn_up": "wi"}
    names = {"token_embd": "shared", "output": "lm_head"}
    for side, stack, mlp in (("enc", "encoder", 1), ("dec", "decoder", 2)):
        parts = {**_T5_PARTS, **(_T5_CROSS if side == "dec" else {})}
        parts["ffn_norm"] = f"layer.{mlp}.layer_norm"
        for part, name in {**up, "ffn_down": "wo"}.items():
            parts[part] = f"layer.{mlp}.DenseReluDense.{name}"
        names |= {f"{side}.blk.*.{part}": f"{stack}.block.*.{name}" for part, name in parts.items()}
        names[f"{side}.output_norm"] = f"{stack}.final_layer_norm"
    return names


def _t5_renamed(model: Model) -> dict[str, str]:
    return _t5_names(has_any(model, "ffn_gate.weight"))


_GPT_OSS_NAMES = {
    **tensors.LLAMA_NAMES,
    "blk.*.attn_sinks.weight": "layers.*.self_attn.sinks",
    "blk.*.post_attention_norm": "layers.*.post_attention_layernorm",
    "blk.*.ffn_gate_inp": "layers.*.mlp.router",
    **{
        f"blk.*.ffn_{part}_exps": f"layers.*.mlp.experts.#.{part}_proj"
        for part in ("gate", "up", "down")
    },
}

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

_GPTNEOX_NAMES = {
    "token_embd": "embed_in",
    "output": "lm_head",
    "output_norm": "final_layer_norm",
    "blk.*.attn_norm": "layers.*.input_layernorm",
    "blk.*.attn_qkv": "layers.*.attention.query_key_value",
    "blk.*.attn_output": "layers.*.attention.dense",
    "blk.*.ffn_norm": "layers.*.post_attention_layernorm",
    "blk.*.ffn_up": "layers.*.mlp.dense_h_to_4h",
    "blk.*.ffn_down": "layers.*.mlp.dense_4h_to_h",
}

_GROUPED = {"blk.*.attn_qkv": tensors.GROUPED}

_MIXTRAL = GGUFArchitecture("mixtral", _mixtral, tensors.MIXTRAL_NAMES, tensors.HALVES)
_ONE_ROW = {"blk.*.ffn_gate_inp_shexp": tensors.ONE_ROW}

_UMT5 = GGUFArchitecture("umt5", _t5, {}, renamed=_t5_renamed)
_T5 = GGUFArchitecture("t5", _t5, {}, renamed=_t5_renamed, variant=_t5_row)

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(
        "llama",
        llama_config,
        tensors.LLAMA_NAMES,
        tensors.HALVES,
        variant=lambda model: _MIXTRAL if model.fields.get("expert_count", 0) else None,
    ),
    "qwen2": GGUFArchitecture("qwen2", llama_config, tensors.LLAMA_NAMES),
    "qwen2moe": GGUFArchitecture("qwen2_moe", _qwen2moe, tensors.QWEN_MOE_NAMES, _ONE_ROW),
    "qwen3moe": GGUFArchitecture("qwen3_moe", _qwen3moe, tensors.QWEN_MOE_NAMES),
    "qwen3": GGUFArchitecture("qwen3", llama_config, tensors.LLAMA_NAMES),
    "gpt-oss": GGUFArchitecture("gpt_oss", _gpt_oss, _GPT_OSS_NAMES),
    "gpt2": GGUFArchitecture(
        "gpt2",
        _gpt2,
        _GPT2_NAMES,
        {
            f"blk.*.{name}.weight": tensors.TRANSPOSED
            for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        },
    ),
    "bloom": GGUFArchitecture("bloom", _bloom, _BLOOM_NAMES, _GROUPED),
    "phi3": GGUFArchitecture("phi3", _phi3, tensors.PHI3_NAMES),
    "granite": GGUFArchitecture("granite", _granite, tensors.LLAMA_NAMES, tensors.HALVES),
    "olmo2": GGUFArchitecture("olmo2", llama_config, tensors.OLMO2_NAMES),
    "smollm3": GGUFArchitecture("smollm3", _smollm3, tensors.LLAMA_NAMES, tensors.HALVES),
    "stablelm": GGUFArchitecture("stablelm", _stablelm, tensors.LLAMA_NAMES),
    "glm4": GGUFArchitecture("glm4", llama_config, tensors.GLM4_NAMES),
    "ernie4_5": GGUFArchitecture("ernie4_5", _ernie4_5, tensors.LLAMA_NAMES),
    "cohere2": GGUFArchitecture("cohere2", _cohere2, tensors.LLAMA_NAMES),
    "mistral3": GGUFArchitecture("ministral3", _mistral3, tensors.LLAMA_NAMES, tensors.HALVES),
    "starcoder2": GGUFArchitecture("starcoder2", _starcoder2, tensors.STARCODER2_NAMES),
    "nemotron": GGUFArchitecture("nemotron", _nemotron, tensors.LLAMA_NAMES, tensors.CENTRED),
    "gptneox": GGUFArchitecture("gpt_neox", _gptneox, _GPTNEOX_NAMES, _GROUPED),
    "falcon": GGUFArchitecture("falcon", _falcon, _BLOOM_NAMES, _GROUPED, _falcon_names),
    "deci": GGUFArchitecture(
        "nemotron-nas", _deci, tensors.LLAMA_NAMES, tensors.HALVES, _deci_names
    ),
    "t5": _T5,
    "t5encoder": _T5,
    **gemma.ARCHITECTURES,
    **hybrids.ARCHITECTURES,
}
