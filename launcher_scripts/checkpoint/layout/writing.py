"""Writing of files: views of source tensors as bytes, a few megabytes at a time, and work that
several processes share, with its progress.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import (
    BFLOAT16,
    Workspace,
    as_dtype,
    copyable,
    widened,
)
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.processes import StopRequest, signal_when_parent_dies

STRIP_BYTES = 1 << 21
_TILE = 256
# Between the rows of a tile: at a power of two they would push each other out of the cache.
_GAP = 16
_MIN_ROWS = 16


class UnfitValues(CheckpointError):
    """A tensor has values that its file cannot hold."""


class NonfiniteValues(UnfitValues):
    """A tensor has values that are NaN or infinite."""


@dataclass(frozen=True)
class _Kind:
    """A type of files. most: its largest value;  wider: the types that hold more"""

    name: str
    maximum: float
    wider: str


_KINDS = {
    np.dtype("<f2"): _Kind("fp16", 65504, "bf16 or fp32"),
    BFLOAT16: _Kind("bf16", 3.38953e38, "fp32"),
    np.dtype("<f4"): _Kind("fp32", 3.40282e38, ""),
}


def strips(
    columns: Sequence[NDArray[Any]],
    dtype: np.dtype[Any],
    name: str,
    workspace: Workspace | None = None,
    *,
    allow_nonfinite: bool = False,
) -> Iterator[NDArray[Any]]:
    """Consecutive row-major pieces of the arrays standing side by side, converted to `dtype`.

    columns:   arrays [rows, any] with equal rows and one dtype, or vectors; at least one
    name:      the tensor's name, for errors
    workspace: the thread's memory for strips and tiles

    A strip is valid until the next is asked for. Conversion is exact to a wider type, rounded to
    nearest even to a narrower one. Raises UnfitValues for a finite value beyond the range of
    `dtype` and, unless allow_nonfinite, NonfiniteValues.
    """
    convert = _Conversion(dtype, name, workspace or Workspace(), allow_nonfinite)
    matrices = [column.reshape(-1, column.shape[-1]) for column in columns]
    if len(matrices) == 1 and matrices[0].flags.c_contiguous:
        yield from _flat_strips(matrices[0].reshape(-1), convert)
        return
    rows = len(matrices[0])
    width = sum(matrix.shape[1] for matrix in matrices)
    source = matrices[0].dtype
    strip_rows = max(STRIP_BYTES // max(width * source.itemsize, 1), _MIN_ROWS)
    strip_rows = min(strip_rows - strip_rows % _TILE or strip_rows, rows)
    strip = convert.memory.array("strip", (strip_rows, width), source)
    for first in range(0, rows, strip_rows):
        part = strip[: rows - first]
        at = 0
        for matrix in matrices:
            stop = at + matrix.shape[1]
            _fill(part[:, at:stop], matrix[first : first + len(part)], convert.memory)
            at = stop
        yield convert(part)


def _flat_strips(values: NDArray[Any], convert: _Conversion) -> Iterator[NDArray[Any]]:
    count = STRIP_BYTES // values.itemsize
    for first in range(0, max(values.size, 1), count):
        yield convert(values[first : first + count])


def _fill(target: NDArray[Any], source: NDArray[Any], memory: Workspace) -> None:
    """target[...] = source, by tiles where they run through memory in different directions."""
    target, source = copyable(target), copyable(source)
    if abs(source.strides[1]) <= abs(source.strides[0]):
        target[...] = source
        return
    # A tile holds its values in the source's order, so that only steps in the cache change it.
    rows, width = target.shape
    for row in range(0, rows, _TILE):
        for column in range(0, width, _TILE):
            box = (slice(row, row + _TILE), slice(column, column + _TILE))
            part = source[box].T
            high, wide = part.shape
            tile = memory.array("tile", (high, wide + _GAP), source.dtype)[:, :wide]
            tile[...] = part
            target[box] = tile.T


@dataclass(frozen=True)
class _Conversion:
    """Conversion of contiguous values to `dtype`; the result is valid until the next.

    name: the tensor's name, for errors
    """

    dtype: np.dtype[Any]
    name: str
    memory: Workspace
    allow_nonfinite: bool

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        result = as_dtype(values, self.dtype, self.memory)
        is_unchanged = values.dtype == self.dtype and self.allow_nonfinite
        if not is_unchanged and not _all_finite(result):
            self._judge(widened(values), result)
        return result

    def _judge(self, values: NDArray[Any], result: NDArray[Any]) -> None:
        """Raises UnfitValues where what is not finite in `result` may not be."""
        finite = np.isfinite(values)
        if not self.allow_nonfinite and not finite.all():
            raise NonfiniteValues(f"{self.name} has NaN or infinite values")
        lost = values[finite & ~np.isfinite(widened(result))]
        if lost.size:
            kind = _KINDS[self.dtype]
            wider = f"; set export.model.weight_data_type to {kind.wider}" if kind.wider else ""
            raise UnfitValues(
                f"{self.name} does not fit {kind.name}: its values reach {np.abs(lost).max():g}, "
                f"{kind.name} holds {kind.maximum:g}{wider}"
            )


def _all_finite(values: NDArray[Any]) -> bool:
    """Return whether no value is NaN or infinite, of two bytes by the bits, which isfinite is slow
    at.

    The exponent is all ones from its own bits up among positive numbers (the largest of the bits
    as signed) and from those with the sign up among negative ones (the largest as unsigned).
    """
    if values.dtype == np.float32 or not values.size:
        return bool(np.isfinite(values).all())
    exponent = 0x7F80 if values.dtype == BFLOAT16 else 0x7C00
    max_signed, unsigned = values.view("<i2").max(), values.view("<u2").max()
    return bool(max_signed < exponent and unsigned < exponent | 0x8000)


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
def in_background(work: Callable[[], Result]) -> Iterator[Callable[[], Result]]:
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
