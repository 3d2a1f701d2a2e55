"""One request on its way back: one response, or, where the model streams, as tokens come.

The order in which requests get their responses, and the thread that sends them.

The engine's stepping thread only says which request has news. The thread here turns the newest
state of a request into tensors and sends them: a slow client holds nobody up, and where tokens come
faster than responses can be sent, a response brings several.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Protocol

import torch
import triton_python_backend_utils as pb_utils

from launcher_scripts.backends.fastertransformer.answer_tensors import beam_axis, news
from launcher_scripts.backends.triton_requests import FINAL, ClientWatch, ParameterError, failure
from launcher_scripts.common.errors import BusyError, RequestError, ServerError
from launcher_scripts.contract.metric_names import CANCELLED, FAILED, REJECTED
from launcher_scripts.contract.requests import (
    EndCode,
    GenerateOutput,
    GenerateRequest,
    ModelLogProbs,
)
from launcher_scripts.contract.tensors import NUM_CACHED_TOKENS
from launcher_scripts.engine.core.row import Snapshot, SnapshotCallback
from launcher_scripts.engine.core.session import Session

# How long the sending thread rests after a response, as a share of the time that it took, while
# several requests wait for one. The thread that steps needs Python's lock, too: without rests 128
# clients get more responses, and 15 % fewer tokens.
PAUSE_SHARE = 0.75
WATCH_INTERVAL = 15.0  # of the thread that asks about clients, for the same reason


class Answering(Protocol):
    """One request on its way back."""

    def send_deltas(self, *, flush_only: bool) -> None:
        """Send a response if there is anything that the ones before did not have."""


class Answers:
    """The thread that sends responses, and the queue of requests that have news.

    Requests with a first or last response go before those in between, so that nobody's first token
    waits for everybody else's next one.
    """

    def __init__(self, on_failure: Callable[[str, int], None]) -> None:
        """on_failure: is called by the thread when rows of a request will not be answered: why (a
        reason of metric_names), and how many
        """
        self.on_failure = on_failure
        self.client_watch = ClientWatch(WATCH_INTERVAL)
        self._lock = Lock()
        self._urgent: dict[Answering, None] = {}
        self._others: dict[Answering, None] = {}
        self._tickets: SimpleQueue[bool] = SimpleQueue()  # one for each in the two queues
        self._thread = Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def put(self, answer: Answering, *, urgent: bool) -> None:
        """Have the thread send what is new of `answer`; returns at once."""
        with self._lock:
            queued = answer in self._others
            if answer in self._urgent or (queued and not urgent):
                return
            self._others.pop(answer, None)
            (self._urgent if urgent else self._others)[answer] = None
        if not queued:
            self._tickets.put(True)

    def close(self) -> None:
        """Return when everything that is queued was sent."""
        self._tickets.put(False)
        self._thread.join()
        self.client_watch.close()

    def _run(self) -> None:
        while self._tickets.get():
            start = time.perf_counter()
            self._send_next()
            if not self._urgent and len(self._others) > 1:
                time.sleep(PAUSE_SHARE * (time.perf_counter() - start))
        while self._urgent or self._others:
            self._send_next()

    def _send_next(self) -> None:
        with self._lock:
            queue = self._urgent or self._others
            answer = next(iter(queue))
            del queue[answer]
            flush_only = not (self._urgent or self._others)
        answer.send_deltas(flush_only=flush_only)


# Outputs that are not made by `to_tensors`.
_STREAM_TENSORS = frozenset({"news", NUM_CACHED_TOKENS.name})
Submit = Callable[..., "Future[GenerateOutput]"]
ToTensors = Callable[[Sequence[GenerateOutput]], dict[str, torch.Tensor]]


class Answer:
    """One request's rows.

    A streaming answer sends a response when every row has tokens that the one before did not have:
    it holds the first n tokens of every row, or all of a row that ended before. n rises by one
    while no other request has news and no row is a beam search, else to what there is by then. An
    error is sent once, as the last response, and ends the request's other rows.
    """

    def __init__(
        self,
        answers: Answers,
        sender: Any,
        rows: Sequence[GenerateRequest],
        tensors: Mapping[str, torch.Tensor],
        requested: Collection[str],
        to_tensors: ToTensors,
        *,
        streams: bool,
        prompts: Sequence[Sequence[int]] = (),
        increments: bool = False,
        forwarded: bool = False,
        seconds: float | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """prompts:   of each row, what its output_ids begin with
        increments: each response has the log-probabilities of its `news` alone
        forwarded: the request is a text model's, which takes its tokens as `news`
        seconds:   how long the answer may take, None: as long as it takes
        """
        self._answers = answers
        self._sender = sender
        self._rows = rows
        self._tensors = tensors
        self._requested = requested
        self._to_tensors = to_tensors
        self._streams = streams
        self._prompts = prompts
        self._increments = increments
        self._forwarded = forwarded
        self._on_end = on_end
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._futures: list[Future[GenerateOutput]] = []
        self._snapshots: dict[int, Snapshot] = {}  # by row, the newest
        self._last: list[GenerateOutput | None] = [None] * len(rows)
        self._error: Any = None
        self._failure = FAILED  # why there is an error, if there is one
        self._in_session = False
        self._sent = 0  # tokens of every row in the responses so far
        self._completed = False
        self._sending = Lock()

    def start(self, submit: Submit, sessions: Sequence[Session] = ()) -> None:
        """Hand the rows to the engine, each with its session if there are any."""
        self._in_session = bool(sessions)
        self._futures = futures = [
            submit(
                row,
                self._progress_of(number) if self._streams else None,
                sessions[number] if sessions else None,
            )
            for number, row in enumerate(self._rows)
        ]
        self._answers.client_watch.watch(self)
        for number, future in enumerate(futures):
            future.add_done_callback(self._end_of(number))

    def check_client(self) -> None:
        """Free the rows of a client that has gone, or that waits no longer."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._abort("UNAVAILABLE", "the request's timeout is over")
            return
        with self._sending:  # the server dies of a question about a request that has been answered
            cancelled = not self._completed and self._sender.is_cancelled()
        if cancelled:
            self.cancel()

    def cancel(self) -> None:
        """Free the rows; the client gets an error. Any thread may ask for it."""
        self._abort("CANCELLED", "the client cancelled the request")

    def send_deltas(self, *, flush_only: bool) -> None:
        """Send a response if there is anything that the ones before did not have.

        flush_only: no other request has news
        """
        with self._sending:
            if self._completed:
                return
            try:
                self._send_deltas(flush_only)
            except Exception as error:  # the other requests go on
                traceback.print_exc()
                self._error = failed_response(error)
                self._end(self._error)

    def _abort(self, code: str, why: str) -> None:
        if self._error is None:
            self._error, self._failure = failure(why, code), CANCELLED
        self._notify(urgent=True)

    def _notify(self, *, urgent: bool) -> None:
        """Have what is new sent."""
        self._answers.put(self, urgent=urgent)

    def _progress_of(self, number: int) -> SnapshotCallback:
        def on_snapshot(snapshot: Snapshot) -> None:
            self._snapshots[number] = snapshot
            self._notify(urgent=not self._sent)

        return on_snapshot

    def _end_of(self, number: int) -> Callable[[Future[GenerateOutput]], None]:
        def on_end(future: Future[GenerateOutput]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                self._last[number] = future.result()
            elif self._error is None:
                self._error, self._failure = failed_response(error), reason_of(error)
            self._notify(urgent=True)

        return on_end

    def _send_deltas(self, flush_only: bool) -> None:
        if self._error is not None:
            self._end(self._error)
            return
        finished = [output for output in self._last if output is not None]
        complete = len(finished) == len(self._rows)
        tokens = self._tokens_of_all() if self._streams else 0
        # What the hypotheses of a beam search were a few tokens ago is not known any more.
        has_best = not any(snapshot.best for snapshot in self._snapshots.values())
        if flush_only and has_best and tokens > self._sent + 1:
            tokens = self._sent + 1
            self._answers.put(self, urgent=False)
        elif complete:
            self._end(self._response(finished))
            return
        if tokens > self._sent:
            first = self._sent if self._increments else 0
            outputs = [
                _with_tokens(self._snapshots.get(row), last, tokens, first)
                for row, last in enumerate(self._last)
            ]
            self._sender.send(self._response(outputs))
            self._sent = tokens

    def _tokens_of_all(self) -> int:
        """Tokens that every row has; of a row that has ended, as many as the longest one."""
        tokens = [
            snapshot.tokens if (snapshot := self._snapshots.get(row)) else 0
            for row, last in enumerate(self._last)
            if last is None
        ]
        num_finished = [len(last.output_ids) for last in self._last if last is not None]
        return min(tokens) if tokens else max(num_finished)

    def _response(self, outputs: Sequence[GenerateOutput]) -> Any:
        reports_progress = self._forwarded or "is_return_progress" in self._tensors
        tensors = {}
        if not _STREAM_TENSORS.issuperset(self._requested):
            tensors = self._to_tensors(self._visible(outputs))
        if NUM_CACHED_TOKENS.name in self._requested and not self._sent:
            counts = torch.tensor([output.num_cached_tokens for output in outputs])
            tensors[NUM_CACHED_TOKENS.name] = counts[:, None].int()
        if "is_return_progress" in self._tensors:
            tensors.update(self._progress(outputs, tensors))
        if reports_progress and "news" in self._requested:
            tensors["news"] = news(
                self._prompts, outputs, self._before(outputs), self._end_codes(outputs)
            )
        if self._in_session:
            tensors = {name: tensor[None] for name, tensor in tensors.items()}
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor.from_dlpack(name, torch.utils.dlpack.to_dlpack(tensor))
                for name, tensor in tensors.items()
                if name in self._requested
            ]
        )

    def _visible(self, outputs: Sequence[GenerateOutput]) -> list[GenerateOutput]:
        """The outputs, where the client takes increments without what it has."""
        if not self._increments:
            return list(outputs)
        rows = zip(outputs, self._before(outputs), self._finished(outputs), strict=True)
        return [_after(output, first) if end else output for output, first, end in rows]

    def _before(self, outputs: Sequence[GenerateOutput]) -> list[int]:
        """Number of tokens of each row in the responses so far.

        Hypotheses of a beam search are news as a whole: others may have taken their places.
        """
        if not self._streams:
            return [0] * len(outputs)
        return [
            0 if output.beams else min(self._sent, len(output.output_ids)) for output in outputs
        ]

    def _finished(self, outputs: Sequence[GenerateOutput]) -> list[bool]:
        """Return for each row whether it has finished."""
        return [output is last for output, last in zip(outputs, self._last, strict=True)]

    def _end_codes(self, outputs: Sequence[GenerateOutput]) -> list[int]:
        """Return for each row the number of its EndCode; 0 where it has not finished."""
        pairs = zip(outputs, self._finished(outputs), strict=True)
        return [end and EndCode.of(output.weights_versions).number for output, end in pairs]

    def _progress(
        self, outputs: Sequence[GenerateOutput], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """New tokens of each row in this response, and whether they were the last: [B, beam]."""
        beams = beam_axis(outputs)
        progress = {}
        if "streamed_length" in self._requested:
            counts = torch.tensor(self._before(outputs), dtype=torch.int32)
            progress["streamed_length"] = counts[:, None].repeat(1, beams)
        if "is_finished" in self._requested:
            progress["is_finished"] = torch.tensor(self._finished(outputs))[:, None].repeat(
                1, beams
            )
        if "text_start" in self._requested and "response_input_lengths" in tensors:
            progress["text_start"] = tensors["response_input_lengths"].expand(-1, beams).clone()
            if "is_return_prompt" in self._tensors:
                progress["text_start"][self._tensors["is_return_prompt"].reshape(-1)] = 0
        return progress

    def _end(self, response: Any) -> None:
        """The last response; rows that still run are nobody's any more."""
        self._completed = True
        self._answers.client_watch.forget(self)
        for future in self._futures:
            future.cancel()
        # The futures know this answer by their callbacks. In a circle it would keep its tensors,
        # which lie in the server's shared memory, until Python looks for circles.
        self._futures = []
        self._snapshots.clear()
        self._on_end()
        if self._error is not None:
            self._answers.on_failure(self._failure, max(1, self._last.count(None)))
        send_last(self._sender, response)


def _with_tokens(
    snapshot: Snapshot | None, last: GenerateOutput | None, tokens: int, first: int
) -> GenerateOutput:
    """A row when it had `tokens`, or as it ended before; of a beam search the newest.

    first: see Snapshot.output
    """
    if last is not None and (snapshot is None or len(last.output_ids) <= tokens):
        return last
    if snapshot is None:
        raise ValueError("the row has no tokens yet")
    return snapshot.output(tokens, first)


def _after(output: GenerateOutput, first: int) -> GenerateOutput:
    """A row that has ended, without the log-probabilities of what comes before `first`."""
    scores = output.token_log_probs
    return replace(
        output,
        output_log_probs=output.output_log_probs[first:],
        token_log_probs=scores
        and ModelLogProbs(*(values[first:] for values in vars(scores).values())),
        prompt_log_probs=None if first else output.prompt_log_probs,
    )


def failed_response(error: BaseException) -> Any:
    """The request's own error; a wrong request is the client's, anything else the server's.

    A request that finds no room, or whose ranks were lost, can be sent again elsewhere.
    """
    code = "INTERNAL"
    if isinstance(error, BusyError | ServerError):
        code = "UNAVAILABLE"
    elif isinstance(error, RequestError | ParameterError):
        code = "INVALID_ARG"
    return failure(str(error), code)


def reason_of(error: BaseException) -> str:
    """Why a request was not answered, as the metrics have it."""
    is_client_error = isinstance(error, BusyError | RequestError | ParameterError)
    return REJECTED if is_client_error else FAILED


class StreamSender:
    """A response sender whose errors begin with their code, as in `INVALID_ARG: ...`.

    A stream of Triton's says the text of an error alone. Its streams that end with a status, which
    clients ask for with the header triton_grpc_error, make the server die after some errors.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, response: Any = None, flags: int = 0) -> None:
        if response is not None and response.has_error():
            error = response.error()
            code = error.code().name
            response = failure(f"{code}: {error.message()}", code)
        self._sender.send(response, flags=flags)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def send_last(sender: Any, response: Any) -> None:
    """The last response of a request."""
    sender.send(response, flags=FINAL)
