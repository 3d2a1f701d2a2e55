"""What an evaluation's job decided: the verdict.json of its results folder, if it is that job's."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher_scripts.cluster.record import RECORD, JobRecord, read_json
from launcher_scripts.common.errors import ClusterError

FILE_NAME = "verdict.json"
_ROUNDED_SECONDS = 1.0  # a verdict's date has whole seconds


@dataclass(frozen=True)
class Badge:
    """GO, NO-GO or INCONCLUSIVE, and the first reason."""

    verdict: str
    reason: str
    file: str

    def text(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


def badge(folder: Path, record: JobRecord) -> Badge | None:
    """The verdict of the job in `folder`; None: it has none, or its file cannot be read.

    Runs share a results folder: the file is of the last one that was submitted before its date.
    """
    path = folder.parents[1] / FILE_NAME
    with contextlib.suppress(ClusterError, KeyError, TypeError, ValueError):
        values = read_json(path) if record.stage == "evaluate" else None
        if values is None or _judged_run(folder.parent, values) != folder:
            return None
        first: dict[str, Any] = next(iter(values["reasons"]), {})
        return Badge(str(values["verdict"]), str(first.get("text", "")), str(path))
    return None


def _judged_run(jobs: Path, verdict: dict[str, Any]) -> Path | None:
    """The folder of the run that a verdict is of."""
    judged = datetime.fromisoformat(verdict["date"]).timestamp() + _ROUNDED_SECONDS
    records = ((JobRecord.read(path.parent), path.parent) for path in jobs.glob(f"*/{RECORD}"))
    before = [(record.submitted, folder) for record, folder in records if record.submitted < judged]
    return max(before, default=(0.0, None))[1]
