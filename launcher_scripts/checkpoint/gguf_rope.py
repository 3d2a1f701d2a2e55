"""How a GGUF file scales rotary positions, as Hugging Face's rope_parameters.

llama.cpp keeps the rule of Llama 3.1 as the numbers that come out of it: the tensor
`rope_freqs.weight` divides the frequency of every pair. Its parameters are found again here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.gguf_fields import Fields

SCALINGS = ("none", "linear", "yarn", "longrope")
_TOLERANCE = 1e-5
# (low and high frequency factor, original positions) to try: Meta's first, other contexts then.
_USUAL = [(1.0, 4.0, 8192), *((1.0, 4.0, 1 << bits) for bits in range(3, 21))]


def rope_parameters(fields: Fields, rotary_size: int, factors: np.ndarray | None) -> dict[str, Any]:
    """rope_type and its parameters, rope_theta included.

    rotary_size: dimensions of a head that rotate
    factors:     rope_freqs.weight [rotary_size / 2], where the file has it
    """
    base = fields.real("rope.freq_base", 10000.0)
    factor = fields.real("rope.scaling.factor", fields.real("rope.scale_linear", 1.0)) or 1.0
    # A factor without a type scales all positions, as in llama.cpp.
    kind = fields.text("rope.scaling.type", "linear")
    original = fields.get("rope.scaling.original_context_length", None)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if kind not in SCALINGS:
        fields.problems.add("unknown rope.scaling.type", got=kind, choices=SCALINGS)
    elif kind == "linear" and factor != 1.0:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        found |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original or fields.size("context_length"),
            "beta_fast": fields.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": fields.real("rope.scaling.yarn_beta_slow", 1.0),
        }
    if factors is None:
        return found
    if found["rope_type"] != "default":
        fields.problems.add("rope_freqs.weight and rope.scaling.type both scale", got=kind)
        return found
    rule = _llama3(factors.astype(np.float64), base, rotary_size)
    if rule is None:
        fields.problems.add("rope_freqs.weight follows no rule of rope scaling that is known")
        return found
    return found | rule


def _llama3(factors: np.ndarray, base: float, rotary_size: int) -> dict[str, Any] | None:
    """The rule that gives `factors`; None where there is none."""
    if factors.shape != (rotary_size // 2,) or not np.all(np.isfinite(factors) & (factors > 0)):
        return None
    if np.ptp(factors) <= _TOLERANCE:
        factor = float(str(np.float32(factors[0])))
        return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    turns = base ** (-np.arange(0, rotary_size, 2) / rotary_size) / (2 * np.pi)  # per position
    factor = float(str(np.float32(factors.max())))
    for low, high, positions in (*_USUAL, *_fitted(factors, factor, turns)):
        smooth = (positions * turns - low) / (high - low)
        expected = 1 / ((1 - smooth) / factor + smooth)
        expected[smooth < 0] = factor
        expected[smooth > 1] = 1.0
        if np.allclose(factors, expected, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": positions,
            }
    return None


def _fitted(
    factors: np.ndarray, factor: float, turns: np.ndarray
) -> Iterator[tuple[float, float, int]]:
    """Parameters by the pairs in between, of which there must be two. Only the ratios of the three
    count, so the low factor is 1."""
    between = (factors > 1 + _TOLERANCE) & (factors < factor * (1 - _TOLERANCE))
    if between.sum() < 2:
        return
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    slope, start = np.polyfit(turns[between], smooth, 1)
    if slope > 0 > start:
        yield 1.0, float(round(1 - 1 / start, 3)), round(-slope / start)
