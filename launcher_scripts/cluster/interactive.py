"""The cluster type `interactive`: the same job folder and steps, run by bash on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from launcher_scripts.cluster.environment import without_job
from launcher_scripts.cluster.foreground import ForegroundCluster
from launcher_scripts.cluster.job import Job
from launcher_scripts.cluster.options import ClusterOptions
from launcher_scripts.common.errors import Problems
from launcher_scripts.common.rendering import render


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
