"""What every kind of cluster can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from launcher_scripts.cluster.job import Job, Submitted
from launcher_scripts.cluster.options import ClusterOptions
from launcher_scripts.cluster.record import JobRecord
from launcher_scripts.cluster.state import JobState
from launcher_scripts.common.errors import ConfigError, LauncherError, Problems, problem
from launcher_scripts.config.schema import build

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
        own = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        options: Any = build(self.options_type, {**own, **values}, f"the options of {key}", key=key)
        return type(self)(options)

    def options_of(self, job: Job) -> Options:
        """The options of a job: those of its stage, if it has some."""
        options: Any = self.options if job.options is None else job.options
        return cast(Options, options)

    @property
    def whole_nodes(self) -> bool:
        """Whether no other job shares a node."""
        return False

    @property
    def max_nodes(self) -> int | None:
        """How many nodes a job can have; None without a limit."""
        return None

    @property
    def in_container(self) -> bool:
        """Whether jobs run in the configured container."""
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
        """What the scheduler would say to a job; None where there is none. Raises on a refusal."""
        return None

    @abstractmethod
    def submit(self, job: Job, after: Submitted | None = None) -> Submitted:
        """Hand over a job that starts when `after` is done, or ready where that is a service.

        One with `after_any` starts when all before it have ended.
        """

    @abstractmethod
    def goes_on(self, error: LauncherError) -> bool:
        """Whether a job with `after_any` can follow one of which submit has raised this."""

    @abstractmethod
    def give_up(self) -> None:
        """Take back what was handed over: a later job of the same command line was refused."""

    @classmethod
    @abstractmethod
    def state(cls, folder: Path, record: JobRecord, job_id: str) -> JobState:
        """What has become of a job, or of one replica, that nobody has seen end yet."""

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
