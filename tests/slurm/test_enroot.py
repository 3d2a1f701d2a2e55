"""Jobs that run enroot's commands, on a real Slurm with a stand-in for enroot on the nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended

# Notes every call, keeps containers as files, and runs the command of a start on the host.
ENROOT = """#!/bin/bash
set -eu
line="$SLURMD_NODENAME $*"
printf '%s\\n' "${line//$'\\n'/ }" >> "$ENROOT_CALLS"
command=$1
shift
case $command in
    import) [ "$1" = --output ]; [ ! -e "$2" ]; echo "$3" > "$2" ;;
    create)
        [ "$1" = --name ]
        [ -s "$3" ] || exit 4
        [ ! -e "$ENROOT_CALLS.$2" ]
        touch "$ENROOT_CALLS.$2"
        ;;
    remove) [ "$1" = --force ]; rm "$ENROOT_CALLS.$2" ;;
    start)
        while [[ $1 = --env || $1 = --mount ]]; do shift 2; done
        [ -e "$ENROOT_CALLS.$1" ]
        shift
        exec "$@"
        ;;
    *) exit 3 ;;
esac
"""


@pytest.fixture
def enroot_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "programs" / "enroot"
    program.parent.mkdir()
    program.write_text(ENROOT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ENROOT_CALLS", str(tmp_path / "enroot"))
    return tmp_path / "enroot"


def arguments(launcher: Path, results: Path) -> list[str]:
    """Paths without spaces, which enroot cannot mount."""
    return [
        "cluster.container_runtime=enroot",
        "container='nvcr.io#nvidia/nemo:23'",
        f"launcher_scripts_path={launcher.rename(results / 'launcher_scripts')}",
        f"base_results_dir={results}",
    ]


def test_a_job_fetches_its_image_once_and_removes_its_containers(
    slurm: TestCluster, submit: Submit, enroot_calls: Path, launcher: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    chosen = Submit(submit.run, submit.arguments, results / "tiny")
    options = arguments(launcher, results)
    options += ["evaluate.in_deploy_job=True", "deploy.run.nodes=2"]
    chosen("stages=[export,deploy,evaluate]", *options, EVALUATE_WAITS="30")
    for stage in ("export", "deploy"):
        assert ended(slurm, chosen, stage) == ("COMPLETED", "0:0"), chosen.log(stage)
    calls = enroot_calls.read_text().splitlines()
    assert len([call for call in calls if " import " in call]) == 1
    assert "docker://nvcr.io#nvidia/nemo:23" in calls[0]
    created = [call.split()[3] for call in calls if call.split()[1] == "create"]
    removed = [call.split()[3] for call in calls if call.split()[1] == "remove"]
    assert len(created) == len(set(created)) == 6
    assert sorted(created) == sorted(removed)
    starts = [call for call in calls if call.split()[1] == "start"]
    assert {call.split()[0] for call in starts} == {"n1", "n2"}
    server = next(call for call in starts if "start_server" in call)
    gpus = "--env CUDA_VISIBLE_DEVICES"
    for expected in ("--env PMIX_RANK", "--env SLURM_PROCID", gpus, "none:x-create=dir,rbind"):
        assert expected in server
    (server_log,) = chosen.record("deploy")["folder"].glob("server-*.out")
    assert "server stopped in order" in server_log.read_text()
