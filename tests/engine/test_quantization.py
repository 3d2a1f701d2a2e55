"""Weights in bytes: what quantizing does to weights, memory and logits; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import Quantization
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import EngineSettings
from launcher_scripts.engine.model.gpt_weights import GPTWeightLoader
from launcher_scripts.engine.model.weights import MLPWeights
from launcher_scripts.engine.runner import loading
from launcher_scripts.engine.runner.loading import load_weights, open_checkpoint
from launcher_scripts.kernels.cuda.compiling import DeviceTraits
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.kernels.quantization import BYTE_TYPES, dequantized, quantized
from launcher_scripts.models.gpt import GPTConfig
from tests.engine.small_models import (
    context_logits,
    engine_for,
    load_engine,
    random_tensors,
    rank_part,
    runner_for,
    small_config,
    write_checkpoint,
)
from tests.engine.small_t5 import DECODER, GATED, SOURCE, decoder_logits, t5_config, t5_tensors

IDS = (5, 60, 11, 11, 2, 33, 47, 9, 28, 64, 3, 17)
BOTH = pytest.mark.parametrize("quantization", list(BYTE_TYPES))
NEAR: dict[Quantization, float] = {"int8": 0.05, "fp8": 0.25}  # of the largest logit, or its norm


@BOTH
def test_every_output_has_its_scale(quantization: Quantization) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 64) * torch.tensor([[1e-4], [1.0], [30.0], [0.0], [2.0]])
    small = quantized(Linear(weight), torch.float32, quantization)
    dtype, most = BYTE_TYPES[quantization]
    assert small.weight.dtype == dtype
    assert small.weight.float().abs().amax(1).tolist() == [most, most, most, 0, most]
    error = (dequantized(small.weight, small.scale) - weight).abs()
    largest = weight.abs().amax(1, keepdim=True)
    if quantization == "int8":
        assert bool((error <= largest / 254 + 1e-9).all())
    else:  # half a step of three bits, or of the smallest exponent
        half_step = (weight.abs() / 16).maximum(largest / 448 * 2.0**-10)
        assert bool((error <= half_step * 1.0001 + 1e-9).all())


@BOTH
def test_a_layer_takes_half_of_half_precision(quantization: Quantization) -> None:
    """Tables and the head stay as they are."""
    config = small_config(hidden_size=64, head_size=16, ffn_size=256)
    tensors = random_tensors(config)
    sizes = []
    for held in (None, quantization):
        _, runner = runner_for(config, tensors, data_type="bf16", quantization=held)
        sizes.append(runner.decoder.weights.bytes())
    layers = config.num_layers * (64 * 192 + 64 * 64 + 2 * 64 * 256)
    assert sizes[0] - sizes[1] == layers


def rounded(tensors: dict[str, Any], quantization: Quantization) -> dict[str, Any]:
    """The tensors after a trip through bytes: every column of [in, out] by its scale. What decides
    between experts is left whole."""
    changed = dict(tensors)
    for name, values in tensors.items():
        whole = "relative" in name or "router" in name or "shared_expert_gate" in name
        if values.ndim == 2 and ("layers." in name or "block." in name) and not whole:
            small = quantized(Linear(torch.from_numpy(values).t()), torch.float32, quantization)
            changed[name] = dequantized(small.weight, small.scale).t().contiguous().numpy()
    return changed


@BOTH
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gated": True, "activation": "silu"},
        {
            "mlp_bias": False,
            "num_experts": 3,
            "experts_per_token": 2,
            "shared_expert_size": 24,
        },
    ],
)
def test_gpt_equals_the_model_of_rounded_weights(
    changes: dict[str, Any], quantization: Quantization
) -> None:
    config = small_config(**changes)
    tensors = random_tensors(config)
    engines = [
        engine_for(config, tensors, quantization=quantization),
        engine_for(config, rounded(tensors, quantization)),
        engine_for(config, tensors),
    ]
    try:
        got, want, exact = (context_logits(engine, IDS) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert 0 < (got - exact).abs().max() < NEAR[quantization] * exact.abs().max()


@BOTH
def test_t5_equals_the_model_of_rounded_weights(quantization: Quantization) -> None:
    config = t5_config(**GATED)
    tensors = t5_tensors(config)
    engines = [
        engine_for(config, tensors, quantization=quantization),
        engine_for(config, rounded(tensors, quantization)),
    ]
    try:
        got, want = (decoder_logits(engine, SOURCE, DECODER) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@BOTH
@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
def test_half_precision_computes_with_bytes(data_type: str, quantization: Quantization) -> None:
    config = small_config()
    tensors = random_tensors(config)
    engines = [
        engine_for(config, tensors, quantization=quantization, data_type=each)
        for each in ("fp32", data_type)
    ]
    try:
        exact, got = (context_logits(engine, IDS) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    assert (got - exact).norm() <= 0.03 * exact.norm()


def test_ranks_quantize_their_own_parts() -> None:
    """Outputs that ranks share have the scales of one rank; inputs that they share do not."""
    config = small_config()
    tensors = random_tensors(config)
    (whole,), parts = ([mlp_of(config, tensors, tp, rank) for rank in range(tp)] for tp in (1, 2))
    assert torch.equal(torch.cat([part.in_proj.scale for part in parts]), whole.in_proj.scale)
    of_parts = torch.stack([part.out_proj.scale for part in parts])
    assert torch.equal(of_parts.amax(0), whole.out_proj.scale)
    assert not torch.equal(of_parts[0], of_parts[1])


def mlp_of(
    config: GPTConfig,
    tensors: dict[str, Any],
    tp_size: int,
    rank: int,
    quantization: Quantization = "fp8",
) -> MLPWeights:
    """Of a rank's first layer."""
    loader = GPTWeightLoader(
        config,
        Parallelism(tp_size),
        rank,
        torch.bfloat16,
        torch.device("cpu"),
        lambda spec, layer: rank_part(
            spec, config, tensors[spec.tensor_name(layer)], tp_size, rank
        ),
        quantization=quantization,
    )
    return loader.load().decoder.layers[0].mlp


