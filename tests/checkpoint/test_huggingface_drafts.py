"""Draft heads of Hugging Face folders: layers for multi-token prediction, and EAGLE-3's.

The names of tensors are those of the published DeepSeek-V3, GLM-4.5, Qwen3-Next and
EAGLE3-LLaMA3.1-Instruct-8B.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launcher_scripts.models.draft_heads import IDS
from tests.checkpoint.exporting import change_json, export_folder, open_weights, refused_export
from tests.checkpoint.tiny_models import LATER_DECODERS
from tests.engine.test_hybrids import FAMILIES, made

TOP = {
    "layer": {
        "enorm": "draft.embedding_norm",
        "hnorm": "draft.hidden_norm",
        "shared_head.norm": "final_layernorm",
        "eh_proj": "draft.input",
    },
    "module": {
        "pre_fc_norm_embedding": "draft.embedding_norm",
        "pre_fc_norm_hidden": "draft.hidden_norm",
        "norm": "final_layernorm",
        "fc": "draft.input",
    },
}


def with_prediction_layer(name: str, folder: Path) -> tuple[int, dict[str, Tensor], dict[str, str]]:
    """Save a tiny model with one more layer, a copy of one: its number, and the new tensors."""
    model = LATER_DECODERS[name].make() if name in LATER_DECODERS else made(name)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    kinds = config.get("layer_types") or ["full_attention"] * layers
    source = max(
        n
        for n in range(layers)
        if kinds[n] == "full_attention" and any(f"layers.{n}.mlp.experts" in key for key in tensors)
    )
    in_module = name.startswith("qwen3")
    stem, top = ("mtp.layers.0.", "mtp.") if in_module else (f"model.layers.{layers}.",) * 2
    extra = {
        key.replace(f"model.layers.{source}.", stem): value.clone()
        for key, value in tensors.items()
        if key.startswith(f"model.layers.{source}.")
    }
    names = TOP["module" if in_module else "layer"]
    torch.manual_seed(3)
    for key in names:
        shape = (hidden, 2 * hidden) if key in ("fc", "eh_proj") else (hidden,)
        extra[f"{top}{key}.weight"] = torch.randn(shape)
    if not in_module:
        extra[f"{top}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        extra[f"{top}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        change_json(folder / "config.json", num_nextn_predict_layers=1)
    save_file(tensors | extra, file, metadata={"format": "pt"})
    return source, {key.removeprefix(top): value for key, value in extra.items()}, names


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_next"])
def test_a_prediction_layer_is_a_draft_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its layer has the stored form of the layer that it is a copy of."""
    if name in FAMILIES:
        kind, fields = FAMILIES[name]
        monkeypatch.setitem(FAMILIES, name, (kind, {**fields, "mlp_only_layers": []}))
    source, extra, names = with_prediction_layer(name, tmp_path / "hf")
    model, _ = open_weights(export_folder(tmp_path / "hf", tmp_path / "model"))
    folder = export_folder(tmp_path / "hf", tmp_path / "head", prediction_layer=True)
    head, config = open_weights(folder)
    assert (config.draft_head, config.num_layers, config.draft_vocab_size) == ("mtp", 1, None)
    for key, target in names.items():
        want = extra[f"{key}.weight"]
        assert torch.equal(head[f"{target}.weight"], want.t() if want.dim() == 2 else want)
    count = 0
    for file in folder.glob("model.layers.0.*.bin"):
        other = (
            tmp_path / "model" / "m" / "1" / "1-gpu" / file.name.replace(".0.", f".{source}.", 1)
        )
        assert file.read_bytes() == other.read_bytes()
        count += 1
    assert count > 10
    assert not (folder / "model.wte.bin").exists()
    assert model is not None


def eagle3_folder(folder: Path, **changes: object) -> dict[str, Tensor]:
    """A head for a model of hidden size 32 and 67 tokens; its tensors."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "vocab_size": 67,
        "draft_vocab_size": 40,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "use_cache": True,
        "transformers_version": "4.28.1",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    torch.manual_seed(2)
    shapes = {
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "norm.weight": (32,),
        "fc.weight": (32, 96),
        "lm_head.weight": (40, 32),
    }
    tensors = {name: torch.randn(shape).half() for name, shape in shapes.items()}
    ids = torch.randperm(67)[:40].sort().values
    tensors["d2t"] = ids - torch.arange(40)
    tensors["t2d"] = torch.isin(torch.arange(67), ids)
    torch.save(tensors, folder / "pytorch_model.bin")
    return tensors


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
def test_a_head_of_eagle3(tmp_path: Path, data_type: str) -> None:
    """Its ids are exact in every type."""
    tensors = eagle3_folder(tmp_path / "hf")
    weights, config = open_weights(
        export_folder(tmp_path / "hf", tmp_path, tp_size=2, data_type=data_type)
    )
    assert (config.draft_head, config.draft_vocab_size, config.vocab_size) == ("eagle3", 40, 67)
    digits = weights[IDS].long()
    ids = (digits[0] * 256 + digits[1]) * 256 + digits[2]
    assert torch.equal(ids, tensors["d2t"] + torch.arange(40))
    if data_type == "fp16":
        assert torch.equal(weights["draft.input.weight"], tensors["fc.weight"].float().t())
        norm = tensors["midlayer.hidden_norm.weight"].float()
        assert torch.equal(weights["draft.hidden_norm.weight"], norm)
        assert weights["layers.0.attention.query_key_value.weight"].shape == (64, 64)


def test_heads_that_are_not_there_or_compute_otherwise_are_refused(tmp_path: Path) -> None:
    LATER_DECODERS["glm4_moe"].make().save_pretrained(tmp_path / "hf")
    options = {"prediction_layer": True}
    message = r"no layer for multi-token prediction; got 'no tensors layers\.3\.\*'"
    refused_export(tmp_path / "hf", tmp_path, message, **options)
    LATER_DECODERS["mixtral"].make().save_pretrained(tmp_path / "other")
    message = "of this model type are not supported; got 'mixtral'; .*deepseek_v3"
    refused_export(tmp_path / "other", tmp_path, message, **options)
    eagle3_folder(tmp_path / "eagle", norm_before_residual=True)
    refused_export(tmp_path / "eagle", tmp_path, "norm_before_residual")
