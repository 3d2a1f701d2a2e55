"""Drafts at work: the tokens of several steps run in one pass, and those that come are kept.

A row's random numbers are numbered by its tokens (reference_sampling.py). So the token behind every
token of a draft is chosen as in a step of its own, and it is the same one: a draft that foretells
it saves the step, greedy or sampled, and one that does not changes nothing.

The draft model at work: a small model of the same vocabulary proposes tokens of rows.

It has a cache of as many tokens as the model's, and the same block table: one allocator serves
both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from launcher_scripts.engine.core.results import DraftCopy, StepResult, TokenCopy
from launcher_scripts.engine.core.row_state import NO_TOKEN, RowStates, indices
from launcher_scripts.engine.core.sampler import SamplingBatch
from launcher_scripts.engine.core.step_outputs import TokenChoice
from launcher_scripts.engine.messages.plan import (
    NO_TASK,
    Bounds,
    Choice,
    Draft,
    Plan,
    PrefillPart,
    Proposal,
    RowStart,
)
from launcher_scripts.engine.model.forward_context import StepGraphs
from launcher_scripts.engine.model.network import Network
from launcher_scripts.engine.runner.prefill import Prefill
from launcher_scripts.kernels.operands import RowColumns


class DraftModel:
    """One rank of it. launch: has its runner carry out a plan;  states: those of its rows

    is_head: it is a draft head, see engine/model/draft_head.py
    """

    def __init__(
        self, launch: Callable[[Plan], StepResult], states: RowStates, *, is_head: bool
    ) -> None:
        self._launch = launch
        self._states = states
        self._is_head = is_head

    def propose(self, plan: Plan, rows: Mapping[int, RowStart]) -> Tensor | None:
        """The likeliest tokens, one after the other: int64 [proposals with a count, most], of which
        each row has its count. None where nothing is proposed.

        rows: the model's, by their slots
        """
        if not plan.proposals:
            return None
        starts = {proposal.slot: rows[proposal.slot] for proposal in plan.proposals}
        proposals = plan.proposals
        if self._is_head:
            proposals = tuple(filter(None, map(_without_first, proposals)))
            starts = {slot: replace(row, start=row.start + 1) for slot, row in starts.items()}
        longer = [
            proposal for proposal in proposals if self._is_head or len(proposal.ids) > 1
        ]  # a head decodes what it proposes alone
        single = [proposal for proposal in proposals if proposal not in longer]
        self._launch(
            Plan(
                starts=tuple(_reading(starts[proposal.slot], proposal) for proposal in proposals),
                prefill=tuple(
                    PrefillPart(proposal.slot, proposal.past, len(proposal.ids))
                    for proposal in longer
                ),
                decode=tuple(proposal.slot for proposal in single),
                longest=max((proposal.past + 1 for proposal in single), default=0),
            )
        ).settle()
        pending = [proposal for proposal in proposals if proposal.count]
        if not pending:
            return None
        slots = indices([proposal.slot for proposal in pending], self._states.device)
        tokens = [self._states.token[slots]]
        for index in range(1, max(proposal.count for proposal in pending)):
            going_on = [proposal for proposal in pending if proposal.count > index]
            self._launch(
                Plan(
                    decode=tuple(proposal.slot for proposal in going_on),
                    longest=max(proposal.past + len(proposal.ids) for proposal in going_on) + index,
                )
            ).settle()
            tokens.append(self._states.token[slots])
        return torch.stack(tokens, 1)


def _without_first(proposal: Proposal) -> Proposal | None:
    """Return the proposal as one of a draft head, which never reads a row's first token."""
    past, ids = proposal.past - 1, proposal.ids
    if past < 0:
        past, ids = 0, ids[1:]
    return Proposal(proposal.slot, past, ids, proposal.count) if ids else None


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


