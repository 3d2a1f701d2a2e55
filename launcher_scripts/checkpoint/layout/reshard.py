"""Cutting whole tensors into the parts that tensor-parallel ranks hold.

A tensor to be cut is given as blocks of units: a block is what one entry of `WeightSpec.blocks`
names (query, key, value), and its units are the pieces that must stay together (heads), in order.
A block of a single unit may be cut anywhere on its last axis. Everything here makes views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from launcher_scripts.models.family import ModelConfig, Partition, WeightSpec

Blocks = Sequence[Sequence[NDArray[Any]]]


def rank_columns(
    spec: WeightSpec, config: ModelConfig, tp_size: int, tp_rank: int, blocks: Blocks
) -> list[NDArray[Any]]:
    """The arrays that, side by side along the last axis, are one rank's file.

    Heads that are fewer than the ranks are repeated: with n copies, head h serves the n
    neighbouring slots h*n .. h*n+n-1, which are then divided evenly among the ranks.
    """
    if spec.partition is Partition.ROW_PARALLEL:
        ((whole,),) = blocks
        rows = config.local_size(spec.shape[0], tp_size)
        return [whole[tp_rank * rows : (tp_rank + 1) * rows]]
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


def whole_blocks(spec: WeightSpec, config: ModelConfig, whole: NDArray[Any]) -> Blocks:
    """Blocks of a tensor that already has its stored form: [in, out] or [out].

    Raises ValueError where the hyperparameters say another number of columns.
    """
    if not spec.blocks:
        return [[whole]]
    columns = sum(int(getattr(config, axis)) for axis in spec.blocks)
    if columns != whole.shape[-1]:
        raise ValueError(f"{columns} columns")
    head_size = int(getattr(config, "head_size", 1))
    blocks, start = [], 0
    for axis in spec.blocks:
        stop = start + int(getattr(config, axis))
        heads = range(start, stop, head_size)
        blocks.append([whole[..., head : head + head_size] for head in heads])
        start = stop
    return blocks
