"""How source tensors of what mixes tokens besides attention become the stored form; see
layouts.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.layout.inverses import Blocks


def conv_taps(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """Weights [channels, 1, taps] of a convolution as [taps, channels]; a bias stays as it is."""
    (tensor,) = tensors
    return tensor if tensor.ndim == 1 else tensor.reshape(tensor.shape[0], tensor.shape[2]).T


def conv_taps_side_by_side(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """As conv_taps, of queries, keys and values with weights of their own."""
    return [[conv_taps((tensor,), config)] for tensor in tensors]


def _in_units(rows: NDArray[Any], size: int) -> list[NDArray[Any]]:
    """Rows as columns, in units of `size`."""
    return [rows[first : first + size].T for first in range(0, len(rows), size)]


def delta_side_by_side(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """A gated delta net's queries, keys and values in one matrix, then z, b and a: Qwen 3.5's."""
    mixed, *others = tensors
    keys, size = config.delta_key_size, config.delta_key_head_size
    if len(mixed) != config.delta_conv_size:
        raise ValueError(f"{config.delta_conv_size} rows")
    query, key, value = mixed[:keys], mixed[keys : 2 * keys], mixed[2 * keys :]
    remaining = [[part.T] for part in (value, *others)]
    return [_in_units(query, size), _in_units(key, size), *remaining]


def delta_of_key_heads(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows (key head, [query, key, its values, their z]) and (key head, [b, a of its heads]):
    Qwen3-Next's.
    """
    mixed, steps = (
        tensor.reshape(config.delta_num_key_heads, -1, tensor.shape[1]) for tensor in tensors
    )
    size = config.delta_key_head_size
    values = config.delta_value_size // config.delta_num_key_heads
    ends = (size, 2 * size, 2 * size + values)
    query, key, value, gate = np.split(mixed, ends, axis=1)
    beta, decay = np.split(steps, 2, axis=1)
    remaining = [[np.concatenate(part).T] for part in (value, gate, beta, decay)]
    return [[head.T for head in part] for part in (query, key)] + remaining
