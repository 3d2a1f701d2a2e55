"""Runs the start_server step as the job would, and finds whatever it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launcher_scripts.config.settings import DeploySettings, write_settings

MARK = "LAUNCHER_TEST_MARK"
CHECKOUT = Path(__file__).resolve().parents[2]


class RunningStep:
    """`python -m launcher_scripts.steps.start_server` in its own process.

    Every process it starts inherits a mark of its own, by which survivors are found.
    """

    def __init__(self, settings: DeploySettings, folder: Path) -> None:
        self.settings = settings
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        write_settings(settings, folder / "settings.yaml")
        self._out = (folder / "out.txt").open("w+")
        self._err = (folder / "err.txt").open("w+")
        name, value = self._mark.split("=")
        arguments = ["-m", "launcher_scripts.steps.start_server"]
        number = [] if settings.replica is None else ["--replica", str(settings.replica)]
        self.process = subprocess.Popen(
            [sys.executable, *arguments, "--settings", str(folder / "settings.yaml"), *number],
            cwd=CHECKOUT,
            env={**os.environ, name: value},
            stdout=self._out,
            stderr=self._err,
        )

    @property
    def out(self) -> str:
        return Path(self._out.name).read_text()

    @property
    def err(self) -> str:
        return Path(self._err.name).read_text()

    def wait_until_ready(self, timeout: float = 300) -> dict[str, Any]:
        wait_for(lambda: self.settings.ready_file.exists() or self.ended(), timeout)
        assert not self.ended(), f"{self.out}\n{self.err}"
        return json.loads(self.settings.ready_file.read_text())

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, timeout: float = 180) -> int:
        return self.process.wait(timeout)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def survivors(self) -> list[tuple[int, str]]:
        """(pid, command line) of the living processes that carry the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._mark.encode() in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append((int(entry.name), command))
        return found

    def shared_memory(self) -> list[Path]:
        """Regions of shared memory that the server's Python backend made and left."""
        prefix = re.search(r"shm-region-prefix-name=(\S+)", self.out)
        return list(Path("/dev/shm").glob(f"{prefix[1]}*")) if prefix else []

    def close(self) -> None:
        """Leave nothing running or lying about, whatever the test found."""
        for pid, _ in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for region in self.shared_memory():
            region.unlink(missing_ok=True)
        if backends := re.search(r"--backend-directory=(\S+)", self.out):
            shutil.rmtree(Path(backends[1]).parent, ignore_errors=True)
        self._out.close()
        self._err.close()


@contextlib.contextmanager
def running(folder: Path, repository: Path, **more: Any) -> Iterator[RunningStep]:
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
    step = RunningStep(settings, folder)
    try:
        yield step
    finally:
        step.close()


def wait_for(condition: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout} s")
        time.sleep(0.05)
