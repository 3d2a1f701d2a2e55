"""Evaluates the checkpoints of a training as they come, and judges the series."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.exit_codes import ERROR, VERDICTS
from launcher_scripts.config.watch import WatchSettings
from launcher_scripts.evaluation.checks import TaskSection, tasks_of
from launcher_scripts.evaluation.report_content import read_content
from launcher_scripts.watch.regression import Tasks, comparisons, regressions
from launcher_scripts.watch.runs import Outcome, Runs
from launcher_scripts.watch.series import (
    FAILED,
    JUDGED,
    NO_GO,
    SKIPPED,
    STARTED,
    WAITING,
    WRITTEN,
    Entry,
    Series,
)
from launcher_scripts.watch.training import saved_checkpoints
from launcher_scripts.watch.trend import PAGE_NAME, write_trend

_POLL_SECONDS = 0.5
_CODES = {verdict: code for code, verdict in VERDICTS.items()}
# The earliest first look after which a checkpoint that did not change counts as complete.
_MIN_SETTLE_SECONDS = 1.0


class Watcher:
    """One watch over a series; see the stage `watch` in docs/watch.md."""

    def __init__(self, settings: WatchSettings, series: Series, runs: Runs) -> None:
        self._settings = settings
        self._series = series
        self._runs = runs
        self._baseline = None if settings.baseline is None else _tasks_in(Path(settings.baseline))

    def poll(self) -> None:
        """One look at the training's folder, at what runs, and at what can start."""
        self._series.poll(saved_checkpoints(Path(self._settings.training_dir)))
        self.follow()

    def follow(self) -> None:
        """Finish evaluations that have ended, and start waiting ones in their place."""
        for entry in self._series.in_state(STARTED):
            outcome = self._runs.outcome(entry)
            if outcome is not None and outcome.verdict is None:
                self._abort(entry, outcome)
            elif outcome is not None:
                self._judge_or_give_up(entry, str(outcome.verdict))
        while self._startable():
            entry = self._series.waiting(self._settings.order)[0]
            self._series.note("started", entry.name, attempt=entry.attempts + 1)
            folder = self._series.results_of(entry)
            print(f"{entry.name}: evaluation starts, log in {folder}", flush=True)
            self._runs.start(entry)
        write_trend(self._series, self._settings)

    def until_done(self) -> int:
        """Look until the configured end; returns the exit code of the newest checkpoint."""
        while True:
            self.poll()
            next_look = time.monotonic() + self._settle_seconds()
            while not self.is_done() and time.monotonic() < next_look:
                time.sleep(min(_POLL_SECONDS, max(0.0, next_look - time.monotonic())))
                if self._series.in_state(STARTED):
                    self.follow()
            if self.is_done():
                return self.exit_code()

    def is_done(self) -> bool:
        """True after `max_checkpoints` evaluations, or after `idle_timeout` without a new one."""
        if self._series.in_state(STARTED):
            return False
        limit = self._settings.max_checkpoints
        if limit is not None and self._evaluations() >= limit:
            return True
        idle = self._settings.idle_timeout
        waits = self._series.in_state(WRITTEN, WAITING)
        return idle is not None and not waits and time.time() - self._series.last_event >= idle

    def exit_code(self) -> int:
        """0 GO, 1 NO-GO, 2 INCONCLUSIVE of the newest checkpoint; 3 without a verdict of it."""
        finished = self._series.in_state(JUDGED, FAILED)
        return _CODES.get(str(finished[-1].verdict), ERROR) if finished else ERROR

    def _settle_seconds(self) -> float:
        """Seconds to the next look: sooner while a checkpoint waits for its second one."""
        interval = self._settings.interval
        if self._series.in_state(WRITTEN):
            return min(interval, _MIN_SETTLE_SECONDS)
        return interval

    def _startable(self) -> bool:
        running = len(self._series.in_state(STARTED))
        limit = self._settings.max_checkpoints
        if limit is not None and self._evaluations() + running >= limit:
            return False
        return running < self._settings.parallel and bool(
            self._series.waiting(self._settings.order)
        )

    def _evaluations(self) -> int:
        return len(self._series.in_state(JUDGED, FAILED))

    def _abort(self, entry: Entry, outcome: Outcome) -> None:
        """Try again, or note why there is no verdict. An interrupted attempt does not count."""
        reason, attempts = outcome.reason, entry.attempts - outcome.interrupted
        if not entry.path.exists():
            event, reason = SKIPPED, "deleted by the training during its evaluation"
        elif attempts < self._settings.attempts:
            event = "retry"
        else:
            event = FAILED
        self._series.note(event, entry.name, reason=reason, attempts=attempts)
        print(f"{entry.name}: {event}: {reason}", flush=True)

    def _judge_or_give_up(self, entry: Entry, measured: str) -> None:
        """Judge an evaluation whose report can be read."""
        try:
            self._judge(entry, measured)
        except ConfigError as error:
            self._abort(entry, Outcome(None, str(error)))

    def _judge(self, entry: Entry, measured: str) -> None:
        """The verdict of the evaluation, or NO-GO if the series shows a regression."""
        judged = [other for other in self._series.in_state(JUDGED) if other is not entry]
        # A drop that was named once would keep the means over it low.
        before = [other for other in judged if other.step < entry.step and other.verdict != NO_GO]
        tasks = self._tasks(entry)
        references = self._references(entry)
        checked = comparisons(
            tasks, [(other.name, self._tasks(other)) for other in before], references
        )
        number = len(judged) + 1
        dropped = regressions(checked, number, self._settings.level, self._settings.max_drop)
        self._series.note(
            "judged",
            entry.name,
            number=number,
            verdict=NO_GO if dropped else measured,
            measured=measured,
            regressions=[{**dataclasses.asdict(one), "text": one.text()} for one in dropped],
            metrics=_figures(tasks),
        )
        self._series.link_latest_go()
        print(f"{entry.name}: {entry.verdict}", *(f"  {one.text()}" for one in dropped), sep="\n")
        print(f"trend: {self._series.folder / PAGE_NAME}", flush=True)

    def _references(self, entry: Entry) -> dict[str, Tasks]:
        """The baseline and the last GO, each by how it is called in a sentence."""
        result: dict[str, Tasks] = {}
        if self._baseline is not None:
            result["the baseline"] = self._baseline
        latest = self._series.latest_go(before=entry)
        if latest is not None:
            result[f"the last GO, {latest.name}"] = self._tasks(latest)
        return result

    def _tasks(self, entry: Entry) -> Tasks:
        return _tasks_in(self._runs.report_file(entry))


def _tasks_in(report: Path) -> dict[str, TaskSection]:
    content = read_content(report, "watch.baseline")
    folder = report if report.is_dir() else report.parent
    return {
        name if group == "metrics" else f"{group}.{name}": section
        for (group, name), section in tasks_of(content, folder).items()
    }


def _figures(tasks: Tasks) -> dict[str, dict[str, Any]]:
    """Every figure with its 95 % interval; None for an end that the report does not have."""
    result = {}
    for task, section in tasks.items():
        for name, metric in section.metrics.items():
            interval = section.interval(name)
            ends = {"low": interval.low, "high": interval.high}
            result[f"{task}.{name}"] = {
                "value": metric["value"],
                **{end: value if math.isfinite(value) else None for end, value in ends.items()},
                "percent": bool(metric["percent"]),
            }
    return result
