"""The launcher's jobs on a real Slurm, with small stand-ins for the steps."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.login.conftest import Run
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit


def ended(slurm: TestCluster, submit: Submit, stage: str, number: int = 1) -> tuple[str, str]:
    """State and exit code of a stage's job."""
    fields = slurm.wait(submit.record(stage, number)["job_id"])
    return fields["JobState"], fields["ExitCode"]


def test_an_export_runs_its_steps_in_a_folder_that_a_second_run_leaves_alone(
    slurm: TestCluster, submit: Submit
) -> None:
    submit("stages=[export]")
    assert ended(slurm, submit, "export") == ("COMPLETED", "0:0"), submit.log("export")
    record = submit.record("export")
    folder = record["folder"]
    assert record["cluster_type"] == "bcm"
    assert (folder / "ran").read_text() == "convert_checkpoint\nwrite_model_repository\n"
    assert "converting tiny" in submit.log("export")
    assert "writing the repository" in submit.log("export")
    assert (folder / record["settings"]).exists()
    assert os.access(folder / record["script"], os.X_OK)
    first = {path: path.read_bytes() for path in folder.iterdir()}
    submit("stages=[export]")
    assert ended(slurm, submit, "export", 2)[0] == "COMPLETED"
    assert {path: path.read_bytes() for path in folder.iterdir()} == first
    assert record["job_id"] != submit.record("export", 2)["job_id"]


def test_a_failing_step_fails_its_job_and_nothing_follows(
    slurm: TestCluster, submit: Submit
) -> None:
    submit("stages=[export,deploy,evaluate]", EXPORT_EXITS="23")
    assert ended(slurm, submit, "export") == ("FAILED", "23:0")
    assert (submit.record("export")["folder"] / "ran").read_text() == "convert_checkpoint\n"
    for stage in ("deploy", "evaluate"):
        assert ended(slurm, submit, stage)[0] == "CANCELLED"
        record = submit.record(stage)
        assert not (record["folder"] / record["log"]).exists()


def test_evaluation_starts_beside_the_server_and_cancelling_stops_it_in_order(
    slurm: TestCluster, submit: Submit
) -> None:
    keeps = "evaluate.stop_server=False"
    submit("stages=[export,deploy,evaluate]", keeps, EVALUATE_WAITS="30")
    assert ended(slurm, submit, "evaluate") == ("COMPLETED", "0:0"), submit.log("evaluate")
    assert 'measuring at {"http": "127.0.0.1:8000", ' in submit.log("evaluate")
    job_id = submit.record("deploy")["job_id"]
    slurm.run("scancel", job_id)
    assert ended(slurm, submit, "deploy")[0] == "CANCELLED"
    slurm.cancel_all()
    assert slurm.left_processes(job_id) == []
    assert "server stopped in order" in submit.log("deploy")


def test_a_dead_server_fails_its_job_with_its_code(slurm: TestCluster, submit: Submit) -> None:
    submit(*submit.served, SERVER="dies_early")
    assert ended(slurm, submit, "deploy") == ("FAILED", "7:0")
    assert "the port is in use" in submit.log("deploy")


def test_the_steps_of_a_stage_share_the_container_that_was_asked_for(
    slurm: TestCluster, submit: Submit, image: Path
) -> None:
    before = len(slurm.pyxis_record())
    Path(f"{image}.env").write_text("PYTHONPATH=/of/the/image\n")
    submit("stages=[export]", f"container='{image}'")
    assert ended(slurm, submit, "export") == ("COMPLETED", "0:0"), submit.log("export")
    seen = slurm.pyxis_record()[before:]
    # sbatch is asked what it would say, and then given the job, whose steps share a container.
    assert [entry["phase"] for entry in seen] == ["sbatch"] * 2 + ["srun", "task"]
    assert (seen[0]["image"], seen[1]["image"]) == (None, None)
    folder = submit.record("export")["folder"]
    assert (folder / "ran").read_text() == "convert_checkpoint\nwrite_model_repository\n"
    for entry in seen[2:]:
        assert entry["image"] == str(image)
        assert entry["workdir"] == str(folder)
        assert entry["mount_home"] == "no"
        assert "PYTHONPATH" in entry["env"].split(",")
        mounted = [Path(mount.split(":")[1]) for mount in entry["mounts"].split(",")]
        assert any(folder.is_relative_to(target) for target in mounted)


def test_an_image_that_the_registry_has_not_fails_the_job_and_says_so(
    slurm: TestCluster, submit: Submit
) -> None:
    submit("stages=[export]", "container='nvcr.io/nvidia/nemo:23'")
    assert ended(slurm, submit, "export") == ("FAILED", "1:0")
    assert "pyxis: failed to import docker image: nvcr.io#nvidia/nemo:23" in submit.log("export")
    assert not (submit.record("export")["folder"] / "ran").exists()


def test_a_relative_image_is_no_registry_name(
    slurm: TestCluster, submit: Submit, image: Path
) -> None:
    submit("stages=[export]", f"container={image.name}")
    assert ended(slurm, submit, "export") == ("COMPLETED", "0:0"), submit.log("export")
    assert slurm.pyxis_record()[-1]["image"] == str(image)


