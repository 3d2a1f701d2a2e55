"""What is answered before any job starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from tests.login.conftest import LOCAL, Planner, write_nemo
from tests.login.test_defaults import CONFIG


@pytest.fixture
def problems(plan: Planner, arguments: list[str]) -> Callable[..., tuple[str, ...]]:
    """The problems that some overrides of a good configuration have."""

    def found(*overrides: str) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as raised:
            plan(LOCAL, *arguments, *overrides)
        return raised.value.problems

    return found


Finder = Callable[..., tuple[str, ...]]


def write_repository(
    folder: Path, name: str, tp_size: int, pp_size: int = 1, **parameters: object
) -> Path:
    """A repository with one model, as far as the login side looks into it; its config.pbtxt."""
    model = folder / name
    (model / "1" / f"{tp_size}-gpu").mkdir(parents=True)
    parameters = {
        "tensor_para_size": tp_size,
        "model_type": "GPT",
        "model_checkpoint_path": f"1/{tp_size}-gpu",
        **parameters,
    }
    lines = [
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
        for key, value in parameters.items()
    ]
    config = model / "config.pbtxt"
    config.write_text(
        f"""name: "{name}"
backend: "fastertransformer"
parameters {{
  key: "pipeline_para_size"
  value: {{
    string_value: "{pp_size}"
  }}
}}
{"".join(lines)}"""
    )
    return config


def test_a_good_configuration_has_none(plan: Planner, arguments: list[str]) -> None:
    stages = plan(LOCAL, "stages=[evaluate,deploy,export]", *arguments).stages
    assert [stage.name for stage in stages] == ["export", "deploy", "evaluate"]


def test_heads_are_divided_by_the_tensor_parallel_size(problems: Finder) -> None:
    (found,) = problems("export.model.tensor_model_parallel_size=3")
    assert "4 attention heads" in found
    assert "got 3; choices: 1, 2, 4" in found
    assert found.endswith("change export.model.tensor_model_parallel_size")


def test_there_are_as_many_layers_as_pipeline_stages(problems: Finder) -> None:
    (found,) = problems("export.triton_deployment.pipeline_model_parallel_size=3")
    assert "2 layers, fewer than pipeline stages; got 3; choices: 1-2" in found


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_the_sizes_of_every_kind_of_checkpoint_are_seen(
    problems: Finder, tmp_path: Path, mode: str
) -> None:
    path = write_nemo(tmp_path / "other.nemo", mode, num_layers=2, num_attention_heads=6)
    for checkpoint in (path, tmp_path / "other_content"):
        (found,) = problems(
            f"export.model.checkpoint_path={checkpoint}",
            "export.model.tensor_model_parallel_size=4",
        )
        assert "got 4; choices: 1, 2" in found


LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}


def write_transformers(folder: Path, text: str) -> tuple[str, str]:
    """A folder that looks like one of transformers; overrides that export it."""
    folder.mkdir()
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").touch()
    return f"export.model.checkpoint_path={folder}", "export.model.tokenizer=none"


def test_the_sizes_of_a_folder_of_transformers_are_seen(problems: Finder, tmp_path: Path) -> None:
    overrides = write_transformers(tmp_path / "llama", json.dumps(LLAMA))
    (found,) = problems(*overrides, "export.model.tensor_model_parallel_size=3")
    assert "12 attention heads" in found
    assert "got 3; choices: 1, 2, 4; change export.model.tensor_model_parallel_size" in found
    found = problems(*overrides, "export.triton_deployment.pipeline_model_parallel_size=4")
    assert any("the model has 3 layers" in each for each in found)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('{"model_type": "rwkv"}', "unknown model_type; got 'rwkv'; choices: afmoe"),
        ("[1]", "holds no mapping"),
        ("{", "config.json of .* is damaged"),
    ],
)
def test_a_folder_of_transformers_that_cannot_be_exported(
    problems: Finder, tmp_path: Path, text: str, answer: str
) -> None:
    (found,) = problems(*write_transformers(tmp_path / "model", text))
    assert re.search(answer, found)
    assert found.endswith("change export.model.checkpoint_path")


@pytest.mark.parametrize("changed", [{"rope_scaling": 7}, {"num_hidden_layers": 10**12}])
def test_what_only_the_conversion_can_judge_is_left_to_it(
    plan: Planner, arguments: list[str], tmp_path: Path, changed: dict[str, object]
) -> None:
    overrides = write_transformers(tmp_path / "llama", json.dumps(LLAMA | changed))
    assert plan(LOCAL, *arguments, *overrides).stages


def test_a_folder_with_one_checkpoint_stands_for_it(
    plan: Planner, arguments: list[str], nemo_file: Path
) -> None:
    folder = nemo_file.parent / "checkpoints"
    folder.mkdir()
    nemo_file.rename(folder / nemo_file.name)
    data = f"evaluate.tasks.lambada.data_file={folder}"
    made = plan(LOCAL, *arguments, f"export.model.checkpoint_path={folder}", data)
    assert made.stages[0].settings.checkpoint_path == str(folder / nemo_file.name)


def test_a_folder_with_two_checkpoints_is_ambiguous(problems: Finder, nemo_file: Path) -> None:
    (nemo_file.parent / "second.nemo").touch()
    (found,) = problems(f"export.model.checkpoint_path={nemo_file.parent}")
    assert "name one of them: model.nemo, second.nemo" in found


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("models", "it holds the checkpoints first, second, family/third: name one of them"),
        ("models/family/third/config.json", "one file of a checkpoint: name its folder"),
        ("trainings", "it holds the checkpoints a: name one of them"),
        ("iterations", "it holds the checkpoints iter_0000001, iter_0000002: name one of them"),
        ("adapter", "it is an adapter"),
        ("empty", "it holds no checkpoint of a known format"),
        ("notes.txt", "it is a file of no known format"),
    ],
)
def test_a_path_near_a_checkpoint_is_answered_before_a_job_starts(
    problems: Finder, nemo_file: Path, tmp_path: Path, path: str, reason: str
) -> None:
    models = tmp_path / "models"
    (models / "family").mkdir(parents=True)
    write_transformers(models / "family" / "third", "{}")
    nemo_file.rename(models / "first")  # a packed checkpoint without its suffix
    (models / "second").mkdir()
    (models / "second" / "model_config.yaml").write_text("num_layers: 2")
    for folder in ("trainings/a/iter_0000001", "iterations/iter_0000001"):
        for number in (1, 2):
            iteration = tmp_path / folder.replace("1", str(number)) / "mp_rank_00"
            iteration.mkdir(parents=True)
            (iteration / "model_optim_rng.pt").touch()
    (tmp_path / "trainings/a/latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("a")
    (found,) = problems(f"export.model.checkpoint_path={tmp_path / path}")
    assert reason in found


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no tar at all", "cannot read"),
        (None, "has no model_config.yaml"),
    ],
)
def test_a_broken_checkpoint_is_named(
    problems: Finder, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "broken.nemo"
    if content is None:
        with tarfile.open(path, "w") as archive:
            archive.add(__file__, "something.py")
    else:
        path.write_bytes(content)
    (found,) = problems(f"export.model.checkpoint_path={path}")
    assert reason in found
    assert str(path) in found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["pipe.nemo", "pipe"])
def test_a_pipe_is_no_checkpoint(problems: Finder, tmp_path: Path, name: str) -> None:
    """Nobody writes to it: opening it would wait without end."""
    os.mkfifo(tmp_path / name)
    (found,) = problems(f"export.model.checkpoint_path={tmp_path / name}")
    assert "it is not a plain file" in found


def test_a_path_of_5000_characters(problems: Finder, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 5000)
    (found,) = problems(f"export.model.checkpoint_path={path}")
    assert "File name too long" in found


def test_an_earlier_export_is_not_replaced(
    problems: Finder, plan: Planner, arguments: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "the results/tiny/export_tp2_pp1_auto_auto/model_repo/tiny/1/2-gpu"
    folder.mkdir(parents=True)
    (found,) = problems("export.model.reuse=False")
    assert str(folder) in found
    assert "export.model.overwrite=True" in found
    assert "without its config.pbtxt" in found
    assert "write_model_repository --settings" in found and "export_tiny_hydra.yaml" in found
    (folder.parents[1] / "config.pbtxt").touch()
    (found,) = problems("export.model.reuse=False")
    assert "overwrite=True to replace it, or export.model.reuse=True" in found
    assert "write_model_repository" not in found
    for key in ("overwrite", "reuse"):
        assert plan(LOCAL, *arguments, f"export.model.{key}=True").stages
    assert plan(LOCAL, *arguments).stages


def test_the_folder_has_the_name_of_the_model(problems: Finder) -> None:
    (found,) = problems("export.triton_deployment.triton_model_dir=/tmp/other")
    assert "must be called tiny; got '/tmp/other'" in found


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("export.model.checkpoint_path=/nowhere/x.nemo", "the checkpoint is not there"),
        ("launcher_scripts_path=/nowhere/launcher_scripts", "the step convert_checkpoint"),
        ("export.run.time_limit=soon", "days-hours:minutes:seconds"),
        (
            "export.run.model_type=bert",
            "choices: gpt3, t5, mt5, t5-encoder, agm, bart; change export.run.model_type",
        ),
        ("export.run.name=a/b", "part of file names"),
        ("export.run.model_train_name=ensemble", "none of preprocessing, postprocessing, ensemble"),
        ("export.run.model_train_name=..", "a model's name is that of a folder"),
        ("export.run.model_train_name=a/b", "a model's name is that of a folder"),
        ("export.run.model_train_name='a $(touch x)'", "a model's name is that of a folder"),
        ("export.model.weight_data_type=int8", "choices: auto, fp32, fp16"),
        ("export.triton_deployment.data_type=int4", "choices: auto, fp32, fp16, bf16"),
        ("export.model.processes=0", "processes must be at least 1"),
        ("export.model.checkpoint_path=null", "checkpoint_path must be text, not null"),
        ("env_vars=null", "env_vars must be a mapping, not null"),
        ("export.model.processes=many", "export.model.processes must be a whole number"),
        ("export.model.tensor_model_parallel_size=0", "must be at least 1"),
        ("export.model.overwrite=2", "export.model.overwrite must be True or False"),
        ("export.model.tokenizer=mine", "a mapping with library"),
        ("export.model.tokenizer={vocab_file:/nowhere/v,merge_file:/nowhere/m}", "vocab_file is"),
        ("export.model.tokenizer={library:megatron}", "names its files"),
        ("export.model.tokenizer={model:x,start:1}", "no key start"),
        ("+env_vars.A-B=1", "not a name of an environment variable; got 'A-B'"),
        ("container_mounts=[/a:/b:/c:/d]", "a mount is source"),
        ("container_mounts=['/a,b']", "without comma and colon"),
        ("container_mounts=[relative]", "must be absolute"),
    ],
)
def test_one_answer_for_one_mistake(problems: Finder, override: str, answer: str) -> None:
    assert any(answer in found for found in problems("stages=[export]", override))


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("deploy.server.http_port=70000", "1-65535; change deploy.server.http_port"),
        ("deploy.server.device=tpu", "choices: auto, cpu, cuda"),
        ("deploy.server.tritonserver=/nowhere/tritonserver", "the server is not there"),
        ("deploy.run.nodes=0", "nodes must be at least 1"),
        ("deploy.run.nodes=2", "2 ranks need 2 nodes, and this cluster type has 1"),
        ("cluster.gpus_per_node=1", "2 ranks need 2 nodes, and this cluster type has 1"),
        (
            "evaluate.tasks.lambada.data_file=/nowhere/x",
            "data_file of the task lambada is not there",
        ),
        ("evaluate.tasks.lambada.limit=0", "limit must be at least 1"),
        ("+evaluate.tasks.squid={data_file:/x}", "unknown evaluation task; got 'squid'"),
        ("evaluate.model_name=large", "no such model; got 'large'; choices: tiny"),
        ("evaluate.benchmark.batch_sizes=[0]", "batch_sizes must hold numbers of at least 1"),
        ("evaluate.benchmark.lengths=[[60]]", "lengths[0] must have 2 members"),
        ("evaluate.protocol=ftp", "choices: http, grpc"),
        ("evaluate.twin={checkpoint:/nowhere/x}", "the twin's checkpoint is not there"),
        ("evaluate.twin={runner:jax}", "choices: auto, transformers, core, nemo, engine"),
    ],
)
def test_one_answer_for_one_mistake_in_serving(
    problems: Finder, override: str, answer: str
) -> None:
    found = problems("stages=[export,deploy,evaluate]", override)
    assert any(answer in message for message in found), found


def test_two_equal_ports(problems: Finder) -> None:
    equal = ("deploy.server.grpc_port=4567", "deploy.gateway.port=4567")
    found = problems("stages=[export,deploy]", *equal)
    assert any("two of the server's ports are equal" in message for message in found)


@pytest.mark.parametrize(("container", "checked"), [("null", True), ("/images/a.sqsh", False)])
def test_files_of_the_server_are_looked_for_where_it_runs(
    plan: Planner, arguments: list[str], container: str, checked: bool
) -> None:
    """In a container they are other files than here."""
    server = "deploy.server.tritonserver=/nowhere/tritonserver"
    numpy = "deploy.server.numpy_dir=/nowhere/numpy"
    with pytest.raises(ConfigError) as raised:
        overrides = ("cluster_type=bcm", f"container={container}", server, numpy)
        plan(*arguments, "stages=[export,deploy]", *overrides, "deploy.replicas=0")
    found = "\n".join(raised.value.problems)
    assert ("the server is not there" in found) is checked
    assert ("the folder with numpy is not there" in found) is checked


def test_a_model_is_asked_what_it_can_answer(problems: Finder, tmp_path: Path) -> None:
    stages = "stages=[export,deploy,evaluate]"
    (found,) = problems(stages, "export.run.model_type=t5")
    assert "lambada scores prompts, which a decoder-only model alone can; got 'T5'" in found
    (found,) = problems(stages, "export.run.model_type=t5-encoder")
    assert "tiny generates no tokens" in found and "change evaluate=t5/evaluate_t5_encoder" in found
    write_repository(tmp_path / "served", "tiny", 1, model_type="T5")
    (found,) = problems("stages=[deploy,evaluate]", f"deploy.model_repository={tmp_path}/served")
    assert "lambada scores prompts" in found


@pytest.mark.parametrize(
    ("family", "tasks"),
    [
        ("agm", ("lambada", "summarization")),
        ("bart", ("summarization",)),
        ("t5_encoder", ("encode",)),
    ],
)
def test_every_family_has_an_evaluation(
    plan: Planner, arguments: list[str], family: str, tasks: tuple[str, ...]
) -> None:
    folder = "t5" if family == "t5_encoder" else family
    chosen = (f"export={folder}/export_{family}", f"evaluate={folder}/evaluate_{family}")
    given = [*arguments[:-1], "dry_run=True", *chosen]
    made = plan(LOCAL, "stages=[export,deploy,evaluate]", *given)
    settings = made.stages[2].settings
    assert tuple(task.name for task in settings.tasks) == tasks
    assert settings.benchmark is not None


def test_states_are_measured_of_an_encoder_alone(plan: Planner, arguments: list[str]) -> None:
    chosen = ("dry_run=True", "evaluate=t5/evaluate_t5_encoder")
    with pytest.raises(ConfigError, match=r"which an encoder alone gives; got 'GPT'"):
        plan(LOCAL, "stages=[export,deploy,evaluate]", *arguments[:-1], *chosen)


def test_nothing_to_measure(problems: Finder) -> None:
    (found,) = problems(
        "stages=[export,deploy,evaluate]", "evaluate.tasks.lambada=null", "evaluate.benchmark=null"
    )
    assert "nothing to measure; change evaluate.tasks or evaluate.benchmark" in found


def test_a_task_or_the_benchmark_can_be_left_out(plan: Planner, arguments: list[str]) -> None:
    stages = "stages=[export,deploy,evaluate]"
    made = plan(LOCAL, stages, *arguments, "evaluate.tasks.lambada=null")
    assert made.stages[2].step_names() == ("measure_speed", "judge")
    made = plan(LOCAL, stages, *arguments, "evaluate.benchmark=null")
    assert made.stages[2].step_names() == ("measure_accuracy", "judge")
    made = plan(LOCAL, stages, *arguments, "evaluate.policy=null")
    assert made.stages[2].step_names() == ("measure_accuracy", "measure_speed")
    twin = ("evaluate.benchmark=null", "evaluate.tasks.lambada=null", "evaluate.twin={}")
    made = plan(LOCAL, stages, *arguments, *twin)
    assert made.stages[2].step_names() == ("measure_twin", "judge")


def test_a_policy_may_be_a_file(
    plan: Planner, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "{if_measured: null, twin: {max_kl: 0.5}, baseline: {report: earlier.json}}"
    (tmp_path / "policy.yaml").write_text(text)
    (tmp_path / "earlier.json").touch()
    stages = "stages=[export,deploy,evaluate]"
    monkeypatch.chdir(tmp_path)
    evaluate = plan(LOCAL, stages, *arguments, "evaluate.policy=policy.yaml").stages[2]
    policy = evaluate.settings.policy
    assert (policy.twin.max_kl, policy.if_measured, policy.min_items) == (0.5, None, 30)
    assert policy.baseline.report == str(tmp_path / "earlier.json")
    assert tmp_path / "earlier.json" in evaluate.paths()


def test_what_a_policy_names_must_be_there(problems: Finder) -> None:
    found = "\n".join(
        problems(
            "stages=[export,deploy,evaluate]",
            "evaluate.policy.baseline={report:/no/report.json}",
            "evaluate.policy.if_measured.baseline={report:/no/other.json}",
        )
    )
    assert "'/no/report.json'; change evaluate.policy.baseline.report" in found
    assert "'/no/other.json'; change evaluate.policy.if_measured.baseline.report" in found


def test_a_load_test_is_a_step_of_its_own(
    plan: Planner, problems: Finder, arguments: list[str], tmp_path: Path
) -> None:
    stages = "stages=[export,deploy,evaluate]"
    (tmp_path / "trace").write_text("{}")
    made = plan(LOCAL, stages, *arguments, f"evaluate.load={{trace_file: {tmp_path}/trace}}")
    assert made.stages[2].step_names() == (
        "measure_accuracy",
        "measure_speed",
        "measure_load",
        "judge",
    )
    assert tmp_path / "trace" in made.stages[2].paths()
    (found,) = problems(stages, "evaluate.load={api_key_file: /nowhere/key}")
    assert "the load test's api_key_file is not there" in found
    (found,) = problems(stages, "evaluate.load={paths: [udp]}")
    assert "unknown path; got 'udp'; choices: gateway, grpc, http" in found


def test_every_stage_speaks_at_once(problems: Finder) -> None:
    found = problems(
        "stages=[export,deploy,evaluate]",
        "export.model.processes=0",
        "deploy.server.http_port=-1",
        "evaluate.tasks.lambada.batch_size=0",
        "export.run.time_limit=soon",
    )
    text = "\n".join(found)
    for part in ("processes", "http_port", "batch_size", "export.run.time_limit"):
        assert part in text
    assert len(found) == len(set(found))


def test_ranks_fill_the_nodes(plan: Planner, arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot be divided evenly over 2 nodes"):
        plan(
            *("stages=[export,deploy]", "dry_run=True", "cluster.gpus_per_node=2", *arguments),
            "export.model.checkpoint_path=/nowhere",
            "export.model.tensor_model_parallel_size=3",
        )
    with pytest.raises(ConfigError, match="2 ranks on 1 nodes need 2 GPUs on each; got 1"):
        plan(
            *("stages=[export,deploy]", "dry_run=True", "cluster.gpus_per_node=1", *arguments),
            "deploy.run.nodes=1",
        )


def test_deploying_needs_a_repository(problems: Finder, tmp_path: Path) -> None:
    (found,) = problems("stages=[deploy]")
    assert "the model repository ('stages=[export,deploy]' writes it first) is not there" in found
    (tmp_path / "empty").mkdir()
    (found,) = problems("stages=[deploy]", f"deploy.model_repository={tmp_path / 'empty'}")
    assert "no model of the repository names the fastertransformer backend" in found


def test_another_repository_brings_its_own_sizes(
    plan: Planner, arguments: list[str], tmp_path: Path
) -> None:
    repository = tmp_path / "other"
    write_repository(repository, "big", 4, 2)
    write_repository(repository, "small", 2)
    made = plan(
        *("cluster_type=bcm", "dry_run=True", "stages=[deploy,evaluate]", *arguments),
        f"deploy.model_repository={repository}",
        "cluster.gpus_per_node=4",
        "evaluate.model_name=small",
    )
    deploy, evaluate = made.stages
    assert deploy.resources().nodes == 2
    assert evaluate.settings.tokenizer_dir == str(repository / "small/1/2-gpu")


def test_the_sizes_of_random_weights_are_looked_at(problems: Finder, tmp_path: Path) -> None:
    source = tmp_path / "config.ini"
    sizes = "size_per_head=4\ninter_size=24\nnum_layer=2\nvocab_size=9\n"
    source.write_text(f"[gpt]\nhead_num=6 ;comment\n{sizes}")
    random = ["export.model.source=random", f"export.model.checkpoint_path={source}"]
    found = problems(
        *random,
        "export.model.tokenizer=none",
        "export.model.tensor_model_parallel_size=4",
        "export.triton_deployment.pipeline_model_parallel_size=3",
    )
    assert (
        "cannot be divided into this many tensor-parallel parts; got 4; choices: 1, 2" in found[0]
    )
    assert "the model has 2 layers, fewer than pipeline stages; got 3" in found[1]
    (found,) = problems(*random, "export.model.tensor_model_parallel_size=2")
    assert "random weights come without a tokenizer" in found


@pytest.mark.parametrize("mode", [2, 3])
def test_smoothquant_is_refused_before_a_job_starts(
    problems: Finder, tmp_path: Path, mode: int
) -> None:
    (found,) = problems(f"export.triton_deployment.int8_mode={mode}")
    assert found == (
        f"this int8_mode is not supported; got {mode}; choices: 0 (no quantization), "
        "1 (int8 weights, made at load); change export.triton_deployment.int8_mode"
    )
    config = write_repository(tmp_path / "served", "tiny", 1, int8_mode=mode)
    found = problems("stages=[deploy]", f"deploy.model_repository={tmp_path / 'served'}")
    assert f"not supported; got {mode}" in found[0]
    assert f"change int8_mode in {config}" in found[0]


@pytest.mark.parametrize(
    ("mode", "quantization", "says"),
    [
        ("0", "fp4", "unknown {}; got 'fp4'; choices: fp8, int4, int8, mxfp4, nvfp4; change {}"),
        ("1", "fp8", "int8_mode 1 and quantization fp8 exclude each other"),
    ],
)
def test_a_quantization_that_there_is_not_is_refused_before_a_job_starts(
    problems: Finder, tmp_path: Path, mode: str, quantization: str, says: str
) -> None:
    block = "export.triton_deployment"
    asked = {"int8_mode": mode, "quantization": quantization}
    (found,) = problems(*(f"{block}.{name}={value}" for name, value in asked.items()))
    key = f"{block}.quantization"
    assert says.format(key, key) in found
    config = write_repository(tmp_path / "served", "tiny", 1, **asked)
    found = problems("stages=[deploy]", f"deploy.model_repository={tmp_path / 'served'}")
    key = f"quantization in {config}"
    assert says.format(key, key) in found[0]


def test_a_kv_cache_dtype_that_there_is_not_is_refused_before_a_job_starts(
    problems: Finder, tmp_path: Path
) -> None:
    key = "export.triton_deployment.kv_cache_dtype"
    (found,) = problems(f"{key}=fp4")
    assert f"got 'fp4'; choices: auto, fp8; change {key}" in found
    config = write_repository(tmp_path / "served", "tiny", 1, kv_cache_dtype="fp4")
    found = problems("stages=[deploy]", f"deploy.model_repository={tmp_path / 'served'}")
    assert "got 'fp4'; choices: auto, fp8" in found[0]
    assert f"kv_cache_dtype in {config}" in found[0]


def test_a_repository_without_sizes_is_named(problems: Finder, tmp_path: Path) -> None:
    model = tmp_path / "other" / "odd"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "fastertransformer"')
    found = problems("stages=[deploy]", f"deploy.model_repository={model.parent}")
    assert any("must say tensor_para_size" in message for message in found)


def test_evaluating_alone_needs_a_running_server(problems: Finder, tmp_path: Path) -> None:
    write_repository(tmp_path / "repository", "tiny", 2)
    (found,) = problems("stages=[evaluate]", f"deploy.model_repository={tmp_path / 'repository'}")
    assert "the ready file of a running server" in found
    assert "change evaluate.ready_file" in found


def test_paths_in_the_container_are_looked_for_on_the_host(
    plan: Planner, arguments: list[str], nemo_file: Path
) -> None:
    made = plan(
        *("dry_run=True", *arguments),
        f"container_mounts=['{nemo_file.parent}:/models:ro']",
        "container=image",
        "export.model.checkpoint_path=/models/model.nemo",
    )
    assert not any("checkpoint" in note and "/models" in note for note in made.absent)
    assert "/models:ro" in made.preview()


@pytest.mark.parametrize("mode", ["w", "w:gz", "folder"])
def test_a_checkpoint_that_lost_its_tokenizer_is_found_before_a_job_starts(
    problems: Finder, plan: Planner, arguments: list[str], tmp_path: Path, mode: str
) -> None:
    """As NeMo's resharding leaves it."""
    path = write_nemo(
        tmp_path / "lost.nemo",
        mode if mode != "folder" else "w",
        num_layers=2,
        num_attention_heads=4,
        tokenizer={"library": "megatron", "merge_file": "nemo:0_merges.txt", "vocab_file": None},
    )
    given = (
        f"export.model.checkpoint_path={tmp_path / 'lost_content' if mode == 'folder' else path}"
    )
    (found,) = problems(given)
    assert "lost.nemo" in found or "lost_content" in found
    assert "does not hold its tokenizer's files (megatron); got ['nemo:0_merges.txt']" in found
    assert "; change export.model.tokenizer: name the files" in found
    assert plan(LOCAL, *arguments, given, "export.model.tokenizer=none").stages


