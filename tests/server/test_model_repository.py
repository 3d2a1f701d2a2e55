"""What an exported repository holds, byte for byte, and when it is refused.

`pytest tests/server/test_model_repository.py --update-golden` rewrites the files after a wanted
change.
"""

from __future__ import annotations

import importlib.util
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.model_repository import ModelRepository, check_text_models
from launcher_scripts.common.errors import CheckpointError, ConfigError, LauncherError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import DeploySettings, write_settings
from launcher_scripts.contract.tensors import GPT_INPUTS, GPT_OUTPUTS
from launcher_scripts.contract.text_names import SAME_AS
from launcher_scripts.models.repository import config_parameters, served_models
from launcher_scripts.steps import start_server, write_model_repository
from tests.conftest import Golden
from tests.server.repositories import export, export_settings, text_config, write_weights

TEXT_MODELS = ("ensemble", "postprocessing", "preprocessing", "text")


def parse(path: Path) -> Any:
    """The ModelConfig message of a config.pbtxt, read by protobuf itself."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def tree(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_configurations_are_the_golden_ones(tmp_path: Path, golden: Golden) -> None:
    settings = export(tmp_path, tp=2, pp=2, data_type="bf16")
    for model in ("tiny", *TEXT_MODELS):
        text = (settings.model_repository / model / "config.pbtxt").read_text()
        golden(f"model_repository/{model}.pbtxt", text)


def test_configurations_with_sessions_are_the_golden_ones(tmp_path: Path, golden: Golden) -> None:
    settings = export(tmp_path, max_batch_size=1, interactive=True, decoupled=True)
    for model in ("tiny", *TEXT_MODELS[:3]):
        text = (settings.model_repository / model / "config.pbtxt").read_text()
        golden(f"model_repository/interactive/{model}.pbtxt", text)


def test_sessions_have_what_the_contract_says(tmp_path: Path) -> None:
    settings = export(tmp_path, max_batch_size=1, interactive=True, interactive_sessions=5)
    config = parse(settings.model_repository / "tiny" / "config.pbtxt")
    inputs = {tensor.name: tensor for tensor in config.input}
    assert list(inputs["input_ids"].dims) == [-1, -1]
    assert list(inputs["stop_words_list"].dims) == [-1, 2, -1]
    for name in ("input_lengths", "session_len", "memory_len"):
        assert list(inputs[name].dims) == [-1, 1]
        assert list(inputs[name].reshape.shape) == [-1]
    assert not any(tensor.allow_ragged_batch for tensor in config.input)
    outputs = {tensor.name: list(tensor.dims) for tensor in config.output}
    assert (outputs["output_ids"], outputs["sequence_length"]) == ([-1, -1, -1], [-1, -1])
    assert config.max_batch_size == 1
    assert not config.HasField("dynamic_batching")
    batching = config.sequence_batching
    assert batching.max_sequence_idle_microseconds == 60_000_000
    assert batching.oldest.max_candidate_sequences == 5
    assert [control.name for control in batching.control_input] == ["START", "END"]


def test_sessions_serve_one_request_at_a_time() -> None:
    with pytest.raises(ConfigError, match="a model with sessions has max_batch_size 1"):
        export_settings(Path("unused"), max_batch_size=4, interactive=True)
    with pytest.raises(ConfigError, match="interactive_sessions must be at least 1"):
        export_settings(Path("unused"), interactive_sessions=0)


def test_the_model_is_what_the_contract_says(tmp_path: Path) -> None:
    settings = export(tmp_path, tp=2, enable_custom_all_reduce=True, max_batch_size=5)
    config = parse(settings.model_repository / "tiny" / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("tiny", "fastertransformer", 5)
    assert [tensor.name for tensor in config.input] == [spec.name for spec in GPT_INPUTS]
    assert [tensor.name for tensor in config.output] == [spec.name for spec in GPT_OUTPUTS]
    for tensor, spec in zip(config.input, GPT_INPUTS, strict=True):
        assert tuple(tensor.dims) == spec.dims
        assert tensor.HasField("reshape") == spec.scalar
        assert list(tensor.reshape.shape) == []
        assert (tensor.optional, tensor.allow_ragged_batch) == (spec.optional, spec.ragged)
    (shape,) = config.batch_input
    assert shape.Kind.Name(shape.kind) == "BATCH_ITEM_SHAPE"
    assert list(shape.target_name) == ["input_ids_item_shape"]
    assert list(shape.source_input) == ["input_ids"]
    (group,) = config.instance_group
    assert (group.count, group.Kind.Name(group.kind)) == (1, "KIND_CPU")
    assert config.HasField("dynamic_batching")
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "tensor_para_size": "2",
        "pipeline_para_size": "1",
        "data_type": "fp32",
        "model_type": "GPT",
        "model_checkpoint_path": "1/2-gpu",
        "int8_mode": "0",
        "kv_cache_dtype": "auto",
        "enable_custom_all_reduce": "1",
        "inter_token_target": "0.05",
        "enable_prefix_caching": "1",
        "deterministic": "0",
    }


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ({}, "1"),
        ({"model_type": ""}, "1"),
        ({"model_type": "t5"}, "0"),
        ({"deterministic": True}, "0"),
        ({"interactive": True}, "0"),
        ({"enable_prefix_caching": False}, "0"),
        ({"enable_prefix_caching": True}, "1"),
    ],
)
def test_prompts_share_what_they_have_in_common_where_they_can(
    asked: dict[str, object], written: str
) -> None:
    settings = export_settings(Path("unused"), max_batch_size=1, **asked)
    assert str(int(settings.shares_prefixes)) == written


@pytest.mark.parametrize(
    ("quantization", "written"),
    [(None, ("0", None)), ("int8", ("1", None)), ("fp8", ("0", "fp8"))],
)
def test_int8_is_said_as_ever_and_fp8_by_a_parameter_of_its_own(
    tmp_path: Path, quantization: str | None, written: tuple[str, str | None]
) -> None:
    settings = export(tmp_path, quantization=quantization)
    text = (settings.model_repository / "tiny" / "config.pbtxt").read_text()
    found = config_parameters(text)
    assert (found["int8_mode"], found.get("quantization")) == written


def test_a_draft_model_in_the_repository_moves_with_it(tmp_path: Path) -> None:
    beside, away = (tmp_path / name / "1-gpu" for name in ("model_repo/small/1", "elsewhere"))
    for folder, said in ((beside, "../small/1/1-gpu"), (away, str(away))):
        settings = export_settings(tmp_path, draft_model_dir=str(folder), overwrite=True)
        if not settings.checkpoint_dir.exists():
            write_weights(settings)
        ModelRepository(settings.model_repository).write(settings)
        text = (settings.model_repository / "tiny" / "config.pbtxt").read_text()
        assert config_parameters(text)["draft_model_checkpoint_path"] == said


@pytest.mark.parametrize("more", [{"model_type": "t5"}, {"interactive": True, "max_batch_size": 1}])
def test_a_draft_model_is_for_decoders_without_sessions(more: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="a draft model needs a decoder-only model without"):
        export_settings(Path("unused"), draft_model_dir="/small/1/1-gpu", **more)


@pytest.mark.parametrize("role", ["ensemble", "text"])
def test_a_text_model_takes_what_its_token_model_does(tmp_path: Path, role: str) -> None:
    root = export(tmp_path).model_repository
    whole, model = (parse(root / name / "config.pbtxt") for name in (role, "tiny"))
    parameters = {name: value.string_value for name, value in whole.parameters.items()}
    assert parameters["token_model"] == model.name
    taken = {tensor.name: tensor for tensor in model.input}
    made = {parameters[name] for name in ("INPUT_ID", "REQUEST_INPUT_LEN", "REQUEST_OUTPUT_LEN")}
    assert made == {name for name, tensor in taken.items() if not tensor.optional}
    for tensor in whole.input:
        same = SAME_AS.get(tensor.name, tensor.name)
        if not same.startswith("INPUT_") and same not in ("stream", "exclude_input_in_output"):
            unsigned = {8: 4}.get(tensor.data_type) if role == "text" else None
            assert taken[same].data_type in (tensor.data_type, unsigned), tensor.name


@pytest.mark.parametrize("role", ["ensemble", "text"])
def test_text_models_of_their_own_know_todays_names(tmp_path: Path, role: str) -> None:
    root = export(tmp_path).model_repository
    assert runpy.run_path(str(root / role / "1" / "text_names.py"))["SAME_AS"] == SAME_AS


def test_the_login_side_reads_what_was_written(tmp_path: Path) -> None:
    settings = export(tmp_path, tp=2, pp=2)
    (model,) = served_models(settings.model_repository)
    assert model.name == "tiny"
    assert model.parallelism == Parallelism(2, 2)
    assert model.checkpoint_dir == settings.checkpoint_dir


@pytest.mark.parametrize(
    ("path", "default", "folder"),
    [
        (None, "weights", "2/weights"),
        (None, "gone", "2/2-gpu"),
        ("2-gpu", "", "2/2-gpu"),
        ("1/2-gpu", "", "2/2-gpu"),
        (".", "", "2"),
    ],
)
def test_the_login_side_finds_the_checkpoint_where_the_server_does(
    tmp_path: Path, path: str | None, default: str, folder: str
) -> None:
    """The newest version is served; of the two sizes the pipeline's may be left out."""
    for name in ("1/2-gpu", "2/2-gpu", "2/weights"):
        (tmp_path / "tiny" / name).mkdir(parents=True)
    parameters = {"tensor_para_size": "2"} | (
        {} if path is None else {"model_checkpoint_path": path}
    )
    lines = ['backend: "fastertransformer"', f'default_model_filename: "{default}"']
    for name, value in parameters.items():
        lines.append(f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}')
    (tmp_path / "tiny" / "config.pbtxt").write_text("\n".join(lines))
    (model,) = served_models(tmp_path)
    assert model.parallelism == Parallelism(2, 1)
    assert model.checkpoint_dir == tmp_path / "tiny" / folder


