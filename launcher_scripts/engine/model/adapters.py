"""Adapters of a finished model at work: virtual tokens, IA3 and bottlenecks.

In the engine's ids a virtual token is a negative number: -1 - n is row n of its row's prompt table.
It has a position and a place in the cache as any other token does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.messages.plan import NO_TASK, Prompt
from launcher_scripts.kernels.operands import Linear, Norm


@dataclass(frozen=True)
class Adapter:
    """down(silu(up(x))), its layer norm before `up` (in it) or after `down`.

    up: [size / tp, hidden];  down: [hidden, size / tp]
    """

    up: Linear
    down: Linear
    norm_after: Norm | None = None


def scaled(x: Tensor, factors: Tensor | None, tasks: Tensor | None) -> Tensor:
    """x [N, width], each row times its task's factors; tasks [N]."""
    return x if factors is None or tasks is None else x * factors[tasks]


def token_tasks(rows: Sequence[tuple[int, int]], device: torch.device) -> Tensor | None:
    """Every token's row of the IA3 factors, int64 [N]; None where no row has a task.

    rows: task and new tokens of each
    """
    if all(task == NO_TASK for task, _ in rows):
        return None
    counts = torch.tensor([count for _, count in rows])
    tasks = torch.tensor([task for task, _ in rows]).repeat_interleave(counts)
    return tasks.to(device, non_blocking=True)


def with_virtual_tokens(
    x: Tensor,
    ids: Tensor,
    rows: Sequence[tuple[Prompt | None, int]],
    tables: Sequence[Tensor],
) -> Tensor:
    """Token embeddings x float32 [N, hidden] with the virtual tokens of rows that have a prompt.

    rows: prompt and tokens of every row in ids [N];  tables: the loaded ones, [virtual tokens,
          hidden]
    """
    start = 0
    for prompt, count in rows:
        part = slice(start, start + count)
        start += count
        if prompt is None:
            continue
        table = tables[prompt] if isinstance(prompt, int) else prompt
        places = (-1 - ids[part]).clamp(min=0)
        x[part] = torch.where(ids[part, None] < 0, table[places].float(), x[part])
    return x
