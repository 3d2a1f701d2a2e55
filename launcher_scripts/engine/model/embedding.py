"""From token ids to the hidden states that go into the first layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.weights import Embedding
from launcher_scripts.kernels.ops import Ops


def embed(
    embedding: Embedding,
    ids: Tensor,
    positions: Tensor,
    kernels: Ops,
    communicator: Communicator,
    replaced: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Float32 [N, hidden] of token ids [N] at positions [N].

    replaced: what becomes of the tokens' embeddings before their positions are added
    """
    x = kernels.embed(ids, embedding.tokens, embedding.first_id)
    x = communicator.tp_sum(x)
    x = replaced(x if embedding.scale is None else x * embedding.scale)
    if embedding.positions is not None:
        x = x + kernels.embed(positions, embedding.positions, 0)
    return x if embedding.norm is None else kernels.norm(x, embedding.norm, torch.float32)
