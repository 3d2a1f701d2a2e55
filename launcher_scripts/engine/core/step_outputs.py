"""Outputs of a step: the next tokens on every rank, and results about prompts.

What requests may ask for about their prompts: logits, log-probabilities, and the sum of the
hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from launcher_scripts.engine.core.results import Arrivals, ScoreCopy, StepResult, TokenCopy
from launcher_scripts.engine.core.row_state import RowStates, indices
from launcher_scripts.engine.core.sampler import (
    Sampled,
    SamplingBatch,
    TokenScores,
    no_scores,
    sample,
    scores_of,
)
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import Choice, PrefillPart, RowStart
from launcher_scripts.engine.model.network import Network

LINES_PER_STEP = 3  # of prompts, of rows that decode, and of those that do so apart
STEPS_UNDER_WAY = 3  # at most, and a step more for each further pipeline stage


class TokenChoice:
    """Turns logits into tokens and keeps these as what the rows are fed next."""

    def __init__(
        self, network: Network, communicator: Communicator, states: RowStates, device: torch.device
    ) -> None:
        self._network = network
        self._communicator = communicator
        self._stages = communicator.parallelism.pp_size
        self._states = states
        self._device = device
        self._arrivals = None
        if communicator.rank == 0:  # the others' hosts look at no tokens
            lines, padding = LINES_PER_STEP * (self._stages + STEPS_UNDER_WAY), states.padding_slot
            self._arrivals = Arrivals(lines, padding + 1, padding, device, network.kernels)

    def choose(self, logits: Tensor | None, batch: SamplingBatch) -> Sampled:
        """One token per row of the batch; logits [B, vocab] on the last stage, else None.

        The logits may be overwritten.
        """
        sampled, arrive = self._shared(self.chosen(logits, batch), batch)
        arrive()
        return sampled

    def give(
        self,
        result: StepResult,
        slots: Sequence[int],
        sampled: Sampled | None,
        batch: SamplingBatch,
    ) -> None:
        """Put the tokens of the rows in `slots`, which come first in the batch, into the result.

        sampled: what was chosen, on the last stage. Other stages do not wait for it here: they have
                 the tokens when the result is settled
        """
        sampled, arrive = self._shared(sampled, batch)

        def settle() -> None:
            arrive()
            if self._arrivals is not None:
                if not sampled.arrives:
                    self._arrivals.write(sampled.tokens, batch.slots)
                copy = TokenCopy(slots, sampled, batch.scored_rows, self._arrivals)
                result.tokens.append(copy)

        if self._stages == 1:
            settle()
        else:
            result.unsettled.append(settle)

    def in_step(self, logits: Tensor, slots: Tensor, choice: Choice) -> Sampled:
        """`by_choice` in a step that is recorded; see `arriving`."""
        return self.arriving(self.by_choice(logits, slots, choice), slots)

    def arriving(self, sampled: Sampled, slots: Tensor) -> Sampled:
        """Return the tokens chosen in a step for slots [B], which it writes into the host's memory
        itself if there are no further stages.
        """
        if self._arrivals is None or self._stages > 1:
            return sampled
        self._arrivals.write(sampled.tokens, slots)
        return replace(sampled, arrives=True)

    def chosen(self, logits: Tensor | None, batch: SamplingBatch) -> Sampled | None:
        """`choose`, known to this stage alone; None where there are no logits."""
        if logits is None:
            return None
        if batch.choice != Choice.EAGER:
            return self.by_choice(logits, batch.slots, batch.choice)
        network = self._network
        return sample(logits, batch, self._states, network.cache.ids, network.kernels)

    def by_choice(self, logits: Tensor, slots: Tensor, choice: Choice) -> Sampled:
        """`chosen` for the rows in slots [B], whose parameters the device alone looks at.

        No choice is EAGER. Log-probabilities come with all but GREEDY.
        """
        kernels, states = self._network.kernels, self._states
        if choice == Choice.GREEDY:
            sampled = Sampled(kernels.argmax(logits))
            states.token.index_copy_(0, slots, sampled.tokens)
            return sampled
        if choice == Choice.PROCESSED:
            logits = kernels.process(logits, slots, states, self._network.cache.ids)
        return Sampled(*kernels.sample(logits, slots, states))

    def _shared(
        self, sampled: Sampled | None, batch: SamplingBatch
    ) -> tuple[Sampled, Callable[[], None]]:
        """The last stage's choice on every stage, and what to call before it is read."""
        scores = None if sampled is None else batch.requested(sampled)
        if scores is not None and self._stages > 1:
            scores = scores.copy(len(batch.rows))
        shared = self._room(batch) if scores is None else scores
        wait = self._communicator.begin_from_last_stage(shared.tensors)

        def arrive() -> None:
            wait()
            if scores is None:
                self._states.token.index_copy_(0, batch.slots, shared.tokens)

        return shared, arrive

    def _room(self, batch: SamplingBatch) -> Sampled:
        """For what the last stage chooses, on another one."""
        count, scored = len(batch.rows), batch.scored if batch.scored_rows else None
        return Sampled(
            torch.empty(count, dtype=torch.int64, device=self._device),
            torch.empty(2, count, device=self._device) if batch.wants_log_probs else None,
            None if scored is None else no_scores(len(scored.rows), scored.count, self._device),
        )


