"""Make some of the folders of tests/data/core (MODELS below names them): tiny
random models that Megatron-LM core saved and computed the logits of, on the CPU.

    python3 tests/data/make_core_models.py mixtral      # with megatron-core 0.14.0 and torch 2.13
    python3 tests/data/make_core_models.py qwen2moe     # 0.16.1
    python3 tests/data/make_core_models.py window       # 0.16.1
    python3 tests/data/make_core_models.py shared       # 0.16.1
    python3 tests/data/make_core_models.py dense        # 0.16.1
    python3 tests/data/make_core_models.py gpt_oss      # 0.16.1

Put in by hand: what Megatron-LM, Megatron Bridge and NeMo 2 say of a model around the core's own
tensors; the name of the norm before experts that Transformer Engine's layer specification has
(qwen2moe, dense); the device of what the core asks of CUDA (the window's mask).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import utils as core_utils
from megatron.core.transformer.moe import moe_utils

FOLDER = Path(__file__).with_name("core")
VOCAB, LENGTH = 64, 24
SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "ffn_hidden_size": 24,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
}
# What the CPU needs, without a part in what is computed.
UNFUSED = {
    "use_cpu_initialization": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}
QWEN = {
    "add_qkv_bias": True,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "moe_shared_expert_gate": True,
    "moe_router_pre_softmax": True,
    "moe_layer_freq": [1, 1],
}
SHARED = {"moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 20}
DENSE = {
    "num_layers": 3,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "moe_layer_freq": [0, 1, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "qk_layernorm": True,
}
GPT_OSS = {
    "num_layers": 3,
    "add_bias_linear": True,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "moe_ffn_hidden_size": 12,
    "moe_layer_freq": [1, 1, 1],
    "softmax_type": "learnable",
    "window_size": [4, 0],
    "window_attn_skip_freq": 2,
}
# Megatron Bridge's fields, which the core asks its configuration for.
YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 2.0,
    "yarn_beta_slow": 0.5,
    "yarn_mscale": None,
    "yarn_mscale_all_dim": None,
    "yarn_correction_range_round_to_int": False,
}
WINDOW = {"num_layers": 4, "window_size": [4, 0], "window_attn_skip_freq": 2, "softmax_scale": 0.3}


def as_megatron(folder: Path, model: GPTModel, config: TransformerConfig) -> None:
    """The arguments of Megatron-LM's command line in the common state."""
    own = dataclasses.asdict(config)
    kept = [*SIZES, *UNFUSED, *(name for name in own if name.startswith("moe_"))]
    args = {
        name: own[name] for name in kept if name not in ("activation_func", "gated_linear_unit")
    }
    args |= {
        "num_experts": config.num_moe_experts,
        "norm_epsilon": args.pop("layernorm_epsilon"),
        "swiglu": True,
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "max_position_embeddings": 32,
        "seq_length": 32,
    }
    common = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 2}
    save(folder / "checkpoint" / "iter_0000002", model, common)
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("2")


def as_bridge(folder: Path, model: GPTModel, config: TransformerConfig) -> None:
    """run_config.yaml beside the tensors."""
    place = folder / "checkpoint" / "iter_0000000"
    save(place, model, {"checkpoint_version": 3.0, "iteration": 0})
    said = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", **plain(config)}
    if hasattr(config, "yarn_rotary_scaling_factor"):
        said |= {**YARN, "position_embedding_type": "yarn"}
    (place / "run_config.yaml").write_text(yaml.safe_dump({"model": said}))
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("0")


def as_nemo(folder: Path, model: GPTModel, config: TransformerConfig) -> None:
    """context/model.yaml beside the folder of the tensors, whose names start with `module.`."""
    place = folder / "checkpoint" / "model"
    save(place / "weights", model, {"epoch": 0, "global_step": 2}, "module.")
    said = {"_target_": "nemo.collections.llm.gpt.model.base.GPTConfig", **plain(config)}
    (place / "context").mkdir()
    (place / "context" / "model.yaml").write_text(yaml.safe_dump({"config": said}))


def plain(config: TransformerConfig) -> dict[str, Any]:
    """The fields of the configuration and of the model, functions as the tools write them."""
    said = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if isinstance(value, (str, int, float, list, type(None)))
    }
    return said | {
        "activation_func": {"_call_": False, "_target_": FUNCTIONS[config.activation_func]},
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "seq_length": 32,
    }


def save(place: Path, model: GPTModel, common: dict[str, Any], prefix: str = "") -> None:
    place.mkdir(parents=True)
    dist_checkpointing.save({**model.sharded_state_dict(prefix), **common}, str(place))


FUNCTIONS = {
    F.silu: "torch.nn.functional.silu",
    quick_gelu: "megatron.core.fusions.fused_bias_geglu.quick_gelu",
}
Save = Callable[[Path, GPTModel, TransformerConfig], None]
MODELS: dict[str, tuple[str, dict[str, Any], Save]] = {
    "mixtral": ("mcore014_mixtral_a", EXPERTS, as_megatron),
    "qwen2moe": ("bridge_qwen2moe_a", EXPERTS | QWEN, as_bridge),
    "shared": ("mcore016_shared_a", EXPERTS | SHARED, as_megatron),
    "dense": ("bridge_dense_a", EXPERTS | DENSE, as_bridge),
    "gpt_oss": ("bridge_gpt_oss_a", EXPERTS | GPT_OSS, as_bridge),
    "window": ("nemo2_window_a", WINDOW, as_nemo),
}


def without_cuda() -> None:
    """Stand-ins for what the core asks of CUDA and of Transformer Engine."""
    ones = torch.ones
    core_utils.torch.ones = lambda *sizes, **more: ones(*sizes, **{**more, "device": "cpu"})
    torch.cuda.synchronize = lambda: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # a name that exists with Transformer Engine alone


def layers_of(config: TransformerConfig, kind: str) -> Any:
    """What the layers are made of, with the names of norms before experts that `kind` has."""
    if kind == "dense":
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
        layers = spec.layer_specs[1:]
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm"
        )
        layers = [spec] if kind in ("qwen2moe", "gpt_oss") else []
    for layer in layers:
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return spec


def main(kind: str) -> None:
    name, said, write = MODELS[kind]
    without_cuda()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29641", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(15)
    config = TransformerConfig(**SIZES | UNFUSED | said)
    positions = "rope"
    if kind == "gpt_oss":
        positions = "yarn"
        vars(config).update(YARN)
    spec = layers_of(config, kind)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=32,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=False,
    ).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    for key, values in model.named_buffers():
        if key.endswith("expert_bias"):
            values.normal_()
    os.chdir(FOLDER)  # the core stores where it saved
    write(Path(name), model, config)
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    with torch.no_grad():
        logits = model(tokens, torch.arange(LENGTH).expand(2, -1), None)
    np.savez_compressed(Path(name) / "reference.npz", tokens=tokens, logits=logits.float())


if __name__ == "__main__":
    main(sys.argv[1])