def test_a_name_on_the_hub_is_no_path(problems: Finder) -> None:
    (found,) = problems("export.model.checkpoint_path=org/model-1B")
    assert "it looks like the name of a model on a hub" in found
    assert "run `hf download org/model-1B --local-dir FOLDER` first" in found


@pytest.mark.parametrize("kind", ["megatron", "bridge", "inner", "transformers"])
def test_a_folder_without_its_tokenizer_is_found_before_a_job_starts(
    problems: Finder, plan: Planner, arguments: list[str], tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "checkpoint"
    inner = folder / "iter_0000001" / "tokenizer" if kind == "bridge" else folder
    inner.mkdir(parents=True)
    mark = "config.json" if kind == "transformers" else "latest_checkpointed_iteration.txt"
    mark = f"ckpt/{mark}" if kind == "inner" else mark
    (folder / mark).parent.mkdir(exist_ok=True)
    if kind == "inner":
        (folder / "ckpt" / "metadata.json").write_text("{}")
    (folder / mark).write_text("{}" if kind == "transformers" else "1")
    given = f"export.model.checkpoint_path={folder}"
    (inner / "vocab.json").write_text("{}")
    (found,) = problems(given)
    assert f"{folder} holds no tokenizer; put the files of one of these sets into that" in found
    assert "folder; choices: tokenizer.json, spiece.model" in found
    assert "; change export.model.tokenizer: name the files" in found
    assert plan(LOCAL, *arguments, given, "export.model.tokenizer=none").stages
    (inner / "merges.txt").write_text("")
    assert plan(LOCAL, *arguments, given).stages


@pytest.mark.parametrize("stage", ["export", "deploy", "evaluate"])
def test_packages_that_the_job_s_python_lacks_are_named_before_anything_is_written(
    problems: Finder, tmp_path: Path, stage: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    missing = [
        text
        for text in problems("stages=[export,deploy,evaluate]", f"cluster.python={python}")
        if text.startswith(f"the Python of the {stage} stage does not have ")
    ]
    assert len(missing) == 1
    assert "numpy" in missing[0]
    assert f"got '{python}'; change name an interpreter that has them as cluster" in missing[0]
    assert ("torch" in missing[0]) == (stage == "deploy")


@pytest.mark.parametrize(
    ("key", "stages"),
    [
        *((f"deploy.server.{kind}_port", "export,deploy") for kind in ("http", "grpc", "metrics")),
        ("deploy.gateway.port", "export,deploy"),
        ("gateway.port", "export,deploy,gateway"),
    ],
)
def test_a_taken_port_is_named_before_the_export(
    problems: Finder, plan: Planner, arguments: list[str], key: str, stages: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = problems(f"stages=[{stages}]", f"{key}={port}")
        change = f"change {key} (0: a free one)"
        assert found == f"the port is in use by another program; got {port}; {change}"
        more = ["dry_run=True", LOCAL, *arguments, f"stages=[{stages}]", f"{key}={port}"]
        assert any("the port is in use" in text for text in plan(*more).absent)
        others = ["cluster_type=bcp", *more[2:], "dry_run=True"]
        assert not any("the port is in use" in text for text in plan(*others).absent)


def test_a_full_disk_is_named_before_the_export(
    problems: Finder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").touch()
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    checkpoint = f"export.model.checkpoint_path={folder}"
    (found,) = problems(checkpoint, "export.model.tokenizer=none")
    assert "needs about 13.2 GB of files; got '1.0 GB free on that disk'" in found
    fp32 = "export.model.weight_data_type=fp32"
    (found,) = problems(checkpoint, "export.model.tokenizer=none", fp32)
    assert "needs about 26.4 GB" in found
