"""The cluster types `interactive` and `bcp`: steps that bash or bcprun runs on this machine, one
job after another, services beside the jobs that follow them.

Of `bcp`, Base Command Platform, the launcher runs inside the allocated job, so the steps run in the
foreground and their output is the job's. Every script leads a process group of its own, and the
group is ended with it. Output goes to the job's log; the log of what one waits for is repeated on
the terminal.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, ClassVar

from launcher_scripts.cluster.cluster import Cluster, Options, without_job
from launcher_scripts.cluster.job import ClusterOptions, Job, Service, Submitted
from launcher_scripts.cluster.record import (
    JobRecord,
    JobState,
    end_group,
    note_end,
    note_process,
    process_state,
    ready_of_run,
    request_end,
    wait_for,
)
from launcher_scripts.common.errors import (
    ClusterError,
    LauncherError,
    Problems,
    ServerError,
    VerdictError,
)
from launcher_scripts.common.packages import VERDICTS
from launcher_scripts.common.processes import (
    StopRequest,
    adopt_orphans,
    signal_when_parent_dies,
)
from launcher_scripts.common.rendering import render

POLL_SECONDS = 0.05
# Lines of tritonserver itself, among them the tables that it draws.
_TRITON_LINE = re.compile(
    rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ |\+[-+]+\+\s*$|\| .*\|\s*$|Error: Failed to initialize NVML"
)
_EXAMPLE = "try: "  # how the log of a server with a gateway begins the line of a request
_GROUP_SECONDS = 5.0
_LOG_TAIL_LINES = 20


class Process:
    """A running job script: its process group, and how much of its log has been repeated."""

    def __init__(self, submitted: Submitted, env: Mapping[str, str]) -> None:
        self.submitted = submitted
        self.log = submitted.log
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                ["bash", str(submitted.job.folder.script)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(signal_when_parent_dies, signal.SIGTERM),
            )
        self._reported = 0
        self._stopped = False
        self._end_noted = False
        note_process(submitted.job.folder.root, self._popen.pid)

    @property
    def name(self) -> str:
        return f"{self.submitted.job.stage} job {self.submitted.job.name}"

    def exit_code(self) -> int | None:
        """None while the script runs; a death by signal counts as in a shell."""
        code = self._popen.poll()
        if code is None:
            return None
        code = 128 - code if code < 0 else code
        if not self._end_noted:
            self._end_noted = True
            root, job_id = self.submitted.job.folder.root, self.submitted.job_id
            note_end(root, job_id, code, stopped=self._stopped)
        return code

    def finished(self) -> bool:
        return self.exit_code() is not None

    def show_log(self) -> None:
        """Repeat on the terminal what the log has gained."""
        with self.log.open("rb") as log:
            log.seek(self._reported)
            gained = self._visible(log)
        sys.stdout.flush()
        sys.stdout.buffer.write(gained)
        sys.stdout.buffer.flush()

    def _visible(self, log: IO[bytes]) -> bytes:
        """The part of the log's rest that belongs on the terminal."""
        gained = log.read()
        self._reported += len(gained)
        return gained

    def tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-_LOG_TAIL_LINES:])

    def stop(self, leader_seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End the script and all of its group.

        The leader is asked first and has `leader_seconds` to end its children in order, or until
        `hurry` says otherwise; what is left of the group is asked then, and killed at last. Where
        the leader ends without its children, they have the rest of that time.
        """
        deadline = time.monotonic() + leader_seconds
        if not self.finished():
            self._stopped = True
            self._popen.terminate()
            wait_for(lambda: self.finished() or hurry(), leader_seconds, POLL_SECONDS)
        self._signal_group(signal.SIGTERM)
        left = max(_GROUP_SECONDS, deadline - time.monotonic())
        wait_for(lambda: not self._group_lives() or hurry(), left, POLL_SECONDS)
        self._signal_group(signal.SIGKILL)
        self._popen.wait()
        self.finished()

    def _group_lives(self) -> bool:
        """Dead members count until they are reaped; adopt_orphans makes that our part."""
        if self._popen.poll() is None:
            return True
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self._popen.pid, os.WNOHANG) != (0, 0):
                pass
        return self._signal_group(0)

    def _signal_group(self, number: int) -> bool:
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:
            return False
        return True


class ServiceProcess(Process):
    """A service: ready when one of its ready files names this run, and no other one."""

    def __init__(self, submitted: Submitted, service: Service, env: Mapping[str, str]) -> None:
        self.service = service
        self._in_triton = False
        super().__init__(submitted, env)

    def _visible(self, log: IO[bytes]) -> bytes:
        """Complete lines, without those of tritonserver: the terminal has a line per event."""
        gained, lines = log.read(), []
        if not self.finished():
            gained = gained[: gained.rfind(b"\n") + 1]
        self._reported += len(gained)
        for line in gained.splitlines(keepends=True):
            self._in_triton = bool(_TRITON_LINE.match(line)) or (
                self._in_triton and not line.strip()
            )
            if not self._in_triton:
                lines.append(line)
        return b"".join(lines)

    def addresses(self) -> list[str]:
        """The lines that a user needs: the address of OpenAI's interface, and a request."""
        ready = ready_of_run(self.service.ready_file, self.submitted.job.folder.root) or {}
        if not ready.get("openai"):
            return []
        text = self.log.read_text(encoding="utf-8", errors="replace")
        examples = [line for line in text.splitlines() if line.startswith(_EXAMPLE)]
        request = [example.removeprefix(_EXAMPLE) for example in examples[-1:]]
        return [f"OpenAI URL: {ready['openai']}", *request]

    def ready(self) -> Path | None:
        """The file that says so; None: it is not ready."""
        folder = self.submitted.job.folder.root
        paths = dict.fromkeys((self.service.ready_file, self.service.first_file))
        return next((path for path in paths if ready_of_run(path, folder) is not None), None)


class Stopped(ClusterError):
    """A person or the system asked this process to end."""

    def __init__(self, received: int) -> None:
        super().__init__(f"stopped by {signal.Signals(received).name}")
        self.exit_code = 128 + received


class ForegroundCluster(Cluster[Options]):
    """Runs jobs here and now, in the order of submission.

    This process's signal handlers are its own from the first job until close().
    """

    max_replicas: ClassVar[int | None] = 1

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._stop = StopRequest()
        self._exit = contextlib.ExitStack()
        self._listens = False
        self._services: list[ServiceProcess] = []
        self._awaits = False  # whether the newest service must get ready before anything else

    def environment(self) -> Mapping[str, str]:
        """The variables that the jobs' scripts inherit."""
        return os.environ

    def submit(self, job: Job, after: Submitted | None = None) -> Submitted:
        """Run the job to its end; a service is started, and is ready before the next job runs."""
        job.write(self.render(job))
        submitted = Submitted(job, str(os.getpid()), after)
        submitted.write_record(self.type)
        if not self._listens:
            self._listens = True
            self._exit.enter_context(self._stop.listening())
            adopt_orphans()
        if job.after_any:
            self._end_services()
        if self._awaits:
            self._wait_until_ready()
        print(f"{job.stage}: {job.name}, log: {submitted.log}", flush=True)
        if job.service is None:
            self._run(submitted)
            self._awaits = job.promotes
        else:
            self._services.append(ServiceProcess(submitted, job.service, self.environment()))
            self._awaits = True
        return submitted

    def goes_on(self, error: LauncherError) -> bool:
        """Yes after a job that failed, unless somebody asked all of them to end."""
        return not isinstance(error, Stopped)

    def abort(self) -> None:
        """Leave running jobs to close()."""

    @classmethod
    def state(cls, folder: Path, record: JobRecord, job_id: str) -> JobState:  # noqa: ARG003
        return process_state(folder, job_id)

    @classmethod
    def stop(cls, folder: Path, record: JobRecord, job_id: str) -> None:
        request_end(folder, job_id, record.stop_timeout)

    @classmethod
    def cancel(cls, folder: Path, record: JobRecord, job_id: str) -> None:  # noqa: ARG003
        end_group(folder, job_id)

    def finish(self) -> None:
        """Keep the newest service in the foreground until it is stopped or ends.

        Being stopped is how a service ends, so it is a success when the service ended well.
        """
        if not self._awaits:
            return
        self._wait_until_ready()
        process = self._services[-1]
        try:
            self._wait(process.finished, show=process, needs=self._services[:-1])
        except Stopped as stopped:
            print(f"{stopped}: the {process.name} is ending", flush=True)
        self._services.remove(process)
        process.stop(process.service.stop_timeout, lambda: self._stop.again)
        process.show_log()
        _check_exit(process)

    def close(self) -> None:
        """End the services, and give the signal handlers back."""
        self._end_services()
        self._exit.close()

    def _run(self, submitted: Submitted) -> None:
        """Run a job to its end while the services live; raises when either fails."""
        process = Process(submitted, self.environment())
        try:
            self._wait(process.finished, show=process, needs=self._services)
        finally:
            process.stop(0.0)
            process.show_log()
        _check_exit(process)

    def _wait_until_ready(self) -> None:
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
        self._awaits = False
        process.show_log()
        print(f"{process.name} is ready: {ready_file}", *process.addresses(), sep="\n", flush=True)

    def _end_services(self) -> None:
        """End the services, newest first."""
        self._awaits = False
        while self._services:
            process = self._services.pop()
            process.stop(process.service.stop_timeout, lambda: self._stop.again)

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
                if process.finished():
                    raise ServerError(
                        f"the {process.name} ended with exit code {process.exit_code()}; "
                        f"the end of its log {process.log}:\n{process.tail()}"
                    )
            time.sleep(POLL_SECONDS)


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


ARRAY_TYPES = ("pytorch", "mpi")
# The number of nodes of the BCP job that this process runs in.
NODES_VARIABLE = "NGC_ARRAY_SIZE"


@dataclass(frozen=True, kw_only=True)
class BcpOptions(ClusterOptions):
    """conf/cluster/bcp.yaml.

    array_type:  how the processes of a server find each other: pytorch (RANK, WORLD_SIZE,
                 MASTER_ADDR, ...), mpi (mpirun's variables), or None: as the BCP job was started
    bcprun_args: further arguments of every bcprun
    """

    type: str = "bcp"
    gpus_per_node: int | None = 8
    array_type: str | None = None
    bcprun_args: tuple[str, ...] = ()

    def _check(self, problems: Problems) -> None:
        super()._check(problems)
        if self.array_type not in (None, *ARRAY_TYPES):
            problems.add(
                "unknown array_type",
                got=self.array_type,
                choices=(*ARRAY_TYPES, "null (as the BCP job was started)"),
                change="cluster.array_type",
            )


class BcpCluster(ForegroundCluster[BcpOptions]):
    """The nodes of the BCP job that the launcher itself runs in."""

    type: ClassVar[str] = "bcp"
    options_type = BcpOptions

    @property
    def max_nodes(self) -> int | None:
        """The nodes of this BCP job; None where it does not say, as outside of one."""
        nodes = os.environ.get(NODES_VARIABLE, "")
        return int(nodes) if nodes.isdecimal() and int(nodes) else None

    def check(self, problems: Problems) -> None:
        if shutil.which("bcprun") is None:
            problems.add(
                "bcprun is not on the PATH of this machine: run inside a BCP job",
                change="cluster_type (interactive runs the job here)",
            )

    def render(self, job: Job) -> str:
        return render("bcp.sh.j2", job=job, options=self.options_of(job))


@dataclass(frozen=True, kw_only=True)
class InteractiveOptions(ClusterOptions):
    """conf/cluster/interactive.yaml."""

    type: str = "interactive"


class InteractiveCluster(ForegroundCluster[InteractiveOptions]):
    """This machine, without a scheduler and without a container."""

    type: ClassVar[str] = "interactive"
    options_type = InteractiveOptions
    serves_others: ClassVar[bool] = False

    @property
    def max_nodes(self) -> int | None:
        return 1

    def check(self, problems: Problems) -> None:
        """bash is all that it takes."""

    def environment(self) -> Mapping[str, str]:
        """The steps are alone, also in one of several tasks of a job of Slurm or MPI."""
        return without_job(os.environ)

    def render(self, job: Job) -> str:
        return render("local.sh.j2", job=job, options=self.options_of(job))
