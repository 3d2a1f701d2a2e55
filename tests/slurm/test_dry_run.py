"""A dry run asks a real Slurm, shows where things come from, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit


def test_the_scheduler_is_asked_and_nothing_is_queued(
    slurm: TestCluster, submit: Submit, image: Path
) -> None:
    ran = submit(
        "stages=[export,deploy,evaluate]",
        "dry_run=True",
        f"container={image}",
        f"container_mounts=[{image.parent}:/images:ro]",
        "env_vars.NCCL_DEBUG=INFO",
        SBATCH_PARTITION="batch",
        SBATCH_TIMELIMIT="5",
    )
    assert "# SBATCH_PARTITION=batch: a default of this shell, sbatch --partition" in ran.stdout
    assert "# SBATCH_TIMELIMIT is not used: the job sets --time" in ran.stdout
    for name in ("export_tiny", "deploy_tiny", "evaluate_tiny"):
        assert f"# The scheduler on {name}: sbatch: Job" in ran.stdout
    assert f"mount {image.parent}:/images:ro  # container_mounts\n" in ran.stdout
    assert "  # paths of the export stage\n" in ran.stdout
    assert "env NCCL_DEBUG='INFO'  # env_vars\n" in ran.stdout
    cache = submit.results / "deploy_tp2_pp1_auto_auto" / "triton_cache"
    assert f"env TRITON_CACHE_DIR='{cache}'  # the deploy stage\n" in ran.stdout
    assert "--gpus-per-node=2" in ran.stdout
    assert "  # launcher_scripts_path\n" in ran.stdout
    assert "env PYTHONUNBUFFERED='1'  # the launcher\n" in ran.stdout
    assert slurm.run("squeue", "--noheader").stdout == ""
    assert not submit.results.exists()


def test_what_sbatch_would_refuse_fails_the_dry_run(submit: Submit) -> None:
    ran = submit("stages=[export,deploy]", "dry_run=True", "cluster.partition=absent", check=False)
    assert ran.returncode == 3
    assert "#SBATCH --partition=absent" in ran.stdout
    assert "sbatch would refuse the export job" in ran.stderr
    assert "sbatch would refuse the deploy job" in ran.stderr
    assert "invalid partition" in ran.stderr
