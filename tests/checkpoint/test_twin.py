"""export.model.verify compares an export's logits with those that transformers computes."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.sources import core_options, huggingface_architectures
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.evaluation.tasks import megatron_models, transformers_model
from launcher_scripts.steps import references, twin
from launcher_scripts.steps.convert_checkpoint import convert
from tests.checkpoint.test_huggingface_agm import make as make_agm
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS, LATER_DECODERS
from tests.checkpoint_maker import make_nemo, small_config


def settings_for(
    source: Path, target: Path, data_type: str = "fp32", tp_size: int = 1, **more: Any
) -> ExportSettings:
    return ExportSettings(
        model_name="m",
        checkpoint_path=str(source),
        triton_model_dir=str(target / "m"),
        weight_data_type=data_type,
        parallelism=Parallelism(tp_size),
        tokenizer=TokenizerSettings("none"),
        model_type="",
        verify=True,
        **more,
    )


def said(settings: ExportSettings) -> dict[str, Any]:
    """What the manifest of a finished export says about its twin."""
    manifest = json.loads((settings.checkpoint_dir / "manifest.json").read_text())
    return manifest["source"]["twin"]


@pytest.mark.parametrize(
    ("name", "data_type", "tp_size", "limit"),
    [
        ("gpt2", "fp32", 1, 1e-5),
        ("llama_31", "fp32", 2, 1e-5),
        ("opt_350m", "fp16", 1, 1e-3),
        ("xglm", "bf16", 1, 1e-3),
        ("bloom", "fp32", 1, 1e-5),
        ("qwen3", "bf16", 1, 1e-5),
        ("gemma2", "bf16", 1, 1e-5),
        ("granite", "fp16", 1, 1e-5),
        ("falcon_11b", "fp32", 1, 1e-5),
    ],
)
def test_a_good_export_has_its_twins_logits(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    data_type: str,
    tp_size: int,
    limit: float,
) -> None:
    models = DECODERS | LATER_DECODERS
    models[name].make().save_pretrained(tmp_path / "hf")
    settings = settings_for(tmp_path / "hf", tmp_path, data_type, tp_size)
    convert(settings)
    found = said(settings)
    assert found["largest_difference"] <= limit * found["largest_logit"]
    part = {"opt_350m": 1.25e-3, "xglm": 1e-2}.get(name, 1e-4)
    assert found["tolerance"] == pytest.approx(part * found["largest_logit"])
    assert len(found["prompt"]) == 16
    assert "logits differ by" in capsys.readouterr().out


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_an_encoder_decoder_has_its_twins_logits(tmp_path: Path, name: str) -> None:
    ENCODER_DECODERS[name].make().save_pretrained(tmp_path / "hf")
    settings = settings_for(tmp_path / "hf", tmp_path)
    convert(settings)
    assert said(settings)["largest_difference"] <= 1e-5 * said(settings)["largest_logit"]


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "norm_eps": ("llama", {"norm_eps": 1e-3}),
    "rotary_base": ("llama", {"rotary_base": 20000.0}),
    "scaling": ("llama_31", {"rotary_scaling_factor": 4.0}),
    "activation": ("gpt2", {"activation": "silu"}),
    "positions": ("bloom", {"alibi_layer_scaling": True}),
}


@pytest.mark.parametrize(
    ("case", "data_type"), [(case, data_type) for case in WRONG for data_type in ("fp32", "bf16")]
)
def test_a_wrong_hyperparameter_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, data_type: str
) -> None:
    name, wrong = WRONG[case]
    DECODERS[name].make().save_pretrained(tmp_path / "hf")
    read_wrongly(monkeypatch, name, wrong)
    settings = settings_for(tmp_path / "hf", tmp_path, data_type)
    with pytest.raises(CheckpointError, match="computes other logits than transformers"):
        convert(settings)
    assert not (tmp_path / "m").exists()
    export(settings)  # the tensors are all there


def read_wrongly(monkeypatch: pytest.MonkeyPatch, name: str, wrong: dict[str, Any]) -> None:
    """Have the reader take other hyperparameters from config.json than stand there."""
    model_type = name.partition("_")[0]
    row = huggingface_architectures.ARCHITECTURES[model_type]

    def read(raw: Any) -> Any:
        return replace(row.read(raw), **wrong)

    monkeypatch.setitem(
        huggingface_architectures.ARCHITECTURES, model_type, replace(row, read=read)
    )


def test_without_a_reference_the_note_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_nemo(tmp_path / "s.nemo", small_config())
    settings = settings_for(tmp_path / "s.nemo", tmp_path)
    convert(settings)
    reason = "no reference computes checkpoints of nemo"
    assert said(settings) == {"skipped": reason}
    assert f"note: no twin was compared: {reason}" in capsys.readouterr().out


CORES = {
    "bridge031_llama31_a": "checkpoint",
    "bridge_dense_a": "checkpoint",
    "bridge_gpt_oss_a": "checkpoint",
    "bridge_qwen2moe_a": "checkpoint",
    "mcore014_mixtral_a": "checkpoint",
    "mcore016_shared_a": "checkpoint",
    "mcore019_qwen3_nonhomog_a": "checkpoint",
    "nemo253_llama31_a": "checkpoint",
    "nemo2_window_a": "checkpoint/model",
}


@pytest.fixture
def core() -> None:
    """Megatron-LM core, which a machine may lack, and no more warnings than it must give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core", reason="pip install megatron-core")


