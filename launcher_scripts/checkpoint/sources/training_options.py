"""Options of a training of Megatron-LM core or NeMo, and which of them may be ignored.

A training says hundreds of things, and every release adds some that change nothing about its model:
unlike a config.json, not every unknown key can be refused. What is looked at are keys whose names
speak of the network: REFUSED ones change it wherever they have a value, others are noted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher_scripts.checkpoint.formats import pickles
from launcher_scripts.checkpoint.sources.huggingface_raw import irrelevant
from launcher_scripts.common.errors import CheckpointError, Problems

# Megatron-LM's argument is called num_experts.
NO_EXPERTS: dict[str, tuple[Any, ...]] = {"num_moe_experts": (None, 0), "num_experts": (None, 0)}
REJECTED = re.compile(
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
        "cache_mla_latents",
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
        "mhc_*",
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


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training; wrong and missing values are noted, to be reported at once.

    raw:       the options by name; absent, null, zero and empty ones have their defaults
    problems:  what is wrong with them so far
    notes:     what a user should know about the model
    read_keys: names of the options that were read; check_keys looks at the others
    """

    raw: Mapping[str, Any]
    problems: Problems
    notes: tuple[str, ...] = ()
    read_keys: set[str] = field(default_factory=set)

    def get(self, key: str) -> Any:
        """The value as stored, None if it is missing. One that is an object is noted."""
        first = key not in self.read_keys
        self.read_keys.add(key)
        value = self.raw.get(key)
        kind = pickles.unreadable(value)
        if kind is None:
            return value
        if first:
            self.problems.add(f"{key} depends on {kind}, which is not read here", got=value)
        return None

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; `default`, if any, where there is none."""
        value = self.get(key) or default
        if type(value) is int and value > 0:
            return value
        self.problems.add(f"{key} must be a positive number", got=self.raw.get(key))
        return 1

    def real(self, key: str, default: float) -> float:
        """A positive number, which YAML may have read as a text (1e-5)."""
        value = self.get(key) or default
        try:
            result = float(value)
        except (TypeError, ValueError):
            result = -1.0
        if result > 0:
            return result
        self.problems.add(f"{key} must be a positive number", got=value)
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return default if value is None else bool(value)

    def choice(self, key: str, default: str, table: Mapping[str, Any]) -> Any:
        """Return the table's entry for the value, ignoring case."""
        value = str(self.get(key) or default).lower()
        if value not in table:
            self.problems.add(f"{key} is not supported", got=value, choices=sorted(table))
            return table[default]
        return table[value]

    def section(self, key: str) -> TrainingOptions:
        """The options of a section, with the same problems; these options where there is none."""
        value = self.get(key)
        return TrainingOptions(value, self.problems) if isinstance(value, Mapping) else self

    def reject_others(
        self, supported_values: Mapping[str, tuple[Any, ...]], whose: str = ""
    ) -> None:
        """Note options whose values change the network in ways this project does not know.

        supported_values: supported values by key (None: absent or null);  whose: for the text
        """
        for key, values in supported_values.items():
            value = self.get(key)
            if value not in values:
                self.problems.add(f"{key}{whose} is not supported", got=value, choices=values)

    def check_keys(self) -> tuple[str, ...]:
        """The notes, and one on options that may change the model and that nothing has read.

        A value of no, zero or nothing is a switch that is off. Raises CheckpointError for options
        that do change the model.
        """
        dense = not any(self.get(key) for key in NO_EXPERTS)
        unread = {
            key: value
            for key, value in self.raw.items()
            if key not in self.read_keys and not irrelevant(key, IRRELEVANT)
            if pickles.unreadable(value) is not None or value
            if not (dense and key.startswith("moe_"))
        }
        for key, value in unread.items():
            if REJECTED.search(key):
                self.problems.add(f"{key} is not known here", got=value)
        self.problems.raise_if_any(CheckpointError)
        doubtful = [f"{key}={value!r}"[:80] for key, value in unread.items() if NETWORK.search(key)]
        if not doubtful:
            return self.notes
        return (*self.notes, f"{self.problems.subject}: nothing reads {', '.join(doubtful)}")
