"""How the attention of a decode step is divided over programs: measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from launcher_scripts.kernels.operands import Heads

SHORT_CONTEXT = 256  # tokens
MEDIUM_CONTEXT = 1024
# Query heads of all rows together.
FEWEST_HEADS = 20
FEWER_HEADS = 48
FEW_HEADS = 128  # about one program per multiprocessor
MANY_HEADS = 512
MOST_HEADS = 1024
SMALLEST_SIDE = 16  # of a matrix product


class AttentionShape(NamedTuple):
    """splits: programs per row and head;  tile: tokens looked at together;  warps, stages of each

    members: query heads of a program that multiplies matrices, padded; 0: a head per program
    """

    splits: int
    tile: int
    warps: int
    stages: int = 3
    members: int = 0


def attention_shape(longest: int, rows: int, heads: Heads, dtype: torch.dtype) -> AttentionShape:
    """For contexts up to `longest` of so many rows.

    A short context is over sooner in one piece than with parts to merge, and few heads leave
    processors idle, which large pieces use best. Longer ones are split over about as many small
    programs, whose waits hide each other, however many heads there are. Where each reads much,
    reading counts alone: matrix products wait least for anything else.
    """
    queries, pairs = rows * heads.num_heads, rows * heads.num_kv_heads
    if longest > SHORT_CONTEXT:
        if queries >= (MANY_HEADS if heads.group > 1 else MOST_HEADS) and dtype != torch.float32:
            members = max(SMALLEST_SIDE, triton.next_power_of_2(heads.group))
            return AttentionShape(max(1, min(16, 1024 // pairs)), 64, 4, members=members)
        return AttentionShape(_splits(longest, queries), 16, 1)
    if queries <= FEW_HEADS:
        return AttentionShape(1, 128, 8)
    return AttentionShape(1, 32, 2) if queries < MANY_HEADS else AttentionShape(1, 16, 1)


def _splits(longest: int, queries: int) -> int:
    """How many programs share a context that is not short."""
    if queries > FEW_HEADS:
        return 8
    if queries > FEWER_HEADS:
        return 16
    return 64 if longest > MEDIUM_CONTEXT and queries <= FEWEST_HEADS else 32
