"""The rows' next tokens: chosen on the last stage, known to all."""

from __future__ import annotations

import torch
from torch import Tensor

from launcher_scripts.engine.communicator import Communicator
from launcher_scripts.engine.network import Network
from launcher_scripts.engine.row_state import RowStates
from launcher_scripts.engine.sampler import Sampled, SamplingBatch, sample


class TokenChoice:
    """Turns logits into tokens and keeps these as what the rows are fed next."""

    def __init__(
        self, network: Network, communicator: Communicator, states: RowStates, device: torch.device
    ) -> None:
        self._network = network
        self._communicator = communicator
        self._states = states
        self._device = device

    def choose(self, logits: Tensor | None, batch: SamplingBatch, longest: int) -> Sampled:
        """One token per row of the batch; logits [B, vocab] on the last stage, else None."""
        if batch.greedy:
            return self.largest(logits, batch.slots)
        sampled = None
        if logits is not None:
            sampled = sample(logits, batch, self._states, self._network.cache.ids, longest)
        return self._everywhere(sampled, batch.slots, log_probs=batch.log_probs)

    def largest(self, logits: Tensor | None, slots: Tensor) -> Sampled:
        """The largest logit's token of every row in slots [B]."""
        sampled = None
        if logits is not None:
            sampled = Sampled(self._network.kernels.argmax(logits), None)
        return self._everywhere(sampled, slots, log_probs=False)

    def _everywhere(self, sampled: Sampled | None, slots: Tensor, *, log_probs: bool) -> Sampled:
        """The last stage's choice on every stage."""
        if sampled is None:
            rows = slots.shape[0]
            values = torch.empty(2, rows, device=self._device) if log_probs else None
            tokens = torch.empty(rows, dtype=torch.int64, device=self._device)
            sampled = Sampled(tokens, values)
        self._communicator.from_last_stage(sampled.tokens)
        if sampled.log_probs is not None:
            self._communicator.from_last_stage(sampled.log_probs)
        self._states.token.index_copy_(0, slots, sampled.tokens)
        return sampled
