"""How the attention of a decode step is divided over programs: measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch

MANY_PAIRS = 128
SMALLEST_SIDE = 16  # of a matrix product


class AttentionShape(NamedTuple):
    """splits: programs per row and head;  tile: tokens looked at together;  warps, stages of each

    members: query heads of a program that multiplies matrices, padded; 0: a head per program
    """

    splits: int
    tile: int
    warps: int
    stages: int = 2
    members: int = 0


def attention_shape(longest: int, pairs: int, group: int, dtype: torch.dtype) -> AttentionShape:
    """For contexts up to `longest`; pairs: rows times heads of keys, each with `group` queries.

    A short context is over sooner in one piece than with parts to merge.
    """
    if pairs >= MANY_PAIRS and dtype != torch.float32:
        return AttentionShape(1, 64, 4, 3, max(SMALLEST_SIDE, group))
    if longest <= 256:
        return AttentionShape(1, 128, 8)
    return AttentionShape(min(32, -(-longest // 64)), 64, 4)
