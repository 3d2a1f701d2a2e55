"""Layouts that join several tensors, pick one of several, or compute: rows of layouts.LAYOUTS.

Like those of layouts.py they take torch's [out, in] and give [in, out] or blocks of units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.convert.reshard import Blocks
from launcher_scripts.checkpoint.formats.dtypes import widened

Apply = Callable[[Sequence[NDArray[Any]], Any], "Blocks | NDArray[Any]"]

# BART and OPT count positions from here: the rows before are for padding.
PADDING_ROWS = 2


def transposed_columns(tensors: Sequence[NDArray[Any]], _config: Any) -> Blocks:
    """Matrices [out, in] of query, key and value, side by side as [in, out] each."""
    return [[tensor.T] for tensor in tensors]


def heads_side_by_side(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """As transposed_columns, in units of a head, so that heads can be copied to several ranks."""
    size = config.head_size
    return [
        [tensor[head : head + size].T for head in range(0, len(tensor), size)] for tensor in tensors
    ]


def interleaved_heads_side_by_side(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """As heads_side_by_side, where rows of query and key that rotate together are neighbours.

    GPT-J stores the halves of what rotates interleaved; here they follow one another.
    """
    query, key, value = tensors
    turns = config.rotary_size

    def halves(tensor: NDArray[Any]) -> NDArray[Any]:
        heads = tensor.reshape(-1, config.head_size, *tensor.shape[1:])
        pairs = heads[:, :turns].reshape(-1, turns // 2, 2, *tensor.shape[1:]).swapaxes(1, 2)
        first = pairs.reshape(heads[:, :turns].shape)
        whole: NDArray[Any] = np.concatenate((first, heads[:, turns:]), axis=1)
        return whole.reshape(tensor.shape)

    return heads_side_by_side((halves(query), halves(key), value), config)


def part_of_heads(part: int, parts: int) -> Apply:
    """Rows (head, parts, dimension): one of the parts, in units of a head."""

    def apply(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
        (tensor,) = tensors
        rows = tensor.reshape(config.num_heads, parts, config.head_size, *tensor.shape[1:])
        return [[head[part].T for head in rows]]

    return apply


def part_of_blocks(part: int, parts: int) -> Apply:
    """Rows (parts, head, dimension): one of the parts."""

    def apply(tensors: Sequence[NDArray[Any]], _config: Any) -> Blocks:
        (tensor,) = tensors
        rows = len(tensor) // parts
        return [[tensor[part * rows : (part + 1) * rows].T]]

    return apply


def qkv_innermost(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows (head, dimension, [query, key, value]): Megatron-LM's checkpoint version 1."""
    (tensor,) = tensors
    rows = tensor.reshape(config.num_heads, config.head_size, 3, *tensor.shape[1:])
    return [[head[:, part].T for head in rows] for part in range(3)]


def stacked_rows(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """Vectors as the rows of a matrix."""
    return np.stack(tensors)


def flattened(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """A vector stored as a matrix of one row."""
    (tensor,) = tensors
    return tensor.reshape(-1)


def scaled_by_root_hidden(tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """Embeddings times sqrt(hidden_size), in float32."""
    (tensor,) = tensors
    return widened(tensor).astype(np.float32) * np.float32(math.sqrt(config.hidden_size))


def without_padding_rows(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """A position table from the row that the first position uses."""
    (tensor,) = tensors
    return tensor[PADDING_ROWS:]


def projected_in(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """An embedding table [V, width] through a projection [hidden, width], in float32."""
    table, projection = (widened(tensor).astype(np.float32) for tensor in tensors)
    return table @ projection.T


def projected_out(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """An output table [V, width] behind a projection [width, hidden], in float32."""
    table, projection = (widened(tensor).astype(np.float32) for tensor in tensors)
    return table @ projection
