"""Steps of several rows in low precision: the kernels, one after the other, against the reference.

A kernel that did not wait for the one before it would show here, and not where it is alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.sampler import SamplingBatch
from launcher_scripts.engine.messages.plan import Bounds, RowStart
from launcher_scripts.engine.model.families import kernels_for
from launcher_scripts.engine.runner.graphs import bucket_bounds
from launcher_scripts.kernels import reference
from launcher_scripts.models.adapters import LORA_TARGETS, Adapters, adapters_of
from tests.engine.small_models import random_tensors, runner_for, small_config
from tests.gpu.test_t5 import VARIANTS, calm_tensors, wider

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

CONTEXT, SOURCE = 70, 130
SIZES = {"hidden_size": 512, "num_heads": 8, "head_size": 64, "ffn_size": 1280}


def t5():
    config = wider(**{**VARIANTS["gated"], **SIZES})
    return config, calm_tensors(config), SOURCE


def gpt(**changes):
    config = small_config(**{**SIZES, "vocab_size": 515, "max_positions": 400, **changes})
    tensors = random_tensors(config)
    calm = {name for name, values in tensors.items() if values.ndim == 2 and "layers" in name}
    return config, {name: tensors[name] * (0.15 if name in calm else 1) for name in tensors}, 0


NAMES = ("sql", "law", "poems")
LORA = Adapters(lora_names=NAMES, lora_rank=16, lora_targets=tuple(LORA_TARGETS))
PLAIN_TARGETS = tuple(stem for stem in LORA_TARGETS if not stem.endswith("_2"))
MODELS = {
    "t5": t5,
    "gpt": lambda: gpt(num_kv_heads=8),
    "modern": lambda: gpt(
        num_kv_heads=2,
        normalization="rmsnorm",
        activation="silu",
        gated=True,
        position_embedding="rope",
    ),
    "lora": lambda: gpt(
        num_kv_heads=2, activation="silu", gated=True, position_embedding="rope", parts=LORA
    ),
    "lora_plain": lambda: gpt(num_kv_heads=8, parts=replace(LORA, lora_targets=PLAIN_TARGETS)),
}


@pytest.mark.parametrize("rows", [2, 8, 32, 33])
@pytest.mark.parametrize("name", MODELS)
def test_steps_of_several_rows(name, rows):
    config, tensors, source = MODELS[name]()
    extent, lora = source + CONTEXT + 4, bool(adapters_of(config).lora_names)
    _, runner = runner_for(
        config,
        tensors,
        device="cuda",
        data_type="bf16",
        max_batch_size=rows,
        max_tokens=rows * extent,
    )
    starts = [
        RowStart(
            slot,
            slot * extent + source,
            (1,),
            -1,
            GenerateRequest((), 0, lora_adapter=(None, 2, 0, 1)[slot % 4] if lora else None),
            source=(0,) * source,
        )
        for slot in range(rows)
    ]
    step, slots = runner.decoder.step, SamplingBatch(starts, runner.device).slots
    bounds = bucket_bounds(Bounds(CONTEXT + 4, source, lora=lora))

    @torch.inference_mode()
    def logits(kernels) -> torch.Tensor:
        for part in (step, *step.sublayers):
            part.kernels = kernels
        runner.states.length[:rows] = CONTEXT - torch.arange(rows, device=runner.device)
        runner.states.token[:rows] = torch.arange(rows, device=runner.device)
        chosen = runner.states.lora_adapter[slots] if lora else None
        return step.logits(step.forward(runner.states.columns, slots, bounds, chosen))

    with torch.inference_mode():
        runner.states.join(starts)
        for layer in runner.decoder.cache.layers.values():
            layer.keys.normal_(std=0.1)  # T5 does not scale: hard softmaxes would not compare
            layer.values.normal_()
    want = logits(reference)
    got = [logits(kernels_for("cuda")) for _ in range(3)]
    assert (got[1] - want).norm() <= 0.03 * want.norm()
    assert all(torch.equal(each, got[0]) for each in got)
