"""The draft model at work: a small model of the same vocabulary proposes tokens of rows.

It has a cache of as many tokens as the model's, in which every row has the same places. Whatever
is copied in one is copied in the other, so one allocator serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from launcher_scripts.engine.core.results import StepResult
from launcher_scripts.engine.core.row_state import RowStates, indices
from launcher_scripts.engine.messages.plan import Plan, PrefillPart, Proposal, RowStart


class DraftModel:
    """One rank of it. launch: has its runner carry out a plan;  states: those of its rows"""

    def __init__(self, launch: Callable[[Plan], StepResult], states: RowStates) -> None:
        self._launch = launch
        self._states = states

    def propose(self, plan: Plan, rows: Mapping[int, RowStart]) -> Tensor | None:
        """The likeliest tokens, one after the other: int64 [proposals with a count, most], of which
        each row has its count. None where nothing is proposed.

        rows: the model's, by their slots
        """
        if not (plan.proposals or plan.copies):
            return None
        longer = [proposal for proposal in plan.proposals if len(proposal.ids) > 1]
        single = [
            proposal for proposal in plan.proposals if len(proposal.ids) == 1
        ]  # which a step takes
        self._launch(
            Plan(
                starts=tuple(
                    _reading(rows[proposal.slot], proposal) for proposal in plan.proposals
                ),
                prefill=tuple(PrefillPart(each.slot, each.past, len(each.ids)) for each in longer),
                decode=tuple(each.slot for each in single),
                longest=max((each.past + 1 for each in single), default=0),
                copies=plan.copies,
            )
        ).settle()
        asked = [proposal for proposal in plan.proposals if proposal.count]
        if not asked:
            return None
        slots = indices([each.slot for each in asked], self._states.device)
        tokens = [self._states.token[slots]]
        for place in range(1, max(each.count for each in asked)):
            going_on = [each for each in asked if each.count > place]
            self._launch(
                Plan(
                    decode=tuple(each.slot for each in going_on),
                    longest=max(each.past + len(each.ids) for each in going_on) + place,
                )
            ).settle()
            tokens.append(self._states.token[slots])
        return torch.stack(tokens, 1)


def _reading(row: RowStart, proposal: Proposal) -> RowStart:
    """The row as one of the draft model, whose prompt is what it has not read; it takes the
    likeliest token, whatever the row asks for.
    """
    return RowStart(
        row.slot,
        row.start,
        proposal.ids,
        row.end_id,
        past=proposal.past,
        stride=row.stride - proposal.past,
    )