def test_text_models_carry_the_tokenizer_and_its_code(tmp_path: Path) -> None:
    root = export(tmp_path).model_repository
    code = ["model.py", "text_tensors.py", "tokenizer", "triton_requests.py"]
    files = ["manifest.json", "merges.txt", *code, "vocab.json"]
    whole = ["deltas", "requests", "channel", "names"]
    roles = {"preprocessing": [], "postprocessing": ["deltas"]}
    for role in TEXT_MODELS:
        version = root / role / "1"
        more = [f"text_{name}.py" for name in roles.get(role, whole)]
        assert sorted(path.name for path in version.iterdir()) == sorted([*files, *more])
    assert sorted(path.name for path in root.iterdir()) == [*TEXT_MODELS, "tiny"]


@pytest.mark.parametrize(("pad_id", "expected"), [(None, "0"), (7, "7")])
def test_prompts_are_padded_as_the_checkpoint_says(
    tmp_path: Path, pad_id: int | None, expected: str
) -> None:
    root = export(tmp_path, text_config(pad_id=pad_id)).model_repository
    config = parse(root / "preprocessing" / "config.pbtxt")
    assert config.parameters["pad_id"].string_value == expected


def test_no_text_models_without_a_tokenizer(tmp_path: Path) -> None:
    root = export(tmp_path, tokenizer=TokenizerSettings("none")).model_repository
    assert [path.name for path in root.iterdir()] == ["tiny"]