class Drafts:
    """Runs drafts on one rank."""

    def __init__(
        self,
        prefill: Prefill,
        choice: TokenChoice,
        states: RowStates,
        device: torch.device,
        lanes: Lanes | None = None,
    ) -> None:
        """lanes: runs the drafts' tokens where passes over them must not differ from decode steps

        are_possible: drafts may be tried
        """
        self._prefill = prefill
        self._choice = choice
        self._states = states
        self._device = device
        self._lanes = lanes
        self._least = Choice.GREEDY if lanes is None else Choice.SAMPLED
        self.are_possible = lanes is None or lanes.are_possible

    def run(
        self,
        rows: Sequence[RowStart],
        drafts: Sequence[Draft],
        proposed: Tensor | None,
        result: StepResult,
    ) -> None:
        """Choose the token behind each of the drafts' tokens; each row keeps those that its draft
        foretells, and the one after them.

        proposed: [proposals, n], the tokens of those drafts that have some proposed
        """
        pairs = list(zip(rows, drafts, strict=True))
        max_len = max(draft.tokens for draft in drafts)
        ids = torch.tensor([_filled(draft.ids, max_len) for draft in drafts])
        ids = ids.to(self._device, non_blocking=True)
        if proposed is not None:
            waiting = [at for at, draft in enumerate(drafts) if draft.proposed]
            ids[indices(waiting, self._device), 1 : 1 + proposed.shape[1]] = proposed
        tokens = ids.flatten()[indices(_offsets(drafts, max_len), self._device)]
        if self._lanes is None:
            logits = self._prefill.logits(
                [_after(row, draft) for row, draft in pairs],
                [PrefillPart(draft.slot, draft.past, draft.tokens) for draft in drafts],
                tokens,
            )
        else:
            logits = self._lanes.logits(pairs, tokens)
        past = indices([draft.past for draft in drafts], self._device)
        columns: list[TokenCopy] = []
        sampled = self._sampled(logits, pairs, past, max_len, columns)
        right = (sampled[:, :-1] == ids[:, 1:]).cumprod(1).sum(1)  # how many of the draft's tokens
        right = right.minimum(indices([draft.foretold for draft in drafts], self._device))
        result.drafts = DraftCopy(columns, right)
        slots = indices([draft.slot for draft in drafts], self._device)
        self._states.token.index_copy_(0, slots, sampled.gather(1, right[:, None])[:, 0])
        self._states.set_length(slots, past + 1 + right)
        self._prefill.settle_drafts(1 + right)

    def _sampled(
        self,
        logits: Tensor | None,
        pairs: Sequence[tuple[RowStart, Draft]],
        past: Tensor,
        max_len: int,
        columns: list[TokenCopy],
    ) -> Tensor:
        """The tokens behind those of the drafts, int64 [R, most]; shorter drafts' last ones again.

        past: [R], cache tokens of the rows before the drafts
        """
        batch = SamplingBatch([row for row, _ in pairs], self._device, self._least)
        slots = [draft.slot for _, draft in pairs]
        counts = [draft.tokens for _, draft in pairs]
        first = [sum(counts[:at]) for at in range(len(counts))]
        selected = []
        for index in range(max_len):
            offsets = [at + min(index, count - 1) for at, count in zip(first, counts, strict=True)]
            logits_here = None if logits is None else logits[indices(offsets, self._device)]
            self._states.set_length(batch.slots, past + 1 + index)
            sampled = self._choice.choose(logits_here, batch)
            columns.append(TokenCopy(slots, sampled, batch.scored_rows))
            selected.append(sampled.tokens)
        return torch.stack(selected, 1)


class Lanes:
    """The tokens of drafts as rows of a decode step, each in a lane of its own.

    All decode steps of a deterministic model have the same shape, in which many rows are padding. A
    draft's tokens take their places: the logits after a token are those of a step of its own, to
    the last bit, and cost no more.

    count: of lanes, the rows of every step;  bounds: of every step
    """

    def __init__(
        self, network: Network, graphs: StepGraphs | None, count: int, bounds: Bounds
    ) -> None:
        self._network = network
        self._graphs = graphs
        self._bounds = bounds
        self.count = count
        recurs = network.config.has_row_states
        self.are_possible = network.step is not None and not recurs and not bounds.general
        if network.step is not None:
            network.step.in_sequence = self.are_possible

    def logits(self, pairs: Sequence[tuple[RowStart, Draft]], tokens: Tensor) -> Tensor | None:
        """Return the logits [N, vocab] after each of the tokens [N], draft after draft."""
        starts, lengths, adapters = (
            [value for row, draft in pairs for value in values_of(row, draft)]
            for values_of in (
                lambda row, draft: [row.start] * draft.tokens,
                lambda _, draft: range(draft.past, draft.past + draft.tokens),
                lambda row, draft: [row.lora_adapter] * draft.tokens,
            )
        )
        padding = self.count + 1 - len(starts)
        columns = torch.tensor(
            [
                [*starts, *[self._network.cache.scratch] * padding],
                [*lengths, *[0] * padding],
                [*adapters, *[NO_TASK] * padding],
            ]
        ).to(tokens.device, non_blocking=True)
        tokens = torch.cat([tokens, tokens.new_zeros(padding)])
        packed = torch.cat([tokens, columns.flatten()])
        if self._graphs is None:
            logits = self._step(packed)
        else:
            logits = self._graphs.run(("lanes", self.count), packed, self._step)
        return None if logits is None else logits[: len(starts)]

    def _step(self, packed: Tensor) -> Tensor | None:
        step, network = self._network.step, self._network
        if step is None:
            raise RuntimeError("drafts of a deterministic model need the fast decode step")
        token, start, length, adapters = (column.clone() for column in packed.view(4, -1))
        none = torch.zeros_like(start)
        columns = RowColumns(token, start, length, none, none, network.cache.table)
        lanes = torch.arange(self.count, device=packed.device)
        adapters = adapters[:-1] if self._bounds.lora else None
        x = step.forward(columns, lanes, self._bounds, adapters)
        return step.logits(x) if network.communicator.is_last_stage else None


def _after(row: RowStart, draft: Draft) -> RowStart:
    """The row as one whose prompt is the draft, after what is in the cache."""
    ids = _filled(draft.ids, draft.tokens)
    return replace(row, ids=tuple(ids), past=draft.past, stride=row.stride - draft.past)


def _offsets(drafts: Sequence[Draft], max_len: int) -> list[int]:
    """Return the indices of the drafts' tokens in rows of `max_len`, one after the other."""
    return [
        max_len * at + index for at, draft in enumerate(drafts) for index in range(draft.tokens)
    ]


def _filled(ids: Sequence[int], count: int) -> list[int]:
    return [*ids, *[NO_TOKEN] * (count - len(ids))]
