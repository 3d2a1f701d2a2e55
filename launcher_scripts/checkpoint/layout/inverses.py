"""From the stored form back to source tensors: the inverses of layouts; and the layouts of mixers
besides attention, which use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import copyable, float32
from launcher_scripts.models.gpt_dialects import CODEGEN_BLOCKS

# Of a table of positions, that of the first token; the rows before are for padding.
FIRST_ROW = 2
Blocks = Sequence[Sequence[NDArray[Any]]]
# Of a source tensor: groups of rows that follow one another, each of arrays side by side.
RowGroups = list[list[NDArray[Any]]]
# (blocks of the stored form, config) -> every source tensor of the row
Inverse = Callable[[Blocks, Any], list[RowGroups]]


def columns_of(blocks: Blocks, _config: Any) -> list[RowGroups]:
    """One tensor that is stored as it is."""
    return [[[unit for block in blocks for unit in block]]]


def row_groups(blocks: Blocks, _config: Any) -> list[RowGroups]:
    """One tensor of all columns, as its rows."""
    return [[[unit.T] for block in blocks for unit in block]]


def rows_of_blocks(blocks: Blocks, _config: Any) -> list[RowGroups]:
    """A tensor for every block."""
    return [[[unit.T] for unit in block] for block in blocks]


def rows_of_groups(blocks: Blocks, config: Any) -> list[RowGroups]:
    """One tensor, of the queries, the key and the value of one group after the other."""
    queries, keys, values = (_heads(block, config.head_size) for block in blocks)
    size = len(queries) // len(keys)
    rows: RowGroups = []
    for index, pair in enumerate(zip(keys, values, strict=True)):
        rows += [[head.T] for head in (*queries[index * size : (index + 1) * size], *pair)]
    return [rows]


def interleaved_rows_of_blocks(blocks: Blocks, config: Any) -> list[RowGroups]:
    """A tensor for every block, where rows of query and key that rotate together are neighbours."""
    query, key, value = (_heads(block, config.head_size) for block in blocks)
    turned = ([[_neighbours(head, config.rotary_size)] for head in heads] for heads in (query, key))
    return [*turned, [[head.T] for head in value]]


def codegen_rows(blocks: Blocks, config: Any) -> list[RowGroups]:
    """One tensor of rows (block, [queries, values, keys], head, dimension)."""
    query, key, value = interleaved_rows_of_blocks(blocks, config)
    size = len(query) // CODEGEN_BLOCKS
    parts = range(0, len(query), size)
    return [[row for at in parts for rows in (query, value, key) for row in rows[at : at + size]]]


def _heads(block: Sequence[NDArray[Any]], size: int) -> list[NDArray[Any]]:
    """The units of a block, cut into heads."""
    starts = ((unit, start) for unit in block for start in range(0, unit.shape[-1], size))
    return [unit[..., start : start + size] for unit, start in starts]


def _neighbours(head: NDArray[Any], turns: int) -> NDArray[Any]:
    """The rows of a head [in, dimension], those of both halves of what rotates in turn."""
    rows, turns = copyable(head).T, turns + turns % 2
    pairs = rows[:turns].reshape(2, turns // 2, *rows.shape[1:]).swapaxes(0, 1)
    full = np.concatenate((pairs.reshape(turns, *rows.shape[1:]), rows[turns:]))
    result: NDArray[Any] = full.view(head.dtype)
    return result


def heads_in_a_row(tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """Weights [heads, dimension] of the norms of heads, one after the other."""
    return _norms_of_heads(tensors, config).reshape(-1)


def interleaved_heads_in_a_row(tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """The same of heads whose neighbours turn together, as the halves of what turns."""
    heads, turns = _norms_of_heads(tensors, config), config.rotary_size
    parts = heads[:, 0:turns:2], heads[:, 1:turns:2], heads[:, turns:]
    row: NDArray[Any] = np.concatenate(parts, axis=1).reshape(-1)
    return row


def _norms_of_heads(tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    (tensor,) = tensors
    if tensor.ndim != 2 or tensor.shape[1] != config.head_size:
        raise ValueError(f"no rows of {config.head_size}")
    return tensor


def neighbouring_heads_in_rows(blocks: Blocks, config: Any) -> list[RowGroups]:
    """The inverse of interleaved_heads_in_a_row."""
    heads = [head for block in blocks for head in _heads(block, config.head_size)]
    return [[[_neighbours(head, config.rotary_size).reshape(1, -1)] for head in heads]]


def neighbouring_rows(head_size: str) -> Inverse:
    """The inverse of interleaved_rope.  head_size: the attribute that says a head's rows"""

    def inverse(blocks: Blocks, config: Any) -> list[RowGroups]:
        heads = [head for block in blocks for head in _heads(block, getattr(config, head_size))]
        return [[[rows] for head in heads for rows in _turned_last(head, config.rotary_size)]]

    return inverse


