"""Products with what rows' LoRA adapters add equal the reference. Run as kernel_checks.py is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda import dot, peer_buffers
from launcher_scripts.kernels.cuda.compiling import DotTile
from launcher_scripts.kernels.operands import AttentionScores, Heads, Linear, LoRA, StepRows
from launcher_scripts.kernels.quantization import quantized
from tests.kernels import kernel_checks
from tests.kernels.kernel_checks import (
    DEVICE,
    DOT_TYPES,
    INTERPRETED,
    EqualRanks,
    assert_alike,
    assert_close,
    assert_for_norm,
    equal_caches,
    fused,
    hidden_pair,
    make_norm,
    make_peer_buffers,
    pytestmark,  # noqa: F401 - pytest reads it
    random,
)

COUNT = 3
# Inputs, widths of the blocks, rank: blocks within a tile, a tile's width, and beyond one.
SIZES = (
    ((48, (16, 8, 8), 3), (1030, (21,), 20), (40, (128, 64, 64), 5))
    if INTERPRETED
    else (
        (4096, (4096, 1024, 1024), 16),
        (1000, (515,), 20),
        (14336, (4096,), 64),
        (20000, (768, 100, 100), 8),
        (768, (700,), 200),
    )
)
NORMS = ("layernorm", "rmsnorm", None)
MLP_SIZES = ((48, 21, 3), (33, 64, 20)) if INTERPRETED else ((4096, 14336, 16), (1000, 515, 20))
ADAPTERS = ((2,), (1, -1, 0, 1, 2), (-1, -1), (-1,))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def lora_of(inputs: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype) -> LoRA:
    down = random(COUNT, len(widths) * rank, inputs) * inputs**-0.5
    up = random(COUNT, rank, sum(widths)) * rank**-0.5
    return LoRA(down.to(dtype), up.to(dtype), widths)


def numbers(adapters: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(adapters, device=DEVICE)


def made(
    inputs: int,
    widths: tuple[int, ...],
    rank: int,
    adapters: tuple[int, ...],
    dtype: torch.dtype,
    kind: str | None = None,
    *,
    bias: bool = True,
    quantization: str | None = None,
) -> Linear:
    """A projection of all the widths, and what the adapters add to it."""
    norm = None if kind is None else make_norm(kind, inputs)
    kept = torch.float32 if quantization else dtype
    linear = kernel_checks.make_linear(sum(widths), inputs, norm, bias, kept)
    if quantization:
        linear = quantized(linear, dtype, quantization)
        linear = replace(linear, bias=linear.bias.to(dtype) if bias else None)
    return linear.with_lora(lora_of(inputs, widths, rank, dtype), numbers(adapters))


def mlp_of(
    size: tuple[int, int, int],
    gated: bool,
    adapters: tuple[int, ...],
    dtype: torch.dtype,
    quantization: str | None = None,
) -> tuple[Linear, Linear | None]:
    """Up, with what the adapters add to it and to the gate, and the gate."""
    inputs, width, rank = size
    up = made(inputs, (width,), rank, adapters, dtype, "layernorm", quantization=quantization)
    if not gated:
        return up, None
    gate = made(inputs, (width,), rank, adapters, dtype, "layernorm", quantization=quantization)
    gate = replace(gate, norm=up.norm, lora=None)
    return up.with_lora(lora_of(inputs, (width, width), rank, dtype), numbers(adapters)), gate


by_adapters = pytest.mark.parametrize("adapters", ADAPTERS)
by_size = pytest.mark.parametrize(
    ("size", "kind"), [(size, NORMS[place % 3]) for place, size in enumerate(SIZES)]
)


@by_adapters
@by_size
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_project_hidden(dtype, size, kind, adapters):
    linear = made(*size, adapters, dtype, kind)
    mine, theirs = hidden_pair(len(adapters), linear)
    got = fused.project_hidden(mine, fused.prepare(linear))
    assert_close(got, reference.project_hidden(theirs, linear), dtype)


@pytest.mark.parametrize("adapter", [1, -1])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_project_hidden_of_a_row_that_moved(dtype, kind, adapter):
    """Its mean and its deviation are not those it is prescaled by."""
    linear = made(*SIZES[0], (adapter,), dtype, kind)
    inputs = SIZES[0][0]
    before = kernel_checks.make_linear(inputs, 24, None, True, dtype)
    before.bias.add_(3)
    x, exact = random(1, 24, dtype=dtype), random(1, inputs)
    mine, theirs = (
        side.accumulate(x, before, side.hidden(exact, linear.norm, dtype), linear.norm)
        for side in (fused, reference)
    )
    got = fused.project_hidden(mine, fused.prepare(linear))
    assert_close(got, reference.project_hidden(theirs, linear), dtype)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("adapters", ADAPTERS[:2])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_quantized_weights(dtype, adapters, quantization):
    """Their scales are not the adapters'."""
    linear = made(*SIZES[0], adapters, dtype, "rmsnorm", quantization=quantization)
    mine, theirs = hidden_pair(len(adapters), linear)
    got = fused.project_hidden(mine, fused.prepare(linear))
    assert_close(got, reference.project_hidden(theirs, linear), dtype)
    up, gate = mlp_of(MLP_SIZES[0], True, adapters, dtype, quantization)
    mine, theirs = hidden_pair(len(adapters), up)
    got = fused.expand(mine, fused.prepare(up), fused.prepare(gate), "silu")
    assert_close(got, reference.expand(theirs, up, gate, "silu"), dtype)


