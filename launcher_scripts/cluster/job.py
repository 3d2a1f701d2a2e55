"""A job: steps on nodes, with all its files in one folder."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.cluster.record import ID_FILE, RECORD, JobRecord, append_to_index, write_text
from launcher_scripts.common.errors import ClusterError, ConfigError, Problems, problem
from launcher_scripts.config.settings import settings_text


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The keys that conf/cluster/*.yaml have in common.

    gpus_per_node: GPUs that a job gets on every node; None: not known, so not checked
    setup:         lines of bash that a job's script runs before its steps
    python:        interpreter that runs the steps, as seen by them; None: see Stage.python
    overlay:       folder of packages that this interpreter lacks (requirements/overlay.py)
    """

    type: str
    gpus_per_node: int | str | None = None
    python: str | None = None
    overlay: str | None = None
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = Problems("the cluster's configuration")
        self._check(problems)
        problems.raise_if_any(ConfigError)

    def _check(self, problems: Problems) -> None:
        """Every value ends up on a line of a script."""
        for name, value in asdict(self).items():
            values = value if isinstance(value, tuple) else (value,)
            if not all(str(item).isprintable() for item in values):
                problems.add("not on one line", got=value, change=f"cluster.{name}")
        if self.gpus_per_node is not None and not self.num_gpus:
            problems.add(
                "gpus_per_node must be at least 1, or null for a cluster without GPUs",
                got=self.gpus_per_node,
                change="cluster.gpus_per_node",
            )

    @property
    def num_gpus(self) -> int | None:
        """The number of `gpus_per_node`; 0 for a text that has none, None if it is not set."""
        if self.gpus_per_node is None or isinstance(self.gpus_per_node, int):
            return None if self.gpus_per_node is None else max(0, self.gpus_per_node)
        return 0


_LONGEST_NAME = 200  # names of files end in the job's id and more, and have 255 bytes
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Resources:
    """Resources that a job requests of the cluster. time_limit is in Slurm's notation.

    gpus_per_node: None: what the cluster's configuration says; 0: none, on a node that others use
    cpus_per_task: CPUs that a task needs, where the configuration has no number; None: unknown
    """

    nodes: int = 1
    tasks_per_node: int = 1
    time_limit: str = "1:00:00"
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None


@dataclass(frozen=True)
class Step:
    """One command of a job, started once per task.

    mpi:  whether its tasks find each other through the cluster's process manager
    gpus: how many GPUs of every node it needs; None: those of the job
    """

    name: str
    argv: tuple[str, ...]
    nodes: int = 1
    tasks_per_node: int = 1
    mpi: bool = False
    gpus: int | None = None

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


@dataclass(frozen=True)
class Container:
    """The image that the steps run in, and its mounts as `source:target[:flags]`."""

    image: str
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Service:
    """Properties of a service: it is ready when `ready_file` exists, and ends when stopped.

    stop_timeout is the time in seconds that it may take to end by itself. candidate_file: what is
    there before, of a server that is held back until its evaluation's verdict.
    """

    ready_file: Path
    ready_timeout: float
    stop_timeout: float
    candidate_file: Path | None = None

    @property
    def first_file(self) -> Path:
        """The file that appears when it can be measured."""
        return self.candidate_file or self.ready_file


@dataclass(frozen=True)
class JobFolder:
    """Every path of one job; a second run gets a folder of its own."""

    root: Path
    name: str

    def __post_init__(self) -> None:
        bad = not self.name.isprintable() or "/" in self.name or self.name.startswith((".", "-"))
        if bad or not 0 < len(os.fsencode(self.name)) <= _LONGEST_NAME:
            raise ConfigError(
                problem(
                    "a job's name becomes part of file names: printable, without a slash, not "
                    f"starting with a dot or dash, and at most {_LONGEST_NAME} bytes",
                    got=self.name,
                    change="the stage's run.name",
                )
            )

    @property
    def settings(self) -> Path:
        return self.root / f"{self.name}_hydra.yaml"

    @property
    def script(self) -> Path:
        return self.root / f"{self.name}_submission.sh"

    @property
    def id_file(self) -> Path:
        """The job's id alone, for scripts."""
        return self.root / ID_FILE

    @property
    def client_file(self) -> Path:
        """The file in a server's job with the ID of the job that it ends with."""
        return self.root / "client_job_id"

    @property
    def results_dir(self) -> Path:
        """The folder with the results of all runs."""
        return self.root.parents[1]

    @property
    def log_stem(self) -> str:
        """The log's path up to `_<job id>.out`."""
        return str(self.root / f"log-{self.name}")

    def log(self, job_id: str) -> Path:
        return Path(f"{self.log_stem}_{job_id}.out")

    @property
    def server_log_stem(self) -> str:
        """The same for a server that shares its job with its client."""
        return str(self.root / f"server-{self.name}")

    @classmethod
    def next(cls, results_dir: Path, name: str) -> JobFolder:
        """The folder that the next run under `results_dir` gets; nothing is created."""
        jobs = results_dir / "jobs"
        numbers = [int(path.name) for path in jobs.glob("*") if path.name.isdecimal()]
        return cls(jobs / f"{max(numbers, default=0) + 1:03d}", name)

    @classmethod
    def reserve(cls, results_dir: Path, name: str) -> JobFolder:
        """Create the next folder; two runs that start together get different ones."""
        while True:
            folder = cls.next(results_dir, name)
            try:
                folder.root.parent.mkdir(parents=True, exist_ok=True)
                folder.root.mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                message = f"cannot create the job folder {folder.root}: {error}"
                raise ClusterError(problem(message, change="base_results_dir")) from error
            return folder


