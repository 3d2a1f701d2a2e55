"""Operations with weights in bytes: fused equals reference; run as kernel_checks.py is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from launcher_scripts.common.quantization import Quantization  # noqa: E402
from launcher_scripts.kernels import reference  # noqa: E402
from launcher_scripts.kernels.cuda import fused, many_rows, peer_buffers  # noqa: E402
from launcher_scripts.kernels.cuda.compiling import DeviceTraits  # noqa: E402
from launcher_scripts.kernels.cuda.dot import split_hi_lo  # noqa: E402
from launcher_scripts.kernels.cuda.many_rows import fp8_rows, multiplies_fp8  # noqa: E402
from launcher_scripts.kernels.operands import (  # noqa: E402
    AttentionScores,
    Heads,
    Linear,
    Norm,
    StepRows,
)
from launcher_scripts.kernels.quantization import (  # noqa: E402
    BYTE_TYPES,
    dequantized,
    quantized,
    quantized_rows,
)
from tests.kernels import kernel_checks  # noqa: E402
from tests.kernels.kernel_checks import (  # noqa: E402
    DEVICE,
    DOT_TYPES,
    INTERPRETED,
    SIZES,
    assert_close,
    equal_caches,
    hidden_pair,
    make_norm,
    random,
)

pytestmark = kernel_checks.pytestmark
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
BOTH = pytest.mark.parametrize("quantization", list(BYTE_TYPES))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def make_linear(
    quantization: Quantization,
    out: int,
    size: int,
    norm: Norm | None,
    bias: bool,
    compute: torch.dtype = torch.float32,
) -> Linear:
    """Outputs of very different sizes, one of them without weights."""
    linear = kernel_checks.make_linear(out, size, norm, bias, torch.float32)
    sizes = 10.0 ** torch.randint(-2, 2, (out, 1), device=DEVICE)
    sizes[1] = 0.0
    bias = None if linear.bias is None else linear.bias.to(compute)
    return quantized(Linear(linear.weight * sizes, bias, norm), compute, quantization)


def made_norm(kind: str | None, size: int) -> Norm | None:
    return None if kind is None else make_norm(kind, size)


@BOTH
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_general_operations(quantization, rows, dtype):
    size = SIZES[1]
    norm = make_norm("rmsnorm", size[0])
    up, gate = (make_linear(quantization, size[1], size[0], norm, True, dtype) for _ in range(2))
    down = make_linear(quantization, size[0], size[1], None, True, dtype)
    x = random(rows, size[0])
    assert_close(fused.project(x, up), reference.project(x, up), dtype)
    inner = reference.mlp_up(x, up, gate, "silu")
    assert_close(fused.mlp_up(x, up, gate, "silu"), inner, dtype)
    got, want = (side.project_add(inner, down, x) for side in (fused, reference))
    assert_close(got, want, dtype)
    assert_close(fused.logits(x, up), reference.logits(x, up), dtype)


@BOTH
@pytest.mark.parametrize(("kind", "size"), kernel_checks.NORMS_AND_SIZES)
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_project_hidden(quantization, rows, kind, dtype, size):
    linear = make_linear(
        quantization, size[1], size[0], made_norm(kind, size[0]), kind != "rmsnorm", dtype
    )
    mine, theirs = hidden_pair(rows, linear)
    if multiplies_fp8(mine.operand, linear):
        theirs = replace(theirs, operand=dequantized(*quantized_rows(theirs.operand, "fp8")))
    got = fused.project_hidden(mine, fused.prepare(linear))
    assert_close(got, reference.project_hidden(theirs, reference.prepare(linear)), dtype)


@BOTH
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize(("kind", "gated"), [("layernorm", True), ("rmsnorm", False)])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_expand(quantization, rows, kind, gated, dtype):
    size = SIZES[1]
    norm = make_norm(kind, size[0])
    up, gate = (make_linear(quantization, size[1], size[0], norm, True, dtype) for _ in range(2))
    mine, theirs = hidden_pair(rows, up)
    prepared = fused.prepare(gate) if gated else None
    got = fused.expand(mine, fused.prepare(up), prepared, "silu")
    assert_close(got, reference.expand(theirs, up, gate if gated else None, "silu"), dtype)


@BOTH
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_sums(quantization, rows, bias, dtype):
    """Into the residual, and of a rank's part."""
    size = SIZES[0]
    linear = make_linear(quantization, size[1], size[0], None, bias, dtype)
    norm = make_norm("layernorm", size[1])
    x, exact = random(rows, size[0], dtype=dtype), random(rows, size[1])
    got = fused.accumulate(x, linear, fused.hidden(exact, norm, dtype), norm)
    want = reference.accumulate(x, linear, reference.hidden(exact, norm, dtype), norm)
    assert_close(got.exact, want.exact, dtype)
    got, want = (side.partial_product(x, linear) for side in (fused, reference))
    assert_close(got, want, dtype)