def test_a_second_model_gets_text_models_of_its_own(tmp_path: Path) -> None:
    root = export(tmp_path).model_repository
    first = tree(root)
    export(tmp_path, name="other")
    assert first.items() <= tree(root).items()
    mine = {f"other_{role}" for role in TEXT_MODELS}
    assert {path.name for path in root.iterdir()} == {*TEXT_MODELS, "tiny", "other", *mine}
    for role in ("ensemble", "text"):
        config = parse(root / f"other_{role}" / "config.pbtxt")
        assert config.parameters["token_model"].string_value == "other"


def test_an_existing_repository_is_refused_and_left_alone(tmp_path: Path) -> None:
    settings = export(tmp_path)
    before = tree(settings.model_repository)
    with pytest.raises(CheckpointError, match=r"export\.model\.overwrite") as caught:
        ModelRepository(settings.model_repository).write(replace(settings, reuse=False))
    for name in ("tiny/config.pbtxt", *TEXT_MODELS):
        assert str(settings.model_repository / name) in str(caught.value)
    assert tree(settings.model_repository) == before


def test_overwrite_replaces_everything(tmp_path: Path) -> None:
    settings = export(tmp_path)
    before = tree(settings.model_repository)
    stale = settings.model_repository / "preprocessing" / "1" / "stale.txt"
    stale.write_text("from before")
    again = export_settings(tmp_path, overwrite=True, max_batch_size=3)
    ModelRepository(again.model_repository).write(again)
    after = tree(again.model_repository)
    assert after.keys() == before.keys()
    assert b"max_batch_size: 3" in after["ensemble/config.pbtxt"]
    assert not list(tmp_path.glob("*.partial"))


def test_a_tokenizer_too_large_for_the_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"490; got 491; change export.model.tokenizer"):
        export(tmp_path, text_config(vocab_size=490))
    assert not (tmp_path / "model_repo" / "tiny" / "config.pbtxt").exists()


