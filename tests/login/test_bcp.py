"""Base Command Platform, with a stand-in for bcprun that starts the commands."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.login.conftest import Run


def test_every_step_runs_and_its_output_is_the_jobs(
    run: Run, arguments: list[str], calls: Path, tmp_path: Path
) -> None:
    python = f"cluster.python={sys.executable}"
    extra = "cluster.bcprun_args=[-no_redirect]"
    result = run("stages=[export]", "cluster_type=bcp", *arguments, python, extra)
    assert result.returncode == 0, result.stderr
    assert "converting tiny" in result.stdout
    assert len(calls.read_text().splitlines()) == 2
    folder = tmp_path / "the results/tiny/export_tp2_pp1_fp16_fp16/jobs/001"
    assert (folder / "ran").read_text() == "convert_checkpoint\nwrite_model_repository\n"


def test_the_exit_code_is_kept(run: Run, arguments: list[str], calls: Path) -> None:
    python = f"cluster.python={sys.executable}"
    result = run("stages=[export]", "cluster_type=bcp", *arguments, python, EXPORT_EXITS="42")
    assert result.returncode == 42
    assert len(calls.read_text().splitlines()) == 1


def test_a_machine_without_bcprun_is_told_so(
    run: Run, arguments: list[str], bare_path: Path
) -> None:
    assert not (bare_path / "bcprun").exists()
    result = run("stages=[export]", "cluster_type=bcp", *arguments)
    assert result.returncode == 1
    assert "bcprun is not on the PATH" in result.stderr
