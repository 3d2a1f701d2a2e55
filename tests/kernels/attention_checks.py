"""The attention with matrix products equals the reference; run as kernel_checks.py is."""

from __future__ import annotations

import pytest
import torch

from launcher_scripts.kernels.cuda import decode_attention
from launcher_scripts.kernels.cuda.decode_attention import AttentionShape, attention_shape
from launcher_scripts.kernels.operands import Heads
from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import (
    CACHES,
    pytestmark,  # noqa: F401 - pytest reads it
    seeded,  # noqa: F401 - a fixture
)

grouped_only = pytest.mark.usefixtures("grouped")


@pytest.fixture(params=[(1, 64), (4, 32)], ids=["whole", "in parts"])
def grouped(request, monkeypatch):
    splits, tile = request.param
    shape = AttentionShape(splits, tile, 2, 4, members=16, prefetch=tile)
    monkeypatch.setattr(decode_attention, "attention_shape", lambda *_: shape)


@grouped_only
@pytest.mark.parametrize(("longest", "alibi"), [(70, False), (300, True)])
@pytest.mark.parametrize(("dtype", "kept"), CACHES)
def test_grouped_attention(dtype, kept, longest, alibi):
    checks.test_decode_attention(dtype, kept, longest, alibi)


@grouped_only
@pytest.mark.parametrize(("dtype", "kept"), CACHES)
def test_grouped_attention_with_a_relative_bias(dtype, kept):
    checks.test_decode_attention_with_a_relative_bias(dtype, kept, 300)


@grouped_only
@pytest.mark.parametrize("rotary_size", [0, 8])
@pytest.mark.parametrize(("dtype", "kept"), CACHES)
def test_grouped_attention_stores(dtype, kept, rotary_size):
    checks.test_attend_own(3, dtype, kept, 300, rotary_size)


@grouped_only
def test_grouped_counts_of_arrivals_are_left_at_zero():
    checks.test_decode_attention_in_a_step(300, True, True)


@pytest.mark.parametrize(
    ("longest", "rows", "heads", "dtype", "members", "splits"),
    [
        (1024, 128, Heads(16, 16, 128), torch.bfloat16, 16, 1),
        (1024, 64, Heads(16, 16, 128), torch.float16, 16, 1),
        (1024, 32, Heads(16, 4, 128), torch.float16, 16, 2),
        (1024, 128, Heads(64, 2, 128), torch.bfloat16, 32, 1),
        (1024, 8, Heads(32, 8, 128), torch.bfloat16, 16, 4),
        (1024, 4, Heads(32, 8, 128), torch.bfloat16, 0, 16),
        (1024, 16, Heads(32, 1, 128), torch.bfloat16, 32, 16),
        (1024, 128, Heads(16, 16, 128), torch.float32, 0, 8),
        (1024, 16, Heads(16, 16, 128), torch.bfloat16, 16, 2),
        (1024, 8, Heads(16, 16, 128), torch.bfloat16, 0, 16),
        (256, 128, Heads(16, 16, 128), torch.bfloat16, 0, 1),
        (256, 32, Heads(16, 16, 128), torch.bfloat16, 16, 1),
        (256, 16, Heads(32, 8, 128), torch.bfloat16, 16, 1),
        (256, 8, Heads(32, 8, 128), torch.bfloat16, 0, 1),
    ],
)
def test_products_are_for_many_rows_of_half_precision(longest, rows, heads, dtype, members, splits):
    shape = attention_shape(longest, rows, heads, dtype)
    assert (shape.members, shape.splits) == (members, splits)
