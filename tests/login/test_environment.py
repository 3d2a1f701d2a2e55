"""Which variables of the shell that submits reach sbatch, and the jobs on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.cluster.cluster import SubmissionEnvironment, without_job
from tests.login.conftest import LOCAL, Run

# sbatch(1), INPUT ENVIRONMENT VARIABLES: those of the user alone, and those that a job has, too.
INPUT = (
    *("SBATCH_ACCOUNT", "SBATCH_ACCTG_FREQ", "SBATCH_CLUSTERS", "SBATCH_CONSTRAINT"),
    *("SBATCH_CONTAINER", "SBATCH_CORE_SPEC", "SBATCH_DELAY_BOOT", "SBATCH_EXPORT"),
    *("SBATCH_GRES", "SBATCH_HINT", "SBATCH_NETWORK", "SBATCH_NO_KILL", "SBATCH_PARTITION"),
    *("SBATCH_POWER", "SBATCH_QOS", "SBATCH_REQ_SWITCH", "SBATCH_RESERVATION", "SBATCH_WCKEY"),
    *("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_JWT", "SLURM_HINT", "SLURM_DEBUG_FLAGS"),
    *("SLURM_EXIT_ERROR", "SLURM_STEP_KILLED_MSG_NODE_ID", "SLURM_TIME_FORMAT"),
)
AMBIGUOUS = ("SLURM_UMASK", "SLURM_MPI_TYPE", "SBATCH_MEM_BIND", "SLURM_NTASKS", "SLURM_GPUS")
OF_A_JOB = (
    *("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_STEP_ID", "SLURM_STEP_GPUS"),
    *("SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME"),
    *("SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_SUBMIT_DIR", "SLURM_CPUS_ON_NODE"),
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_SRUN_COMM_HOST", "SLURM_LAUNCH_NODE_IPADDR"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PRTE_X"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
)


@pytest.mark.parametrize("inside", [False, True])
def test_what_describes_a_job_goes_and_what_a_user_says_stays(inside: bool) -> None:
    job = dict.fromkeys(OF_A_JOB, "1") if inside else {"PMI_RANK": "1"}
    mine = dict.fromkeys((*INPUT, "HOME", "HYDRA_FULL_ERROR", "MASTER_KEY"), "x")
    env = {**job, **mine, **dict.fromkeys(AMBIGUOUS, "2"), "CUDA_VISIBLE_DEVICES": "1"}
    expected = {*mine} if inside else {*mine, *AMBIGUOUS}
    assert {*without_job(env)} == {*expected, "CUDA_VISIBLE_DEVICES"}
    assert {*SubmissionEnvironment.of(env, ()).variables} == expected - {"CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(
    ("name", "flags", "unused"),
    [
        ("SBATCH_PARTITION", (), None),
        ("SBATCH_PARTITION", ("partition",), "partition"),
        ("SBATCH_TIMELIMIT", ("time",), "time"),
        ("SBATCH_MEM_PER_CPU", ("mem",), "mem-per-cpu"),
        ("SBATCH_REQUEUE", ("no-requeue",), "requeue"),
        ("SBATCH_ERROR", ("output",), "error"),
        ("SBATCH_ARRAY_INX", (), "array"),
        ("SBATCH_WAIT", (), "wait"),  # it would wait for the end of a server
    ],
)
def test_the_job_s_own_options_win(name: str, flags: tuple[str, ...], unused: str | None) -> None:
    environment = SubmissionEnvironment.of({name: "1"}, flags)
    assert environment.unused == ({} if unused is None else {unused: name})
    assert (name in environment.variables) == (unused is None)
    assert name in environment.notes()[0]


def test_defaults_reach_sbatch(run: Run, arguments: list[str], calls: Path) -> None:
    seen = calls.parent / "programs" / "sbatch"
    seen.write_text(seen.read_text().replace("\n", f'\nenv > "{calls}.env"\n', 1))
    user = {"SBATCH_ACCOUNT": "proj", "SBATCH_TIMELIMIT": "5", "SLURM_JWT": "t"}
    result = run("stages=[export]", *arguments, SLURM_JOB_ID="4", SLURM_NTASKS="4", **user)
    assert result.returncode == 0, result.stderr
    env = Path(f"{calls}.env").read_text().splitlines()
    assert {"SBATCH_ACCOUNT=proj", "SLURM_JWT=t"} <= {*env}
    assert not [line for line in env if line.startswith(("SBATCH_T", "SLURM_JOB", "SLURM_N"))]
    assert "note: SBATCH_ACCOUNT=proj: a default of this shell" in result.stdout
    assert "note: SBATCH_TIMELIMIT is not used: the job sets --time" in result.stdout


def test_a_job_on_this_machine_is_alone(run: Run, arguments: list[str], launcher: Path) -> None:
    step = "import os\nprint(sorted(n for n in os.environ if n.startswith(('SLURM', 'OMPI'))))\n"
    (launcher / "steps" / "convert_checkpoint.py").write_text(step)
    tasks = {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
    ran = run("stages=[export]", LOCAL, *arguments, OMPI_COMM_WORLD_SIZE="4", **tasks)
    assert ran.returncode == 0, ran.stderr
    assert "\n[]\n" in ran.stdout
