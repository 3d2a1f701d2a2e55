"""Families of today with their switches drawn at random: logits and tokens are those of
transformers, and a switch that is not supported is refused by its name."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder, refused_export
from tests.engine.test_hybrids import check, text

NO_END = 97
COMMON: dict[str, Any] = {
    "vocab_size": NO_END,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT = {"rope_type": "default", "rope_theta": 50.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}
ROPES = (None, DEFAULT, YARN, LLAMA3, LINEAR)
PARTIAL = tuple(rope and {**rope, "partial_rotary_factor": 0.5} for rope in ROPES)
YES_NO = (False, True)
ACTS = ("silu", "gelu", "relu", "gelu_pytorch_tanh", "relu2")
Fields = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A row of FAMILIES.

    config:   the name of the class of its configuration, without Config
    fields:   what every model of it has beside COMMON
    switches: key -> values
    fitted:   makes drawn fields ones that the class takes
    """

    config: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fitted: Callable[[Fields, random.Random], Fields] = lambda fields, _: fields


def kinds(*names: str) -> Callable[[Fields, random.Random], Fields]:
    """Draw layer_types among these, at least one of each if there are layers enough."""

    def fitted(fields: Fields, draw: random.Random) -> Fields:
        count = fields["num_hidden_layers"]
        chosen = [draw.choice(names) for _ in range(count)]
        return {**fields, "layer_types": chosen}

    return fitted


def nemotron(fields: Fields, draw: random.Random) -> Fields:
    count = fields.pop("num_hidden_layers")
    names = ("linear_attention", "full_attention", "mlp", "moe")
    if draw.random() < 0.3:
        names = names[:3]
    chosen = [draw.choice(names) for _ in range(count)]
    if "linear_attention" not in chosen and draw.random() < 0.8:
        chosen[0] = "linear_attention"
    groups = draw.choice((1, 2, 4, 8))
    fields["mlp_bias"] = "moe" not in chosen and draw.random() < 0.5
    return {**grouped(fields, draw), "layers_block_type": chosen, "n_groups": groups}


