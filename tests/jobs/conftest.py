"""The jobs command as a user runs it, and jobs of this machine to run it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.login.conftest import arguments, launcher, nemo_file, run
from tests.login.test_interactive import Start, start

__all__ = ["Start", "arguments", "launcher", "nemo_file", "run", "start"]

Jobs = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def jobs(checkout: Path, tmp_path: Path) -> Jobs:
    """Run `python3 -m launcher_scripts.jobs COMMAND ...` on the results of the test."""

    def ask(command: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-m", "launcher_scripts.jobs", command),
                *(f"--results={tmp_path / 'the results'}", *more),
            ],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return ask


@pytest.fixture
def statuses(jobs: Jobs) -> Callable[..., list[dict[str, Any]]]:
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
