"""How source tensors become the stored form: every layout that a row of the weight table names.

A layout takes the source tensors of one row and returns blocks of units, or the whole stored
tensor, [in, out] or [out]. Sources are torch's: a linear weight is [out, in], so the head or half a
layout looks for lies along its first axis. All but the arithmetic ones make views.

A block is what one entry of `WeightSpec.blocks` names (query, key, value), and its units are the
pieces that tensor-parallel ranks cannot divide (heads), in order. A block of a single unit may be
cut anywhere on its last axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16, as_dtype, float32, widened
from launcher_scripts.checkpoint.layout.inverses import (
    FIRST_ROW,
    Blocks,
    Inverse,
    channels_of_taps,
    codegen_rows,
    columns_of,
    conv_taps,
    conv_taps_side_by_side,
    delta_of_key_heads,
    delta_side_by_side,
    divided_by_root_hidden,
    heads_in_a_row,
    interleaved_heads_in_a_row,
    interleaved_rows_of_blocks,
    neighbouring_heads_in_rows,
    neighbouring_rows,
    no_tensors,
    numbers_of_xielu,
    one_row,
    row_groups,
    row_of_sums,
    rows_of_blocks,
    rows_of_groups,
    sum_of_rows,
    swapped_rows_of_blocks,
    with_padding_rows,
)
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.models.bart import NEVER
from launcher_scripts.models.family import ModelConfig, Partition, WeightSpec
from launcher_scripts.models.gpt_dialects import CODEGEN_BLOCKS


def rank_columns(
    spec: WeightSpec, config: ModelConfig, tp_size: int, tp_rank: int, blocks: Blocks
) -> list[NDArray[Any]]:
    """The arrays that, side by side along the last axis, are one rank's file.

    Heads that are fewer than the ranks are repeated: with n copies, head h serves the n
    neighbouring slots h*n .. h*n+n-1, which are then divided evenly among the ranks.
    """
    if spec.partition is Partition.ROW_PARALLEL:
        ((tensor,),) = blocks
        rows = config.local_size(spec.shape[0], tp_size)
        return [tensor[tp_rank * rows : (tp_rank + 1) * rows]]
    if spec.partition is not Partition.COLUMN_PARALLEL:
        return [unit for block in blocks for unit in block]
    columns: list[NDArray[Any]] = []
    for axis, units in zip(spec.blocks or spec.shape[-1:], blocks, strict=True):
        local = config.local_size(axis, tp_size)
        if len(units) == 1 and units[0].shape[-1] == local * tp_size:
            columns.append(units[0][..., tp_rank * local : (tp_rank + 1) * local])
            continue
        copies = local * tp_size // int(getattr(config, axis))
        share = len(units) * copies // tp_size
        slots = range(tp_rank * share, (tp_rank + 1) * share)
        columns += [units[slot // copies] for slot in slots]
    return columns


def full_blocks(spec: WeightSpec, config: ModelConfig, tensor: NDArray[Any]) -> Blocks:
    """Blocks of a tensor that already has its stored form: [in, out] or [out].

    Raises ValueError where the hyperparameters say another number of columns.
    """
    if not spec.blocks:
        return [[tensor]]
    columns = sum(int(getattr(config, axis)) for axis in spec.blocks)
    if columns != tensor.shape[-1]:
        raise ValueError(f"{columns} columns")
    blocks, start = [], 0
    for axis in spec.blocks:
        stop = start + int(getattr(config, axis))
        size = config.unit_size(axis)
        units = range(start, stop, size)
        blocks.append([tensor[..., unit : unit + size] for unit in units])
        start = stop
    return blocks


# (source tensors, config) -> the stored form
Apply = Callable[[Sequence[NDArray[Any]], Any], Blocks | NDArray[Any]]


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
    turns = config.rotary_size + config.rotary_size % 2  # a single feature turns with the next

    def halves(tensor: NDArray[Any]) -> NDArray[Any]:
        heads = tensor.reshape(-1, config.head_size, *tensor.shape[1:])
        pairs = heads[:, :turns].reshape(-1, turns // 2, 2, *tensor.shape[1:]).swapaxes(1, 2)
        first = pairs.reshape(heads[:, :turns].shape)
        full: NDArray[Any] = np.concatenate((first, heads[:, turns:]), axis=1)
        return full.reshape(tensor.shape)

    return heads_side_by_side((halves(query), halves(key), value), config)


def padded_values_side_by_side(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """As heads_side_by_side, where values are narrower than keys: zeros fill them up."""
    query, key, value = tensors
    heads = value.reshape(config.num_kv_heads, -1, *value.shape[1:])
    widths = [(0, 0)] * heads.ndim
    widths[1] = (0, config.head_size - heads.shape[1])
    return heads_side_by_side(
        (query, key, np.pad(heads, widths).reshape(-1, *value.shape[1:])), config
    )


def padded_inputs(tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """A weight [out, heads * narrow] that reads such values, as [heads * head_size, out]."""
    (tensor,) = tensors
    heads = tensor.reshape(len(tensor), config.num_heads, -1)
    widths = ((0, 0), (0, 0), (0, config.head_size - heads.shape[2]))
    return np.pad(heads, widths).reshape(len(tensor), -1).T


def swapped_heads_side_by_side(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """As heads_side_by_side, of heads that turn the other way: halves of queries and keys swap."""

    def swapped(tensor: NDArray[Any]) -> NDArray[Any]:
        halves = tensor.reshape(-1, 2, config.head_size // 2, *tensor.shape[1:])
        return halves[:, ::-1].reshape(tensor.shape)

    query, key, value = tensors
    return heads_side_by_side((swapped(query), swapped(key), value), config)


def interleaved_rope(head_size: str) -> Apply:
    """Rows (head, [what stays, what turns]) of latent attention, of which those that turn together
    are neighbours: transposed, the halves of what turns one after the other.

    head_size: the attribute of the config that says a head's rows
    """

    def apply(tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
        (tensor,) = tensors
        heads = tensor.reshape(-1, getattr(config, head_size), *tensor.shape[1:])
        still = heads.shape[1] - config.rotary_size
        pairs = heads[:, still:]
        parts = heads[:, :still], pairs[:, 0::2], pairs[:, 1::2]
        full: NDArray[Any] = np.concatenate(parts, axis=1).reshape(tensor.shape).T
        return full

    return apply


def codegen_blocks(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows (block, [queries, values, keys], head, dimension): CodeGen's."""
    (tensor,) = tensors
    parts = tensor.reshape(CODEGEN_BLOCKS, 3, -1, *tensor.shape[1:]).swapaxes(0, 1)
    query, value, key = (part.reshape(-1, *tensor.shape[1:]) for part in parts)
    return interleaved_heads_side_by_side((query, key, value), config)


