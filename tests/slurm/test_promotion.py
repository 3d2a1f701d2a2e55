"""Servers that are held back, and ladders, on a real Slurm: who is stopped, who goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.login.test_promotion import JUDGE, JUDGED
from tests.processes import wait_for, wait_for_file
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended


@pytest.mark.parametrize("verdict", [0, 1])
def test_the_server_goes_on_after_go_alone(
    slurm: TestCluster,
    submit: Submit,
    launcher: Path,
    checkout: Path,
    tmp_path: Path,
    verdict: int,
) -> None:
    (launcher / "steps" / "judge.py").write_text(JUDGE)
    script = tmp_path / "judged.py"
    script.write_text(JUDGED)
    promote: dict[str, Any] = {"VERDICT": str(verdict), "EVALUATE_WAITS": "30", "script": script}
    main = Submit(
        lambda *words, **more: submit.run(str(checkout), *words, **more),
        submit.arguments,
        submit.results,
    )
    main(*submit.measured, "deploy.promote=after_gate", **promote)
    published = submit.record("deploy")["folder"].parents[1] / "ready.json"
    if verdict:
        assert ended(slurm, submit, "evaluate") == ("FAILED", f"{verdict}:0")
        assert not published.exists()
    else:
        assert ended(slurm, submit, "evaluate") == ("COMPLETED", "0:0"), submit.log("evaluate")
        wait_for_file(published)
        job_id = submit.record("deploy")["job_id"]
        assert slurm.job_processes(job_id) != []
        slurm.run("scancel", "--batch", "--signal=TERM", job_id)
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    assert "server stopped in order" in submit.log("deploy")


def test_a_rung_that_fails_does_not_stop_the_others(slurm: TestCluster, submit: Submit) -> None:
    failing = {"EXPORT_FAILS_FOR": "fp32", "EXPORT_EXITS": "23", "EVALUATE_WAITS": "30"}
    ladder = "evaluate.ladder=[fp32,bf16]"
    submit("stages=[export,deploy,evaluate]", ladder, **failing)
    found = {path.parent: json.loads(path.read_text()) for path in submit.results.rglob("job.json")}
    assert len(found) == 7
    ends = {record["name"]: slurm.wait(record["job_id"])["JobState"] for record in found.values()}
    assert ends.pop("export_tiny_fp32") == "FAILED"
    assert ends.pop("deploy_tiny_fp32") == ends.pop("evaluate_tiny_fp32") == "CANCELLED"
    assert set(ends.values()) == {"COMPLETED"}
    (last,) = [path for path, record in found.items() if record["stage"] == "ladder"]
    log = last / found[last]["log"]
    wait_for(lambda: "compares bf16 export deploy evaluate" in log.read_text(), said=log.read_text)
