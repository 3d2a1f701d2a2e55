"""The documented configuration: keys, defaults and command lines of the original, verbatim."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose
from omegaconf import OmegaConf

from launcher_scripts.config.evaluation import (
    BenchmarkSettings,
    GenerationSettings,
    GoodputBounds,
    LoadPrompts,
    LoadSettings,
    TaskSettings,
)
from launcher_scripts.config.gateway import DeployedGateway, GatewayJobSettings
from launcher_scripts.config.options import build, values_of
from launcher_scripts.config.policy import PolicySettings
from launcher_scripts.config.settings import (
    EvaluateSettings,
    ModelOptions,
    ServerOptions,
    ServingOptions,
)
from launcher_scripts.models.repository import BACKEND_MODEL_TYPES
from stages.export import ExportModel, TritonDeployment
from tests.login.conftest import Compose, Planner, Run

EXPORT_RUN = """
run:
  name: export_${.model_train_name}
  time_limit: "2:00:00"
  model_train_name: "gpt3_5b"
  training_dir: ${base_results_dir}/${.model_train_name}
  config_summary: tp${export.model.tensor_model_parallel_size}_pp${export.triton_deployment.pipeline_model_parallel_size}_${export.model.weight_data_type}_${export.triton_deployment.data_type}
  results_dir: ${base_results_dir}/${.model_train_name}/export_${.config_summary}
  model_type: "gpt3"
"""  # noqa: E501

EXPORT_MODEL = """
model:
  checkpoint_path: ${export.run.training_dir}/checkpoints
  # FT checkpoint will be saved in ${.triton_model_dir}/1/${.tensor_model_parallel_size}-gpu
  tensor_model_parallel_size: 8
  weight_data_type: fp16   # fp32|fp16
  processes: 16
  load_checkpoints_to_cpu: False
"""

EXPORT_TRITON_DEPLOYMENT = """
triton_deployment:
  triton_model_dir: ${export.run.results_dir}/model_repo/${export.run.model_train_name}
  max_batch_size: 1
  pipeline_model_parallel_size: 1
  int8_mode: False
  enable_custom_all_reduce: False
  data_type: fp16  # fp32|fp16|bf16
