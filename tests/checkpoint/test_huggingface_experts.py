"""Experts in one tensor a layer, as a model of transformers 5 has them in memory; what chooses
experts, and what an export leaves out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from tests.checkpoint.exporting import (
    change_json,
    export_folder,
    open_weights,
    refused_export,
    weight_bytes,
)
from tests.checkpoint.tiny_models import LATER_DECODERS


@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "minimax_m2", "granitemoe", "granitemoeshared"],
)
def test_a_state_dict_gives_what_the_saved_model_gives(tmp_path: Path, name: str) -> None:
    model = LATER_DECODERS[name].save(tmp_path / "saved")
    state = model.state_dict()
    assert sum("experts.gate_up_proj" in key for key in state) == model.config.num_hidden_layers
    (tmp_path / "state").mkdir()
    torch.save(state, tmp_path / "state" / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path / "state")
    model.generation_config.save_pretrained(tmp_path / "state")
    folders = [
        export_folder(tmp_path / kind, tmp_path / "of" / kind) for kind in ("saved", "state")
    ]
    want, got = map(weight_bytes, folders)
    assert want
    assert got == want


def test_experts_in_mxfp4_are_widened(tmp_path: Path) -> None:
    """As transformers widens them, bit by bit; of a file that is stored so or so."""
    tiny = LATER_DECODERS["gpt_oss"]
    model = replace(tiny, values=tiny.values | {"hidden_size": 32, "intermediate_size": 64}).make()
    model.save_pretrained(tmp_path / "wide")
    stored = load_file(tmp_path / "wide" / "model.safetensors")
    packed = {}
    for name, values in stored.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = values
            continue
        experts, inputs, outputs = values.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 135, blocks.shape[:3], dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        stored[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert stored[name].shape == values.shape
    save_file(stored, tmp_path / "wide" / "model.safetensors")
    (tmp_path / "packed").mkdir()
    save_file(packed, tmp_path / "packed" / "model.safetensors")
    shutil.copy(tmp_path / "wide" / "config.json", tmp_path / "packed")
    scheme = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    change_json(tmp_path / "packed" / "config.json", quantization_config=scheme)
    folders = [
        export_folder(tmp_path / kind, tmp_path / "of" / kind) for kind in ("wide", "packed")
    ]
    want, got = map(weight_bytes, folders)
    assert len(want) > 60
    assert got == want
    assert "weights stored in mxfp4 are widened" in read_manifest(folders[1]).source["notes"]
    name = next(name for name in packed if name.endswith("_scales"))
    save_file(
        {**packed, name: packed[name][:, 1:].contiguous()},
        tmp_path / "packed" / "model.safetensors",
    )
    refused_export(tmp_path / "packed", tmp_path / "refused", "_scales do not fit")


@pytest.mark.parametrize("data_type", ["fp32", "bf16", "fp16"])
def test_the_bias_that_chooses_experts_is_exact(tmp_path: Path, data_type: str) -> None:
    """Experts may differ by less than a bfloat16 can tell."""
    model = LATER_DECODERS["glm4_moe"].make()
    bias = 9 + torch.arange(6) / 3000
    for layer in (1, 2):
        model.model.layers[layer].mlp.gate.e_score_correction_bias.copy_(bias * layer)
    model.save_pretrained(tmp_path / "hf")
    weights, _ = open_weights(export_folder(tmp_path / "hf", tmp_path, data_type=data_type))
    for layer in (1, 2):
        stored = weights[f"layers.{layer}.mlp.router.expert_bias"]
        assert torch.equal(stored.sum(0), bias * layer)


@pytest.mark.parametrize(
    ("name", "key", "there"),
    [
        ("glm4_moe", "num_nextn_predict_layers", "model.layers.3.eh_proj.weight"),
        ("ernie4_5_moe", "num_nextn_predict_layers", "model.mtp_emb_norm.0.weight"),
        ("exaone_moe", "num_nextn_predict_layers", "mtp.norm.weight"),
    ],
)
def test_layers_that_predict_more_tokens_are_left_out(
    tmp_path: Path, name: str, key: str, there: str
) -> None:
    """Only where config.json says that there may be such."""
    LATER_DECODERS[name].make().save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(file) | {there: torch.ones(3)}, file, metadata={"format": "pt"})
    config = tmp_path / "hf" / "config.json"
    change_json(config, **{key: 1})
    folder = export_folder(tmp_path / "hf", tmp_path)
    notes = json.loads((folder / "manifest.json").read_text())["source"]["notes"]
    assert notes == ["the layers for multi-token prediction are left out"]
    change_json(config, **{key: 0})
    refused_export(tmp_path / "hf", tmp_path / "again", "is a tensor this model should not have")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number from 0 on"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must name every layer's MLP"),
        ({"scoring_func": "softmax"}, "scoring_func is not supported; got 'softmax'"),
    ],
)
def test_what_chooses_experts_otherwise_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    LATER_DECODERS["glm4_moe"].make().save_pretrained(tmp_path / "hf")
    change_json(tmp_path / "hf" / "config.json", **change)
    refused_export(tmp_path / "hf", tmp_path, message)
