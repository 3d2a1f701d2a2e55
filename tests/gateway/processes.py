"""The steps start_gateway and run_gateway in their own processes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher_scripts.config.gateway import DeployedGateway, GatewayJobSettings
from launcher_scripts.config.settings import write_settings
from tests.processes import wait_for
from tests.server.processes import StepProcess


class RunningGateway(StepProcess):
    """One gateway; `facts` and `address` are there once it is ready."""

    def __init__(self, folder: Path, *arguments: str, step: str = "start_gateway") -> None:
        super().__init__(folder, step, *arguments)
        self.facts: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """http://host:port"""
        return str(self.facts["openai"]).removesuffix("/v1")

    def wait_until_ready(self) -> None:
        wait_for(lambda: self._announced() or self.finished(), said=self.said)
        assert not self.finished(), self.said()
        self.facts = json.loads(self._announced()[1])

    def _announced(self) -> re.Match[str] | None:
        """The line with its facts, before or after the command to try, once both are there."""
        ready = re.search("^ready: (.*)\n", self.out, re.MULTILINE)
        return ready if "\ntry: " in self.out else None


@contextlib.contextmanager
def gateway(folder: Path, *arguments: str) -> Iterator[RunningGateway]:
    """A gateway that is ready, closed at the end."""
    started = RunningGateway(folder, *arguments)
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def gateway_job(folder: Path, *ready: Path, **more: Any) -> Iterator[RunningGateway]:
    """The step of a gateway's job, which is not waited for; closed at the end.

    more: further GatewayJobSettings
    """
    values = {"gateway": DeployedGateway(port=0), "stop_timeout": 30.0, **more}
    settings = GatewayJobSettings(
        tuple(map(str, ready)), str(folder / "results"), job_folder=str(folder), **values
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(settings, folder / "settings.yaml")
    arguments = ["--settings", str(folder / "settings.yaml")]
    started = RunningGateway(folder, *arguments, step="run_gateway")
    try:
        yield started
    finally:
        started.close()
