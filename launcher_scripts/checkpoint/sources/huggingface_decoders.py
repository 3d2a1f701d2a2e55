"""GPTConfig from the config.json of a Hugging Face decoder with rotary positions.

One function per model type, as in huggingface_configs.py. Defaults are those of transformers' own
config classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.rotary_scaling import (
    Fields,
    first_chunk,
    layer_bases,
    ntk_alpha,
    original_positions,
    rope,
    rope_of,
    rope_section,
    windows,
)
from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import GPTConfig

_HEAD = "lm_head.weight"


def decoder(raw: RawConfig, **fields: Any) -> GPTConfig:
    """A Llama.  fields: what a model type that descends from it says otherwise"""
    hidden, heads = raw.size("hidden_size"), raw.size("num_attention_heads")
    head_size = head_size_of(raw)
    raw.unused("intermediate_size")  # where the fields say the MLP's size, or every layer's
    ffn_size = fields.get("ffn_size") or raw.size("intermediate_size")
    values: Fields = {
        "vocab_size": raw.size("vocab_size"),
        "num_layers": raw.layers("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_size": ffn_size,
        "num_heads": heads,
        "num_kv_heads": raw.size("num_key_value_heads", default=heads),
        "head_size": head_size,
        "max_positions": first_chunk(raw),
        "normalization": "rmsnorm",
        "gated": True,
        "tied_embeddings": _HEAD not in raw.keys,
        "start_id": raw.token("bos_token_id", 1),
        "end_id": raw.token("eos_token_id", 2),
        "pad_id": raw.token("pad_token_id", None),
        **fields,
    }
    readers: dict[str, Callable[[], dict[str, Any]]] = {
        "position_embedding": lambda: rope(raw, head_size),
        "norm_eps": lambda: {"norm_eps": raw.real("rms_norm_eps", 1e-6)},
        "activation": lambda: {"activation": raw.activation("hidden_act", "silu")},
        "attention_bias": lambda: {"attention_bias": raw.flag("attention_bias", False)},
        "mlp_bias": lambda: {"mlp_bias": raw.flag("mlp_bias", False)},
    }
    for name, read in readers.items():
        if name not in fields:
            values.update(read())
    return GPTConfig(**values)


def head_size_of(raw: RawConfig) -> int:
    hidden, heads = raw.size("hidden_size"), raw.size("num_attention_heads")
    return raw.size("head_dim", default=max(hidden // heads, 1))


def llama(raw: RawConfig) -> GPTConfig:
    raw.only(sliding_window=None, layer_types=["full_attention"] * raw.layers("num_hidden_layers"))
    return decoder(raw)


def mistral(raw: RawConfig) -> GPTConfig:
    return decoder(raw, **windows(raw))


def ministral(raw: RawConfig) -> GPTConfig:
    return decoder(raw, **windows(raw, lambda _: False))


def ministral3(raw: RawConfig) -> GPTConfig:
    """Mistral with YaRN, which makes queries behind the original positions longer: a model has
    none of those.
    """
    section = rope_section(raw)
    section.unused("max_position_embeddings")
    fields = rope_of(raw, section, head_size_of(raw))
    if section.real("llama_4_scaling_beta", 0.0):
        max_positions = raw.size("max_position_embeddings")
        original = original_positions(raw, section)
        fields["max_positions"] = min(max_positions, original)
        if original < max_positions:
            raw.notes.append(
                f"of {max_positions} positions the first {original} are served: later queries "
                "would be scaled by their position"
            )
    return decoder(raw, **windows(raw), **fields)


def qwen2(raw: RawConfig) -> GPTConfig:
    return decoder(raw, attention_bias=True, attention_dense_bias=False, **qwen_windows(raw))


def qwen3(raw: RawConfig) -> GPTConfig:
    return decoder(raw, qk_norm=True, **qwen_windows(raw))


def qwen_windows(
    raw: RawConfig, full: Callable[[int, int], bool] = lambda layer, first: layer < first
) -> Fields:
    """Windows only if use_sliding_window.

    full: of a layer and max_window_layers, whether it has none where layer_types does not say it
    """
    layers = raw.layers("num_hidden_layers")
    if not raw.flag("use_sliding_window", False):
        raw.unused("sliding_window", "max_window_layers")
        raw.only(layer_types=["full_attention"] * layers)
        return {}
    first = raw.size("max_window_layers", default=layers, minimum=0)
    return windows(raw, lambda layer: full(layer, first))


def phi3(raw: RawConfig) -> GPTConfig:
    raw.only(attention_bias=False, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False)
    return decoder(raw, attention_bias=False, mlp_bias=False, **windows(raw))


def phi(raw: RawConfig) -> GPTConfig:
    """Phi-1 to Phi-2: one norm for attention and MLP, which read the same hidden states."""
    raw.only(qk_layernorm=False)
    raw.defaults(hidden_act="gelu_new", partial_rotary_factor=0.5)
    return _layer_norms(
        raw,
        gated=False,
        attention_bias=True,
        mlp_bias=True,
        parallel_residual=True,
        logits_bias=True if "lm_head.bias" in raw.keys else None,
    )


def stablelm(raw: RawConfig) -> GPTConfig:
    raw.defaults(partial_rotary_factor=0.25, bos_token_id=0, eos_token_id=0)
    raw.only(norm_eps=raw("layer_norm_eps", default=None), rotary_scaling_factor=1.0)
    raw.only(num_heads=raw("num_attention_heads"))  # other names, of the first files
    return _layer_norms(
        raw,
        **_norms_per_head(raw.flag("qk_layernorm", False)),
        attention_bias=raw.flag("use_qkv_bias", False),
        attention_dense_bias=False,
        mlp_bias=False,
        parallel_residual=raw.flag("use_parallel_residual", False) or None,
    )


def smollm3(raw: RawConfig) -> GPTConfig:
    """SmolLM3: every fourth layer's queries and keys do not turn; no_rope_layers has a 0 there."""
    layers, turns = raw.layers("num_hidden_layers"), turning_layers(raw)
    fields: Fields = {}
    if raw.flag("use_sliding_window", False):
        fields = windows(raw, lambda layer: bool(turns[layer]))
    elif raw("sliding_window", default=None) is not None:
        raw.only(layer_types=["full_attention"] * layers)
    raw.unused("layer_types", "max_window_layers")
    raw.defaults(rope_theta=2e6)
    raw.defaults(bos_token_id=128000, eos_token_id=128001, pad_token_id=128004)
    unrotated = layer_list(n for n in range(layers) if not turns[n])
    return decoder(raw, unrotated_layers=unrotated, **fields)


