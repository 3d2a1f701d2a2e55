"""How fast the pairs of a rotary position embedding turn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from launcher_scripts.models.gpt import GPTConfig


def rotary_frequencies(config: GPTConfig) -> Tensor:
    """Radians per position of every pair, float32 [rotary_size / 2]."""
    exponents = torch.arange(0, config.rotary_size, 2, dtype=torch.float64)
    frequencies = config.rotary_base ** (-exponents / config.rotary_size)
    if config.rotary_scaling == "llama3":
        frequencies = _llama3(frequencies, config)
    return (frequencies / config.rotary_interpolation_factor).float()


def _llama3(frequencies: Tensor, config: GPTConfig) -> Tensor:
    """Llama 3.1's rule: pairs that turn less than rotary_low_frequency_factor times within
    rotary_original_positions turn rotary_scaling_factor times slower, those that turn more than
    rotary_high_frequency_factor times as before, and those in between in between.
    """
    factor, low, high, positions = config.rotary_scaling_numbers
    turns = positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor
