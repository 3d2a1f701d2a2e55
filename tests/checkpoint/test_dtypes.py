"""Rounding to bfloat16, bit by bit as torch does it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher_scripts.checkpoint.dtypes import BFLOAT16, to_bfloat16, widened

EDGES = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF]  # 0, inf, largest
TIES = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0x00008000, 0x00018000]
SUBNORMAL = [0x00000001, 0x007FFFFF, 0x80000001]


def rounded_by_torch(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view("<u2")


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_bits(bits: list[int]) -> None:
    values = np.array(bits + EDGES + TIES + SUBNORMAL, "<u4").view("<f4")
    numbers = values[~np.isnan(values)]
    assert np.array_equal(to_bfloat16(numbers).view("<u2"), rounded_by_torch(numbers))


def test_no_number_stays_none_whatever_its_bits() -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], "<u4")
    values = np.concatenate([bits.view("<f4"), np.ones(2, "<f4")])
    found = widened(to_bfloat16(values))
    assert np.isnan(found).tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 4)])
def test_shapes_and_types(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.asarray(np.random.default_rng(0).normal(size=shape), dtype)
    found = to_bfloat16(values)
    assert found.shape == shape
    assert found.dtype == BFLOAT16
    assert np.array_equal(found.view("<u2"), rounded_by_torch(values.astype("<f4")))


def test_beyond_the_range_of_float32_is_infinite() -> None:
    assert np.isinf(widened(to_bfloat16(np.array([1e300, -1e300])))).all()
