"""What a decode step knows of its rows, made once for as long as the same rows run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.core.beam_search import BeamBatch, beam_batches
from launcher_scripts.engine.core.row_state import indices
from launcher_scripts.engine.core.sampler import SamplingBatch
from launcher_scripts.engine.messages.plan import Choice, Plan, RowStart
from launcher_scripts.engine.runner.graphs import bucket_rows


@dataclass(frozen=True)
class MixedBatch:
    """A decode step with beam searches: all slots, those of `plain` first, padding last.

    alone: whether one batch of searches is all of it, whose kernels depend on slots alone; padding
           are whole searches then
    """

    slots: Tensor
    plain: SamplingBatch | None
    beams: tuple[BeamBatch, ...]
    alone: bool


class DecodeBatches:
    """The batches of the rows that ran since others joined.

    max_rows: where steps are CUDA graphs, to what buckets of rows are padded at most; else None
    fixed:    whether all steps are padded to max_rows, and rows choose tokens in one way as far as
              they can, so that a row's tokens do not depend on those beside
    """

    def __init__(
        self,
        rows: Mapping[int, RowStart],
        max_rows: int | None,
        padding_slot: int,
        device: torch.device,
        *,
        fixed: bool = False,
    ) -> None:
        self._rows = rows
        self._fixed = fixed
        self._least = Choice.SAMPLED if fixed else Choice.GREEDY
        self._max_rows = max_rows
        self._padding_slot = padding_slot
        self._device = device
        self._plain: dict[tuple[int, ...], SamplingBatch] = {}
        self._mixed: tuple[tuple[tuple[int, ...], ...], MixedBatch] | None = None

    def forget(self) -> None:
        """Other rows may be in the same slots."""
        self._plain.clear()
        self._mixed = None

    def plain(self, slots: tuple[int, ...]) -> SamplingBatch:
        """The sampling of rows without beam searches."""
        if slots not in self._plain:
            rows = [self._rows[slot] for slot in slots]
            rows += [_padding_row(self._padding_slot)] * self._padding(len(rows))
            self._plain[slots] = SamplingBatch(rows, self._device, self._least)
        return self._plain[slots]

    def mixed(self, plan: Plan) -> MixedBatch:
        """The sampling of the rows in `decode`, and the searches beside them."""
        key = (plan.decode, plan.beams)
        if self._mixed is None or self._mixed[0] != key:
            plain = [self._rows[slot] for slot in plan.decode]
            beams = beam_batches([self._rows[slot] for slot in plan.beams], self._device)
            count = len(plain) + sum(batch.slots.shape[0] for batch in beams)
            alike = len(beams) == 1 and beams[0].kernels_key is not None
            alone = alike and not plain and not self._fixed
            padding = self._padding(count, beams[0].shape.width if alone else 1)
            parts = [
                indices(plan.decode, self._device),
                *(batch.slots for batch in beams),
                indices([self._padding_slot] * padding, self._device),
            ]
            sampling = SamplingBatch(plain, self._device, self._least) if plain else None
            self._mixed = (key, MixedBatch(torch.cat(parts), sampling, beams, alone))
        return self._mixed[1]

    def _padding(self, rows: int, width: int = 1) -> int:
        """How many rows fill up a step of searches of this width."""
        if self._max_rows is None:
            return 0
        if self._fixed:
            return self._max_rows - rows
        return bucket_rows(rows // width, self._max_rows // width) * width - rows


def _padding_row(slot: int) -> RowStart:
    return RowStart(slot=slot, start=0, ids=(0,), end_id=0)