@pytest.mark.parametrize("adapters", [(1,), (1, -1, 0, 1, 2), tuple(range(-1, COUNT)) * 20])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_the_general_operations(dtype, adapters):
    x = random(len(adapters), SIZES[0][0], dtype=dtype)
    linear = made(*SIZES[0], adapters, dtype, "layernorm")
    assert_close(fused.project(x, linear), reference.project(x, linear), dtype)
    linear = linear.without_norm()
    residual = random(len(adapters), linear.weight.shape[0])
    got, want = (side.project_add(x, linear, residual) for side in (fused, reference))
    assert_close(got, want, dtype)
    for gated in (False, True):
        up, gate = mlp_of(MLP_SIZES[0], gated, adapters, dtype)
        got, want = (side.mlp_up(x, up, gate, "gelu") for side in (fused, reference))
        assert_close(got, want, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dtype", "adapters"),
    [
        (dtype, adapters)
        for dtype in DOT_TYPES
        for adapters in ADAPTERS
        if dtype != torch.float32 or len(adapters) == 1  # else A of all goes through cuBLAS
    ],
)
def test_rows_without_an_adapter(dtype, size, adapters):
    """They get what they get without LoRA, to the last bit, whatever is in A and B."""
    linear = made(*size, adapters, dtype, bias=False)
    for part in (linear.lora.lora.down, linear.lora.lora.up):
        part[0] = torch.nan
    adapters = numbers(adapters)
    linear = linear.with_lora(linear.lora.lora, torch.where(adapters == 0, 1, adapters))
    x = random(len(adapters), size[0], dtype=dtype)
    mine, without = fused.hidden(x.float(), None, dtype), adapters < 0
    got = fused.project_hidden(mine, linear)
    assert not got.isnan().any()
    plain = fused.project_hidden(mine, replace(linear, lora=None))
    assert torch.equal(got[without], plain[without])
    assert not any(torch.equal(*pair) for pair in zip(got[~without], plain[~without], strict=True))


@by_adapters
@pytest.mark.parametrize(
    ("size", "activation"), list(zip(MLP_SIZES, ("silu", "gelu"), strict=True))
)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_expand(dtype, gated, size, activation, adapters):
    up, gate = mlp_of(size, gated, adapters, dtype)
    mine, theirs = hidden_pair(len(adapters), up)
    got = fused.expand(mine, fused.prepare(up), gate and fused.prepare(gate), activation)
    assert_close(got, reference.expand(theirs, up, gate, activation), dtype)


@by_adapters
@pytest.mark.parametrize("size", [each for each in SIZES if len(each[1]) == 1])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_sums(dtype, size, adapters):
    """Into the residual, and of a rank's part; where the norm behind expects nothing, too."""
    linear, norm = made(*size, adapters, dtype), make_norm("rmsnorm", size[1][0])
    x = random(len(adapters), size[0], dtype=dtype)
    exact = random(len(adapters), size[1][0])
    mine, theirs = (side.hidden(exact, norm, dtype) for side in (fused, reference))
    want = reference.accumulate(x, linear, theirs, norm)
    for onto in (mine, replace(mine, row_stats=None)):
        got = fused.accumulate(x, linear, onto, norm)
        assert_close(got.exact, want.exact, dtype)
        assert_for_norm(got, want, norm, dtype)
    got, want = (side.partial_product(x, linear) for side in (fused, reference))
    assert_close(got, want, dtype)
    ranks = EqualRanks()
    got = fused.accumulate_over_ranks(x, linear, mine, norm, ranks)
    want = reference.accumulate_over_ranks(x, linear, theirs, norm, ranks)
    assert_close(got.exact, want.exact, dtype)


@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("adapter", [1, -1])
def test_sums_through_peer_buffers(adapter, dtype):
    inputs, widths, rank = SIZES[1]
    buffers = make_peer_buffers(2, widths[0] + 3)
    linears = [made(inputs, widths, rank, (adapter,), dtype) for _ in buffers]
    norm = make_norm("rmsnorm", widths[0])
    onto = fused.hidden(random(1, widths[0]), norm, dtype)
    want = onto.exact + linears[0].bias
    for linear, buffer in zip(linears, buffers, strict=True):
        x = random(1, inputs, dtype=dtype)
        peer_buffers.send_product(x, linear, buffer)
        want += reference.partial_product(x, linear)
    got = peer_buffers.receive_sum(linears[0].bias, onto, norm, buffers[1])
    assert_close(got.exact, want, dtype)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("adapters", [(1,), (-1,), (0, -1, 2)])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_attend_own(dtype, kind, adapters, splits, monkeypatch):
    """Queries, keys and values have their blocks; adapters change them before they are turned."""
    monkeypatch.setattr(dot, "dot_tile", lambda *_: DotTile(64, 64, 4, 2, splits, 1))
    heads, count = Heads(4, 2, 12), len(adapters)
    linear = made(SIZES[0][0], (48, 24, 24), 3, adapters, dtype, kind)
    positions, starts = (
        torch.tensor(values[:count], device=DEVICE) for values in ([5, 0, 9], [2, 19, 8])
    )
    step = StepRows(starts, positions, positions + 1)
    frequencies = 10.0 ** -torch.arange(4, device=DEVICE).float()
    rotary = reference.rotary_table(torch.arange(20, device=DEVICE), frequencies)
    caches = equal_caches(heads, 20, starts, positions, dtype)
    mine, theirs = hidden_pair(count, linear)
    more, scores = (heads, rotary, step), AttentionScores(12**-0.5)
    got = fused.attend_own(mine, fused.prepare(linear), *more, caches[0], 20, scores)
    want = reference.attend_own(theirs, linear, *more, caches[1], 20, scores)
    assert_close(got, want, dtype)
    assert_alike(*caches, (starts + positions).tolist(), dtype)