def test_a_missing_mount_fails_the_job_and_says_so(
    slurm: TestCluster, submit: Submit, image: Path
) -> None:
    submit("stages=[export]", f"container='{image}'", "container_mounts=[/no/such/folder:/data]")
    assert ended(slurm, submit, "export") == ("FAILED", "1:0")
    reason = "pyxis: --container-mounts: source path does not exist: /no/such/folder"
    assert reason in submit.log("export")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("cluster.partition=absent", "invalid partition"),
        ("cluster.gpus_per_node=9", "Requested node configuration is not available"),
        ("cluster.nodelist=n7", "Invalid node name"),
        ("cluster.reservation=absent", "Requested reservation is invalid"),
    ],
)
def test_what_sbatch_refuses_names_the_key(submit: Submit, option: str, reason: str) -> None:
    ran = submit("stages=[export]", option, check=False)
    assert ran.returncode == 3
    assert "sbatch would refuse the export job" in ran.stderr
    assert reason in ran.stderr
    assert f"; change {option.partition('=')[0]}" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_job_that_could_never_start_is_not_queued(slurm: TestCluster, submit: Submit) -> None:
    late = ("cluster.partition=single", "export.run.time_limit=0:30:00")
    ran = submit("stages=[export,deploy]", *late, check=False)
    assert ran.returncode == 3
    assert "the deploy job would wait indefinitely (PartitionTimeLimit)" in ran.stderr
    assert "longer than 01:00:00; got '1-00:00:00'; change deploy.run.time_limit" in ran.stderr
    assert "the export job" not in ran.stderr
    assert slurm.run("squeue", "--noheader").stdout == ""
    assert not submit.results.exists()


def test_an_interrupted_submission_takes_back_what_was_queued(
    slurm: TestCluster, submit: Submit, tmp_path: Path
) -> None:
    program = tmp_path / "programs" / "sbatch"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f'{shutil.which("sbatch")} --hold "$@"\n'  # or the export could end before Ctrl-C
        'case "$*" in *deploy_tiny_submission.sh) kill -INT "$PPID"; sleep 1; exit 1 ;; esac\n'
    )
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    ran = submit("stages=[export,deploy,evaluate]", check=False, PATH=path)
    assert ran.returncode == 130, ran.stderr
    assert "export: submitted export_tiny as Slurm job" in ran.stdout
    assert "export: cancelled Slurm job" in ran.stdout
    assert "deploy: cancelled Slurm job" in ran.stdout
    assert ran.stderr == "error: interrupted\n"
    assert ended(slurm, submit, "export")[0] == "CANCELLED"
    assert slurm.run("squeue", "--noheader").stdout == ""


@pytest.mark.parametrize(
    "whole",
    [
        ("cluster.partition=single", "deploy.run.time_limit=0:30:00"),
        ("deploy.run.nodes=2",),
        ("cluster.nodelist=n2",),
        ("cluster.exclusive=False", "cluster.mem=0", "deploy.run.nodes=2"),
    ],
    ids=" ".join,
)
def test_an_evaluation_without_room_beside_the_server_is_not_queued(
    slurm: TestCluster, submit: Submit, whole: tuple[str, ...]
) -> None:
    times = [f"{stage}.run.time_limit=0:30:00" for stage in ("export", "evaluate")]
    ran = submit("stages=[export,deploy,evaluate]", *whole, *times, check=False)
    assert ran.returncode == 3
    assert "the evaluate job could never start beside the deploy job" in ran.stderr
    assert "change evaluate.in_deploy_job=True (the client runs in the deployment" in ran.stderr
    assert slurm.run("squeue", "--noheader").stdout == ""
    assert not submit.results.exists()


def test_an_evaluation_beside_a_server_that_shares_its_node(
    slurm: TestCluster, submit: Submit
) -> None:
    """The partition has one node: both fit, since the server takes a part of it."""
    times = [f"{stage}.run.time_limit=0:30:00" for stage in ("deploy", "evaluate")]
    shared = ("cluster.partition=single", "cluster.exclusive=False", "cluster.mem=100", *times)
    submit(*submit.measured, *shared, EVALUATE_WAITS="30")
    assert ended(slurm, submit, "evaluate") == ("COMPLETED", "0:0"), submit.log("evaluate")
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")


RANKS = """
import os
print("rank", *(os.environ.get(n) for n in ("SLURM_PROCID", "PMIX_RANK", "SLURMD_NODENAME")))
"""


@pytest.mark.parametrize(("mpi", "rank"), [("pmix", "{}"), ("none", "None")])
def test_one_server_task_per_node_finds_its_rank(
    slurm: TestCluster, submit: Submit, launcher: Path, mpi: str, rank: str
) -> None:
    (launcher / "steps" / "start_server.py").write_text(RANKS)
    submit(*submit.served, "deploy.run.nodes=2", f"cluster.mpi={mpi}")
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    assert sorted(submit.log("deploy").splitlines()) == [
        f"{task}: rank {task} {rank.format(task)} n{task + 1}" for task in range(2)
    ]


