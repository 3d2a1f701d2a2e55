"""Models of transformers as Megatron-LM core stores them: tensors and options by the core's names.

By the table of Megatron Bridge, written for tests alone.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from transformers import PreTrainedModel

State = dict[str, Tensor]
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
TOP = {
    "embeddings.weight": "embedding.word_embeddings.weight",
    "embed_tokens.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm_f.weight": "decoder.final_norm.weight",
    "lm_head.weight": "output_layer.weight",
}
NORMS = {
    "M": "mixer.in_proj.layer_norm_weight",
    "*": "self_attention.linear_qkv.layer_norm_weight",
    "-": "mlp.linear_fc1.layer_norm_weight",
    "E": "pre_mlp_layernorm.weight",
    "G": "self_attention.in_proj.layer_norm_weight",
    "L": "self_attention.layer_norm_weight",
    "l": "mlp.layer_norm_weight",
}


def grouped(state: State, heads: int, groups: int, gated: bool = False) -> Tensor:
    """Rows of queries (each with its gate behind it), keys and values, group by group."""
    query, key, value = (state.pop(f"{part}_proj.weight") for part in "qkv")
    columns = query.shape[1]
    size = key.shape[0] // groups
    query = query.reshape(groups, heads // groups, 2 if gated else 1, size, columns)
    parts = query.transpose(1, 2).reshape(groups, -1, size, columns)
    pairs = [part.reshape(groups, 1, size, columns) for part in (key, value)]
    return torch.cat([parts, *pairs], 1).reshape(-1, columns)


def cut(name: str, tensor: Tensor, sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The parts of a tensor as torch_dist has them."""
    parts = tensor.split(list(sizes.values()))
    for part, values in zip(sizes, parts, strict=True):
        yield f"{name}.{part}", values.contiguous()


def by_layer(model: PreTrainedModel) -> tuple[State, list[State]]:
    top: State = {}
    layers: list[State] = [{} for _ in range(model.config.num_hidden_layers)]
    for name, tensor in model.state_dict().items():
        match = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.+)", name)
        if match:
            layers[int(match[1])][match[2]] = tensor
        else:
            top[TOP[re.sub(r"^(model|backbone)\.", "", name)]] = tensor
    return top, layers


def mamba(config: Any, layer: State) -> State:
    state = {name.removeprefix("mixer."): tensor for name, tensor in layer.items()}
    inner = config.mamba_num_heads * config.mamba_head_dim
    group = config.n_groups * config.ssm_state_size
    conv = {"x": inner, "B": group, "C": group}
    result = {
        f"mixer.{name}": state[name]
        for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
    }
    sizes = {"z": inner, **conv, "dt": config.mamba_num_heads}
    result |= dict(cut("mixer.in_proj.weight", state["in_proj.weight"], sizes))
    for part in ("weight", "bias"):
        result |= dict(cut(f"mixer.conv1d.{part}", state[f"conv1d.{part}"], conv))
    return result


def experts(state: State, gated: bool) -> State:
    """The MLP of a layer, with experts or without.  state: without the name before them"""
    result: State = {}
    for name, tensor in state.items():
        core = name.replace("gate.e_score_correction_bias", "router.expert_bias")
        core = re.sub(r"^gate\.weight", "router.weight", core)
        core = core.replace("shared_expert_gate.weight", "shared_experts.gate_weight")
        core = re.sub(r"shared_experts?\.", "shared_experts.", core)
        core = re.sub(r"^experts\.up_proj$", "experts.experts.linear_fc1.weight", core)
        core = re.sub(r"^experts\.gate_up_proj$", "experts.experts.linear_fc1.weight", core)
        core = re.sub(r"^experts\.down_proj$", "experts.experts.linear_fc2.weight", core)
        core = core.replace("down_proj.", "linear_fc2.").replace("up_proj.", "linear_fc1.")
        result[f"mlp.{core}"] = tensor
    for name in [name for name in result if "gate_proj" in name] if gated else []:
        fused = name.replace("gate_proj", "linear_fc1")
        result[fused] = torch.cat([result.pop(name), result[fused]])
    return result


def nemotron_h(model: PreTrainedModel) -> State:
    """A Nemotron-H as a HybridModel."""
    config = model.config
    result, layers = by_layer(model)
    for index, (kind, layer) in enumerate(zip(config.layers_block_type, layers, strict=True)):
        letter, norm = LETTERS[kind], layer.pop("norm.weight")
        state = {name.removeprefix("mixer."): tensor for name, tensor in layer.items()}
        if letter == "M":
            parts = mamba(config, layer)
        elif letter == "*":
            heads, groups = config.num_attention_heads, config.num_key_value_heads
            out = state.pop("o_proj.weight")
            parts = {
                "self_attention.linear_qkv.weight": grouped(state, heads, groups),
                "self_attention.linear_proj.weight": out,
            }
        else:
            parts = experts(state, gated=False)
        parts[NORMS[letter]] = norm
        result |= {f"decoder.layers.{index}.{name}": tensor for name, tensor in parts.items()}
    return result


