"""Evaluates the checkpoints of a training as they come, and judges the series."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher_scripts.common.command_line import hydra_value
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.packages import ERROR, VERDICT_FILE, VERDICTS
from launcher_scripts.common.processes import signal_when_parent_dies, this_environment
from launcher_scripts.config.evaluation import AFTER_GO, WatchSettings
from launcher_scripts.config.settings import CHECKPOINT_KEY
from launcher_scripts.evaluation.checks import TaskSection, tasks_of
from launcher_scripts.evaluation.journal import read_content
from launcher_scripts.watch.regression import MAX_BEFORE, Tasks, comparisons, regressions
from launcher_scripts.watch.series import (
    ENDED,
    FAILED,
    JUDGED,
    NO_GO,
    PAGE_NAME,
    SKIPPED,
    STARTED,
    WAITING,
    WRITTEN,
    Entry,
    Series,
    write_trend,
)
from launcher_scripts.watch.training import saved_checkpoints

LOG = "watch.log"
_STOP_TIMEOUT = 120.0
_STATUS_TIMEOUT = 60.0
_REASON = 300  # characters
_REPOSITORY = "*/*/model_repo"  # below a checkpoint's results
_POLL_SECONDS = 0.5
_CODES = {verdict: code for code, verdict in VERDICTS.items()}
# The earliest first look after which a checkpoint that did not change counts as complete.
_MIN_SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """How the evaluation of a checkpoint ended.

    verdict:     GO, NO-GO or INCONCLUSIVE; None: there is none, and `reason` says why
    interrupted: the watch ended before the evaluation did, which tells nothing of the checkpoint
    """

    verdict: str | None
    reason: str = ""
    interrupted: bool = False


class Runs:
    """The commands of a series; a context manager that ends what still runs in the foreground."""

    def __init__(self, settings: WatchSettings, series: Series) -> None:
        self._settings = settings
        self._series = series
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT)
            process.kill()
            process.wait()

    def start(self, entry: Entry) -> None:
        """Start the command of an entry; its output goes to a log in the entry's folder."""
        folder = self._series.results_of(entry)
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            *self._settings.command,
            f"{CHECKPOINT_KEY}={hydra_value(str(entry.path))}",
            f"base_results_dir={hydra_value(str(folder))}",
            f"evaluate.run.results_dir={hydra_value(str(self._series.evaluation_of(entry)))}",
        ]
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self._settings.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(signal_when_parent_dies, signal.SIGTERM),
            )
        self._processes[entry.name] = process
        if self._settings.successor:
            process.wait()  # until the jobs are submitted

    def outcome(self, entry: Entry) -> Outcome | None:
        """The outcome of a started entry, or None while its command or jobs run."""
        process = self._processes.get(entry.name)
        if process is not None and process.poll() is None:
            return None
        self._processes.pop(entry.name, None)
        verdict = self._verdict(entry)
        if verdict is not None:
            return Outcome(verdict)
        if process is not None and process.returncode:
            return Outcome(None, self._reason(entry))
        if self._settings.successor:
            return self._outcome_of_jobs(entry)
        if process is not None:
            return Outcome(None, "its evaluation wrote no verdict")
        return Outcome(None, "the watch ended before the evaluation did", interrupted=True)

    def swap(self, entry: Entry) -> str:
        """Have the running server serve an entry's export; returns the reason of a failure."""
        folder = self._series.results_of(entry)
        repositories = sorted(folder.glob(_REPOSITORY))
        if len(repositories) != 1:
            return f"{folder} has {len(repositories)} model repositories"
        command = [sys.executable, "-m", "launcher_scripts.jobs", "swap"]
        command += [str(self._settings.swap_server), str(repositories[0])]
        if self._settings.swap_ca is not None:
            command += ["--ca", self._settings.swap_ca]
        result = subprocess.run(
            command,
            cwd=self._settings.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=this_environment(),
        )
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(result.stdout + result.stderr)
        lines = result.stderr.splitlines() or [f"exit code {result.returncode}"]
        return lines[-1].removeprefix("error: ")[:_REASON] if result.returncode else ""

    def _verdict(self, entry: Entry) -> str | None:
        """The verdict in an entry's file, which an evaluation removes before it measures."""
        path = self._series.evaluation_of(entry) / VERDICT_FILE
        try:
            verdict = json.loads(path.read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return str(verdict) if verdict in VERDICTS.values() else None

    def _outcome_of_jobs(self, entry: Entry) -> Outcome | None:
        """None while a job of the entry runs or waits."""
        folder = self._series.results_of(entry)
        command = [sys.executable, "-m", "launcher_scripts.jobs", "list", "--json", "--results"]
        try:
            listed = subprocess.run(
                [*command, str(folder)],
                capture_output=True,
                text=True,
                check=False,
                timeout=_STATUS_TIMEOUT,
            )
            jobs = json.loads(listed.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            return None  # the scheduler does not answer now; the next look asks again
        if not jobs:
            return Outcome(None, self._reason(entry))
        unended = [job for job in jobs if not job["ended"]]
        if unended:
            return None
        failed = next((job for job in jobs if job["exit_code"]), jobs[-1])
        return Outcome(None, f"{failed['name']}: {failed['state']}")

    def _reason(self, entry: Entry) -> str:
        """The command's last error, from its log."""
        try:
            text = (self._series.results_of(entry) / LOG).read_text(
                encoding="utf-8", errors="replace"
            )
        except OSError:
            return "it was not started"
        lines = text.splitlines()
        errors = [line for line in lines if line.startswith("error: ")] or lines[-1:]
        return errors[-1].removeprefix("error: ")[:_REASON] if errors else "it wrote no output"


class Watcher:
    """One watch over a series; see the stage `watch` in docs/watch.md."""

    def __init__(self, settings: WatchSettings, series: Series, runs: Runs) -> None:
        self._settings = settings
        self._series = series
        self._runs = runs
        self._written: float | None = None  # the last event that the trend shows
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
        if self._settings.swap == AFTER_GO:
            self._swap_latest()
        if self._written != self._series.last_event:
            self._remove_exports()
            write_trend(self._series, self._settings)
            self._written = self._series.last_event

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

    def _remove_exports(self) -> None:
        """Remove model repositories, which are the weights, but for the newest and the latest GO's.

        Reports stay. A checkpoint that is evaluated again continues with its export.
        """
        series, count = self._series, self._settings.keep_exports
        if count is None:
            return
        kept = series.in_state(WRITTEN, WAITING, STARTED) + series.in_state(*ENDED)[-count:]
        latest = series.latest_go()
        kept += [] if latest is None else [latest]
        folders = {series.results_of(entry) for entry in kept}
        for repository in (series.folder / "checkpoints").glob(f"*/{_REPOSITORY}"):
            if repository.parents[2] not in folders:
                shutil.rmtree(repository, ignore_errors=True)

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
        # A drop that was named once would keep the means over it low.
        before = [
            other
            for other in self._series.in_state(JUDGED)
            if other.step < entry.step and other.verdict != NO_GO
        ]
        tasks = self._tasks(entry)
        references = self._references(entry)
        earlier = [self._tasks(other) for other in before[-MAX_BEFORE:]]
        checked = comparisons(tasks, earlier, references)
        number = self._series.evaluations + 1
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

    def _swap_latest(self) -> None:
        """Have the running server serve the newest GO, once; a failure is noted and changes
        nothing.
        """
        entry = self._series.latest_go()
        if entry is None or entry.swap:
            return
        reason = self._runs.swap(entry)
        self._series.note("swapped", entry.name, reason=reason)
        result = f"not served: {reason}" if reason else "its weights are served"
        print(f"{entry.name}: {result} by {self._settings.swap_server}", flush=True)

    def _tasks(self, entry: Entry) -> Tasks:
        return _tasks_in(self._series.evaluation_of(entry))


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
