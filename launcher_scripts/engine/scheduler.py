"""Which rows run in the next step: rows join and leave between steps (in-flight batching)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from launcher_scripts.engine.kv_cache import ExtentAllocator
from launcher_scripts.engine.learned_parts import NO_TASK
from launcher_scripts.engine.plan import Plan, PrefillPart, RowStart
from launcher_scripts.engine.prompts import prompt_of
from launcher_scripts.engine.runner import EncodedRow, StepResult, TokenResult
from launcher_scripts.protocol import GenerateOutput, GenerateRequest


@dataclass(eq=False)
class Row:
    """A request on its way: `launched` counts tokens asked of the device, `tokens` those seen.

    source is what the encoder reads, where there is one; the prompt is then the decoder's, and
    empty where nothing is to be decoded. start is the cache token after those of the source.
    on_progress gets what there is after every token but the last, which the future brings.
    """

    request: GenerateRequest
    future: Future[GenerateOutput]
    prompt: tuple[int, ...]
    end_id: int
    source: tuple[int, ...] = ()
    on_progress: Callable[[GenerateOutput], None] | None = None
    slot: int = -1
    start: int = -1
    encoded: bool = False
    prefilled: int = 0
    launched: int = 0
    finished: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probs: list[tuple[float, float]] = field(default_factory=list)
    context_logits: list[Tensor] = field(default_factory=list)
    answer: EncodedRow | None = None

    @property
    def capacity(self) -> int:
        """Cache tokens of the whole row; the last token chosen is never fed back."""
        return len(self.source) + len(self.prompt) + max(self.request.output_len - 1, 0)

    @property
    def extent(self) -> int:
        """First cache token of the whole row."""
        return self.start - len(self.source)

    @property
    def cached(self) -> int:
        """Tokens in the cache once everything launched has run."""
        return self.prefilled + max(self.launched - 1, 0)

    def as_start(self) -> RowStart:
        request = self.request
        return RowStart(
            slot=self.slot,
            start=self.start,
            ids=self.prompt,
            end_id=self.end_id,
            sampling=request.sampling,
            bad_words=request.bad_words,
            return_log_probs=request.return_log_probs,
            return_context_logits=request.return_context_logits,
            source=self.source,
            return_hidden_state=request.return_hidden_state,
            return_attentions=request.return_attentions,
            prompt=prompt_of(request),
            ia3_task=NO_TASK if request.ia3_task is None else request.ia3_task,
        )


class Scheduler:
    """Admits rows in the order they came, as slots and cache tokens allow, and ends them.

    slots:          most rows in flight
    prefill_tokens: most prompt tokens of one step, so that a long prompt cannot hold up the rows
                    that are generating; and most source tokens, except that a source is never cut
    """

    def __init__(self, slots: int, cache_tokens: int, prefill_tokens: int) -> None:
        self._free_slots = list(range(slots))[::-1]
        self._extents = ExtentAllocator(cache_tokens)
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Row] = deque()
        self._running: dict[int, Row] = {}
        self._launched: deque[dict[int, Row]] = deque()

    @property
    def rows(self) -> list[Row]:
        """Every row that has not ended."""
        return [*self._running.values(), *self._waiting]

    def add(self, row: Row) -> None:
        self._waiting.append(row)

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to launch."""
        self._drop_cancelled()
        starts = self._admit()
        decode = [row for row in self._running.values() if self._decodes(row)]
        encode = self._plan_encode()
        prefill = self._plan_prefill()
        if not (encode or prefill or decode):
            return None
        for row in decode:
            row.launched += 1
        self._launched.append(dict(self._running))
        return Plan(
            starts=tuple(starts),
            encode=tuple(row.slot for row in encode),
            prefill=tuple(prefill),
            decode=tuple(row.slot for row in decode),
            longest=max((row.cached for row in decode), default=0),
            longest_source=max((len(row.source) for row in decode), default=0),
        )

    def apply(self, result: StepResult) -> None:
        """Take the oldest launched step's tokens; rows that ended answer and leave.

        A slot may have a new row by now: the tokens belong to the rows of the step's launch.
        """
        rows = self._launched.popleft()
        for encoded in result.encoded:
            self._take_encoded(rows[encoded.slot], encoded)
        for slot, logits in result.context_logits:
            rows[slot].context_logits.append(logits)
        for token in result.read():
            row = rows[token.slot]
            if row.finished:
                continue
            _take(row, token)
            if row.finished:
                self._leave(row)
                _answer(row)
            elif row.on_progress is not None:
                row.on_progress(_output(row))

    def _take_encoded(self, row: Row, encoded: EncodedRow) -> None:
        """The encoder's answer is the whole one where nothing is decoded."""
        if row.finished:
            return
        row.answer = encoded
        if not row.prompt:
            row.finished = True
            self._leave(row)
            _answer(row)

    def _decodes(self, row: Row) -> bool:
        whole_prompt = row.prefilled == len(row.prompt)
        return whole_prompt and row.launched < row.request.output_len

    def _admit(self) -> list[RowStart]:
        starts = []
        while self._waiting and self._free_slots:
            row = self._waiting[0]
            start = self._extents.allocate(row.capacity)
            if start is None:
                break
            self._waiting.popleft()
            row.slot, row.start = self._free_slots.pop(), start + len(row.source)
            self._running[row.slot] = row
            starts.append(row.as_start())
        return starts

    def _plan_encode(self) -> list[Row]:
        """Rows whose sources the encoder reads now, those of one length side by side."""
        chosen: list[Row] = []
        budget = self._prefill_tokens
        for row in self._running.values():
            if not row.source or row.encoded:
                continue
            if chosen and len(row.source) > budget:
                break
            row.encoded = True
            budget -= len(row.source)
            chosen.append(row)
        return sorted(chosen, key=lambda row: len(row.source))

    def _plan_prefill(self) -> list[PrefillPart]:
        parts = []
        budget = self._prefill_tokens
        for row in self._running.values():
            count = min(len(row.prompt) - row.prefilled, budget)
            if count <= 0 or (row.source and not row.encoded):
                continue
            parts.append(PrefillPart(row.slot, row.prefilled, count))
            budget -= count
            row.prefilled += count
            if row.prefilled == len(row.prompt):
                row.launched = 1
        return parts

    def _drop_cancelled(self) -> None:
        self._waiting = deque(row for row in self._waiting if not row.future.cancelled())
        for row in [row for row in self._running.values() if row.future.cancelled()]:
            row.finished = True
            self._leave(row)

    def _leave(self, row: Row) -> None:
        """Give back the row's place.

        Steps already launched may still write there; they run before anything launched later.
        """
        del self._running[row.slot]
        self._free_slots.append(row.slot)
        self._extents.free(row.extent, row.capacity)


