"""The layers of one pipeline stage: from token ids, or what the stage before sent, to its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import Prompt
from launcher_scripts.engine.model.adapters import with_virtual_tokens
from launcher_scripts.engine.model.layers import ForwardContext, Layer
from launcher_scripts.engine.model.model_weights import StackWeights
from launcher_scripts.kernels.ops import Ops


class Stack:
    """A stage of a decoder or an encoder, with the embedding on the first.

    Hidden states between stages are float32 [N, hidden].
    """

    def __init__(
        self,
        weights: StackWeights,
        layers: Sequence[Layer],
        hidden_size: int,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.embedding = weights.embedding
        self.layers = layers
        self.sublayers = [sublayer for layer in layers for sublayer in layer.sublayers]
        self._prompt_tables = weights.prompt_tables
        self._hidden_size = hidden_size
        self._kernels = kernels
        self._communicator = communicator
        self._device = device

    def embed(
        self, ids: Tensor, positions: Tensor, rows: Sequence[tuple[Prompt | None, int]] = ()
    ) -> Tensor:
        """What the first layer reads of token ids [N] at positions [N]: float32 [N, hidden].

        rows: prompt and tokens of every row, where one may have virtual tokens
        """
        embedding, kernels = self.embedding, self._kernels
        if embedding is None:
            shape = ids.shape[0], self._hidden_size
            received = torch.empty(shape, dtype=torch.float32, device=self._device)
            return self._communicator.from_previous_stage(received)
        own = kernels.embed(ids, embedding.tokens, embedding.first_id)
        x = kernels.sum_over_ranks(own, self._communicator)
        x = x if embedding.scale is None else x * embedding.scale
        x = with_virtual_tokens(x, ids, rows, self._prompt_tables)
        if embedding.positions is not None:
            x = x + kernels.embed(positions, embedding.positions, 0)
        return x if embedding.norm is None else kernels.norm(x, embedding.norm, torch.float32)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        context: ForwardContext[Tensor],
        rows: Sequence[tuple[Prompt | None, int]] = (),
    ) -> Tensor:
        """Float32 [N, hidden] after the stage's last layer, also sent on; as in `embed`."""
        x = self.embed(ids, positions, rows)
        for sublayer in self.sublayers:
            x = sublayer.forward(x, context)
        if not self._communicator.is_last_stage:
            self._communicator.to_next_stage(x)
        return x
