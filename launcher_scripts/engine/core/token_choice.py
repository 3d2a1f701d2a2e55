"""The rows' next tokens: chosen on the last stage, known to all."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from launcher_scripts.engine.core.log_probs import no_scores
from launcher_scripts.engine.core.plan import Choice
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

    def choose(self, logits: Tensor | None, batch: SamplingBatch) -> Sampled:
        """One token per row of the batch; logits [B, vocab] on the last stage, else None.

        The logits may be overwritten.
        """
        if batch.choice != Choice.EAGER:
            return batch.wanted(self.by_choice(logits, batch.slots, batch.choice))
        if logits is None:
            sampled = self._room(batch)
        else:
            ids, kernels = self._network.cache.ids, self._network.kernels
            sampled = sample(logits, batch, self._states, ids, kernels)
        return batch.wanted(self._everywhere(sampled, batch.slots))

    def by_choice(self, logits: Tensor | None, slots: Tensor, choice: Choice) -> Sampled:
        """`choose` for the rows in slots [B], whose parameters the device alone looks at.

        No choice is EAGER. Log-probabilities come with all but GREEDY.
        """
        kernels, states = self._network.kernels, self._states
        if logits is None:
            sampled = self._tokens_room(slots.shape[0], log_probs=choice != Choice.GREEDY)
        elif choice == Choice.GREEDY:
            sampled = Sampled(kernels.argmax(logits))
        else:
            if choice == Choice.PROCESSED:
                logits = kernels.process(logits, slots, states, self._network.cache.ids)
            sampled = Sampled(*kernels.sample(logits, slots, states))
        return self._everywhere(sampled, slots)

    def _room(self, batch: SamplingBatch) -> Sampled:
        """For the last stage's eager choice on another one."""
        room = self._tokens_room(batch.slots.shape[0], log_probs=True)
        scored = batch.scored
        if scored is None:
            return room
        return replace(room, scores=no_scores(len(scored.rows), scored.count, self._device))

    def _tokens_room(self, rows: int, *, log_probs: bool) -> Sampled:
        return Sampled(
            torch.empty(rows, dtype=torch.int64, device=self._device),
            torch.empty(2, rows, device=self._device) if log_probs else None,
        )

    def _everywhere(self, sampled: Sampled, slots: Tensor) -> Sampled:
        """The last stage's choice on every stage."""
        self._communicator.from_last_stage(sampled.tokens)
        if sampled.log_probs is not None:
            self._communicator.from_last_stage(sampled.log_probs)
        if sampled.scores is not None:
            sampled.scores.from_last_stage(self._communicator)
        kept = sampled.log_probs is not None  # by Ops.sample, on the last stage
        if not kept or self._communicator.parallelism.pp_size > 1:
            self._states.token.index_copy_(0, slots, sampled.tokens)
        return sampled
