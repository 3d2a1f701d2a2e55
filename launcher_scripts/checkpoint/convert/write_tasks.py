"""Write the tensors of an export: convert, cut and hash them, on several threads.

Tensors are independent, so threads share them: numpy, the hash and the operating system all work
outside of Python's lock. Every thread holds one strip of one file in memory, and a copy of a
tensor only where the source has it in pieces.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.convert.plan import Task
from launcher_scripts.checkpoint.convert.progress import Progress
from launcher_scripts.checkpoint.convert.reshard import rank_columns
from launcher_scripts.checkpoint.convert.streaming import UnfitValues, strips
from launcher_scripts.checkpoint.fastertransformer.folder import FTWriter, WeightFile
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.workspace import Workspace
from launcher_scripts.config.settings import ExportSettings

# More of them took longer where it was measured: on a host of 32 processors the 345M GPT takes
# 1.9 s with one, 1.2 with 4, 1.6 with 16.
MOST_THREADS = 4


class Stopped(Exception):
    """Another thread failed, or the user asked to stop."""


def write_all(
    tasks: list[Task],
    writer: FTWriter,
    archive: Archive,
    progress: Progress,
    settings: ExportSettings,
) -> dict[str, UnfitValues]:
    """Largest tensors first, on no more threads than there are processors, or help.

    Returns by name what is wrong with the tensors whose values cannot be written.
    """
    stop = threading.Event()
    own = threading.local()
    workers = min(settings.processes, MOST_THREADS, len(os.sched_getaffinity(0)), len(tasks))
    unfit: dict[str, UnfitValues] = {}

    def run(task: Task) -> None:
        try:
            _write_task(
                task,
                writer,
                archive,
                stop,
                progress,
                own.workspace,
                allow_nonfinite=settings.allow_nonfinite,
            )
        except UnfitValues as error:
            unfit[task.name] = error.with_traceback(None)  # which holds the tensor
        for values in task.views():
            archive.forget(values)

    def start() -> None:
        own.workspace = Workspace()

    with ThreadPoolExecutor(workers, initializer=start) as pool:
        try:
            ordered = sorted(tasks, key=lambda task: task.nbytes, reverse=True)
            futures = [pool.submit(run, task) for task in ordered]
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((f for f in futures if f.done() and f.exception() is not None), None)
            if failed is not None:
                failed.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return unfit


def _write_task(
    task: Task,
    writer: FTWriter,
    archive: Archive,
    stop: threading.Event,
    progress: Progress,
    workspace: Workspace,
    *,
    allow_nonfinite: bool,
) -> None:
    spec, tp_size = task.spec, writer.tp_size
    ranks = range(tp_size if spec.partition.per_rank else 1)
    files = [WeightFile(spec, task.layer, tp_rank) for tp_rank in ranks]
    missing = [file for file in files if not writer.holds(file)]
    size = int(np.prod(spec.shape_on(task.config, tp_size))) * writer.dtype.itemsize
    progress.add(size * (len(files) - len(missing)))
    if not missing:
        return
    for values in task.views():
        archive.check(values, task.name)
    blocks = task.blocks(workspace)
    for file in missing:
        columns = rank_columns(spec, task.config, tp_size, file.tp_rank, blocks)
        pieces = strips(
            columns, writer.dtype, task.name, workspace, allow_nonfinite=allow_nonfinite
        )
        writer.write(file, _watched(pieces, stop, progress))


def _watched(
    pieces: Iterator[NDArray[Any]], stop: threading.Event, progress: Progress
) -> Iterator[NDArray[Any]]:
    for piece in pieces:
        if stop.is_set():
            raise Stopped
        yield piece
        progress.add(piece.nbytes)
