"""The cluster types `interactive` and `bcp`: steps that bash or bcprun runs on this machine.

The cluster type `bcp`: Base Command Platform, where steps run through bcprun.

The launcher runs inside the allocated job, so the steps run in the foreground and their output
is the job's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from launcher_scripts.cluster.cluster import without_job
from launcher_scripts.cluster.foreground import ForegroundCluster
from launcher_scripts.cluster.job import ClusterOptions, Job
from launcher_scripts.common.errors import Problems
from launcher_scripts.common.rendering import render

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
