"""A request on its way through the engine, as the host sees it, and its grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from launcher_scripts.common.errors import RequestError, problem
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, ModelLogProbs
from launcher_scripts.engine.core.hypotheses import Hypotheses, Hypothesis, PromptLookup
from launcher_scripts.engine.core.prefix_cache import Prefix
from launcher_scripts.engine.core.results import BeamResult, EncodedRow, TokenResult
from launcher_scripts.engine.core.sampler import TokenScores, model_log_probs, no_scores
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.messages.plan import Draft, RowStart, TokenMask
from launcher_scripts.engine.model.kv_cache import Block

UNGUIDED = "guided_grammar and the request's other inputs leave no token that may come"


MASK_SECONDS = 0.02  # a step waits for masks: usual ones take less than 1 ms
MAX_MASK_SECONDS = 10.0


class Snapshot(NamedTuple):
    """Progress of a row, to be read later by any thread.

    The tokens of a row without a beam search only ever become more, so how many there were is all
    that is kept. Of a beam search these are the best hypotheses of that step.
    """

    row: Row
    tokens: int
    best: Sequence[Hypothesis] = ()

    def output(self, tokens: int | None = None, first: int = 0) -> GenerateOutput:
        """The row at that time, or as it was when it had no more than `tokens`.

        first: of the tokens before this one there are no log-probabilities, nor of the prompt's
        """
        if self.best:
            return _best_output(self.row, self.best)
        return _first_tokens(self.row, self.tokens if tokens is None else tokens, first)


SnapshotCallback = Callable[[Snapshot], None]


class Guide(Protocol):
    """One row's grammar and how far its text has come; the engine's thread alone asks it."""

    @property
    def finished(self) -> bool:
        """Return whether the text is complete and nothing can follow it."""
        ...

    def is_ready(self, timeout: float) -> bool:
        """True if the next mask is there, waiting for it up to `timeout` seconds.

        Raises RequestError for a grammar that cannot be followed further.
        """
        ...

    def mask(self) -> bytes:
        """Return the allowed next ids: a bit each, the first id's the lowest of the first 32-bit
        word. As many words as the vocabulary needs, or more.
        """
        ...

    def accept(self, token: int) -> bool:
        """A token has come. False: it is none that may."""
        ...


@dataclass(eq=False)
class Row:
    """A request on its way: `launched` counts tokens asked of the device, `tokens` those seen.
    The newest of them was asked for in the scheduler's step `step`.

    source is what the encoder reads, where there is one; the prompt is then the decoder's, and
    empty where nothing is to be decoded. start is the address after those of the source, and
    spacing how many addresses a slot has. Its tokens are in `blocks`, and those of the source in
    source_blocks; a row of several hypotheses has a slot for each, and the others' blocks are in
    `copies`. A row of a session has the session's, with the tokens of the requests before. The
    guide's masks of the first `masked` tokens have been told to the ranks; the mask of the next one
    has been late since `late_since`, by time.perf_counter. prefix is what others
    may find of the row's tokens, None: nothing. num_cached_tokens is how many of its prompt's
    tokens were in the cache when it began, None: it has not. A row that has a place and has not
    begun waits for what another one computes.

    reserved counts the tokens of the blocks. A row that grows has room for its prompt and some
    tokens at first, for as long as `launched` is less than `fits`, and gets more then. It may lose
    its place for a row that came before it; what it had is computed again later, its first
    `resumed` tokens as a prompt.

    general: whether the row needs the general path, for a window or for IA3.

    lookup makes drafts of tokens, where they are asked for; draft is what a step tries that was
    launched and has not been seen, and the draft model's cache has the row's first `read_by_draft`
    tokens. is_readable: there are no virtual tokens, whose table the draft model does not have.
    waits_for_tokens: a step depends on the tokens of all before. borders: behind how many tokens of
    the prompt its states are kept, where the model has such.

    weights_versions: of the weights with which it began, and of those that it has now.

    on_progress gets a snapshot after every token but the last, which the future brings. came_at,
    placed_at and newest_at are when it came, got its place and had its newest token, by
    time.perf_counter; 0: not yet.
    """

    request: GenerateRequest
    future: Future[GenerateOutput]
    prompt: tuple[int, ...]
    end_id: int
    source: tuple[int, ...] = ()
    on_progress: SnapshotCallback | None = None
    slots: tuple[int, ...] = ()
    start: int = -1
    spacing: int = 0
    blocks: list[Block] = field(default_factory=list)
    source_blocks: list[Block] = field(default_factory=list)
    copies: list[list[Block]] = field(default_factory=list)
    reserved: int = 0
    fits: float = inf
    grows: bool = False
    resumed: int = 0
    started: bool = False
    encoded: bool = False
    prefilled: int = 0
    launched: int = 0
    step: int = 0
    finished: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probs: list[tuple[float, float]] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)
    prompt_scores: list[TokenScores] = field(default_factory=list)
    context_logits: list[Tensor] = field(default_factory=list)
    context_embeddings: Tensor | None = None
    answer: EncodedRow | None = None
    hypotheses: Hypotheses | None = None
    session: Session | None = None
    guide: Guide | None = None
    num_cached_tokens: int | None = None
    prefix: Prefix | None = None
    general: bool = field(init=False)
    lookup: PromptLookup | None = field(init=False, default=None)
    is_readable: bool = field(init=False, default=False)
    waits_for_tokens: bool = field(init=False)
    draft: Draft | None = None
    read_by_draft: int = 0
    borders: Sequence[int] = ()
    masked: int = 0
    late_since: float = 0.0
    error: RequestError | None = None
    weights_versions: tuple[int, int] = (0, 0)
    came_at: float = field(default_factory=time.perf_counter)
    placed_at: float = 0.0
    newest_at: float = 0.0

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.general = self.window > 0 or self.request.ia3_task is not None
        if self.request.num_speculative_tokens:
            self.lookup = PromptLookup(self.prompt)
            self.is_readable = min(self.prompt, default=0) >= 0
        self.waits_for_tokens = self.guide is not None or self.lookup is not None
        if self.width > 1:
            self.hypotheses = Hypotheses(self.width, sampling.len_penalty, self.request.output_len)

    @property
    def decodes(self) -> bool:
        """Return whether it may get a token in the next step, by those that it has."""
        if self.waits_for_tokens and self.launched > len(self.tokens):
            return False
        return self.prefilled == self.prefill_length and self.launched < self.request.output_len

    @property
    def awaits_decode_step(self) -> bool:
        """Return whether it is in a decode step, not seen yet, that depended on the tokens
        before."""
        return self.waits_for_tokens and self.launched > len(self.tokens) > self.resumed

    @property
    def reordered(self) -> int:
        """Number of generated tokens in the cache that may differ between the hypotheses of a
        launched beam search.

        Those known to be shared a step ago still are: all that go on descend from the same.
        """
        if self.hypotheses is None or not self.decodes:
            return 0
        return self.launched - 1 - self.hypotheses.shared

    def launch(self, step: int) -> None:
        """A token is asked for in this step."""
        self.launched += 1
        self.step = step

    @property
    def slot(self) -> int:
        return self.slots[0]

    @property
    def width(self) -> int:
        """Slots that the row takes."""
        return self.request.sampling.beam_width if self.request.output_len else 1

    @property
    def num_sent(self) -> int:
        """Number of ids that the caller sent, of the encoder's input if there is one."""
        return len(self.request.input_ids)

    @property
    def stopped(self) -> bool:
        """Return whether an end token, a stop word or the guide ended the row; of a beam search its
        best text.
        """
        if self.hypotheses is not None:
            text = self.hypotheses.best()[0].beam(log_probs=False).output_ids
            return text[-1] == self.end_id or len(text) < self.request.output_len
        last = self.tokens[-1:]
        by_guide = self.guide is not None and self.guide.finished
        return bool(last) and (by_guide or last[0] == self.end_id or _ends_in_stop_word(self))

    @property
    def begins_decoding(self) -> bool:
        """Return whether decoding takes the whole prompt: one token, of which nothing else is
        asked."""
        request = self.request
        has_prompt_outputs = request.return_context_logits or request.return_context_embeddings
        is_single = len(self.prompt) == self.width == 1 and request.output_len > 0
        return bool(self.source) and is_single and not has_prompt_outputs

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids that are computed before the row decodes: its prompt, and tokens it had before."""
        return (*self.prompt, *self.tokens[: self.resumed])

    @property
    def prefill_length(self) -> int:
        """Number of tokens that are computed before the row decodes."""
        return len(self.prompt) + self.resumed

    @property
    def row_capacity(self) -> int:
        """Most cache tokens of each hypothesis; the last token chosen is never fed back."""
        return len(self.prompt) + max(self.request.output_len - 1, 0)

    @property
    def past(self) -> int:
        """Tokens in the row's blocks before its prompt."""
        return 0 if self.session is None else self.session.cached

    @property
    def window(self) -> int:
        """Number of last tokens that attention covers; 0: all."""
        return 0 if self.session is None else self.session.window

    @property
    def cached(self) -> int:
        """Tokens in the cache once everything launched has run."""
        return self.past + self.prefilled + max(self.launched - self.resumed - 1, 0)

    def reserve(self, tokens: int) -> None:
        """The row's blocks have so many tokens now."""
        self.reserved = tokens
        if self.grows:
            self.fits = tokens - len(self.prompt) + 1

    @property
    def room(self) -> int:
        """Maximum number of draft tokens, with one more of the row's own after them."""
        left = min(self.reserved - self.cached, self.request.output_len - len(self.tokens)) - 1
        return max(0, min(left, self.request.num_speculative_tokens))

    def full_blocks(self, tokens: int) -> list[Block]:
        """Return the blocks that the row's first tokens fill."""
        return self.blocks[: tokens * len(self.blocks) // max(self.reserved, 1)]

    def read_draft(self, tokens: int) -> None:
        """The draft model's cache has so many tokens of the row now."""
        for block in self.full_blocks(tokens)[len(self.full_blocks(self.read_by_draft)) :]:
            block.read = True
        self.read_by_draft = tokens

    def end_draft(self, right: int) -> None:
        """The draft is over, of which so many tokens came: those have been read by the draft model,
        but for the last one that it proposed, unless it reads them again. It has nothing of a row
        without a place.
        """
        if self.slots and self.draft and self.draft.proposed and not self.draft.reread:
            self.read_draft(self.read_by_draft + min(right, self.draft.proposed - 1))
        self.draft, self.launched = None, len(self.tokens)

    def resume(self) -> None:
        """Have what the row has generated computed again, in the place that it gets."""
        self.resumed = len(self.tokens)
        if self.prefix is not None:
            self.prefix.set_text(self.ids)

    def as_start(self) -> RowStart:
        request = self.request
        return RowStart(
            slot=self.slot,
            start=self.start,
            ids=self.ids,
            end_id=self.end_id,
            request=replace(
                request,
                input_ids=(),
                decoder_input_ids=(),
                guided_grammar=None,
                prompt_embedding=None,
            ),
            guided=self.guide is not None,
            source=self.source,
            prompt_embedding=request.prompt_embedding,
            beams=self.slots if self.hypotheses else (),
            stride=self.row_capacity,
            spacing=self.spacing,
            generated=self.resumed,
            past=self.past,
            dropped=0 if self.session is None else self.session.dropped,
            window=self.window,
            general=self.general,
        )


def take(row: Row, result: TokenResult) -> None:
    """Add a token and see whether it ends the row: end token, stop word or length."""
    if row.request.output_len == 0:
        row.finished = True
        return
    row.tokens.append(result.token)
    if row.lookup is not None:
        row.lookup.add((result.token,))
    if result.log_probs is not None:
        row.log_probs.append(result.log_probs)
    if result.scores is not None:
        row.scores.append(result.scores)
    if row.guide is not None and not row.guide.accept(result.token):
        row.error = RequestError(problem(UNGUIDED, got=result.token))
    row.finished = (
        row.error is not None
        or (row.guide is not None and row.guide.finished)
        or result.token == row.end_id
        or len(row.tokens) >= row.request.output_len
        or _ends_in_stop_word(row)
    )


def take_beams(row: Row, result: BeamResult) -> None:
    """Add a step of the row's beam search and see whether it is over."""
    if row.hypotheses is not None:
        row.hypotheses.take(result.candidates)
        row.finished = row.hypotheses.finished


def _ends_in_stop_word(row: Row) -> bool:
    """Return whether the text so far ends in a stop word; a word may begin in the prompt."""
    if not row.request.stop_words:
        return False
    longest = max(map(len, row.request.stop_words))
    tail = (*row.prompt[-longest:], *row.tokens)[-longest:]
    return any(tail[-len(word) :] == word for word in row.request.stop_words)


def answer(row: Row) -> None:
    if row.error is not None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            row.future.set_exception(row.error)
        return
    output = replace(
        output_so_far(row),
        context_logits=_context_logits(row) if row.request.return_context_logits else None,
        hidden_state=None if row.answer is None else row.answer.hidden,
        attentions=None if row.answer is None else row.answer.attentions,
    )
    try:
        row.future.set_result(output)
    except InvalidStateError:
        return  # cancelled meanwhile


def output_so_far(row: Row) -> GenerateOutput:
    """The row's tokens so far; of a beam search the best hypotheses so far."""
    return snapshot(row).output()


def snapshot(row: Row) -> Snapshot:
    """The row as it is now."""
    if row.hypotheses is None:
        return Snapshot(row, len(row.tokens))
    return Snapshot(row, row.hypotheses.length, row.hypotheses.best())


def _best_output(row: Row, hypotheses: Sequence[Hypothesis]) -> GenerateOutput:
    with_log_probs = row.request.return_log_probs
    beams = tuple(hypothese.beam(log_probs=with_log_probs) for hypothese in hypotheses)
    best = beams[0]
    return GenerateOutput(
        best.output_ids,
        best.cum_log_probs,
        best.output_log_probs,
        context_embeddings=row.context_embeddings,
        prompt_log_probs=_prompt_log_probs(row),
        beams=beams,
        num_cached_tokens=row.num_cached_tokens or 0,
        weights_versions=row.weights_versions,
    )


def _first_tokens(row: Row, count: int, first: int) -> GenerateOutput:
    with_log_probs, log_probs = row.request.return_log_probs, row.log_probs[:count]
    number = row.request.num_log_probs
    return GenerateOutput(
        output_ids=tuple(row.tokens[:count]),
        cum_log_probs=sum(cumulative for cumulative, _ in log_probs) if with_log_probs else None,
        output_log_probs=tuple(item for _, item in log_probs[first:]) if with_log_probs else (),
        context_embeddings=row.context_embeddings,
        token_log_probs=model_log_probs(row.scores[first:count], number) if number >= 0 else None,
        prompt_log_probs=None if first else _prompt_log_probs(row),
        num_cached_tokens=row.num_cached_tokens or 0,
        weights_versions=row.weights_versions,
    )


def _callers_first(row: Row) -> int:
    """The first token of the prompt that is the caller's: the start token of an empty prompt is
    not, nor is a table of virtual tokens in front, but a decoder's first input.
    """
    return 0 if row.source else len(row.prompt) - row.num_sent


def _context_logits(row: Row) -> Tensor:
    """Float32 [prompt tokens, vocab]"""
    return torch.cat(row.context_logits)[_callers_first(row) :]


def _prompt_log_probs(row: Row) -> ModelLogProbs | None:
    """Return the log-probabilities of the prompt's tokens; the first token has none."""
    count = row.request.num_prompt_log_probs
    if count < 0:
        return None
    first = no_scores(1, count, torch.device("cpu"))
    return model_log_probs([first, *row.prompt_scores], count, _callers_first(row))


def with_masks(rows: Iterable[Row]) -> list[Row]:
    """The rows without those whose guides still compute their masks.

    A step waits for all masks together MASK_SECONDS at most, and not for a row that is late
    already. A row gets an error if its guide fails, or is late by MAX_MASK_SECONDS.
    """
    deadline = time.perf_counter() + MASK_SECONDS
    return [row for row in rows if row.guide is None or _has_mask(row, row.guide, deadline)]


def _has_mask(row: Row, guide: Guide, deadline: float) -> bool:
    now = time.perf_counter()
    try:
        ready = guide.is_ready(0.0 if row.late_since else max(0.0, deadline - now))
    except RequestError as error:
        row.error = error
        return False
    if ready:
        row.late_since = 0.0
        return True
    row.late_since = row.late_since or now
    if now - row.late_since > MAX_MASK_SECONDS:
        message = "guided_grammar is too complex: which tokens may come next is not known in time"
        row.error = RequestError(problem(message, choices=(f"at most {MAX_MASK_SECONDS:g} s",)))
    return False


def new_masks(rows: Iterable[Row]) -> Iterator[TokenMask]:
    """Iterate over the masks of guided rows that get a token in the step that is planned."""
    for row in rows:
        if row.guide is not None and row.launched > row.masked:
            row.masked = row.launched
            yield TokenMask(row.slot, row.guide.mask())
