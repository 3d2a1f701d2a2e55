"""What conf/cluster/bcm.yaml can say: sbatch's options, and how the steps are started."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from launcher_scripts.cluster.job import Job
from launcher_scripts.errors import ConfigError, Problems

_OWN_KEYS = (
    *("type", "job_name_prefix", "mpi", "srun_args", "python", "requeue"),
    *("container_runtime", "container_scope", "image_cache"),
)
_MPI_TYPES = ("pmix", "pmi2", "none")
_RUNTIMES = ("pyxis", "enroot", "none")
_SCOPES = ("job", "global")
# Slurm may send the signal before a time limit up to a minute early, but never late.
_SIGNAL_MARGIN = 10


@dataclass(frozen=True)
class SlurmOptions:
    """conf/cluster/bcm.yaml: sbatch's options by their names, and our own keys.

    mpi:       how the tasks of a server find each other (srun --mpi)
    srun_args: further arguments of every srun
    python:    interpreter that runs the steps, as seen in the container
    requeue:   whether Slurm may run the job again after a node failure or preemption
    container_runtime: what starts the container: pyxis (srun's options), enroot (its commands
               in the script), or none: the steps run on the host
    container_scope: pyxis' container_scope on this cluster; global: containers outlive their job
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
    exclusive: bool = True
    overcommit: bool = False
    gpus_per_task: int | None = None
    gpus_per_node: int | None = 8
    cpus_per_task: int | None = None
    mem: str | None = "0"
    job_name_prefix: str = "nemo-megatron-"
    mpi: str = "pmix"
    srun_args: tuple[str, ...] = ()
    python: str = "python3"
    requeue: bool = False
    container_runtime: str = "pyxis"
    container_scope: str = "job"
    image_cache: str | None = None

    def __post_init__(self) -> None:
        problems = Problems("the Slurm options")
        if not self.mpi.startswith(_MPI_TYPES):
            problems.add("unknown mpi", got=self.mpi, choices=_MPI_TYPES, change="cluster.mpi")
        for name, choices in (("container_runtime", _RUNTIMES), ("container_scope", _SCOPES)):
            if getattr(self, name) not in choices:
                problems.add(
                    f"unknown {name}",
                    got=getattr(self, name),
                    choices=choices,
                    change=f"cluster.{name}",
                )
        for name, value in asdict(self).items():
            if not str(value).isprintable():
                problems.add("not on one line", got=value, change=f"cluster.{name}")
        if self.gpus_per_node is not None and self.gpus_per_node < 1:
            problems.add(
                "gpus_per_node must be at least 1, or null for a cluster without GPUs",
                got=self.gpus_per_node,
                change="cluster.gpus_per_node",
            )
        problems.raise_if_any(ConfigError)

    def sbatch(self, job: Job) -> dict[str, Any]:
        """The parameters of the submission, in submitit's spelling."""
        own = {key: value for key, value in asdict(self).items() if key not in _OWN_KEYS}
        signal = None
        if job.service is not None:
            signal = f"B:USR1@{math.ceil(job.service.stop_timeout) + _SIGNAL_MARGIN}"
        return {
            "job_name": self.job_name_prefix + job.name,
            "nodes": job.resources.nodes,
            "ntasks_per_node": job.resources.tasks_per_node,
            "time": job.resources.time_limit,
            **own,
            "output": file_pattern(job.folder.log_stem),
            "signal": signal,
            "open-mode": "append",
            "requeue" if self.requeue else "no-requeue": True,
        }


def file_pattern(stem: str) -> str:
    """Slurm's file name pattern of `<stem>_<job id>.out`."""
    return stem.replace("%", "%%") + "_%j.out"
