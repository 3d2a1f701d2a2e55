"""Which rows try several tokens in the next step, and who says what these may be.

Where a row repeats a long text, its own words say it, which costs nothing. Else the draft model
does: a proposal of its tokens and the pass that tries them are one step. What the draft model has
not read of the row it reads before, at the pace of prompts. Meanwhile, and where there is no draft
model, a short text that came before is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from launcher_scripts.engine.core.results import TokenResult
from launcher_scripts.engine.core.row import Row, take
from launcher_scripts.engine.core.statistics import Statistics
from launcher_scripts.engine.messages.plan import Draft, Proposal

# A text of so many tokens that came before is copied. The next tokens after a shorter one are
# foretold better by a draft model.
COPIED_TOKENS = 8


class Drafting(NamedTuple):
    """The drafts of a step, and what the draft model does in it."""

    drafts: tuple[Draft, ...] = ()
    proposals: tuple[Proposal, ...] = ()


def plan_drafts(rows: Sequence[Row], draft_model_tokens: int) -> Drafting:
    """Let each of the rows that wants one have a draft, as far as there is one.

    rows: those that get a token in the step
    draft_model_tokens: most tokens that the draft model reads in it; 0 where there is none
    """
    drafts, proposals = [], []
    least = COPIED_TOKENS if draft_model_tokens else 0
    for row in rows:
        if row.lookup is None or not row.room:
            continue
        found = row.lookup.draft(row.room, least)
        if not found and draft_model_tokens and row.is_readable:
            proposal = _proposal(row, draft_model_tokens)
            proposals.append(proposal)
            draft_model_tokens -= len(proposal.ids)
            if proposal.count:
                row.draft = Draft(row.slot, row.cached, (row.tokens[-1],), proposal.count)
        if row.draft is None:
            found = found or row.lookup.draft(row.room)
            row.draft = Draft(row.slot, row.cached, (row.tokens[-1], *found)) if found else None
        if row.draft is not None:
            drafts.append(row.draft)
    return Drafting(tuple(drafts), tuple(proposals))


def take_drafts(
    rows: Sequence[tuple[Row, int]],
    read: Mapping[int, Sequence[TokenResult]],
    statistics: Statistics,
    go_on: Callable[[Row, float], None],
) -> None:
    """Take the tokens that the rows' drafts foretold, and the ones behind them.

    rows: with the slots that they had;  go_on: called for a row behind each of its tokens
    """
    now = statistics.tokens_are_here()
    for row, slot in rows:
        statistics.draft(row.draft.foretold if row.draft else 0)
        for place, token in enumerate(read[slot]):
            if row.finished:
                break
            take(row, token)
            if place:
                statistics.accept_drafted()
            go_on(row, now)
        row.end_draft(len(read[slot]) - 1)


def _proposal(row: Row, most: int) -> Proposal:
    """The draft model reads on, no more than `most` tokens, and proposes some if these are all."""
    past, prompt = row.read_by_draft, len(row.prompt)
    unread = (*row.prompt[past:], *row.tokens[max(past - prompt, 0) :])
    ids = unread[:most]
    row.read_by_draft += len(ids)
    if row.prefix is not None:
        row.prefix.read = row.read_by_draft
    return Proposal(row.slot, past, ids, row.room if len(ids) == len(unread) else 0)
