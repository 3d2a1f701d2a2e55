"""The interface of every kind of cluster.

The variables of this process's environment: those that describe a job in which it runs, and
those with which a user sets defaults of sbatch.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from launcher_scripts.cluster.job import ClusterOptions, Job, Submitted
from launcher_scripts.cluster.record import JobRecord, JobState
from launcher_scripts.common.errors import ConfigError, LauncherError, Problems, problem
from launcher_scripts.config.options import build

# Slurm's, MPI's and torchrun's descriptions of one job, step and task.
_OF_A_JOB = re.compile(
    r"SLURM_(JOB|STEP(?!_KILLED)|ARRAY|HET|PACK|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|RESTART|SRUN|"
    r"LAUNCH|NODE_ALIASES|TOPOLOGY|PRIO_PROCESS|CPUS_ON|GPUS_ON|SHARDS_ON|CLUSTER_NAME|SUBMIT).*"
    r"|SLURMD_.*|SRUN_.*|SPANK_.*|SLURM_SPANK_.*|_SLURM.*|SLURM_(CPU|MEM)_BIND.*|SBATCH_CPU_BIND.*"
    r"|(OMPI|PMIX|PMI|PRTE|TORCHELASTIC)_.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)"
)
# Input of srun or sbatch outside of a job; inside, Slurm sets them.
_OF_AN_INNER_JOB = re.compile(
    r"SLURM_(CONTAINER|CPU|DIST|EXACT|EXCLUSIVE|EXPORT_ENV|GPU|GRES|MEM|MPI_TYPE|NNODES|NODELIST|"
    r"NPROCS|NTASKS|OVERCOMMIT|OVERLAP|PROFILE|TASKS_PER|THREADS|TRES|UMASK|WORKING|OOM).*"
    r"|SBATCH_(CPU|MEM)_BIND.*"
)
_JOB_IDS = ("SLURM_JOB_ID", "SLURM_JOBID")
_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")

# Options of sbatch whose variables have other names, and options that exclude each other.
_OPTIONS = {
    "ARRAY_INX": "array",
    "DEBUG": "verbose",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "TIMELIMIT": "time",
}
_FAMILIES = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"requeue", "no-requeue"},
    {"gpus", "gpus-per-node", "gpus-per-task"},
    {"output", "error"},
)
# The launcher decides these for every job, also where it leaves the option out.
_SBATCH_INPUTS = frozenset(
    {"array", "wait", "input", "nodes", "ntasks", "parsable", "test-only", "wrap"}
)


def without_job(env: Mapping[str, str], *, gpus: bool = True) -> dict[str, str]:
    """The environment without the variables of a job in which this process runs.

    gpus: whether the choice of GPUs stays
    """
    in_job = any(name in env for name in _JOB_IDS)
    return {
        name: value
        for name, value in env.items()
        if not _OF_A_JOB.fullmatch(name)
        and not (in_job and _OF_AN_INNER_JOB.fullmatch(name))
        and (gpus or name not in _GPUS)
    }


@dataclass(frozen=True)
class SubmissionEnvironment:
    """The environment of sbatch.

    defaults: variables that set options of sbatch, by the option
    unused:   those that were removed, because the job's script sets the option: sbatch would
              prefer the variable
    """

    variables: Mapping[str, str]
    defaults: Mapping[str, str]
    unused: Mapping[str, str]

    @classmethod
    def of(cls, env: Mapping[str, str], flags: Collection[str]) -> SubmissionEnvironment:
        """flags: the options in the head of the job's script, by their long names"""
        variables = without_job(env, gpus=False)
        options = {name: _option(name) for name in variables if name.startswith("SBATCH_")}
        options |= {"SLURM_CLUSTERS": "clusters"} if "SLURM_CLUSTERS" in variables else {}
        owned = {*flags, *_SBATCH_INPUTS}.union(
            *(family for family in _FAMILIES if family & {*flags})
        )
        unused = {name: option for name, option in options.items() if option in owned}
        return cls(
            {name: value for name, value in variables.items() if name not in unused},
            {option: name for name, option in options.items() if name not in unused},
            {option: name for name, option in unused.items()},
        )

    def notes(self) -> list[str]:
        """A line for each variable that sets an option of sbatch, or does not."""
        used = [
            f"{name}={self.variables[name]}: a default of this shell, sbatch --{option}"
            for option, name in self.defaults.items()
        ]
        return used + [
            f"{name} is not used: the job sets --{option} (a null cluster.* key leaves it out)"
            for option, name in self.unused.items()
        ]


