"""Weights of four bits: what packing keeps of numbers, what models compute, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.quantization import FOUR_BITS, Quantization
from launcher_scripts.kernels import four_bits
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.kernels.quantization import dequantized, quantized
from tests.engine.small_models import (
    context_logits,
    engine_for,
    random_tensors,
    runner_for,
    small_config,
)
from tests.engine.test_quantization import IDS, mlp_of

ALL = pytest.mark.parametrize("quantization", FOUR_BITS)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
SIZES = {"hidden_size": 64, "head_size": 16, "num_heads": 4, "ffn_size": 128}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("is_float", [False, True])
def test_codes_return_from_their_bytes(is_float: bool) -> None:
    codes = torch.randint(0, 16, (7, 192))
    weight = four_bits.packed(codes, is_float)
    assert (weight.dtype, weight.shape) == (torch.uint8, (7, 96))
    assert torch.equal(four_bits.unpacked(weight, is_float), codes)


@DTYPES
def test_mxfp4_keeps_its_numbers(dtype: torch.dtype) -> None:
    """Groups with any largest number, and groups of zeros."""
    numbers = torch.tensor(four_bits.E2M1)[torch.randint(0, 8, (40, 6, 32))]
    numbers[:8] = numbers[:8].clamp(max=1.5)
    numbers[3, 2], numbers[4, :, :31] = 0.0, 0.0
    numbers *= torch.randint(0, 2, numbers.shape) * 2 - 1
    values = torch.ldexp(numbers, torch.randint(-9, 4, (40, 6, 1))).flatten(1)
    small = quantized(Linear(values), dtype, "mxfp4")
    assert small.quantization == "mxfp4" and small.in_size == 192
    assert torch.equal(dequantized(small.weight, small.scale, dtype), values)


@pytest.mark.parametrize("scale_of_all", [2.0**-9, 3.7e-4])
def test_nvfp4_keeps_its_numbers(scale_of_all: float) -> None:
    """e2m1 times e4m3 times a number of the matrix: bit for bit where scales are bfloat16's, else
    what one more rounding changes."""
    numbers = torch.tensor(four_bits.E2M1)[torch.randint(0, 8, (40, 12, 16))]
    numbers[:8] = numbers[:8].clamp(max=1.5)
    numbers[3, 2], numbers[4, :, :15] = 0.0, 0.0
    numbers *= torch.randint(0, 2, numbers.shape) * 2 - 1
    scales = (torch.rand(40, 12, 1) * 400 + 1).to(torch.float8_e4m3fn).float() * scale_of_all
    values = (numbers * scales).flatten(1).bfloat16().float()
    small = quantized(Linear(values), torch.bfloat16, "nvfp4")
    assert small.quantization == "nvfp4" and small.scale is not None
    assert small.scale.shape == (40, 3)
    result = dequantized(small.weight, small.scale, torch.bfloat16)
    if scale_of_all == 2.0**-9:
        assert torch.equal(result, values)
    assert bool(((result - values).abs() <= values.abs() * 2.0**-7).all())


@DTYPES
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("has_zero_points", [False, True])
def test_int4_keeps_its_numbers(has_zero_points: bool, group: int, dtype: torch.dtype) -> None:
    """(q - z) * s in the compute type, as compressed-tensors, GPTQ and AWQ dequantize."""
    half = torch.float16 if dtype == torch.float32 else dtype
    codes = torch.randint(0, 16, (40, 256 // group, group))
    zeros = torch.randint(0, 16, (40, 256 // group, 1)) if has_zero_points else 8
    scales = (torch.rand(40, 256 // group, 1) * 0.02 + 1e-3).to(half).to(dtype)
    values = ((codes - zeros).to(dtype) * scales).float().flatten(1)
    small = quantized(Linear(values), dtype, "int4")
    assert small.scale is not None and small.scale.shape == (40, 8)
    assert small.scale.dtype == (torch.int32 if has_zero_points else dtype)
    assert torch.equal(dequantized(small.weight, small.scale, dtype), values)


def test_int4_of_other_scales_than_the_compute_type_keeps_its_codes() -> None:
    """float16 scales of AWQ and GPTQ, computed with in bfloat16."""
    scales = (torch.rand(40, 8, 1) * 0.02 + 1e-3).half().float()
    values = ((torch.randint(0, 16, (40, 8, 32)) - 8) * scales).flatten(1)
    small = quantized(Linear(values.bfloat16().float()), torch.bfloat16, "int4")
    result = dequantized(small.weight, small.scale, torch.bfloat16)
    assert bool(((result - values).abs() <= values.abs() * 2.0**-7).all())


@ALL
def test_numbers_are_rounded_to_the_nearest(quantization: Quantization) -> None:
    values = torch.randn(50, 256) * 10.0 ** torch.randint(-3, 2, (50, 1))
    values[0] = 0.0
    small = quantized(Linear(values), torch.float32, quantization)
    error = (dequantized(small.weight, small.scale) - values).abs().unflatten(1, (-1, 32))
    largest = values.abs().unflatten(1, (-1, 32)).amax(2, keepdim=True)
    assert bool((error <= largest * {"int4": 1 / 8}.get(quantization, 1 / 5)).all())
    assert float(error.norm() / values.norm()) < 0.13
    assert not error[0].any()


@ALL
def test_a_layer_takes_little_more_than_a_quarter_of_half_precision(
    quantization: Quantization,
) -> None:
    config = small_config(**SIZES)
    sizes = []
    for kind in (None, quantization):
        _, runner = runner_for(config, random_tensors(config), data_type="bf16", quantization=kind)
        sizes.append(runner.decoder.weights.bytes())
    values = config.num_layers * (64 * 192 + 64 * 64 + 2 * 64 * 128)
    scales = values // (16 if quantization == "nvfp4" else 32) * 2
    assert sizes[0] - sizes[1] == values * 2 - values // 2 - scales


def rounded(tensors: dict[str, Any], quantization: Quantization, *, only: str) -> dict[str, Any]:
    """The tensors after a trip through four bits, those of layers with `only` in their name."""
    changed = dict(tensors)
    for name, values in tensors.items():
        if values.ndim == 2 and "layers." in name and only in name and "router" not in name:
            small = quantized(Linear(torch.from_numpy(values).t()), torch.float32, quantization)
            changed[name] = dequantized(small.weight, small.scale).t().contiguous().numpy()
    return changed


MIXTURE = {"mlp_bias": False, "num_experts": 3, "experts_per_token": 2}


@ALL
@pytest.mark.parametrize("changes", [{}, {"gated": True, "activation": "silu"}, MIXTURE])
def test_gpt_equals_the_model_of_rounded_weights(
    changes: dict[str, Any], quantization: Quantization
) -> None:
    """mxfp4 is for a mixture's experts alone. Rounded weights are not rounded again."""
    config = small_config(**SIZES, **changes)
    only = ".experts." if quantization == "mxfp4" and changes is MIXTURE else ""
    tensors = random_tensors(config)
    tensors_in_four_bits = rounded(tensors, quantization, only=only)
    engines = [
        engine_for(config, tensors, quantization=quantization),
        engine_for(config, tensors_in_four_bits, quantization=quantization),
        engine_for(config, tensors_in_four_bits),
        engine_for(config, tensors),
    ]
    try:
        got, again, want, exact = (context_logits(engine, IDS) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(again, want, rtol=0, atol=1e-4)
    assert not torch.allclose(got, exact, atol=1e-2)


@ALL
def test_ranks_keep_full_groups_or_are_refused(quantization: Quantization) -> None:
    config = small_config(**SIZES | {"ffn_size": 192})
    message = "must have full groups.*got '32 of 64 inputs with tensor_para_size 2"
    with pytest.raises(ConfigError, match=message):
        mlp_of(config, random_tensors(config), 2, 0, quantization)


@ALL
def test_a_matrix_without_full_groups_keeps_its_type(quantization: Quantization) -> None:
    config = small_config(**SIZES | {"ffn_size": 96})
    _, runner = runner_for(config, random_tensors(config), quantization=quantization)
    mlp = runner.decoder.weights.decoder.layers[0].mlp
    assert (mlp.in_proj.quantization, mlp.out_proj.quantization) == (quantization, None)
