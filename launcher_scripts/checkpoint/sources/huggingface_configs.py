"""Hyperparameters from a Hugging Face config.json.

One function per model type. Each gets the raw file, not what a version of transformers makes of
it: version 5 reports every T5 as tied, and keeps whether logits are scaled under another key.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_raw import ACTIVATIONS, RawConfig
from launcher_scripts.checkpoint.sources.rotary_scaling import rope
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_dialects import CODEGEN_BLOCKS
from launcher_scripts.models.t5 import T5Config


def plain_gpt(raw: RawConfig, hidden: int, heads: int, **fields: Any) -> GPTConfig:
    """A decoder whose heads share its hidden size.

    fields: the other hyperparameters, and what is said otherwise
    """
    values: dict[str, Any] = {
        "vocab_size": raw.size("vocab_size"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_size": raw.head_size(hidden, heads),
        "tied_embeddings": "lm_head.weight" not in raw.keys,
        "start_id": raw.token("bos_token_id", 50256),
        "end_id": raw.token("eos_token_id", 50256),
        "pad_id": raw.token("pad_token_id", None),
    }
    return GPTConfig(**{**values, **fields})


def gpt2(raw: RawConfig, **fields: Any) -> GPTConfig:
    """fields: as in plain_gpt"""
    hidden, heads = raw.size("n_embd", "hidden_size"), raw.size("n_head", "num_attention_heads")
    raw.only(scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return plain_gpt(
        raw,
        hidden,
        heads,
        softmax_scale=None if raw.flag("scale_attn_weights", True) else 1.0,
        num_layers=raw.layers("n_layer", "num_hidden_layers"),
        ffn_size=raw.size("n_inner", default=4 * hidden),
        max_positions=raw.size("n_positions", "n_ctx", "max_position_embeddings"),
        norm_eps=raw.real("layer_norm_epsilon", default=1e-5),
        activation=raw.activation("activation_function", "gelu_new"),
        **fields,
    )


def gpt_bigcode(raw: RawConfig) -> GPTConfig:
    """SantaCoder and StarCoder: a GPT-2 whose heads share one key and one value."""
    raw.only(multi_query=True, num_key_value_heads=1)
    raw.unused("inference_runner", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache")
    raw.unused("runner_max_sequence_length", "validate_runner_input")
    raw.defaults(activation_function="gelu_pytorch_tanh")
    return gpt2(raw, num_kv_heads=1)


def _attention_kinds(raw: RawConfig, layers: int) -> list[str]:
    """Return the kinds of GPT-Neo's layers: "global" or "local"."""
    raw.unused("attention_layers")  # attention_types says the same
    types = raw("attention_types", default=[[["global", "local"], 12]])
    with suppress(TypeError, ValueError):
        if sum(len(kinds) * times for kinds, times in types) == layers:
            result = [kind for kinds, times in types for kind in kinds * times]
            if len(result) == layers and {*result} <= {"global", "local"}:
                return result
    message = "attention_types must name the attention of every layer"
    raw.problems.add(message, got=types, choices=("global", "local"))
    return []


def gpt_neo(raw: RawConfig) -> GPTConfig:
    """GPT-Neo: layers in turn attend to all tokens and to the last ones; scores are not scaled."""
    hidden, layers = raw.size("hidden_size"), raw.layers("num_layers", "num_hidden_layers")
    kinds, window = _attention_kinds(raw, layers), raw.size("window_size", default=256)
    full = layer_list(layer for layer, kind in enumerate(kinds) if kind == "global")
    return plain_gpt(
        raw,
        hidden,
        raw.size("num_heads", "num_attention_heads"),
        num_layers=layers,
        ffn_size=raw.size("intermediate_size", default=4 * hidden),
        max_positions=raw.size("max_position_embeddings"),
        norm_eps=raw.real("layer_norm_epsilon", default=1e-5),
        activation=raw.activation("activation_function", "gelu_new"),
        attention_bias=False,
        attention_dense_bias=True,
        softmax_scale=1.0,
        sliding_window=window if "local" in kinds else None,
        full_attention_layers=full if "local" in kinds else None,
    )


