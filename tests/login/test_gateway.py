"""The gateway beside a server, as far as the login side looks at it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher_scripts.cluster.job import JobFolder
from launcher_scripts.cluster.record import JobRecord
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.settings import DeploySettings
from stages.stage import Stage
from tests.login.conftest import Planner, Run
from tests.login.test_golden import BASE

KEY = "deploy.gateway"
DEPLOY = (*BASE, "stages=[export,deploy]")


def settings(plan: Planner, *given: str) -> DeploySettings:
    made = plan(*DEPLOY, *given)
    found = made.stages[1].settings
    assert isinstance(found, DeploySettings)
    return found


def test_without_a_port_there_is_no_gateway(plan: Planner) -> None:
    assert settings(plan, f"{KEY}.max_running=3").gateway is None


@pytest.mark.parametrize("cluster", ["bcm", "bcp", "interactive"])
def test_a_port_makes_one_on_every_cluster(plan: Planner, cluster: str) -> None:
    found = settings(plan, f"cluster_type={cluster}", f"{KEY}.port=0").gateway
    assert found is not None
    assert (found.port, found.host) == (0, None)


def test_a_wrong_port_is_named_with_the_others(plan: Planner) -> None:
    with pytest.raises(ConfigError, match=r"got 70000; choices: null .*change deploy.gateway.port"):
        settings(plan, f"{KEY}.port=70000")
    with pytest.raises(ConfigError, match=r"ports are equal; got .*8001.*deploy.gateway.port"):
        settings(plan, f"{KEY}.port=8001")
    with pytest.raises(ConfigError, match=r"at least 1; got 0; change deploy.gateway.max_running"):
        settings(plan, f"{KEY}.max_running=0")
    with pytest.raises(ConfigError, match=r"of a proxy; got 'nginx'.*deploy.gateway.trusted_prox"):
        settings(plan, f"{KEY}.trusted_proxies=[nginx]")
    with pytest.raises(ConfigError, match=r"needs its key, .*; change deploy.gateway.tls_cert"):
        settings(plan, f"{KEY}.tls_certificate=/c.pem")


def test_files_must_be_there_and_private(plan: Planner, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("somebody=secret-key")
    keys.chmod(0o644)
    given = (*DEPLOY, f"{KEY}.port=0", f"{KEY}.chat_template=/no/template")
    with pytest.raises(ConfigError, match=r"mode 644\): chmod 600; .*deploy.gateway.api_keys"):
        plan(*given, f"{KEY}.api_keys={keys}")
    keys.chmod(0o600)
    keys.write_text("alice=secret-key\ncarol=")
    with pytest.raises(ConfigError, match=r"line 2: carol has no value; .*deploy.gateway.api_keys"):
        plan(*given, f"{KEY}.api_keys={keys}")
    keys.write_text("somebody=secret-key")
    keyed = f"{KEY}.api_keys={keys}"
    for more in (f"{KEY}.port=0", f"{KEY}.port=null"):  # without a port it may have its own job
        assert settings(plan, keyed, more).is_closed
    assert not settings(plan, f"{KEY}.port=0").is_closed
    made = plan(*given, f"{KEY}.api_keys={keys}", "container=/images/x.sqsh")
    assert "chat_template of the gateway is not there" in "\n".join(made.absent)
    preview = made.preview()
    assert f"mount {tmp_path}:{tmp_path}" in preview
    assert "secret-key" not in preview


def test_files_do_not_depend_on_the_working_directory(
    plan: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = settings(plan, f"{KEY}.port=0", f"{KEY}.chat_template=chat.jinja").gateway
    assert found is not None
    assert found.chat_template == str(tmp_path / "chat.jinja")


def test_the_gateway_speaks_as_its_server_does(plan: Planner) -> None:
    security = "++deploy.server.security.grpc_tls"
    tls = (f"{security}.certificate=/x.pem", f"{security}.key=/x.pem", f"{KEY}.port=0")
    with pytest.raises(ConfigError, match=r"change deploy.gateway.grpc_tls=\{ca: FILE\}"):
        settings(plan, *tls)
    trusting = settings(plan, *tls, f"++{KEY}.grpc_tls.ca=/ca.pem").gateway
    assert trusting is not None
    made = trusting.settings(["/r/ready.json"], "n1", 9, drain_timeout=30.0)
    assert (made.server_ca, made.ready, made.host, made.port) == (
        "/ca.pem",
        ("/r/ready.json",),
        "n1",
        9,
    )


def test_replicas_that_share_a_node_need_free_ports(plan: Planner) -> None:
    free = [f"deploy.server.{name}_port=0" for name in ("http", "grpc", "metrics")]
    shared = (*free, "cluster_type=bcm", "cluster.exclusive=False", "deploy.replicas=2")
    with pytest.raises(ConfigError, match=r"ports of their own.*deploy.server.\*_port"):
        settings(plan, *shared, "deploy.server.http_port=8000")
    assert settings(plan, *shared, f"{KEY}.port=8080").gateway is None


def stages_of(plan: Planner, *given: str) -> dict[str, Stage]:
    made = plan(*BASE, *given)
    return {stage.name: stage for stage in made.stages}


def test_replicas_have_one_gateway_in_a_job_of_its_own(plan: Planner) -> None:
    given = ("stages=[deploy]", "deploy.replicas=2", f"{KEY}.port=8080", f"{KEY}.max_running=3")
    stages = stages_of(plan, *given)
    assert list(stages) == ["deploy", "gateway"]
    assert stages["deploy"].settings.gateway is None
    told = stages["gateway"].settings
    assert told.ready == (stages["deploy"].settings.results_dir,)
    assert (told.gateway.port, told.gateway.max_running, told.host, told.restarts) == (
        *(8080, 3),
        *(None, 3),
    )
    assert list(stages_of(plan, *given, f"{KEY}.port=null")) == ["deploy"]


def test_the_gateway_starts_with_the_first_replica(
    run: Run, arguments: list[str], calls: Path, tmp_path: Path
) -> None:
    given = ("deploy.replicas=2", "deploy.gateway.port=8080")
    result = run("stages=[export,deploy]", *arguments, *given)
    assert result.returncode == 0, result.stderr
    _, _, gateway = calls.read_text().splitlines()
    assert gateway.startswith("--dependency=after:102_0,afterok:101 --kill-on-invalid-dep=yes /")
    folder = tmp_path / "the results/tiny/gateway_tp2_pp1_auto_auto"
    record = json.loads((folder / "jobs/001/job.json").read_text())
    assert (record["stage"], record["ready_file"]) == ("gateway", str(folder / "ready.json"))


def test_replicas_that_join_others_find_their_gateway_there(plan: Planner) -> None:
    given = ("stages=[deploy]", f"{KEY}.port=8080", "deploy.first_replica=3")
    stages = stages_of(plan, *given, "deploy.replicas=2")
    assert list(stages) == ["deploy"]
    job = stages["deploy"].job(JobFolder(Path("/jobs/1"), "more"))
    made = plan(*BASE, *given, "deploy.replicas=2")
    assert "#SBATCH --array=3-4\n" in made.cluster.render(job)
    assert job.settings.replica is None
    record = JobRecord("deploy", "more", "bcm", "7", None, "s", "x", "log-more_7.out")
    record = replace(record, ready_file="/r/ready.json", replicas=2, first_replica=3)
    assert record.ids() == ("7_3", "7_4")
    assert record.ready_path("7_4") == Path("/r/ready-4.json")


@pytest.mark.parametrize("cluster", ["bcm", "bcp", "interactive"])
def test_one_server_may_join_on_every_cluster(plan: Planner, cluster: str) -> None:
    given = (f"cluster_type={cluster}", "deploy.first_replica=1", f"{KEY}.port=0")
    stages = stages_of(plan, "stages=[deploy]", *given)
    found = stages["deploy"].settings
    assert (found.replica, found.ready_file.name, found.gateway) == (1, "ready-1.json", None)
    job = stages["deploy"].job(JobFolder(Path("/jobs/1"), "more"))
    assert job.service is not None
    assert (job.replicas, job.service.ready_file) == (0, found.ready_file)


def test_numbers_of_replicas_are_checked(plan: Planner) -> None:
    with pytest.raises(ConfigError, match=r"numbered from 0; got -1; change deploy.first_replica"):
        stages_of(plan, "stages=[deploy]", "deploy.first_replica=-1")
    with pytest.raises(ConfigError, match=r"not evaluated alone.*deploy.first_replica"):
        stages_of(plan, "stages=[deploy,evaluate]", "deploy.first_replica=0")


@pytest.mark.parametrize("cluster", ["bcm", "bcp", "interactive"])
def test_a_gateway_alone_stands_before_servers_that_run(
    plan: Planner, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("stages=[gateway]", f"cluster_type={cluster}", "container=/images/x.sqsh")
    stages = stages_of(plan, *given, "gateway.ready=[a/ready.json,/b]", "gateway.port=80")
    told = stages["gateway"].settings
    assert told.ready == (f"{tmp_path}/a/ready.json", "/b")
    assert (told.gateway.port, told.gateway.key) == (80, "deploy.gateway")
    assert told.host == (None if cluster != "interactive" else "127.0.0.1")
    made = plan(*BASE, *given, "gateway.ready=[a/ready.json,/b]")
    assert sum("change gateway.ready" in each for each in made.absent) == 2
    host = stages_of(plan, *given, "deploy.server.host=0.0.0.0")["gateway"].settings.host
    assert host == "0.0.0.0"


def test_what_is_wrong_with_a_gateway_alone(plan: Planner) -> None:
    for given, says in {
        "gateway.port=70000": r"got 70000; .*change gateway.port",
        "gateway.ready=[]": r"no server is named; change gateway.ready",
        "gateway.stop_timeout=-1": r"change gateway.stop_timeout",
        "gateway.run.gpus_per_node=-1": r"at least 0; got -1; change gateway.run.gpus_per_node",
        "gateway.api_keys=/no/keys": r"api_keys of the gateway is not there.*gateway.api_keys",
    }.items():
        plan_of = (*BASE, "stages=[gateway]", "dry_run=False", given)
        with pytest.raises(ConfigError, match=says):
            plan(*plan_of)


def test_a_server_whose_gateway_is_a_job_has_none_beside_it(plan: Planner) -> None:
    given = ("stages=[deploy,gateway]", "cluster_type=interactive", f"{KEY}.port=8080")
    stages = stages_of(plan, *given)
    assert stages["deploy"].settings.gateway is None
    assert stages["gateway"].settings.gateway.port == 8080
