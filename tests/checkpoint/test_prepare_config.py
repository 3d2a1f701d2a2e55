"""Converted weights become a repository by a command: the same files that an export writes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.fastertransformer import config_ini
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.model_repository import (
    ModelRepository,
    check_text_models,
    model_config,
)
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.options import values_of
from launcher_scripts.config.settings import ServingOptions
from launcher_scripts.models.repository import config_parameters, served_models, serving_options
from launcher_scripts.steps import convert_checkpoint, write_example_models
from launcher_scripts.steps import prepare_triton_model_config as prepare
from launcher_scripts.steps.command import fields
from tests.engine.small_models import random_tensors, small_config, write_checkpoint
from tests.engine.small_t5 import t5_config, t5_tensors
from tests.server.repositories import VOCAB_SIZE, export_settings, text_config, write_weights

BYTE_PAIRS = Path(__file__).parents[1] / "data/tokenizers/gpt2bpe"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def flags(model_dir: Path, *more: str, tp_size: int = 1) -> list[str]:
    return [
        *("--model-train-name", model_dir.name),
        *("--ft-checkpoint", str(model_dir / "1" / f"{tp_size}-gpu")),
        *("--config-path", str(model_dir / "config.pbtxt")),
        *more,
    ]


def test_the_repository_is_the_exports(tmp_path: Path) -> None:
    settings = export_settings(tmp_path / "a", tp=2, pp=2, data_type="bf16", decoupled=True)
    write_weights(settings)
    ModelRepository(settings.model_repository).write(settings)
    other = export_settings(tmp_path / "b", tp=2)
    write_weights(other)
    argv = flags(
        Path(other.triton_model_dir),
        *("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"),
        *("--data-type", "bf16", "--max-batch-size", "8", "--decoupled", "--text-models"),
        tp_size=2,
    )
    assert prepare.main(argv) == 0
    made = contents(other.model_repository)
    assert made == contents(settings.model_repository)
    assert "ensemble/config.pbtxt" in made


def test_a_conversion_alone_leads_to_a_model_that_is_found(tmp_path: Path, data_dir: Path) -> None:
    model_dir = tmp_path / "repo" / "gpt"
    source = data_dir / "golden" / "nemo_gpt_tp2pp1_to2" / "m.nemo"
    argv = ["--checkpoint-path", str(source), "--triton-model-dir", str(model_dir)]
    more = ["--tensor-parallel-size", "2", "--tokenizer", "none", "--weight-data-type", "fp16"]
    assert convert_checkpoint.main([*argv, *more]) == 0
    assert prepare.main(flags(model_dir, tp_size=2)) == 0
    (model,) = served_models(tmp_path / "repo")
    assert model.checkpoint_dir == model_dir / "1" / "2-gpu"
    parameters = config_parameters((model_dir / "config.pbtxt").read_text())
    assert (parameters["tensor_para_size"], parameters["data_type"]) == ("2", "fp16")


def test_a_quantization_is_written_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = export_settings(tmp_path)
    write_weights(settings)
    argv = flags(
        Path(settings.triton_model_dir), "--quantization", "fp8", "--kv-cache-dtype", "fp8"
    )
    assert prepare.main([*argv, "--int8-mode"]) != 0
    assert "int8_mode 1 and quantization fp8 exclude each other" in capsys.readouterr().err
    assert prepare.main(argv) == 0
    (model,) = served_models(settings.model_repository)
    config = settings.model_repository / model.name / "config.pbtxt"
    parameters = config_parameters(config.read_text())
    assert parameters["quantization"] == parameters["kv_cache_dtype"] == "fp8"


def test_a_draft_model_is_named_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = export_settings(tmp_path)
    write_weights(settings)
    others = {size: text_config(vocab_size=size) for size in (VOCAB_SIZE, VOCAB_SIZE + 1)}
    for size, config in others.items():
        write_checkpoint(tmp_path / str(size), config, random_tensors(config), 1)
    argv = flags(Path(settings.triton_model_dir), "--draft-model-dir")
    assert prepare.main([*argv, str(tmp_path / str(VOCAB_SIZE + 1))]) != 0
    assert "the draft model has another vocabulary than the model" in capsys.readouterr().err
    assert prepare.main([*argv, str(tmp_path / str(VOCAB_SIZE))]) == 0
    text = (Path(settings.triton_model_dir) / "config.pbtxt").read_text()
    assert config_parameters(text)["draft_model_checkpoint_path"] == str(tmp_path / str(VOCAB_SIZE))


def test_the_template_says_what_kind_of_model_is_meant(tmp_path: Path) -> None:
    config = t5_config()
    write_checkpoint(tmp_path / "weights", config, t5_tensors(config), 1)
    template = tmp_path / "template.pbtxt"
    template.write_text(
        "model_transaction_policy { decoupled: True }\n"
        'parameters {\n  key: "model_type"\n  value: {\n    string_value: "T5-Encoder"\n  }\n}\n'
    )
    path = tmp_path / "repo" / "ul2" / "config.pbtxt"
    path.parent.mkdir(parents=True)
    argv = ["--model-train-name", "ul2", "--ft-checkpoint", str(tmp_path / "weights")]
    argv += ["--config-path", str(path), "--template-path", str(template)]
    assert prepare.main(argv) == 0
    text = path.read_text()
    parameters = config_parameters(text)
    assert parameters["model_type"] == "T5-Encoder"
    assert parameters["model_checkpoint_path"] == str(tmp_path / "weights")
    assert "decoupled: true" in text and "output_hidden_state" in text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--tensor-model-parallel-size", "4"), "cut for another number.*got 4; choices: 1"),
        (("--pipeline-model-parallel-size", "9"), "layers, fewer than pipeline stages; got 9"),
        (("--model-train-name", "other"), "in a folder of the model's name"),
        (("--model-type", "t5"), "cannot be served as this model_type; got 't5'; choices: gpt3"),
        (("--template-path", "/nowhere"), "cannot read it.*--template-path"),
        (("--data-type", "int4"), "unknown data_type; got 'int4'"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], says: str
) -> None:
    settings = export_settings(tmp_path)
    write_weights(settings, tokenizer=None)
    before = contents(tmp_path)
    assert prepare.main(flags(Path(settings.triton_model_dir), *more)) == 1
    assert re.search(says, capsys.readouterr().err)
    assert contents(tmp_path) == before


def test_a_configuration_that_is_there_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    settings = export_settings(tmp_path)
    write_weights(settings, tokenizer=None)
    argv = flags(Path(settings.triton_model_dir))
    assert [prepare.main(argv), prepare.main(argv), prepare.main([*argv, "--overwrite"])] == [
        0,
        1,
        0,
    ]


@pytest.mark.parametrize("step", [prepare, write_example_models])
def test_every_setting_has_a_flag(step) -> None:
    keys = [key for key, _, _ in fields(step.FLAGS.kind)]
    assert keys == [*step.FLAGS.options]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_batch_size": 7, "quantization": "fp8", "kv_cache_dtype": "fp8", "decoupled": True},
        {"quantization": "int8", "deterministic": True, "enable_custom_all_reduce": True},
        {"inter_token_target": 0.25, "data_type": "bf16", "draft_model_dir": "/drafts/d/1/1-gpu"},
        {"deterministic": True, "enable_prefix_caching": True, "deterministic_ranks": 2},
        {"max_loras": 3, "max_lora_rank": 8},
        {"interactive": True, "interactive_sessions": 5, "max_batch_size": 1},
    ],
)
def test_serving_options_are_read_as_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = replace(export_settings(tmp_path / "a", pp=2), **changes)
    checkpoint = FTCheckpoint(settings.checkpoint_dir, text_config(), 1, "fp32")
    path = Path(settings.triton_model_dir) / "config.pbtxt"
    path.parent.mkdir(parents=True)
    path.write_text(model_config(settings, checkpoint))
    expected = values_of(ServingOptions, settings) | {"pipeline_model_parallel_size": 2}
    expected |= {"int8_mode": int(settings.quantization == "int8")}
    expected |= {"enable_prefix_caching": settings.shares_prefixes}
    if not settings.interactive:
        del expected["interactive_sessions"]
    assert serving_options(path) == expected


def test_the_examples_are_repositories_of_sizes_to_edit(tmp_path: Path) -> None:
    assert write_example_models.main(["--folder", str(tmp_path), "--data-type", "bf16"]) == 0
    kinds = {}
    for name, example in write_example_models.EXAMPLES.items():
        (model,) = served_models(tmp_path / name)
        check_text_models(str(tmp_path / name))
        assert model.name == "fastertransformer"
        kinds[name] = model.model_type
        sizes = tmp_path / name / "fastertransformer" / "1"
        assert config_ini.read_config(sizes).config == example.config
        tokenizer = load_tokenizer(tmp_path / name / "ensemble" / "1")
        assert tokenizer.vocab_size == example.config.vocab_size
        text = "“Ōk”\n"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode([20000, example.config.end_id]) == " 20000"
    assert kinds == {
        "gpt": "GPT",
        "gpt-interactive-text-generation": "GPT",
        "t5": "T5",
        "t5-encoder": "T5-Encoder",
        "agm": "Agm",
    }
    text = (tmp_path / "gpt-interactive-text-generation/fastertransformer/config.pbtxt").read_text()
    assert "sequence_batching {" in text
    before = contents(tmp_path)
    assert write_example_models.main(["--folder", str(tmp_path), "--examples", "gpt", "t5"]) == 1
    assert write_example_models.main(["--folder", str(tmp_path), "--examples", "bert"]) == 1
    assert contents(tmp_path) == before


def test_an_example_has_its_text_models_with_any_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--folder", str(tmp_path), "--examples", "gpt"]
    repository = tmp_path / "gpt"
    own = [
        *("--tokenizer", "files", "--overwrite"),
        *("--tokenizer-vocab-file", str(BYTE_PAIRS / "vocab.json")),
        *("--tokenizer-merge-file", str(BYTE_PAIRS / "merges.txt")),
    ]
    (repository / "text").mkdir(parents=True)
    assert write_example_models.main(argv) == 1
    assert "already holds" in capsys.readouterr().err
    assert contents(tmp_path) == {}
    (repository / "text").rmdir()
    assert write_example_models.main([*argv, "--tokenizer", "none"]) == 0
    assert [path.name for path in repository.iterdir()] == ["fastertransformer"]
    for flags, expected in ((["--overwrite"], 50257), (own, load_tokenizer(BYTE_PAIRS).vocab_size)):
        assert write_example_models.main([*argv, *flags]) == 0
        roles = {"preprocessing", "postprocessing", "ensemble", "text"}
        assert {path.name for path in repository.iterdir()} == {"fastertransformer", *roles}
        for role in roles:
            assert "max_batch_size: 32" in (repository / role / "config.pbtxt").read_text()
            assert load_tokenizer(repository / role / "1").vocab_size == expected


def test_random_weights_make_an_example_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write_example_models.Example(small_config(vocab_size=300), "gpt3")
    monkeypatch.setitem(write_example_models.EXAMPLES, "gpt", small)
    argv = ["--folder", str(tmp_path), "--examples", "gpt", "--tensor-parallel-size", "2"]
    assert write_example_models.main([*argv, "--random-weights"]) == 0
    (model,) = served_models(tmp_path / "gpt")
    config = FTCheckpoint.open(model.checkpoint_dir).config
    assert config == small.config
    assert load_tokenizer(model.checkpoint_dir).vocab_size == config.vocab_size
    assert model.parallelism.tp_size == 2