def bloom(raw: RawConfig) -> GPTConfig:
    hidden, heads = raw.size("hidden_size", "n_embed"), raw.size("n_head", "num_attention_heads")
    raw.only(apply_residual_connection_post_layernorm=False)
    raw.defaults(bos_token_id=1, eos_token_id=2, pad_token_id=3)
    return plain_gpt(
        raw,
        hidden,
        heads,
        num_layers=raw.layers("n_layer", "num_hidden_layers"),
        ffn_size=4 * hidden,
        max_positions=raw.size("seq_length", default=2048),
        position_embedding="alibi",
        norm_eps=raw.real("layer_norm_epsilon", default=1e-5),
        embedding_norm=True,
    )


def mpt(raw: RawConfig) -> GPTConfig:
    hidden, heads = raw.size("d_model", "hidden_size"), raw.size("n_heads", "num_attention_heads")
    attention = raw.section("attn_config")
    attention.only(
        attn_type="multihead_attention",
        alibi=True,
        alibi_bias_max=8,
        prefix_lm=False,
        qk_ln=False,
    )
    attention.unused("attn_impl", "attn_uses_sequence_id")
    raw.only(no_bias=True, expansion_ratio=4, logit_scale=None)
    raw.unused("embedding_fraction", "init_config", "init_device", "learned_pos_emb")
    raw.unused("norm_type", "tokenizer_name", "verbose")
    raw.defaults(bos_token_id=0, eos_token_id=0)
    return plain_gpt(
        raw,
        hidden,
        heads,
        num_layers=raw.layers("n_layers", "num_hidden_layers"),
        ffn_size=4 * hidden,
        max_positions=raw.size("max_seq_len", default=2048),
        position_embedding="alibi",
        norm_eps=raw.real("layer_norm_epsilon", default=1e-5),
        activation="gelu_erf",
        attention_bias=False,
        mlp_bias=False,
        attention_clip=attention.real("clip_qkv", 0.0) or None,
        softmax_scale=attention.real("softmax_scale", 0.0) or None,
    )


def opt(raw: RawConfig) -> GPTConfig:
    hidden, heads = raw.size("hidden_size"), raw.size("num_attention_heads")
    bias = raw.flag("enable_bias", default=True)
    raw.only(layer_norm_elementwise_affine=True)
    raw.unused("word_embed_proj_dim", "_remove_final_layer_norm")  # the tensors say it
    raw.defaults(bos_token_id=2, eos_token_id=2, pad_token_id=1)
    return plain_gpt(
        raw,
        hidden,
        heads,
        num_layers=raw.layers("num_hidden_layers"),
        ffn_size=raw.size("ffn_dim"),
        max_positions=raw.size("max_position_embeddings"),
        norm_placement="pre" if raw.flag("do_layer_norm_before", default=True) else "post",
        final_norm="decoder.final_layer_norm.weight" in raw.keys,
        activation=raw.activation("activation_function", "relu"),
        attention_bias=bias,
        mlp_bias=bias,
        # Projected embeddings are of another size than the head's.
        tied_embeddings=not {"lm_head.weight", "decoder.project_in.weight"} & {*raw.keys},
    )


def xglm(raw: RawConfig) -> GPTConfig:
    hidden, heads = raw.size("d_model"), raw.size("attention_heads", "num_attention_heads")
    raw.only(add_cross_attention=False)
    raw.defaults(eos_token_id=2, pad_token_id=1)
    return plain_gpt(
        raw,
        hidden,
        heads,
        start_id=raw.token("decoder_start_token_id", 2),
        num_layers=raw.layers("num_layers", "num_hidden_layers"),
        ffn_size=raw.size("ffn_dim"),
        max_positions=raw.size("max_position_embeddings"),
        activation=raw.activation("activation_function", "gelu"),
        tied_embeddings=False,
    )


