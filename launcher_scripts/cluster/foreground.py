"""Runs jobs on this machine: one after another, services beside the jobs that follow them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from launcher_scripts.cluster.cluster import Cluster, Options
from launcher_scripts.cluster.job import Job, Service, Submitted
from launcher_scripts.cluster.local_state import ask_to_end, end_group, process_state
from launcher_scripts.cluster.process import POLL_SECONDS, Process, ServiceProcess
from launcher_scripts.cluster.record import JobRecord
from launcher_scripts.cluster.state import JobState
from launcher_scripts.common.errors import (
    ClusterError,
    LauncherError,
    ServerError,
    VerdictError,
)
from launcher_scripts.common.exit_codes import VERDICTS
from launcher_scripts.common.processes import StopRequest, adopt_orphans


class Stopped(ClusterError):
    """A person or the system asked this process to end."""

    def __init__(self, received: int) -> None:
        super().__init__(f"stopped by {signal.Signals(received).name}")
        self.exit_code = 128 + received


class Foreground:
    """The jobs of one command line. It owns this process's signal handlers until close()."""

    def __init__(self) -> None:
        self._stop = StopRequest()
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(self._stop.listening())
        self._services: list[ServiceProcess] = []
        adopt_orphans()

    def run(self, submitted: Submitted) -> None:
        """Run a job to its end while the services live; raises when either fails."""
        process = Process(submitted)
        try:
            self._wait(process.ended, show=process, needs=self._services)
        finally:
            process.stop(0.0)
            process.show_log()
        _check_exit(process)

    def start(self, submitted: Submitted, service: Service) -> None:
        """Start a service and return at once."""
        self._services.append(ServiceProcess(submitted, service))

    def wait_until_ready(self) -> None:
        """Wait for the newest service's ready file, as long as the service lives."""
        process = self._services[-1]
        deadline = time.monotonic() + process.service.ready_timeout

        def ready_or_late() -> bool:
            return process.ready() is not None or time.monotonic() > deadline

        self._wait(ready_or_late, show=process, needs=self._services)
        ready_file = process.ready()
        if ready_file is None:
            raise ServerError(
                f"the {process.name} was not ready within {process.service.ready_timeout:g} s; "
                f"the end of its log {process.log}:\n{process.tail()}"
            )
        print(f"{process.name} is ready: {ready_file}", flush=True)

    def serve(self) -> None:
        """Keep the newest service in the foreground until it is stopped or ends.

        Being stopped is how a service ends, so it is a success when the service ended well.
        """
        process = self._services[-1]
        try:
            self._wait(process.ended, show=process, needs=self._services[:-1])
        except Stopped as stopped:
            print(f"{stopped}: the {process.name} is ending", flush=True)
        self._services.remove(process)
        process.stop(process.service.stop_timeout, lambda: self._stop.again)
        process.show_log()
        _check_exit(process)

    def end_services(self) -> None:
        """End the services, newest first."""
        while self._services:
            process = self._services.pop()
            process.stop(process.service.stop_timeout, lambda: self._stop.again)

    def close(self) -> None:
        """End the services, and give the signal handlers back."""
        self.end_services()
        self._exit.close()

    def _wait(
        self, done: Callable[[], bool], *, show: Process, needs: Sequence[ServiceProcess]
    ) -> None:
        """Wait until `done`, repeating one log; raises when stopped or when a service dies."""
        while True:
            show.show_log()
            if done():
                return
            if self._stop.received is not None:
                raise Stopped(self._stop.received)
            for process in needs:
                if process.ended():
                    raise ServerError(
                        f"the {process.name} ended with exit code {process.exit_code()}; "
                        f"the end of its log {process.log}:\n{process.tail()}"
                    )
            time.sleep(POLL_SECONDS)


class ForegroundCluster(Cluster[Options]):
    """Runs jobs here and now, in the order of submission."""

    max_replicas: ClassVar[int | None] = 1

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._foreground: Foreground | None = None
        self._serving: Job | None = None

    def submit(self, job: Job, after: Submitted | None = None) -> Submitted:
        """Run the job to its end; a service is started, and is ready before the next job runs."""
        job.write(self.render(job))
        submitted = Submitted(job, str(os.getpid()), after)
        submitted.write_record(self.type)
        if self._foreground is None:
            self._foreground = Foreground()
        if job.after_any:
            self._foreground.end_services()
            self._serving = None
        if self._serving is not None:
            self._foreground.wait_until_ready()
            self._serving = None
        print(f"{job.stage}: {job.name}, log: {submitted.log}", flush=True)
        if job.service is None:
            self._foreground.run(submitted)
            self._serving = job.server if job.promotes else None
        else:
            self._foreground.start(submitted, job.service)
            self._serving = job
        return submitted

    def goes_on(self, error: LauncherError) -> bool:
        """Yes after a job that failed, unless somebody asked all of them to end."""
        return not isinstance(error, Stopped)

    def give_up(self) -> None:
        """What runs is ended by close()."""

    @classmethod
    def state(cls, folder: Path, record: JobRecord, job_id: str) -> JobState:  # noqa: ARG003
        return process_state(folder, job_id)

    @classmethod
    def stop(cls, folder: Path, record: JobRecord, job_id: str) -> None:
        ask_to_end(folder, job_id, record.stop_timeout)

    @classmethod
    def cancel(cls, folder: Path, record: JobRecord, job_id: str) -> None:  # noqa: ARG003
        end_group(folder, job_id)

    def finish(self) -> None:
        if self._foreground is not None and self._serving is not None:
            self._foreground.wait_until_ready()
            self._foreground.serve()

    def close(self) -> None:
        if self._foreground is not None:
            self._foreground.close()


def _check_exit(process: Process) -> None:
    code = process.exit_code()
    if not code:
        return
    error: LauncherError
    if code in VERDICTS and process.submitted.job.judges:
        error = VerdictError(f"{VERDICTS[code]}: the end of the {process.name}: {process.log}")
    else:
        error = ClusterError(f"the {process.name} failed with exit code {code}: {process.log}")
    error.exit_code = code
    raise error
