"""What every kind of cluster can do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from launcher_scripts.cluster.job import Job, Submitted
from launcher_scripts.cluster.record import JobRecord
from launcher_scripts.cluster.state import JobState
from launcher_scripts.common.errors import LauncherError, Problems


class Cluster(Protocol):
    """Takes jobs. A batch cluster queues them; a foreground one runs them here and now.

    type:          the name in CLUSTERS
    gpus_per_node: GPUs that a job gets on every node; None where that is not known
    python:        the interpreter that runs the steps, where the configuration names one
    overlay:       the folder of packages that it lacks, if there is one
    max_nodes:     how many nodes a job can have; None without a limit
    in_container:  whether jobs run in the configured container
    hosts_clients: whether a server's job can hold its client too; a foreground cluster runs both
                   on the same machine anyway
    limits_gpus:   whether a step sees no more GPUs than it asks for
    whole_nodes:   whether no other job shares a node
    serves_others: whether its servers are for other machines, too
    max_replicas:  how many servers a job can be; None without a limit
    removal_seconds: how long it may take to remove a container of a job that ends
    """

    type: ClassVar[str]
    hosts_clients: ClassVar[bool]
    limits_gpus: ClassVar[bool]
    serves_others: ClassVar[bool]
    max_replicas: ClassVar[int | None]
    removal_seconds: ClassVar[float]

    @property
    def whole_nodes(self) -> bool: ...

    @property
    def max_nodes(self) -> int | None: ...

    @property
    def in_container(self) -> bool: ...

    @property
    def gpus_per_node(self) -> int | None: ...

    @property
    def python(self) -> str | None: ...

    @property
    def overlay(self) -> str | None: ...

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Cluster:
        """A cluster from the `cluster` block of the configuration."""
        ...

    def check(self, problems: Problems) -> None:
        """Add what would keep this machine from handing over jobs."""
        ...

    def render(self, job: Job) -> str:
        """The job's script."""
        ...

    def test(self, job: Job) -> str | None:
        """What the scheduler would say to a job; None where there is none. Raises on a refusal."""
        ...

    def submit(self, job: Job, after: Submitted | None = None) -> Submitted:
        """Hand over a job that starts when `after` is done, or ready where that is a service.

        One with `after_any` starts when all before it have ended.
        """
        ...

    def goes_on(self, error: LauncherError) -> bool:
        """Whether a job with `after_any` can follow one of which submit has raised this."""
        ...

    def give_up(self) -> None:
        """Take back what was handed over: a later job of the same command line was refused."""
        ...

    @classmethod
    def state(cls, folder: Path, record: JobRecord, job_id: str) -> JobState:
        """What has become of a job, or of one replica, that nobody has seen end yet."""
        ...

    @classmethod
    def stop(cls, folder: Path, record: JobRecord, job_id: str) -> None:
        """Let a job end in order, and end it when it does not; returns when it has ended."""
        ...

    @classmethod
    def cancel(cls, folder: Path, record: JobRecord, job_id: str) -> None:
        """End a job."""
        ...

    def finish(self) -> None:
        """Called after the last job: keeps a service that nothing follows until it is stopped."""
        ...

    def close(self) -> None:
        """End what still runs on this machine."""
        ...
