"""A watch on a real Slurm: short looks that submit each other, and evaluations as jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.conftest import Jobs
from tests.login.conftest import write_nemo
from tests.login.test_watch import WATCH, series_keys
from tests.processes import wait_for
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit

pytestmark = pytest.mark.slow


def test_looks_follow_each_other_until_they_are_cancelled(
    slurm: TestCluster, submit: Submit, jobs: Jobs, checkout: Path, tmp_path: Path
) -> None:
    training = tmp_path / "training"
    training.mkdir()
    write_nemo(training / "gpt--step=10.nemo", num_layers=2, num_attention_heads=4)
    submit(
        WATCH,
        *series_keys(training, checkout),
        "watch.interval=1",
        "cluster.gpus_per_node=2",
        "cluster.exclusive=False",
        EVALUATE_WAITS="60",
    )
    folder = submit.results / "watch"
    trend = folder / "trend.json"

    def verdicts() -> dict[str, str]:
        entries = json.loads(trend.read_text())["checkpoints"] if trend.exists() else []
        return {entry["name"]: entry["verdict"] for entry in entries}

    def logs() -> str:
        return "\n".join(path.read_text() for path in folder.rglob("*.out"))

    try:
        wait_for(lambda: verdicts() == {"gpt--step=10": "GO"}, said=logs)
        write_nemo(training / "gpt--step=20.nemo", num_layers=2, num_attention_heads=4)
        wait_for(lambda: verdicts().get("gpt--step=20") == "GO", said=logs)
    finally:

        def chain_ended() -> bool:
            """A look that runs may submit the next one while this one is cancelled."""
            jobs("cancel", "watch_tiny")
            return not slurm.run("squeue", "--noheader").stdout.strip()

        wait_for(chain_ended)
    assert slurm.left_processes() == []
