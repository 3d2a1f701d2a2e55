"""Steps as a job runs them: in their own processes, with whatever they leave behind, or here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher_scripts.config.settings import DeploySettings, ExportSettings, write_settings
from launcher_scripts.steps import convert_checkpoint, write_model_repository
from tests.forked_steps import CHECKOUT, STEPS, ForkedStep
from tests.processes import command_line, processes, variables, wait_for

MARK = "LAUNCHER_TEST_MARK"


class StepProcess:
    """`python -m launcher_scripts.steps.<step>` in its own process.

    Every process it starts inherits a mark of its own, by which survivors are found.

    forked: from a process that has imported the step, which is quicker
    """

    def __init__(self, folder: Path, step: str, *arguments: str, forked: bool = True) -> None:
        self._step = step
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        folder.mkdir(parents=True, exist_ok=True)
        self._out = (folder / "out.txt").open("w+")
        self._err = (folder / "err.txt").open("w+")
        name, value = self._mark.split("=")
        env = {**os.environ, name: value}
        self.process: ForkedStep | subprocess.Popen[bytes]
        if forked:
            self.process = ForkedStep(step, arguments, env, (self._out.name, self._err.name))
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{STEPS}.{step}", *arguments],
                cwd=CHECKOUT,
                env=env,
                stdout=self._out,
                stderr=self._err,
            )

    @property
    def out(self) -> str:
        return Path(self._out.name).read_text()

    @property
    def err(self) -> str:
        return Path(self._err.name).read_text()

    def said(self) -> str:
        return f"{self.out}\n{self.err}"

    def finished(self) -> bool:
        return self.process.poll() is not None

    def wait(self, timeout: float = 180) -> int:
        return self.process.wait(timeout)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def survivors(self) -> list[tuple[int, str]]:
        """(pid, command line) of the living processes that carry the mark, and of the step."""
        mark = self._mark.encode()
        found = [
            (pid, command_line(pid))
            for pid, _ in processes()
            if pid != self.process.pid and mark in variables(pid)
        ]
        return found if self.finished() else [(self.process.pid, self._step), *found]

    def suspend(self) -> set[int]:
        """Suspend all of these processes, also those that are started meanwhile."""
        suspended: set[int] = set()
        while started := {pid for pid, _ in self.survivors()} - suspended:
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            suspended |= started
        return suspended

    def close(self) -> None:
        """Leave nothing running, whatever the test found."""
        for pid, _ in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._out.close()
        self._err.close()


class RunningStep(StepProcess):
    """The step start_server."""

    def __init__(self, settings: DeploySettings, folder: Path, forked: bool = True) -> None:
        self.settings = settings
        write_settings(settings, folder / "settings.yaml")
        number = [] if settings.replica is None else ["--replica", str(settings.replica)]
        arguments = ("--settings", str(folder / "settings.yaml"), *number)
        super().__init__(folder, "start_server", *arguments, forked=forked)

    def wait_until_ready(self, timeout: float = 300) -> dict[str, Any]:
        wait_for(lambda: self.settings.ready_file.exists() or self.finished(), timeout, self.said)
        assert not self.finished(), self.said()
        return self.ready

    @property
    def ready(self) -> dict[str, Any]:
        """The content of the ready file."""
        return json.loads(self.settings.ready_file.read_text())

    def shared_memory(self) -> list[Path]:
        """Regions of shared memory that the server's Python backend made and left."""
        prefix = re.search(r"shm-region-prefix-name=(\S+)", self.out)
        return list(Path("/dev/shm").glob(f"{prefix[1]}*")) if prefix else []

    def close(self) -> None:
        super().close()
        for region in self.shared_memory():
            region.unlink(missing_ok=True)
        if backends := re.search(r"--backend-directory=(\S+)", self.out):
            shutil.rmtree(Path(backends[1]).parent, ignore_errors=True)


def run_export(settings: ExportSettings, folder: Path) -> Path:
    """Both steps of the export stage in this process, settings file in `folder`; the repository."""
    write_settings(settings, folder / "export.yaml")
    for step in (convert_checkpoint, write_model_repository):
        failed = step.main(["--settings", str(folder / "export.yaml")])
        assert not failed, f"{step.__name__} failed for {settings.checkpoint_path}"
    return settings.model_repository


@contextlib.contextmanager
def running(
    folder: Path, repository: Path, *, forked: bool = True, **more: Any
) -> Iterator[RunningStep]:
    """The step with free ports on the loopback address, closed at the end."""
    values = {
        "http_port": 0,
        "grpc_port": 0,
        "metrics_port": 0,
        "host": "127.0.0.1",
        "stop_timeout": 8.0,
    }
    folder.mkdir(exist_ok=True)
    settings = DeploySettings(
        model_repository=str(repository),
        results_dir=str(folder / "results"),
        **{**values, **more},
    )
    step = RunningStep(settings, folder, forked)
    try:
        yield step
    finally:
        step.close()