@pytest.mark.usefixtures("core")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CORES)
def test_a_model_of_the_core_has_its_twins_logits(
    tmp_path: Path, data_dir: Path, name: str
) -> None:
    settings = settings_for(data_dir / "core" / name / CORES[name], tmp_path, "bf16", 2)
    convert(settings)
    found = said(settings)
    assert "Megatron-LM core" in found["reference"]
    assert found["largest_difference"] <= 1e-5 * found["largest_logit"]


@pytest.mark.usefixtures("core")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrong", [{"rotary_scaling_factor": 4.0}, {"norm_eps": 1e-3}, {"rotary_base": 20000.0}]
)
def test_a_wrong_hyperparameter_of_the_core_is_caught(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    read = core_options.read_core_gpt

    def read_wrongly(options: Any) -> Any:
        right = read(options)
        return replace(right, fields={**right.fields, **wrong})

    monkeypatch.setattr(core_options, "read_core_gpt", read_wrongly)
    settings = settings_for(data_dir / "core/bridge031_llama31_a/checkpoint", tmp_path)
    with pytest.raises(CheckpointError, match="computes other logits than Megatron-LM core"):
        convert(settings)


def test_without_the_core_the_note_says_so(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "find_spec", lambda name: name != "megatron" or None)
    settings = settings_for(data_dir / "core/nemo2_window_a/checkpoint/model", tmp_path)
    convert(settings)
    assert said(settings) == {"skipped": "this Python has no megatron"}


def test_an_encoder_decoder_of_the_core_has_no_twin(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "find_spec", lambda _: True)
    settings = replace(
        settings_for(data_dir / "core/mcore016_t5_relative_a/checkpoint", tmp_path),
        tokenizer=TokenizerSettings("none", start_id=1, end_id=2, pad_id=0),
    )
    convert(settings)
    reason = "an encoder-decoder of Megatron-LM core has no reference"
    assert said(settings) == {"skipped": reason}


@pytest.mark.parametrize(
    ("values", "reasons"),
    [
        ({"scale_factor": 32.0, "low_freq_factor": 1.0, "old_context_len": 8192}, []),
        ({"high_freq_factor": 2.0}, ["high_freq_factor 2.0"]),
        ({"_target_": "nemo.collections.llm.GemmaConfig2B"}, ["a class of Gemma"]),
    ],
)
def test_what_a_tool_changes_outside_of_the_core(
    values: dict[str, Any], reasons: list[str]
) -> None:
    assert megatron_models.core_unsupported_reasons(values) == reasons


def test_a_model_that_transformers_would_fill_with_random_weights_has_no_twin(
    tmp_path: Path,
) -> None:
    make_agm(tmp_path / "hf")
    settings = settings_for(tmp_path / "hf", tmp_path)
    convert(settings)
    assert said(settings)["skipped"] == "transformers has no code for an Agm"


def test_a_reference_that_refuses_is_an_error_with_its_words(tmp_path: Path) -> None:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "complex9"}))
    settings = settings_for(tmp_path / "hf", tmp_path)
    with pytest.raises(CheckpointError, match=r"the reference refuses .*transformers cannot load"):
        convert(settings)
    assert not (tmp_path / "m").exists()


def test_an_encoder_alone_has_no_twin(tmp_path: Path) -> None:
    ENCODER_DECODERS["t5_v1_1"].make().save_pretrained(tmp_path / "hf")
    settings = settings_for(tmp_path / "hf", tmp_path, encoder_only=True)
    convert(settings)
    assert said(settings) == {"skipped": "an encoder alone has no logits"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((references, "find_spec", lambda _: None), "this Python has no torch and transformers"),
        ((twin, "free_memory", lambda: 1000), "GB of memory in float32; 0.0 GB are free"),
    ],
)
def test_what_the_machine_lacks_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[Any, str, Any], reason: str
) -> None:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    monkeypatch.setattr(*change)
    settings = settings_for(tmp_path / "hf", tmp_path)
    convert(settings)
    assert reason in said(settings)["skipped"]


def test_the_limits_of_all_cgroups_count(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    for name, limit in (
        ("memory.max", "max"),
        ("slurm/memory.max", "5000"),
        ("slurm/job/memory.max", "max"),
        ("memory/slurm/memory.limit_in_bytes", "7000"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{limit}\n")
    (tmp_path / "own").write_text("4:memory:/slurm\n3:cpuset:/slurm\n0::/slurm/job/step\n")
    assert sorted(references.cgroup_limits(tmp_path / "own", root)) == [5000, 7000]
    assert list(references.cgroup_limits(tmp_path / "none", root)) == []


def test_without_verification_there_is_no_twin(tmp_path: Path) -> None:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    settings = replace(settings_for(tmp_path / "hf", tmp_path), verify=False)
    convert(settings)
    manifest = json.loads((settings.checkpoint_dir / "manifest.json").read_text())
    assert "twin" not in manifest["source"]


def test_weights_are_rounded_as_the_files_are(tmp_path: Path) -> None:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    model = transformers_model.TransformersModel(tmp_path / "hf")
    before = model.logits((1, 2, 3))
    model.round_weights("fp32")
    assert (model.logits((1, 2, 3)) == before).all()
    model.round_weights("bf16")
    after = model.logits((1, 2, 3))
    assert 0 < abs(after - before).max() < 0.1 * abs(before).max()
