"""The forward passes of BART, mBART and Agm, written plainly, over rebuilt tensors (float32)."""

from __future__ import annotations

import torch
from torch.nn import functional

from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.bart import BartConfig
from tests.checkpoint.reference_forward_parts import ACTIVATIONS, linear, norm
from tests.checkpoint.reference_forward_t5 import bucket
from tests.checkpoint.reference_weights import StoredWeights


def logits(w: StoredWeights, config: BartConfig, ids: torch.Tensor, targets: torch.Tensor):
    """Logits [B, T, V] after each of the decoder's input ids `targets` [B, T]."""
    memory = _embed(w, config, "encoder", ids)
    for i in range(config.num_layers):
        stem = f"encoder.layers.{i}"
        parts = [f"{stem}.self_attn.{part}_proj" for part in "qkv"]
        memory = _residual(
            w, config, f"{stem}.self_attn", memory, _attend(w, parts, config.num_heads)
        )
        memory = _residual(w, config, f"{stem}.final", memory, _mlp(w, config, stem))
    x = _embed(w, config, "decoder", targets)
    if config.norm_placement == "pre":
        memory = norm(w, config, "encoder.layer_norm", memory)
    heads = config.num_decoder_heads
    for i in range(config.num_decoder_layers):
        stem = f"decoder.layers.{i}"
        x = _residual(w, config, f"{stem}.self_attn", x, _attend_self(w, stem, heads))
        parts = [f"{stem}.encoder_attn.{part}_proj" for part in "qkv"]
        x = _residual(w, config, f"{stem}.encoder_attn", x, _attend(w, parts, heads, memory))
        x = _residual(w, config, f"{stem}.final", x, _mlp(w, config, stem))
    if config.norm_placement == "pre":
        x = norm(w, config, "decoder.layer_norm", x)
    out = x @ w["lm_head.weight"].T
    return out + w["final_logits_bias"] if config.logits_bias else out


def agm_logits(w: StoredWeights, config: AgmConfig, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of ids [B, S]."""
    x = w["shared.weight"][ids]
    length = ids.shape[1]
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    where = bucket(distance, config.num_buckets, config.max_distance, False)
    causal = torch.full((length, length), -torch.inf).triu(1)
    for i in range(config.num_layers):
        stem = f"decoder.layers.{i}"
        normed = norm(w, config, f"{stem}.self_attn_layer_norm", x)
        qkv = (normed @ w[f"{stem}.self_attn.qkv.weight"]).chunk(3, dim=-1)
        bias = w[f"{stem}.self_attn.relative_attention_bias.weight"][:, where]
        mixed = _mix(*qkv, config.num_heads, config.attention_scale, bias + causal)
        x = x + mixed @ w[f"{stem}.self_attn.o.weight"]
        x = x + _mlp(w, config, stem)(norm(w, config, f"{stem}.final_layer_norm", x))
    out = norm(w, config, "decoder.layernorm_output", x) @ w["lm_head.decoder.weight"].T
    return out + w["final_logits_bias"] if config.logits_bias else out


def _embed(w, config, side, ids):
    x = w["shared.weight"][ids] + w[f"{side}.embed_positions.weight"][: ids.shape[1]]
    name = f"{side}.layernorm_embedding"
    if not config.embedding_norm:
        return x
    return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def _residual(w, config, stem, x, block):
    name = f"{stem}_layer_norm"
    if config.norm_placement == "pre":
        return x + block(norm(w, config, name, x))
    return norm(w, config, name, x + block(x))


def _attend(w, parts, heads, memory=None):
    def block(x):
        source = x if memory is None else memory
        q, k, v = (linear(w, part, y) for part, y in zip(parts, (x, source, source), strict=True))
        out = parts[0].replace("q_proj", "out_proj")
        return linear(w, out, _mix(q, k, v, heads, (q.shape[-1] // heads) ** -0.5, 0.0))

    return block


def _attend_self(w, stem, heads):
    def block(x):
        causal = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        q, k, v = linear(w, f"{stem}.self_attn.qkv", x).chunk(3, dim=-1)
        mixed = _mix(q, k, v, heads, (q.shape[-1] // heads) ** -0.5, causal)
        return linear(w, f"{stem}.self_attn.out_proj", mixed)

    return block


def _mix(q, k, v, heads, scale, bias):
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # [B, h, S, d]
    weights = (q @ k.transpose(-1, -2) * scale + bias).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(-2)


def _mlp(w, config, stem):
    activation = ACTIVATIONS[config.activation]
    return lambda x: linear(w, f"{stem}.fc2", activation(linear(w, f"{stem}.fc1", x)))
