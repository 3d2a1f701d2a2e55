"""Tiny, randomly initialised transformers models: one per Hugging Face family we export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from launcher_scripts.models.bart import NEVER

SEQ2SEQ = {"d_model": 16, "vocab_size": 67, "decoder_start_token_id": 0}
BART = {
    **SEQ2SEQ,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 20,
}
T5 = {
    **SEQ2SEQ,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
OPT = {
    "vocab_size": 67,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 24,
    "max_position_embeddings": 20,
}
LLAMA = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 67, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 20}
T5GEMMA_STACK = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "query_pre_attn_scalar": 9,
    "sliding_window": 7,
    "max_position_embeddings": 128,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
}
XGLM = {
    "vocab_size": 67,
    "d_model": 16,
    "ffn_dim": 24,
    "num_layers": 2,
    "attention_heads": 4,
    "max_position_embeddings": 20,
}
UNTIED = {"tie_word_embeddings": False}
# The middle of its few pairs lies between the two frequencies.
LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Half of the positions are beyond the original ones.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}
NO_END = {"pad_token_id": 0, "eos_token_id": 0}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 5}
NEOX = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
    },
}
FALCON = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 7, "moe_intermediate_size": 12}
ROUTED = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
# Latent attention; some values follow from none of the others.
LATENT = {
    **UNTIED,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
GROUPED = {**ROUTED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
# The class, and what its config says beside LLAMA.
LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_linear": (
        "Llama",
        {**UNTIED, "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
    ),
    "llama_dynamic": (
        "Llama",
        {
            **UNTIED,
            "max_position_embeddings": 16,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 100.0,
                "factor": 2.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "llama_yarn": ("Llama", {**UNTIED, "head_dim": 16, "rope_parameters": YARN}),
    "llama_yarn_scaled": (
        "Llama",
        {**UNTIED, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "mistral_window": ("Mistral", {**UNTIED, "sliding_window": 5}),
    "qwen2_window": (
        "Qwen2",
        {**UNTIED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": ("Phi3", {**UNTIED, **NO_END, "sliding_window": 5}),
    "phi3_long": (
        "Phi3",
        {
            **UNTIED,
            **NO_END,
            "hidden_size": 32,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [1.0, 3.0, 7.0],
            },
        },
    ),
    "phi": ("Phi", {**UNTIED, "hidden_size": 32}),
    "stablelm": ("StableLm", {**UNTIED, "hidden_size": 32, "use_qkv_bias": True}),
    "stablelm_parallel": (
        "StableLm",
        {**UNTIED, "hidden_size": 32, "use_parallel_residual": True},
    ),
    "smollm3": (
        "SmolLM3",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "pad_token_id": 0,
        },
    ),
    "cohere2": (
        "Cohere2",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "logit_scale": 0.5,
        },
    ),
    "cohere": ("Cohere", {"bos_token_id": 1, "eos_token_id": 2, "logit_scale": 0.5}),
    "glm": ("Glm", {**NO_END, **UNTIED, "head_dim": 8}),
    "glm4": ("Glm4", {**NO_END, **UNTIED, "head_dim": 8}),
    "helium": ("Helium", {**NO_END, "head_dim": 4}),
    "olmo2": ("Olmo2", {**NO_END, **UNTIED}),
    "olmo2_groups": (
        "Olmo2",
        {**NO_END, **UNTIED, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "olmo3": ("Olmo3", {**NO_END, **UNTIED, "num_hidden_layers": 4, "sliding_window": 5}),
    "olmo3_yarn": (
        "Olmo3",
        {
            **NO_END,
            **UNTIED,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 8,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "exaone4": (
        "Exaone4",
        {**NO_END, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 4},
    ),
    "exaone4_full": (
        "Exaone4",
        {**NO_END, **UNTIED, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 6}),
    "ernie4_5_bias": ("Ernie4_5", {"head_dim": 6, "use_bias": True}),
    "ministral": (
        "Ministral",
        {
            "head_dim": 6,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            **UNTIED,
            "max_position_embeddings": 128,
            "rope_parameters": {
                **YARN,
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "olmo": ("Olmo", {**NO_END, **UNTIED}),
    "arcee": ("Arcee", {**UNTIED, "bos_token_id": 1, "eos_token_id": 2}),
    "seed_oss": ("SeedOss", {**UNTIED, "head_dim": 6}),
    "vaultgemma": ("VaultGemma", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "jais2": ("Jais2", {**UNTIED, "bos_token_id": 1, "eos_token_id": 2}),
    "cwm": (
        "Cwm",
        {
            **UNTIED,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 8,
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "rope_parameters": LLAMA_31_ROPE,
        },
    ),
    "granite": (
        "Granite",
        {
            **UNTIED,
            "embedding_multiplier": 12.0,
            "logits_scaling": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {**UNTIED, "num_local_experts": 4, "residual_multiplier": 0.22, "logits_scaling": 6.0},
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**UNTIED, "num_local_experts": 3, "shared_intermediate_size": 20},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
    "nemotron": ("Nemotron", {**UNTIED, "head_dim": 8}),
    "mixtral": ("Mixtral", {**UNTIED, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**UNTIED, **MOE, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**UNTIED, **MOE, "num_experts_per_tok": 3, "head_dim": 6, "norm_topk_prob": True},
    ),
    "qwen3_moe_sparse": (
        "Qwen3Moe",
        {
            **UNTIED,
            **MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_experts_per_tok": 3,
        },
    ),
    "olmoe": ("Olmoe", {**NO_END, **UNTIED, "num_experts": 4, "num_experts_per_tok": 3}),
    "olmoe_clipped": (
        "Olmoe",
        {**NO_END, **UNTIED, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **NO_END,
            **UNTIED,
            **ROUTED,
            "head_dim": 8,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            **ROUTED,
            "q_lora_rank": None,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v2_grouped": (
        "DeepseekV2",
        {**LATENT, **GROUPED, "topk_method": "group_limited_greedy", "num_experts_per_tok": 3},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            **GROUPED,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.6, "mscale_all_dim": 1.3},
        },
    ),
    "deepseek_v3_halves": (
        "DeepseekV3",
        {
            **LATENT,
            **ROUTED,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "rope_parameters": {**YARN, "mscale_all_dim": 1.3},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**LATENT, **ROUTED, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "youtu": ("Youtu", {**LATENT, "tie_word_embeddings": True}),
    "minicpm3": (
        "MiniCPM3",
        {
            **LATENT,
            "tie_word_embeddings": True,
            "v_head_dim": None,
            "mlp_bias": True,
            "scale_emb": 3,
            "scale_depth": 0.7,
            "dim_model_base": 10,
        },
    ),
    "command_r_plus": ("Cohere", {**NO_END, "use_qk_norm": True, "logit_scale": 0.5}),
    "olmo_0424": ("Olmo", {**UNTIED, "eos_token_id": 2, "clip_qkv": 1.0}),
    "stablelm2_12b": (
        "StableLm",
        {**UNTIED, "qk_layernorm": True, "use_parallel_residual": True, "hidden_size": 64},
    ),
    "dots1": (
        "Dots1",
        {
            **NO_END,
            **UNTIED,
            **ROUTED,
            "norm_topk_prob": False,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "solar_open": (
        "SolarOpen",
        {
            **NO_END,
            **UNTIED,
            "head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
        },
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {
            **UNTIED,
            "eos_token_id": 2,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
        },
    ),
    "mellum": (
        "Mellum",
        {
            **UNTIED,
            **MOE,
            "num_experts_per_tok": 3,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 12,
            "moe_num_experts": 4,
            "moe_k": 2,
            "rope_theta": 500000.0,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **UNTIED,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "sliding_window": 4,
            "max_position_embeddings": 96,
            "rope_parameters": {**YARN, "truncate": False},
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "apertus": (
        "Apertus",
        {**UNTIED, "rope_parameters": LLAMA_31_ROPE, "num_key_value_heads": 4},
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {
            **NO_END,
            "head_dim": 6,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 100.0,
                "alpha": 50.0,
                "factor": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
            },
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {**NO_END, **UNTIED, "head_dim": 8, "num_experts": 5, "moe_topk": 2},
    ),
    "hy_v3": (
        "HYV3",
        {
            **UNTIED,
            **NO_END,
            **MOE,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
        },
    ),
    "nanochat": ("NanoChat", {**UNTIED, **NO_END, "final_logit_softcapping": 3.0}),
    "granite_swa": (
        "GraniteSWA",
        {
            **NO_END,
            "bos_token_id": 1,
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "layer_rope_theta": [100.0, 5000.0, 0, 100.0, 20.0],
            "residual_multiplier": 0.22,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {
            **UNTIED,
            "num_hidden_layers": 3,
            "num_local_experts": 3,
            "sliding_window": 5,
            "shared_intermediate_size": 20,
            "layer_rope_theta": [0, 100.0, 100.0],
        },
    ),
    "flex_olmo": (
        "FlexOlmo",
        {**UNTIED, **NO_END, "num_experts": 4, "num_experts_per_tok": 3},
    ),
    "afmoe": (
        "Afmoe",
        {
            **UNTIED,
            **NO_END,
            **MOE,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "global_attn_every_n_layers": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "mup_enabled": True,
            "route_scale": 2.0,
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            **UNTIED,
            **NO_END,
            "bos_token_id": 1,
            "head_dim": 12,
            "v_head_dim": 8,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "sliding_window": 5,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.334,
                },
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 50.0,
                    "partial_rotary_factor": 0.334,
                },
            },
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            **UNTIED,
            "num_local_experts": 5,
            "router_jitter_noise": 0.4,
            "lm_head_bias": True,
            "attention_bias": True,
            "sliding_window": 5,
        },
    ),
    "cohere2_moe": (
        "Cohere2Moe",
        {
            **NO_END,
            "bos_token_id": 1,
            "head_dim": 4,
            "num_hidden_layers": 6,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 20,
            "num_experts": 5,
            "num_shared_experts": 2,
            "sliding_window": 5,
            "logit_scale": 0.5,
        },
    ),
    "cohere2_moe_sigmoid": (
        "Cohere2Moe",
        {
            **NO_END,
            "bos_token_id": 1,
            "head_dim": 4,
            "num_experts": 5,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": False,
        },
    ),
    "llama4_text": (
        "Llama4Text",
        {
            **UNTIED,
            **NO_END,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 20,
            "no_rope_layer_interval": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 96,
            "floor_scale": 96,
            "max_position_embeddings": 128,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            **UNTIED,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 8,
            "rotary_dim": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A transformers class, the name of its config class, and the config's values."""

    model: str
    config: str
    values: dict[str, Any]

    def make(self) -> PreTrainedModel:
        """The model in evaluation mode; every weight random, norms and biases too.

        Tokens that no text may have are never the likeliest one.
        """
        torch.manual_seed(5)
        config = getattr(transformers, self.config)(**self.values)
        model = getattr(transformers, self.model)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0.05, 0.3)
            for name, values in model.state_dict().items():
                if name.endswith("e_score_correction_bias"):
                    values.normal_()
            for (token,) in self.values.get("bad_words_ids", ()):
                model.final_logits_bias[:, token] = NEVER
        return model

    def save(self, folder: Path, **options: Any) -> PreTrainedModel:
        """The same model after a round trip through `folder`, as its users would load it."""
        self.make().save_pretrained(folder, **options)
        return getattr(transformers, self.model).from_pretrained(folder).eval()


