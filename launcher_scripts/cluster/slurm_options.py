"""What conf/cluster/bcm.yaml can say: sbatch's options, and how the steps are started."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from launcher_scripts.cluster.job import Job, Service
from launcher_scripts.cluster.options import ClusterOptions
from launcher_scripts.cluster.slurm_queue import slurm_seconds
from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.options import check_options, option

_OWN_KEYS = (
    *("type", "job_name_prefix", "mpi", "srun_args", "python", "requeue"),
    *("container_runtime", "image_cache", "overlay", "setup", "sbatch_args"),
)
# Options of sbatch that the launcher sets itself, or that would end its dialogue with sbatch.
_REFUSED_ARGS = (
    *("array", "job-name", "nodes", "ntasks-per-node", "open-mode", "output", "error", "parsable"),
    *("signal", "test-only", "time", "wait", "wrap"),
)
_GPUS = re.compile(r"(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>[1-9]\d*)")
_GPUS_OF_GRES = re.compile(r"(?:^|,)(?:gres[/:])?gpu(?::[A-Za-z][\w.-]*)?:(\d+)(?=,|$|\()")
_MPI = re.compile(r"pmix(_v\d+)?|pmi2|none")
_MPI_TYPES = ("pmix", "pmix_v<version>", "pmi2", "none")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_EXCLUSIVE = ("True", "False", "user", "mcs")
_RUNTIMES = ("pyxis", "enroot", "none")
# Slurm may send the signal before a time limit up to a minute early, but never late.
_SIGNAL_MARGIN = 10
_EARLY_SECONDS = 60
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(ClusterOptions):
    """conf/cluster/bcm.yaml: sbatch's options by their names, and our own keys.

    mpi:       how the tasks of a server find each other (srun --mpi)
    srun_args: further arguments of every srun
    sbatch_args: further options of sbatch: [--wckey=x]
    gpus_per_node: a number, or with Slurm's type before it: a100:8
    requeue:   whether Slurm may run the job again after a node failure or preemption; null: as
               the cluster is set up
    container_runtime: what starts the container: pyxis (srun's options), enroot (its commands
               in the script), or none: the steps run on the host
    image_cache: folder that all nodes see, for images that enroot fetches from a registry
    """

    type: str = "bcm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    comment: str | None = None
    exclusive: bool | str | None = True
    overcommit: bool | None = False
    gpus_per_task: int | None = option(
        None, "instead of gpus_per_node; a node runs one task", least=1
    )
    gpus_per_node: int | str | None = 8
    gres: str | None = None
    dependency: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    cpus_per_task: int | None = option(None, "CPUs of every task", least=1)
    mem: str | None = "0"
    job_name_prefix: str = "nemo-megatron-"
    mpi: str = "pmix"
    sbatch_args: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    requeue: bool | None = False
    container_runtime: str = option("pyxis", "what starts the container", choices=_RUNTIMES)
    image_cache: str | None = None

    def _check(self, problems: Problems) -> None:
        super()._check(problems)
        check_options(self, problems, "cluster.{}".format)
        self._check_words(problems)
        self._check_arguments(problems)
        if not _MPI.fullmatch(self.mpi):
            problems.add("unknown mpi", got=self.mpi, choices=_MPI_TYPES, change="cluster.mpi")
        if self.exclusive is not None:
            exclusive = str(self.exclusive)
            problems.check_choice("exclusive", exclusive, _EXCLUSIVE, "cluster.exclusive")
        if self.mem is not None and not _MEMORY.fullmatch(self.mem):
            notations = ("0 (all of a node)", "megabytes", "a number with K, M, G or T")
            problems.add("no size of memory", got=self.mem, choices=notations, change="cluster.mem")

    def _check_words(self, problems: Problems) -> None:
        """An empty value would make an option of its own, or of the next one."""
        for name, value in asdict(self).items():
            words = value if isinstance(value, tuple) else (value,)
            if name != "job_name_prefix" and "" in words:
                problems.add(
                    f"{name} is empty",
                    got=value,
                    change=f"cluster.{name} (null leaves the option out)",
                )

    def _check_arguments(self, problems: Problems) -> None:
        for argument in self.sbatch_args:
            name = option_name(argument)
            if not argument.startswith("--") or name in _REFUSED_ARGS:
                problems.add(
                    "an option of sbatch that the launcher sets itself"
                    if name in _REFUSED_ARGS
                    else "an option of sbatch is one word: --NAME or --NAME=VALUE",
                    got=argument,
                    change="cluster.sbatch_args",
                )

    @property
    def num_gpus(self) -> int | None:
        """The number of `gpus_per_node`, or that of the GPUs in `gres`."""
        if self.gpus_per_node is not None:
            match = _GPUS.fullmatch(str(self.gpus_per_node))
            return int(match["count"]) if match else 0
        counts = [int(count) for count in _GPUS_OF_GRES.findall(self.gres or "")]
        return sum(counts) or None

    @property
    def gpu_type(self) -> str:
        """Slurm's type of the GPUs with a colon, for srun's options; empty if none is named."""
        match = _GPUS.fullmatch(str(self.gpus_per_node or ""))
        return f"{match['type']}:" if match and match["type"] else ""

    def cpus_of(self, job: Job) -> int | None:
        """CPUs of a task: as configured, or on shared nodes as many as it needs."""
        if self.cpus_per_task is not None or self.exclusive is True:
            return self.cpus_per_task
        return job.resources.cpus_per_task

    @property
    def node_gpus(self) -> int | None:
        """GPUs that a job gets on every node, where a node runs one task."""
        return self.num_gpus if self.gpus_per_task is None else self.gpus_per_task

    def sbatch(self, job: Job) -> dict[str, Any]:
        """The parameters of the submission, in submitit's spelling."""
        own = {key: value for key, value in asdict(self).items() if key not in _OWN_KEYS}
        if self.gpus_per_task is not None:
            # With both, Slurm wants as many tasks on a node as the one divided by the other.
            own["gpus_per_node"] = None
        if job.resources.gpus_per_node is not None:
            own |= {"gpus_per_node": job.resources.gpus_per_node or None, "gpus_per_task": None}
        if job.resources.gpus_per_node == 0:
            own |= {"exclusive": None, "mem": None if self.mem == "0" else self.mem, "gres": None}
        signal = None
        if job.service is not None:
            signal = f"B:USR1@{_warning_seconds(job, job.service)}"
        first, last = job.first_replica, job.first_replica + job.replicas - 1
        return {
            "job_name": self.job_name_prefix + job.name,
            "nodes": job.resources.nodes,
            "ntasks_per_node": job.resources.tasks_per_node,
            "time": job.resources.time_limit,
            **own,
            "cpus_per_task": self.cpus_of(job),
            "array": f"{first}-{last}" if job.replicas else None,
            "output": file_pattern(job.folder.log_stem, array=job.replicas > 0),
            "signal": signal,
            "open-mode": "append",
            "requeue": self.requeue or None,
            "no-requeue": self.requeue is False or None,
        }