def test_one_dead_task_ends_the_other(slurm: TestCluster, submit: Submit, launcher: Path) -> None:
    # The pause lets srun pass the line on: what a task says at its very end can be lost.
    (launcher / "steps" / "start_server.py").write_text(
        "import os, sys, time\n"
        "if os.environ['SLURM_PROCID'] == '1':\n"
        "    print('rank 1 found no GPU', file=sys.stderr, flush=True)\n"
        "    time.sleep(1)\n"
        "    sys.exit(1)\n"
        "time.sleep(300)\n"
    )
    submit(*submit.served, "deploy.run.nodes=2")
    assert ended(slurm, submit, "deploy")[0] == "FAILED"
    assert "1: rank 1 found no GPU" in submit.log("deploy")
    assert slurm.left_processes(submit.record("deploy")["job_id"]) == []


def test_the_documented_command_line(
    slurm: TestCluster, run: Run, launcher: Path, checkout: Path, nemo_file: Path, tmp_path: Path
) -> None:
    results = tmp_path / "mount" / "results"
    (results / "gpt3_126m" / "checkpoints").mkdir(parents=True)
    nemo_file.rename(results / "gpt3_126m" / "checkpoints" / "megatron_gpt.nemo")
    other = tmp_path / "programs" / "python3"  # what the nodes call python3 lacks the packages
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 9\n")
    other.chmod(0o755)
    ran = run(
        "stages=[export]",
        "cluster_type=bcm",
        f"launcher_scripts_path='{launcher}'",
        f"data_dir={tmp_path}/mount/data/the_pile_gpt3",
        f"base_results_dir={results}",
        "export.run.model_train_name=gpt3_126m",
        "export.model.tensor_model_parallel_size=2",
        "export.triton_deployment.pipeline_model_parallel_size=1",
        script=checkout / "launcher_scripts" / "main.py",
        PATH=os.pathsep.join([str(other.parent), os.environ["PATH"]]),
    )
    assert ran.returncode == 0, ran.stderr
    (record_file,) = results.glob("gpt3_126m/export_tp2_pp1_auto_auto/jobs/001/job.json")
    record = json.loads(record_file.read_text())
    log = record_file.parent / record["log"]
    assert slurm.wait(record["job_id"])["JobState"] == "COMPLETED", log.read_text()
    assert "converting gpt3_126m" in log.read_text()


NASTY = """a 'b' "c" $(touch made) `touch made` % %j ; & | {x} ~ #é !"""
BACKSLASHES = r" a\b 'c\d' \\e"
MOUNTED = "a 'b' % %j ; & | {x} ~ #é !"  # without what pyxis' shell would read
DUMP = """
import os
from pathlib import Path
names = ("NASTY", "QUOTED", "LINES", "LD_LIBRARY_PATH")
Path("variables").write_text(repr([os.environ[name] for name in names]))
"""


def test_nasty_names_arrive_as_they_are(
    slurm: TestCluster, submit: Submit, launcher: Path, tmp_path: Path, image: Path
) -> None:
    (launcher / "steps" / "convert_checkpoint.py").write_text(DUMP)
    before = len(slurm.pyxis_record())
    untold = {"QUOTED": '"a"', "LINES": "a\nb", "LD_LIBRARY_PATH": "/of/the/job"}
    Path(f"{tmp_path / NASTY}.sqsh.env").write_text("LD_LIBRARY_PATH=/of/the/image\n")
    folder = tmp_path / MOUNTED
    folder.mkdir()
    nasty_image = image.rename(tmp_path / f"{NASTY}.sqsh")
    submit(
        "stages=[export]",
        f"container={in_hydra(nasty_image)}",
        f"export.run.results_dir={in_hydra(folder / 'results')}",
        f"export.run.name={in_hydra(NASTY)}",
        f"+env_vars.NASTY={in_hydra(NASTY)}",
        *(f"+env_vars.{name}={in_hydra(value)}" for name, value in untold.items()),
        f"cluster.comment={in_hydra(NASTY + BACKSLASHES)}",
    )
    (record_file,) = (folder / "results").glob("jobs/001/job.json")
    record = json.loads(record_file.read_text())
    state = slurm.wait(record["job_id"])["JobState"]
    log = record_file.parent / record["log"]
    assert log.name == f"log-{NASTY}_{record['job_id']}.out"
    assert state == "COMPLETED", log.read_text()
    written = (record_file.parent / "variables").read_text()
    assert written == repr([NASTY, *untold.values()])
    tasks = [entry for entry in slurm.pyxis_record()[before:] if entry["phase"] == "task"]
    assert {entry["image"] for entry in tasks} == {str(nasty_image)}
    assert {entry["workdir"] for entry in tasks} == {str(record_file.parent)}
    shown = slurm.run("scontrol", "show", "job", record["job_id"]).stdout
    assert f"Comment={NASTY}{BACKSLASHES}" in shown
    assert f"JobName=nemo-megatron-{NASTY}" in shown
    assert list(tmp_path.rglob("made")) == []


def in_hydra(value: object) -> str:
    """A value in single quotes, as Hydra's command line reads it."""
    return "'" + str(value).replace("'", "\\'") + "'"
