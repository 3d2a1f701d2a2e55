"""Limits of a step: prompt tokens, and draft tokens.

Which rows try several tokens in the next step, and who says what these may be.

Where a row repeats a long text, its own words say it, which costs nothing. Else the draft model
does: a proposal of its tokens and the pass that tries them are one step. What the draft model has
not read of the row it reads before, at the pace of prompts. Meanwhile, and where there is no draft
model, a short text that came before is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from launcher_scripts.engine.core.results import TokenResult
from launcher_scripts.engine.core.row import Row, take
from launcher_scripts.engine.core.statistics import Statistics
from launcher_scripts.engine.messages.plan import Draft, Proposal

# The fewest prompt tokens of a pass in which rows decode, or so many for each of those rows: with
# less, reading the weights costs more than the products with them.
MIN_MIXED_TOKENS = 512
TOKENS_PER_DECODING_ROW = 4
# Up to so many steps with the fewest tokens keep the times between tokens even: a 1.3B with 128
# clients got its tokens every 6.0 ms at worst (p99) with 512 prompt tokens a step, 8.0 with 1,024.
EVEN_STEPS = 2
# While no short prompt waits, steps may be longer, by so many times what prompts are per row that
# decodes, up to twice the target: they read the caches of those rows less often, and a prompt
# that all wait for ends sooner.
STRETCH_PER_SHARE = 6
# A prompt whose last tokens would need a step more has them in this one: so many, as a share.
OVERSHOOT = 0.25
# A pass that is too large for a CUDA graph takes the host milliseconds, so it has so many times the
# tokens of the largest graph at least, unless the device needs so many seconds for that graph.
LAUNCHED_SHARE = 1.5
LAUNCH_HIDDEN_SECONDS = 0.03
# A budget goes by the median of so many durations, which outlasts a step that recorded a graph; the
# next step is launched by the shortest. Passes over fewer tokens take about as long as over none.
SAMPLES = 9
MIN_SAMPLE_TOKENS = 256
# Before the step in flight ends, the host needs this time to plan and launch the next one, and the
# estimate of that end is wrong by such a share. Shorter steps are launched at once.
LAUNCH_SECONDS = 0.005
ESTIMATE_ERROR = 0.1
MIN_AWAITED_SECONDS = 0.03
# A pass over few prompt tokens keeps the rows that decode waiting almost as long as one over more.
# So rows wait for each other until they bring enough for the rows that decode, but few steps.
ROWS_PER_WAIT_STEP = 8
MAX_WAIT_STEPS = 2


class Limits(NamedTuple):
    """Prompt tokens of a step.

    tokens:     as many as fit the step's time
    max_tokens: so many where a prompt ends with them
    """

    tokens: int
    max_tokens: int


class PromptBudget:
    """Decides how many prompt tokens run in a step, by how long the last steps took.

    max_tokens:   most prompt tokens of one step
    recorded:     prompt tokens of the passes that are CUDA graphs, in which so many rows decode,
                  ascending; None: rows do not decode in passes over prompts
    target:       seconds that a step may take, so that rows which decode get their next tokens,
                  and new prompts their turn; 0: as long as max_tokens take
    one_by_one:   a pass takes one prompt, and its length does not depend on time
    """

    def __init__(
        self,
        max_tokens: int,
        recorded: Callable[[int], list[int]] | None = None,
        target: float = 0.0,
        *,
        one_by_one: bool = False,
    ) -> None:
        self._max_tokens = max_tokens
        self._recorded = recorded
        self._target = 0.0 if one_by_one else target
        self._one_by_one = one_by_one
        self._decode_seconds: deque[float] = deque(maxlen=SAMPLES)
        self._seconds_per_token: deque[float] = deque(maxlen=SAMPLES)
        self._delayed = 0

    def delays(self, joining: Iterable[Row], running: Iterable[Row]) -> bool:
        """Return True if the rows that could join wait a step longer, for more to join at once."""
        if self._recorded is not None:
            return False
        tokens = sum(len(row.prompt) + len(row.source) for row in joining)
        decoding = sum(row.decodes for row in running) if tokens else 0
        max_wait = min(decoding // ROWS_PER_WAIT_STEP, MAX_WAIT_STEPS)
        delays = 0 < tokens < decoding * TOKENS_PER_DECODING_ROW and self._delayed < max_wait
        self._delayed = self._delayed + 1 if delays else 0
        return delays

    def sources(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows whose sources the encoder reads now, of similar length side by side."""
        selected: list[Row] = []
        budget = self._max_tokens
        for row in rows:
            if not row.source or row.encoded:
                continue
            if selected and (self._one_by_one or len(row.source) > budget):
                break
            row.encoded = True
            budget -= len(row.source)
            selected.append(row)
        return sorted(selected, key=lambda row: len(row.source))

    def observe(self, tokens: int, seconds: float) -> None:
        """Record how long a step over so many prompt tokens took, with all that ran in it."""
        if tokens < MIN_SAMPLE_TOKENS:
            self._decode_seconds.append(seconds)
        else:
            prompt_seconds = max(seconds - self._base_seconds, seconds / 2)
            self._seconds_per_token.append(prompt_seconds / tokens)

    @property
    def _base_seconds(self) -> float:
        """Duration of a step without prompts; 0 before one was seen."""
        return median(self._decode_seconds) if self._decode_seconds else 0.0

    def limits(self, decoding: int, waiting: Sequence[int]) -> Limits:
        """Return the limits of a step in which this many rows decode, and prompts wait, each with
        so many tokens left."""
        if not self._target:
            return Limits(self._max_tokens, self._max_tokens)
        stretch = 1.0
        if decoding and sum(waiting) <= EVEN_STEPS * MIN_MIXED_TOKENS:
            budget = 0
        elif self._seconds_per_token:
            stretch = self._stretch(decoding, waiting)
            target = self._target * stretch
            seconds = max(target - self._base_seconds * bool(decoding), target / 2)
            budget = int(seconds / median(self._seconds_per_token))
        else:
            budget = 0 if decoding else self._max_tokens
        budget = max(budget, MIN_MIXED_TOKENS, decoding * TOKENS_PER_DECODING_ROW)
        limit = max(budget, int(budget / stretch * (1 + OVERSHOOT)))
        if self._recorded is not None:
            sizes = self._recorded(decoding)
            if budget < sizes[-1] * self._launched_share(sizes[-1]):
                budget = max((sizes[0], *(size for size in sizes if size <= budget)))
                limit = max(size for size in sizes if size <= max(limit, budget))
        return Limits(min(budget, self._max_tokens), min(limit, self._max_tokens))

    def _stretch(self, decoding: int, waiting: Sequence[int]) -> float:
        """How many times the target a step may take."""
        if min(waiting, default=0) <= MIN_MIXED_TOKENS:
            return 1.0
        return 1 + min(1, STRETCH_PER_SHARE * len(waiting) / max(decoding, 1))

    def _launched_share(self, largest: int) -> float:
        """How many times the tokens of the largest graph are launched kernel by kernel."""
        seconds = median(self._seconds_per_token) if self._seconds_per_token else 0.0
        return 1.0 if seconds * largest >= LAUNCH_HIDDEN_SECONDS else LAUNCHED_SHARE

    def shares(self, rows: Sequence[Row], limits: Limits) -> Iterator[tuple[Row, int]]:
        """Rows, which are in the order they came, and how many tokens of their prompts run now.

        Half of the budget is for the prompt that came first, so that it ends; the rest for those
        with the fewest tokens left, so that none waits for a much longer one, and of several long
        ones one ends after the other.
        """
        if not rows:
            return
        rows = rows[:1] if self._one_by_one else rows
        remaining = {row.slot: row.prefill_length - row.prefilled for row in rows}
        counts = dict.fromkeys(remaining, 0)
        counts[rows[0].slot] = min(limits.tokens // 2, remaining[rows[0].slot])
        left = limits.tokens - counts[rows[0].slot]
        for row in sorted(rows, key=lambda row: remaining[row.slot]):
            more = min(remaining[row.slot] - counts[row.slot], left)
            counts[row.slot], left = counts[row.slot] + more, left - more
        spare = limits.max_tokens - limits.tokens
        for row in rows:
            count = counts[row.slot]
            rest = remaining[row.slot] - count
            if count and rest <= spare:
                count, spare = count + rest, spare - rest
            if count:
                yield row, count

    def spare_seconds(self, in_flight: Sequence[int], elapsed: float) -> float:
        """Time until the next step has to be launched for the device not to idle. A request that
        comes before then runs in that step instead of the one after it.

        in_flight: prompt tokens of the steps that were launched;  elapsed: seconds since the first
        of them began
        """
        if not self._target or not self._seconds_per_token:
            return 0.0
        per_token = min(self._seconds_per_token)  # early costs less than an idle device
        seconds = sum(
            self._base_seconds + count * per_token
            for count in in_flight
            if count >= MIN_SAMPLE_TOKENS
        )
        if seconds < MIN_AWAITED_SECONDS:
            return 0.0
        return seconds * (1 - ESTIMATE_ERROR) - LAUNCH_SECONDS - elapsed


# A text of so many tokens that came before is copied. The next tokens after a shorter one are
# foretold better by a draft model.
COPIED_TOKENS = 8
MAX_STEP_TOKENS = 1 << 30


class Drafting(NamedTuple):
    """The drafts of a step, and what the draft model does in it."""

    drafts: tuple[Draft, ...] = ()
    proposals: tuple[Proposal, ...] = ()


class DraftOptions(NamedTuple):
    """The source of drafts besides texts, and their limit.

    has_model:  there is a draft model;  rereads: it is a head, which reads what it has proposed
                again, after the model
    max_tokens: maximum number of tokens of the drafts of a step; None: no limit
    """

    has_model: bool = False
    rereads: bool = False
    max_tokens: int | None = None


NO_MODEL, WITH_MODEL = DraftOptions(), DraftOptions(has_model=True)


def plan_drafts(
    rows: Sequence[Row], draft_model_tokens: int, options: DraftOptions = WITH_MODEL
) -> Drafting:
    """Let each of the rows that wants one have a draft, as far as there is one.

    rows: those that get a token in the step
    draft_model_tokens: most tokens that the draft model reads in it; 0 where there is none
    """
    drafts, proposals = [], []
    draft_model_tokens *= options.has_model
    minimum = COPIED_TOKENS if draft_model_tokens else 0
    left = options.max_tokens or MAX_STEP_TOKENS
    for row in rows:
        if row.lookup is None:
            continue
        room = min(row.room, left - 1)
        if room < 1:
            continue
        draft = row.lookup.draft(room, minimum)
        if not draft and draft_model_tokens and row.is_readable:
            proposal = _proposal(row, draft_model_tokens, room)
            proposals.append(proposal)
            draft_model_tokens -= len(proposal.ids)
            if proposal.count:
                row.draft = Draft(
                    row.slot, row.cached, (row.tokens[-1],), proposal.count, options.rereads
                )
        if row.draft is None:
            draft = draft or row.lookup.draft(room)
            row.draft = Draft(row.slot, row.cached, (row.tokens[-1], *draft)) if draft else None
        if row.draft is not None:
            drafts.append(row.draft)
            left -= row.draft.tokens
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
        for index, token in enumerate(read[slot]):
            if row.finished:
                break
            take(row, token)
            if index:
                statistics.accept_drafted()
            go_on(row, now)
        row.end_draft(len(read[slot]) - 1)


def _proposal(row: Row, maximum: int, count: int) -> Proposal:
    """The draft model reads at most `maximum` tokens, and proposes `count` if these are all."""
    past, prompt = row.read_by_draft, len(row.prompt)
    unread = (*row.prompt[past:], *row.tokens[max(past - prompt, 0) :])
    ids = unread[:maximum]
    row.read_draft(past + len(ids))
    return Proposal(row.slot, past, ids, count if len(ids) == len(unread) else 0)
