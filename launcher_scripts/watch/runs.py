"""The command lines that evaluate a checkpoint, and what has become of them.

In the foreground a command ends with its evaluation. On a cluster it ends when its jobs are
submitted; their records and the verdict's file tell the rest. Both are followed by files alone
after a restart of the watch.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher_scripts.common.command_line import hydra_value
from launcher_scripts.common.exit_codes import VERDICT_FILE, VERDICTS
from launcher_scripts.common.processes import signal_when_parent_dies
from launcher_scripts.config.settings import CHECKPOINT_KEY
from launcher_scripts.config.watch import WatchSettings
from launcher_scripts.watch.series import Entry, Series

REPORT_FOLDER = "evaluation"
LOG = "watch.log"
_STOP_TIMEOUT = 120.0
_STATUS_TIMEOUT = 60.0
_REASON = 300  # characters


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
            f"evaluate.run.results_dir={hydra_value(str(folder / REPORT_FOLDER))}",
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

    def report_file(self, entry: Entry) -> Path:
        return self._series.results_of(entry) / REPORT_FOLDER / "report.json"

    def _verdict(self, entry: Entry) -> str | None:
        """The verdict in an entry's file, which an evaluation removes before it measures."""
        path = self.report_file(entry).with_name(VERDICT_FILE)
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
