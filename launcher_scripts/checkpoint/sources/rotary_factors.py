"""Scalings of rotary positions that are a number for each pair of dimensions, for a GPTConfig."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def as_text(numbers: Iterable[float]) -> str:
    """As a configuration holds them."""
    return ",".join(repr(float(number)) for number in numbers)


def yarn(
    pairs: int,
    base: float,
    factor: float,
    original: int,
    *,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> dict[str, Any]:
    """YaRN (Peng et al. 2023): pairs that turn seldom within the original positions turn `factor`
    times as slowly, those that turn often as before.

    beta_fast, beta_slow: how often is often and seldom;  truncate: to whole pairs
    attention_factor: what cosines and sines are multiplied by; else as the others say
    """

    def place(turns: float) -> float:
        """The pair, as a fraction, that turns so often within the original positions."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    low, high = place(beta_fast or 32.0), place(beta_slow or 1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    slowed = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(pairs)]

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if not attention_factor:
        attention_factor = scale(1.0)
        if mscale and mscale_all_dim:
            attention_factor = scale(mscale) / scale(mscale_all_dim)
    return {
        "rotary_scaling": "factors",
        "rotary_factors": as_text(1 / (share / factor + 1 - share) for share in slowed),
        "rotary_attention_factor": attention_factor,
    }