def gptj(raw: RawConfig) -> GPTConfig:
    """GPT-J: one norm for attention and MLP, which read the same hidden states."""
    raw.only(rotary=True, scale_attn_weights=True)
    hidden, heads = raw.size("n_embd", "hidden_size"), raw.size("n_head", "num_attention_heads")
    head_size = raw.head_size(hidden, heads)
    return plain_gpt(
        raw,
        hidden,
        heads,
        num_layers=raw.layers("n_layer", "num_hidden_layers"),
        ffn_size=raw.size("n_inner", default=4 * hidden),
        max_positions=raw.size("n_positions", "max_position_embeddings"),
        position_embedding="rope",
        rotary_percentage=raw.size("rotary_dim", default=head_size) / head_size,
        norm_eps=raw.real("layer_norm_epsilon", 1e-5),
        activation=raw.activation("activation_function", "gelu_new"),
        attention_bias=False,
        parallel_residual=True,
        logits_bias=True if "lm_head.bias" in raw.keys else None,
    )


def codegen(raw: RawConfig) -> GPTConfig:
    """CodeGen: a GPT-J whose queries, keys and values lie in four blocks."""
    heads = raw.size("n_head", "num_attention_heads")
    if heads % CODEGEN_BLOCKS:
        choices = (f"multiples of {CODEGEN_BLOCKS}",)
        raw.problems.add("n_head is not supported", got=heads, choices=choices)
    raw.unused("n_ctx")  # n_positions rules
    return gptj(raw)


def falcon(raw: RawConfig) -> GPTConfig:
    heads, hidden = raw.size("num_attention_heads", "n_head"), raw.size("hidden_size")
    head_size = raw.head_size(hidden, heads)
    positions = rope(raw, head_size)
    if raw.flag("alibi", False):  # added to scores before they are divided by the root
        positions = {"position_embedding": "alibi", "alibi_scale": head_size**-0.5}
    groups = raw.size("num_kv_heads", "n_head_kv", default=heads)
    new = raw.flag("new_decoder_architecture", False)
    if raw.flag("multi_query", True) and not new:
        groups = 1
    bias = raw.flag("bias", False)
    raw.only(apply_residual_connection_post_layernorm=False)
    raw.unused("num_ln_in_parallel_attn")  # the tensors say it
    if new:
        raw.only(parallel_attn=True)
    raw.defaults(bos_token_id=11, eos_token_id=11)
    return plain_gpt(
        raw,
        hidden,
        heads,
        num_layers=raw.layers("num_hidden_layers", "n_layer"),
        num_kv_heads=groups,
        ffn_size=raw.size("ffn_hidden_size", default=4 * hidden),
        max_positions=raw.size("max_position_embeddings", default=2048),
        norm_eps=raw.real("layer_norm_epsilon", 1e-5),
        activation=raw.activation("activation", "gelu"),
        attention_bias=bias,
        mlp_bias=bias,
        parallel_residual=raw.flag("parallel_attn", True) or None,
        **positions,
    )


def has_decoder(raw: RawConfig) -> bool:
    """Return whether a T5's checkpoint holds more than its encoder."""
    return any(key.startswith(("decoder.block.", "decoder.layers.")) for key in raw.keys)


def t5(raw: RawConfig, **fields: Any) -> T5Config:
    """fields: what a model type that descends from it says otherwise."""
    encoder_only = not has_decoder(raw)
    layers = raw.layers("num_layers")
    kind, _, activation = raw.text("feed_forward_proj", default="relu").rpartition("-")
    if kind not in ("", "gated") or activation not in ACTIVATIONS:
        raw.problems.add("unknown feed_forward_proj", got=raw("feed_forward_proj"))
    if activation == "gelu" and kind:
        activation = "gelu_new"  # transformers calls the tanh form of v1.1 gated-gelu
    # Where they say something else than feed_forward_proj, they rule.
    activation = raw.text("dense_act_fn", activation)
    if activation not in ACTIVATIONS:
        raw.problems.add("unknown dense_act_fn", got=activation, choices=ACTIVATIONS)
    # The multilingual T5 never scales; for the others absence means the original, scaled T5.
    scaled = raw.flag("scale_decoder_outputs", raw.flag("tie_word_embeddings", True))
    if raw.raw.get("model_type") == "mt5":
        scaled = False
    raw.unused("n_positions", "num_decoder_layers")  # the tensors of an encoder alone rule
    return T5Config(
        vocab_size=raw.size("vocab_size"),
        num_layers=layers,
        hidden_size=raw.size("d_model"),
        num_heads=raw.size("num_heads"),
        head_size=raw.size("d_kv"),
        ffn_size=raw.size("d_ff"),
        num_decoder_layers=0 if encoder_only else raw.layers("num_decoder_layers", default=layers),
        num_buckets=raw.size("relative_attention_num_buckets", default=32),
        max_distance=raw.size("relative_attention_max_distance", default=128),
        norm_eps=raw.real("layer_norm_epsilon", default=1e-6),
        activation=ACTIVATIONS.get(activation, "relu"),
        gated=raw.flag("is_gated_act", bool(kind)),
        logits_scale=raw.size("d_model") ** -0.5 if scaled else 1.0,
        tied_embeddings="lm_head.weight" not in raw.keys,
        encoder_only=encoder_only,
        start_id=raw.token("decoder_start_token_id", raw.token("pad_token_id", 0)),
        end_id=raw.token("eos_token_id", 1),
        pad_id=raw.token("pad_token_id", 0),
        **fields,
    )


