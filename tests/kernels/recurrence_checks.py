"""States of rows through kernels equal the reference.

Run as kernel_checks.py is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda import convolution, fused
from launcher_scripts.kernels.reference_recurrence import (
    ConvOperands,
    DeltaOperands,
    Gating,
    Mamba2Operands,
)
from tests.kernels.kernel_checks import (
    DEVICE,
    DOT_TYPES,
    INTERPRETED,
    TOLERANCE,
    assert_close,
    pytestmark,  # noqa: F401 - pytest reads it
    random,
    seeded,  # noqa: F401 - pytest uses it
)

TYPES = [torch.float32, torch.bfloat16]
SLOTS = [4, 1, 2]
# heads, groups, size, columns; key heads, heads, key size, value size
MAMBA2 = [(4, 2, 6, 5), (2, 1, 40, 16)] if INTERPRETED else [(128, 8, 64, 128), (24, 1, 64, 256)]
DELTA = [(2, 4, 6, 5), (1, 2, 16, 40)] if INTERPRETED else [(16, 32, 128, 128), (4, 4, 96, 64)]


def near(first: torch.Tensor, dtype: torch.dtype, *, centre: float = 0.0) -> torch.Tensor:
    return (centre + 0.5 * first).to(dtype)


def mamba2_layer(sizes: tuple[int, ...], dtype: torch.dtype, **more: Any) -> Mamba2Operands:
    heads, groups, size, columns = sizes
    width = heads * size + 2 * groups * columns
    return Mamba2Operands(
        conv=near(random(width, 4), dtype),
        conv_bias=near(random(width), dtype),
        tails=random(6, 3, width, dtype=dtype),
        states=random(6, heads, size, columns),
        rates=-torch.rand(heads, device=DEVICE) - 0.1,
        step_bias=random(heads),
        gating=Gating(1 + 0.3 * random(heads * size), 1e-5, groups, gate_first=True),
        skip=random(heads),
        **more,
    )


def delta_layer(sizes: tuple[int, ...], dtype: torch.dtype, *, of_keys: bool) -> DeltaOperands:
    key_heads, heads, keys, values = sizes
    key_heads = heads if of_keys else key_heads
    width = 2 * key_heads * keys + heads * values
    return DeltaOperands(
        conv=near(random(width, 4), dtype),
        tails=random(6, 3, width, dtype=dtype),
        states=random(6, heads, keys, values),
        rates=-torch.rand(heads, *([1] if of_keys else []), device=DEVICE) - 0.1,
        step_bias=random(heads, *([keys] if of_keys else [])),
        gating=Gating(
            1 + 0.3 * random(values), 1e-6, heads, activation="sigmoid" if of_keys else "silu"
        ),
    )


def mamba2_inputs(tokens: int, layer: Mamba2Operands) -> torch.Tensor:
    heads, size, _ = layer.states.shape[1:]
    return random(tokens, heads * size + layer.conv.shape[0] + heads, dtype=layer.conv.dtype)


def delta_inputs(tokens: int, layer: DeltaOperands) -> torch.Tensor:
    heads, keys, values = layer.states.shape[1:]
    decays = heads * (keys if layer.of_keys else 1)
    width = layer.conv.shape[0] + heads * values + heads + decays
    return random(tokens, width, dtype=layer.conv.dtype)


Step = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]


def assert_steps(step: Step, expected: Step, layer: Any, projected: torch.Tensor) -> None:
    """Outputs and all states, those of other slots included, after two tokens of some rows."""
    dtype = layer.conv.dtype
    states = {"tails": layer.tails}
    if not isinstance(layer, ConvOperands) or hasattr(layer, "states"):
        states["states"] = layer.states
    mine = replace(layer, **{name: state.clone() for name, state in states.items()})
    theirs = replace(layer, **{name: state.clone() for name, state in states.items()})
    slots = torch.tensor(SLOTS, device=DEVICE)
    for x in projected.split(len(SLOTS)):
        got, want = step(x, mine, slots), expected(x, theirs, slots)
        assert_close(got.to(dtype), want.to(dtype), dtype)
    for name in states:
        assert_close(getattr(mine, name), getattr(theirs, name), states[name].dtype)
        untouched = [0, 3, 5]
        assert torch.equal(getattr(mine, name)[untouched], states[name][untouched])


@pytest.fixture(params=[0, 10**9])
def few(request, monkeypatch):
    """With a kernel for the convolution alone, and without."""
    monkeypatch.setattr(convolution, "MANY_STATES", request.param)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", MAMBA2)
def test_steps_of_mamba2(sizes, dtype):
    layer = mamba2_layer(sizes, dtype)
    gating = layer.gating
    for local in (
        layer,
        replace(layer, gating=replace(gating, gate_first=False), min_step=0.2, max_step=0.9),
        replace(layer, gating=Gating(None), conv_bias=None),
        replace(layer, gating=None),
    ):
        x = mamba2_inputs(2 * len(SLOTS), local)
        assert_steps(fused.step_mamba2, reference.step_mamba2, local, x)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("sizes", DELTA)
def test_steps_of_delta_nets(sizes, of_keys, dtype):
    layer = delta_layer(sizes, dtype, of_keys=of_keys)
    x = delta_inputs(2 * len(SLOTS), layer)
    assert_steps(fused.step_delta, reference.step_delta, layer, x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("taps", [2, 3])
def test_steps_of_short_convolutions(taps, dtype):
    width = 30 if INTERPRETED else 2000
    layer = ConvOperands(
        conv=near(random(width, taps), dtype),
        conv_bias=near(random(width), dtype) if taps == 3 else None,
        tails=random(6, taps - 1, width, dtype=dtype),
    )
    x = random(2 * len(SLOTS), 3 * width, dtype=dtype)
    assert_steps(fused.step_short_conv, reference.step_short_conv, layer, x)


def assert_scans(kind: str, layer: Any, projected: torch.Tensor, count: int | None) -> None:
    """Outputs of the first `count` tokens, and the states behind them."""
    dtype = layer.conv.dtype
    states = layer.states[1], layer.tails[1]
    number = None if count is None else torch.tensor(count, device=DEVICE)
    got, mine = getattr(fused, kind)(projected, layer, states, number)
    want, theirs = getattr(reference, kind)(projected, layer, states, number)
    assert_close(got[:count].to(dtype), want[:count].to(dtype), dtype)
    error = (mine[0] - theirs[0]).norm() / theirs[0].norm()
    assert error <= TOLERANCE[dtype]
    assert torch.equal(mine[1], theirs[1])


# tokens, and how many of them count
PROMPTS = [(45, None), (20, 13), (2, None)] if INTERPRETED else [(1000, None), (90, 13), (2, None)]


@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize(("tokens", "count"), PROMPTS)
@pytest.mark.parametrize("sizes", MAMBA2)
def test_scans_of_mamba2(sizes, tokens, count, dtype):
    layer = mamba2_layer(sizes, dtype)
    for local in (layer, replace(layer, gating=None, min_step=0.2, max_step=0.9)):
        assert_scans("scan_mamba2", local, mamba2_inputs(tokens, local), count)


@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize(("tokens", "count"), PROMPTS)
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("sizes", DELTA)
def test_scans_of_delta_nets(sizes, of_keys, tokens, count, dtype):
    layer = delta_layer(sizes, dtype, of_keys=of_keys)
    x = delta_inputs(tokens, layer)
    x[3:] = x[:1]  # keys that are alike
    assert_scans("scan_delta", layer, x, count)
    assert_scans("scan_delta", layer, delta_inputs(tokens, layer), count)