"""

CLUSTER = """
partition: null
account: null
exclusive: True
gpus_per_task: null
gpus_per_node: 8
mem: 0
overcommit: False
job_name_prefix: "nemo-megatron-"
"""

BCP_ARGUMENTS = (
    "stages=[export]",
    "cluster_type=bcp",
    "launcher_scripts_path=/opt/NeMo-Megatron-Launcher/launcher_scripts",
    "data_dir=/mount/data/the_pile_gpt3",
    "base_results_dir=/mount/results",
    "export.run.model_train_name=gpt3_126m",
    "export.model.tensor_model_parallel_size=2",
    "export.triton_deployment.pipeline_model_parallel_size=1",
)

# Keys whose default is a word for the checkpoint's own value (docs/compatibility.md).
AUTOMATIC = {"tensor_model_parallel_size", "weight_data_type", "data_type"}

NODES = [
    (1, 1, 1, "0"),
    (2, 1, 1, "0,1"),
    (4, 1, 1, "0,1,2,3"),
    (8, 1, 1, None),
    (8, 2, 2, None),
    (16, 1, 2, None),
    (8, 3, 3, None),
    (8, 4, 4, None),
    (16, 2, 4, None),
]


@pytest.mark.parametrize("block", [EXPORT_RUN, EXPORT_MODEL, EXPORT_TRITON_DEPLOYMENT])
def test_the_export_block_has_the_documented_keys_and_values(
    hydra_config: Compose, block: str
) -> None:
    hydra_config()
    config = OmegaConf.to_container(compose("config").export, resolve=False)
    for name, documented in yaml.safe_load(block).items():
        automatic = dict.fromkeys(AUTOMATIC & documented.keys(), "auto")
        assert (documented | automatic).items() <= config[name].items()


def test_the_cluster_file_has_the_documented_keys_and_values(checkout: Path) -> None:
    config = yaml.safe_load((checkout / "conf/cluster/bcm.yaml").read_text())
    assert yaml.safe_load(CLUSTER).items() <= config.items()


def test_the_documented_interpolations(hydra_config: Compose) -> None:
    values = hydra_config("base_results_dir=/mount/results")
    results = "/mount/results/gpt3_5b/export_tp8_pp1_auto_auto"
    assert values["export"]["run"]["results_dir"] == results
    assert values["export"]["run"]["name"] == "export_gpt3_5b"
    folder = values["export"]["triton_deployment"]["triton_model_dir"]
    assert folder == f"{results}/model_repo/gpt3_5b"
    assert values["deploy"]["model_repository"] == f"{results}/model_repo"


@pytest.mark.parametrize("cluster", ["bcm", "bcp", "interactive"])
def test_the_cluster_type_selects_its_file_and_stays_a_string(
    hydra_config: Compose, cluster: str
) -> None:
    values = hydra_config(f"cluster_type={cluster}")
    assert values["cluster_type"] == cluster
    assert values["cluster"]["type"] == cluster


def test_slurm_is_the_default_and_export_the_only_stage(hydra_config: Compose) -> None:
    values = hydra_config()
    assert values["cluster_type"] == "bcm"
    assert values["stages"] == ["export"]


def test_the_launcher_scripts_of_this_checkout_are_the_default(
    hydra_config: Compose, checkout: Path
) -> None:
    assert hydra_config()["launcher_scripts_path"] == str(checkout / "launcher_scripts")


def test_every_setting_of_the_server_has_a_key_and_its_default(hydra_config: Compose) -> None:
    block = hydra_config()["deploy"]["server"]
    assert set(block) == {field.name for field in dataclasses.fields(ServerOptions)}
    assert build(ServerOptions, block, "the block") == ServerOptions(host=None)


def test_every_setting_of_the_gateway_has_a_key_and_its_default(hydra_config: Compose) -> None:
    block = hydra_config()["deploy"]["gateway"]
    assert build(DeployedGateway, block, "the block") == DeployedGateway()
    fields = {field.name for field in dataclasses.fields(DeployedGateway)}
    assert set(block) == fields
    job = hydra_config("deploy.gateway.max_running=3", "deploy.gateway.port=5")["gateway"]
    assert {name: job[name] for name in fields} == {**block, "max_running": 3, "port": 5}
    of_the_job = {field.name for field in dataclasses.fields(GatewayJobSettings)}
    elsewhere = {"results_dir", "gateway", "restarts", "idle_timeout", "job_folder"}
    assert set(job) - {"run"} == fields | of_the_job - elsewhere


@pytest.mark.parametrize(
    ("section", "kind", "options", "of_the_stage"),
    [
        (
            *("model", ExportModel, ModelOptions()),
            {
                "checkpoint_path",
                "tensor_model_parallel_size",
                "tokenizer",
                "load_checkpoints_to_cpu",
            },
        ),
        (
            *("triton_deployment", TritonDeployment, ServingOptions()),
            {"triton_model_dir", "pipeline_model_parallel_size", "int8_mode"},
        ),
    ],
)
def test_every_setting_of_the_export_has_a_key_and_its_default(
    hydra_config: Compose, section: str, kind: type, options: Any, of_the_stage: set[str]
) -> None:
    block = hydra_config()["export"][section]
    assert set(block) - of_the_stage == {field.name for field in dataclasses.fields(options)}
    assert type(options)(**values_of(type(options), build(kind, block, "the block"))) == options


def test_every_file_of_the_exports_says_what_its_model_is_served_as(
    hydra_config: Compose, checkout: Path
) -> None:
    folder = checkout / "conf" / "export"
    choices = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml")]
    kinds = [hydra_config(f"export={choice}")["export"]["run"]["model_type"] for choice in choices]
    assert sorted(kinds) == sorted(BACKEND_MODEL_TYPES)


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_every_model_type_has_the_same_keys(kind: str, hydra_config: Compose) -> None:
    gpt, other = hydra_config()["export"], hydra_config(f"export={kind}/export_{kind}")["export"]
    assert other["run"]["model_type"] == kind
    for section in ("run", "model", "triton_deployment"):
        assert list(other[section]) == list(gpt[section])
    assert other["model"]["checkpoint_path"].endswith(f"/{kind}_3b/checkpoints")


def test_every_setting_of_the_evaluation_has_a_key(hydra_config: Compose) -> None:
    fields = {field.name for field in dataclasses.fields(EvaluateSettings)}
    evaluate = hydra_config()["evaluate"]
    of_the_stage = {"run", "in_deploy_job", "stop_server", "ladder"}
    assert set(evaluate) - of_the_stage == fields - {
        *("results_dir", "server_job_folder", "published_as", "steps")
    }
    benchmark = {field.name for field in dataclasses.fields(BenchmarkSettings)}
    assert set(evaluate["benchmark"]) == benchmark
    task = {field.name for field in dataclasses.fields(TaskSettings)} - {"name"}
    assert set(evaluate["tasks"]["lambada"]) == task - {"generation"}


def test_the_documented_policy_is_the_default_one(hydra_config: Compose) -> None:
    policy = hydra_config()["evaluate"]["policy"]
    assert set(policy) == {field.name for field in dataclasses.fields(PolicySettings)}
    assert build(PolicySettings, policy, "evaluate.policy") == PolicySettings()


@pytest.mark.parametrize(
    "choice", ["gpt3/squad", "t5/boolq_generate", "t5/summarization", "t5/translation"]
)
def test_an_evaluation_of_one_task_has_every_key(hydra_config: Compose, choice: str) -> None:
    evaluate = hydra_config(f"evaluate={choice}")["evaluate"]
    assert evaluate["benchmark"] is None and evaluate["tasks"].pop("lambada") is None
    (name,) = evaluate["tasks"]
    assert name == choice.rpartition("/")[2]
    fields = {field.name for field in dataclasses.fields(TaskSettings)}
    assert set(evaluate["tasks"][name]) == fields - {"name"}
    generation = {field.name for field in dataclasses.fields(GenerationSettings)}
    assert set(evaluate["tasks"][name]["generation"]) == generation
    assert set(evaluate) == set(hydra_config()["evaluate"])


def test_a_former_name_chooses_the_same_task(hydra_config: Compose) -> None:
    former, today = (hydra_config(f"evaluate=t5/{name}") for name in ("boolq", "boolq_generate"))
    assert former["evaluate"] == today["evaluate"]
    assert TaskSettings("boolq", "/data").name == "boolq_generate"


def test_the_prompt_learned_for_a_task_is_used(hydra_config: Compose) -> None:
    for choice in ("gpt3/squad", "t5/boolq_generate"):
        (task,) = filter(None, hydra_config(f"evaluate={choice}")["evaluate"]["tasks"].values())
        assert task["generation"]["prompt_task"] == 0


def test_speed_is_measured_alone_and_with_the_lengths_of_the_guide(hydra_config: Compose) -> None:
    lengths = [[60, 20], [225, 20], [200, 200]]
    assert hydra_config()["evaluate"]["benchmark"]["lengths"] == lengths
    evaluate = hydra_config("evaluate=benchmark")["evaluate"]
    assert evaluate["benchmark"]["lengths"] == lengths
    assert not any(evaluate["tasks"].values())


def test_a_load_test_has_every_key_and_its_default(hydra_config: Compose) -> None:
    evaluate = hydra_config("evaluate=load")["evaluate"]
    assert build(LoadSettings, evaluate["load"], "the block") == LoadSettings()
    for kind, block in (
        (LoadSettings, evaluate["load"]),
        (LoadPrompts, evaluate["load"]["prompts"]),
        (GoodputBounds, evaluate["load"]["bounds"]),
    ):
        assert set(block) == {field.name for field in dataclasses.fields(kind)}
    assert evaluate["benchmark"] is None and not any(evaluate["tasks"].values())
    assert hydra_config()["evaluate"]["load"] is None


def test_int8_mode_false_is_zero(plan: Planner) -> None:
    for given, expected in (("False", None), ("True", "int8"), ("0", None), ("1", "int8")):
        override = f"export.triton_deployment.int8_mode={given}"
        made = plan("dry_run=True", override)
        assert made.stages[0].settings.quantization == expected


@pytest.mark.parametrize(("tp_size", "pp_size", "nodes", "devices"), NODES)
def test_the_documented_table_of_nodes_and_devices(
    plan: Planner, tp_size: int, pp_size: int, nodes: int, devices: str | None
) -> None:
    overrides = (
        "dry_run=True",
        "stages=[export,deploy]",
        f"export.model.tensor_model_parallel_size={tp_size}",
        f"export.triton_deployment.pipeline_model_parallel_size={pp_size}",
    )
    bcp = plan(*overrides, "cluster_type=bcp").stages[1]
    assert bcp.env().get("CUDA_VISIBLE_DEVICES") == devices
    slurm = plan(*overrides)
    server = slurm.stages[1]
    assert server.resources().nodes == bcp.resources().nodes == nodes
    # Slurm sets CUDA_VISIBLE_DEVICES itself, to the GPUs that the step asks for.
    assert "CUDA_VISIBLE_DEVICES" not in server.env()
    assert server.step_gpus() == (None if devices is None else len(devices.split(",")))
    assert f"#SBATCH --nodes={nodes}\n" in slurm.preview()


def test_the_documented_bcp_command_acts_from_any_directory(
    run: Run, tmp_path: Path, checkout: Path
) -> None:
    shown = []
    for script, cwd in (("main.py", tmp_path), ("launcher_scripts/main.py", checkout)):
        result = run(*BCP_ARGUMENTS, "dry_run=True", script=checkout / script, cwd=cwd)
        assert result.returncode == 0, result.stderr
        shown.append(result.stdout)
    assert len(set(shown)) == 1
    assert "bcprun \\\n    --nnodes 1 --npernode 1" in shown[0]
    settings = "/mount/results/gpt3_126m/export_tp2_pp1_auto_auto/jobs/001/export_gpt3_126m_hydra"
    assert f"--settings {settings}.yaml" in shown[0]
    assert "checkpoint_path: /mount/results/gpt3_126m/checkpoints" in shown[0]
