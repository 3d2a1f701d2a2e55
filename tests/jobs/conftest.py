"""The jobs command as a user runs it, and jobs of this machine to run it on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.jobs.__main__ import main
from tests.login.conftest import arguments, launcher, nemo_file, run
from tests.login.test_interactive import Start, start

__all__ = ["Start", "arguments", "launcher", "nemo_file", "run", "start"]

Jobs = Callable[..., "subprocess.CompletedProcess[str]"]
Statuses = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def jobs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Jobs:
    """Run `python3 -m launcher_scripts.jobs COMMAND ...` on the results of the test, in here."""

    def ask(command: str, *more: str) -> subprocess.CompletedProcess[str]:
        code = main([command, f"--results={tmp_path / 'the results'}", *more])
        return subprocess.CompletedProcess((), code, *capfd.readouterr())

    return ask


@pytest.fixture
def statuses(jobs: Jobs) -> Statuses:
    """What `status --json` says."""

    def ask(*names: str) -> list[dict[str, Any]]:
        found = json.loads(jobs("status", "--json", *names).stdout)
        assert isinstance(found, list)
        return found

    return ask


@pytest.fixture
def serving(start: Start, jobs: Jobs) -> Iterator[subprocess.Popen[str]]:
    """A launcher in the background whose server is ready."""
    process = start("stages=[export,deploy]")
    waited = jobs("wait", "export_tiny")
    while waited.returncode == 4:  # not submitted yet
        waited = jobs("wait", "export_tiny")
    assert waited.returncode == 0, waited.stderr
    yield process
