"""The cluster type `bcp`: Base Command Platform, where steps run through bcprun.

The launcher runs inside the allocated job, so the steps run in the foreground and their output
is the job's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from launcher_scripts.cluster.foreground import ForegroundCluster
from launcher_scripts.cluster.job import Job
from launcher_scripts.errors import Problems
from launcher_scripts.render import render
from launcher_scripts.schema import build


@dataclass(frozen=True)
class BcpOptions:
    """conf/cluster/bcp.yaml.

    bcprun_args: further arguments of every bcprun
    python:      interpreter that runs the steps
    """

    type: str = "bcp"
    gpus_per_node: int | None = 8
    bcprun_args: tuple[str, ...] = ()
    python: str = "python3"


class BcpCluster(ForegroundCluster):
    """The nodes of the BCP job that the launcher itself runs in."""

    type: ClassVar[str] = "bcp"

    def __init__(self, options: BcpOptions) -> None:
        super().__init__()
        self.options = options

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> BcpCluster:
        return cls(build(BcpOptions, values, "the cluster's configuration", key="cluster"))

    @property
    def gpus_per_node(self) -> int | None:
        return self.options.gpus_per_node

    @property
    def python(self) -> str:
        return self.options.python

    def check(self, problems: Problems) -> None:
        if shutil.which("bcprun") is None:
            problems.add(
                "bcprun is not on the PATH of this machine: run inside a BCP job",
                change="cluster_type (interactive runs the job here)",
            )

    def render(self, job: Job) -> str:
        return render("bcp.sh.j2", job=job, bcprun_args=self.options.bcprun_args)
