"""The cluster type `interactive`: the same job folder and steps, run by bash on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from launcher_scripts.cluster.foreground import ForegroundCluster
from launcher_scripts.cluster.job import Job
from launcher_scripts.errors import Problems
from launcher_scripts.render import render
from launcher_scripts.schema import build


@dataclass(frozen=True)
class InteractiveOptions:
    """conf/cluster/interactive.yaml.

    gpus_per_node: GPUs of this machine that a server may use; None: not checked
    python:        interpreter that runs the steps; None: the one that runs the launcher
    """

    type: str = "interactive"
    gpus_per_node: int | None = None
    python: str | None = None


class InteractiveCluster(ForegroundCluster):
    """This machine, without a scheduler and without a container."""

    type: ClassVar[str] = "interactive"
    max_nodes: ClassVar[int | None] = 1

    def __init__(self, options: InteractiveOptions) -> None:
        super().__init__()
        self.options = options

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> InteractiveCluster:
        return cls(build(InteractiveOptions, values, "the cluster's configuration", key="cluster"))

    @property
    def gpus_per_node(self) -> int | None:
        return self.options.gpus_per_node

    @property
    def python(self) -> str:
        return self.options.python or sys.executable

    def check(self, problems: Problems) -> None:
        """bash is all that it takes."""

    def render(self, job: Job) -> str:
        return render("local.sh.j2", job=job)
