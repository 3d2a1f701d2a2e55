"""How source tensors become the stored form: every layout that a row of the weight table names.

A layout takes the source tensors of one row and returns blocks of units (see reshard.py), or the
whole stored tensor, [in, out] or [out]. Sources are torch's: a linear weight is [out, in], so the
head or half a layout looks for lies along its first axis. All but the arithmetic ones make views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.convert import combining_layouts as combining
from launcher_scripts.checkpoint.convert.reshard import Blocks
from launcher_scripts.checkpoint.formats.dtypes import widened
from launcher_scripts.checkpoint.sources.sinusoidal_positions import sinusoidal_positions

Result = Blocks | NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """A row of LAYOUTS.

    apply:    (source tensors, config) -> the stored form
    sections: how many matrices are stacked along the source's first axis, of each of which a
              tensor-parallel rank of the source holds a part
    whole:    every tensor-parallel rank of the source holds the whole tensor, although the
              target's ranks share it
    """

    apply: Callable[[Sequence[NDArray[Any]], Any], Result]
    sections: int = 1
    whole: bool = False


def as_is(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    (tensor,) = tensors
    return tensor


def transposed(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """[out, in] -> [in, out]; a bias stays as it is."""
    (tensor,) = tensors
    return tensor.T


def plus_one(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """A scale that is stored as its distance from one (NeMo's layernorm1p), in float32."""
    (tensor,) = tensors
    return widened(tensor).astype(np.float32) + np.float32(1)


def first_half(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """The activated matrix of a fused gated MLP [2 ffn, in]."""
    (tensor,) = tensors
    return tensor[: len(tensor) // 2].T


def second_half(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """The multiplied matrix of a fused gated MLP [2 ffn, in]."""
    (tensor,) = tensors
    return tensor[len(tensor) // 2 :].T


def qkv_of_heads(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows (head, [query, key, value], dimension): Megatron's since version 3, BLOOM's."""
    (tensor,) = tensors
    rows = tensor.reshape(config.num_heads, 3, config.head_size, *tensor.shape[1:])
    return [[head[part].T for head in rows] for part in range(3)]


def qkv_of_groups(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows (group, [the group's queries, key, value], dimension): Megatron-LM core's."""
    (tensor,) = tensors
    queries = config.num_heads // config.num_kv_heads
    rows = tensor.reshape(config.num_kv_heads, queries + 2, config.head_size, *tensor.shape[1:])
    return [
        [group[head].T for group in rows for head in range(queries)],
        [group[queries].T for group in rows],
        [group[queries + 1].T for group in rows],
    ]


def qkv_in_blocks(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows ([queries, keys, values], head, dimension): NeMo's megatron_legacy, Phi-3's."""
    (tensor,) = tensors
    heads = [head.T for head in tensor.reshape(-1, config.head_size, *tensor.shape[1:])]
    keys = config.num_heads
    values = (keys + len(heads)) // 2
    return [heads[:keys], heads[keys:values], heads[values:]]


LAYOUTS: dict[str, Layout] = {
    "as_is": Layout(as_is),
    "transposed": Layout(transposed),
    "plus_one": Layout(plus_one),
    "first_half": Layout(first_half, sections=2),
    "second_half": Layout(second_half, sections=2),
    "qkv_of_heads": Layout(qkv_of_heads),
    "qkv_of_groups": Layout(qkv_of_groups),
    "qkv_in_blocks": Layout(qkv_in_blocks, sections=3),
    "qkv_innermost": Layout(combining.qkv_innermost),
    "query_of_heads": Layout(combining.part_of_heads(0, 3)),
    "key_of_heads": Layout(combining.part_of_heads(1, 3)),
    "value_of_heads": Layout(combining.part_of_heads(2, 3)),
    "query_in_blocks": Layout(combining.part_of_blocks(0, 3), sections=3),
    "key_in_blocks": Layout(combining.part_of_blocks(1, 3), sections=3),
    "value_in_blocks": Layout(combining.part_of_blocks(2, 3), sections=3),
    "first_of_two_heads": Layout(combining.part_of_heads(0, 2)),
    "second_of_two_heads": Layout(combining.part_of_heads(1, 2)),
    "transposed_whole": Layout(transposed, whole=True),
    "transposed_columns": Layout(combining.transposed_columns),
    "heads_side_by_side": Layout(combining.heads_side_by_side),
    "interleaved_heads_side_by_side": Layout(combining.interleaved_heads_side_by_side),
    "flattened": Layout(combining.flattened),
    "stacked_rows": Layout(combining.stacked_rows),
    "scaled_by_root_hidden": Layout(combining.scaled_by_root_hidden),
    "without_padding_rows": Layout(combining.without_padding_rows),
    "projected_in": Layout(combining.projected_in),
    "projected_out": Layout(combining.projected_out),
    "sinusoidal_positions": Layout(sinusoidal_positions),
}