def umt5(raw: RawConfig) -> T5Config:
    raw.unused("scalable_attention")  # of its training's code
    return t5(raw, relative_bias_per_layer=True)


def longt5(raw: RawConfig) -> T5Config:
    """A LongT5 whose encoder attends to near tokens alone."""
    raw.unused("global_block_size")  # of the other kind of attention
    raw.only(encoder_attention_type="local")
    radius = raw.size("local_radius", default=127)
    return t5(raw, encoder_sliding_window=2 * radius + 1)


def switch_transformers(raw: RawConfig) -> T5Config:
    """A T5 of which every so many layers, from the second on, has experts.

    Training and transformers drop what an expert gets beyond its capacity; here nothing is.
    """
    raw.unused("router_jitter_noise", "router_type")
    raw.unused("router_ignore_padding_tokens", "add_router_probs", "router_dtype")
    raw.unused("router_z_loss_coef", "router_aux_loss_coef", "capacity_factor")
    raw.only(num_selected_experts=1, batch_prioritized_routing=False)
    raw.defaults(feed_forward_proj=raw.text("dense_act_fn", "relu"))
    limit = raw.size("expert_capacity", default=64)
    raw.notes.append(f"expert_capacity {limit} is not obeyed: no token of a sequence is dropped")
    fields: dict[str, Any] = {"router_bias": raw.flag("router_bias", False) or None}
    layers = raw.layers("num_layers")
    decoder_layers = raw.layers("num_decoder_layers", default=layers)
    for side, count in (("encoder", layers), ("decoder", decoder_layers)):
        sparse = raw.size(f"num_sparse_{side}_layers", default=3, minimum=0)
        step = count // sparse if sparse else count
        step = raw.size(f"{side}_sparse_step", default=step, minimum=0)
        numbers = (layer for layer in range(count) if step == 1 or (step and layer % step == 1))
        fields[f"{side}_expert_layers"] = layer_list(numbers)
    return t5(raw, num_experts=raw.size("num_experts", default=8), **fields)


def _bart(
    raw: RawConfig, *, pre: bool, embedding_norm: bool, sinusoidal: bool, **fields: Any
) -> BartConfig:
    """pre: norms are before the branches, and behind both stacks

    sinusoidal: positions are computed;  fields: of experts
    """
    raw.only(
        normalize_before=pre,
        add_final_layer_norm=pre,
        normalize_embedding=embedding_norm,
        static_position_embeddings=sinusoidal,
    )
    raw.unused("num_hidden_layers")  # it repeats encoder_layers
    forced = None
    if raw.flag("force_bos_token_to_be_generated", default=False):  # the first BARTs' name for it
        forced = raw.token("bos_token_id", 0)
    return BartConfig(
        vocab_size=raw.size("vocab_size"),
        num_layers=raw.layers("encoder_layers"),
        hidden_size=raw.size("d_model"),
        num_heads=raw.size("encoder_attention_heads"),
        ffn_size=raw.size("encoder_ffn_dim"),
        num_decoder_layers=raw.layers("decoder_layers"),
        num_decoder_heads=raw.size("decoder_attention_heads"),
        decoder_ffn_size=raw.size("decoder_ffn_dim"),
        max_positions=raw.size("max_position_embeddings"),
        norm_placement="pre" if pre else "post",
        embedding_norm=embedding_norm,
        activation=raw.activation("activation_function", "gelu"),
        logits_bias="final_logits_bias" in raw.keys,
        tied_embeddings="lm_head.weight" not in raw.keys,
        start_id=raw.token("decoder_start_token_id", 2),
        end_id=raw.token("eos_token_id", 2),
        pad_id=raw.token("pad_token_id", 1),
        forced_bos_id=raw.token("forced_bos_token_id", forced),
        **fields,
    )


