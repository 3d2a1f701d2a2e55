"""Write the tensors of an export: convert, cut and hash them, in several processes.

Tensors are independent. Threads would wait for Python's lock between the many short steps of a
conversion: four of them take up to twice as long as four processes. These are forked, so that all
see the source where it is mapped. Each holds one strip of one file in memory, and a copy of a
tensor only where the source has it in pieces.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.convert.manifest import FileEntry
from launcher_scripts.checkpoint.convert.plan import Task
from launcher_scripts.checkpoint.convert.progress import Progress
from launcher_scripts.checkpoint.convert.reshard import rank_columns
from launcher_scripts.checkpoint.convert.streaming import NonfiniteValues, UnfitValues, strips
from launcher_scripts.checkpoint.fastertransformer.folder import FTWriter, WeightFile
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.dtypes import plain, widened
from launcher_scripts.checkpoint.formats.workspace import Workspace
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.processes import StopRequest, signal_when_parent_dies
from launcher_scripts.config.settings import ExportSettings

MOST_PROCESSES = 8
LEAST_BYTES = 128 << 20  # of the files, for which processes are worth their start
_SHOWN = 20
_CHUNK = 1 << 20


def write_all(
    tasks: Sequence[Task],
    writer: FTWriter,
    archive: Archive,
    progress: Progress,
    settings: ExportSettings,
) -> dict[str, UnfitValues]:
    """Largest tensors first, in no more processes than there are processors, or help.

    Returns by name what is wrong with the tensors whose values cannot be written.
    """
    ordered = sorted(tasks, key=lambda task: task.nbytes, reverse=True)
    work = _Work(ordered, writer, archive, allow_nonfinite=settings.allow_nonfinite)
    unfit: dict[str, UnfitValues] = {}

    def take(found: FileEntry | _Unfit | int) -> None:
        if isinstance(found, _Unfit):
            unfit[found.name] = found.error
        elif isinstance(found, FileEntry):
            writer.add(found)
            progress.add(found.bytes)
        else:
            progress.add(found)

    count = min(settings.processes, MOST_PROCESSES, len(os.sched_getaffinity(0)), len(tasks))
    if count <= 1 or progress.total < LEAST_BYTES:
        for task in ordered:
            work.run(task, take)
    else:
        _in_processes(work, count, take)
    return unfit


@dataclass(frozen=True)
class _Unfit:
    """A tensor whose values cannot be written."""

    name: str
    error: UnfitValues


Taken = Callable[[FileEntry | _Unfit | int], None]


@dataclass(frozen=True)
class _Work:
    """What one process after the other takes a task of."""

    tasks: Sequence[Task]
    writer: FTWriter
    archive: Archive
    allow_nonfinite: bool
    workspace: Workspace = field(default_factory=Workspace)

    def run(self, task: Task, take: Taken) -> None:
        """Write a tensor's files; `take` gets each, and the bytes of those that are there."""
        try:
            self._write(task, take)
        except UnfitValues as error:
            take(_Unfit(task.name, error.with_traceback(None)))  # which holds the tensor
        for values in task.views():
            self.archive.forget(values)

    def _write(self, task: Task, take: Taken) -> None:
        spec, writer = task.spec, self.writer
        files = [WeightFile(spec, task.layer, rank) for rank in spec.tp_ranks(writer.tp_size)]
        missing = [file for file in files if not writer.holds(file)]
        shape = spec.shape_on(task.config, writer.tp_size)
        take(int(np.prod(shape)) * writer.dtype.itemsize * (len(files) - len(missing)))
        if not missing:
            return
        for values in task.views():
            self.archive.check(values, task.name)
        blocks = task.blocks(self.workspace)
        for file in missing:
            columns = rank_columns(spec, task.config, writer.tp_size, file.tp_rank, blocks)
            pieces = strips(
                columns,
                writer.dtype,
                task.name,
                self.workspace,
                allow_nonfinite=self.allow_nonfinite,
            )
            take(writer.write_file(file, pieces))

    def serve(self, turns: Any, results: Connection) -> None:
        """In a process of its own: run the tasks whose turns it gets, and send what is taken.

        turns: a shared number, of the next task
        """
        signal_when_parent_dies(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            for task in self._turns(turns):
                self.run(task, results.send)
            results.send(None)
        except Exception as error:
            results.send(_sendable(error))

    def _turns(self, turns: Any) -> Iterator[Task]:
        while True:
            with turns.get_lock():
                turn = turns.value
                turns.value += 1
            if turn >= len(self.tasks):
                return
            yield self.tasks[turn]


def _in_processes(work: _Work, count: int, take: Taken) -> None:
    """Run the work's tasks in `count` processes; all end with the first that fails."""
    context = multiprocessing.get_context("fork")
    turns = context.Value("q", 0)
    with _ended() as processes:
        results = {}
        stop = StopRequest()
        with stop.listening():  # Python drops what a handler raises in the midst of a fork
            for _ in range(count):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=work.serve, args=(turns, sender), daemon=True)
                process.start()
                sender.close()
                processes.append(process)
                results[receiver] = process
        if stop.received is not None:
            signal.raise_signal(stop.received)
        while results:
            ready = wait(list(results))
            for receiver in [each for each in results if each in ready]:
                found = _received(receiver, results[receiver])
                if found is None:
                    del results[receiver]
                elif isinstance(found, BaseException):
                    raise found
                else:
                    take(found)


def _received(results: Connection, process: ForkProcess) -> Any:
    try:
        return results.recv()
    except EOFError:
        process.join()
        raise CheckpointError(
            problem("a process of the export ended early, with an exit code", got=process.exitcode)
        ) from None


@contextmanager
def _ended() -> Iterator[list[ForkProcess]]:
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


def refuse_unfit(tasks: Sequence[Task], unfit: Mapping[str, UnfitValues], origin: str) -> None:
    """Raise one CheckpointError for all of `unfit`, if there are any.

    unfit:  name of a task -> what is wrong with its values
    origin: what the tasks are of
    """
    lines: dict[str, str | None] = {}  # with the key to change; a tensor may have several tasks
    for task in tasks:
        error = unfit.get(task.name)
        found = list(_nonfinite(task)) if isinstance(error, NonfiniteValues) else []
        lines |= dict.fromkeys(found, "export.model.allow_nonfinite")
        if error is not None and not found:
            lines[str(error)] = None
    problems = Problems(origin)
    for line, change in list(lines.items())[:_SHOWN]:
        problems.add(line, change=change)
    if len(lines) > _SHOWN:
        problems.add(f"and {len(lines) - _SHOWN} more tensors")
    problems.raise_if_any(CheckpointError)


def _nonfinite(task: Task) -> Iterator[str]:
    """A line per source tensor with values that are NaN or infinite; none if they become so."""
    changed = [source for change in task.changes for source in change.sources()]
    for key, tensor in [*zip(task.keys, task.tensors, strict=True), *changed]:
        values = tensor.read()
        if count := _count(values):
            yield f"{key} has {count} NaN or infinite values of {values.size}"


def _count(values: NDArray[Any]) -> int:
    """How many are not finite; only a part of them is copied at a time."""
    rows = plain(values).reshape(-1, values.shape[-1] if values.ndim else 1)
    step = max(_CHUNK // max(rows.shape[1], 1), 1)
    count = 0
    for first in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[first : first + step]).view(values.dtype)
        count += part.size - int(np.isfinite(widened(part)).sum())
    return count
