"""The scheduler of in-flight batching: it chooses the rows of the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import NamedTuple, TypeVar

from launcher_scripts.contract.requests import GenerateOutput
from launcher_scripts.engine.core.prefix_cache import PrefixCache, Snapshots
from launcher_scripts.engine.core.results import BeamResult, EncodedRow, StepResult, TokenResult
from launcher_scripts.engine.core.row import (
    Row,
    answer,
    new_masks,
    snapshot,
    take,
    take_beams,
    with_masks,
)
from launcher_scripts.engine.core.row_allocator import RowAllocator
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.core.statistics import Statistics
from launcher_scripts.engine.core.step_budget import (
    NO_MODEL,
    DraftOptions,
    Limits,
    PromptBudget,
    plan_drafts,
    take_drafts,
)
from launcher_scripts.engine.messages.plan import Plan

Result = TypeVar("Result", TokenResult, BeamResult)


class LaunchedStep(NamedTuple):
    """A step in flight.

    rows:     those that run, by slot
    drafting: rows that try a draft, with their slots
    prompt_tokens: how many it computes
    launched_at:   by time.perf_counter
    """

    rows: dict[int, Row]
    drafting: list[tuple[Row, int]]
    prompt_tokens: int
    launched_at: float


class Scheduler:
    """Admits rows in the order they came, as slots and blocks of the cache allow, and ends them.

    Most rows grow: they get blocks as they need them. If there are no more, the rows that came last
    give theirs up and wait again, before all others. The row that came first never does while one
    after it has blocks to give, so that every row ends.

    slots:          most rows in flight
    block_tokens:   of a block of the cache
    prefill_tokens: most prompt tokens of one step, so that a long prompt cannot hold up the rows
                    that are generating; and most source tokens, except that a source is never cut
    recorded_tokens: prompt tokens of the passes that are CUDA graphs, in which so many rows decode,
                    ascending; None: rows do not decode in passes over prompts
    inter_token_target: seconds that a step over prompts may take, so that rows which decode get
                    their next tokens, and new prompts their turn; 0: as long as prefill_tokens take
    drafts:         sources and limit of drafts
    stages:         pipeline stages, which work on different rows at a time
    one_by_one:     whether a pass takes one prompt, and one source
    snapshots:      copies of rows' states that there is room for; 0: rows have no such states
    """

    def __init__(
        self,
        slots: int,
        cache_tokens: int,
        prefill_tokens: int,
        statistics: Statistics | None = None,
        *,
        recorded_tokens: Callable[[int], list[int]] | None = None,
        inter_token_target: float = 0.0,
        drafts: DraftOptions = NO_MODEL,
        stages: int = 1,
        one_by_one: bool = False,
        snapshots: int = 0,
        block_tokens: int = 16,
    ) -> None:
        retained = Snapshots(slots + 1, snapshots) if snapshots else None
        unit = prefill_tokens if one_by_one else block_tokens
        cache = PrefixCache(cache_tokens, block_tokens, retained, unit)
        self._statistics = Statistics() if statistics is None else statistics
        self._allocator = RowAllocator(slots, cache, self._statistics)
        self._running, self._reading = self._allocator.running, self._allocator.reading
        self._budget = PromptBudget(
            prefill_tokens, recorded_tokens, inter_token_target, one_by_one=one_by_one
        )
        self._applied_at = 0.0
        self._drafts = drafts
        self._stages = stages
        self._steps = 0
        self._waiting: deque[Row] = deque()
        self._launched: deque[LaunchedStep] = deque()
        self._cancelled = False  # whether a row may have been since rows were looked through
        self.weights_version = 0

    @property
    def rows(self) -> list[Row]:
        """Every row that has not ended."""
        return [*self._running.values(), *self._waiting]

    @property
    def rows_running(self) -> int:
        return len(self._running)

    @property
    def used_tokens(self) -> int:
        """Tokens of the cache that belong to rows and sessions."""
        return self._allocator.used_tokens

    def add(self, row: Row) -> None:
        self._waiting.append(row)
        row.future.add_done_callback(self._note_cancelled)

    def _note_cancelled(self, future: Future[GenerateOutput]) -> None:
        """Any thread may cancel."""
        if future.cancelled():
            self._cancelled = True

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to launch."""
        self._drop_cancelled()
        self._end_failed()
        self._allocator.grow(self._preempt)
        self._allocator.begin_waiting()  # before others are admitted, so as not to wait for them
        joining = islice(self._waiting, len(self._allocator.free_slots))
        delays = self._budget.delays(joining, self._running.values())
        starts = [] if delays else self._admit()
        under_way = min(len(self._launched), self._stages - 1)
        running = self._in_turn(self._steps - under_way)
        waiting = [row.prefill_length - row.prefilled for row in self._reading.values()]
        reads = waiting or self._drafts.has_model
        limits = self._budget.limits(len(running), waiting) if reads else Limits(0, 0)
        drafts, proposals = plan_drafts(running, limits.tokens, self._drafts)
        drafting = [(row, row.slot) for row in running if row.draft is not None]
        single = [row for row in running if row.hypotheses is None and row.draft is None]
        beams = [row for row in running if row.hypotheses is not None]
        encode = self._budget.sources(self._reading.values())
        shares = self._budget.shares(self._allocator.ready, limits)
        prefill = self._allocator.prefill(shares, self._steps + 1)
        if not (encode or prefill or running):
            return None
        self._steps += 1
        for row in running:
            self._allocator.slide(row, 1)
            self._allocator.states.save_decoding(row)
            row.launch(self._steps)
        tokens = sum(part.count for part in prefill)
        step = LaunchedStep(dict(self._running), drafting, tokens, time.perf_counter())
        self._launched.append(step)
        tokens += sum(len(row.source) for row in encode)
        tokens += len(running) + sum(draft.foretold for draft in drafts)
        self._statistics.launch(len(encode) + len(prefill) + len(running), tokens)
        moves, blocks = self._allocator.planned()
        return Plan(
            starts=tuple(row.as_start() for row in starts),
            encode=tuple(row.slot for row in encode),
            prefill=prefill,
            decode=tuple(row.slot for row in single if not row.general),
            apart=tuple(row.slot for row in single if row.general),
            drafts=drafts,
            proposals=proposals,
            beams=tuple(row.slot for row in beams),
            reorder=max((row.reordered for row in beams), default=0),
            longest=max((row.cached for row in running), default=0),
            longest_source=max((len(row.source) for row in running), default=0),
            moves=moves,
            blocks=blocks,
            state_copies=self._allocator.states.planned(),
            lora=any(row.request.lora_adapter is not None for row in (*single, *beams)),
            masks=tuple(new_masks(self._running.values())),
            under_way=under_way,
        )

    def apply(self, result: StepResult) -> None:
        """Take the oldest launched step's tokens; rows that ended answer and leave.

        A slot may have a new row by now: the tokens belong to the rows of the step's launch.
        """
        step = self._launched.popleft()
        rows, drafting = step.rows, step.drafting
        for encoded in result.encoded:
            self._accept_encoded(rows[encoded.slot], encoded)
        for slot, logits in result.context_logits:
            rows[slot].context_logits.append(logits)
        for slot, total in result.context_embeddings:
            before = rows[slot].context_embeddings
            rows[slot].context_embeddings = total if before is None else before + total
        for slot, copy in result.prompt_scores:
            rows[slot].prompt_scores.append(copy.read())
        self._statistics.begin_apply()
        for tokens in result.read():
            self._accept_part(rows, tokens, take)
        if result.beams:
            self._accept_part(rows, result.read_beams(), take_beams)
        if drafting:
            take_drafts(drafting, result.read_drafts(), self._statistics, self._go_on)
        self._statistics.end_apply()
        result.wait()
        now = time.perf_counter()
        self._budget.observe(step.prompt_tokens, now - max(step.launched_at, self._applied_at))
        self._applied_at = now

    def spare_seconds(self) -> float:
        """Time until the next step has to be launched; see PromptBudget."""
        if not self._launched:
            return 0.0
        began = max(self._launched[0].launched_at, self._applied_at)
        tokens = [step.prompt_tokens for step in self._launched]
        return self._budget.spare_seconds(tokens, time.perf_counter() - began)

    def _accept_part(
        self,
        rows: Mapping[int, Row],
        deltas: Sequence[Result],
        on_delta: Callable[[Row, Result], None],
    ) -> None:
        """Take what a part of a step brings its rows; those that have ended leave it."""
        now = self._statistics.tokens_are_here()
        for new in deltas:
            row = rows[new.slot]
            if not row.finished:
                on_delta(row, new)
                self._go_on(row, now)

    def _go_on(self, row: Row, now: float) -> None:
        """Answer a row that has ended; say how far one has come that goes on."""
        if row.request.output_len:
            self._statistics.token(row, now)
        if row.finished:
            self._answer(row, now)
        elif row.on_progress is not None:
            row.on_progress(snapshot(row))

    def _answer(self, row: Row, now: float) -> None:
        self._leave(row)
        if row.error is None and not row.future.cancelled():
            self._statistics.end(row, now)
        answer(row)

    def _accept_encoded(self, row: Row, encoded: EncodedRow) -> None:
        """The encoder's answer is the whole one where nothing is decoded."""
        if row.finished:
            return
        row.answer = encoded
        if not row.prompt:
            row.finished = True
            self._answer(row, time.perf_counter())

    def _in_turn(self, settled: int) -> list[Row]:
        """Rows that get a token in the next step. Those that wait for their tokens go together: in
        turns, each would wait for two steps. Of several stages each has as many rows, of those
        whose last token came in a step up to `settled`, who has waited longest first."""
        rows = with_masks(row for row in self._running.values() if row.decodes)
        if self._stages == 1:
            waiting = [row for row in self._running.values() if row.waits_for_tokens]
            busy = any(row.awaits_decode_step for row in waiting)
            return [row for row in rows if not row.waits_for_tokens] if busy else rows
        ready = [row for row in rows if row.step <= settled]
        return sorted(ready, key=lambda row: row.step)[: -(-len(rows) // self._stages)]

    def _preempt(self, row: Row) -> None:
        """Let the row wait for a place again; tokens that were launched come nevertheless."""
        self._allocator.preempt(row)
        self._waiting.appendleft(row)
        self._statistics.preempt()

    def _admit(self) -> list[Row]:
        starts: list[Row] = []
        while self._waiting and self._start(self._waiting[0], starts):
            self._waiting.popleft()
        if self._waiting and self._waiting[0].session is not None:
            # It may wait for the end of a session whose next request stands behind it.
            for row in list(self._waiting):
                placed = row.session is not None and row.session.blocks is not None
                if placed and self._start(row, starts):
                    self._waiting.remove(row)
        return starts

    def _start(self, row: Row, starts: list[Row]) -> bool:
        """Let a row that waits run, if there is room for it. One that has run before waits for all
        tokens that were launched, and for its mask."""
        if row.launched > len(row.tokens) or not with_masks([row]):
            return False
        if row.placed_at:
            row.resume()
        if not self._allocator.admit(row):
            return False
        if not row.placed_at:
            row.weights_versions = (self.weights_version, self.weights_version)
        self._statistics.admit(row, time.perf_counter())
        starts.append(row)
        return True

    def close_session(self, session: Session) -> None:
        """Free the session's blocks, at once or when its request has ended."""
        session.closed = True
        if not any(row.session is session for row in self.rows):
            self._allocator.end_session(session)

    def _end_turn(self, row: Row) -> None:
        """The row of a session has ended, perhaps before it began."""
        if row.session is not None:
            self._allocator.end_turn(row, row.session)
            if row.session.closed:
                self.close_session(row.session)

    def _drop_cancelled(self) -> None:
        if not self._cancelled:
            return
        self._cancelled = False
        for row in [row for row in self._waiting if row.future.cancelled()]:
            self._waiting.remove(row)
            self._end_turn(row)
        for row in [row for row in self._running.values() if row.future.cancelled()]:
            row.finished = True
            self._leave(row)

    def _end_failed(self) -> None:
        """End the rows whose guides have failed while they waited for their masks."""
        rows = (*self._running.values(), *islice(self._waiting, 1))
        for row in [row for row in rows if row.error is not None]:
            row.finished = True
            self._answer(row, time.perf_counter())

    def _leave(self, row: Row) -> None:
        """The row has ended, be it while it waited for a place again."""
        row.on_progress = None
        if row.slots:
            self._vacate(row)
        else:
            self._waiting.remove(row)

    def _vacate(self, row: Row) -> None:
        """Take back what the row has, or let its session keep it."""
        self._allocator.release(row)
        self._end_turn(row)
