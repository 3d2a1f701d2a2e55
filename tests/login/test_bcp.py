"""Base Command Platform, with a stand-in for bcprun that starts the commands as bcprun does."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.errors import ConfigError
from tests.login.conftest import Planner, Run
from tests.login.test_golden import BASE

PYTHON = f"cluster.python={sys.executable}"
BCP = "cluster_type=bcp"
# What a rank can learn from its environment.
DUMP = """
import json, os, sys
from pathlib import Path
known = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "NASTY")
seen = {name: os.environ[name] for name in known if name in os.environ}
rank = seen.get("RANK", seen.get("OMPI_COMM_WORLD_RANK"))
Path(f"rank-{rank}.json").write_text(json.dumps(seen))
sys.exit(int(os.environ.get("FAILS_" + rank, "0")))
"""


def noted(calls: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_every_step_runs_and_its_output_is_the_jobs(
    run: Run, arguments: list[str], calls: Path, tmp_path: Path
) -> None:
    extra = "cluster.bcprun_args=[-no_redirect]"
    result = run("stages=[export]", BCP, *arguments, PYTHON, extra)
    assert result.returncode == 0, result.stderr
    assert "converting tiny" in result.stdout
    folder = tmp_path / "the results/tiny/export_tp2_pp1_auto_auto/jobs/001"
    assert (folder / "ran").read_text() == "convert_checkpoint\nwrite_model_repository\n"
    for call in noted(calls):
        assert (call["nnodes"], call["npernode"], call["workdir"]) == (1, 1, str(folder))
        assert call["launcher"] == ""
        assert [entry.partition("=")[0] for entry in call["env"]][:2] == [
            *("PYTHONPATH", "PYTHONUNBUFFERED")
        ]


def test_the_documented_command_leaves_its_log_where_it_says(
    arguments: list[str], calls: Path, checkout: Path, tmp_path: Path
) -> None:
    log = tmp_path / "export_gpt3_log.txt"
    command = [sys.executable, str(checkout / "launcher_scripts/main.py"), "stages=[export]", BCP]
    line = shlex.join([*command, *arguments, PYTHON]) + f" >> {shlex.quote(str(log))} 2>&1"
    ran = subprocess.run(["bash", "-c", line], cwd=tmp_path, check=False)
    assert ran.returncode == 0, log.read_text()
    assert "converting tiny" in log.read_text()
    assert "writing the repository" in log.read_text()
    assert len(noted(calls)) == 2


@pytest.mark.parametrize("options", [(), ("cluster.array_type=pytorch",)])
def test_a_pytorch_array_tells_every_node_its_rank(
    run: Run, arguments: list[str], calls: Path, launcher: Path, options: tuple[str, ...]
) -> None:
    (launcher / "steps" / "start_server.py").write_text(DUMP)
    nasty = 'it\'s "$(touch made)" & ü'
    quoted = "+env_vars.NASTY='" + nasty.replace("'", "\\'") + "'"
    given = (*arguments, PYTHON, "deploy.run.nodes=2", quoted, *options)
    run("stages=[export,deploy]", BCP, *given, NGC_ARRAY_SIZE="2", NGC_ARRAY_TYPE="PYTORCH")
    server = noted(calls)[-1]
    assert (server["nnodes"], server["npernode"], server["launcher"]) == (2, 1, "")
    ranks = [json.loads((Path(server["workdir"]) / f"rank-{k}.json").read_text()) for k in (0, 1)]
    for number, seen in enumerate(ranks):
        assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"]) == (str(number), "2", "0")
        assert "OMPI_COMM_WORLD_RANK" not in seen
        assert seen["NASTY"] == nasty
    assert list(launcher.parent.parent.rglob("made")) == []


def test_an_mpi_array_gives_mpiruns_variables(
    run: Run, arguments: list[str], calls: Path, launcher: Path
) -> None:
    (launcher / "steps" / "start_server.py").write_text(DUMP)
    given = (*arguments, PYTHON, "deploy.run.nodes=2", "cluster.array_type=mpi")
    run("stages=[export,deploy]", BCP, *given, NGC_ARRAY_SIZE="2", NGC_ARRAY_TYPE="PYTORCH")
    export, _, server = noted(calls)
    assert (export["launcher"], server["launcher"]) == ("", "mpirun --allow-run-as-root")
    seen = json.loads((Path(server["workdir"]) / "rank-1.json").read_text())
    assert seen == {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }


def test_the_code_of_the_rank_that_fails_is_the_launchers(
    run: Run, arguments: list[str], calls: Path, launcher: Path
) -> None:
    (launcher / "steps" / "start_server.py").write_text(
        DUMP.replace("sys.exit(", "import time; time.sleep(60 if rank == '0' else 0); sys.exit(")
    )
    given = (*arguments, PYTHON, "deploy.run.nodes=2")
    result = run("stages=[export,deploy]", BCP, *given, NGC_ARRAY_SIZE="2", FAILS_1="9")
    assert result.returncode == 3
    assert "ended with exit code 9" in result.stderr
    assert len(noted(calls)) == 3


def test_the_exit_code_of_a_step_is_kept(run: Run, arguments: list[str], calls: Path) -> None:
    result = run("stages=[export]", BCP, *arguments, PYTHON, EXPORT_EXITS="42")
    assert result.returncode == 42
    assert len(noted(calls)) == 1


def test_a_machine_without_bcprun_is_told_so(
    plan: Planner, arguments: list[str], bare_path: Path
) -> None:
    assert not (bare_path / "bcprun").exists()
    with pytest.raises(ConfigError, match="bcprun is not on the PATH"):
        plan("stages=[export]", BCP, *arguments)


def test_more_nodes_than_the_bcp_job_has(plan: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NGC_ARRAY_SIZE", "2")
    many = (*BASE, BCP, "export.model.tensor_model_parallel_size=32")
    with pytest.raises(ConfigError, match="32 ranks need 4 nodes, and this cluster type has 2"):
        plan(*many)
    plan(*BASE, BCP, "export.model.tensor_model_parallel_size=16")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cluster.array_type=slurm", "unknown array_type; got 'slurm'; choices: pytorch, mpi"),
        ("cluster.gpus_per_node=0", "gpus_per_node must be at least 1"),
        ("cluster.mpi=pmix", "unknown key cluster.mpi; choices: array_type, bcprun_args"),
        ("deploy.replicas=2", r"1 problem in .*\n- replicas are an array of Slurm jobs"),
    ],
)
def test_wrong_options(plan: Planner, override: str, says: str) -> None:
    more = "+" if "mpi" in override else ""
    with pytest.raises(ConfigError, match=says):
        plan(*BASE, BCP, more + override)