LOGITS_ROWS = 256
SCORED_ROWS = 64  # positions whose logits there are at a time for log-probabilities


class ContextResults:
    """Brings what the last pipeline stage knows of prompts to the host of rank 0."""

    def __init__(self, network: Network, communicator: Communicator, device: torch.device) -> None:
        self._network = network
        self._communicator = communicator
        self._device = device

    def add(
        self,
        hidden: Tensor,
        rows: Sequence[RowStart],
        parts: Sequence[PrefillPart],
        result: StepResult,
    ) -> None:
        """Put what the rows ask for into `result`; hidden [N, hidden] is of the parts just run."""
        start = 0
        for row, part in zip(rows, parts, strict=True):
            states = hidden[start : start + part.count]
            start += part.count
            if row.request.return_context_logits:
                self._add_logits(row.slot, states, result)
            if row.request.num_prompt_log_probs >= 0:
                self._add_scores(row, part, states, result)
            if row.request.return_context_embeddings:
                total = self._to_first(states.sum(0) if self._last else None, states.shape[1:])
                if self._communicator.rank == 0:
                    result.context_embeddings.append((row.slot, total.cpu()))

    def _add_logits(self, slot: int, hidden: Tensor, result: StepResult) -> None:
        """A few positions at a time: their logits are as wide as the vocabulary."""
        vocab = self._network.config.vocab_size
        for piece in hidden.split(LOGITS_ROWS):
            local = self._network.logits(piece).contiguous() if self._last else None
            logits = self._to_first(local, (piece.shape[0], vocab))
            if self._communicator.rank == 0:
                result.context_logits.append((slot, logits.cpu()))

    def _add_scores(
        self, row: RowStart, part: PrefillPart, hidden: Tensor, result: StepResult
    ) -> None:
        """Add the scores of the prompt's next token at each position; the last one has none."""
        first, count = part.past - row.past + 1, row.request.num_prompt_log_probs
        tokens = row.ids[first : first + part.count]
        if not tokens:
            return
        if self._last:
            pieces = hidden[: len(tokens)].split(SCORED_ROWS)
            targets = indices(tokens, self._device).split(SCORED_ROWS)
            scores = [
                scores_of(self._network.logits(piece), target, count)
                for piece, target in zip(pieces, targets, strict=True)
            ]
            full = TokenScores(
                torch.cat([score.log_probs for score in scores]),
                torch.cat([score.ids for score in scores]),
            )
        else:
            full = no_scores(len(tokens), count, self._device)
        full.from_last_stage(self._communicator)
        if self._communicator.rank == 0:
            result.prompt_scores.append((row.slot, ScoreCopy(full)))

    @property
    def _last(self) -> bool:
        return self._communicator.is_last_stage

    def _to_first(self, values: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Float32 values of the last stage, on every stage."""
        if values is None:
            values = torch.empty(*shape, device=self._device)
        return self._communicator.from_last_stage(values)
