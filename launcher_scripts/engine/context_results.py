"""What requests may ask for about their prompts: logits, and the sum of the hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from launcher_scripts.engine.communicator import Communicator
from launcher_scripts.engine.network import Network
from launcher_scripts.engine.plan import PrefillPart, RowStart
from launcher_scripts.engine.results import StepResult

LOGITS_ROWS = 256


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
            if row.return_context_logits:
                self._add_logits(row.slot, own, result)
            if row.return_context_embeddings:
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

    @property
    def _last(self) -> bool:
        return self._communicator.is_last_stage

    def _to_first(self, values: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Float32 values of the last stage, on every stage."""
        if values is None:
            values = torch.empty(*shape, device=self._device)
        return self._communicator.from_last_stage(values)
