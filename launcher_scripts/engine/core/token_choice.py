"""The rows' next tokens: chosen on the last stage, known to all."""

from __future__ import annotations

import torch
from torch import Tensor

from launcher_scripts.engine.core.log_probs import no_scores
from launcher_scripts.engine.core.row_state import RowStates
from launcher_scripts.engine.core.sampler import Sampled, SamplingBatch, sample
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.network import Network


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
        if sampled is None:
            sampled = self._room(batch.slots, batch)
        return self._everywhere(sampled, batch.slots)

    def largest(self, logits: Tensor | None, slots: Tensor) -> Sampled:
        """The largest logit's token of every row in slots [B]."""
        if logits is None:
            return self._everywhere(self._room(slots), slots)
        return self._everywhere(Sampled(self._network.kernels.argmax(logits)), slots)

    def _room(self, slots: Tensor, batch: SamplingBatch | None = None) -> Sampled:
        """For the last stage's choice on another one; without a batch of the tokens alone."""
        rows, device = slots.shape[0], self._device
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        if batch is None:
            return Sampled(tokens)
        scored = batch.scored
        return Sampled(
            tokens,
            torch.empty(2, rows, device=device) if batch.log_probs else None,
            None if scored is None else no_scores(len(scored.rows), scored.count, device),
        )

    def _everywhere(self, sampled: Sampled, slots: Tensor) -> Sampled:
        """The last stage's choice on every stage."""
        self._communicator.from_last_stage(sampled.tokens)
        if sampled.log_probs is not None:
            self._communicator.from_last_stage(sampled.log_probs)
        if sampled.scores is not None:
            sampled.scores.from_last_stage(self._communicator)
        self._states.token.index_copy_(0, slots, sampled.tokens)
        return sampled
