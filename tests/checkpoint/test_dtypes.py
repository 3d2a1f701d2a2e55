"""Rounding to bfloat16 bit by bit as torch does it; every other conversion as numpy does it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher_scripts.checkpoint.formats.source_tensor import (
    BFLOAT16,
    as_dtype,
    to_bfloat16,
    widened,
)

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


def half_edges() -> np.ndarray:
    """Every float16, and what lies half-way and next to it between two of them, as float32."""
    halves = np.arange(0x7C01, dtype="<u2").view("<f2").astype("<f4")
    halves[-1] = 65536
    ties = (halves[:-1] + halves[1:]) / 2
    sides = [np.nextafter(ties, np.float32(end)) for end in (0, np.inf)]
    values = np.concatenate([halves, ties, *sides])
    return np.concatenate([values, -values])


def as_half(values: np.ndarray) -> np.ndarray:
    return as_dtype(values, np.dtype("<f2")).view("<u2")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("most", [65519.0, np.inf])
def test_every_half_and_what_is_between(most: float) -> None:
    values = half_edges()
    values = values[np.abs(values) <= most]
    assert np.array_equal(as_half(values), values.astype("<f2").view("<u2"))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_any_bits_as_half(bits: list[int]) -> None:
    values = np.array(bits, "<u4").view("<f4")
    assert np.array_equal(as_half(values), values.astype("<f2").view("<u2"))


def test_beyond_the_range_of_float16_is_infinite_without_a_warning() -> None:
    values = np.array([65519.0, 65520.0, -1e30], "<f4")
    assert as_dtype(values, np.dtype("<f2")).tolist() == [65504.0, np.inf, -np.inf]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("target", ["<f2", "<f4"])
def test_every_bfloat16(target: str) -> None:
    """Twice as many values as are converted at a time."""
    bits = np.tile(np.arange(1 << 16, dtype="<u2"), 2).reshape(2, -1)
    values = (bits.astype("<u4") << 16).view("<f4")
    found = as_dtype(bits.view(BFLOAT16), np.dtype(target))
    expected = values.astype(target)
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("source", ["<f2", "<f4", "<f8"])
@pytest.mark.parametrize("target", [np.dtype("<f2"), np.dtype("<f4"), BFLOAT16])
def test_more_values_than_are_converted_at_a_time(source: str, target: np.dtype) -> None:
    values = np.random.default_rng(0).normal(size=(3, 50_000)).astype(source)
    if target == BFLOAT16:
        expected = rounded_by_torch(values.astype("<f4"))
    else:
        expected = values.astype(target)
    assert as_dtype(values, target).tobytes() == expected.tobytes()
