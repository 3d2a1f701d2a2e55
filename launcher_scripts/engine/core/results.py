"""Results of a step, on their way to the host."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from launcher_scripts.common.errors import ServerError
from launcher_scripts.contract.requests import GenerateOutput
from launcher_scripts.engine.core.sampler import Sampled, TokenScores
from launcher_scripts.kernels.ops import Ops


class TokenResult(NamedTuple):
    """One token of one row.

    log_probs: (whole vocabulary, candidates), where asked for
    scores:    by the model's own logits, of one token on the host, where asked for
    """

    slot: int
    token: int
    log_probs: tuple[float, float] | None = None
    scores: TokenScores | None = None


@dataclass(frozen=True)
class EncodedRow:
    """The encoder's answer for one row: float32 [n, hidden], and [layers, heads, n, n] if asked."""

    slot: int
    hidden: Tensor
    attentions: Tensor | None


class Candidate(NamedTuple):
    """A continuation of a hypothesis of a beam search.

    parent: which hypothesis;  ranking: what it is ranked by;  total: cumulative log-probability
    """

    parent: int
    token: int
    ends: bool
    ranking: float
    total: float
    log_prob: float


@dataclass(frozen=True)
class BeamResult:
    """A step of one beam search: the best continuations, best first."""

    slot: int
    candidates: list[Candidate]


@dataclass
class StepResult:
    """Results of a step; reading them waits for the device.

    unsettled: what is to be done once the tokens that the last pipeline stage chooses are here
    done:      marks the end of a step over prompts, on a GPU
    """

    tokens: list[TokenCopy] = field(default_factory=list)
    context_logits: list[tuple[int, Tensor]] = field(default_factory=list)
    context_embeddings: list[tuple[int, Tensor]] = field(default_factory=list)
    prompt_scores: list[tuple[int, ScoreCopy]] = field(default_factory=list)
    encoded: list[EncodedRow] = field(default_factory=list)
    drafts: DraftCopy | None = None
    beams: list[BeamCopy] = field(default_factory=list)
    unsettled: list[Callable[[], None]] = field(default_factory=list)
    done: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        """True if the device has finished a step over prompts."""
        return self.done is None or self.done.query()

    def wait(self) -> None:
        """Wait until the device has finished a step over prompts, which may bring no tokens."""
        if self.done is not None:
            self.done.synchronize()

    def settle(self) -> None:
        """Have the tokens, where another stage has chosen them; steps settle in their order."""
        for settle in self.unsettled:
            settle()
        self.unsettled.clear()

    def read(self) -> Iterator[list[TokenResult]]:
        """Tokens as the device brings them: those behind prompts before those of decoding rows."""
        self.settle()
        return (copy.read() for copy in self.tokens)

    def read_drafts(self) -> dict[int, list[TokenResult]]:
        """By slot, the tokens that rows with a draft get: those that it foretold, and one more."""
        return {} if self.drafts is None else self.drafts.read()

    def read_beams(self) -> list[BeamResult]:
        return [result for copy in self.beams for result in copy.read()]


class ScoreCopy:
    """Scores on their way to the host."""

    def __init__(self, scores: TokenScores) -> None:
        self._log_probs, self._ids = _to_host(scores.log_probs), _to_host(scores.ids)
        self._event = _event_after(scores.ids)

    def read(self) -> TokenScores:
        """In memory of their own, which is not the device's."""
        if self._event is not None:
            self._event.synchronize()
        return TokenScores(self._log_probs.clone(), self._ids.clone())


