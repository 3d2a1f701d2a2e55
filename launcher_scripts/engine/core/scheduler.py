"""The scheduler of in-flight batching: it chooses the rows of the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import NamedTuple, TypeVar

from launcher_scripts.contract.requests import GenerateOutput
from launcher_scripts.engine.core.prefix_cache import (
    BLOCK_TOKENS,
    CachedPrefix,
    Prefix,
    PrefixCache,
    Snapshots,
)
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
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.core.statistics import Statistics
from launcher_scripts.engine.core.step_budget import (
    NO_MODEL,
    TOKENS_PER_DECODING_ROW,
    DraftOptions,
    Limits,
    PromptBudget,
    RowExtents,
    StateCopies,
    plan_drafts,
    take_drafts,
)
from launcher_scripts.engine.messages.plan import Copy, Move, Plan, PrefillPart, Relocation

# A pass over few prompt tokens keeps the rows that decode waiting almost as long as one over more.
# So rows wait for each other until they bring enough for the rows that decode, but few steps.
ROWS_PER_WAIT_STEP = 8
MAX_WAIT_STEPS = 2
# What another row computes now is worth waiting for if it takes about a step: so many tokens.
TOKENS_WORTH_A_STEP = 64
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
    """Admits rows in the order they came, as slots and cache tokens allow, and ends them.

    Most rows grow: where cache tokens are scarce they get them as they need them, behind their own
    or somewhere else, where they are copied to, and give back what they do not need yet. If there
    are no more, the rows that came last give their places up and wait again, before all others. The
    row that came first never does while one after it has room to give, so that every row ends.

    slots:          most rows in flight
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
    ) -> None:
        self._free_slots = list(range(slots))[::-1]
        self._running: dict[int, Row] = {}
        retained = Snapshots(slots + 1, snapshots) if snapshots else None
        unit = prefill_tokens // BLOCK_TOKENS * BLOCK_TOKENS if one_by_one else BLOCK_TOKENS
        self._cache = PrefixCache(cache_tokens, retained, max(unit, BLOCK_TOKENS))
        self._states = StateCopies(self._cache)
        self._extents = RowExtents(self._cache, self._running)
        self._prefill_tokens = prefill_tokens
        self._mixes = recorded_tokens is not None
        self._budget = PromptBudget(
            prefill_tokens, recorded_tokens, inter_token_target, one_by_one=one_by_one
        )
        self._applied_at = 0.0
        self._drafts = drafts
        self._stages = stages
        self._one_by_one = one_by_one
        self._steps = 0
        self._waiting: deque[Row] = deque()
        self._reading: dict[int, Row] = {}  # those of them whose prompts have not been launched
        self._launched: deque[LaunchedStep] = deque()
        self._moves: list[Move] = []
        self._delayed = 0
        self._cancelled = False  # whether a row may have been since rows were looked through
        self.weights_version = 0
        self._statistics = Statistics() if statistics is None else statistics

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
        return self._cache.capacity - self._cache.free_tokens

    def add(self, row: Row) -> None:
        self._waiting.append(row)
        row.future.add_done_callback(self._note_cancelled)

    def _note_cancelled(self, future: Future[GenerateOutput]) -> None:
        """Any thread may cancel."""
        if future.cancelled():
            self._cancelled = True

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to launch."""
        self._moves = []
        self._extents.begin_step()
        self._drop_cancelled()
        self._end_failed()
        self._grow()
        for row in self._reading.values():
            if (
                not row.started
            ):  # before rows that are admitted now, so that it never waits for them
                self._begin(row, self._find(row))
        starts = [] if self._holds() else self._admit()
        under_way = min(len(self._launched), self._stages - 1)
        running = self._in_turn(self._steps - under_way)
        waiting = [row.prefill_length - row.prefilled for row in self._reading.values()]
        reads = waiting or self._drafts.has_model
        limits = self._budget.limits(len(running), waiting) if reads else Limits(0, 0)
        drafts, proposals = plan_drafts(running, limits.tokens, self._drafts)
        drafting = [row for row in running if row.draft is not None]
        single = [row for row in running if row.hypotheses is None and row.draft is None]
        beams = [row for row in running if row.hypotheses is not None]
        encode = self._plan_encode()
        prefill = self._plan_prefill(limits)
        if not (encode or prefill or running or self._extents.moved):
            return None
        self._steps += 1
        for row in running:
            self._free_tokens(row, 1)
            self._states.save_decoding(row)
            row.launch(self._steps)
        tokens = sum(part.count for part in prefill)
        drafted = [(row, row.slot) for row in drafting]
        self._launched.append(
            LaunchedStep(dict(self._running), drafted, tokens, time.perf_counter())
        )
        tokens += sum(len(row.source) for row in encode)
        tokens += len(running) + sum(draft.foretold for draft in drafts)
        self._statistics.launch(len(encode) + len(prefill) + len(running), tokens)
        return Plan(
            starts=tuple(row.as_start() for row in starts),
            encode=tuple(row.slot for row in encode),
            prefill=tuple(prefill),
            decode=tuple(row.slot for row in single if not row.general),
            apart=tuple(row.slot for row in single if row.general),
            drafts=drafts,
            proposals=proposals,
            beams=tuple(row.slot for row in beams),
            reorder=max((row.reordered for row in beams), default=0),
            longest=max((row.cached for row in running), default=0),
            longest_source=max((len(row.source) for row in running), default=0),
            moves=tuple(self._moves),
            copies=tuple(self._extents.copies),
            state_copies=self._states.planned(),
            places=tuple(
                {Relocation(row.slot, row.start) for row in self._extents.moved if row.slots}
            ),
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

    def _holds(self) -> bool:
        """Return whether rows that wait do so a step longer, for more of them to join at once."""
        if self._mixes:
            return False
        joining = list(islice(self._waiting, len(self._free_slots)))
        decoding = sum(row.decodes for row in self._running.values()) if joining else 0
        max_wait = min(decoding // ROWS_PER_WAIT_STEP, MAX_WAIT_STEPS)
        tokens = sum(len(row.prompt) + len(row.source) for row in joining)
        enough = decoding * TOKENS_PER_DECODING_ROW
        holds = 0 < tokens < enough and self._delayed < max_wait
        self._delayed = self._delayed + 1 if holds else 0
        return holds

    def _grow(self) -> None:
        """Let every row have room for the token that it computes next."""
        for row in tuple(self._running.values()):
            while row.launched >= row.fits and row.decodes and not self._extents.extend(row):
                self._preempt(next(item for item in reversed(self._running.values()) if item.grows))

    def _preempt(self, row: Row) -> None:
        """Let the row wait for a place again; tokens that were launched come nevertheless."""
        self._vacate(row)
        row.slots, row.start, row.started = (), -1, False
        row.prefilled = row.read_by_draft = 0
        if row.prefix is not None:
            row.prefix = Prefix(row.prefix.salt)
        self._waiting.appendleft(row)
        self._statistics.preempt()

    def _admit(self) -> list[Row]:
        starts: list[Row] = []
        while self._waiting and self._start(self._waiting[0], starts):
            self._waiting.popleft()
        if self._waiting and self._waiting[0].session is not None:
            # It may wait for the end of a session whose next request stands behind it.
            for row in list(self._waiting):
                placed = row.session is not None and row.session.start is not None
                if placed and self._start(row, starts):
                    self._waiting.remove(row)
        return starts

    def _start(self, row: Row, starts: list[Row]) -> bool:
        """Let a row that waits run, if there is room for it, be it where its prefix was found.
        One that has run before waits for all tokens that were launched, and for its mask."""
        if row.launched > len(row.tokens) or not with_masks([row]):
            return False
        if row.placed_at:
            row.resume()
        if row.session is not None and not self._states.has_room(row.session):
            return False
        prefix, moved = self._find(row), len(self._extents.moved)
        start = self._extents.place(row) if row.width <= len(self._free_slots) else None
        if start is None:
            return False
        if len(self._extents.moved) > moved:  # maybe over what was found, or that itself
            prefix = self._find(row)
        row.slots = tuple(self._free_slots.pop() for _ in range(row.width))
        row.start = start + len(row.source)
        self._running[row.slot] = self._reading[row.slot] = row
        if not row.placed_at:
            row.weights_versions = (self.weights_version, self.weights_version)
        self._statistics.admit(row, time.perf_counter())
        if row.session is not None:
            self._states.resume(row.session, row)
        self._free_tokens(row, row.prefill_length)
        starts.append(row)
        self._begin(row, prefix)
        return True

    def _find(self, row: Row) -> CachedPrefix:
        """The prompt's longest prefix in the cache; its last token has to be computed."""
        if row.prefix is None or row.request.asks_of_prompt:
            return CachedPrefix()
        return self._cache.find(row.prefix.digests[: (row.prefill_length - 1) // BLOCK_TOKENS])

    def _begin(self, row: Row, prefix: CachedPrefix) -> None:
        """Begin a prompt after what is found of it, unless enough of it is on its way.

        That is computed by rows which have begun, so no row waits indefinitely.
        """
        row.started = prefix.coming - prefix.tokens < TOKENS_WORTH_A_STEP
        if row.prefix is None or not row.started:
            return
        if prefix.tokens:
            self._extents.copies.append(Copy(prefix.start, row.start, prefix.tokens))
        self._states.begin(row, prefix)
        row.prefilled = row.prefix.computed = prefix.tokens
        if row.num_cached_tokens is None:  # what it had before a preemption is its own
            row.num_cached_tokens = prefix.tokens
        row.read_by_draft = row.prefix.read = prefix.read
        row.prefix.start = row.start
        self._cache.add(row.prefix)
        if not row.request.asks_of_prompt:
            self._statistics.find_prefix(row.prefill_length, prefix.tokens)

    def _free_tokens(self, row: Row, tokens: int) -> None:
        """Let the window of the row's session slide on, if `tokens` more need the place."""
        if row.session is not None:
            move = row.session.make_room(row.cached, tokens, row.slot)
            self._moves += [] if move is None else [move]

    def close_session(self, session: Session) -> None:
        """Free the session's extent, at once or when its request has ended."""
        session.closed = True
        waiting = any(row.session is session for row in self.rows)
        if session.start is not None and not waiting:
            self._cache.free(session.start, session.extent_tokens)
            session.start = None
            self._states.close(session)

    def _leave_session(self, row: Row, session: Session) -> None:
        """The session keeps what the row has brought into the cache."""
        complete = row.request.output_len == 0 and not row.future.cancelled()
        comes = bool(row.tokens) or complete
        if comes and self._states.keep(session, row):
            session.enter_turn(len(row.prompt), row.tokens, row.end_id)
        else:
            session.abort_turn()
        if session.closed:
            self.close_session(session)

    def _plan_encode(self) -> list[Row]:
        """Rows whose sources the encoder reads now, those of one length side by side."""
        selected: list[Row] = []
        budget = self._prefill_tokens
        for row in self._reading.values():
            if not row.source or row.encoded:
                continue
            if selected and (self._one_by_one or len(row.source) > budget):
                break
            row.encoded = True
            budget -= len(row.source)
            selected.append(row)
        return sorted(selected, key=lambda row: len(row.source))

    def _plan_prefill(self, limits: Limits) -> list[PrefillPart]:
        """The next tokens of prompts."""
        parts = []
        ready = [
            row for row in self._reading.values() if row.started and (row.encoded or not row.source)
        ]
        for row, count in self._budget.shares(ready, limits):
            if row.begins_decoding:
                row.prefilled = count
                del self._reading[row.slot]
                continue
            saves = self._states.saves(row, row.prefilled + count)
            parts.append(PrefillPart(row.slot, row.past + row.prefilled, count, saves))
            row.prefilled += count
            if row.prefix is not None:
                row.prefix.computed = row.prefilled
            if row.prefilled == row.prefill_length:
                del self._reading[row.slot]
                row.launch(self._steps + 1)
        return parts

    def _drop_cancelled(self) -> None:
        if not self._cancelled:
            return
        self._cancelled = False
        for row in [row for row in self._waiting if row.future.cancelled()]:
            self._waiting.remove(row)
            if row.session is not None:
                self._leave_session(row, row.session)
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
        """Give back the row's place.

        Steps already launched may still write there; they run before anything launched later.
        """
        del self._running[row.slot]
        self._reading.pop(row.slot, None)
        self._free_slots += row.slots[::-1]
        if row.session is not None:
            self._leave_session(row, row.session)
        elif row.prefix is not None and row.started:
            cached_ids = (*row.ids[: row.prefilled], *row.tokens[row.resumed : -1])
            self._cache.keep(row.prefix, cached_ids, row.reserved)
        else:
            self._cache.free(row.extent, row.reserved)