@dataclass(frozen=True)
class Job:
    """Steps that run one after another on the same nodes, and the settings that they read.

    service:      set where the steps do not end by themselves
    server:       the job of the server that this one talks to
    stops_server: whether that server is stopped when this job ends
    promotes:     whether that server goes on all the same when this job succeeds
    client:       a job that runs beside this service, on the same nodes; its result is the job's
    ends_with_client: whether a later job of the same command line stops this service: it ends
                  with that job, also where that job cannot stop it
    options:      the cluster's options of this job's stage; None: those of the cluster
    gateway:      the job of the gateway that the same command line puts before this server
    replicas:     how many times a service is started, as an array of jobs; 0: once, and no array
    first_replica: the number of the array's first task
    after_any:    whether it starts when the jobs before it have ended, however they did: their
                  servers are stopped first, and it does not need what they have made
    """

    stage: str
    folder: JobFolder
    settings: Any
    steps: tuple[Step, ...]
    resources: Resources = Resources()
    env: Mapping[str, str] = field(default_factory=dict)
    container: Container | None = None
    service: Service | None = None
    server: Job | None = None
    stops_server: bool = False
    promotes: bool = False
    client: Job | None = None
    ends_with_client: bool = False
    options: ClusterOptions | None = None
    gateway: Job | None = None
    replicas: int = 0
    first_replica: int = 0
    after_any: bool = False

    def __post_init__(self) -> None:
        problems = Problems(f"the {self.stage} job")
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name):
                problems.add("not a name of an environment variable", got=name, change="env_vars")
            if "\0" in value:
                problems.add(f"the value of {name} holds a NUL", got=value, change="env_vars")
        problems.raise_if_any(ConfigError)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def judges(self) -> bool:
        """Return whether the job's exit code is that of a verdict (common/packages.py)."""
        return any(step.name in ("judge", "write_ladder") for step in self.steps)

    def settings_files(self) -> dict[Path, str]:
        """The settings files by their paths, with that of a client in the same job."""
        files = {self.folder.settings: settings_text(self.settings)}
        return files if self.client is None else {**files, **self.client.settings_files()}

    def write(self, script: str) -> None:
        """Put the settings file and the script into the job folder."""
        for path, text in {**self.settings_files(), self.folder.script: script}.items():
            write_text(path, text)
        self.folder.script.chmod(0o755)


@dataclass(frozen=True)
class Submitted:
    """A job that a cluster has taken.

    after:  the job that it waits for
    within: the job whose client it is, and in whose log it writes
    """

    job: Job
    job_id: str
    after: Submitted | None = None
    within: Job | None = None

    @property
    def log(self) -> Path:
        return (self.within or self.job).folder.log(self.job_id)

    def write_record(self, cluster_type: str) -> None:
        """Note in the job folder under which id the job runs, for people and for tools."""
        job, service = self.job, self.job.service
        JobRecord(
            stage=job.stage,
            name=job.name,
            cluster_type=cluster_type,
            job_id=self.job_id,
            after=self.after.job_id if self.after else None,
            settings=job.folder.settings.name,
            script=(self.within or job).folder.script.name,
            log=self.log.name if self.within is None else str(self.log),
            ready_file=str(service.ready_file) if service else None,
            stop_timeout=service.stop_timeout if service else 0.0,
            submitted=round(time.time(), 3),
            within=None if self.within is None else str(self.within.folder.root),
            replicas=job.replicas,
            first_replica=job.first_replica,
            command=(sys.executable, *sys.argv),
            directory=str(Path.cwd()),
        ).write(job.folder.root)
        append_to_index(job.folder.root)
        if job.client is not None:
            self._client(job.client).write_record(cluster_type)

    def remove_record(self) -> None:
        """Remove the record of a job that the cluster has refused."""
        for name in (RECORD, ID_FILE):
            (self.job.folder.root / name).unlink(missing_ok=True)
        if self.job.client is not None:
            self._client(self.job.client).remove_record()

    def _client(self, client: Job) -> Submitted:
        return Submitted(client, self.job_id, self.after, within=self.job)
