"""What conf/cluster/bcm.yaml can say: sbatch's options, and how the steps are started."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from launcher_scripts.cluster.job import Job
from launcher_scripts.cluster.options import ClusterOptions
from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.options import check_options, option

_OWN_KEYS = (
    *("type", "job_name_prefix", "mpi", "srun_args", "python", "requeue"),
    *("container_runtime", "image_cache"),
)
_MPI = re.compile(r"pmix(_v\d+)?|pmi2|none")
_MPI_TYPES = ("pmix", "pmix_v<version>", "pmi2", "none")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_EXCLUSIVE = ("True", "False", "user", "mcs")
_RUNTIMES = ("pyxis", "enroot", "none")
# Slurm may send the signal before a time limit up to a minute early, but never late.
_SIGNAL_MARGIN = 10


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(ClusterOptions):
    """conf/cluster/bcm.yaml: sbatch's options by their names, and our own keys.

    mpi:       how the tasks of a server find each other (srun --mpi)
    srun_args: further arguments of every srun
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
    gpus_per_node: int | None = 8
    cpus_per_task: int | None = option(None, "CPUs of every task", least=1)
    mem: str | None = "0"
    job_name_prefix: str = "nemo-megatron-"
    mpi: str = "pmix"
    srun_args: tuple[str, ...] = ()
    requeue: bool | None = False
    container_runtime: str = option("pyxis", "what starts the container", choices=_RUNTIMES)
    image_cache: str | None = None

    def _check(self, problems: Problems) -> None:
        super()._check(problems)
        check_options(self, problems, "cluster.{}".format)
        self._check_words(problems)
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

    @property
    def node_gpus(self) -> int | None:
        """GPUs that a job gets on every node, where a node runs one task."""
        return self.gpus_per_node if self.gpus_per_task is None else self.gpus_per_task

    def sbatch(self, job: Job) -> dict[str, Any]:
        """The parameters of the submission, in submitit's spelling."""
        own = {key: value for key, value in asdict(self).items() if key not in _OWN_KEYS}
        if self.gpus_per_task is not None:
            # With both, Slurm wants as many tasks on a node as the one divided by the other.
            own["gpus_per_node"] = None
        if job.resources.gpus_per_node is not None:
            own |= {"gpus_per_node": job.resources.gpus_per_node or None, "gpus_per_task": None}
        if job.resources.gpus_per_node == 0:
            own |= {"exclusive": None, "mem": None if self.mem == "0" else self.mem}
        signal = None
        if job.service is not None:
            signal = f"B:USR1@{math.ceil(job.service.stop_timeout) + _SIGNAL_MARGIN}"
        first, last = job.first_replica, job.first_replica + job.replicas - 1
        return {
            "job_name": self.job_name_prefix + job.name,
            "nodes": job.resources.nodes,
            "ntasks_per_node": job.resources.tasks_per_node,
            "time": job.resources.time_limit,
            **own,
            "array": f"{first}-{last}" if job.replicas else None,
            "output": file_pattern(job.folder.log_stem, array=job.replicas > 0),
            "signal": signal,
            "open-mode": "append",
            "requeue": self.requeue or None,
            "no-requeue": self.requeue is False or None,
        }


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