def bart(raw: RawConfig) -> BartConfig:
    raw.only(extra_pos_embeddings=2)
    return _bart(raw, pre=False, embedding_norm=True, sinusoidal=False)


def mbart(raw: RawConfig) -> BartConfig:
    raw.only(extra_pos_embeddings=2)
    return _bart(raw, pre=True, embedding_norm=True, sinusoidal=False)


def m2m_100(raw: RawConfig) -> BartConfig:
    raw.only(pad_token_id=1)  # positions are counted from it
    return _bart(raw, pre=True, embedding_norm=False, sinusoidal=True)


def nllb_moe(raw: RawConfig) -> BartConfig:
    """An M2M-100 of which every so many layers has experts, two for each token.

    Of what experts add a share is left out in training, and the rest is scaled in inference.
    """
    raw.only(pad_token_id=1, second_expert_policy="all", moe_eval_capacity_token_fraction=1.0)
    raw.unused("expert_capacity", "normalize_router_prob_before_dropping", "router_dtype")
    raw.unused("batch_prioritized_routing", "router_ignore_padding_tokens")  # nothing is dropped
    raw.unused("router_z_loss_coef", "router_aux_loss_coef")
    fields: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        step = raw.size(f"{side}_sparse_step", default=4, minimum=0)
        numbers = range(step - 1, raw.layers(f"{side}_layers"), step) if step else ()
        fields[f"{side}_expert_layers"] = layer_list(numbers)
    return _bart(
        raw,
        pre=True,
        embedding_norm=False,
        sinusoidal=True,
        num_experts=raw.size("num_experts", default=128),
        experts_per_token=2,
        expert_scale=1.0 - raw.real("moe_token_dropout", 0.2),
        router_bias=raw.flag("router_bias", False) or None,
        **fields,
    )


def pegasus(raw: RawConfig) -> BartConfig:
    raw.only(add_bias_logits=False)
    raw.unused("extra_pos_embeddings")  # of an older table of positions
    return _bart(raw, pre=True, embedding_norm=False, sinusoidal=True)


def marian(raw: RawConfig) -> BartConfig:
    raw.only(
        add_bias_logits=False,
        share_encoder_decoder_embeddings=True,
        decoder_vocab_size=raw.raw.get("vocab_size"),
    )
    return _bart(raw, pre=False, embedding_norm=False, sinusoidal=True)


def agm(raw: RawConfig) -> AgmConfig:
    hidden, heads = raw.size("d_model"), raw.size("decoder_attention_heads")
    raw.only(
        position_bias_per_layer=True,
        use_alibi_position_embedding=False,
        scale_embedding=False,
        embed_dim=None,
    )
    scale = 1.0
    if raw.flag("scale_attention", default=True):
        size = raw.head_size(hidden, heads)
        scale = 8 / size if raw.flag("mup_scale", default=True) else size**-0.5
    return AgmConfig(
        vocab_size=raw.size("vocab_size"),
        num_layers=raw.layers("decoder_layers"),
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=raw.size("decoder_ffn_dim"),
        num_buckets=raw.size("relative_attention_num_buckets", default=32),
        max_distance=raw.size("relative_attention_max_distance", default=128),
        attention_scale=scale,
        activation=raw.activation("activation_function", "gelu"),
        logits_bias="final_logits_bias" in raw.keys,
        tied_embeddings="lm_head.decoder.weight" not in raw.keys,
        start_id=raw.token("bos_token_id", 0),
        end_id=raw.token("eos_token_id", 2),
        pad_id=raw.token("pad_token_id", 1),
    )
