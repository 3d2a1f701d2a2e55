"""evaluate.twin: a served model beside its original, and every fault that it names."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from launcher_scripts.checkpoint.sources import huggingface_architectures
from launcher_scripts.common.errors import ConfigError, ServerError
from launcher_scripts.common.tokenizer import SpecialIds
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.twin.diagnosis import LIMITS
from launcher_scripts.steps import references
from launcher_scripts.steps.references import OpenedSource
from tests.checkpoint_maker import make_nemo, small_config
from tests.evaluation import twins

Measured = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return twins.write_original(tmp_path_factory.mktemp("twin") / "original")


@pytest.fixture(scope="module")
def exported(original: Path) -> Path:
    return twins.export_original(original, original.parent / "exported")


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """An export of its own, to be changed."""
    return shutil.copytree(exported, tmp_path / exported.name)


@pytest.fixture
def measured(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    undrawn: None,  # noqa: ARG001
) -> Measured:
    """What twins.measured gives, with its results in this test's folder."""
    return partial(twins.measured, monkeypatch, tmp_path)


def names(section: dict[str, Any]) -> list[str]:
    return [finding["name"] for finding in section["findings"]]


def test_a_clean_export_is_its_original(exported: Path, original: Path, measured: Measured) -> None:
    section = measured(exported)
    assert section["findings"] == []
    assert section["source"] == str(original)
    assert section["reference"].startswith("transformers ")
    assert section["metrics"]["kl"]["value"] < 1e-9
    assert section["metrics"]["top1"]["value"] == 1
    assert section["metrics"]["same_continuation"]["value"] == 1
    assert len(section["items"]) == len(twins.TEXTS)
    for item in section["items"]:
        assert item["difference"] == pytest.approx(0, abs=1e-4)
        assert item["log_likelihood"] < -item["tokens"]
        assert item["first_divergence"] is item["continuation_divergence"] is None
    assert [(each["first"], each["last"]) for each in section["positions"]][:4] == [
        (0, 0),
        (1, 1),
        (2, 3),
        (4, 7),
    ]