class Arrivals:
    """Host buffers of the last steps' tokens: a line for each, one after the other.

    The device counts the lines that it writes. So a step that is a CUDA graph writes its own: to
    launch a kernel, or a copy, takes the host a quarter of a small model's step.
    """

    def __init__(
        self, lines: int, rows: int, padding: int, device: torch.device, kernels: Ops
    ) -> None:
        """lines: how many may be under way at a time, each of up to `rows` tokens
        padding: the slot of no row
        """
        self._kernels = kernels
        self._padding = padding
        on_gpu = device.type == "cuda"
        host = torch.device("cpu") if on_gpu else device  # the meta device has fake tensors
        self._memory = torch.empty(lines, rows, dtype=torch.int64, device=host, pin_memory=on_gpu)
        self._written = torch.zeros(1, dtype=torch.int64, device=device)
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        events = [torch.cuda.Event() if on_gpu else None for _ in range(lines)]
        self._next = itertools.cycle(zip(self._memory, events, strict=True))

    def write(self, tokens: Tensor, slots: Tensor) -> None:
        """Have the device write the tokens of the rows in `slots`, both int64 [B], as the next
        line; not those of padding rows alone.
        """
        self._kernels.copy_to_host(tokens, slots, self._memory, self._written, self._padding)

    def take(self, count: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """The next line that was to be written, of so many tokens, and what says that they are
        there: everything launched until now has been done. None: they are there.
        """
        line, event = next(self._next)
        if event is not None:
            event.record(self._stream)
        return line[:count], event


class TokenCopy:
    """Sampled values on their way to the host.

    scored:   which of the slots the sampled scores belong to, by their places in the list
    arrivals: where the tokens have been written to; None: they go to memory of their own
    """

    def __init__(
        self,
        slots: Sequence[int],
        sampled: Sampled,
        scored: Sequence[int] = (),
        arrivals: Arrivals | None = None,
    ) -> None:
        self._slots = slots
        self._log_probs = None if sampled.log_probs is None else _to_host(sampled.log_probs)
        self._scored = scored
        self._scores = None if sampled.scores is None else ScoreCopy(sampled.scores)
        self._event: torch.cuda.Event | None
        if arrivals is not None:
            self._tokens, self._event = arrivals.take(len(slots))
        else:
            self._tokens = _to_host(sampled.tokens)
            self._event = _event_after(sampled.tokens)

    def read(self) -> list[TokenResult]:
        if self._event is not None:
            self._event.synchronize()
        tokens = self._tokens.tolist()
        if self._log_probs is None and self._scores is None:
            return [TokenResult(*pair) for pair in zip(self._slots, tokens, strict=False)]
        pairs: list[tuple[float, float] | None] = [None] * len(tokens)
        if self._log_probs is not None:
            pairs = list(zip(*self._log_probs.tolist(), strict=True))
        scores: dict[int, TokenScores] = {}
        if self._scores is not None:
            read = self._scores.read()
            columns = zip(read.log_probs.split(1), read.ids.split(1), strict=True)
            scores = {
                at: TokenScores(*tensors) for at, tensors in zip(self._scored, columns, strict=True)
            }
        return [
            TokenResult(slot, token, pair, scores.get(at))
            for at, (slot, token, pair) in enumerate(zip(self._slots, tokens, pairs, strict=False))
        ]


class DraftCopy:
    """The tokens of rows with drafts on their way to the host.

    columns: the tokens behind the rows' last ones, behind the first token of each draft, ...
    right:   int64 [R], how many tokens of each draft came
    """

    def __init__(self, columns: Sequence[TokenCopy], right: Tensor) -> None:
        self._columns = columns
        self._right = _to_host(right)
        self._event = _event_after(right)

    def read(self) -> dict[int, list[TokenResult]]:
        """By slot."""
        if self._event is not None:
            self._event.synchronize()
        rows = zip(*(column.read() for column in self._columns), strict=True)
        counts = zip(rows, self._right.tolist(), strict=True)
        return {row[0].slot: list(row[: right + 1]) for row, right in counts}


class BeamCopy:
    """Rankings of several searches on their way to the host.

    choices: int64 [3, G, K]: parent, token, whether it ends
    scores:  float32 [3, G, K]: ranking, total, the token's log-probability
    """

    def __init__(self, slots: Sequence[int], choices: Tensor, scores: Tensor) -> None:
        self._slots = slots
        self._choices, self._scores = _to_host(choices), _to_host(scores)
        self._event = _event_after(choices)

    def read(self) -> list[BeamResult]:
        if self._event is not None:
            self._event.synchronize()
        columns = zip(*self._choices.tolist(), *self._scores.tolist(), strict=True)
        return [
            BeamResult(
                slot,
                [
                    Candidate(parent, token, bool(ends), *scores)
                    for parent, token, ends, *scores in zip(*column, strict=True)
                ],
            )
            for slot, column in zip(self._slots, columns, strict=True)
        ]


def _event_after(copied: Tensor) -> torch.cuda.Event | None:
    """Return the event that the host waits for before it reads copies; None on the CPU."""
    if not copied.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(copied.device))  # without a device it is looked up
    return event


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Pending:
    """Futures that are neither answered nor cancelled; each leaves by itself when it is."""

    def __init__(self) -> None:
        self._futures: set[Future[GenerateOutput]] = set()
        self._lock = threading.Lock()

    def add(self, future: Future[GenerateOutput]) -> None:
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._done)

    def __len__(self) -> int:
        return len(self._futures)

    def fail(self, error: ServerError) -> None:
        """Answer all of them with `error`."""
        with self._lock:
            futures, self._futures = self._futures, set()
        for future in futures:
            try:
                future.set_exception(error)
            except InvalidStateError:
                continue  # answered or cancelled meanwhile

    def _done(self, future: Future[GenerateOutput]) -> None:
        with self._lock:
            self._futures.discard(future)
