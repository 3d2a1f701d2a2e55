"""LoRA of few rows equals the reference. Run as kernel_checks.py is."""

from __future__ import annotations

import pytest
import torch

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.operands import LoRA
from tests.kernels.kernel_checks import (
    COMPUTE_TYPES,
    DEVICE,
    INTERPRETED,
    assert_close,
    fused,
    pytestmark,  # noqa: F401 - pytest reads it
)

COUNT = 3
SIZES = (
    ((48, (16, 8, 8), 3), (1030, (21,), 20))
    if INTERPRETED
    else (
        (4096, (4096, 1024, 1024), 16),
        (1000, (515,), 20),
        (14336, (4096,), 64),
        (768, (700,), 200),
    )
)
ADAPTERS = ((2,), (1, -1, 0, 1), (-1, -1))


def lora_of(inputs: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype) -> LoRA:
    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * shape[-2] ** -0.5).to(DEVICE, dtype)

    down = random(COUNT, inputs, len(widths) * rank).mT.contiguous()
    return LoRA(down, random(COUNT, rank, sum(widths)), widths)


def operands(dtype: torch.dtype, adapters: tuple[int, ...], inputs: int, *widths: int):
    """Numbers of the rows' adapters, x [N, inputs], and more of other widths."""
    rows = [torch.randn(len(adapters), width).to(DEVICE, dtype) for width in (inputs, *widths)]
    return torch.tensor(adapters, device=DEVICE), *rows


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize(("inputs", "widths", "rank"), SIZES)
@pytest.mark.parametrize("dtype", COMPUTE_TYPES)
def test_add_lora(dtype, inputs, widths, rank, adapters):
    lora = lora_of(inputs, widths, rank, dtype)
    chosen, x, out = operands(dtype, adapters, inputs, sum(widths))
    for onto in (out, out.float()):
        expected = reference.add_lora(onto, x, chosen, lora)
        got = fused.add_lora(onto.clone(), x, chosen, lora)
        assert_close(got, expected, dtype)
        without = chosen < 0
        assert torch.equal(got[without], onto[without])


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", COMPUTE_TYPES)
def test_activate_with_lora(dtype, gated, activation, adapters):
    inputs, width, rank = (48, 21, 3) if INTERPRETED else (4096, 1400, 16)
    lora = lora_of(inputs, (width,) * (1 + gated), rank, dtype)
    chosen, x, up, gate = operands(dtype, adapters, inputs, width, width)
    given = (gate if gated else None, x, chosen, lora, activation)
    expected = reference.activate_with_lora(up, *given)
    assert_close(fused.activate_with_lora(up.clone(), *given), expected, dtype)


@pytest.mark.parametrize("dtype", COMPUTE_TYPES)
def test_lora_of_many_rows(dtype):
    lora = lora_of(48, (16, 8, 8), 3, dtype)
    adapters = tuple(number % (COUNT + 1) - 1 for number in range(80))
    chosen, x, out = operands(dtype, adapters, 48, 32)
    expected = reference.add_lora(out, x, chosen, lora)
    assert_close(fused.add_lora(out.clone(), x, chosen, lora), expected, dtype)
