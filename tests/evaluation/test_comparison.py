"""A result beside a reference: transformers on the same items, or another report."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.evaluation.comparison import compare, compared, open_reference
from launcher_scripts.evaluation.page import html
from launcher_scripts.evaluation.tables import task_table
from launcher_scripts.evaluation.tasks.task import Metric, TaskResult
from launcher_scripts.evaluation.tasks.transformers_model import TransformersModel
from tests.evaluation.text_tasks import asked, no_progress


def result(score: float, *predictions: str) -> TaskResult:
    items = [{"index": index, "prediction": text} for index, text in enumerate(predictions)]
    return TaskResult({"score": Metric(score, None, None, True, "a score")}, items)


def test_differences_are_the_served_models() -> None:
    comparison = compare(result(0.5, "a", "b", "c"), result(0.75, "a", "x", "c"), "theirs")
    assert comparison.difference == {"score": -0.25}
    assert comparison.different == [1]
    assert comparison.items == {1: {"index": 1, "prediction": "x"}}
    with pytest.raises(ConfigError, match=r"theirs does not have every item; got \[1\]"):
        compare(result(0.5, "a", "b"), result(0.5, "a"), "theirs")


def test_an_item_of_other_data_is_another_item() -> None:
    served, other = result(0.5, "a", "b"), result(0.5, "a", "b")
    for item, target in zip((*served.items, *other.items), "xyxz", strict=True):
        item["target"] = target
    with pytest.raises(ConfigError, match=r"theirs does not have every item; got \[1\]"):
        compare(served, other, "theirs")


def test_another_report_is_a_reference(tmp_path: Path) -> None:
    section = {**asdict(result(0.75, "a", "<x>")), "settings": {"limit": None}}
    report = {"schema": 1, "model": "m", "tasks": {"boolq": section}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    settings = TaskSettings("boolq", "data", reference=str(tmp_path / "report.json"))
    served = result(0.5, "a", "b")
    reference = open_reference(settings)
    whole = compared(_never, settings, asked([], tmp_path), no_progress, served, reference)
    assert whole.reference is not None and whole.reference.different == [1]
    table = task_table("boolq", whole).splitlines()
    assert table[0].split()[-2:] == ["reference", "difference"]
    assert table[1].split()[-3:] == ["75.0", "%", "-25.00"]
    assert table[2] == f"1 of 2 answers are the reference's: {tmp_path / 'report.json'}"
    shown = json.loads(json.dumps({**section, **asdict(whole)}))
    shown["measured_on"] = {
        "date": "",
        "protocol": "http",
        "server": {},
        "client": {"processor": "", "cores": 1},
    }
    page = html({"model": "m", "tasks": {"boolq": shown}})
    assert "1 of 2 answers are the reference's" in page
    assert "<mark>b</mark>" in page and "<mark>&lt;x&gt;</mark>" in page


def _never(*_: object) -> TaskResult:
    raise AssertionError("a report needs no model")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"tasks": {}}, "is not a report of boolq_generate: KeyError"),
        (
            {"tasks": {"boolq": {"metrics": {}, "items": [], "settings": {"limit": 5}}}},
            "has another limit of items; got 5",
        ),
    ],
)
def test_what_is_no_report_is_refused(
    tmp_path: Path, content: dict[str, object], says: str
) -> None:
    report = {"schema": 1, "model": "m", **content}
    (tmp_path / "report.json").write_text(json.dumps(report))
    settings = TaskSettings("boolq", "data", reference=str(tmp_path / "report.json"))
    with pytest.raises(ConfigError, match=says):
        open_reference(settings)


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in Hugging Face's format."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    small = {"vocab_size": 40, "eos_token_id": 1, "pad_token_id": 0}
    if request.param == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, **small
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.T5Config(
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            **small,
        )
        model = transformers.T5ForConditionalGeneration(config)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("width", [1, 3])
def test_rows_of_a_batch_are_answered_as_if_alone(folder: Path, width: int) -> None:
    model = TransformersModel(folder)
    rows = [
        GenerateRequest((5, 6, 7, 8, 9), 6),
        GenerateRequest((30,), 4),
        GenerateRequest((12, 13, 1), 9),
    ]
    if width > 1:
        beams = SamplingParameters(beam_width=width, len_penalty=0.8)
        rows = [replace(row, sampling=beams, output_len=5) for row in rows]
    alone = [output.output_ids for output in model.generate_rows(rows, 1)]
    assert [output.output_ids for output in model.generate_rows(rows, 3)] == alone
    for row, ids in zip(rows, alone, strict=True):
        assert 0 < len(ids) <= row.output_len
        assert 1 not in ids[:-1]
    assert model.name.endswith(f"float32: {folder}")


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_greedy_ids_follow_the_logits(folder: Path) -> None:
    model = TransformersModel(folder)
    (output,) = model.generate_rows([GenerateRequest((5, 6, 7), 4)])
    (logits,) = model.score([(5, 6, 7, *output.output_ids[:-1])])
    assert logits[2:].argmax(-1).tolist() == list(output.output_ids)


def test_what_transformers_does_not_know_is_refused(folder: Path, tmp_path: Path) -> None:
    model = TransformersModel(folder)
    with pytest.raises(ConfigError, match=r"not a reference for this; got \['prompt_task'\]"):
        list(model.generate_rows([GenerateRequest((1,), 1, prompt_task=0)]))
    rows = [GenerateRequest((1,), 1, SamplingParameters(beam_width=width)) for width in (1, 2)]
    with pytest.raises(ConfigError, match="rows of one batch need one beam_width"):
        list(model.generate_rows(rows))
    with pytest.raises(ConfigError, match="transformers cannot load"):
        TransformersModel(tmp_path)


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_damaged_weights_are_an_error_of_the_reference(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + bytes(40))
    with pytest.raises(ConfigError, match="transformers cannot load"):
        TransformersModel(tmp_path)


def test_the_folders_own_way_of_generating_does_not_count(folder: Path, tmp_path: Path) -> None:
    """A greedy answer of the bare model, whatever generation_config.json asks of others."""
    rows = [GenerateRequest((5, 6, 7, 8), 12)]
    plain = list(TransformersModel(folder).generate_rows(rows))
    changed = shutil.copytree(folder, tmp_path / "changed")
    file = changed / "generation_config.json"
    own = {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "forced_eos_token_id": 3}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    assert list(TransformersModel(changed).generate_rows(rows)) == plain