def grouped(fields: Fields, draw: random.Random) -> Fields:
    """Experts in groups, of which topk_group are chosen."""
    count = draw.choice((1, 1, 2, 4))
    per_token = fields["num_experts_per_tok"]
    chosen = draw.randint(1, count)
    while chosen * (8 // count) < per_token:
        chosen += 1
    return {**fields, "n_routed_experts": 8, "n_group": count, "topk_group": chosen}


def dense_first(fields: Fields, draw: random.Random) -> Fields:
    fields = grouped(fields, draw)
    return {**fields, "first_k_dense_replace": draw.randint(0, fields["num_hidden_layers"])}


def sparse_layers(fields: Fields, draw: random.Random) -> Fields:
    layers = [draw.choice(("dense", "sparse")) for _ in range(fields["num_hidden_layers"])]
    return {**fields, "mlp_layer_types": layers}


def shared_keys(fields: Fields, draw: random.Random) -> Fields:
    """As many layers that share keys as leave one of every kind before them."""
    count, layers = fields["num_kv_shared_layers"], fields["layer_types"]
    layers = [*layers[:-1], "full_attention"]  # as Gemma 4 does
    while not {*layers[len(layers) - count :]} <= {*layers[: len(layers) - count]}:
        count -= 1
    # transformers needs the embeddings of every layer where layers share keys.
    count = count if fields["hidden_size_per_layer_input"] else 0
    more: Fields = {"num_kv_shared_layers": count, "layer_types": layers}
    if "altup_num_inputs" in fields:
        shares = [draw.choice((0.0, 0.5, 0.9)) for _ in layers]
        more["activation_sparsity_pattern"] = shares
    elif count and fields["enable_moe_block"]:
        more["use_double_wide_mlp"] = False
    return {**fields, **more}


def both(*steps: Callable[[Fields, random.Random], Fields]) -> Callable[..., Fields]:
    def fitted(fields: Fields, draw: random.Random) -> Fields:
        for step in steps:
            fields = step(fields, draw)
        return fields

    return fitted


def kimi(fields: Fields, _draw: random.Random) -> Fields:
    return {**fields, "num_experts": fields.pop("n_routed_experts")}


def deepseek_v2(fields: Fields, draw: random.Random) -> Fields:
    fields = dense_first(fields, draw)
    if fields["n_group"] == 1:
        fields["topk_method"] = "greedy"
    return fields


def attention_layers(fields: Fields, draw: random.Random) -> Fields:
    count = fields["num_hidden_layers"]
    chosen = [n for n in range(count) if draw.random() < 0.5]
    return {**fields, "attn_layer_indices": draw.choice((chosen, None))}


def mamba_sizes(fields: Fields, draw: random.Random) -> Fields:
    """Heads of the inner size, and groups of the heads."""
    inner = fields.get("mamba_d_ssm") or fields["mamba_expand"] * 32
    heads = draw.choice((4, 8))
    groups = draw.choice((1, 2, 4))
    size = draw.choice(("auto", inner // heads))
    return {**fields, "mamba_n_heads": heads, "mamba_d_head": size, "mamba_n_groups": groups}


LAYERS = {"num_hidden_layers": (1, 2, 3, 4), "tie_word_embeddings": YES_NO}
RECURRENT = {**LAYERS, "rms_norm_eps": (1e-6, 1e-2), "num_key_value_heads": (1, 2, 4)}
PLAIN = {**RECURRENT, "hidden_act": ACTS}
MAMBA = {
    "mamba_d_state": (5, 8),
    "mamba_d_conv": (2, 3, 4),
    "mamba_expand": (1, 2),
    "mamba_chunk_size": (16, 64),
    "mamba_conv_bias": YES_NO,
    "mamba_proj_bias": YES_NO,
    "time_step_limit": ((0.0, float("inf")), (0.3, 1.0), (0.1, float("inf"))),
}
LATENT = {
    "num_key_value_heads": (4,),
    "kv_lora_rank": (10, 16),
    "q_lora_rank": (None, 9, 32),
    "qk_nope_head_dim": (6, 8),
    "qk_rope_head_dim": (4, 8),
    "v_head_dim": (5, 14, 20),
    "attention_bias": YES_NO,
    "rope_parameters": (
        *ROPES,
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        {**YARN, "mscale": 0.6, "mscale_all_dim": 1.3},
        {**YARN, "mscale_all_dim": 1.3},
        {**YARN, "mscale": 1.3},
        {**YARN, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.2},
    ),
}
DELTA = {
    "head_dim": (8, 16),
    "linear_num_key_heads": (1, 2),
    "linear_num_value_heads": (2, 4, 6),
    "linear_key_head_dim": (6, 8),
    "linear_value_head_dim": (6, 10),
    "linear_conv_kernel_dim": (2, 3, 4),
    "attention_bias": YES_NO,
    "rope_parameters": (
        None,
        {**DEFAULT, "partial_rotary_factor": 0.5},
        {**DEFAULT, "partial_rotary_factor": 1.0},
        {**YARN, "partial_rotary_factor": 0.25},
    ),
}
EXPERTS = {
    "num_experts": (4, 6),
    "num_experts_per_tok": (1, 2, 4),
    "moe_intermediate_size": (12, 24),
    "norm_topk_prob": YES_NO,
}
ROUTED = {
    "num_experts_per_tok": (1, 2, 4),
    "moe_intermediate_size": (12, 24),
    "norm_topk_prob": YES_NO,
    "n_shared_experts": (0, 1, 2),
    "routed_scaling_factor": (1.0, 2.5),
}
QWEN = kinds("linear_attention", "full_attention")


def dense_some(fields: Fields, draw: random.Random) -> Fields:
    layers = [n for n in range(fields["num_hidden_layers"]) if draw.random() < 0.3]
    step = draw.choice((1, 2))
    return {**fields, "mlp_only_layers": draw.choice((layers, None)), "decoder_sparse_step": step}


WINDOWS = kinds("sliding_attention", "full_attention")
MULTIPLIERS = {
    "embedding_multiplier": (1.0, 4.0),
    "residual_multiplier": (1.0, 0.4),
    "attention_multiplier": (0.2, 0.35),
    "logits_scaling": (1.0, 0.5),
}


def bases(fields: Fields, draw: random.Random) -> Fields:
    layers = [draw.choice((0, 50.0, 1000.0)) for _ in range(fields["num_hidden_layers"])]
    drawn = draw.choice((layers, None))
    refused = fields.get("rope_parameters") == YARN  # with bases of layers, see below
    return {**fields, "layer_rope_theta": None if refused else drawn}


def two_ropes(fields: Fields, draw: random.Random) -> Fields:
    share = draw.choice((0.334, 0.5, 1.0))
    sections = {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
        for kind, theta in (("full_attention", 500.0), ("sliding_attention", 50.0))
    }
    return {**fields, "rope_parameters": sections}


FAMILIES: dict[str, Family] = {
    "nemotron_h": Family(
        "NemotronH",
        {},
        {
            **LAYERS,
            "num_key_value_heads": (1, 2, 4),
            "head_dim": (8, 12),
            "num_hidden_layers": (2, 4, 6),
            "mamba_num_heads": (8,),
            "mamba_head_dim": (6, 8),
            "ssm_state_size": (5, 8),
            "chunk_size": (16, 64),
            "conv_kernel": (2, 3, 4),
            "mlp_hidden_act": ("relu2", "silu", "gelu"),
            "use_bias": YES_NO,
            "use_conv_bias": YES_NO,
            "num_experts_per_tok": (1, 2, 4),
            "moe_intermediate_size": (12, 24),
            "moe_shared_expert_intermediate_size": (16, 20),
            "n_shared_experts": (1, 0, 2),
            "moe_latent_size": (None, 16),
            "norm_topk_prob": YES_NO,
            "routed_scaling_factor": (1.0, 2.5),
            "layer_norm_epsilon": (1e-5, 1e-2),
            "expand": (2, 5),
            "residual_in_fp32": YES_NO,
            "mamba_proj_bias": YES_NO,
            "time_step_limit": ((0.0, float("inf")),),
            "time_step_min": (1e-9,),
        },
        nemotron,
    ),
    "bamba": Family(
        "Bamba",
        {},
        {
            **RECURRENT,
            **MAMBA,
            "attention_bias": YES_NO,
            "mlp_bias": YES_NO,
            "rope_parameters": PARTIAL,
        },
        both(attention_layers, mamba_sizes),
    ),
    "falcon_h1": Family(
        "FalconH1",
        {},
        {
            **RECURRENT,
            **MAMBA,
            "head_dim": (8, 12),
            "mamba_d_ssm": (None, 48, 64),
            "mamba_rms_norm": YES_NO,
            "mamba_norm_before_gate": YES_NO,
            "mamba_proj_bias": (False,),
            "rope_parameters": ROPES,
            "lm_head_multiplier": (1.0, 0.5),
            "embedding_multiplier": (1.0, 3.0),
            "key_multiplier": (1.0, 0.4),
            "attention_in_multiplier": (1.0, 1.3),
            "attention_out_multiplier": (1.0, 0.6),
            "ssm_multipliers": (None, [0.7, 0.5, 0.35, 0.9, 1.2]),
            "ssm_in_multiplier": (1.0, 1.25),
            "ssm_out_multiplier": (1.0, 0.6),
            "mlp_multipliers": (None, [0.88, 0.6]),
        },
        mamba_sizes,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        {},
        {
            **RECURRENT,
            **MAMBA,
            **MULTIPLIERS,
            "position_embedding_type": ("rope", "nope", None),
            "num_local_experts": (0, 4, 6),
            "num_experts_per_tok": (1, 2, 4),
            "shared_intermediate_size": (16, 20),
            "attention_bias": YES_NO,
            "rope_parameters": ROPES,
        },
        both(kinds("linear_attention", "full_attention"), mamba_sizes),
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        {},
        {**RECURRENT, **DELTA, **EXPERTS, "shared_expert_intermediate_size": (12, 20)},
        both(QWEN, dense_some),
    ),
    "qwen3_5_text": Family("Qwen3_5Text", {}, {**RECURRENT, **DELTA}, QWEN),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeText",
        {"norm_topk_prob": True},
        {**RECURRENT, **DELTA, **EXPERTS, "shared_expert_intermediate_size": (12, 20)},
        QWEN,
    ),
    "lfm2": Family(
        "Lfm2",
        {},
        {
            **LAYERS,
            "num_key_value_heads": (1, 2, 4),
            "norm_eps": (1e-5, 1e-2),
            "conv_bias": YES_NO,
            "conv_L_cache": (2, 3, 4),
            "block_multiple_of": (8, 16),
            "block_ffn_dim_multiplier": (1.0, 1.5),
            "block_auto_adjust_ff_dim": YES_NO,
            "rope_parameters": ROPES,
        },
        kinds("conv", "full_attention"),
    ),
    "lfm2_moe": Family(
        "Lfm2Moe",
        {},
        {
            **LAYERS,
            **EXPERTS,
            "num_key_value_heads": (1, 2, 4),
            "norm_eps": (1e-5, 1e-2),
            "conv_bias": YES_NO,
            "conv_L_cache": (2, 3, 4),
            "num_dense_layers": (0, 1, 2),
            "use_expert_bias": YES_NO,
            "routed_scaling_factor": (1.0, 2.5),
            "rope_parameters": ROPES,
        },
        kinds("conv", "full_attention"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2",
        {},
        {
            **PLAIN,
            **LATENT,
            **ROUTED,
            "topk_method": ("greedy", "group_limited_greedy"),
        },
        deepseek_v2,
    ),
    "deepseek_v3": Family(
        "DeepseekV3", {}, {**PLAIN, **LATENT, **ROUTED, "rope_interleave": YES_NO}, dense_first
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLite",
        {},
        {**PLAIN, **LATENT, **ROUTED, "rope_interleave": YES_NO},
        both(sparse_layers, grouped),
    ),
    "kimi_linear": Family(
        "KimiLinear",
        {},
        {
            **RECURRENT,
            **{key: values for key, values in LATENT.items() if key != "rope_parameters"},
            **ROUTED,
            "num_hidden_layers": (2, 3, 4),
            "linear_head_dim": (6, 8),
            "linear_num_heads": (2, 4),
            "linear_conv_kernel_dim": (2, 3, 4),
        },
        both(kinds("linear_attention", "full_attention"), sparse_layers, grouped, kimi),
    ),
    "youtu": Family("Youtu", {}, {**PLAIN, **LATENT, "rope_interleave": YES_NO}),
    "minicpm3": Family(
        "MiniCPM3",
        {},
        {
            **PLAIN,
            **LATENT,
            "v_head_dim": (None, 5, 14),
            "mlp_bias": YES_NO,
            "scale_emb": (1, 3),
            "scale_depth": (None, 0.7, 1.4),
            "dim_model_base": (None, 10, 32),
        },
    ),
    "apertus": Family(
        "Apertus",
        {},
        {
            **PLAIN,
            "hidden_act": ("xielu", "silu", "relu2"),
            "attention_bias": YES_NO,
            "rope_parameters": ROPES,
        },
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1",
        {},
        {
            **PLAIN,
            "head_dim": (6, 8, 12),
            "rms_norm_eps": (1e-6,),
            "attention_bias": YES_NO,
            "rope_parameters": (
                None,
                DEFAULT,
                {"rope_type": "dynamic", "rope_theta": 50.0, "alpha": 50.0, "factor": 1.0},
                YARN,
                LINEAR,
            ),
        },
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1",
        {},
        {
            **PLAIN,
            "head_dim": (6, 8, 12),
            "rms_norm_eps": (1e-6,),
            "attention_bias": YES_NO,
            "num_experts": (4, 6),
            "moe_topk": (1, 2, 3),
            "rope_parameters": (
                None,
                DEFAULT,
                {"rope_type": "dynamic", "rope_theta": 50.0, "alpha": 50.0, "factor": 1.0},
            ),
        },
    ),
    "hy_v3": Family(
        "HYV3",
        {},
        {
            **PLAIN,
            "head_dim": (8, 12),
            "attention_bias": YES_NO,
            "num_experts": (4, 6),
            "num_experts_per_tok": (1, 2, 4),
            "num_shared_experts": (1, 2),
            "moe_intermediate_size": (12, 24),
            "router_scaling_factor": (1.0, 2.826),
            "rope_parameters": ROPES,
        },
        sparse_layers,
    ),
    "afmoe": Family(
        "Afmoe",
        {},
        {
            **PLAIN,
            "head_dim": (8, 12),
            "num_dense_layers": (0, 1, 2),
            "num_experts": (4, 6),
            "num_experts_per_tok": (1, 2, 4),
            "num_shared_experts": (0, 1, 2),
            "moe_intermediate_size": (12, 24),
            "route_scale": (1.0, 2.0),
            "sliding_window": (7,),
            "mup_enabled": YES_NO,
            "rope_parameters": ROPES,
        },
        WINDOWS,
    ),
    "phimoe": Family(
        "Phimoe",
        {},
        {
            **PLAIN,
            "num_local_experts": (4, 6),
            "num_experts_per_tok": (2,),
            "router_jitter_noise": (0.01, 0.4),
            "attention_bias": YES_NO,
            "lm_head_bias": YES_NO,
            "sliding_window": (None, 7),
            "rope_parameters": (None, DEFAULT),
        },
    ),
    "mimo_v2_flash": Family(
        "MiMoV2Flash",
        {},
        {
            **PLAIN,
            "num_key_value_heads": (1, 2),
            "head_dim": (12, 16),
            "v_head_dim": (8, 12),
            "attention_bias": YES_NO,
            **{key: value for key, value in ROUTED.items() if key != "n_shared_experts"},
            "sliding_window": (7,),
            "attention_value_scale": (None, 0.707),
        },
        both(WINDOWS, sparse_layers, grouped, two_ropes),
    ),
    "llama4_text": Family(
        "Llama4Text",
        {},
        {
            **PLAIN,
            "head_dim": (8, 12),
            "intermediate_size_mlp": (20, 28),
            "num_local_experts": (4, 6),
            "num_experts_per_tok": (1, 2),
            "interleave_moe_layer_step": (1, 2, 3),
            "rms_norm_eps": (1e-6,),  # of norms after a rotation that scales
            "use_qk_norm": YES_NO,
            "no_rope_layer_interval": (2, 3, 4),
            "attention_chunk_size": (300,),
            "floor_scale": (300,),
            "attn_temperature_tuning": YES_NO,
            "attention_bias": YES_NO,
            "rope_parameters": ROPES,
        },
    ),
    "granite_swa": Family(
        "GraniteSWA",
        {},
        {
            **PLAIN,
            **MULTIPLIERS,
            "attention_bias": YES_NO,
            "mlp_bias": YES_NO,
            "sliding_window": (7,),
            "rope_parameters": ROPES,
        },
        both(WINDOWS, bases),
    ),
    "granitemoe_swa": Family(
        "GraniteMoeSWA",
        {},
        {
            **PLAIN,
            **MULTIPLIERS,
            "attention_bias": YES_NO,
            "num_local_experts": (4, 6),
            "num_experts_per_tok": (1, 2, 4),
            "shared_intermediate_size": (0, 20),
            "sliding_window": (7,),
            "rope_parameters": ROPES,
        },
        both(WINDOWS, bases),
    ),
    "cohere2_moe": Family(
        "Cohere2Moe",
        {},
        {
            **PLAIN,
            "rms_norm_eps": (None, 1e-5),
            "head_dim": (8, 12),
            "attention_bias": YES_NO,
            "first_k_dense_replace": (0, 1, 2),
            "prefix_dense_intermediate_size": (None, 20),
            "prefix_dense_sliding_window_pattern": (1, 2),
            "sliding_window_pattern": (2, 4),
            "num_experts": (4, 6),
            "num_experts_per_tok": (1, 2, 4),
            "num_shared_experts": (0, 1, 2),
            "shared_expert_combination_strategy": ("average", "sum"),
            "expert_selection_fn": ("softmax", "sigmoid"),
            "norm_topk_prob": YES_NO,
            "sliding_window": (7,),
            "logit_scale": (0.0625, 0.5),
            "num_hidden_layers": (2, 3, 5),
        },
    ),
    "gemma4_text": Family(
        "Gemma4Text",
        {"vocab_size_per_layer_input": NO_END, "num_experts": 6, "moe_intermediate_size": 24},
        {
            "hidden_size_per_layer_input": (0, 4, 8),
            "num_kv_shared_layers": (0, 1, 2),
            "use_double_wide_mlp": YES_NO,
            "enable_moe_block": YES_NO,
            "top_k_experts": (1, 2, 6),
            **{key: values for key, values in PLAIN.items() if key != "hidden_act"},
            "hidden_activation": ("gelu_pytorch_tanh", "silu"),
            "head_dim": (8, 12),
            "global_head_dim": (8, 16, 24),
            "num_global_key_value_heads": (None, 1, 2),
            "attention_k_eq_v": YES_NO,
            "attention_bias": YES_NO,
            "sliding_window": (7,),
            "final_logit_softcapping": (None, 3.0),
            "use_bidirectional_attention": (None, "vision"),
            "rope_parameters": (
                None,
                {"full_attention": DEFAULT, "sliding_attention": DEFAULT},
                {
                    "full_attention": {
                        "rope_type": "proportional",
                        "rope_theta": 500.0,
                        "partial_rotary_factor": 0.5,
                    },
                    "sliding_attention": DEFAULT,
                },
            ),
        },
        both(WINDOWS, shared_keys),
    ),
    "gemma3n_text": Family(
        "Gemma3nText",
        {"vocab_size_per_layer_input": 50},
        {
            **{key: values for key, values in PLAIN.items() if key != "hidden_act"},
            "hidden_activation": ("gelu_pytorch_tanh", "silu"),
            "head_dim": (8, 12),
            "attention_bias": YES_NO,
            "hidden_size_per_layer_input": (4, 8),
            "num_kv_shared_layers": (0, 1, 2),
            "altup_num_inputs": (2, 3, 4),
            "altup_active_idx": (0, 1),
            "altup_correct_scale": YES_NO,
            "laurel_rank": (4, 8),
            "final_logit_softcapping": (3.0, 30.0),
            "sliding_window": (7,),
            "rope_parameters": (
                None,
                {"full_attention": DEFAULT, "sliding_attention": DEFAULT},
                {"full_attention": LINEAR, "sliding_attention": DEFAULT},
            ),
        },
        both(WINDOWS, shared_keys),
    ),
    "nanochat": Family(
        "NanoChat",
        {},
        {
            **PLAIN,
            "hidden_act": ("relu2", "silu"),
            "attention_bias": YES_NO,
            "rms_norm_eps": (1e-6,),
            "final_logit_softcapping": (15.0, 3.0, None),
            "rope_parameters": ROPES,
        },
    ),
    "flex_olmo": Family(
        "FlexOlmo",
        {},
        {
            **PLAIN,
            "attention_bias": YES_NO,
            "num_experts": (4, 6),
            "num_experts_per_tok": (1, 2, 4),
            "norm_topk_prob": YES_NO,
            "rope_parameters": ROPES,
        },
    ),
}
NORMS = ("norm.weight", "layernorm.weight", "dt_bias", ".D", "A_log", "bias", "alpha_p", "alpha_n")


def drawn(name: str, seed: int) -> Fields:
    """Fields of a configuration."""
    family, draw = FAMILIES[name], random.Random(f"{name} {seed}")
    fields = {key: draw.choice(values) for key, values in family.switches.items()}
    return family.fitted({**COMMON, **fields, **family.fields}, draw)


def made(name: str, fields: Fields) -> PreTrainedModel:
    """A model whose weights are all random, so that each term of its formulas shows."""
    family = FAMILIES[name]
    torch.manual_seed(len(str(fields)))
    config = getattr(transformers, f"{family.config}Config")(**fields)
    kind = getattr(transformers, f"{family.config.removesuffix('Text')}ForCausalLM")
    with warnings.catch_warnings():  # of shared experts without a width
        warnings.simplefilter("ignore")
        model: PreTrainedModel = kind(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith(NORMS) or parameter.dim() < 2:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.15)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            if buffer_name.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model


def compare(model: PreTrainedModel, folder: Path, length: int = 90, count: int = 64) -> float:
    """The largest difference of the prompt's logits; checks them, and the tokens of the answer."""
    model.save_pretrained(folder / "hf")
    exported = export_folder(folder / "hf", folder, processes=1)
    return compare_exported(model, exported, length, count)


def compare_exported(model: PreTrainedModel, exported: Path, length: int, count: int) -> float:
    engine = Engine.load(EngineSettings(exported, device="cpu", max_batch_size=2))
    try:
        prompt = text(length)
        request = GenerateRequest(prompt, count, end_id=NO_END, return_context_logits=True)
        answer = engine.submit(request).result(300)
    finally:
        engine.close()
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    assert bool(expected.isfinite().all())
    got = torch.as_tensor(answer.context_logits)
    difference = float((got - expected).abs().max() / expected.abs().max())
    assert difference <= 2e-4, difference
    check(model, prompt, answer.output_ids)
    return difference


# A family, its fields, and the words that refuse them.
REFUSED: tuple[tuple[str, Fields, str], ...] = (
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is not supported"),
    ("nemotron_h", {"attention_bias": True}, "attention_bias is not supported"),
    ("nemotron_h", {"sliding_window": 7}, "sliding_window is not supported"),
    (
        "nemotron_h",
        {"mlp_bias": True, "layers_block_type": ["moe", "linear_attention"]},
        "shared experts with biases are not supported",
    ),
    ("bamba", {"hidden_act": "gelu"}, "hidden_act is not supported"),
    ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act is not supported"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act is not supported"),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob is not supported"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias is not supported"),
    ("falcon_h1", {"mlp_bias": True}, "mlp_bias is not supported"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is not supported"),
    ("hy_v3", {"mlp_bias": True}, "shared experts with biases are not supported"),
    ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok is not supported"),
    ("afmoe", {"attention_bias": True}, "attention_bias is not supported"),
    (
        "gemma4_text",
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50},
        "vocab_size_per_layer_input is not supported below vocab_size",
    ),
    (
        "gemma4_text",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention is not supported",
    ),
    ("gemma3n_text", {"attention_new_switch": 3}, "attention_new_switch"),
    ("gemma4_text", {"attention_new_switch": 3}, "attention_new_switch"),
    (
        "granite_swa",
        {"rope_parameters": YARN, "layer_rope_theta": [50.0, 0], "num_hidden_layers": 2},
        "rope_type is not supported with layer_rope_theta",
    ),
)


@pytest.mark.parametrize(("name", "fields", "words"), REFUSED)
def test_what_is_not_computed_is_refused_by_its_name(
    name: str, fields: Fields, words: str, tmp_path: Path
) -> None:
    more = {**drawn(name, 0), **fields}
    if "layer_types" in more and len(more["layer_types"]) != more.get("num_hidden_layers", 0):
        more["layer_types"] = ["full_attention"] * more["num_hidden_layers"]
    made(name, more).save_pretrained(tmp_path / "hf")
    refused_export(tmp_path / "hf", tmp_path, words)


# Values that have once been read otherwise.
PINNED: tuple[tuple[str, Fields], ...] = (
    (
        "nemotron_h",
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 2}
        | {"layers_block_type": ["moe", "linear_attention"], "mlp_bias": False},
    ),
    ("qwen3_next", {"mlp_only_layers": [0, 1], "num_hidden_layers": 2}),
    ("deepseek_v2", {"n_shared_experts": 0}),
    ("lfm2_moe", {"use_expert_bias": False, "num_dense_layers": 1, "num_hidden_layers": 3}),
    ("afmoe", {"num_shared_experts": 0, "num_dense_layers": 0}),
    ("hunyuan_v1_dense", {"rope_parameters": YARN}),
    ("nanochat", {"rope_parameters": YARN, "final_logit_softcapping": None}),
    ("llama4_text", {"rope_parameters": YARN, "use_qk_norm": True, "rms_norm_eps": 1e-6}),
    ("cohere2_moe", {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": None}),
    ("granite_swa", {"rope_parameters": YARN, "layer_rope_theta": None}),
    ("mimo_v2_flash", {"attention_value_scale": None}),
)


@pytest.mark.parametrize(("name", "fields"), PINNED)
def test_values_mean_what_they_mean_to_transformers(
    name: str, fields: Fields, tmp_path: Path
) -> None:
    more = {**drawn(name, 0), **fields}
    if "layer_types" in more:
        more["layer_types"] = (more["layer_types"] * 4)[: more["num_hidden_layers"]]
    compare(made(name, more), tmp_path, 40, 16)


def test_a_kimi_linear_as_it_was_published(tmp_path: Path) -> None:
    """Layers count from 1, and MLPs without experts have a name of their own."""
    fields = {
        **drawn("kimi_linear", 0),
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }
    model, folder = made("kimi_linear", fields), tmp_path / "hf"
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    own = ("layer_types", "mlp_layer_types", "qk_head_dim")
    config = {
        key: value
        for key, value in said.items()
        if key not in own and not key.startswith("linear_")
    }
    linear = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": fields["linear_head_dim"],
        "num_heads": fields["linear_num_heads"],
        "short_conv_kernel_size": fields["linear_conv_kernel_dim"],
    }
    published = {
        **config,
        "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }
    (folder / "config.json").write_text(json.dumps(published))
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): values
        for name, values in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")
    compare_exported(model, export_folder(folder, tmp_path, processes=1), 40, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_drawn_switches(name: str, tmp_path: Path) -> None:
    for seed in range(6):
        fields = drawn(name, seed)
        compare(made(name, fields), tmp_path / str(seed))
