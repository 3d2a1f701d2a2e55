"""Two tensors of a source that get one name are refused, whatever renames them; names of modules
that a training puts around a model are removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.sources import core_adapters, core_t5
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import separate_experts
from launcher_scripts.checkpoint.sources.megatron_core import model_names
from launcher_scripts.checkpoint.sources.nemo_adapters import read_parts
from launcher_scripts.common.errors import CheckpointError
from tests.checkpoint.exporting import export_folder, refused_export, weight_bytes
from tests.checkpoint.megatron_maker import Maker
from tests.checkpoint.parts_maker import write_parts
from tests.checkpoint.peft_maker import PeftMaker
from tests.checkpoint.test_export_failures import STEM, edited
from tests.checkpoint.test_gguf import WIDE, write
from tests.checkpoint.tiny_models import DECODERS, LATER_DECODERS
from tests.checkpoint_maker import make_nemo, small_config

ONE = SourceTensor.full(np.ones((2, 4, 3), np.float32))


def changed(folder: Path, model: Any, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A folder of the model with its state dict changed."""
    model.make().save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    save_file(change(state) or state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "name", ["norm.weight", "transformer.norm.weight", "model.norm._orig_mod.weight"]
)
def test_two_names_of_one_tensor(name: str, tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[name] = 3 * torch.ones(16)

    folder = changed(tmp_path / "hf", DECODERS["llama"], change)
    text = refused_export(folder, tmp_path, r"both the model's norm\.weight")
    assert "model.norm.weight" in text
    assert name in text


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    DECODERS["llama"].make().save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    first, second, *_ = sorted((tmp_path / "hf").glob("*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, second)
    text = refused_export(tmp_path / "hf", tmp_path, "both the model's")
    assert first.name in text
    assert second.name in text


def test_an_expert_that_is_there_alone_and_among_all() -> None:
    tensors = {
        "layers.0.mlp.experts.down_proj": ONE,
        "layers.0.mlp.experts.1.down_proj.weight": ONE,
    }
    with pytest.raises(CheckpointError, match=r"experts\.down_proj and .*1\.down_proj\.weight are"):
        separate_experts(tensors, "qwen3_moe", "it")


def test_rows_of_experts_that_cannot_be_halved(tmp_path: Path) -> None:
    key = "model.layers.1.mlp.experts.gate_up_proj"

    def change(state: dict[str, torch.Tensor]) -> None:
        stems = [name for name in state if "layers.1.mlp.experts." in name and "down" not in name]
        gate = [state.pop(name) for name in sorted(stems)]
        state[key] = torch.cat((torch.stack(gate[:1]), torch.stack(gate[1:2])), 1)[:, :-1].clone()

    folder = changed(tmp_path / "hf", LATER_DECODERS["qwen3_moe"], change)
    refused_export(folder, tmp_path, r"experts\.0\.up_proj\.weight has another shape")


def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.checkpoint import test_gguf as maker

    model = LlamaForCausalLM(LlamaConfig(**WIDE))
    monkeypatch.setitem(maker.NAMES, "model.norm.weight", "norm.weight")
    model.model.extra = torch.nn.Linear(1, 1, bias=False)
    monkeypatch.setitem(maker.NAMES, "model.extra.weight", "output_norm.weight")
    write(model, tmp_path / "a.gguf", gguf.GGMLQuantizationType.F32)
    refused_export(tmp_path / "a.gguf", tmp_path, r"output_norm\.weight are both the model's norm")


def test_nemo(tmp_path: Path) -> None:
    make_nemo(tmp_path / "a.nemo", small_config())
    name = "encoder.final_layernorm.bias"

    def change(state: dict[str, Any]) -> None:
        state[f"model.{name}"] = 2 * state[STEM + name]

    path = edited(tmp_path / "a.nemo", change)
    refused_export(path, tmp_path, rf"{STEM}{name} and model\.{name} are both")


def test_megatron(tmp_path: Path) -> None:
    Maker().write(tmp_path / "a")
    path = next((tmp_path / "a").rglob("*.pt"))
    loaded = torch.load(path, weights_only=False)
    encoder = loaded["model"]["language_model"]["encoder"]
    name = "layers.0.attention.dense.bias"
    encoder[name] = encoder["layers.0.self_attention.dense.bias"]
    torch.save(loaded, path)
    refused_export(tmp_path / "a", tmp_path, rf"self_attention\.dense\.bias and encoder\.{name}")


def test_megatron_core() -> None:
    for one, other in (("module.a.weight", "a.weight"), ("model.a.weight", "a.weight")):
        with pytest.raises(CheckpointError, match="both the model's a"):
            model_names({one: ONE, other: ONE}, "it")
    with pytest.raises(CheckpointError, match=r"both the model's encoder_embedding\.position"):
        name = "embedding.position_embeddings.weight"
        core_t5.nemo_names({name: ONE, f"encoder_{name}": ONE}, "it")
    with pytest.raises(CheckpointError, match=r"a\.to_wrap\.weight and a\.weight"):
        core_adapters.separated({"a.to_wrap.weight": ONE, "a.weight": ONE}, "it")


def test_parts_of_nemo(tmp_path: Path) -> None:
    layer = "model.language_model.encoder.layers.0.self_attention"
    one = torch.ones(4)
    for other in ("self_attention.key_infused_adapter", "self_attention:key_infused_adapter"):
        names = (f"{layer}.adapter_layer.key_infused_adapter.scalers", f"model.{other}.scalers")
        state = {
            names[0]: one,
            names[1].replace("model.", layer.removesuffix("self_attention")): one,
        }
        with pytest.raises(CheckpointError, match="both the model's encoder"):
            read_parts(write_parts(tmp_path / "a.nemo", {"": state}))
    adapter = f"{layer}.adapter_layer.adapter_1".replace(".self_attention", "")
    state = {f"{adapter}.{name}.weight": torch.ones(4, 4) for name in ("linear_in", "module.1")}
    with pytest.raises(CheckpointError, match=r"are both layers\.0\..*wi\.weight"):
        read_parts(write_parts(tmp_path / "a.nemo", {"": state}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "model.layers.0.mlp.up_proj.lora_A.weight",
            "model.layers.0.mlp.up_proj.lora_A.default.weight",
        ),
        ("model.norm.weight", "model.norm.modules_to_save.default.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.norm.weight", "_orig_mod.model.norm.weight"),
    ],
)
def test_peft(one: str, other: str, tmp_path: Path) -> None:
    model = DECODERS["llama"].make()
    model.save_pretrained(tmp_path / "hf")
    made = PeftMaker(model)
    for name in (one, other):
        made.tensors[f"base_model.model.{name}"] = torch.ones(16)
    adapter = made.write(tmp_path / "adapter", modules_to_save=["norm"])
    refused_export(tmp_path / "hf", tmp_path, "are both", adapter_checkpoints=(adapter,))


@pytest.mark.parametrize(
    "around",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("model.", "model._orig_mod.", 1),
        lambda name: name.replace("self_attn.", "_checkpoint_wrapped_module.self_attn."),
    ],
)
def test_modules_around_a_model_are_removed_with_a_note(
    around: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DECODERS["llama"].make().save_pretrained(tmp_path / "plain")
    state = load_file(tmp_path / "plain" / "model.safetensors")
    torch.manual_seed(0)
    folder = changed(
        tmp_path / "hf", DECODERS["llama"], lambda _: {around(name): state[name] for name in state}
    )
    capsys.readouterr()
    found = export_folder(folder, tmp_path / "a")
    assert "note: names of tensors: " in capsys.readouterr().out
    expected = export_folder(tmp_path / "plain", tmp_path / "b")
    assert weight_bytes(found) == weight_bytes(expected)