def test_a_checkpoint_without_tokenizer(tmp_path: Path) -> None:
    settings = export_settings(tmp_path)
    write_weights(settings, tokenizer=None)
    with pytest.raises(CheckpointError, match=r"no tokenizer in .*export.model.tokenizer"):
        ModelRepository(settings.model_repository).write(settings)
    assert [path.name for path in settings.model_repository.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "ensemble"}, "that of a text model"),
        ({"model_type": "gpt4"}, "unknown export.run.model_type; got 'gpt4'; choices: .*gpt3"),
        ({"triton_model_dir": "/x/other"}, "must be the model's name; got 'other'; choices: tiny"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    name = changes.pop("name", "tiny")
    settings = export_settings(tmp_path, name=name)
    write_weights(settings)
    values = {key: getattr(settings, key) for key in settings.__dataclass_fields__}
    settings = type(settings)(**{**values, **changes})
    with pytest.raises(ConfigError, match=reason):
        ModelRepository(settings.model_repository).write(settings)


def test_a_failure_leaves_the_repository_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = export(tmp_path)
    before = tree(settings.model_repository)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    again = export_settings(tmp_path, overwrite=True)
    with pytest.raises(LauncherError, match="No space left"):
        ModelRepository(again.model_repository).write(again)
    assert tree(settings.model_repository) == before
    assert not list(tmp_path.glob("*.partial"))


def test_the_step_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = export_settings(tmp_path, reuse=False)
    write_weights(settings)
    write_settings(settings, tmp_path / "settings.yaml")
    arguments = ["--settings", str(tmp_path / "settings.yaml")]
    assert write_model_repository.main(arguments) == 0
    assert "tiny, preprocessing, postprocessing, ensemble, text" in capsys.readouterr().out
    assert write_model_repository.main(arguments) == 1
    assert "already holds" in capsys.readouterr().err


def test_text_model_code_compiles(tmp_path: Path) -> None:
    version = export(tmp_path).model_repository / "preprocessing" / "1"
    for path in version.glob("*.py"):
        assert importlib.util.spec_from_file_location(path.stem, path) is not None
        compile(path.read_text(), str(path), "exec")


ALTERED = {
    "its code": lambda folder: (folder / "model.py").write_text("import os"),
    "its tokenizer": lambda folder: (folder / "vocab.json").write_text("{}"),
    "a lost file": lambda folder: (folder / "text_tensors.py").unlink(),
    "a further file": lambda folder: (folder / "json.py").write_text("import os"),
}


@pytest.mark.parametrize("role", TEXT_MODELS)
@pytest.mark.parametrize("case", ALTERED)
def test_altered_text_models_are_not_served(
    tmp_path: Path, role: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = export(tmp_path).model_repository
    check_text_models(str(root))
    ALTERED[case](root / role / "1")
    with pytest.raises(CheckpointError, match=f"(?s)1 problem.*{role}/1"):
        check_text_models(str(root))
    settings = DeploySettings(str(root), str(tmp_path / "results"))
    write_settings(settings, tmp_path / "deploy.yaml")
    assert start_server.main(["--settings", str(tmp_path / "deploy.yaml")]) == 1
    assert f"{role}/1" in capsys.readouterr().err
    (root / role / "1" / "manifest.json").unlink()
    check_text_models(str(root))


def test_an_altered_tokenizer_gets_into_no_text_model(tmp_path: Path) -> None:
    settings = export(tmp_path)
    vocab = settings.checkpoint_dir / "vocab.json"
    vocab.write_bytes(vocab.read_bytes() + b"\n")
    with pytest.raises(CheckpointError, match=r"vocab\.json is too long"):
        ModelRepository(settings.model_repository).write(replace(settings, overwrite=True))


def test_a_link_on_the_way_keeps_its_target(tmp_path: Path) -> None:
    settings = export(tmp_path / "a")
    root, other = settings.model_repository, tmp_path / "other"
    other.mkdir()
    (other / "kept").write_text("kept")
    before = tree(root)
    staging = root.with_name(root.name + ".partial")
    staging.symlink_to(other)
    with pytest.raises(CheckpointError, match="what a link leads to; remove the link"):
        ModelRepository(root).write(replace(settings, overwrite=True))
    staging.unlink()
    config = root / "tiny" / "config.pbtxt.partial"
    config.symlink_to(other / "kept")
    with pytest.raises(CheckpointError, match="cannot write the model repository"):
        ModelRepository(root).write(replace(settings, overwrite=True))
    config.unlink()
    assert tree(other) == {"kept": b"kept"}
    assert tree(root) == before
