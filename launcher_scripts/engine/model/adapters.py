"""Adapters of a finished model at work: virtual tokens, IA3 and bottlenecks.

In the engine's ids a virtual token is a negative number: -1 - n is row n of its row's prompt table.
It has a position and a place in the cache as any other token does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import Linear, Norm
from launcher_scripts.models.adapters import adapters_of

# The last row of every IA3 table: factors of one, for rows without a task.
NO_TASK = -1

# A row's prompt table: the number of a loaded one, or one of its own, [virtual tokens, hidden].
Prompt = int | Tensor


@final
@dataclass(frozen=True)
class IA3Factors:
    """IA3 of one attention and its MLP (Liu et al. 2022), by task: [tasks + 1, width] each.

    qkv:    factors of the projected queries (ones), keys and values
    mlp:    of the MLP's inner activations
    source: of the keys and values of an encoder's states, where there is one
    """

    qkv: Tensor
    mlp: Tensor
    source: Tensor | None = None


@dataclass(frozen=True)
class Adapter:
    """down(silu(up(x))), its layer norm before `up` (in it) or after `down`.

    up: [size / tp, hidden];  down: [hidden, size / tp]
    """

    up: Linear
    down: Linear
    norm_after: Norm | None = None


def layer_adapters(layers: Iterable[Any]) -> list[IA3Factors | Adapter | None]:
    """What works inside of these layers' weights; None for what a layer does not have."""
    return [
        part for layer in layers for part in (layer.ia3, layer.attention_adapter, layer.mlp_adapter)
    ]


def scaled(x: Tensor, factors: Tensor | None, tasks: Tensor | None) -> Tensor:
    """x [N, width], each row times its task's factors; tasks [N]."""
    return x if factors is None or tasks is None else x * factors[tasks]


def token_tasks(
    config: object, tasks: Sequence[int], counts: Sequence[int], device: torch.device
) -> Tensor | None:
    """Every token's row of the IA3 factors, int64 [N]; None for a model without IA3.

    tasks, counts: of every row with new tokens
    """
    if not adapters_of(config).ia3_num_tasks:
        return None
    whole = torch.tensor(tasks).repeat_interleave(torch.tensor(counts))
    return whole.to(device, non_blocking=True)


def with_virtual_tokens(
    x: Tensor,
    ids: Tensor,
    prompts: Sequence[Prompt | None],
    counts: Sequence[int],
    tables: Sequence[Tensor],
) -> Tensor:
    """Token embeddings x float32 [N, hidden] with the virtual tokens of rows that have a prompt.

    prompts, counts: of every row in ids [N];  tables: the loaded ones, [virtual tokens, hidden]
    """
    start = 0
    for prompt, count in zip(prompts, counts, strict=True):
        part = slice(start, start + count)
        start += count
        if prompt is None:
            continue
        table = tables[prompt] if isinstance(prompt, int) else prompt
        rows = (-1 - ids[part]).clamp(min=0)
        x[part] = torch.where(ids[part, None] < 0, table[rows].float(), x[part])
    return x
