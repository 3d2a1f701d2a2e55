"""How the tests of this room hand jobs to Slurm: the launcher as a user runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.login.conftest import Run

CONFIG = """backend: "fastertransformer"
parameters { key: "tensor_para_size" value: { string_value: "2" } }
parameters { key: "pipeline_para_size" value: { string_value: "1" } }
"""


@dataclass(frozen=True)
class Submit:
    """Runs the launcher with cluster_type=bcm, and finds the jobs that it left behind."""

    run: Run
    arguments: list[str]
    results: Path

    def __call__(self, *more: str, check: bool = True, **env: str) -> Any:
        """Submit; `more` are further arguments, `env` goes through sbatch to the jobs."""
        ran = self.run("cluster_type=bcm", *self.arguments, *more, **env)
        assert not check or ran.returncode == 0, ran.stdout + ran.stderr
        return ran

    @property
    def served(self) -> tuple[str, ...]:
        """Arguments that deploy without an export before: a repository as far as anybody looks."""
        repository = self.results.parent.parent / "a repository"
        (repository / "tiny" / "1" / "2-gpu").mkdir(parents=True, exist_ok=True)
        (repository / "tiny" / "config.pbtxt").write_text(CONFIG)
        return ("stages=[deploy]", f"deploy.model_repository='{repository}'")

    @property
    def measured(self) -> tuple[str, ...]:
        """The same, and an evaluation after it."""
        return ("stages=[deploy,evaluate]", *self.served[1:])

    def record(self, stage: str, number: int = 1) -> dict[str, Any]:
        """The job's record, with its folder under the key `folder`."""
        (path,) = self.results.glob(f"{stage}_*/jobs/{number:03d}/job.json")
        return {**json.loads(path.read_text()), "folder": path.parent}

    def log(self, stage: str, number: int = 1) -> str:
        """The job's log; empty for a job that never ran."""
        record = self.record(stage, number)
        path: Path = record["folder"] / record["log"]
        return path.read_text() if path.exists() else ""