def nemotron_h_options(config: Any) -> dict[str, Any]:
    return {
        "_target_": "megatron.bridge.models.hybrid.hybrid_provider.HybridModelProvider",
        "hybrid_layer_pattern": "".join(LETTERS[kind] for kind in config.layers_block_type),
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "mamba_num_heads": config.mamba_num_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_state_dim": config.ssm_state_size,
        "mamba_num_groups": config.n_groups,
        "activation_func": {"_target_": "megatron.core.activations.squared_relu"},
        "layernorm_epsilon": config.layer_norm_epsilon,
        "seq_length": config.max_position_embeddings,
        "num_moe_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": config.moe_latent_size,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
    }


def qwen3_next(model: PreTrainedModel) -> State:
    """A Qwen3-Next as a GPTModel with gated delta nets; norms are stored as they are there."""
    config = model.config
    result, layers = by_layer(model)
    key = config.linear_num_key_heads * config.linear_key_head_dim
    heads = config.linear_num_value_heads
    value = heads * config.linear_value_head_dim
    conv = {"query": key, "key": key, "value": value}
    for index, layer in enumerate(layers):
        state = {name.partition(".")[2]: tensor for name, tensor in layer.items() if "attn" in name}
        mlp = {name[4:]: tensor for name, tensor in layer.items() if name.startswith("mlp.")}
        parts = experts(mlp, gated=True)
        norm = "E" if "mlp.router.weight" in parts else "-"
        parts[NORMS[norm]] = layer["post_attention_layernorm.weight"]
        if config.layer_types[index] == "linear_attention":
            sizes = {**conv, "z": value, "beta": heads, "alpha": heads}
            flat = torch.cat(flat_delta(config, state))
            parts |= dict(cut("self_attention.in_proj.weight", flat, sizes))
            parts |= dict(cut("self_attention.conv1d.weight", state["conv1d.weight"], conv))
            parts |= {
                f"self_attention.{name}": state[name]
                for name in ("A_log", "dt_bias", "out_proj.weight")
            }
            parts["self_attention.out_norm.weight"] = state["norm.weight"] - 1
            parts[NORMS["G"]] = layer["input_layernorm.weight"]
        else:
            parts |= {
                f"self_attention.{part}_layernorm.weight": state[f"{part}_norm.weight"]
                for part in "qk"
            }
            groups = config.num_key_value_heads
            out = state.pop("o_proj.weight")
            fused = grouped(state, config.num_attention_heads, groups, gated=True)
            parts |= {
                "self_attention.linear_qkv.weight": fused,
                "self_attention.linear_proj.weight": out,
                NORMS["*"]: layer["input_layernorm.weight"],
            }
        result |= {f"decoder.layers.{index}.{name}": tensor for name, tensor in parts.items()}
    return result


def flat_delta(config: Any, state: State) -> list[Tensor]:
    """Queries, keys, values, z, b and a of all heads."""
    keys, hidden = config.linear_num_key_heads, config.hidden_size
    mixed = state["in_proj_qkvz.weight"].reshape(keys, -1, hidden)
    steps = state["in_proj_ba.weight"].reshape(keys, -1, hidden)
    size = config.linear_key_head_dim
    values = (mixed.shape[1] - 2 * size) // 2
    parts = (*mixed.split([size, size, values, values], 1), *steps.chunk(2, 1))
    return [part.reshape(-1, hidden) for part in parts]


def qwen3_next_options(config: Any) -> dict[str, Any]:
    return {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "transformer_layer_spec": {
            "_target_": "megatron.core.models.gpt.experimental_attention_variant_module_specs."
            "get_transformer_block_with_experimental_attention_variant_spec",
            "_call_": False,
        },
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "seq_length": config.max_position_embeddings,
        "activation_func": {"_target_": "torch.nn.functional.silu"},
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        "rotary_base": config.rope_parameters["rope_theta"],
        "rotary_percent": config.rope_parameters["partial_rotary_factor"],
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int("linear" in kind) for kind in config.layer_types],
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
        "moe_layer_freq": [
            int(layer not in config.mlp_only_layers) for layer in range(config.num_hidden_layers)
        ],
    }


