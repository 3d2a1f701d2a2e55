"""The command line as Hydra's users know it: help, configuration, completion, mistakes, speed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from launcher_scripts.common.command_line import help_text
from launcher_scripts.common.errors import ConfigError
from tests.login.conftest import Planner, Run

HEAVY = ("torch", "triton", "tritonclient", "numpy", "transformers")
BLOCKER = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
"""


def test_help(checkout: Path, tmp_path: Path) -> None:
    """As a user starts it; other tests fork it from a process that has imported everything."""
    result = subprocess.run(
        [sys.executable, str(checkout / "main.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "cluster_type: bcm, bcp, interactive" in result.stdout
    assert "dry_run=True" in result.stdout
    assert "tensor_model_parallel_size: auto" in result.stdout


def test_help_describes_every_key(checkout: Path) -> None:
    for choices in ((), ("export=t5/export_t5", "evaluate=load", "cluster_type=interactive")):
        lines = help_text(checkout / "conf", choices).partition("Keys (KEY=VALUE)")[2].splitlines()
        for before, line in pairwise(lines):
            if re.match(r"\s*\w+:\s*[^\s#]", line) and "#" not in line:
                assert before.strip().startswith("#") or line.strip().startswith("type:"), line
    text = help_text(checkout / "conf", ["export=t5/export_t5"])
    assert "conf/export/gpt3/export_gpt3.yaml" in text and "conf/export/t5/export_t5.yaml" in text
    assert "defaults:" not in text and "hydra:" not in text


def test_the_configuration_can_be_shown(run: Run, checkout: Path) -> None:
    result = run("--cfg", "job", "--resolve", "cluster_type=bcp")
    assert result.returncode == 0, result.stderr
    assert "cluster_type: bcp" in result.stdout
    assert f"launcher_scripts_path: {checkout}/launcher_scripts" in result.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("cluster_type=", {"cluster_type=bcm", "cluster_type=bcp", "cluster_type=interactive"}),
        ("export.model.pro", {"export.model.processes="}),
    ],
)
def test_tab_completion(run: Run, typed: str, offered: set[str]) -> None:
    line = f"python main.py {typed}"
    env = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_CWORD": "2"}
    result = run("-sc", "query=bash", **env)
    assert result.returncode == 0, result.stderr
    assert offered <= set(result.stdout.split())


@pytest.mark.parametrize(
    ("mistake", "answers"),
    [
        ("cluster_type=pbs", ("unknown cluster_type; got 'pbs'", "bcm, bcp, interactive")),
        ("stages=[export,", ("cannot read this", "every bracket closed")),
        ("--model", ("error: unknown option; got --model", "--help lists the keys")),
        ("stages=[exprot]", ("unknown stages", "'exprot'", "deploy, evaluate, export")),
    ],
)
def test_a_mistake_gets_one_clear_answer(run: Run, mistake: str, answers: tuple[str, ...]) -> None:
    result = run(mistake)
    assert result.returncode == 3
    for answer in answers:
        assert answer in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("mistake", "answers"),
    [
        ("stages=export", ("stages must be a list", "'export'", "stages=[...]")),
        ("stages=[]", ("no stages", "export")),
        ("+cluster.partitoin=luna", ("unknown key cluster.partitoin", "partition, python")),
        ("+export.model.tp=2", ("unknown key export.model.tp", "tensor_model_parallel_size")),
        ("+dry=True", ("unknown key dry", "dry_run")),
        ("data_dir=???", ("data_dir",)),
        ("data_dir=${nowhere}", ("nowhere",)),
    ],
)
def test_what_hydra_lets_pass_is_answered_by_the_plan(
    plan: Planner, mistake: str, answers: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(mistake)
    for answer in answers:
        assert answer in str(raised.value)


def test_nothing_is_written_by_a_dry_run(run: Run, arguments: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = run("stages=[export,deploy,evaluate]", "dry_run=True", *arguments)
    assert result.returncode == 0, result.stderr
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []
    for part in ("export_tiny_hydra.yaml", "deploy_tiny_submission.sh", "#SBATCH", "metrics_port"):
        assert part in result.stdout


def test_a_dry_run_says_what_is_missing_here(run: Run, bare_path: Path) -> None:  # noqa: ARG001
    result = run("stages=[export]", "dry_run=True", "base_results_dir=/nowhere")
    assert result.returncode == 0, result.stderr
    assert "the checkpoint is not there; got '/nowhere/gpt3_5b/checkpoints'" in result.stdout
    assert "sbatch is not on the PATH" in result.stdout


def test_a_python_without_the_packages_is_told_where_they_are(checkout: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(checkout / "main.py"), "dry_run=True"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 3
    assert "has no package hydra: `make setup` installs" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_login_half_needs_no_heavy_package(checkout: Path, tmp_path: Path) -> None:
    program = BLOCKER + (
        "import runpy\n"
        f"sys.path.insert(0, {str(checkout)!r})\n"
        "import main\n"
        "sys.argv[1:] = ['stages=[export,deploy,evaluate]', 'dry_run=True']\n"
        f"runpy.run_path({str(checkout / 'main.py')!r}, run_name='__main__')\n"
        f"assert not set({HEAVY!r}) & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "#SBATCH" in result.stdout


def test_keys_that_are_not_there_are_answered_with_those_that_are(run: Run) -> None:
    wrong = ("cluster.partiton=batch", "deploy.server.http_prot=1", "env_vars.TRITON_CACHE_DIR=/k")
    right = ("stages=[deploy]", "cluster_type=bcm", "deploy=gpt3/deploy_gpt3", "+more=1")
    ran = run(*wrong, *right)
    assert ran.returncode == 3
    assert "error: 3 problems in the command line:" in ran.stderr
    assert "cluster has no key partiton; got 'cluster.partiton'; choices: account, " in ran.stderr
    assert "deploy.server has no key http_prot" in ran.stderr
    assert "change it to +env_vars.TRITON_CACHE_DIR=... for a new one" in ran.stderr
    assert "Traceback" not in ran.stderr
