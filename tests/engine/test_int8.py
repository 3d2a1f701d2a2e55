"""int8_mode 1: what quantizing does to weights, memory and logits; other modes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.engine.engine import EngineSettings
from launcher_scripts.kernels import reference
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.kernels.quantization import quantized
from tests.engine.small_models import (
    context_logits,
    engine_for,
    load_engine,
    random_tensors,
    runner_for,
    small_config,
)
from tests.engine.small_t5 import DECODER, GATED, SOURCE, decoder_logits, t5_config, t5_tensors

IDS = (5, 60, 11, 11, 2, 33, 47, 9, 28, 64, 3, 17)


def test_every_output_has_its_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 64) * torch.tensor([[1e-4], [1.0], [30.0], [0.0], [2.0]])
    small = quantized(Linear(weight), torch.float32)
    assert small.weight.dtype == torch.int8
    assert small.weight.abs().amax(1).tolist() == [127, 127, 127, 0, 127]
    error = (reference.dense(small).weight - weight).abs()
    assert bool((error <= weight.abs().amax(1, keepdim=True) / 254 + 1e-9).all())


def test_a_layer_takes_half_of_half_precision() -> None:
    """Tables and the head stay as they are."""
    config = small_config(hidden_size=64, head_size=16, ffn_size=256)
    tensors = random_tensors(config)
    sizes = []
    for int8_mode in (0, 1):
        _, runner = runner_for(config, tensors, data_type="bf16", int8_mode=int8_mode)
        sizes.append(runner.decoder.weights.bytes())
    layers = config.num_layers * (64 * 192 + 64 * 64 + 2 * 64 * 256)
    assert sizes[0] - sizes[1] == layers


def dequantized(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors as they are after a trip through int8: every column of [in, out] by its scale."""
    changed = dict(tensors)
    for name, values in tensors.items():
        if values.ndim == 2 and ("layers." in name or "block." in name) and "relative" not in name:
            small = quantized(Linear(torch.from_numpy(values).t()), torch.float32)
            changed[name] = reference.dense(small).weight.t().contiguous().numpy()
    return changed


@pytest.mark.parametrize("changes", [{}, {"gated": True, "activation": "silu"}])
def test_gpt_equals_the_model_of_rounded_weights(changes: dict[str, Any]) -> None:
    config = small_config(**changes)
    tensors = random_tensors(config)
    engines = [
        engine_for(config, tensors, int8_mode=1),
        engine_for(config, dequantized(tensors)),
        engine_for(config, tensors),
    ]
    try:
        got, rounded, exact = (context_logits(engine, IDS) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    torch.testing.assert_close(got, rounded, rtol=0, atol=1e-4)
    assert 0 < (got - exact).abs().max() < 0.05 * exact.abs().max()


def test_t5_equals_the_model_of_rounded_weights() -> None:
    config = t5_config(**GATED)
    tensors = t5_tensors(config)
    engines = [
        engine_for(config, tensors, int8_mode=1),
        engine_for(config, dequantized(tensors)),
    ]
    try:
        got, rounded = (decoder_logits(engine, SOURCE, DECODER) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    torch.testing.assert_close(got, rounded, rtol=0, atol=1e-4)


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
def test_half_precision_computes_with_int8_weights(data_type: str) -> None:
    config = small_config()
    tensors = random_tensors(config)
    engines = [engine_for(config, tensors, int8_mode=1, data_type=t) for t in ("fp32", data_type)]
    try:
        exact, got = (context_logits(engine, IDS) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    assert (got - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.slow
def test_ranks_quantize_their_own_parts(tmp_path: Path) -> None:
    config = small_config()
    tensors = random_tensors(config)
    engines = [
        load_engine(tmp_path, config, tensors, tp, 1, int8_mode=mode)
        for tp, mode in ((1, 0), (2, 1))
    ]
    try:
        exact, got = (context_logits(engine, IDS) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    assert (got - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("mode", [2, 3])
def test_other_modes_are_refused(mode: int) -> None:
    with pytest.raises(ConfigError, match=f"got {mode}; choices: 0 .no quantization.*1 .int8"):
        EngineSettings(Path("unused"), int8_mode=mode)
