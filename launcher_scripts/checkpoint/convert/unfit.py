"""Tensors that an export refuses for their values, in one error that names them by their source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.convert.plan import Task
from launcher_scripts.checkpoint.convert.streaming import NonfiniteValues, UnfitValues
from launcher_scripts.checkpoint.formats.dtypes import plain, widened
from launcher_scripts.common.errors import CheckpointError, Problems

_SHOWN = 20
_CHUNK = 1 << 20


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
