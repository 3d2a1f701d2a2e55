"""The steps start_gateway and run_gateway in their own processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher_scripts.config.gateway import DeployedGateway
from launcher_scripts.config.settings import GatewayJobSettings, write_settings
from tests.server.processes import CHECKOUT, wait_for


class RunningGateway:
    """One gateway; `address` is set once it is ready."""

    def __init__(self, folder: Path, *arguments: str, step: str = "start_gateway") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out = (folder / "out.txt").open("w+")
        self._err = (folder / "err.txt").open("w+")
        module = ["-m", f"launcher_scripts.steps.{step}"]
        self.process = subprocess.Popen(
            [sys.executable, *module, *arguments],
            cwd=CHECKOUT,
            env=dict(os.environ),
            stdout=self._out,
            stderr=self._err,
        )
        self.facts: dict[str, Any] = {}

    @property
    def out(self) -> str:
        return Path(self._out.name).read_text()

    @property
    def err(self) -> str:
        return Path(self._err.name).read_text()

    @property
    def address(self) -> str:
        """http://host:port"""
        return str(self.facts["openai"]).removesuffix("/v1")

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            return "\ntry: " in self.out or self.process.poll() is not None

        wait_for(ready, 120)
        assert self.process.poll() is None, f"{self.out}\n{self.err}"
        self.facts = json.loads(re.search("^ready: (.*)$", self.out, re.MULTILINE)[1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()


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