def gated_heads_side_by_side(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """As heads_side_by_side, where each query has its gate behind it."""
    query, key, value = tensors
    pairs = query.reshape(config.num_heads, 2, config.head_size, *query.shape[1:])
    keys, values = heads_side_by_side((key, value), config)
    return [[head[0].T for head in pairs], keys, values]


def part_of_heads(part: int, parts: int) -> Apply:
    """Rows (head, parts, dimension): one of the parts, in units of a head."""

    def apply(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
        (tensor,) = tensors
        rows = tensor.reshape(config.num_heads, parts, config.head_size, *tensor.shape[1:])
        return [[head[part].T for head in rows]]

    return apply


def part_of_blocks(part: int, parts: int) -> Apply:
    """Rows (parts, dimension), such as the halves of a fused gated MLP: one of the parts."""

    def apply(tensors: Sequence[NDArray[Any]], _config: Any) -> Blocks:
        (tensor,) = tensors
        return [[tensor.reshape(parts, -1, *tensor.shape[1:])[part].T]]

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
    """A vector stored with further axes of size 1."""
    (tensor,) = tensors
    if max(tensor.shape, default=1) != tensor.size:
        raise ValueError("it has several axes")
    return tensor.reshape(-1)


def flattened_without_padding(tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """A bias of the logits, stored as one row, that keeps the padding token out of every text."""
    bias = float32(flattened(tensors, config)).copy()
    bias[config.pad_id] = NEVER
    return bias


def scaled_by_root_hidden(tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """Embeddings times sqrt(hidden_size), in float32."""
    (tensor,) = tensors
    return float32(tensor) * np.float32(math.sqrt(config.hidden_size))


def without_padding_rows(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """A position table of BART or OPT from the row that the first position uses."""
    (tensor,) = tensors
    return tensor[FIRST_ROW:]


def projected_in(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """An embedding table [V, width] through a projection [hidden, width], in float32."""
    table, projection = map(float32, tensors)
    tensor: NDArray[Any] = table @ projection.T
    return tensor


def projected_out(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """An output table [V, width] behind a projection [width, hidden], in float32."""
    table, projection = map(float32, tensors)
    tensor: NDArray[Any] = table @ projection
    return tensor


def filled(value: float, size: str = "hidden_size") -> Apply:
    """The weight or bias of a norm that has none.  size: the attribute that says how many"""
    return lambda _, config: np.full(getattr(config, size), value, np.float32)


def scalars(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """Tensors of one value each, xIELU's, as a vector."""
    return np.concatenate([float32(tensor.reshape(-1)) for tensor in tensors])


def summands(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """A vector [n] as three rows of bfloat16 values that sum to it in float32: [3, n]."""
    (tensor,) = tensors
    remaining, rows = float32(tensor).reshape(-1), []
    for _ in range(3):
        rows.append(widened(as_dtype(remaining, BFLOAT16)))
        remaining = remaining - rows[-1]
    return np.stack(rows)


def offset_ids(tensors: Sequence[NDArray[Any]], _config: Any) -> NDArray[Any]:
    """Ids [n], each stored less its index, as three digits to the base 256: any type holds them."""
    (offsets,) = tensors
    ids = offsets.astype(np.int64) + np.arange(len(offsets))
    return np.stack([(ids >> bits & 255).astype(np.float32) for bits in (16, 8, 0)])


def fairseq_sinusoids(_tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """Positions of XGLM and M2M-100, [max_positions, hidden]; zeros in the padding token's row.

    No checkpoint holds them. Sines fill the first half of the hidden axis and cosines the second;
    frequencies fall from 1 to about 1/10000 over each half. The numbers are those of transformers
    to the last bit.

    Computed by torch in float32: the models were trained with what torch makes of them, and its
    sines are not always the nearest floats. No other export needs torch.
    """
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            problem("the model's positions are computed by torch, which is not installed")
        ) from error
    half, rows = config.hidden_size // 2, FIRST_ROW + config.max_positions
    step = -math.log(10000) / max(half - 1, 1)
    frequency = torch.exp(torch.arange(half, dtype=torch.float32) * step)
    angle = torch.arange(rows, dtype=torch.float32)[:, None] * frequency  # [rows, half]
    table = np.zeros((rows, config.hidden_size), np.float32)
    table[:, :half] = torch.sin(angle).numpy()
    table[:, half : 2 * half] = torch.cos(angle).numpy()
    if config.pad_id is not None and config.pad_id < rows:
        table[config.pad_id] = 0
    return table[FIRST_ROW:]


def sinusoids(_tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """The same of Marian and Pegasus, computed in float64."""
    size = config.hidden_size
    frequency = np.power(10000, 2 * (np.arange(size) // 2) / size)
    angle = np.arange(config.max_positions)[:, None] / frequency  # [max_positions, hidden]
    halves = np.sin(angle[:, 0::2]), np.cos(angle[:, 1::2])
    table: NDArray[Any] = np.concatenate(halves, axis=1).astype(np.float32)
    return table


@dataclass(frozen=True)
class Layout:
    """A row of LAYOUTS.

    sections: how many matrices are stacked along the source's first axis, of each of which a
              tensor-parallel rank of the source holds a part
    full:     every tensor-parallel rank of the source holds the whole tensor, although the
              target's ranks share it
    inverse:  from the stored form to the source tensors; None if it is unknown
    part:     position of the row among the rows that share one source tensor
    is_exact: apply and inverse give the same bits back
    joined:   its source is made of several tensors of the files
    rows:     config -> how many rows each source has, where a source is several blocks
    """

    apply: Apply
    sections: int = 1
    full: bool = False
    inverse: Inverse | None = None
    part: int = 0
    is_exact: bool = True
    joined: bool = False
    rows: Callable[[Any], tuple[int, ...]] | None = None


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
    return float32(tensor) + np.float32(1)


def qkv_of_heads(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows (head, [query, key, value], dimension): Megatron's since version 3, BLOOM's."""
    (tensor,) = tensors
    rows = tensor.reshape(config.num_heads, 3, config.head_size, *tensor.shape[1:])
    return [[head[part].T for head in rows] for part in range(3)]


def qkv_of_groups(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows (group, [the group's queries, key, value], dimension): Megatron-LM core's; queries may
    be followed by their gates.
    """
    (tensor,) = tensors
    queries = config.num_heads // config.num_kv_heads
    count = (2 if config.attention_output_gate else 1) * queries + 2
    rows = tensor.reshape(config.num_kv_heads, count, config.head_size, *tensor.shape[1:])
    heads = [group[head].T for group in rows for head in range(queries)]
    return [heads, *([group[part].T for group in rows] for part in (-2, -1))]


def gates_of_groups(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows (group, [its queries, their gates, key, value], dimension): the gates."""
    (tensor,) = tensors
    rows = tensor.reshape(config.num_kv_heads, -1, config.head_size, *tensor.shape[1:])
    queries = config.num_heads // config.num_kv_heads
    return [[group[queries + head].T for group in rows for head in range(queries)]]


def qkv_in_blocks(tensors: Sequence[NDArray[Any]], config: Any) -> Blocks:
    """Rows ([queries, keys, values], head, dimension): NeMo's megatron_legacy, Phi-3's."""
    (tensor,) = tensors
    heads = [head.T for head in tensor.reshape(-1, config.head_size, *tensor.shape[1:])]
    keys = config.num_heads
    values = (keys + len(heads)) // 2
    return [heads[:keys], heads[keys:values], heads[values:]]


LAYOUTS: dict[str, Layout] = {
    "as_is": Layout(as_is, inverse=columns_of),
    "transposed": Layout(transposed, inverse=row_groups),
    "plus_one": Layout(plus_one),
    "first_half": Layout(part_of_blocks(0, 2), sections=2, inverse=row_groups),
    "second_half": Layout(part_of_blocks(1, 2), sections=2, inverse=row_groups, part=1),
    "qkv_of_heads": Layout(qkv_of_heads, inverse=rows_of_groups),
    "qkv_of_groups": Layout(qkv_of_groups, inverse=rows_of_groups),
    "gates_of_groups": Layout(gates_of_groups),
    "qkv_in_blocks": Layout(qkv_in_blocks, sections=3, inverse=row_groups),
    "qkv_innermost": Layout(qkv_innermost),
    "query_of_heads": Layout(part_of_heads(0, 3)),
    "key_of_heads": Layout(part_of_heads(1, 3)),
    "value_of_heads": Layout(part_of_heads(2, 3)),
    "query_in_blocks": Layout(part_of_blocks(0, 3), sections=3),
    "key_in_blocks": Layout(part_of_blocks(1, 3), sections=3),
    "value_in_blocks": Layout(part_of_blocks(2, 3), sections=3),
    "first_of_two_heads": Layout(part_of_heads(0, 2)),
    "second_of_two_heads": Layout(part_of_heads(1, 2)),
    "transposed_whole": Layout(transposed, full=True),
    "transposed_columns": Layout(transposed_columns, inverse=rows_of_blocks),
    "heads_side_by_side": Layout(heads_side_by_side, inverse=rows_of_blocks),
    "interleaved_heads_side_by_side": Layout(
        interleaved_heads_side_by_side, inverse=interleaved_rows_of_blocks
    ),
    "codegen_blocks": Layout(codegen_blocks, inverse=codegen_rows),
    "flattened": Layout(flattened, inverse=one_row),
    "flattened_without_padding": Layout(flattened_without_padding, inverse=one_row, is_exact=False),
    "swapped_heads_side_by_side": Layout(
        swapped_heads_side_by_side, inverse=swapped_rows_of_blocks
    ),
    "heads_in_a_row": Layout(heads_in_a_row, joined=True),
    "interleaved_heads_in_a_row": Layout(
        interleaved_heads_in_a_row, inverse=neighbouring_heads_in_rows
    ),
    "padded_values_side_by_side": Layout(padded_values_side_by_side),
    "padded_inputs": Layout(padded_inputs),
    "interleaved_rope_of_heads": Layout(
        interleaved_rope("head_size"), inverse=neighbouring_rows("head_size")
    ),
    "interleaved_rope_of_latent": Layout(
        interleaved_rope("kv_down_size"), inverse=neighbouring_rows("kv_down_size")
    ),
    "gated_heads_side_by_side": Layout(
        gated_heads_side_by_side,
        rows=lambda config: (2 * config.q_size, config.kv_size, config.kv_size),
    ),
    "conv_taps": Layout(conv_taps, inverse=channels_of_taps),
    "conv_taps_side_by_side": Layout(conv_taps_side_by_side),
    "delta_side_by_side": Layout(
        delta_side_by_side,
        rows=lambda config: (
            *(config.delta_conv_size, config.delta_value_size),
            *(config.delta_num_heads, config.delta_num_heads),
        ),
    ),
    "delta_of_key_heads": Layout(
        delta_of_key_heads,
        rows=lambda config: (
            config.delta_conv_size + config.delta_value_size,
            2 * config.delta_num_heads,
        ),
    ),
    "stacked_rows": Layout(stacked_rows),
    "summands": Layout(summands, inverse=sum_of_rows),
    "summands_of_row": Layout(summands, inverse=row_of_sums),
    "offset_ids": Layout(offset_ids),
    "scaled_by_root_hidden": Layout(
        scaled_by_root_hidden, inverse=divided_by_root_hidden, is_exact=False
    ),
    "without_padding_rows": Layout(without_padding_rows, inverse=with_padding_rows, is_exact=False),
    "projected_in": Layout(projected_in),
    "projected_out": Layout(projected_out),
    "fairseq_sinusoids": Layout(fairseq_sinusoids, inverse=no_tensors),
    "sinusoids": Layout(sinusoids, inverse=no_tensors),
    "zeros": Layout(filled(0), inverse=no_tensors),
    "ones": Layout(filled(1), inverse=no_tensors),
    "ones_of_head": Layout(filled(1, "head_size"), inverse=no_tensors),
    "scalars": Layout(scalars, inverse=numbers_of_xielu),
}
