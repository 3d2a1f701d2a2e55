"""Every kind of source as a transformers folder, verified by the step: tensors, logits, digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest, source_digest
from launcher_scripts.checkpoint.huggingface import folder as folder_module
from launcher_scripts.checkpoint.huggingface.config_json import NOT_WRITTEN
from launcher_scripts.checkpoint.verification import verify_signature
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.files import SOURCE_DIGESTS
from launcher_scripts.config.export import HuggingFaceOptions, TokenizerSettings
from launcher_scripts.config.security import SigningKey, TrustedSigner
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.steps import convert_checkpoint, twin
from tests.checkpoint.exporting import export_folder, weight_bytes
from tests.checkpoint.megatron_maker import Maker
from tests.checkpoint.peft_maker import PeftMaker
from tests.checkpoint.test_huggingface_out import LLAMA, MODELS, check_same_tensors
from tests.checkpoint_maker import Variant, make_nemo, small_config
from tests.engine.test_hybrids import FAMILIES as HYBRIDS
from tests.engine.test_hybrids import made
from tests.server.test_signature import key_files

DATA = Path(__file__).parents[1] / "data"


def _core(name: str) -> Callable[[Path], Path]:
    return lambda _folder: DATA / "core" / name / "checkpoint"


def _gguf(name: str) -> Callable[[Path], Path]:
    return lambda _folder: DATA / "gguf" / f"{name}.gguf"


def _nemo(variant: Variant, **changes: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        make_nemo(folder / "a.nemo", small_config(**changes), variant)
        return folder / "a.nemo"

    return write


def _shards(folder: Path) -> Path:
    """An exported folder for two ranks, without what its manifest says of the original."""
    MODELS["qwen3"].make().save_pretrained(folder / "original")
    served = export_folder(folder / "original", folder / "served", 2)
    (served / "manifest.json").unlink()
    return served


# Kind of source -> what writes one, and the model type that it becomes.
SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nemo_1": (_nemo(Variant()), "gpt2"),
    "nemo_1_ranks": (
        _nemo(Variant("mcore", tp_size=2, pp_size=2), num_kv_heads=2, **LLAMA),
        "llama",
    ),
    "nemo_2": (_core("nemo253_llama31_a"), "llama"),
    "megatron_lm": (lambda folder: Maker(3, 2, 2).write(folder / "source"), "gpt2"),
    "torch_format": (_core("mcore012_torchfmt_llama_tp2_a"), "llama"),
    "core": (_core("mcore019_qwen3_nonhomog_a"), "qwen3"),
    "core_experts": (_core("mcore014_mixtral_a"), "mixtral"),
    "bridge": (_core("bridge031_llama31_a"), "llama"),
    "bridge_experts": (_core("bridge_qwen2moe_a"), "qwen2_moe"),
    "gguf": (_gguf("llama"), "llama"),
    "gguf_experts": (_gguf("qwen3moe"), "qwen3_moe"),
    "gguf_without_padding_token": (_gguf("phi3"), "phi3"),
    "fastertransformer": (_shards, "qwen3"),
}


def convert(source: Path, out: Path, **more: Any) -> Path:
    """Run the step with `verify`, without a tokenizer."""
    settings = ExportSettings(
        model_name="m",
        model_type="",
        checkpoint_path=str(source),
        triton_model_dir=str(out.with_name("unused")),
        tokenizer=TokenizerSettings("none"),
        format="huggingface",
        huggingface=HuggingFaceOptions(folder=str(out)),
        **{"processes": 2, "verify": True, **more},
    )
    convert_checkpoint.convert(settings)
    return out


def twin_of(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return dict(manifest.source["twin"])


@pytest.mark.parametrize("name", SOURCES)
def test_every_source(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers' logits are the source's, and the folder is read back as the same weights."""
    write, model_type = SOURCES[name]
    source = write(tmp_path)
    out = convert(source, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["model_type"] == model_type
    found = twin_of(out)
    assert found["largest_difference"] <= found["tolerance"] < 1e-2
    assert "verified" in capsys.readouterr().out
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.source[SOURCE_DIGESTS] == {str(source): source_digest(source)}
    again = export_folder(out, tmp_path / "again")
    assert weight_bytes(again) == weight_bytes(export_folder(source, tmp_path / "once"))


# Hybrids whose gated attention or delta nets cannot be told back from an export's files.
ONE_WAY = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name not in NOT_WRITTEN])
def test_hybrids(name: str, tmp_path: Path) -> None:
    """The bytes of save_pretrained, also back from an export."""
    made(name).save_pretrained(tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "out")
    found = twin_of(out)
    assert found["largest_difference"] <= found["tolerance"]
    if name.startswith("nemotron_h"):
        return  # save_pretrained names its tensors otherwise; transformers reads both
    check_same_tensors(tmp_path / "hf", out)
    served = export_folder(tmp_path / "hf", tmp_path)
    if name in ONE_WAY:
        with pytest.raises(CheckpointError, match="no class of the model"):
            convert(served, tmp_path / "back")
        return
    check_same_tensors(tmp_path / "hf", convert(served, tmp_path / "back", verify=False))