def turning_layers(raw: RawConfig) -> list[int]:
    """A 1 for each layer that turns queries and keys, 0 for the others."""
    layers = raw.layers("num_hidden_layers")
    interval = raw.size("no_rope_layer_interval", default=4)
    turns = raw("no_rope_layers", default=[int((n + 1) % interval != 0) for n in range(layers)])
    supported = isinstance(turns, list) and all(mark in (0, 1) for mark in turns)
    if not supported or len(turns) != layers:
        choices = (f"a list of {layers}, 0 or 1 for each layer",)
        raw.problems.add("no_rope_layers is not supported", got=turns, choices=choices)
        turns = [1] * layers
    return list(turns)


def cohere2(raw: RawConfig) -> GPTConfig:
    """Command-R7B and Command-A: layers have a window, or queries and keys that do not turn."""
    pattern = raw.size("sliding_window_pattern", "_sliding_window_pattern", default=4)
    fields = windows(raw, lambda layer: (layer + 1) % pattern == 0)
    raw.only(
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=False,
    )
    raw.unused("layer_switch", "use_embedding_sharing")  # sliding_window_pattern and the tensors
    return cohere(raw, unrotated_layers=unwindowed(raw, fields), **fields)


def unwindowed(raw: RawConfig, fields: Fields) -> str | None:
    """The layers without a window, by the fields that `windows` gives."""
    every = layer_list(range(raw.layers("num_hidden_layers")))
    return fields["full_attention_layers"] if fields else every


def cohere(raw: RawConfig, **fields: Any) -> GPTConfig:
    """Command-R: one norm for attention and MLP, which read the same hidden states."""
    if raw.raw.get("model_type") != "cohere":
        raw.only(use_qk_norm=False)
    raw.defaults(bos_token_id=5, eos_token_id=255001, pad_token_id=0)
    values: Fields = {
        "normalization": "layernorm",
        "norm_eps": raw.real("layer_norm_eps", 1e-5),
        "mlp_bias": False,
        "parallel_residual": True,
        "logits_scale": raw.real("logit_scale", 0.0625),
        **_norms_per_head(raw.flag("use_qk_norm", False)),
    }
    return decoder(raw, **{**values, **fields})