def _turned_last(head: NDArray[Any], turns: int) -> Sequence[NDArray[Any]]:
    """The rows of a head [in, dimension], of which the last turn: in turn those of both halves."""
    still = head.shape[-1] - turns
    turned = _neighbours(head[..., still:], turns)
    return [head[..., :still].T, turned] if still else [turned]


def swapped_rows_of_blocks(blocks: Blocks, config: Any) -> list[RowGroups]:
    """A tensor for every block, where the halves of queries and keys change places."""
    query, key, value = (_heads(block, config.head_size) for block in blocks)
    half = config.head_size // 2
    swapped = [
        [[rows.T] for head in heads for rows in (head[..., half:], head[..., :half])]
        for heads in (query, key)
    ]
    return [*swapped, [[head.T] for head in value]]


def numbers_of_xielu(blocks: Blocks, _config: Any) -> list[RowGroups]:
    """xIELU's four numbers: two learned ones, vectors of one value, and two fixed ones without
    axes.
    """
    ((values,),) = blocks
    shapes: tuple[tuple[int, ...], ...] = ((1,), (1,), (), ())
    return [[[values[at : at + 1].reshape(shape)]] for at, shape in enumerate(shapes)]


def channels_of_taps(blocks: Blocks, _config: Any) -> list[RowGroups]:
    """Weights [channels, 1, taps] of a convolution; a bias stays as it is."""
    units = [unit for block in blocks for unit in block]
    return [[[unit if unit.ndim == 1 else unit.T[:, None]] for unit in units]]


def one_row(blocks: Blocks, _config: Any) -> list[RowGroups]:
    """A vector as the only row of a matrix."""
    return [[[unit.reshape(1, -1) for block in blocks for unit in block]]]


def sum_of_rows(blocks: Blocks, _config: Any) -> list[RowGroups]:
    """The vector that three rows sum to, in float32."""
    ((rows,),) = blocks
    return [[[float32(rows).sum(axis=0, dtype=np.float32)]]]


def row_of_sums(blocks: Blocks, config: Any) -> list[RowGroups]:
    """The same sums as the only row of a matrix."""
    (((sums,),),) = sum_of_rows(blocks, config)
    return [[[sums.reshape(1, -1)]]]


def divided_by_root_hidden(blocks: Blocks, config: Any) -> list[RowGroups]:
    """Embeddings before their scaling, in float32."""
    ((table,),) = blocks
    return [[[float32(table) / np.float32(math.sqrt(config.hidden_size))]]]


def with_padding_rows(blocks: Blocks, _config: Any) -> list[RowGroups]:
    """A position table, after zeros in the rows that no position uses."""
    ((table,),) = blocks
    return [[[np.zeros((FIRST_ROW, *table.shape[1:]), table.dtype)], [table]]]


def no_tensors(_blocks: Blocks, _config: Any) -> list[RowGroups]:
    """None: the stored form is computed."""
    return []


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
