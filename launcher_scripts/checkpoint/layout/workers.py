"""Work that several processes share, and its progress.

Work that several processes share: what is done with each item is taken where they were started.

Threads would wait for Python's lock between the many short steps of a conversion: four of them take
up to twice as long as four processes. These are forked, so that all see the source where it is
mapped.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TextIO, TypeVar

from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.processes import StopRequest, signal_when_parent_dies

_BAR_WIDTH = 30
_REDRAW_SECONDS = 0.1
_LOG_PARTS = 10


class Progress:
    """Counts bytes of a total."""

    def __init__(self, message: str, total: int, stream: TextIO | None = None) -> None:
        """stream: where to write (default: standard error); a terminal gets a bar."""
        self.what = message
        self.total = max(total, 1)
        self.stream = sys.stderr if stream is None else stream
        self.attended = self.stream.isatty()
        self._done = 0
        self._start = time.monotonic()
        self._drawn = 0.0
        self._logged = 0

    def add(self, count: int) -> None:
        self._done += count
        if self.attended:
            self._draw()
        else:
            self._log()

    def close(self) -> None:
        """End the bar's line."""
        if self.attended:
            self._drawn = 0.0
            self._draw()
            self.stream.write("\n")
            self.stream.flush()

    def _draw(self) -> None:
        now = time.monotonic()
        if now - self._drawn < _REDRAW_SECONDS:
            return
        self._drawn = now
        filled = _BAR_WIDTH * self._done // self.total
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        self.stream.write(f"\r{self.what} [{bar}] {self._text()}")
        self.stream.flush()

    def _log(self) -> None:
        part = _LOG_PARTS * self._done // self.total
        if part > self._logged:
            self._logged = part
            self.stream.write(f"{self.what}: {self._text()}\n")
            self.stream.flush()

    def _text(self) -> str:
        seconds = time.monotonic() - self._start
        mebibytes, total = self._done / 2**20, self.total / 2**20
        return (
            f"{100 * self._done // self.total}% of {total:.0f} MiB, "
            f"{mebibytes / max(seconds, 1e-9):.0f} MiB/s, {seconds:.1f} s"
        )


Item = TypeVar("Item")
Result = TypeVar("Result")
SHORTENED = "a file of the checkpoint became shorter, or its disk failed, while it was read"
OnResult = Callable[[Result], None]
_FORK = multiprocessing.get_context("fork")


def run_all(
    items: Sequence[Item],
    work: Callable[[Item, OnResult[Result]], None],
    on_result: OnResult[Result],
    count: int,
) -> None:
    """Call `work` with every item, in `count` processes, or here if that is 0.

    work: gives what it makes of an item to its second argument, any number of times
    on_result: gets all of that, in this process
    All processes end with the first that fails, and its error is raised.
    """
    if count == 0:
        for item in items:
            work(item, on_result)
        return
    turns = _FORK.Value("q", 0)
    with _ended_workers() as processes:
        results = _start(items, work, turns, count, processes)
        while results:
            ready = wait(list(results))
            for receiver in [result for result in results if result in ready]:
                matches = _received(receiver, results[receiver])
                if matches is None:
                    del results[receiver]
                elif isinstance(matches, BaseException):
                    raise matches
                else:
                    on_result(matches)


@contextmanager
def beside(work: Callable[[], Result]) -> Iterator[Callable[[], Result]]:
    """Start `work` in a process of its own; the block gets a function that waits for its result.

    The process ends with the block. The function raises what `work` has raised.
    """

    def run(item: Callable[[], Result], on_result: OnResult[Result]) -> None:
        on_result(item())

    turns = _FORK.Value("q", 0)
    with _ended_workers() as processes:
        ((receiver, process),) = _start([work], run, turns, 1, processes).items()

        def result() -> Result:
            received = _received(receiver, process)
            if isinstance(received, BaseException):
                raise received
            value: Result = received
            return value

        yield result


def _start(
    items: Sequence[Item],
    work: Callable[[Item, OnResult[Result]], None],
    turns: Any,
    count: int,
    processes: list[ForkProcess],
) -> dict[Connection, ForkProcess]:
    """Start processes, which are added to `processes`; returns what comes from which.

    turns: shared, of the next item; its memory gets another use when the caller drops it
    """
    results = {}
    stop = StopRequest()
    with stop.listening():  # Python drops what a handler raises in the midst of a fork
        for _ in range(count):
            receiver, sender = _FORK.Pipe(duplex=False)
            arguments = (items, work, turns, sender)
            process = _FORK.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            results[receiver] = process
    if stop.received is not None:
        signal.raise_signal(stop.received)
    return results


def _serve(
    items: Sequence[Item],
    work: Callable[[Item, OnResult[Result]], None],
    turns: Any,
    results: Connection,
) -> None:
    """In a process of its own: work on the items whose turns it gets, and send what is taken.

    turns: a shared number, of the next item
    """
    signal_when_parent_dies(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGBUS, signal.SIG_DFL)  # so that the parent sees it
    try:
        while (turn := _next(turns)) < len(items):
            work(items[turn], results.send)
        results.send(None)
    except Exception as error:
        results.send(_sendable(error))


def _next(turns: Any) -> int:
    with turns.get_lock():
        turns.value += 1
        return int(turns.value) - 1


def _received(results: Connection, process: ForkProcess) -> Any:
    try:
        return results.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGBUS:
            raise CheckpointError(SHORTENED) from None
        raise CheckpointError(
            problem("a process of the export ended early, with an exit code", got=process.exitcode)
        ) from None


@contextmanager
def _ended_workers() -> Iterator[list[ForkProcess]]:
    """Processes that run no longer than the block."""
    processes: list[ForkProcess] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _sendable(error: Exception) -> Exception:
    """The error, or what it says if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