def _norms_per_head(normalized: bool) -> Fields:
    return {"qk_norm": True, "qk_norm_per_head": True} if normalized else {}


def _layer_norms(raw: RawConfig, **fields: Any) -> GPTConfig:
    """A Llama with layer norms, of which a share of each head turns."""
    head_size = raw.head_size(raw.size("hidden_size"), raw.size("num_attention_heads"))
    return decoder(
        raw,
        normalization="layernorm",
        norm_eps=raw.real("layer_norm_eps", 1e-5),
        **rope(raw, head_size),
        **fields,
    )


def glm(raw: RawConfig, **fields: Any) -> GPTConfig:
    """GLM-4-9B; one gated linear layer makes both halves of the MLP."""
    raw.defaults(rms_norm_eps=1.5625e-07, attention_bias=True, partial_rotary_factor=0.5)
    return decoder(raw, attention_dense_bias=False, mlp_bias=False, **fields)


def glm4(raw: RawConfig) -> GPTConfig:
    """GLM-4-0414, which normalizes what its branches add, too."""
    return glm(raw, norm_placement="sandwich")


def helium(raw: RawConfig) -> GPTConfig:
    raw.defaults(rms_norm_eps=1e-8, rope_theta=100000.0)
    return decoder(raw, attention_dense_bias=False)


def ernie4_5(raw: RawConfig, **fields: Any) -> GPTConfig:
    raw.only(compression_ratio=1.0)
    raw.defaults(rms_norm_eps=1e-5, rope_theta=500000.0)
    bias = raw.flag("use_bias", False)
    return decoder(raw, attention_bias=bias, mlp_bias=bias, **fields)


def olmo(raw: RawConfig) -> GPTConfig:
    """The first OLMo, whose norms have no weights."""
    clip = raw.real("clip_qkv", 0.0) or None
    fields: Fields = {"normalization": "layernorm", "norm_eps": 1e-5, "attention_clip": clip}
    return decoder(raw, mlp_bias=False, **fields)


def dbrx(raw: RawConfig) -> GPTConfig:
    """DBRX, whose published files state the rotary base in attn_config alone, where transformers'
    class does not look.
    """
    attention, mlp = raw.section("attn_config"), raw.section("ffn_config")
    rotation = raw.section("rope_parameters", "rope_scaling")
    base = attention.real("rope_theta", rotation.real("rope_theta", 10000.0))
    if rotation.real("rope_theta", base) != base:
        bases = [base, rotation.real("rope_theta", base)]
        raw.problems.add("rope_theta of attn_config and of rope_parameters differ", got=bases)
    heads = attention.size("kv_n_heads", default=1)
    mlp.only(uniform_expert_assignment=False, moe_normalize_expert_weights=1.0)
    mlp.only(hidden_size=raw.size("d_model"))
    mlp.unused("moe_jitter_eps", "moe_loss_weight")  # of the training
    raw.only(num_key_value_heads=heads)
    raw.defaults(num_key_value_heads=heads, max_position_embeddings=raw.size("max_seq_len"))
    raw.defaults(hidden_size=raw.size("d_model"), num_attention_heads=raw.size("n_heads"))
    raw.defaults(num_hidden_layers=raw.layers("n_layers"), rope_theta=base)
    return decoder(
        raw,
        normalization="layernorm",
        norm_eps=1e-5,
        activation=mlp.section("ffn_act_fn").activation("name", "silu"),
        attention_bias=False,
        attention_clip=attention.real("clip_qkv", 0.0) or None,
        mlp_bias=False,
        ffn_size=mlp.size("ffn_hidden_size", default=3584),
        num_experts=mlp.size("moe_num_experts", default=4),
        experts_per_token=mlp.size("moe_top_k", default=1),
        normalized_experts=not mlp.null("moe_normalize_expert_weights"),
    )


def granite(raw: RawConfig, **fields: Any) -> GPTConfig:
    """Granite multiplies what its branches add by residual_multiplier.

    Hidden states divided by that number are the same to every norm whose epsilon is divided by its
    square, so only the embeddings' scale and the epsilon change.
    """
    residual = raw.real("residual_multiplier", 1.0) or 1.0
    return decoder(
        raw,
        embedding_scale=raw.real("embedding_multiplier", 1.0) / residual,
        norm_eps=raw.real("rms_norm_eps", 1e-6) / residual**2,
        softmax_scale=raw.real("attention_multiplier", 1.0),
        logits_scale=1 / (raw.real("logits_scaling", 1.0) or 1.0),
        **fields,
    )


