"""Sinusoidal positions, which no checkpoint holds: every program computes them.

Sines fill the first half of the hidden axis and cosines the second; frequencies fall from 1 to
about 1/10000 over each half. The numbers are those of transformers to the last bit.
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


def fairseq_sinusoids(_tensors: Sequence[NDArray[Any]], config: Any) -> NDArray[Any]:
    """XGLM's and M2M-100's [max_positions, hidden]; zeros in the padding token's row.

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
    """Marian's and Pegasus' [max_positions, hidden], computed in float64."""
    size = config.hidden_size
    frequency = np.power(10000, 2 * (np.arange(size) // 2) / size)
    angle = np.arange(config.max_positions)[:, None] / frequency  # [max_positions, hidden]
    halves = np.sin(angle[:, 0::2]), np.cos(angle[:, 1::2])
    table: NDArray[Any] = np.concatenate(halves, axis=1).astype(np.float32)
    return table
