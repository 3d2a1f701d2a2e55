"""Mixtures of experts through kernels equal the reference.

Run as kernel_checks.py is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda import experts, fused
from launcher_scripts.kernels.operands import ExpertMLPs, Linear, Router
from launcher_scripts.kernels.quantization import BYTE_TYPES, quantized
from tests.kernels.kernel_checks import (
    DOT_TYPES,
    INTERPRETED,
    EqualRanks,
    assert_close,
    assert_for_norm,
    make_linear,
    make_norm,
    pytestmark,  # noqa: F401 - pytest reads it
    random,
    seeded,  # noqa: F401 - pytest uses it
)

HIDDEN, FFN = (40, 24) if INTERPRETED else (1000, 344)
MANY = 70 if INTERPRETED else 1500


def make_experts(count: int, gated: bool, dtype: torch.dtype, *, biased: bool = False):
    """With biases as gpt-oss has them, and its activation."""
    linears = []
    for size in ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)):
        each = [make_linear(*size, None, True, dtype) for _ in range(count)]
        bias = torch.stack([linear.bias for linear in each]) if biased else None
        linears.append(Linear(torch.stack([linear.weight for linear in each]), bias))
    up, gate, down = linears
    return ExpertMLPs(up, gate if gated else None, down, "clamped_swiglu" if biased else "silu")


@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", [1, 3, MANY])
def test_route(rows, dtype):
    """Of equal scores the first expert's is taken first."""
    x, linear = random(rows, HIDDEN, dtype=dtype), make_linear(5, HIDDEN, None, False, dtype)
    bias = torch.tensor([9.0, 8.5, -20.0, 8.75, 9.25], device=x.device)
    for router in (
        Router(linear, 1),
        Router(linear, 2, normalized=False),
        Router(linear, 3),
        Router(linear, 3, bias=bias),
        Router(replace(linear, bias=random(5, dtype=dtype)), 3),
        Router(linear, 2, "sigmoid", normalized=False, scaling_factor=2.5),
        Router(linear, 2, "sigmoid", bias=bias, scaling_factor=0.5),
    ):
        got, want = (side.route(x, router) for side in (fused, reference))
        assert got[0].tolist() == want[0].tolist()
        assert_close(got[1], want[1], torch.float32 if dtype == torch.float32 else dtype)
    linear.weight[3] = linear.weight[1] = 10 * x[0] / x[0].norm()
    assert fused.route(x, Router(linear, 2))[0][0].tolist() == [1, 3]


@pytest.mark.parametrize(("rows", "size"), [(2, 16), (17, 16), (70, 64), (300, 128)])
def test_every_choice_is_in_a_block_of_its_expert(rows, size, monkeypatch):
    monkeypatch.setattr(experts, "MAX_AT_ONCE", 64)
    chosen = random(rows, 7).topk(3, -1).indices + 1  # nobody chooses the first one
    chosen[:, 0] = torch.where((chosen[:, 1:] == 2).any(1), 8, 2)  # most choose this one
    blocks = experts.blocks_of(chosen, 11)
    assert blocks.choices.shape == (blocks.count, blocks.size) and blocks.size == size
    owners = blocks.experts[: blocks.count]
    assert owners[owners >= 0].tolist() == sorted(owners[owners >= 0].tolist())
    placed = blocks.choices[owners >= 0]
    held = placed >= 0
    assert placed[held].sort().values.tolist() == list(range(chosen.numel()))
    of_expert = owners[owners >= 0][:, None].expand_as(placed)
    assert torch.equal(chosen.flatten()[placed[held].long()], of_expert[held])


@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize(
    ("rows", "count", "per_token"), [(1, 7, 3), (3, 5, 2), (17, 4, 1), (MANY, 5, 3)]
)
def test_mixture(rows, count, per_token, dtype):
    """One token's experts have a block each, others as many as they need; some have none."""
    gated = count != 4
    mlps = make_experts(count, gated, dtype, biased=per_token == 3)
    x = 3 * random(rows, HIDDEN, dtype=dtype)
    weights, chosen = random(rows, count - 1).softmax(-1).topk(per_token, -1)
    got, want = (side.mixture(x, chosen + 1, weights, mlps).sum(0) for side in (fused, reference))
    assert_close(got, want, dtype)


@pytest.mark.parametrize("quantization", BYTE_TYPES)
@pytest.mark.parametrize("rows", [3, MANY])
def test_mixture_of_bytes(rows, quantization):
    dtype = DOT_TYPES[1]
    mlps = make_experts(4, True, torch.float32, biased=True)
    x = random(rows, HIDDEN, dtype=dtype)
    linears = (in_bytes(each, dtype, quantization) for each in (mlps.up, mlps.gate, mlps.down))
    mlps = ExpertMLPs(*linears, mlps.activation)
    weights, chosen = random(rows, 4).softmax(-1).topk(2, -1)
    got, want = (side.mixture(x, chosen, weights, mlps).sum(0) for side in (fused, reference))
    assert_close(got, want, dtype)


def in_bytes(linear: Linear, dtype: torch.dtype, quantization: str) -> Linear:
    """Every expert's weight quantized alone; its bias is as it was, of the compute type."""
    parts = [quantized(Linear(weight), dtype, quantization) for weight in linear.weight]
    weight, scale = (
        torch.stack([getattr(part, name) for part in parts]) for name in ("weight", "scale")
    )
    return replace(parts[0], weight=weight, bias=linear.bias.to(dtype), scale=scale)


def test_many_tokens_are_taken_in_pieces(monkeypatch):
    monkeypatch.setattr(experts, "MAX_TOKENS", 30)
    mlps, x = make_experts(4, True, torch.float32), random(70, HIDDEN)
    weights, chosen = random(70, 4).softmax(-1).topk(2, -1)
    got, want = (side.mixture(x, chosen, weights, mlps).sum(0) for side in (fused, reference))
    assert_close(got, want, torch.float32)


@pytest.mark.parametrize("rows", [1, 3, MANY])
def test_accumulate_parts(rows):
    norm, dtype = make_norm("rmsnorm", HIDDEN), torch.float32
    parts, exact = random(3, rows, HIDDEN), random(rows, HIDDEN)
    got, want = (
        side.accumulate_parts(parts, side.hidden(exact, norm, dtype), norm, EqualRanks())
        for side in (fused, reference)
    )
    assert_close(got.exact, want.exact, dtype)
    assert_for_norm(got, want, norm, dtype)