@BOTH
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_sums_through_peer_buffers(quantization, dtype):
    size = SIZES[1]
    buffers = kernel_checks.make_peer_buffers(2, size[1])
    linears = [make_linear(quantization, size[1], size[0], None, True, dtype) for _ in buffers]
    norm = make_norm("rmsnorm", size[1])
    onto = fused.hidden(random(1, size[1]), norm, dtype)
    want = onto.exact + linears[0].bias
    for linear, buffer in zip(linears, buffers, strict=True):
        x = random(1, size[0], dtype=dtype)
        peer_buffers.send_product(x, linear, buffer)
        want += reference.partial_product(x, linear)
    got = peer_buffers.receive_sum(linears[0].bias, onto, norm, buffers[1])
    assert_close(got.exact, want, dtype)


@BOTH
@pytest.mark.parametrize("rotary_size", [0, 8])
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_attend_own(quantization, rows, dtype, rotary_size):
    heads, size = Heads(4, 2, 12), SIZES[1][0]
    linear = make_linear(quantization, 8 * 12, size, make_norm("layernorm", size), True, dtype)
    positions = torch.tensor([5, 0, 9][:rows], device=DEVICE)
    starts = torch.tensor([2, 19, 8][:rows], device=DEVICE)
    step = StepRows(starts, positions, positions + 1)
    rotary = None
    if rotary_size:
        frequencies = 10.0 ** -torch.arange(rotary_size // 2, device=DEVICE).float()
        rotary = reference.rotary_table(torch.arange(20, device=DEVICE), frequencies)
    caches = equal_caches(heads, 20, starts, positions, dtype)
    mine, theirs = hidden_pair(rows, linear)
    more, scores = (heads, rotary, step), AttentionScores(12**-0.5)
    got = fused.attend_own(mine, fused.prepare(linear), *more, caches[0], 20, scores)
    want = reference.attend_own(theirs, linear, *more, caches[1], 20, scores)
    assert_close(got, want, dtype)


@BOTH
@pytest.mark.parametrize("rows", [1, 3])
def test_what_lies_behind_a_weight_is_not_read(quantization, rows):
    """The tile reaches beyond the last row and column; there are the largest numbers."""
    size = SIZES[1]
    linear = make_linear(quantization, size[1], size[0], None, False)
    dtype, most = BYTE_TYPES[quantization]
    whole = torch.full((size[1] + 7, size[0]), -most, device=DEVICE).to(dtype)
    whole[: size[1]] = linear.weight
    held = Linear(whole[: size[1]], scale=linear.scale, compute=linear.compute)
    x = random(rows, size[0])
    assert torch.equal(fused.project(x, held), fused.project(x, linear))


@BOTH
@pytest.mark.parametrize("large", [1e-15, 1e-3, 1e12])
def test_inputs_of_all_sizes(quantization, large):
    """int8 is multiplied as the smallest numbers there are; no product is lost."""
    linear = make_linear(quantization, 40, 48, None, False)
    weight = linear.weight.float()
    assert float(weight.min()) < 0 < float(weight.max())
    x = random(1, 48) * large
    assert_close(fused.project(x, linear), reference.project(x, linear), torch.float32)


# The interpreter does not round low bytes to the nearest.
FP8_ERROR = 2.0 ** (-4 if INTERPRETED else -8)


@pytest.mark.parametrize(
    ("kind", "base", "most", "relative"),
    [
        (torch.int8, 256, 32639, 0.0),
        (torch.float8_e4m3fn, 8, 3520, FP8_ERROR),
    ],
)
@pytest.mark.parametrize("columns", [37, 768])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_high_low_and_step_make_a_value(dtype, columns, kind, base, most, relative):
    """Rows have steps of their own, and none of them goes by the row that is zero."""
    sizes = torch.tensor([[1.0], [100.0], [0.0], [1e-3]], device=DEVICE)
    x = (random(4, columns) * sizes).to(dtype)
    hi_lo, steps = split_hi_lo(x, kind)
    assert (hi_lo.shape, hi_lo.dtype) == ((2, 4, columns), kind)
    high, low = hi_lo.float()
    error = ((base * high + low) * steps[:, None] - x.float()).abs()
    assert bool((error <= 0.51 * steps[:, None] + relative * x.float().abs()).all())
    largest = x.float().abs().amax(1)
    assert torch.allclose(steps[[0, 1, 3]] * most, largest[[0, 1, 3]])
    assert not high[2].any() and not low[2].any()


@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_rows_in_fp8(dtype):
    """Of numbers that e4m3 holds, for the interpreter does not round to the nearest."""
    want = random(4, 37).to(torch.float8_e4m3fn)
    want[:, 5] = 448.0
    units = torch.tensor([1.0, 2.0**-12, 0.0, 32.0], device=DEVICE)
    rows, scales = fp8_rows((want.float() * units[:, None]).to(dtype))
    assert torch.equal(scales, units + (units == 0) / 448)
    assert torch.equal(rows.float(), want.float() * (units > 0)[:, None])


@BOTH
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize("rows", (1, 9, 65) if INTERPRETED else (1, 2, 8, 33, 64, 65, 128))
def test_against_float64(quantization, rows, dtype, size):
    """The weight as it was rounded, times inputs that only a product in fp8 rounds."""
    linear = make_linear(quantization, size[1], size[0], None, True, dtype)
    x = random(rows, size[0], dtype=dtype)
    state = fused.hidden(x.float(), None, dtype)
    got = fused.project_hidden(state, fused.prepare(linear)).double()
    exact = x.double() @ dequantized(linear.weight, linear.scale).double().t()
    want = exact + linear.bias.double()
    rounds = multiplies_fp8(x, linear)
    whole = size[0] % 16 == size[1] % 16 == 0
    assert rounds == (
        quantization == "fp8" and rows > 64 and whole and dtype == torch.bfloat16 and HOPPER
    )
    error = (got - want).norm() / want.norm()
    assert error <= (4e-2 if rounds else {torch.float32: 2e-5}.get(dtype, 4e-3))
    if rounds:
        rounded = dequantized(*quantized_rows(x, "fp8")).double()
        exact = rounded @ dequantized(linear.weight, linear.scale).double().t()
        error = (got - exact - linear.bias.double()).norm() / want.norm()
        assert 0 < error <= 1e-2  # the matrix units add e4m3 in fewer bits


@pytest.mark.parametrize("bias", [False, True])
def test_products_in_fp8(bias, monkeypatch):
    """Of inputs that e4m3 holds, two weights at once; torch multiplies e4m3 on a CPU, too."""
    monkeypatch.setattr(many_rows, "traits_of", lambda _: DeviceTraits((9, 0), 0))
    linears = [make_linear("fp8", 48, 32, None, bias, torch.bfloat16) for _ in range(2)]
    whole = random(70, 32).to(torch.float8_e4m3fn).float()
    whole[:, 5] = 448.0
    x = (whole * 2.0 ** torch.arange(-5, 5, device=DEVICE).repeat(7)[:, None]).to(torch.bfloat16)
    assert many_rows.multiplies_fp8(x, linears[0])
    assert not many_rows.multiplies_fp8(x[:64], linears[0])
    for got, linear in zip(many_rows.products(x, linears), linears, strict=True):
        assert_close(got, reference.product(x, linear), torch.bfloat16)
