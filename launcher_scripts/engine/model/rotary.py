"""How fast the pairs of a rotary position embedding turn, and the tables of their angles."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from launcher_scripts.models.gpt import GPTConfig

Tables = tuple[Tensor, Tensor]


class Rotary:
    """Cosines and sines of a model's positions.

    of_row: whether the speeds depend on how long a row is, beside the position (LongRoPE, dynamic
            NTK); then a table of all positions cannot be made beforehand
    """

    def __init__(self, config: GPTConfig, device: torch.device, *, local: bool = False) -> None:
        """local: of the layers with a window, where these turn by a base of their own"""
        self._local_base = config.rotary_local_base if local else None
        scaling = None if self._local_base else config.rotary_scaling
        self.of_row = scaling in ("longrope", "dynamic")
        self._dynamic = scaling == "dynamic"
        self._config = config
        self._scale = 1.0 if self._local_base else config.rotary_attention_factor or 1.0
        self._frequencies = self._make().to(device)
        self._long = None
        if scaling == "longrope":
            self._long = (self._plain() / _factors(config.rotary_long_factors)).float().to(device)

    def tables(self, kernels: ModuleType, positions: Tensor, reach: Tensor | None) -> Tables:
        """Cosines and sines of positions [N], float32 [N, rotary_size / 2].

        reach: int64 [N], the length that each token's row is turned for, where that matters: the
               tokens a row may come to have (LongRoPE), or those it has so far (dynamic)
        """
        frequencies = self._frequencies
        if self._long is not None:
            long = reach > self._config.rotary_original_positions
            frequencies = torch.where(long[:, None], self._long, frequencies)
        elif self._dynamic:
            frequencies = self._stretched(reach)
        cosines, sines = kernels.rotary_table(positions, frequencies)
        if self._scale != 1.0:
            return cosines * self._scale, sines * self._scale
        return cosines, sines

    def reach_of_prompt(self, prompt: int, most: int) -> int:
        """The reach of a prompt's tokens.  most: how many tokens the row may come to have"""
        return prompt if self._dynamic else most

    def reach_of_next(self, positions: Tensor, most: Tensor | None) -> Tensor | None:
        """The reach of the tokens that a decode step adds at positions [B]."""
        return positions + 1 if self._dynamic else most

    def _make(self) -> Tensor:
        config, frequencies = self._config, self._plain()
        if self._local_base:
            return frequencies.float()
        if config.rotary_scaling == "llama3":
            frequencies = _llama3(frequencies, config)
        elif config.rotary_scaling in ("factors", "longrope"):
            frequencies = frequencies / _factors(config.rotary_factors)
        return (frequencies / config.rotary_interpolation_factor).float()

    def _plain(self) -> Tensor:
        size = self._config.rotary_size
        return (self._local_base or self._config.rotary_base) ** -_exponents(size)

    def _stretched(self, reach: Tensor) -> Tensor:
        """Dynamic NTK: the base grows with a row that is longer than rotary_original_positions."""
        config = self._config
        factor, size = config.rotary_scaling_factor, config.rotary_size
        longer = (reach / config.rotary_original_positions).double().clamp(min=1)
        growth = (factor * longer - (factor - 1)) ** (size / (size - 2))
        base = (config.rotary_base * growth)[:, None]
        return (base ** -_exponents(size).to(base.device)).float()


def _exponents(size: int) -> Tensor:
    return torch.arange(0, size, 2, dtype=torch.float64) / size


def _factors(text: str) -> Tensor:
    return torch.tensor([float(part) for part in text.split(",")], dtype=torch.float64)


def _llama3(frequencies: Tensor, config: GPTConfig) -> Tensor:
    """Llama 3.1's rule: pairs that turn less than rotary_low_frequency_factor times within
    rotary_original_positions turn rotary_scaling_factor times slower, those that turn more than
    rotary_high_frequency_factor times as before, and those in between in between.
    """
    low, high = config.rotary_low_frequency_factor, config.rotary_high_frequency_factor
    turns = config.rotary_original_positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / config.rotary_scaling_factor
