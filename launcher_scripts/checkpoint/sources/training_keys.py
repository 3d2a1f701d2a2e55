"""Which settings of a training of Megatron-LM core or NeMo may go unread.

A training says hundreds of things, and every release adds some that change nothing about its model:
unlike a config.json, not every unknown key can be refused. What is looked at are keys whose names
speak of the network: REFUSED ones change it wherever they have a value, others are noted.
"""

from __future__ import annotations

import re
from typing import Any

from launcher_scripts.checkpoint.sources.core_experts import NO_EXPERTS
from launcher_scripts.checkpoint.sources.huggingface_keys import irrelevant
from launcher_scripts.common.errors import Problems

REFUSED = re.compile(
    "soft_?cap|multiplier|window|sliding|sink|pre_attn|hyper_connection|_scalar$|layer_pattern"
)
NETWORK = re.compile(
    "rope|rotary|position|scal|norm|embed|attention|attn|residual|activation|glu|gelu|relu|bias"
    "|expert|moe|latent|lora|mamba|hybrid|conv|linear|temperature|logit|head|layer_spec"
)
# Why keys with such names do not matter -> their names, as patterns.
IRRELEVANT: dict[str, tuple[str, ...]] = {
    "training": (
        "*_dropout",
        "*init_method*",
        "*loss_scale*",
        "activation_offload_fraction",
        "activations_checkpoint_*",
        "apply_wd_to_qk_layernorm",
        "cpu_offloading_activations",
        "head_lr_mult",
        "log_*",
        "logits_load_*",
        "logits_save_*",
        "moe_*_coeff",
        "moe_*_logging",
        "moe_*upcycling*",
        "moe_input_jitter_eps",
        "moe_router_bias_update_rate",
        "mtp_loss_scaling_factor",
        "muon_*",
        "native_amp_*",
        "qk_clip*",
        "rl_*",
    ),
    "kernels and parallelism": (
        "*_fusion",
        "*_parallel_num_weight_shards",
        "*_parallel_size",
        "apply_query_key_layer_scaling",
        "attention_backend",
        "attention_softmax_in_fp32",
        "clone_scatter_output_in_embedding",
        "expert_gtp_weight_remat_size",
        "fp4_*",
        "fp8_*",
        "kitchen_attention_backend",
        "moe_*deepep*",
        "moe_*dispatcher*",
        "moe_*grouped*",
        "moe_*hybridep*",
        "moe_*ncclep*",
        "moe_*padding*",
        "moe_extended_tp",
        "moe_layer_recompute",
        "moe_pad_*",
        "moe_paged_*",
        "moe_router_dtype",
        "moe_router_num_groups",
        "moe_shared_expert_overlap",
        "moe_token_drop*",
        "no_persist_layer_norm",
        "persist_layer_norm",
        "scatter_embedding_sequence_parallel",
        "use_flash_attention",
    ),
    "data and inference": (
        "create_attention_mask_in_dataloader",
        "inference_*",
        "reset_attention_mask",
        "reset_position_ids",
    ),
    "other models, whose own switches are looked at": (
        "bert_*",
        "dino_*",
        "dsa_*",
        "kv_lora_rank",
        "linear_*",
        "mamba_*",
        "mscale*",
        "mup_*",
        "q_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "retro_*",
        "use_mamba_mem_eff_path",
        "v_head_dim",
    ),
    "said by others, or by the tensors": (
        "add_position_embedding",
        "add_qkv_bias",
        "group_query_attention",
        "max_position_embeddings",
        "position_embedding_type",
        "relative_attention_*",
        "rope_scaling_factor",
        "rotary_base",
        "rotary_percent",
        "rotary_scaling_factor",
        "swiglu",
        "transformer_layer_spec",
        "untie_embeddings_and_output_weights",
        "use_rope_scaling",
    ),
}


class TrackedMapping(dict[str, Any]):
    """A mapping that remembers which keys were asked for."""

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


def check_keys(said: TrackedMapping, problems: Problems) -> tuple[str, ...]:
    """Note as problems what changes the model and nothing read; returns notes on what may.

    A value of no, zero or nothing is a switch that is off.
    """
    dense = not any(said.get(key) for key in NO_EXPERTS)
    unread = {
        key: value
        for key, value in said.items()
        if key not in said.asked and value and not irrelevant(key, IRRELEVANT)
        if not (dense and key.startswith("moe_"))
    }
    for key, value in unread.items():
        if REFUSED.search(key):
            problems.add(f"{key} is not known here", got=value)
    doubtful = [
        f"{key}={value!r}"[:80]
        for key, value in unread.items()
        if NETWORK.search(key) and not REFUSED.search(key)
    ]
    if not doubtful:
        return ()
    return (f"{problems.subject}: nothing reads {', '.join(doubtful)}",)