def granite_swa(raw: RawConfig) -> GPTConfig:
    raw.defaults(rms_norm_eps=1e-5, sliding_window=128)
    return granite(raw, **granite_attention(raw))


def granite_attention(raw: RawConfig) -> Fields:
    """Sinks, windows but in every fourth layer, and a base of each layer."""
    fields = windows(raw, lambda layer: layer % 4 == 0)
    return {"attention_sinks": True, **fields, **layer_bases(raw)}


def apertus(raw: RawConfig) -> GPTConfig:
    """Apertus; where it does not say how it turns, it does as Llama 3.1."""
    turns = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0}
    turns |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    raw.only(qk_norm=True, post_norm=False)
    raw.defaults(hidden_act="xielu", rms_norm_eps=1e-5, rope_theta=12e6, rope_parameters=turns)
    return decoder(raw, gated=False, qk_norm=True, mlp_bias=False)


# Tokens about parts of a text, and images.
_HUNYUAN_PARTS = ("text_start", "text_end", "im_start", "im_end", "im_newline", "video_start")


def hunyuan(raw: RawConfig, **fields: Any) -> GPTConfig:
    """Hunyuan V1 normalizes queries and keys after they turn."""
    raw.only(norm_type="rms", position_embedding_xdrope=False, use_rotary_pos_emb=True)
    raw.only(use_cla=False, use_mla=False, use_qk_norm=True)
    raw.only(attention_head_dim=raw("head_dim", default=None))
    if "num_experts" not in fields:
        raw.only(num_experts=1, moe_topk=1, num_shared_expert=1)
    raw.unused("cla_share_factor", "class_num", "dense_list", "mask_init_id", "num_media_embeds")
    raw.unused("org_vocab_size", "pool_type", "pad_id", "enable_lm_head_fp32", "capacity_factor")
    raw.unused(*(f"{part}_id" for part in _HUNYUAN_PARTS), "anyres_pooling_size")
    raw.defaults(rms_norm_eps=1e-5)
    turns = unscaled(ntk_alpha(raw, head_size_of(raw)))
    return decoder(raw, qk_norm=True, qk_norm_after_rope=True, mlp_bias=False, **turns, **fields)


def hunyuan_moe(raw: RawConfig) -> GPTConfig:
    """Hunyuan-A13B; numbers may be lists of one for each layer, which must be the same."""
    size = raw.size("intermediate_size")
    raw.only(use_mixed_mlp_moe=True, moe_layer_num_skipped=0, norm_topk_prob=True)
    raw.only(routed_scaling_factor=1.0)
    raw.only(moe_drop_tokens=False, moe_random_routing_dropped_token=False)
    _of_all_layers(raw, "num_shared_expert", 1, choices=(1,))
    _of_all_layers(raw, "moe_intermediate_size", size, choices=(size,))
    return hunyuan(
        raw,
        num_experts=_of_all_layers(raw, "num_experts", 1),
        experts_per_token=_of_all_layers(raw, "moe_topk", 1),
        normalized_experts=True,
        shared_expert_size=size,
        shared_expert_gate=False,
    )


def _of_all_layers(raw: RawConfig, name: str, default: int, choices: tuple[int, ...] = ()) -> int:
    """A size that may be a list of the same one for each layer."""
    value = raw(name, default=default)
    values = {*value} if isinstance(value, list) else {value}
    if len(values) == 1 and all(type(size) is int for size in values):
        (size,) = values
        if not choices or size in choices:
            return int(size)
    raw.problems.add(f"{name} is not supported", got=value, choices=choices or ("one size",))
    return default


def nanochat(raw: RawConfig) -> GPTConfig:
    """NanoChat, whose norms have no weights: so those of heads may come before they turn."""
    raw.defaults(hidden_act="relu2", bos_token_id=0, eos_token_id=1, pad_token_id=1)
    uncapped = raw.null("final_logit_softcapping")
    return decoder(
        raw,
        embedding_norm=True,
        qk_norm=True,
        gated=False,
        mlp_bias=False,
        logits_softcap=raw.real("final_logit_softcapping", 0.0 if uncapped else 15.0) or None,
        **unscaled(rope(raw, head_size_of(raw))),
    )


