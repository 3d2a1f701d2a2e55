"""Strips of views are, one after another, exactly the file numpy's tofile would write."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16, as_dtype
from launcher_scripts.checkpoint.layout import writing
from launcher_scripts.checkpoint.layout.writing import NonfiniteValues, UnfitValues, strips
from launcher_scripts.common.errors import CheckpointError

F4, F2 = np.dtype("<f4"), np.dtype("<f2")


def content(columns: list[np.ndarray], dtype: np.dtype, **more: bool) -> bytes:
    pieces = strips(columns, dtype, "t", **more)
    return b"".join(np.ascontiguousarray(piece).tobytes() for piece in pieces)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 700),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    flipped=st.booleans(),
    source=st.sampled_from([F4, F2, np.dtype("<f8")]),
    target=st.sampled_from([F4, F2]),
    strip_bytes=st.sampled_from([64, 4096, 1 << 21]),
)
def test_any_columns(
    rows: int,
    widths: list[int],
    flipped: bool,
    source: np.dtype,
    target: np.dtype,
    strip_bytes: int,
) -> None:
    random = np.random.default_rng(rows)
    columns = [
        random.standard_normal((width, rows)).astype(source).T
        if flipped
        else random.standard_normal((rows, width)).astype(source)
        for width in widths
    ]
    expected = np.concatenate(columns, axis=-1).astype(target).tobytes()
    before, writing.STRIP_BYTES = writing.STRIP_BYTES, strip_bytes
    try:
        assert content(columns, target) == expected
    finally:
        writing.STRIP_BYTES = before


def test_vectors_side_by_side() -> None:
    parts = [np.arange(3, dtype=F4), np.arange(5, dtype=F4)]
    assert content(parts, F4) == np.concatenate(parts).tobytes()


def test_bfloat16_widens_exactly() -> None:
    bits = np.arange(1 << 16, dtype="<u2").reshape(256, 256)
    bits = bits[(bits & 0x7F80 != 0x7F80).all(axis=1)]
    expected = (bits.astype("<u4") << 16).view("<f4")
    assert content([bits.view(BFLOAT16)], F4) == expected.tobytes()
    assert content([bits.view(BFLOAT16).T], F4) == np.ascontiguousarray(expected.T).tobytes()


@pytest.mark.parametrize("value", [65520.0, -65520.0, 1e38])
def test_overflow(value: float) -> None:
    values = np.zeros((4, 4), F4)
    values[2, 1] = value
    with pytest.raises(
        CheckpointError, match=f"t does not fit fp16.*{re.escape(f'{abs(value):g}')}"
    ):
        content([values], F2)
    assert content([values], F4) == values.tobytes()


def test_the_largest_half_fits() -> None:
    values = np.array([65504.0, -65504.0, 65519.0], F4)
    assert content([values], F2) == np.array([65504, -65504, 65504], F2).tobytes()


@pytest.mark.parametrize(("value", "dtype"), [(1e300, F4), (1e300, BFLOAT16), (3.4e38, BFLOAT16)])
def test_overflow_of_wider_types(value: float, dtype: np.dtype) -> None:
    values = np.array([0, -value, 1], "<f8")
    kind = "fp32" if dtype == F4 else "bf16"
    with pytest.raises(UnfitValues, match=re.escape(f"fit {kind}: its values reach {value:g}")):
        content([values], dtype)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("source", [F4, F2, BFLOAT16])
@pytest.mark.parametrize("dtype", [F4, F2, BFLOAT16])
def test_what_is_no_finite_number(value: float, source: np.dtype, dtype: np.dtype) -> None:
    """It passes only where it is asked for, and is not an overflow of the export's making."""
    values = np.ones((70, 50), F4)
    values[69, 48] = value
    values = as_dtype(values, source).copy()
    for columns in ([values], [values.T]):
        with pytest.raises(NonfiniteValues, match="t has NaN or infinite values"):
            content(columns, dtype)
        expected = as_dtype(np.ascontiguousarray(columns[0]), dtype)
        assert content(columns, dtype, allow_nonfinite=True) == expected.tobytes()


def test_little_memory() -> None:
    values = np.zeros((4096, 1024), F4)
    tracemalloc.start()
    for _ in strips([values.T], F2, "t"):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * writing.STRIP_BYTES
