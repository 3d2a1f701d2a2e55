"""What requests may ask for about their prompts: logits, log-probabilities, and the sum of the
hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from launcher_scripts.engine.core.log_probs import TokenScores, no_scores, scores_of
from launcher_scripts.engine.core.results import ScoreCopy, StepResult
from launcher_scripts.engine.core.row_state import indices
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import PrefillPart, RowStart
from launcher_scripts.engine.model.network import Network

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
            own = hidden[start : start + part.count]
            start += part.count
            if row.request.return_context_logits:
                self._add_logits(row.slot, own, result)
            if row.request.num_prompt_log_probs >= 0:
                self._add_scores(row, part, own, result)
            if row.request.return_context_embeddings:
                total = self._to_first(own.sum(0) if self._last else None, own.shape[1:])
                if self._communicator.rank == 0:
                    result.context_embeddings.append((row.slot, total.cpu()))

    def _add_logits(self, slot: int, hidden: Tensor, result: StepResult) -> None:
        """A few positions at a time: their logits are as wide as the vocabulary."""
        vocab = self._network.config.vocab_size
        for piece in hidden.split(LOGITS_ROWS):
            own = self._network.logits(piece).contiguous() if self._last else None
            logits = self._to_first(own, (piece.shape[0], vocab))
            if self._communicator.rank == 0:
                result.context_logits.append((slot, logits.cpu()))

    def _add_scores(
        self, row: RowStart, part: PrefillPart, hidden: Tensor, result: StepResult
    ) -> None:
        """What each position says of the prompt's next token; the last one has none."""
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
            whole = TokenScores(
                torch.cat([score.log_probs for score in scores]),
                torch.cat([score.ids for score in scores]),
            )
        else:
            whole = no_scores(len(tokens), count, self._device)
        whole.from_last_stage(self._communicator)
        if self._communicator.rank == 0:
            result.prompt_scores.append((row.slot, ScoreCopy(whole)))

    @property
    def _last(self) -> bool:
        return self._communicator.is_last_stage

    def _to_first(self, values: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Float32 values of the last stage, on every stage."""
        if values is None:
            values = torch.empty(*shape, device=self._device)
        return self._communicator.from_last_stage(values)