def _option(name: str) -> str:
    word = name.removeprefix("SBATCH_")
    return _OPTIONS.get(word, word.lower().replace("_", "-"))


Options = TypeVar("Options", bound=ClusterOptions)
OptionsType = type[ClusterOptions]


class Cluster(ABC, Generic[Options]):
    """Takes jobs. A batch cluster queues them; a foreground one runs them here and now.

    type:          the name in CLUSTERS
    hosts_clients: whether a server's job can hold its client too; a foreground cluster runs both
                   on the same machine anyway
    limits_gpus:   whether a step sees no more GPUs than it asks for
    serves_others: whether its servers are for other machines, too
    max_replicas:  how many servers a job can be; None without a limit
    removal_seconds: how long it may take to remove a container of a job that ends
    """

    type: ClassVar[str]
    options_type: ClassVar[OptionsType]
    hosts_clients: ClassVar[bool] = False
    limits_gpus: ClassVar[bool] = False
    serves_others: ClassVar[bool] = True
    max_replicas: ClassVar[int | None] = None
    removal_seconds: ClassVar[float] = 0.0

    def __init__(self, options: Options) -> None:
        self.options = options

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Cluster[Any]:
        """A cluster from the `cluster` block of the configuration."""
        options: Any = build(cls.options_type, values, "the cluster's configuration", key="cluster")
        return cls(options)

    def for_stage(self, values: Mapping[str, Any], key: str) -> Cluster[Any]:
        """The cluster with options of one stage's jobs. key: of the configuration, of `values`"""
        if "type" in values:
            raise ConfigError(
                problem(
                    "all stages have one cluster type", got=values["type"], change=f"{key}.type"
                )
            )
        local = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        options: Any = build(
            self.options_type, {**local, **values}, f"the options of {key}", key=key
        )
        return type(self)(options)

    def options_of(self, job: Job) -> Options:
        """The options of a job: those of its stage, if it has some."""
        options: Any = self.options if job.options is None else job.options
        return cast(Options, options)

    @property
    def whole_nodes(self) -> bool:
        """Return whether no other job shares a node."""
        return False

    @property
    def max_nodes(self) -> int | None:
        """Maximum number of nodes of a job; None without a limit."""
        return None

    @property
    def in_container(self) -> bool:
        """Return whether jobs run in the configured container."""
        return False

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs that a job gets on every node; None where that is not known."""
        return self.options.num_gpus

    @property
    def python(self) -> str | None:
        """The interpreter that runs the steps, where the configuration names one."""
        return self.options.python

    @property
    def overlay(self) -> str | None:
        """The folder of packages that it lacks, if there is one."""
        return self.options.overlay

    @abstractmethod
    def check(self, problems: Problems) -> None:
        """Add what would keep this machine from handing over jobs."""

    @abstractmethod
    def render(self, job: Job) -> str:
        """The job's script."""

    def test(self, job: Job) -> str | None:  # noqa: ARG002
        """Return the scheduler's answer to a test of a job; None without a scheduler. Raises on a
        refusal."""
        return None

    @abstractmethod
    def submit(self, job: Job, after: Submitted | None = None) -> Submitted:
        """Hand over a job that starts when `after` is done, or ready where that is a service.

        One with `after_any` starts when all before it have ended.
        """

    @abstractmethod
    def goes_on(self, error: LauncherError) -> bool:
        """Return whether a job with `after_any` can follow one of which submit has raised this."""

    @abstractmethod
    def abort(self) -> None:
        """Take back what was handed over: a later job of the same command line was refused."""

    @classmethod
    @abstractmethod
    def state(cls, folder: Path, record: JobRecord, job_id: str) -> JobState:
        """Return the state of a job, or of one replica, that has not been seen to end yet."""

    @classmethod
    @abstractmethod
    def stop(cls, folder: Path, record: JobRecord, job_id: str) -> None:
        """Let a job end in order, and end it when it does not; returns when it has ended."""

    @classmethod
    @abstractmethod
    def cancel(cls, folder: Path, record: JobRecord, job_id: str) -> None:
        """End a job."""

    @abstractmethod
    def finish(self) -> None:
        """Called after the last job: keeps a service that nothing follows until it is stopped."""

    @abstractmethod
    def close(self) -> None:
        """End what still runs on this machine."""
