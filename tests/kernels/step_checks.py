"""Whole steps of today's decoders, kernel after kernel, equal the reference.

Run as kernel_checks.py is.
"""

from __future__ import annotations

import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.sampler import SamplingBatch
from launcher_scripts.engine.messages.plan import Bounds, PrefillPart, RowStart
from launcher_scripts.engine.model.network import Network
from launcher_scripts.engine.runner.prompt_batch import Nowhere, PackedPrompts, unpacked
from launcher_scripts.models.adapters import LORA_TARGETS, Adapters, adapters_of
from tests.engine.small_models import random_tensors, runner_for, small_config
from tests.kernels.kernel_checks import (
    assert_close,
    fused,
    pytestmark,  # noqa: F401 - pytest reads it
)

# A prompt of few tokens, for the kernels of few rows, and prompts of many in all.
LENGTHS = {1: (22,), 3: (70, 1, 9)}
LONGEST = 70
EXTENT = 80
RMS = {
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "attention_bias": False,
    "mlp_bias": False,
    "gated": True,
    "num_kv_heads": 2,
    "head_size": 12,
}


def lora(*targets: str) -> Adapters:
    return Adapters(lora_names=("sql", "law"), lora_rank=3, lora_targets=targets)


MODELS = {
    "gemma2": {
        **RMS,
        "norm_placement": "sandwich",
        "zero_centered_norm": True,
        "activation": "relu",
        "embedding_scale": 5.5,
        "softmax_scale": 0.2,
        "attention_softcap": 2.0,
        "logits_softcap": 3.0,
        "sliding_window": 20,
        "full_attention_layers": "1",
    },
    "gemma3": {
        **RMS,
        "norm_placement": "sandwich",
        "qk_norm": True,
        "sliding_window": 20,
        "full_attention_layers": "1",
        "rotary_local_base": 50.0,
    },
    "qwen3": {**RMS, "qk_norm": True},
    "olmo3": {
        **RMS,
        "norm_placement": "branch",
        "qk_norm": True,
        "joint_qk_norm": True,
        "activation": "relu",
        "sliding_window": 20,
        "full_attention_layers": "1",
    },
    "glm4_moe": {
        **RMS,
        "qk_norm": True,
        "num_experts": 5,
        "experts_per_token": 2,
        "router_score_function": "sigmoid",
        "router_scaling_factor": 2.5,
        "expert_bias": True,
        "dense_layers": "0",
        "dense_ffn_size": 40,
    },
    "gpt_oss": {
        **RMS,
        "activation": "clamped_swiglu",
        "attention_bias": True,
        "attention_sinks": True,
        "mlp_bias": True,
        "num_experts": 5,
        "experts_per_token": 2,
        "normalized_experts": True,
        "router_bias": True,
        "sliding_window": 20,
        "full_attention_layers": "1",
    },
    "qwen2_moe": {**RMS, "num_experts": 4, "experts_per_token": 3, "shared_expert_size": 24},
    "smollm3": {**RMS, "unrotated_layers": "1"},
    "gpt_neox": {"position_embedding": "rope", "rotary_percentage": 0.5, "parallel_residual": True},
    "lora": {**RMS, "parts": lora("attention.query_key_value", "mlp.dense_h_to_4h_2")},
    "lora_of_all": {"parts": lora(*(stem for stem in LORA_TARGETS if not stem.endswith("_2")))},
    "lora_parallel": {**RMS, "parallel_residual": True, "parts": lora(*LORA_TARGETS)},
    "gptj": {"position_embedding": "rope", "parallel_residual": True, "logits_bias": True},
}


def logits_of(network: Network, runner: object, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the last tokens of prompts, and of a step behind them."""
    adapters = bool(adapters_of(network.config).lora_names)
    starts = [
        RowStart(slot, slot * EXTENT, ids, -1, stride=EXTENT)
        for slot, ids in enumerate(tuple(range(3, 3 + length % 60)) for length in LENGTHS[rows])
    ]
    starts = [
        RowStart(
            row.slot,
            row.start,
            (row.ids * LONGEST)[: LENGTHS[rows][row.slot]],
            -1,
            GenerateRequest((), 0, lora_adapter=(1, None, 0)[row.slot] if adapters else None),
        )
        for row in starts
    ]
    prompts = PackedPrompts(starts, [PrefillPart(row.slot, 0, len(row.ids)) for row in starts])
    packed = prompts.to_device(runner.device, Nowhere(runner.decoder.cache.scratch, 8), None)
    batch = unpacked(packed, prompts.sizes, prompts.spans)
    last = network.logits(network.prefill(batch)[batch.last])
    runner.states.join(starts)
    runner.states.set_length(batch.row_slots, batch.lengths)
    slots = SamplingBatch(starts, runner.device).slots
    runner.states.token[:rows] = torch.arange(rows)
    step = network.step
    chosen = runner.states.lora_adapter[slots] if adapters else None
    bounds = Bounds(LONGEST + 1, lora=adapters)
    return last, step.logits(step.forward(runner.states.columns, slots, bounds, chosen))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("name", "kept"), [*((name, "auto") for name in MODELS), ("gemma3", "fp8"), ("lora", "fp8")]
)
@torch.inference_mode()
def test_prompts_and_steps(name, kept, rows):
    config = small_config(**MODELS[name])
    _, runner = runner_for(
        config, random_tensors(config), max_tokens=8 * EXTENT, kv_cache_dtype=kept
    )
    theirs = runner.decoder
    table = theirs.cache.table
    blocks = theirs.cache.capacity // table.tokens
    table.entries[:blocks] = torch.randperm(blocks)
    shared = (theirs.weights, theirs.cache, fused, theirs.communicator, theirs.device)
    want = logits_of(theirs, runner, rows)
    got = logits_of(Network(*shared), runner, rows)
    for mine, reference in zip(got, want, strict=True):
        assert_close(mine, reference, torch.float32)