def test_an_adapter_that_is_merged_is_verified(tmp_path: Path) -> None:
    model = MODELS["llama"].save(tmp_path / "hf")
    maker = PeftMaker(model)
    for module in maker.modules("q_proj"):
        maker.lora(module, 2.0)
    maker.write(tmp_path / "lora", r=4, lora_alpha=8, target_modules=["q_proj"])
    out = convert(tmp_path / "hf", tmp_path / "out", adapter_checkpoints=(str(tmp_path / "lora"),))
    assert twin_of(out)["reference"].startswith("this project's engine")
    manifest = read_manifest(out)
    assert manifest is not None
    assert set(manifest.source[SOURCE_DIGESTS]) == {str(tmp_path / x) for x in ("hf", "lora")}


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
def test_rounded_weights_are_verified(data_type: str, tmp_path: Path) -> None:
    MODELS["gpt2"].make().save_pretrained(tmp_path / "hf")
    found = twin_of(convert(tmp_path / "hf", tmp_path / "out", weight_data_type=data_type))
    assert found["reference"].startswith("transformers")
    assert found["largest_difference"] <= found["tolerance"]


def test_bytes_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that the disk does wrong: nothing is left, and the tensor is named."""
    MODELS["gpt2"].make().save_pretrained(tmp_path / "hf")
    add = folder_module.ShardDigests.add

    def damaged(self: folder_module.ShardDigests, position: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.shard.tensors[position].offset)
            file.write(b"\x01")
        add(self, position)

    monkeypatch.setattr(folder_module.ShardDigests, "add", damaged)
    with pytest.raises(CheckpointError, match=r"transformer\.\S+ differs from the source"):
        convert(tmp_path / "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_other_logits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MODELS["gpt2"].make().save_pretrained(tmp_path / "hf")
    logits = twin.RUNNERS["transformers"].open.logits  # type: ignore[attr-defined]
    called: list[int] = []

    def wrong(self: Any, *arguments: Any) -> Any:
        called.append(1)
        return logits(self, *arguments) * (1.0 + 0.01 * len(called))

    monkeypatch.setattr(twin.RUNNERS["transformers"].open, "logits", wrong)
    with pytest.raises(CheckpointError, match="computes other logits than transformers"):
        convert(tmp_path / "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_signed_folder(tmp_path: Path) -> None:
    """The signature covers every file, and transformers loads the folder with it."""
    model = MODELS["gpt2"].save(tmp_path / "hf")
    _, private, public = key_files(tmp_path, "key")
    more = {"sign": SigningKey(private), "verify": False}
    out = convert(tmp_path / "hf", tmp_path / "out", **more)
    verify_signature(out, TrustedSigner(public))
    assert convert(tmp_path / "hf", out, **more) == out  # the earlier export is the same
    verify_signature(out, TrustedSigner(public))
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.state_dict()["lm_head.weight"], model.state_dict()["lm_head.weight"])
    with (out / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError, match=r"altered: config\.json"):
        verify_signature(out, TrustedSigner(public))
