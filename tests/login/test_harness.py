"""lm_eval in the evaluate stage: its settings, and what is answered before any job starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.evaluation import HarnessSettings
from stages.plan import DeploymentPlan
from tests.login.conftest import Compose, Planner

STAGES = ("cluster_type=interactive", "stages=[export,deploy,evaluate]")
TASKS = "evaluate.harness.tasks=[lambada_openai,boolq]"


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "data sets").mkdir()
    return f"evaluate.harness.data='{tmp_path / 'data sets'}'"


def harness_of(made: DeploymentPlan) -> HarnessSettings:
    (evaluate,) = (stage for stage in made.stages if stage.name == "evaluate")
    return evaluate.settings.harness


def test_every_setting_has_a_key(hydra_config: Compose) -> None:
    fields = {field.name for field in dataclasses.fields(HarnessSettings)}
    assert set(hydra_config()["evaluate"]["harness"]) == fields


def test_lm_eval_is_asked_where_it_has_tasks(
    plan: Planner, arguments: list[str], data: str, tmp_path: Path
) -> None:
    assert harness_of(plan(*STAGES, *arguments)) is None
    made = plan(*STAGES, *arguments, TASKS, data, "deploy.gateway.port=0")
    assert made.stages[2].step_names()[-2:] == ("run_harness", "judge")
    harness = harness_of(made)
    assert harness.tasks == ("lambada_openai", "boolq") and harness.gateway is None
    assert tmp_path / "data sets" in made.stages[2].paths()
    alone = ("evaluate.tasks.lambada=null", "evaluate.benchmark=null", "deploy.gateway.port=0")
    made = plan(*STAGES, *arguments, TASKS, data, *alone)
    assert made.stages[2].step_names() == ("run_harness", "judge")


def test_keys_are_those_of_the_gateway(
    plan: Planner, arguments: list[str], data: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me=key\n")
    keys.chmod(0o600)
    given = (TASKS, data, "deploy.gateway.port=0", f"deploy.gateway.api_keys={keys}")
    made = plan(*STAGES, *arguments, *given)
    assert harness_of(made).api_keys == str(keys) and keys in made.stages[2].paths()
    keys.chmod(0o644)
    with pytest.raises(ConfigError, match=r"chmod 600.*change evaluate.harness.api_keys"):
        plan(*STAGES, *arguments, *given)


def test_a_gateway_with_a_job_of_its_own_is_asked(
    plan: Planner, arguments: list[str], data: str
) -> None:
    stages = ("cluster_type=interactive", "stages=[export,deploy,gateway,evaluate]")
    made = plan(*stages, *arguments, TASKS, data)
    ready = next(stage for stage in made.stages if stage.name == "gateway").settings.ready_file
    assert harness_of(made).gateway == str(ready) and ready in made.stages[3].paths()
    named = plan(*stages, *arguments, TASKS, data, "evaluate.harness.gateway=http://node1:8080/v1")
    assert harness_of(named).gateway == "http://node1:8080/v1"


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ((), "it needs a folder with the data sets of its tasks; change evaluate.harness.data"),
        (("evaluate.harness.data=/nowhere",), "data sets is not there; got '/nowhere'"),
        (("DATA",), "starts none.*change deploy.gateway.port=0"),
        (("DATA", "evaluate.harness.limit=0"), "limit must be at least 1"),
        (("DATA", "evaluate.harness.num_fewshot=-1"), "num_fewshot must be at least 0"),
        (("DATA", "evaluate.harness.tasks=[--limit]"), "not a name of a task; got '--limit'"),
    ],
)
def test_what_cannot_work_is_said_before_any_job(
    plan: Planner, arguments: list[str], data: str, more: tuple[str, ...], answer: str
) -> None:
    given = [data if one == "DATA" else one for one in more]
    with pytest.raises(ConfigError, match=answer):
        plan(*STAGES, *arguments, TASKS, *given)
