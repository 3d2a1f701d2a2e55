"""How the attention of a decode step is divided over programs: measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

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


def attention_shape(longest: int, pairs: int, group: int, dtype: torch.dtype) -> AttentionShape:
    """For contexts up to `longest`; pairs: rows times heads of keys, each with `group` queries.

    Products pay where there are enough pairs to fill the device; a short context is over sooner
    in one piece than with parts to merge.
    """
    short = longest <= 256
    if dtype != torch.float32 and pairs >= (512 if short else 128):
        splits = 1 if short else max(1, min(4, 1024 // pairs))
        return AttentionShape(splits, 64, 4, 3, max(SMALLEST_SIDE, triton.next_power_of_2(group)))
    if short:
        return AttentionShape(1, 128, 8)
    return AttentionShape(min(32, -(-longest // 64)), 64, 4)