def unscaled(turns: Fields) -> Fields:
    """Rotation of queries and keys that are normalized after it: a scale of both has no effect."""
    return {name: value for name, value in turns.items() if name != "rotary_attention_factor"}


def starcoder2(raw: RawConfig) -> GPTConfig:
    bias = raw.flag("use_bias", True)
    raw.only(mlp_type="default", norm_type="layer_norm", scale_attn_weights=True)
    raw.unused("layer_norm_epsilon", "activation_function")  # norm_epsilon and hidden_act rule
    raw.defaults(hidden_act="gelu_pytorch_tanh")
    return decoder(
        raw,
        normalization="layernorm",
        norm_eps=raw.real("norm_epsilon", 1e-5),
        gated=False,
        attention_bias=bias,
        mlp_bias=bias,
        **windows(raw),
    )


def nemotron(raw: RawConfig) -> GPTConfig:
    raw.defaults(hidden_act="relu2", partial_rotary_factor=0.5)
    share = raw.real("partial_rotary_factor", 0.5)
    raw.only(rope_percent=share, rotary_percent=share, kv_channels=head_size_of(raw))
    return decoder(
        raw,
        normalization="layernorm",
        zero_centered_norm=True,
        norm_eps=raw.real("norm_eps", 1e-5),
        gated=False,
    )


def arcee(raw: RawConfig) -> GPTConfig:
    raw.defaults(hidden_act="relu2", bos_token_id=128000, eos_token_id=128001)
    return decoder(raw, gated=False)


def seed_oss(raw: RawConfig) -> GPTConfig:
    raw.defaults(attention_bias=True, bos_token_id=0, pad_token_id=1)
    return decoder(raw, attention_dense_bias=raw.flag("attention_out_bias", False))


def jais2(raw: RawConfig) -> GPTConfig:
    raw.defaults(hidden_act="relu2", attention_bias=True, mlp_bias=True)
    raw.defaults(bos_token_id=0, eos_token_id=150024)
    norm_eps = raw.real("layer_norm_eps", 1e-5)
    return decoder(raw, normalization="layernorm", norm_eps=norm_eps, gated=False)


def internlm3(raw: RawConfig) -> GPTConfig:
    """InternLM 3, which says apart whether queries, keys and values have biases."""
    bias = raw.flag("mlp_bias", raw.flag("bias", False))
    raw.defaults(rms_norm_eps=1e-5, pad_token_id=2)
    return decoder(
        raw,
        attention_bias=raw.flag("attention_bias", raw.flag("qkv_bias", False)),
        attention_dense_bias=bias,
        mlp_bias=bias,
    )


def iquestcoder(raw: RawConfig) -> GPTConfig:
    raw.only(clip_qkv=None, use_sliding_window=False)
    raw.unused("sliding_window", "max_window_layers")
    raw.defaults(rms_norm_eps=1e-5)
    return decoder(raw)


def cwm(raw: RawConfig) -> GPTConfig:
    """Meta's Code World Model; every fourth layer has no window, from the first one on."""
    raw.defaults(rms_norm_eps=1e-5, rope_theta=1e6, bos_token_id=128000, eos_token_id=128001)
    return decoder(raw, attention_bias=False, **windows(raw, lambda layer: layer % 4 == 0))


def gpt_neox(raw: RawConfig) -> GPTConfig:
    heads = raw.size("num_attention_heads")
    head_size = raw.head_size(raw.size("hidden_size"), heads)
    raw.only(num_key_value_heads=heads)
    base, share = raw.real("rotary_emb_base", 10000.0), raw.real("rotary_pct", 0.25)
    raw.defaults(rope_theta=base, partial_rotary_factor=share)
    raw.only(rope_theta=base, partial_rotary_factor=share)  # the class has other names for them
    raw.defaults(hidden_act="gelu", attention_bias=True, bos_token_id=0)
    return decoder(
        raw,
        normalization="layernorm",
        norm_eps=raw.real("layer_norm_eps", 1e-5),
        gated=False,
        parallel_residual=raw.flag("use_parallel_residual", True) or None,
        mlp_bias=True,
        **rope(raw, head_size),
    )