def test_an_interrupted_twin_goes_on_to_the_same_section(
    folder: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    exchange(folder, *(f"model.layers.{n}.attention.dense.weight.0.bin" for n in (0, 1)))
    twin = {"batch_size": 1}
    whole = measured(folder, twin=twin)
    generate, asked = twins.InProcess.generate_rows, []

    def interrupted(
        self: twins.InProcess, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        for row in rows:
            asked.append(row)
            if len(asked) == 5:
                raise ServerError("gone")
            yield from generate(self, [row], in_flight)

    monkeypatch.setattr(twins.InProcess, "generate_rows", interrupted)
    with pytest.raises(ServerError, match="gone"):
        measured(folder, twin=twin)
    resumed = measured(folder, twin=twin, resume=True)
    # Two for the last text, and the one whose logits are looked into.
    assert len(asked) == 5 + 3
    assert names(resumed) == ["swapped_shard"]
    assert len(resumed.pop("measured_on")["runs"]) == 2
    assert len(whole.pop("measured_on")["runs"]) == 1
    assert resumed == whole


@pytest.mark.parametrize("twin", [{"continuation": 3}, {"max_tokens": 8}])
def test_a_twin_of_another_set_up_begins_anew(
    exported: Path, capsys: pytest.CaptureFixture[str], measured: Measured, twin: dict[str, Any]
) -> None:
    measured(exported)
    measured(exported, twin=twin, resume=True)
    assert f"twin starts over: other settings.{next(iter(twin))};" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data_type", "engine", "precision"),
    [
        ("fp32", {"data_type": "bf16"}, "bf16"),
        ("fp16", {"data_type": "fp16"}, "fp16"),
        ("fp32", {"data_type": "fp16", "quantization": "int8"}, "int8"),
        ("fp32", {"data_type": "fp16", "quantization": "fp8"}, "fp8"),
        ("fp32", {"data_type": "fp32", "kv_cache_dtype": "fp8"}, "fp8"),
    ],
)
def test_rounding_is_no_finding(
    original: Path,
    tmp_path: Path,
    measured: Measured,
    data_type: str,
    engine: dict[str, Any],
    precision: str,
) -> None:
    folder = twins.export_original(original, tmp_path, data_type)
    section = measured(folder, **engine)
    assert section["findings"] == []
    error = section["metrics"]["logit_error"]["value"]
    assert 1e-5 < error < LIMITS[precision] / 2
    assert 1e-9 < section["metrics"]["kl"]["value"] < 0.05


def with_tokenizer(
    original: Path, folder: Path, *, template: str = "", source: str = "auto", **more: bool
) -> Path:
    """An export with another tokenizer than its original's; `more` is write_tokenizer's."""
    files = folder / "tokenizer"
    files.mkdir()
    twins.write_tokenizer(files, **more)
    if template:
        (files / "chat_template.jinja").write_text(template)
    said = TokenizerSettings("files", model=str(files / "tokenizer.json"))
    return twins.export_original(original, folder, tokenizer=said, source=source)


def test_a_lost_opening_token(original: Path, tmp_path: Path, measured: Measured) -> None:
    folder = with_tokenizer(original, tmp_path, bos=False)
    section = measured(folder)
    (finding,) = section["findings"]
    assert finding["name"] == "lost_bos"
    assert finding["evidence"]["opening_ids"] == [491]
    assert finding["evidence"]["different"] == finding["evidence"]["texts"] > len(twins.TEXTS)
    assert section["metrics"]["kl"]["value"] < 1e-9  # of the same ids
    assert abs(section["metrics"]["text_difference"]["value"]) > 1e-3


def test_an_added_opening_token(tmp_path: Path, measured: Measured) -> None:
    source = twins.write_original(tmp_path / "original", bos=False)
    folder = with_tokenizer(source, tmp_path)
    section = measured(folder)
    assert names(section) == ["added_bos"]
    assert section["findings"][0]["evidence"]["opening_ids"] == [491]


@pytest.mark.parametrize(
    ("client", "name"),
    [(twins.OpensPrompts, "added_bos"), (twins.DropsOpenings, "lost_bos")],
)
def test_an_opening_token_that_the_server_itself_adds_or_drops(
    exported: Path, measured: Measured, client: type[twins.InProcess], name: str
) -> None:
    section = measured(exported, client)
    (finding,) = section["findings"]
    assert finding["name"] == name
    assert finding["evidence"]["error"] < 1e-5 < 0.1 < section["metrics"]["logit_error"]["value"]


def test_another_tokenizer(original: Path, tmp_path: Path, measured: Measured) -> None:
    folder = with_tokenizer(original, tmp_path, swapped=True)
    section = measured(folder)
    (finding,) = section["findings"]
    assert finding["name"] == "tokenizer"
    shown = {
        each["id"]: (each["served"], each["original"]) for each in finding["evidence"]["examples"]
    }
    assert sorted(shown.values()) == [("a", "e"), ("e", "a")]


def test_another_chat_template(original: Path, tmp_path: Path, measured: Measured) -> None:
    folder = with_tokenizer(original, tmp_path, template=twins.TEMPLATE.replace("[", "<"))
    (finding,) = measured(folder)["findings"]
    assert finding["name"] == "chat_template"
    assert finding["evidence"]["first_difference"] == len(twins.BOS)
    assert finding["evidence"]["original"].startswith("<s>[user] What")
    assert finding["evidence"]["served"].startswith("<s><user] What")


def edit_config(folder: Path, key: str, value: str) -> None:
    path = folder / "config.ini"
    lines = path.read_text().splitlines(keepends=True)
    assert any(line.startswith(f"{key} = ") for line in lines)
    path.write_text(
        "".join(f"{key} = {value}\n" if line.startswith(f"{key} = ") else line for line in lines)
    )


def test_a_wrong_rope_scaling_in_the_served_settings(folder: Path, measured: Measured) -> None:
    edit_config(folder, "rotary_scaling_factor", "2.0")
    section = measured(folder)
    (finding,) = section["findings"]
    assert finding["name"] == "rope_scaling"
    assert finding["evidence"]["settings"] == {"rotary_scaling_factor": [2.0, 8.0]}
    first, *_, last = finding["evidence"]["positions"]
    assert first["error"] < 1e-5 < 1e-2 < last["error"]


def test_a_wrong_rope_scaling_that_the_reader_made_is_found_by_computing_it(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    row = huggingface_architectures.ARCHITECTURES["llama"]
    wrong = {"rotary_scaling": None, "rotary_scaling_factor": None}
    wrong |= {f"rotary_{each}_frequency_factor": None for each in ("low", "high")}
    wrong |= {"rotary_original_positions": None}
    read = replace(row, read=lambda raw: replace(row.read(raw), **wrong))
    monkeypatch.setitem(huggingface_architectures.ARCHITECTURES, "llama", read)
    folder = twins.export_original(original, tmp_path)
    (finding,) = measured(folder)["findings"]
    assert finding["name"] == "rope_scaling"
    assert finding["evidence"]["explained_by"] == "rope_type default, rope_theta 100.0"
    assert finding["evidence"]["error"] < 1e-5


def test_a_wrong_rope_scaling_shows_where_nothing_else_can_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    edit_config(folder, "rotary_base", "5000.0")
    monkeypatch.setattr(OpenedSource, "other_settings", lambda *_: {})
    section = measured(folder, twin={"runner": "engine"})
    (finding,) = section["findings"]
    assert finding["name"] == "rope_scaling"
    assert finding["evidence"]["explained_by"] is None
    assert finding["evidence"]["positions"][0]["error"] < 1e-5


def test_scaled_logits(folder: Path, measured: Measured) -> None:
    path = folder / "model.lm_head.weight.bin"
    path.write_bytes((0.7 * np.fromfile(path, np.float32)).astype(np.float32).tobytes())
    (finding,) = measured(folder)["findings"]
    assert finding["name"] == "scaled_logits"
    assert finding["evidence"]["scale"] == pytest.approx(0.7, abs=1e-5)
    assert finding["evidence"]["residual"] < 1e-5


def exchange(folder: Path, one: str, other: str) -> None:
    first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
    assert first != second
    (folder / one).write_bytes(second)
    (folder / other).write_bytes(first)


@pytest.mark.parametrize(
    ("tp_size", "one", "other"),
    [
        (2, "mlp.dense_4h_to_h.weight.0", "mlp.dense_4h_to_h.weight.1"),
        (1, "0.attention.dense.weight.0", "1.attention.dense.weight.0"),
    ],
)
def test_a_swapped_shard(
    original: Path, tmp_path: Path, measured: Measured, tp_size: int, one: str, other: str
) -> None:
    folder = twins.export_original(original, tmp_path, tp_size=tp_size)
    layer = "" if one[0].isdigit() else "1."
    files = [f"model.layers.{layer}{each}.bin" for each in (one, other)]
    exchange(folder, *files)
    (finding,) = measured(folder)["findings"]
    assert finding["name"] == "swapped_shard"
    assert {each["file"]: each["holds"] for each in finding["evidence"]["files"]} == {
        files[0]: files[1],
        files[1]: files[0],
    }


def test_a_damaged_file_and_a_wrong_hyperparameter_are_named(
    folder: Path, measured: Measured
) -> None:
    path = folder / "model.layers.1.attention.dense.weight.0.bin"
    path.write_bytes((np.fromfile(path, np.float32) + np.float32(0.1)).tobytes())
    edit_config(folder, "layernorm_eps", "0.1")
    damaged, wrong = measured(folder)["findings"]
    assert damaged["name"] == wrong["name"] == "other"
    assert damaged["evidence"]["files"][0]["file"] == path.name
    assert wrong["evidence"]["settings"]["norm_eps"][0] == 0.1


def test_our_engine_runs_an_original_that_no_other_library_does(
    exported: Path, measured: Measured
) -> None:
    section = measured(exported, twin={"runner": "engine"})
    assert section["reference"].startswith("this project's engine, float32 on the CPU")
    assert section["findings"] == []
    assert section["metrics"]["kl"]["value"] == 0


def test_an_original_without_a_tokenizer_gets_the_served_ids(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    measured: Measured,
) -> None:
    make_nemo(tmp_path / "original.nemo", small_config(vocab_size=512))
    folder = with_tokenizer(tmp_path / "original.nemo", tmp_path)
    monkeypatch.setattr(references, "find_spec", lambda name: name != "nemo" or None)
    section = measured(folder)
    assert section["reference"].startswith("this project's engine")
    assert section["findings"] == []
    assert [item["tokens"] for item in section["items"]] == [12] * 3  # 16 positions, 4 of them free
    assert "the original's tokenizer is not compared" in capsys.readouterr().out


def test_random_weights_are_made_again(exported: Path, tmp_path: Path, measured: Measured) -> None:
    ini = tmp_path / "config.ini"
    ini.write_bytes((exported / "config.ini").read_bytes())
    folder = with_tokenizer(ini, tmp_path, source="random")
    section = measured(folder)
    assert section["source"] == str(ini)
    assert section["reference"].startswith("this project's engine")
    assert section["findings"] == []


def test_a_tokenizer_that_transformers_cannot_load_is_read_here(
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    measured: Measured,
) -> None:
    def cannot(*_: object) -> None:
        raise ConfigError("protobuf is not there")

    monkeypatch.setattr(references, "TransformersText", cannot)
    assert measured(exported)["findings"] == []
    assert "reads the original's texts: protobuf is not there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("twin", "message"),
    [
        ({"checkpoint": "nowhere"}, "the original checkpoint is not there; got 'nowhere'"),
        ({"runner": "core"}, "megatron_core is what this runner reads, not huggingface"),
    ],
)
def test_what_cannot_be_compared_says_why(
    exported: Path, measured: Measured, twin: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measured(exported, twin=twin)


@pytest.mark.filterwarnings("ignore")
def test_megatron_core_runs_what_it_saved(
    data_dir: Path, tmp_path: Path, measured: Measured
) -> None:
    pytest.importorskip("megatron.core", reason="pip install megatron-core")
    source = data_dir / "core" / "nemo253_llama31_a" / "checkpoint"
    folder = twins.export_original(source, tmp_path)
    section = measured(folder)
    assert section["reference"].startswith("Megatron-LM core ")
    assert section["findings"] == []
    assert section["metrics"]["kl"]["value"] < 1e-9
    edit_config(folder, "rotary_scaling_factor", "2.0")
    assert names(measured(folder)) == ["rope_scaling"]


@pytest.mark.parametrize(
    ("write", "client", "file"),
    [
        (twins.write_t5_original, twins.T5InProcess, "layer.1.EncDecAttention.o.weight"),
        (twins.write_bart_original, twins.BartInProcess, "encoder_attn.out_proj.weight"),
    ],
)
def test_an_encoder_decoder_is_its_original(
    tmp_path: Path,
    measured: Measured,
    write: Callable[[Path], Path],
    client: type[twins.InProcess],
    file: str,
) -> None:
    folder = twins.export_original(write(tmp_path / "original"), tmp_path)
    section = measured(folder, client)
    assert section["findings"] == []
    assert section["metrics"]["kl"]["value"] < 1e-9
    assert section["metrics"]["same_continuation"]["value"] == 1
    files = sorted(path.name for path in folder.glob(f"decoder.*{file}*"))
    exchange(folder, files[0], files[2])
    section = measured(folder, client)
    assert names(section) == ["swapped_shard"]


def test_a_lost_closing_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    source = twins.write_t5_original(tmp_path / "original")
    folder = twins.export_original(source, tmp_path)
    monkeypatch.setattr(twins.T5InProcess, "special_ids", SpecialIds())
    section = measured(folder, twins.T5InProcess)
    (finding,) = section["findings"]
    assert finding["name"] == "other"
    assert finding["text"].startswith("The served preprocessing lacks tokens")
    assert finding["evidence"]["closing_ids"] == [492]
