"""How fast the pairs of a rotary position embedding turn, and the tables of their angles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import RotaryTable
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig

# Of the layers that rotate as the model does, and of the others: by a base of their own, or not.
RotaryTables = tuple[RotaryTable | None, RotaryTable | None]


class Rotary:
    """Cosines and sines of a model's positions.

    frequencies: how fast each pair turns, [rotary_size / 2];  scale: of cosines and sines
    of_row: whether the speeds depend on how long a row is, beside the position (LongRoPE, dynamic
            NTK); then a table of all positions cannot be made beforehand
    """

    of_row = False

    def __init__(self, frequencies: Tensor, device: torch.device, scale: float = 1.0) -> None:
        self._frequencies = frequencies.float().to(device)
        self._scale = scale

    def tables(self, kernels: Ops, positions: Tensor, reach: Tensor | None) -> RotaryTable:
        """Cosines and sines of positions [N].

        reach: int64 [N], the length that each token's row is turned for, where that matters: the
               tokens a row may come to have (LongRoPE), or those it has so far (dynamic)
        """
        frequencies = self._frequencies if reach is None else self._of_rows(reach)
        cosines, sines = kernels.rotary_table(positions, frequencies)
        if self._scale != 1.0:
            return cosines * self._scale, sines * self._scale
        return cosines, sines

    def reach_of_prompt(self, _prompt: int, most: int) -> int:
        """The reach of a prompt's tokens.  most: how many tokens the row may come to have"""
        return most

    def reach_of_next(self, _positions: Tensor, most: Tensor | None) -> Tensor | None:
        """The reach of the tokens that a decode step adds at positions [B]."""
        return most

    def _of_rows(self, _reach: Tensor) -> Tensor:
        return self._frequencies


class LongRotary(Rotary):
    """LongRoPE: rows longer than `original` positions turn at speeds of their own."""

    of_row = True

    def __init__(
        self, short: Tensor, long: Tensor, original: int, device: torch.device, scale: float
    ) -> None:
        super().__init__(short, device, scale)
        self._long, self._original = long.float().to(device), original

    def _of_rows(self, reach: Tensor) -> Tensor:
        return torch.where((reach > self._original)[:, None], self._long, self._frequencies)


class DynamicRotary(Rotary):
    """Dynamic NTK: the base grows with a row that is longer than `original` positions."""

    of_row = True

    def __init__(
        self,
        size: int,
        base: float,
        factor: float,
        original: int,
        device: torch.device,
        scale: float,
    ) -> None:
        super().__init__(plain_frequencies(size, base), device, scale)
        self._size, self._base, self._factor, self._original = size, base, factor, original

    def reach_of_prompt(self, prompt: int, _most: int) -> int:
        return prompt

    def reach_of_next(self, positions: Tensor, _most: Tensor | None) -> Tensor | None:
        return positions + 1

    def _of_rows(self, reach: Tensor) -> Tensor:
        longer = (reach / self._original).double().clamp(min=1)
        growth = (self._factor * longer - (self._factor - 1)) ** (self._size / (self._size - 2))
        base = (self._base * growth)[:, None]
        return (base ** -_exponents(self._size).to(base.device)).float()


def plain_frequencies(size: int, base: float) -> Tensor:
    """Float64 [size / 2]."""
    return base ** -_exponents(size)


def rotaries(config: Any, device: torch.device) -> tuple[Rotary | None, Rotary | None]:
    """Those of a model's layers, in the order of RotaryTables."""
    if config.position_embedding != "rope":
        return None, None
    if not isinstance(config, GPTConfig):
        return Rotary(plain_frequencies(config.head_size, config.rotary_base), device), None
    local = None
    if config.rotary_local_base is not None:
        local = Rotary(plain_frequencies(config.rotary_size, config.rotary_local_base), device)
    return _gpt_rotary(config, device), local


def rotates_otherwise(config: ModelConfig, layer: int) -> bool:
    """Whether a layer takes the second of RotaryTables."""
    own_base = getattr(config, "rotary_local_base", None) is not None
    return not config.rotates(layer) or (own_base and config.window(layer) > 0)


def rotary_tables(
    pair: tuple[Rotary | None, Rotary | None],
    kernels: Ops,
    positions: Tensor,
    reach: Tensor | None = None,
) -> RotaryTables:
    """Of positions [N]; see Rotary.tables."""
    usual, local = pair
    return (
        None if usual is None else usual.tables(kernels, positions, reach),
        None if local is None else local.tables(kernels, positions, None),
    )


def _gpt_rotary(config: GPTConfig, device: torch.device) -> Rotary:
    """As `config`, which has what its rotary_scaling needs, says."""
    size, base = config.rotary_size, config.rotary_base
    plain = plain_frequencies(size, base)
    interpolation, scale = config.rotary_interpolation_factor, config.rotary_attention_factor or 1.0
    original = config.rotary_original_positions or config.max_positions
    factor = config.rotary_scaling_factor or 1.0
    if config.rotary_scaling == "dynamic":
        return DynamicRotary(size, base, factor, original, device, scale)
    if config.rotary_scaling == "longrope":
        short = plain / _factors(config.rotary_factors) / interpolation
        return LongRotary(
            short, plain / _factors(config.rotary_long_factors), original, device, scale
        )
    if config.rotary_scaling == "factors":
        plain = plain / _factors(config.rotary_factors)
    elif config.rotary_scaling == "llama3":
        low = config.rotary_low_frequency_factor or 1.0
        high = config.rotary_high_frequency_factor or 4.0
        plain = _llama3(plain, factor, original, low, high)
    return Rotary(plain / interpolation, device, scale)


def _exponents(size: int) -> Tensor:
    return torch.arange(0, size, 2, dtype=torch.float64) / size


def _factors(text: str | None) -> Tensor:
    return torch.tensor([float(part) for part in (text or "").split(",")], dtype=torch.float64)


def _llama3(frequencies: Tensor, factor: float, original: int, low: float, high: float) -> Tensor:
    """Llama 3.1's rule: pairs that turn less than `low` times within `original` positions turn
    `factor` times slower, those that turn more than `high` times as before, and those in between
    in between.
    """
    turns = original * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor
