"""`auto` keys, and later command lines that leave out the keys of the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.hosts import Gpu
from stages import choices
from tests.login.conftest import LOCAL, Compose, Planner, write_nemo

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GIB = 1 << 30


@pytest.fixture
def seven_billions(tmp_path: Path) -> str:
    """The configuration of a model whose weights take 13.5 GB in bf16."""
    folder = tmp_path / "seven"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").touch()
    return f"export.model.checkpoint_path={folder}"


@pytest.mark.parametrize(
    ("gpus", "more", "tp_size"),
    [
        ([], (), 1),
        ([80], (), 1),
        ([80, 80, 80, 80], (), 1),
        ([16, 16, 16, 16], (), 2),
        ([8, 8, 8, 8], (), 4),
        ([8, 8, 8], (), 2),
        ([4, 4], (), 2),
        ([16, 16], ("export.triton_deployment.quantization=int8",), 1),
        ([16] * 4, ("export.triton_deployment.data_type=fp32",), 4),
        ([16, 16], ("deploy.server.device=cpu",), 1),
        ([8, 8, 8, 8], ("cluster.gpus_per_node=2",), 2),
    ],
)
def test_a_model_is_divided_as_its_memory_needs(
    hydra_config: Compose,
    seven_billions: str,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[int],
    more: tuple[str, ...],
    tp_size: int,
) -> None:
    monkeypatch.setattr(choices, "visible_gpus", lambda: [Gpu(size * GIB, 9.0) for size in gpus])
    values = hydra_config(LOCAL, seven_billions, *more)
    assert values["export"]["model"]["tensor_model_parallel_size"] == tp_size
    assert f"export_tp{tp_size}_" in values["export"]["run"]["results_dir"]


def test_on_a_cluster_the_gpus_are_those_of_a_node(
    hydra_config: Compose, seven_billions: str
) -> None:
    def size(*overrides: str) -> Any:
        return hydra_config(*overrides)["export"]["model"]["tensor_model_parallel_size"]

    assert size() == 8  # the checkpoint cannot be read here
    assert size("export=t5/export_t5", "cluster.gpus_per_node=2") == 2
    assert size("cluster.gpus_per_node=null") == 1
    assert size("cluster.gpus_per_node=a100:4") == 4
    assert size(seven_billions) == 1
    assert size("export.model.tensor_model_parallel_size=4", seven_billions) == 4


def test_heads_decide_where_the_files_do_not_tell_the_memory(
    hydra_config: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_nemo(tmp_path / "six.nemo", num_layers=2, num_attention_heads=6)
    monkeypatch.setattr(choices, "visible_gpus", lambda: [Gpu(1, 9.0)] * 8)
    config = hydra_config(LOCAL, f"export.model.checkpoint_path={path}")
    assert config["export"]["model"]["tensor_model_parallel_size"] == 2  # heads 6, MLP 64


def test_a_model_with_a_gateway_streams(hydra_config: Compose) -> None:
    def streams(*overrides: str) -> Any:
        return hydra_config(*overrides)["export"]["triton_deployment"]["decoupled"]

    assert not streams()
    assert streams("deploy.gateway.port=0") and streams("stages=[export,deploy,gateway]")
    assert not streams("deploy.gateway.port=0", "export.triton_deployment.decoupled=False")
    assert not streams("deploy.gateway.port=0", "export=t5/export_t5_encoder")
    assert streams("export.triton_deployment.decoupled=True")


@pytest.fixture
def results(tmp_path: Path) -> list[str]:
    """A running server of `m`, in a folder with the names of explicit keys."""
    summary = "tp2_pp1_fp16_fp16"
    model = tmp_path / f"m/export_{summary}/model_repo/m"
    model.mkdir(parents=True)
    (model / "config.pbtxt").touch()
    deployed = tmp_path / f"m/deploy_{summary}"
    deployed.mkdir()
    (deployed / "ready.json").touch()
    return [LOCAL, f"base_results_dir={tmp_path}", "export.run.model_train_name=m"]


@pytest.mark.parametrize("stages", ["evaluate", "deploy", "gateway", "deploy,evaluate"])
def test_a_later_command_needs_no_keys_of_the_export(
    hydra_config: Compose, results: list[str], stages: str, tmp_path: Path
) -> None:
    for more in ((), ("export.model.tensor_model_parallel_size=2",)):
        values = hydra_config(*results, f"stages=[{stages}]", *more)
        assert values["export"]["run"]["config_summary"] == "tp2_pp1_fp16_fp16"
        assert values["deploy"]["model_repository"].startswith(str(tmp_path / "m/export_tp2_pp1_f"))
    other = hydra_config(
        *results, f"stages=[{stages}]", "export.model.tensor_model_parallel_size=4"
    )
    assert other["export"]["run"]["config_summary"] == "tp4_pp1_auto_auto"


def test_without_a_server_of_the_name_the_others_are_listed(
    plan: Planner, results: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        plan(*results, "export.run.model_train_name=other", "stages=[evaluate]")
    assert f"is not there; there are {tmp_path}/m/deploy_tp2_pp1_fp16_fp16/ready.json" in str(
        error.value
    )


def test_one_of_several_servers_must_be_named(
    hydra_config: Compose, results: list[str], tmp_path: Path
) -> None:
    other = tmp_path / "m/deploy_tp1_pp1_auto_auto"
    other.mkdir()
    (other / "ready-1.json").touch()
    with pytest.raises(
        ConfigError, match=r"m has several servers; choices: .*tp1.*, .*tp2"
    ) as error:
        hydra_config(*results, "stages=[evaluate]")
    assert "change export.run.config_summary" in str(error.value)
    summary = "export.run.config_summary=tp2_pp1_fp16_fp16"
    (other.parent / "deploy_tp2_pp1_fp16_fp16/ready-0.json").touch()
    assert hydra_config(*results, "stages=[evaluate]", summary)


@pytest.fixture
def exported(results: list[str], tmp_path: Path) -> list[str]:
    """The keys of a later command for a model that was exported with a batch size of 8."""
    parameters = {
        "tensor_para_size": "1",
        "pipeline_para_size": "1",
        "data_type": "fp16",
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": "1",
    }
    lines = ['backend: "fastertransformer"', "max_batch_size: 8"]
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}')
    config = tmp_path / "m/export_tp2_pp1_fp16_fp16/model_repo/m/config.pbtxt"
    config.write_text("\n".join(lines))
    ports = [f"deploy.server.{kind}_port=0" for kind in ("http", "grpc", "metrics")]
    return [*results, *ports, "stages=[deploy]"]


def test_serving_options_of_an_exported_model_need_the_export(
    plan: Planner, exported: list[str], tmp_path: Path
) -> None:
    key = "export.triton_deployment"
    same = ("max_batch_size=8", "data_type=fp16", "int8_mode=False", "enable_prefix_caching=null")
    (stage,) = plan(*exported, *(f"{key}.{option}" for option in same)).stages
    assert stage.name == "deploy"
    other = ("max_batch_size=4", "kv_cache_dtype=fp8", "decoupled=True", "data_type=bf16")
    with pytest.raises(ConfigError) as error:
        plan(*exported, *(f"{key}.{option}" for option in other))
    message = str(error.value)
    assert message.startswith("4 problems")
    for name, served, value in (
        ("max_batch_size", "8", "4"),
        ("kv_cache_dtype", "auto", "'fp8'"),
        ("decoupled", "False", "True"),
        ("data_type", "fp16", "'bf16'"),
    ):
        has = f"/model_repo/m/config.pbtxt has {served}; got {value}; change 'stages="
        start = f"{key}.{name} has no effect without the stage export: {tmp_path}"
        assert any(start in line and has in line for line in message.splitlines()), message