def nemotron_nas(model: PreTrainedModel, raw: dict[str, Any]) -> State:
    """A Llama-Nemotron; every layer's norms lie with what they come before."""
    result, layers = by_layer(model)
    for index, layer in enumerate(layers):
        block = raw["block_configs"][index]
        state = {name.partition(".")[2]: tensor for name, tensor in layer.items() if "attn" in name}
        mlp = {name[4:]: tensor for name, tensor in layer.items() if name.startswith("mlp.")}
        parts: State = {}
        if "linear_attn.weight" in state:
            parts["self_attention.weight"] = state["linear_attn.weight"]
            parts[NORMS["L"]] = layer["input_layernorm.weight"]
        elif state:
            heads = raw["num_attention_heads"]
            out = state.pop("o_proj.weight")
            groups = heads // block["attention"]["n_heads_in_group"]
            parts["self_attention.linear_qkv.weight"] = grouped(state, heads, groups)
            parts["self_attention.linear_proj.weight"] = out
            parts[NORMS["*"]] = layer["input_layernorm.weight"]
        if "linear_mlp.weight" in mlp:
            parts["mlp.weight"] = mlp["linear_mlp.weight"]
            parts[NORMS["l"]] = layer["post_attention_layernorm.weight"]
        elif mlp:
            parts |= experts(mlp, gated=True)
            parts[NORMS["-"]] = layer["post_attention_layernorm.weight"]
        result |= {f"decoder.layers.{index}.{name}": tensor for name, tensor in parts.items()}
    return result


def nemotron_nas_options(raw: dict[str, Any]) -> dict[str, Any]:
    """As the arguments of Megatron-LM."""
    return {
        "heterogeneous_layers_config_encoded_json": json.dumps(raw),
        "heterogeneous_layers_config_path": "/somewhere/config.json",
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "num_attention_heads": raw["num_attention_heads"],
        "num_query_groups": 1,
        "group_query_attention": True,
        "ffn_hidden_size": 4,
        "max_position_embeddings": raw["max_position_embeddings"],
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": raw["rms_norm_eps"],
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "rotary_base": raw["rope_parameters"]["rope_theta"],
    }


def write(
    folder: Path, tensors: State, config: dict[str, Any] | None = None, **common: Any
) -> Path:
    """A distributed checkpoint as torch_dist.

    config: section `model` of Bridge's run_config.yaml
    common: the common state, as core 0.20 stores it among the tensors
    """
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    if config is not None:
        (folder / "run_config.yaml").write_text(yaml.safe_dump({"model": config}))
    state: dict[str, Any] = dict(tensors)
    if common:
        state["common_state/shard_0_1"] = [common]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    return folder


LATENT = {
    "q_proj.weight": "linear_q_proj.weight",
    "q_a_proj.weight": "linear_q_down_proj.weight",
    "q_a_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
    "q_b_proj.weight": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa.weight": "linear_kv_down_proj.weight",
    "kv_a_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
    "kv_b_proj.weight": "linear_kv_up_proj.weight",
    "o_proj.weight": "linear_proj.weight",
}


def deepseek(model: PreTrainedModel) -> State:
    """A DeepSeek-V3 of Transformer Engine's layers: norms lie inside of what they come before."""
    result, layers = by_layer(model)
    for index, layer in enumerate(layers):
        mlp = {name[4:]: tensor for name, tensor in layer.items() if name.startswith("mlp.")}
        parts = experts(mlp, gated=True)
        norm = "E" if "mlp.router.weight" in parts else "-"
        parts[NORMS[norm]] = layer["post_attention_layernorm.weight"]
        parts["input_layernorm.weight"] = layer["input_layernorm.weight"]
        parts |= {
            f"self_attention.{core}": layer[f"self_attn.{name}"]
            for name, core in LATENT.items()
            if f"self_attn.{name}" in layer
        }
        result |= {f"decoder.layers.{index}.{name}": tensor for name, tensor in parts.items()}
    return result


def deepseek_options(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "_target_": "megatron.bridge.models.mla_provider.MLAModelProvider",
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.intermediate_size,
        "seq_length": config.max_position_embeddings,
        "activation_func": {"_target_": "torch.nn.functional.silu"},
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        "multi_latent_attention": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope["beta_fast"],
        "beta_slow": rope["beta_slow"],
        "mscale": rope["mscale"],
        "mscale_all_dim": rope["mscale_all_dim"],
        "num_moe_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size
        * config.n_shared_experts,
        "moe_layer_freq": [0] + [1] * (config.num_hidden_layers - 1),
    }
