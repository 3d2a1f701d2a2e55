"""Operations with weights of four bits: fused equals reference; run as kernel_checks.py is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from launcher_scripts.common.quantization import FOUR_BITS, Quantization  # noqa: E402
from launcher_scripts.kernels import reference  # noqa: E402
from launcher_scripts.kernels.cuda import fused, peer_buffers  # noqa: E402
from launcher_scripts.kernels.cuda.many_rows import dense  # noqa: E402
from launcher_scripts.kernels.four_bits import with_zero_points  # noqa: E402
from launcher_scripts.kernels.operands import (  # noqa: E402
    AttentionScores,
    ExpertMLPs,
    Heads,
    Linear,
    Norm,
    StepRows,
)
from launcher_scripts.kernels.quantization import (  # noqa: E402
    dequantized,
    quantized,
    with_alike_scales,
)
from tests.kernels import kernel_checks  # noqa: E402
from tests.kernels.kernel_checks import (  # noqa: E402
    DEVICE,
    DOT_TYPES,
    INTERPRETED,
    assert_close,
    equal_caches,
    hidden_pair,
    make_norm,
    random,
)

pytestmark = kernel_checks.pytestmark
KINDS = pytest.mark.parametrize("kind", [*FOUR_BITS, "int4 with zero points"])
HIDDEN, FFN = (192, 320) if INTERPRETED else (2880, 4096)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def make_packed(
    kind: Any, out: int, size: int, norm: Norm | None, dtype: torch.dtype, *, bias: bool = True
) -> Linear:
    """Outputs of very different sizes, one of them without weights."""
    linear = kernel_checks.make_linear(out, size, norm, bias, torch.float32)
    sizes = 10.0 ** torch.randint(-3, 0, (out, 1), device=DEVICE)
    sizes[1] = 0.0
    quantization: Quantization = "int4" if kind == "int4 with zero points" else kind
    offset = linear.bias.to(dtype) if bias else None
    result = quantized(Linear(linear.weight * sizes, offset, norm), dtype, quantization)
    assert result.quantization == quantization and result.weight.shape == (out, size // 2)
    if kind == quantization:
        return result
    zeros = torch.randint(5, 12, result.scale.shape, dtype=torch.int32, device=DEVICE)
    return replace(result, scale=with_zero_points(result.scale, zeros))


@KINDS
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_packed_projection(kind, rows, dtype):
    linear = make_packed(kind, FFN + 6, HIDDEN, make_norm("rmsnorm", HIDDEN), dtype)
    mine, theirs = hidden_pair(rows, linear)
    got = fused.project_hidden(mine, fused.prepare(linear))
    assert_close(got, reference.project_hidden(theirs, reference.prepare(linear)), dtype)


@KINDS
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_packed_gated_mlp(kind, rows, dtype):
    norm = make_norm("layernorm", HIDDEN)
    up, gate = (make_packed(kind, FFN, HIDDEN, norm, dtype) for _ in range(2))
    down = make_packed(kind, HIDDEN, FFN, None, dtype)
    mine, theirs = hidden_pair(rows, up)
    got = fused.expand(mine, fused.prepare(up), fused.prepare(gate), "silu")
    want = reference.expand(theirs, up, gate, "silu")
    assert_close(got, want, dtype)
    got, want = (
        side.accumulate(want, down, side.hidden(theirs.exact, norm, dtype), norm)
        for side in (fused, reference)
    )
    assert_close(got.exact, want.exact, dtype)


@KINDS
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_packed_attend_own(kind, rows, dtype):
    heads = Heads(4, 2, 16)
    linear = make_packed(kind, 8 * 16, HIDDEN, make_norm("layernorm", HIDDEN), dtype)
    positions = torch.tensor([5, 0, 9][:rows], device=DEVICE)
    starts = torch.tensor([2, 19, 8][:rows], device=DEVICE)
    step = StepRows(starts, positions, positions + 1)
    frequencies = 10.0 ** -torch.arange(4, device=DEVICE).float()
    rotary = reference.rotary_table(torch.arange(20, device=DEVICE), frequencies)
    caches = equal_caches(heads, 20, starts, positions, dtype)
    mine, theirs = hidden_pair(rows, linear)
    more, scores = (heads, rotary, step), AttentionScores(12**-0.5)
    got = fused.attend_own(mine, fused.prepare(linear), *more, caches[0], 20, scores)
    want = reference.attend_own(theirs, linear, *more, caches[1], 20, scores)
    assert_close(got, want, dtype)


def make_experts(kind: str, dtype: torch.dtype) -> ExpertMLPs:
    def stacked(out: int, size: int) -> Linear:
        parts = [make_packed(kind, out, size, None, dtype) for _ in range(4)]
        weight, scale, bias = (
            torch.stack([getattr(part, name) for part in parts])
            for name in ("weight", "scale", "bias")
        )
        return replace(parts[0], weight=weight, scale=scale, bias=bias)

    return ExpertMLPs(stacked(FFN, HIDDEN), stacked(FFN, HIDDEN), stacked(HIDDEN, FFN), "silu")


@KINDS
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", (1, 3, 40) if INTERPRETED else (1, 3, 32, 400))
def test_packed_experts(kind, rows, dtype):
    mlps = make_experts(kind, dtype)
    x = random(rows, HIDDEN, dtype=dtype)
    weights, chosen = random(rows, 4).softmax(-1).topk(2, -1)
    got, want = (side.mixture(x, chosen, weights, mlps).sum(0) for side in (fused, reference))
    assert_close(got, want, dtype)


@KINDS
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_packed_weights_widen_exactly(kind, dtype):
    linear = make_packed(kind, 50, HIDDEN, None, dtype)
    want = dequantized(linear.weight, linear.scale, dtype)
    assert torch.equal(dense(linear).weight.float(), want)


@KINDS
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_packed_sums_through_peer_buffers(kind, dtype):
    buffers = kernel_checks.make_peer_buffers(2, HIDDEN)
    linears = [make_packed(kind, HIDDEN, FFN, None, dtype) for _ in buffers]
    norm = make_norm("rmsnorm", HIDDEN)
    onto = fused.hidden(random(1, HIDDEN), norm, dtype)
    want = onto.exact + linears[0].bias
    for linear, buffer in zip(linears, buffers, strict=True):
        x = random(1, FFN, dtype=dtype)
        peer_buffers.send_product(x, linear, buffer)
        want += reference.partial_product(x, linear)
    got = peer_buffers.receive_sum(linears[0].bias, onto, norm, buffers[1])
    assert_close(got.exact, want, dtype)


def test_packed_gates_may_have_zero_points_alone():
    up = make_packed("int4", 40, HIDDEN, None, torch.float16)
    gate = make_packed("int4 with zero points", 40, HIDDEN, None, torch.float16)
    x = random(2, HIDDEN, dtype=torch.float16)
    one, other = with_alike_scales(up, gate)
    assert other is not up and one.scale.dtype == other.scale.dtype == torch.int32
    assert torch.equal(reference.product(x, one), reference.product(x, up))
