"""XGLM's positions, which no checkpoint holds: every program computes them.

They are computed by torch, with the operations of transformers in their order and in float32: the
model was trained with what torch makes of them, and its sines are not always the nearest floats.
No other export needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.errors import CheckpointError, problem

# The position of the first token; the rows before are for padding.
FIRST_ROW = 2


def sinusoidal_positions(_tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """The table [max_positions, hidden]: sines, then cosines; zeros in the padding token's row.

    Frequencies fall from 1 to 1/10000 over the halves of the hidden axis.
    """
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            problem("XGLM's positions are computed by torch, which is not installed")
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
