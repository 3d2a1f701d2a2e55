"""Positions: tables of rotary angles, relative biases, and slopes of ALiBi."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import RelativeBias, RotaryTable
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig

# Of the layers that rotate as the model does, of those with other bases, and None: of the layers
# that do not rotate.
RotaryTables = tuple[RotaryTable | None, ...]


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

    def tables(self, kernels: Ops, positions: Tensor, max_positions: Tensor | None) -> RotaryTable:
        """Cosines and sines of positions [N].

        max_positions: int64 [N], the length that each token's row is turned for, if relevant: the
               tokens a row may come to have (LongRoPE), or those it has so far (dynamic)
        """
        frequencies = self._frequencies if max_positions is None else self._of_rows(max_positions)
        cosines, sines = kernels.rotary_table(positions, frequencies)
        if self._scale != 1.0:
            return cosines * self._scale, sines * self._scale
        return cosines, sines

    def reach_of_prompt(self, _prompt: int, maximum: int) -> int:
        """The reach of a prompt's tokens.  maximum: how many tokens the row may come to have"""
        return maximum

    def reach_of_next(self, _positions: Tensor, maximum: Tensor | None) -> Tensor | None:
        """The reach of the tokens that a decode step adds at positions [B]."""
        return maximum

    def _of_rows(self, _max_positions: Tensor) -> Tensor:
        return self._frequencies


class LongRotary(Rotary):
    """LongRoPE: rows longer than `original` positions turn at speeds of their own."""

    of_row = True

    def __init__(
        self, short: Tensor, long: Tensor, original: int, device: torch.device, scale: float
    ) -> None:
        super().__init__(short, device, scale)
        self._long, self._original = long.float().to(device), original

    def _of_rows(self, max_positions: Tensor) -> Tensor:
        return torch.where((max_positions > self._original)[:, None], self._long, self._frequencies)


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

    def reach_of_prompt(self, prompt: int, _maximum: int) -> int:
        return prompt

    def reach_of_next(self, positions: Tensor, _maximum: Tensor | None) -> Tensor | None:
        return positions + 1

    def _of_rows(self, max_positions: Tensor) -> Tensor:
        longer = (max_positions / self._original).double().clamp(min=1)
        growth = (self._factor * longer - (self._factor - 1)) ** (self._size / (self._size - 2))
        base = (self._base * growth)[:, None]
        return (base ** -_exponents(self._size).to(base.device)).float()


def plain_frequencies(size: int, base: float) -> Tensor:
    """Float64 [size / 2]."""
    return base ** -_exponents(size)


def rotaries(config: Any, device: torch.device) -> tuple[Rotary | None, ...]:
    """Rotaries of a model's layers, in the order of RotaryTables."""
    if config.position_embedding != "rope":
        return (None,)
    if not isinstance(config, GPTConfig):
        size, factor = config.head_size, config.rotary_interpolation_factor or 1.0
        full = Rotary(plain_frequencies(size, config.rotary_base) / factor, device)
        if config.rotary_local_base is None:
            return full, None
        return full, Rotary(plain_frequencies(size, config.rotary_local_base), device), None
    if config.rotary_layer_bases is not None:
        models = (replace(config, rotary_base=base) for base in _bases(config))
        return *(_gpt_rotary(model, device) for model in models), None
    local = None
    if config.rotary_local_base is not None:
        windowed = [layer for layer in range(config.num_layers) if config.window(layer)]
        size = config.of_layer(windowed[0] if windowed else None).rotary_size
        local = Rotary(plain_frequencies(size, config.rotary_local_base), device)
    return _gpt_rotary(config, device), local, None


def table_of(config: ModelConfig, layer: int) -> int:
    """Returns the index of a layer's table in RotaryTables."""
    if not config.rotates(layer):
        return -1
    if isinstance(config, GPTConfig) and (base := config.layer_base(layer)) is not None:
        return _bases(config).index(base)
    local_base = getattr(config, "rotary_local_base", None) is not None
    return int(local_base and config.window(layer) > 0)


def _bases(config: GPTConfig) -> list[float]:
    """The distinct numbers of rotary_layer_bases above 0; that of the model if there are none."""
    bases = [config.layer_base(layer) for layer in range(config.num_layers)]
    return sorted({base for base in bases if base}) or [config.rotary_base]


def rotary_tables(
    models: Sequence[Rotary | None],
    kernels: Ops,
    positions: Tensor,
    max_positions: Tensor | None = None,
) -> RotaryTables:
    """Return the tables of positions [N]; see Rotary.tables."""
    return tuple(
        None
        if rotary is None
        else rotary.tables(kernels, positions, max_positions if rotary.of_row else None)
        for rotary in models
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
    unscaled = ((turns - low) / max(high - low, 1e-9)).clamp(0, 1)
    return unscaled * frequencies + (1 - unscaled) * frequencies / factor


def relative_bias(table: Tensor, max_distance: int, *, bidirectional: bool) -> RelativeBias:
    """table [heads, buckets], as stored, by distance.

    bidirectional: keys before and after the query have buckets of their own; else only those
    before it count
    """
    buckets = table.shape[1]
    max_bucketed = max(max_distance, buckets)  # every distance from here on is in the last bucket
    distances = torch.arange(-max_bucketed, max_bucketed + 1, device=table.device)
    bucket_indices = distance_buckets(distances, buckets, max_distance, bidirectional=bidirectional)
    return RelativeBias(table.float()[:, bucket_indices].contiguous())


def distance_buckets(
    distances: Tensor, buckets: int, max_distance: int, *, bidirectional: bool
) -> Tensor:
    """The bucket of every key - query in `distances`.

    Half of the buckets are exact, the others logarithmic up to max_distance; in both directions
    the upper half of all buckets is for keys after the query. Rounds as transformers does.
    """
    offset = torch.zeros_like(distances)
    away = (-distances).clamp(min=0)
    if bidirectional:
        buckets //= 2
        offset = (distances > 0) * buckets
        away = distances.abs()
    exact = buckets // 2
    spread = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (spread * (buckets - exact)).long()
    return offset + torch.where(away < exact, away, far.clamp(max=buckets - 1))


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of every head (Press et al. 2022), also where num_heads is no power of two.

    The largest power of two p <= num_heads gives p slopes 2^(-8 i / p); the rest are every other
    slope of 2 p heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes = [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return first + slopes
