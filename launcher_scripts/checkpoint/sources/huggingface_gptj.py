"""What config.json says of GPT-J, GPT-NeoX, CodeGen and Falcon, as a GPTConfig; see
huggingface_decoders."""

from __future__ import annotations

from launcher_scripts.checkpoint.sources.huggingface_configs import plain_gpt
from launcher_scripts.checkpoint.sources.huggingface_decoders import decoder
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.huggingface_rope import rope
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_dialects import CODEGEN_BLOCKS


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


def gpt_neox(raw: RawConfig) -> GPTConfig:
    head_size = raw.head_size(raw.size("hidden_size"), raw.size("num_attention_heads"))
    base, share = raw.real("rotary_emb_base", 10000.0), raw.real("rotary_pct", 0.25)
    raw.defaults(rope_theta=base, partial_rotary_factor=share)
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