def _llama(family: str, values: dict[str, Any]) -> TinyModel:
    model = family.removesuffix("Text")
    return TinyModel(f"{model}ForCausalLM", f"{family}Config", {**LLAMA, **values})


def _t5(**values: Any) -> TinyModel:
    return TinyModel("T5ForConditionalGeneration", "T5Config", {**T5, **values})


DECODERS: dict[str, TinyModel] = {
    "gpt2": TinyModel("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2_wide_mlp": TinyModel("GPT2LMHeadModel", "GPT2Config", {**GPT2, "n_inner": 40}),
    "opt": TinyModel("OPTForCausalLM", "OPTConfig", {**OPT, "word_embed_proj_dim": 16}),
    "opt_350m": TinyModel(
        "OPTForCausalLM",
        "OPTConfig",
        {**OPT, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
    ),
    "bloom": TinyModel(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 67, "hidden_size": 24, "n_layer": 2, "n_head": 6},
    ),
    "xglm": TinyModel("XGLMForCausalLM", "XGLMConfig", XGLM),
    "llama": TinyModel("LlamaForCausalLM", "LlamaConfig", {**LLAMA, **UNTIED}),
    "llama_tied_biased": TinyModel(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "head_dim": 6},
    ),
    "llama_31": TinyModel(
        "LlamaForCausalLM", "LlamaConfig", {**LLAMA, **UNTIED, "rope_parameters": LLAMA_31_ROPE}
    ),
    "mistral": TinyModel("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": None}),
    "qwen2": TinyModel("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, **UNTIED}),
    "qwen3": TinyModel("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, **UNTIED, "head_dim": 6}),
}

# Decoders beyond what the plain forward passes of these tests know.
LATER_DECODERS: dict[str, TinyModel] = {
    **{name: _llama(*said) for name, said in LLAMAS.items()},
    "internlm3": TinyModel(
        "LlamaForCausalLM", "InternLM3Config", {**LLAMA, **UNTIED, "head_dim": 6}
    ),
    "internlm3_bias": TinyModel(
        "LlamaForCausalLM",
        "InternLM3Config",
        {**LLAMA, **UNTIED, "head_dim": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "iquestcoder": TinyModel(
        "LlamaForCausalLM", "IQuestCoderConfig", {**LLAMA, **UNTIED, "head_dim": 4}
    ),
    "gpt_neox": TinyModel("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX),
    "gpt_neox_in_turn": TinyModel(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**NEOX, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "gpt_bigcode": TinyModel(
        "GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**GPT2, "n_positions": 96}
    ),
    "gpt_neo": TinyModel(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 67,
            "hidden_size": 16,
            "num_layers": 4,
            "num_heads": 4,
            "max_position_embeddings": 96,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 5,
        },
    ),
    "gptj": TinyModel(
        "GPTJForCausalLM", "GPTJConfig", {**GPT2, "n_positions": 96, "n_embd": 32, "rotary_dim": 4}
    ),
    "codegen": TinyModel(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {**GPT2, "n_positions": 96, "n_embd": 32, "n_head": 8, "rotary_dim": 4, **UNTIED},
    ),
    "mpt": TinyModel(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 67, "d_model": 24, "n_layers": 2, "n_heads": 6, "max_seq_len": 96},
    ),
    "dbrx": TinyModel(
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "vocab_size": 67,
            "d_model": 16,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 96,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 500.0},
            "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 5, "moe_top_k": 3},
        },
    ),
    "falcon_7b": TinyModel("FalconForCausalLM", "FalconConfig", FALCON),
    "falcon_40b": TinyModel(
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon_11b": TinyModel(
        "FalconForCausalLM",
        "FalconConfig",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
        },
    ),
    "falcon_rw": TinyModel(
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
}

# Output tables of their own, where the family usually has none.
UNTIED_DECODERS: dict[str, TinyModel] = {
    "gpt2_untied": TinyModel("GPT2LMHeadModel", "GPT2Config", {**GPT2, **UNTIED}),
    "opt_untied": TinyModel("OPTForCausalLM", "OPTConfig", {**OPT, **UNTIED}),
    "opt_350m_untied": TinyModel(
        "OPTForCausalLM", "OPTConfig", {**OPT, "word_embed_proj_dim": 8, **UNTIED}
    ),
    "xglm_untied": TinyModel("XGLMForCausalLM", "XGLMConfig", {**XGLM, **UNTIED}),
}

ENCODER_DECODERS: dict[str, TinyModel] = {
    "t5_v1_0": _t5(feed_forward_proj="relu"),
    "t5_v1_1": _t5(feed_forward_proj="gated-gelu", **UNTIED),
    "ul2": _t5(feed_forward_proj="gated-silu", **UNTIED),
    "mt5": TinyModel(
        "MT5ForConditionalGeneration", "MT5Config", {**T5, "feed_forward_proj": "gated-gelu"}
    ),
    "umt5": TinyModel(
        "UMT5ForConditionalGeneration", "UMT5Config", {**T5, "feed_forward_proj": "gated-gelu"}
    ),
    "bart": TinyModel("BartForConditionalGeneration", "BartConfig", BART),
    "mbart": TinyModel(
        "MBartForConditionalGeneration", "MBartConfig", {**BART, "scale_embedding": True}
    ),
    "m2m_100": TinyModel("M2M100ForConditionalGeneration", "M2M100Config", BART),
    "pegasus": TinyModel(
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        {**BART, "activation_function": "relu", "scale_embedding": True},
    ),
    "marian": TinyModel(
        "MarianMTModel",
        "MarianConfig",
        {
            **BART,
            "activation_function": "swish",
            "scale_embedding": True,
            "decoder_start_token_id": 66,
            "pad_token_id": 66,
            "bad_words_ids": [[66]],
        },
    ),
}
T5GEMMA = TinyModel(
    "T5GemmaForConditionalGeneration",
    "T5GemmaConfig",
    {
        "encoder": {**T5GEMMA_STACK, "num_hidden_layers": 3},
        "decoder": {**T5GEMMA_STACK, "num_hidden_layers": 4},
        "vocab_size": 67,
    },
)

# Gemma 3's layers: one position in eight is that of a full layer's.
T5GEMMA2_STACK = {
    **{key: value for key, value in T5GEMMA_STACK.items() if key != "attn_logit_softcapping"},
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
T5GEMMA2 = TinyModel(
    "T5Gemma2ForConditionalGeneration",
    "T5Gemma2Config",
    {
        "encoder": {
            "text_config": T5GEMMA2_STACK,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
            "mm_tokens_per_image": 4,
        },
        "decoder": T5GEMMA2_STACK,
    },
)

Export = Callable[..., Path]