def option_name(argument: str) -> str:
    """The long name of an option of sbatch."""
    return argument.lstrip("-").partition("=")[0]


def _warning_seconds(job: Job, service: Service) -> int:
    """Seconds before the time limit at which a server is told to end.

    Raises ConfigError for a limit that leaves no time before.
    """
    warning = math.ceil(service.stop_timeout) + _SIGNAL_MARGIN
    text = job.resources.time_limit
    limit = slurm_seconds(text) if _TIME.fullmatch(text) else 0  # 0: none
    if 0 < limit <= warning + _EARLY_SECONDS:
        raise ConfigError(
            problem(
                f"the time limit leaves no time to serve: {warning} s before it the server is told "
                f"to end, and Slurm may do so {_EARLY_SECONDS} s early",
                got=job.resources.time_limit,
                change=f"{job.stage}.run.time_limit, or the server's stop_timeout",
            )
        )
    return warning


def file_pattern(stem: str, *, array: bool = False) -> str:
    """Slurm's file name pattern of `<stem>_<job id>.out`; ids of an array's tasks are `1_0`."""
    if "\\" in stem:
        raise ConfigError(
            problem(
                "Slurm puts no job id into the name of a log whose path has a backslash",
                got=stem,
                change="run.results_dir, base_results_dir or run.name of the stage",
            )
        )
    return stem.replace("%", "%%") + ("_%A_%a.out" if array else "_%j.out")
