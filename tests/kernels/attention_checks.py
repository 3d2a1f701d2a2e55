"""The attention with matrix products equals the reference; run as kernel_checks.py is."""

from __future__ import annotations

import pytest
import torch

from launcher_scripts.kernels import fused_rows
from launcher_scripts.kernels.attention_shapes import AttentionShape, attention_shape
from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import (
    DOT_TYPES,
    pytestmark,  # noqa: F401 - pytest reads it
    seeded,  # noqa: F401 - a fixture
)

grouped_only = pytest.mark.usefixtures("grouped")


@pytest.fixture(params=[1, 4], ids=["whole", "in parts"])
def grouped(request, monkeypatch):
    shape = AttentionShape(request.param, 64, 4, 3, members=16)
    monkeypatch.setattr(fused_rows, "attention_shape", lambda *_: shape)


@grouped_only
@pytest.mark.parametrize(("longest", "alibi"), [(70, False), (300, True)])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_grouped_attention(dtype, longest, alibi):
    checks.test_decode_attention(dtype, longest, alibi)


@grouped_only
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_grouped_attention_with_a_relative_bias(dtype):
    checks.test_decode_attention_with_a_relative_bias(dtype, 300)


@grouped_only
@pytest.mark.parametrize("rotary_size", [0, 8])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_grouped_attention_stores(dtype, rotary_size):
    checks.test_attend_own(3, dtype, 300, rotary_size)


@grouped_only
def test_grouped_counts_of_arrivals_are_left_at_zero():
    checks.test_decode_attention_in_a_step(300, True, True)


def test_products_are_for_many_rows_of_half_precision():
    assert attention_shape(1024, 2048, 1, torch.bfloat16).members == 16
    assert attention_shape(1024, 2048, 32, torch.bfloat16).members == 32
    assert attention_shape(1024, 2048, 1, torch.float32).members == 0
    assert attention_shape(1024, 16, 1, torch.bfloat16).members == 0
    splits = [attention_shape(1024, pairs, 1, torch.float16).splits for pairs in (128, 512, 1024)]
    assert splits == [4, 2, 1]