@BOTH
def test_a_row_has_the_same_tokens_alone_and_among_many(quantization: Quantization) -> None:
    config = small_config()
    engine = engine_for(
        config, random_tensors(config), quantization=quantization, max_batch_size=80
    )
    prompts = [(5, 60, 11, 2 + index % 60) for index in range(80)]
    requests = [GenerateRequest(prompt, 6) for prompt in prompts]
    try:
        together = [future.result().output_ids for future in [*map(engine.submit, requests)]]
        alone = [engine.submit(request).result().output_ids for request in requests[::16]]
    finally:
        engine.close()
    assert together[::16] == alone


@pytest.mark.slow
@BOTH
def test_ranks_together_are_near(tmp_path: Path, quantization: Quantization) -> None:
    config = small_config()
    tensors = random_tensors(config)
    engines = [
        load_engine(tmp_path, config, tensors, tp, 1, quantization=held)
        for tp, held in ((1, None), (2, quantization))
    ]
    try:
        exact, got = (context_logits(engine, IDS) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    assert (got - exact).norm() <= NEAR[quantization] * exact.norm()


def test_other_quantizations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown quantization .*got 'fp4'; choices: fp8, int4"):
        EngineSettings(Path("unused"), quantization="fp4")  # type: ignore[arg-type]


def test_fp8_is_refused_on_a_gpu_that_cannot_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config()
    folder = write_checkpoint(tmp_path / "1-gpu", config, random_tensors(config), 1)
    settings = EngineSettings(folder, quantization="fp8")
    checkpoint = open_checkpoint(settings, verify=False)
    monkeypatch.setattr(loading, "traits_of", lambda _: DeviceTraits((8, 6), 99 << 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A40")
    with pytest.raises(
        ConfigError, match=r"needs compute capability 8\.9; got 'A40'; choices: int8"
    ):
        load_weights(settings, checkpoint, 0, torch.device("cuda"))
