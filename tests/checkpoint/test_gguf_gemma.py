"""GGUF files of Gemma 3n and 4, with the names and changes of llama.cpp's converter, give what the
folder of transformers gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from launcher_scripts.checkpoint.formats.gguf_file import read_tensor
from tests.checkpoint.exporting import refused_export
from tests.checkpoint.gguf_maker import finish
from tests.checkpoint.test_gguf_hybrids import base, check
from tests.engine.test_later_decoders import MADE

WHOLE = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}


def of_full_layers(config: dict[str, Any]) -> dict[str, int]:
    """Sizes of heads, which transformers writes for every such layer."""
    names = ("head_dim", "num_key_value_heads")
    layer = next(iter(config["per_layer_config"].values()), {})
    return {name: layer.get(name, config[name]) for name in names}


def fields(config: dict[str, Any]) -> dict[str, Any]:
    kinds, rope = config["layer_types"], config["rope_parameters"]
    windowed = [kind == "sliding_attention" for kind in kinds]
    result = base(config) | {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": config["head_dim"],
        "final_logit_softcapping": float(config["final_logit_softcapping"] or 0),
    }
    if config["model_type"] == "gemma3n_text":
        shares = config["activation_sparsity_pattern"]
        scales = [NormalDist().inv_cdf(share) if share else -np.inf for share in shares]
        return result | {
            "activation_sparsity_scale": [float(np.float32(scale)) for scale in scales],
            "altup.active_idx": config["altup_active_idx"],
            "altup.num_inputs": config["altup_num_inputs"],
        }
    heads = of_full_layers(config)
    size, local = heads["head_dim"], config["head_dim"]
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    result |= dict.fromkeys(names, size) | {f"{name}_swa": local for name in names}
    groups = config["num_key_value_heads"]
    if config["attention_k_eq_v"]:
        of_full = heads["num_key_value_heads"]
        result["attention.head_count_kv"] = [groups if one else of_full for one in windowed]
    if config["use_double_wide_mlp"]:
        first = len(kinds) - config["num_kv_shared_layers"]
        widths = [config["intermediate_size"] * (1 + (n >= first)) for n in range(len(kinds))]
        result["feed_forward_length"] = widths
    if config["enable_moe_block"]:
        result |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["top_k_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return result


def write(folder: Path, path: Path, **more: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in (fields(config) | more).items():
        adders[type(value)](f"{architecture}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        stack = re.fullmatch(r"model\.altup_\w+\.\d\.weight", name)
        if stack:
            part = "altup_unembd_proj" if "unembed" in name else "altup_proj"
            stacks.setdefault(f"{part}.weight", []).append(tensor.numpy())
            continue
        if layer and layer[2] in WHOLE:
            stored = f"blk.{layer[1]}.{WHOLE[layer[2]]}"
        else:
            stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored, name
        writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy()))
    for stored, matrices in stacks.items():
        writer.add_tensor(stored, np.stack(matrices))
    if architecture == "gemma4":
        size = of_full_layers(config)["head_dim"]
        turning = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * size)
        factors = [1.0] * (turning // 2) + [1e30] * ((size - turning) // 2)
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    finish(writer)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text", "gemma4_inputs", "gemma4_experts"])
def test_a_file_gives_what_the_folder_gives(name: str, tmp_path: Path) -> None:
    MADE[name](tmp_path / "hf")
    if name == "gemma3n_text":  # the converter fills the table of layers up
        file = tmp_path / "hf" / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"vocab_size": 60}))
        cut(tmp_path / "hf", 60)
    write(tmp_path / "hf", tmp_path / "m.gguf")
    check(tmp_path, 2)


def cut(folder: Path, rows: int) -> None:
    """Leave so many rows of the table of tokens."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:rows].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attention.sliding_window_pattern": 5}, "must say of each layer"),
        ({"rope.dimension_count": 4}, "rope.dimension_count must be attention.key_length"),
        ({"attention.value_length_swa": 4}, "value_length_swa must be attention.key_length_swa"),
    ],
)
def test_what_does_not_fit_is_refused(more: Any, words: str, tmp_path: Path) -> None:
    MADE["gemma4_text"](tmp_path / "hf")
    write(tmp_path / "hf", tmp_path / "m.gguf", **more)
    refused_export(tmp_path / "m.gguf", tmp_path, words)


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "BF16", "F32"])
def test_columns_of_a_table_are_read_alone(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(5, 96)).astype(np.float32)
    quant = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3n")
    writer.add_tensor("t", gguf.quants.quantize(values, quant), raw_dtype=quant)
    finish(writer)
    (tensor,) = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    for columns in (slice(32, 64), slice(3, 40)):
        np.testing.assert_array_equal(
            read_tensor(tensor, columns=columns), read_tensor(tensor)[:, columns]
        )
