"""The series of a training's evaluations, as its journal tells it.

The journal has a line of JSON per event and is only appended to, so a killed watch loses nothing:
the next one reads the lines and continues. A file lock keeps a second watch out.

The trend of a series: trend.json for programs, trend.html for people.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.files import atomic_write
from launcher_scripts.common.packages import VERDICTS
from launcher_scripts.common.rendering import render
from launcher_scripts.config.evaluation import OLDEST, WatchSettings
from launcher_scripts.watch.training import SavedCheckpoint

JOURNAL = "journal.jsonl"
LATEST_GO = "latest-GO"
GO, NO_GO = VERDICTS[0], VERDICTS[1]

# States of a checkpoint. One that is WRITTEN has not looked the same twice.
WRITTEN, WAITING, STARTED, JUDGED, FAILED, SKIPPED = STATES = (
    "written",
    "waiting",
    "started",
    "judged",
    "failed",
    "skipped",
)
ENDED = (JUDGED, FAILED, SKIPPED)
_CHANGE = "watch.run.results_dir"


@dataclass
class Entry:
    """A checkpoint of the series.

    version:  1, and one more each time that the training wrote it again
    number:   of its evaluation in the series, from 1; 0: not evaluated
    verdict:  GO, NO-GO or INCONCLUSIVE, with the regressions
    measured: the verdict of its own evaluation
    metrics:  "<task>.<figure>" -> {value, low, high, percent}
    reason:   why it failed or was skipped
    earlier:  the version that was evaluated before. It counts again if this one goes before its
              evaluation, as a checkpoint does that the training deletes file by file
    swap:     what came of serving its weights; "": it was not tried
    """

    name: str
    path: Path
    step: int
    signature: str
    state: str = WRITTEN
    version: int = 1
    attempts: int = 0
    number: int = 0
    verdict: str | None = None
    measured: str | None = None
    regressions: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    reason: str = ""
    earlier: Entry | None = None
    swap: str = ""

    @property
    def folder_name(self) -> str:
        """Its folder of results, without characters that a command line would have to quote."""
        name = re.sub(r"[^\w.+-]+", "-", self.name, flags=re.ASCII).strip("-.") or "checkpoint"
        return name if self.version == 1 else f"{name}.{self.version}"


class Series:
    """The entries of one results folder; a context manager that holds the folder's lock."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if another watch uses the folder, or for a corrupt journal."""
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self.last_event = time.time()  # as time.time()
        self.evaluations = 0  # verdicts, also of checkpoints that were written again later
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(folder / JOURNAL, flags, 0o666), "r+b")
        try:
            self._lock()
            self._read()
        except ConfigError:
            self._file.close()
            raise

    def __enter__(self) -> Series:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def poll(self, saved: Iterable[SavedCheckpoint]) -> None:
        """Note new checkpoints, those that no longer change, and those that have gone.

        One that is being evaluated is compared again afterwards.
        """
        present = {checkpoint.name: checkpoint for checkpoint in saved}
        for checkpoint in present.values():
            entry = self.entries.get(checkpoint.name)
            if entry is not None and entry.state == STARTED:
                continue
            if entry is None or entry.signature != checkpoint.signature:
                again = entry is not None and entry.state in ENDED
                version = (entry.version if entry else 1) + again
                values = {"path": str(checkpoint.path), "step": checkpoint.step}
                self.note(
                    "seen",
                    checkpoint.name,
                    signature=checkpoint.signature,
                    version=version,
                    **values,
                )
            elif entry.state == WRITTEN:
                self.note("complete", checkpoint.name)
        for entry in list(self.entries.values()):
            if entry.name not in present and entry.state in (WRITTEN, WAITING):
                self.note("skipped", entry.name, reason="deleted by the training")

    def waiting(self, order: str) -> list[Entry]:
        """Entries to evaluate, the next one first."""
        entries = [entry for entry in self.entries.values() if entry.state == WAITING]
        return sorted(entries, key=lambda entry: entry.step, reverse=order != OLDEST)

    def in_state(self, *states: str) -> list[Entry]:
        """Entries in the order of their steps."""
        entries = [entry for entry in self.entries.values() if entry.state in states]
        return sorted(entries, key=lambda entry: entry.step)

    def latest_go(self, before: Entry | None = None) -> Entry | None:
        """The GO of the highest step, below that of `before`; None if there is none."""
        entries = [entry for entry in self.in_state(JUDGED) if entry.verdict == GO]
        if before is not None:
            entries = [entry for entry in entries if entry.step < before.step]
        return entries[-1] if entries else None

    def results_of(self, entry: Entry) -> Path:
        """The folder of an entry's export, server and report."""
        return self.folder / "checkpoints" / entry.folder_name

    def evaluation_of(self, entry: Entry) -> Path:
        """The folder of an entry's report and verdict."""
        return self.results_of(entry) / "evaluation"

    def note(self, event: str, name: str, **values: Any) -> None:
        """Append an event to the journal; when this returns, it is on the disk."""
        line = {"event": event, "name": name, "at": round(time.time(), 3), **values}
        self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._apply(line)

    def link_latest_go(self) -> None:
        """Point the link `latest-GO` to the results of the latest GO."""
        entry = self.latest_go()
        if entry is None:
            return
        partial = self.folder / f"{LATEST_GO}.partial"
        partial.unlink(missing_ok=True)
        partial.symlink_to(self.results_of(entry).relative_to(self.folder))
        partial.replace(self.folder / LATEST_GO)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"another watch writes into {self.folder}"
            raise ConfigError(problem(message, change=_CHANGE)) from None

    def _read(self) -> None:
        """Apply the journal's lines; a last one that was not written in full is cut off."""
        end = 0
        for number, line in enumerate(self._file.read().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                message = f"{self.folder / JOURNAL}: line {number} is corrupt ({error})"
                raise ConfigError(problem(message, change=_CHANGE)) from error
        self._file.truncate(end)

    def _apply(self, line: Mapping[str, Any]) -> None:
        event, name, self.last_event = line["event"], line["name"], float(line["at"])
        if event == "seen":
            path, step, signature = Path(line["path"]), int(line["step"]), line["signature"]
            before = self.entries.get(name)
            earlier = before.earlier if before and before.state not in (JUDGED, FAILED) else before
            entry = Entry(name, path, step, signature, version=line["version"], earlier=earlier)
            self.entries[name] = entry
            return
        entry = self.entries[name]
        if event == "complete":
            entry.state = WAITING
        elif event == "started":
            entry.state, entry.attempts, entry.reason = STARTED, line["attempt"], ""
        elif event == "judged":
            entry.state = JUDGED
            self.evaluations += 1
            for key in ("number", "verdict", "measured", "regressions", "metrics"):
                setattr(entry, key, line[key])
        elif event == "swapped":
            entry.swap = line["reason"] or "served"
        elif event == "retry":
            entry.state, entry.reason, entry.attempts = WAITING, line["reason"], line["attempts"]
        elif event == SKIPPED and entry.earlier is not None:
            self.entries[name] = entry.earlier
        elif event in (FAILED, SKIPPED):
            entry.state, entry.reason = event, line["reason"]
        else:
            raise ValueError(f"unknown event {event}")


FILE_NAME = "trend.json"
PAGE_NAME = "trend.html"
SCHEMA = 1
_WIDTH, _HEIGHT, _BORDER = 640.0, 160.0, 12.0
_CLASSES = {"GO": "go", "NO-GO": "no", "INCONCLUSIVE": "open"}


@dataclass(frozen=True)
class Point:
    """A figure of a checkpoint in a plot: x, value and the ends of its interval in the plot's unit.

    css: class of the verdict's colour
    """

    x: float
    y: float
    low: float
    high: float
    css: str
    title: str


@dataclass(frozen=True)
class Plot:
    """A figure over the steps. smallest and largest: values at the lower and upper border."""

    name: str
    smallest: str
    largest: str
    points: tuple[Point, ...]


def write_trend(series: Series, settings: WatchSettings) -> None:
    """Write trend.json and trend.html anew; readers see the old or the new ones."""
    entries = [_values(series, entry) for entry in series.in_state(*STATES)]
    latest = series.latest_go()
    content = {
        "schema": SCHEMA,
        "model": settings.model_name,
        "training_dir": settings.training_dir,
        "level": settings.level,
        "max_drop": settings.max_drop,
        "latest_go": None if latest is None else latest.name,
        "checkpoints": entries,
    }
    folder = series.folder
    atomic_write(folder / FILE_NAME, json.dumps(content, indent=1, allow_nan=False) + "\n")
    page = render(
        "trend.html.j2",
        trend=content,
        plots=list(_plots(series.in_state(JUDGED))),
        css=_CLASSES,
        width=_WIDTH,
        height=_HEIGHT,
        text=_text,
    )
    atomic_write(folder / PAGE_NAME, page)


def _values(series: Series, entry: Entry) -> dict[str, Any]:
    """An entry as trend.json has it; `report` is a path below the trend's folder, or None."""
    report = series.evaluation_of(entry) / "report.html"
    return {
        "name": entry.name,
        "step": entry.step,
        "path": str(entry.path),
        "state": entry.state,
        "verdict": entry.verdict,
        "evaluation": entry.measured,
        "regressions": entry.regressions,
        "figures": entry.metrics,
        "reason": entry.reason,
        "swap": entry.swap,
        "report": os.path.relpath(report, series.folder) if report.exists() else None,
    }


def _plots(entries: list[Entry]) -> Iterator[Plot]:
    for name in dict.fromkeys(name for entry in entries for name in entry.metrics):
        measured = [entry for entry in entries if name in entry.metrics]
        figures = [entry.metrics[name] for entry in measured]
        ends = [value for metric in figures for value in _ends(metric)]
        low, high = min(ends), max(ends)
        span = (high - low) or abs(high) or 1.0
        first, last = measured[0].step, measured[-1].step
        points = tuple(
            Point(
                x=_position(entry.step, first, (last - first) or 1, _WIDTH),
                y=_HEIGHT - _position(metric["value"], low, span, _HEIGHT),
                low=_HEIGHT - _position(_ends(metric)[0], low, span, _HEIGHT),
                high=_HEIGHT - _position(_ends(metric)[1], low, span, _HEIGHT),
                css=_CLASSES[str(entry.verdict)],
                title=f"{entry.name}: {_text(metric)}, {entry.verdict}",
            )
            for entry, metric in zip(measured, figures, strict=True)
        )
        percent = figures[0]["percent"]
        yield Plot(name, _number(low, percent), _number(high, percent), points)


def _ends(metric: dict[str, Any]) -> tuple[float, float]:
    value = metric["value"]
    low, high = metric["low"], metric["high"]
    return (value if low is None else low), (value if high is None else high)


def _position(value: float, first: float, span: float, size: float) -> float:
    return round(_BORDER + (size - 2 * _BORDER) * (value - first) / span, 1)


def _text(metric: dict[str, Any]) -> str:
    """A figure with its interval."""
    number = _number(metric["value"], metric["percent"])
    if metric["low"] is None:
        return number
    low, high = (_number(metric[end], metric["percent"]) for end in ("low", "high"))
    return f"{number} ({low} to {high})"


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.4g}"
