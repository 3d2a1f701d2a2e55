"""The jobs command on a real Slurm: servers side by side, and how they are watched and ended."""

from __future__ import annotations

import json

from tests.jobs.conftest import Jobs, Statuses
from tests.processes import wait_for_file
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended

# Several servers on a node.
SHARED = (
    *("cluster.exclusive=False", "cluster.mem=100", "cluster.cpus_per_task=1"),
    *(f"deploy.server.{name}_port=0" for name in ("http", "grpc", "metrics")),
)


def test_replicas_are_an_array_of_jobs_that_one_evaluation_asks(
    slurm: TestCluster, submit: Submit, jobs: Jobs, statuses: Statuses
) -> None:
    submit(*submit.measured, *SHARED, "deploy.replicas=2", EVALUATE_WAITS="30")
    assert ended(slurm, submit, "evaluate") == ("COMPLETED", "0:0"), submit.log("evaluate")
    record = submit.record("deploy")
    assert submit.log("evaluate").count('"http": "127.0.0.1:8000"') == 2
    names = {path.name for path in record["folder"].iterdir()}
    assert {f"log-deploy_tiny_{record['job_id']}_{k}.out" for k in (0, 1)} <= names
    assert jobs("wait", "deploy_tiny").returncode == 0
    seen = statuses("deploy_tiny")
    assert [item["id"] for item in seen] == [f"{record['job_id']}_{k}" for k in (0, 1)]
    assert {(item["status"], item["exit_code"]) for item in seen} == {("COMPLETED", 0)}
    assert jobs("logs", "deploy_tiny").stdout.count("server stopped in order") == 2


def test_the_gateway_of_replicas_is_a_job_that_ends_with_the_evaluation(
    slurm: TestCluster, submit: Submit, jobs: Jobs
) -> None:
    submit(
        *submit.measured,
        *SHARED,
        "deploy.replicas=2",
        "deploy.gateway.port=8090",
        EVALUATE_WAITS="60",
    )
    assert ended(slurm, submit, "evaluate") == ("COMPLETED", "0:0"), submit.log("evaluate")
    assert ended(slurm, submit, "gateway") == ("COMPLETED", "0:0"), submit.log("gateway")
    assert "gateway stopped in order" in submit.log("gateway")
    assert jobs("logs", "deploy_tiny").stdout.count("server stopped in order") == 2


def test_a_gateway_is_stopped_alone_and_started_again_before_the_same_servers(
    slurm: TestCluster, submit: Submit, jobs: Jobs, statuses: Statuses
) -> None:
    shared = (*SHARED, "cluster.gpus_per_node=1")
    submit(*submit.served, "deploy.replicas=2", *shared, "deploy.gateway.port=8090")
    deployed = submit.record("deploy")["folder"].parent.parent
    for number in (0, 1):
        wait_for_file(deployed / f"ready-{number}.json")
    wait_for_file(submit.record("gateway")["folder"].parent.parent / "ready.json")
    (seen,) = statuses("gateway_tiny")
    assert seen["status"] == "READY"
    assert seen["endpoints"] == {"openai": "http://127.0.0.1:8090/v1"}
    assert "http://127.0.0.1:8090/v1" in jobs("status", "gateway_tiny").stdout
    assert jobs("stop", "gateway_tiny").returncode == 0
    assert {item["state"] for item in statuses("deploy_tiny")} == {"RUNNING"}
    submit("stages=[gateway]", "gateway.port=8091", *shared)
    second = submit.record("gateway", 2)
    wait_for_file(second["folder"].parent.parent / "ready.json")
    assert f"ready:\n- {deployed}\n" in (second["folder"] / second["settings"]).read_text()
    # A replica that joins them, and one that leaves.
    submit(*submit.served, "deploy.first_replica=2", *shared)
    wait_for_file(deployed / "ready-2.json")
    assert jobs("stop", f"{submit.record('deploy')['job_id']}_0").returncode == 0
    (joined,) = statuses(f"{submit.record('deploy', 2)['folder']}")
    assert joined["state"] == "RUNNING"
    folders = [str(submit.record(*job)["folder"]) for job in (("deploy", 1), ("deploy", 2))]
    assert jobs("stop", *folders, "gateway_tiny").returncode == 0
    assert slurm.left_processes() == []


def test_one_replica_is_stopped_and_the_others_go_on(
    slurm: TestCluster, submit: Submit, jobs: Jobs, statuses: Statuses
) -> None:
    submit(*submit.served, *SHARED, "deploy.replicas=2", "cluster.gpus_per_node=2")
    record = submit.record("deploy")
    for number in (0, 1):
        wait_for_file(record["folder"].parent.parent / f"ready-{number}.json")
    # Slurm gives the last task of an array the number of the array itself.
    assert jobs("stop", f"{record['job_id']}_1").returncode == 0
    assert [item["state"] for item in statuses("deploy_tiny")] == ["RUNNING", "COMPLETED"]
    assert jobs("stop", "deploy_tiny").returncode == 0
    assert slurm.left_processes() == []


def test_a_server_is_watched_and_stopped_in_order(
    slurm: TestCluster, submit: Submit, jobs: Jobs, statuses: Statuses
) -> None:
    submit("stages=[export,deploy]")
    waited = jobs("wait", "--timeout=60", "export_tiny")
    assert waited.returncode == 0, waited.stderr
    record = submit.record("deploy")
    while statuses(record["job_id"])[0]["status"] in ("PENDING", "STARTING"):
        assert jobs("status", record["job_id"]).returncode == 3
    (seen,) = statuses(record["job_id"])
    assert (seen["status"], seen["nodes"]) == ("NOT ANSWERING", "n1")
    stopped = jobs("stop", "deploy_tiny")
    assert stopped.returncode == 0, stopped.stderr
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0")
    assert "server stopped in order" in jobs("logs", "deploy_tiny").stdout
    assert slurm.left_processes(record["job_id"]) == []


def test_what_slurm_has_forgotten_is_remembered_in_the_job_folder(
    slurm: TestCluster, submit: Submit, jobs: Jobs
) -> None:
    submit("stages=[export]", EXPORT_EXITS="5")
    waited = jobs("wait", "export_tiny")
    assert waited.returncode == 5
    assert "  | converting tiny" in waited.stderr
    folder = submit.record("export")["folder"]
    assert (folder / f"end_{submit.record('export')['job_id']}.json").exists()
    assert slurm.is_up()


def test_a_job_that_will_never_start_says_why(
    slurm: TestCluster, submit: Submit, jobs: Jobs
) -> None:
    submit("stages=[export]")
    # The launcher does not submit such a job, but a partition's limits can change behind it.
    late = ("--partition=single", "--time=2-0", "--output=/dev/null", "--wrap=true")
    job_id = slurm.run("sbatch", "--parsable", *late).stdout.strip()
    record = submit.record("export")["folder"] / "job.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "job_id": job_id}))
    waited = jobs("wait", "--timeout=30", "export_tiny")
    assert waited.returncode == 1
    assert "PartitionTimeLimit, it will never start: its time limit is beyond" in waited.stderr
    assert jobs("cancel", "export_tiny").returncode == 0
