"""Data types of files and engine where the configuration leaves them to the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.layout.tasks import compute_type, range_notes
from launcher_scripts.checkpoint.model_repository import ModelRepository
from launcher_scripts.common import hosts
from launcher_scripts.common.hosts import Gpu, visible_gpus
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tiny_models import LLAMA

AMPERE, TURING = Gpu(80 << 30, 8.0), Gpu(16 << 30, 7.5)
SMI = """#!/bin/sh
echo '0, GPU-aaaa, 81920, 9.0'
echo '1, GPU-bbbb, 16384, 7.5'
echo '2, GPU-cccc, [N/A], 7.5'
"""


def settings(folder: Path = Path("m"), **more: Any) -> ExportSettings:
    values = {"model_name": "m", "model_type": "gpt3", "tokenizer": TokenizerSettings("none")}
    return ExportSettings(
        **{**values, "checkpoint_path": "/c", "triton_model_dir": str(folder), **more}
    )


@pytest.mark.parametrize(
    ("stored", "data_type"),
    [(torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")],
)
def test_auto_is_the_type_of_the_checkpoint(
    tmp_path: Path, stored: torch.dtype, data_type: str
) -> None:
    LlamaForCausalLM(LlamaConfig(**LLAMA)).to(stored).save_pretrained(tmp_path / "source")
    folder = export_folder(tmp_path / "source", tmp_path / "out", data_type="auto")
    assert FTCheckpoint.open(folder).weight_data_type == data_type
    ModelRepository(tmp_path / "out").write(settings(tmp_path / "out" / "m", device="cpu"))
    assert f'string_value: "{data_type}"' in (tmp_path / "out/m/config.pbtxt").read_text()


@pytest.mark.parametrize(
    ("weights", "devices", "more", "data_type"),
    [
        ("fp32", [AMPERE], {}, "bf16"),
        ("fp32", [AMPERE], {"device": "cpu"}, "fp32"),
        ("fp32", [AMPERE], {"data_type": "fp32"}, "fp32"),
        ("fp32", [AMPERE, TURING], {}, "fp32"),
        ("fp32", [], {}, "fp32"),
        ("fp16", [AMPERE], {}, "fp16"),
    ],
)
def test_float32_is_computed_in_bf16_on_gpus_that_have_it(
    weights: str,
    devices: list[Gpu],
    more: dict[str, Any],
    data_type: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compute_type(settings(**more), weights, devices) == data_type
    note = "the weights are float32, and the GPUs compute in bf16"
    assert (note in capsys.readouterr().out) == (data_type == "bf16")


def test_a_type_with_less_range_is_noted() -> None:
    by_hand = settings(weight_data_type="fp16", data_type="fp16")
    notes = range_notes(by_hand, "bf16", is_t5=False)
    assert [note.split(" is ")[0] for note in notes] == [
        "export.model.weight_data_type",
        "export.triton_deployment.data_type",
    ]
    assert not range_notes(by_hand, "fp16", is_t5=False)
    assert not range_notes(settings(), "bf16", is_t5=True)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_t5_in_fp16_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: torch.dtype
) -> None:
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, num_heads=2, decoder_start_token_id=0))
    model.to(stored).save_pretrained(tmp_path / "t5")
    export_folder(tmp_path / "t5", tmp_path / "out", data_type="auto")
    noted = "T5 is known to overflow in fp16" in capsys.readouterr().out
    assert noted == (stored == torch.float16)


def test_the_gpus_are_those_that_cuda_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hosts.shutil, "which", lambda _: None)
    assert visible_gpus() == ()
    monkeypatch.undo()
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == (Gpu(80 << 30, 9.0), Gpu(16 << 30, 7.5))
    for names, count in (("", 0), ("1", 1), ("GPU-bb", 1), ("0,1", 2), ("7", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        assert len(visible_gpus()) == count