def _take(row: Row, result: TokenResult) -> None:
    """Add a token and see whether it ends the row: end token, stop word or length."""
    if row.request.output_len == 0:
        row.finished = True
        return
    row.tokens.append(result.token)
    if result.log_probs is not None:
        row.log_probs.append(result.log_probs)
    row.finished = (
        result.token == row.end_id
        or len(row.tokens) >= row.request.output_len
        or _ends_in_stop_word(row)
    )


def _ends_in_stop_word(row: Row) -> bool:
    """Whether the text so far ends in a stop word; a word may begin in the prompt."""
    if not row.request.stop_words:
        return False
    longest = max(map(len, row.request.stop_words))
    tail = (*row.prompt[-longest:], *row.tokens)[-longest:]
    return any(tail[-len(word) :] == word for word in row.request.stop_words)


def _answer(row: Row) -> None:
    output = replace(
        _output(row),
        context_logits=_context_logits(row) if row.request.return_context_logits else None,
        hidden_state=None if row.answer is None else row.answer.hidden,
        attentions=None if row.answer is None else row.answer.attentions,
    )
    try:
        row.future.set_result(output)
    except InvalidStateError:
        return  # cancelled meanwhile


def _output(row: Row) -> GenerateOutput:
    """The row's tokens so far."""
    asked = row.request.return_log_probs
    return GenerateOutput(
        output_ids=tuple(row.tokens),
        cum_log_probs=sum(whole for whole, _ in row.log_probs) if asked else None,
        output_log_probs=tuple(candidates for _, candidates in row.log_probs) if asked else (),
    )


def _context_logits(row: Row) -> Tensor:
    """Float32 [prompt tokens, vocab]; the start token of an empty prompt is not the caller's, but
    a decoder's first input.
    """
    whole = torch.cat(row.context_logits)
    return whole if row.source else whole[len(row.prompt) - len(row.request.input_ids) :]
