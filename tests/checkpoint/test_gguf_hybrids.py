"""GGUF files of hybrids, of latent attention, of Llama-Nemotron and of T5, with the names and the
changes of llama.cpp's converter, give what the folder of transformers gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from launcher_scripts.contract.requests import GenerateRequest
from tests.checkpoint.engine_answers import answers
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.gguf_maker import finish
from tests.checkpoint.tiny_models import LATER_DECODERS, T5, TinyModel
from tests.engine import test_family_switches as family_switches
from tests.engine.test_hybrids import FAMILIES, made
from tests.engine.test_later_decoders import save_nas

Tensors = Iterator[tuple[str, np.ndarray]]
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
# transformers' names of what the package has no name for under them.
ALIASES = {
    ".dt_bias": ".dt_proj.bias",
    "e_score_correction_bias": "e_score_correction.bias",
}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Of a folder of transformers, experts in stacks."""
    result: dict[str, Any] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        match = EXPERT.fullmatch(name)
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(tensor.numpy(), 2, axis=1)
            stem = name.removesuffix("gate_up_proj")
            result |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            result[f"{name}.weight"] = tensor.numpy()
        elif match:
            stack = experts.setdefault(f"{match[1]}.{match[3]}.weight", {})
            stack[int(match[2])] = tensor.numpy()
        else:
            result[name] = tensor.numpy()
    return result | {
        name: np.stack([stack[number] for number in sorted(stack)])
        for name, stack in experts.items()
    }


def neighbours(values: np.ndarray, heads: int) -> np.ndarray:
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def mamba(name: str, values: np.ndarray, groups: int, flat: bool = False) -> np.ndarray:
    if name.endswith("A_log"):
        return -np.exp(values) if flat else -np.exp(values).reshape(-1, 1)
    if name.endswith(".D"):
        return values.reshape(-1, 1)
    if name.endswith("conv1d.weight"):
        return values.squeeze(1)
    if not flat and re.search(r"\.(mixer|mamba)\.norm\.weight", name):
        return values.reshape(groups, -1)
    return values


def nemotron_h(name: str, values: np.ndarray, config: dict[str, Any]) -> Tensors:
    name = re.sub(r"^backbone\.(.*)\.mixer\.experts\.", r"model.\1.mlp.experts.", name)
    yield name, mamba(name, values, config["n_groups"])


def granite(name: str, values: np.ndarray, config: dict[str, Any]) -> Tensors:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    layer = re.sub(r"(layers\.\d+)\..*", r"\1", name)
    experts = config.get("num_local_experts")
    if part in heads:
        yield name, neighbours(values, heads[part])
    elif part == "input_linear":
        mlp = (
            ".block_sparse_moe" if "block_sparse" in name else ".shared_mlp" if experts else ".mlp"
        )
        for end, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"{layer}{mlp}.{end}", half
    elif part == "output_linear" and not experts:
        yield f"{layer}.mlp.down", values
    else:
        yield name, mamba(name, values, config["mamba_n_groups"])


GRANITE_NAMES = {
    **{f"block_sparse_moe.{part}": f"ffn_{part}_exps" for part in ("gate", "up")},
    **{f"shared_mlp.{part}": f"ffn_{part}_shexp" for part in ("gate", "up")},
    **{f"mlp.{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def qwen3next(name: str, values: np.ndarray, config: dict[str, Any]) -> Tensors:
    if name.endswith("in_proj_qkvz.weight"):
        heads = config["linear_num_key_heads"]
        size, columns = config["linear_key_head_dim"], values.shape[1]
        rows = values.reshape(heads, -1, columns)
        end = size + size + (rows.shape[1] - 2 * size) // 2
        parts = np.split(rows, [size, 2 * size, end], axis=1)
        query, key, value, gate = (part.reshape(-1, columns) for part in parts)
        layer = name.rpartition(".linear_attn")[0]
        yield f"{layer}.self_attn.qkv_proj.weight", np.concatenate([query, key, value])
        yield f"{layer}.linear_attn.gate", gate
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, values + 1
    else:
        yield name, mamba(name, values, 1, flat=True)


def qwen35(name: str, values: np.ndarray, config: dict[str, Any]) -> Tensors:
    """Value heads of all key heads one after the other, first those that come first of each."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = heads * config["linear_value_head_dim"]

    def tiled(rows: np.ndarray) -> np.ndarray:
        swapped = rows.reshape(keys, heads // keys, -1, *rows.shape[1:]).swapaxes(0, 1)
        return swapped.reshape(rows.shape)

    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    elif re.search(r"in_proj_[zab]|A_log|dt_bias", name):
        values = tiled(values)
    elif re.search("in_proj_qkv|conv1d", name):
        values = np.concatenate((values[:-size], tiled(values[-size:])))
    elif "linear_attn.out_proj" in name:
        values = tiled(values.T).T
    yield name, mamba(name, values, 1, flat=True)


def falcon_h1(name: str, values: np.ndarray, config: dict[str, Any]) -> Tensors:
    gate, down = config["mlp_multipliers"]
    keys = config["attention_in_multiplier"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": keys * config["key_multiplier"],
        "q_proj": keys,
        "v_proj": keys,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    part = name.split(".")[-2]
    if part == "in_proj":
        group = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [config["mamba_d_ssm"]] * 2 + [group] * 2 + [config["mamba_n_heads"]]
        rows = np.repeat(config["ssm_multipliers"], sizes)[:, None]
        values = values * (rows * config["ssm_in_multiplier"]).astype(np.float32)
    values = values * np.float32(factors.get(part, 1))
    yield name, mamba(name, values, config["mamba_n_groups"])


def lfm2(name: str, values: np.ndarray, _config: dict[str, Any]) -> Tensors:
    yield name, values.squeeze(1) if "conv.conv.weight" in name else values


def lfm2_moe(name: str, values: np.ndarray, _config: dict[str, Any]) -> Tensors:
    """The converter makes a module's bias of the router's."""
    name = name.replace(".expert_bias", ".expert_bias.bias")
    name = name.removeprefix("model.") if ".experts." in name else name
    yield name, values.squeeze(1) if "conv.conv.weight" in name else values


def deepseek2(name: str, values: np.ndarray, config: dict[str, Any]) -> Tensors:
    if not name.endswith("kv_b_proj.weight"):
        yield name, values
        return
    heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
    keys, others = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
    yield name.replace("kv_b", "v_b"), others


def old_deepseek2(name: str, values: np.ndarray, _config: dict[str, Any]) -> Tensors:
    yield name, values


def deci(name: str, values: np.ndarray, config: dict[str, Any]) -> Tensors:
    match = re.search(r"layers\.(\d+)\.self_attn\.([qk])_proj", name)
    if match:
        block = config["block_configs"][int(match[1])]["attention"]
        heads = config["num_attention_heads"]
        heads //= block["n_heads_in_group"] if match[2] == "k" else 1
        values = neighbours(values, heads)
    yield name, values


def base(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of every decoder."""
    rope = config.get("rope_parameters") or {}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    eps = next(
        config[key] for key in ("rms_norm_eps", "layer_norm_epsilon", "norm_eps") if key in config
    )
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size") or 1,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(eps),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
    }


def ssm(config: dict[str, Any]) -> dict[str, Any]:
    def value(*names: str) -> int:
        return next(config[name] for name in names if name in config)

    heads = value("mamba_num_heads", "mamba_n_heads")
    return {
        "ssm.conv_kernel": value("conv_kernel", "mamba_d_conv"),
        "ssm.state_size": value("ssm_state_size", "mamba_d_state"),
        "ssm.group_count": value("n_groups", "mamba_n_groups"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * value("mamba_head_dim", "mamba_d_head"),
    }


def nemotron_fields(config: dict[str, Any]) -> dict[str, Any]:
    kinds, common = config["layers_block_type"], base({**config, "num_hidden_layers": 1})
    moe = "moe" in kinds
    width = config["moe_intermediate_size" if moe else "intermediate_size"]
    return {
        **common,
        **ssm(config),
        "block_count": len(kinds),
        "attention.head_count_kv": [
            config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds
        ],
        "feed_forward_length": [width if kind in ("moe", "mlp") else 0 for kind in kinds],
        "rope.scaling.finetuned": False,
    } | (routing(config) | {"moe_latent_size": config["moe_latent_size"]} if moe else {})


def routing(config: dict[str, Any]) -> dict[str, Any]:
    result = {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }
    if "moe_shared_expert_intermediate_size" in config:
        size = config["moe_shared_expert_intermediate_size"]
        result["expert_shared_feed_forward_length"] = size
    return {key: value for key, value in result.items() if value is not None}


def granite_fields(config: dict[str, Any]) -> dict[str, Any]:
    attends = [kind in ("full_attention", "attention") for kind in config["layer_types"]]
    result = base(config) | ssm(config)
    result["attention.head_count_kv"] = [
        config["num_key_value_heads"] if attention else 0 for attention in attends
    ]
    if config.get("num_local_experts"):
        result["expert_count"] = config["num_local_experts"]
        result["expert_used_count"] = config["num_experts_per_tok"]
        result["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    return result | {
        "attention.scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
        "rope.scaling.finetuned": False,
    }


def bamba_fields(config: dict[str, Any]) -> dict[str, Any]:
    size = config["hidden_size"] // config["num_attention_heads"]
    more = {"rope.dimension_count": size // 2, "rope.scaling.finetuned": True}
    return base(config) | ssm(config) | more


def qwen3next_fields(config: dict[str, Any]) -> dict[str, Any]:
    experts = {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    }
    return base(config) | experts | delta_fields(config)


def qwen35_fields(config: dict[str, Any]) -> dict[str, Any]:
    sections = {"rope.dimension_sections": [11, 11, 10, 0]}
    moe = "num_experts" in config
    return (qwen3next_fields(config) if moe else base(config) | delta_fields(config)) | sections


def delta_fields(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "full_attention_interval": 4,
    }


def falcon_fields(config: dict[str, Any]) -> dict[str, Any]:
    return base(config) | ssm(config)


def lfm2_fields(config: dict[str, Any]) -> dict[str, Any]:
    size, multiple = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
    return base(config) | {
        "attention.head_count_kv": [
            0 if kind == "conv" else config["num_key_value_heads"] for kind in config["layer_types"]
        ],
        "shortconv.l_cache": config["conv_L_cache"],
        "feed_forward_length": -(-size // multiple) * multiple,
    }


def latent_fields(config: dict[str, Any], later: bool = True) -> dict[str, Any]:
    turns, rope = config["qk_rope_head_dim"], config["rope_parameters"]
    key, latent = config["qk_nope_head_dim"] + turns, config["kv_lora_rank"]
    result = base({**config, "head_dim": turns}) | {
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + turns if later else key,
        "attention.value_length": latent if later else config["v_head_dim"],
        "rope.dimension_count": turns,
        "leading_dense_block_count": config.get("first_k_dense_replace", 0),
    }
    if later:
        result |= {"attention.key_length_mla": key, "attention.head_count_kv": 1}
        result["attention.value_length_mla"] = config["v_head_dim"]
    if config["q_lora_rank"]:
        result["attention.q_lora_rank"] = config["q_lora_rank"]
    if rope["rope_type"] == "yarn":
        result |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    if "n_routed_experts" in config:
        result |= routing(config)
        result["expert_gating_func"] = 1 if config["model_type"] == "deepseek_v2" else 2
    return result


def old_latent_fields(config: dict[str, Any]) -> dict[str, Any]:
    return latent_fields(config, later=False)


def deci_fields(config: dict[str, Any]) -> dict[str, Any]:
    heads, blocks = config["num_attention_heads"], config["block_configs"]
    groups = [block["attention"]["n_heads_in_group"] for block in blocks]
    exact = [
        int(2 * (block["ffn"]["ffn_mult"] or 0) * config["hidden_size"] / 3) for block in blocks
    ]
    result = base({**config, "num_key_value_heads": 1})
    return result | {
        "attention.head_count_kv": [heads // group if group else 0 for group in groups],
        "attention.head_count": [
            heads if group or block["attention"]["replace_with_linear"] else 0
            for group, block in zip(groups, blocks, strict=True)
        ],
        "feed_forward_length": [-(-size // 256) * 256 for size in exact],
    }


def write(
    architecture: str, folder: Path, path: Path, change: Any, fields: dict[str, Any], layers: int
) -> None:
    """A file of the folder of transformers, as llama.cpp's converter writes it."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in fields.items():
        if value is not None:
            adders.get(type(value), writer.add_string)(f"{architecture}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    for name, tensor in tensors_of(folder).items():
        for new_name, values in change(name, tensor, config) if change else [(name, tensor)]:
            writer.add_tensor(_stored_name(new_name, names), np.ascontiguousarray(values))
    finish(writer)


def _stored_name(name: str, names: Any) -> str:
    for end, alias in ALIASES.items():
        name = name.removesuffix(end) + alias if name.endswith(end) else name
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match and match[2] in GRANITE_NAMES:
        return f"blk.{match[1]}.{GRANITE_NAMES[match[2]]}.weight"
    if match and match[2] == "linear_attn.gate":
        return f"blk.{match[1]}.attn_gate.weight"
    if match and match[2] == "self_attn.qkv_proj.weight":
        return f"blk.{match[1]}.attn_qkv.weight"
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored, name
    return str(stored)


HYBRIDS: dict[str, tuple[str, Any, Any]] = {
    "nemotron_h": ("nemotron_h", nemotron_h, nemotron_fields),
    "nemotron_h latent": ("nemotron_h_moe", nemotron_h, nemotron_fields),
    "granitemoehybrid": ("granitehybrid", granite, granite_fields),
    "granitemoehybrid dense": ("granitehybrid", granite, granite_fields),
    "bamba": ("granitehybrid", granite, bamba_fields),
    "qwen3_next": ("qwen3next", qwen3next, qwen3next_fields),
    "qwen3_5_text": ("qwen35", qwen35, qwen35_fields),
    "qwen3_5_moe_text": ("qwen35moe", qwen35, qwen35_fields),
    "lfm2": ("lfm2", lfm2, lfm2_fields),
}
# What llama.cpp has no field for.
PLAIN: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"position_embedding_type": "nope"},
    "bamba": {"time_step_limit": [0.0, float("inf")]},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
}
TOKENS = ("start_id", "end_id", "pad_id")


def check(tmp_path: Path, tp_size: int = 1) -> None:
    """Both sources export to the same weights and hyperparameters."""
    exports = [
        export_folder(tmp_path / name, tmp_path / f"of {name}", tp_size, processes=1)
        for name in ("m.gguf", "hf")
    ]
    names = {path.name for path in exports[1].glob("*.bin")}
    assert len(names) > 10
    assert names == {path.name for path in exports[0].glob("*.bin")}
    for name in names:
        got, want = (np.fromfile(export / name, np.float32) for export in exports)
        if ".A_log." in name:  # rows that sum to a vector, which went through exp and log
            got, want = (values.reshape(3, -1).sum(0) for values in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=name)
    configs = [
        {
            name: value
            for name, value in vars(read_config(export).config).items()
            if name not in TOKENS and name[0] != "_"
        }
        for export in exports
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, change, fields = HYBRIDS[name]
    kind, values = FAMILIES[name]
    monkeypatch.setitem(FAMILIES, name, (kind, {**values, **PLAIN.get(name, {})}))
    made(name).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    layers = len(config.get("layers_block_type") or range(config["num_hidden_layers"]))
    values = fields(config)
    if name == "nemotron_h latent":  # one more layer, which predicts a token more
        values |= {"block_count": layers + 1, "nextn_predict_layers": 1}
        change = with_predictor(change, layers)
    write(architecture, tmp_path / "hf", tmp_path / "m.gguf", change, values, layers + 1)
    check(tmp_path, 2)


def test_short_convolutions_and_experts(tmp_path: Path) -> None:
    fields = {**family_switches.drawn("lfm2_moe", 0), "num_hidden_layers": 3, "num_dense_layers": 1}
    fields |= {"layer_types": ["conv", "full_attention", "conv"], "use_expert_bias": True}
    fields |= {"rope_parameters": family_switches.DEFAULT}
    family_switches.made("lfm2_moe", fields).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    values = base(config) | {
        "attention.head_count_kv": [
            0 if kind == "conv" else config["num_key_value_heads"] for kind in config["layer_types"]
        ],
        "shortconv.l_cache": config["conv_L_cache"],
        "leading_dense_block_count": 1,
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_gating_func": 2,
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
    }
    write("lfm2moe", tmp_path / "hf", tmp_path / "m.gguf", lfm2_moe, values, 3)
    check(tmp_path, 2)


def with_predictor(change: Any, layer: int) -> Any:
    """The change, and a layer behind the last one."""

    def changed(name: str, values: np.ndarray, config: dict[str, Any]) -> Tensors:
        yield from change(name, values, config)
        if name.endswith("layers.1.norm.weight"):
            yield f"backbone.layers.{layer}.norm.weight", values

    return changed


def test_the_multipliers_of_a_falcon_are_in_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, values = FAMILIES["falcon_h1"]
    monkeypatch.setitem(FAMILIES, "falcon_h1", (kind, {**values, "mamba_norm_before_gate": False}))
    model = made("falcon_h1")
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    write("falcon-h1", tmp_path / "hf", tmp_path / "m.gguf", falcon_h1, falcon_fields(config), 2)
    folder = export_folder(tmp_path / "m.gguf", tmp_path, processes=1)
    ids = (5, 17, 2, 40, 66, 31, 8, 9, 9, 50, 21)
    (answer,) = answers(folder, GenerateRequest(ids, 0, return_context_logits=True))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert (
        np.abs(np.asarray(answer.context_logits) - expected).max() <= 2e-4 * np.abs(expected).max()
    )


LATENT: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "v2": ("deepseek_v2", deepseek2, latent_fields, {}),
    "v2 of 2024": ("deepseek_v2", old_deepseek2, old_latent_fields, {}),
    "v2 in groups": ("deepseek_v2_grouped", deepseek2, latent_fields, {}),
    "v3": ("deepseek_v3", deepseek2, latent_fields, {"mscale": 1.3}),
    "youtu": ("youtu", deepseek2, latent_fields, {}),
}


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(name: str, tmp_path: Path) -> None:
    """llama.cpp has one number for both of the scales of YaRN."""
    source, change, fields, rope = LATENT[name]
    tiny = LATER_DECODERS[source]
    values = dict(tiny.values)
    if "rope_parameters" in values:
        values["rope_parameters"] = {**values["rope_parameters"], **rope}
    model = TinyModel(tiny.model, tiny.config, values).make()
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    layers = config["num_hidden_layers"]
    write("deepseek2", tmp_path / "hf", tmp_path / "m.gguf", change, fields(config), layers)
    check(tmp_path)


def test_a_llama_nemotron(tmp_path: Path) -> None:
    """llama.cpp has no linear layer in place of an MLP, and its rotary scaling is numbers."""
    save_nas(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    config["block_configs"][4]["ffn"] |= {"no_op": True, "replace_with_linear": False}
    path.write_text(json.dumps(config))
    weights = tmp_path / "hf" / "model.safetensors"
    gone = ("layers.4.mlp.", "layers.4.post_attention_layernorm")
    kept = {name: values for name, values in load_file(weights).items() if not _in(name, gone)}
    save_file(kept, weights, metadata={"format": "pt"})
    layers = config["num_hidden_layers"]
    write("deci", tmp_path / "hf", tmp_path / "m.gguf", deci, deci_fields(config), layers)
    check(tmp_path)


def _in(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)


def t5_fields(config: dict[str, Any]) -> dict[str, Any]:
    result = {
        "context_length": 512,
        "embedding_length": config["d_model"],
        "feed_forward_length": config["d_ff"],
        "block_count": config["num_layers"],
        "attention.head_count": config["num_heads"],
        "attention.key_length": config["d_kv"],
        "attention.value_length": config["d_kv"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.relative_buckets_count": config["relative_attention_num_buckets"],
    }
    if config.get("is_encoder_decoder", True):
        result["decoder_block_count"] = config["num_decoder_layers"]
        result["decoder_start_token_id"] = config["decoder_start_token_id"]
    return result


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("T5ForConditionalGeneration", {}),
        ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu"}),
        ("UMT5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu"}),
        ("T5EncoderModel", {}),
    ],
)
def test_t5(model: str, more: dict[str, Any], tmp_path: Path) -> None:
    """The original T5, version 1.1 with an output table, umT5, and an encoder."""
    values = {**T5, "relative_attention_max_distance": 128, **more}
    config_name = "UMT5Config" if model.startswith("UMT5") else "T5Config"
    TinyModel(model, config_name, values).make().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    if more and model.startswith("T5"):
        config |= {"tie_word_embeddings": False, "scale_decoder_outputs": False}
        path.write_text(json.dumps(config))
        weights = tmp_path / "hf" / "model.safetensors"
        head = {"lm_head.weight": torch.randn(config["vocab_size"], config["d_model"])}
        save_file(load_file(weights) | head, weights, metadata={"format": "pt"})
    architecture = "t5encoder" if "Encoder" in model else "t5"
    write(architecture, tmp_path / "hf", tmp_path / "m.gguf", None, t5_fields(config), 3)
    check(tmp_path)


def test_a_router_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = LATER_DECODERS["deepseek_v2"].make()
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    fields = latent_fields(config) | {"expert_gating_func": 2, "expert_group_scale": 0.5}
    write("deepseek2", tmp_path / "hf", tmp_path / "m.gguf", deepseek2, fields, 3)
    refused_export(tmp_path / "m.gguf", tmp_path, "expert_gating_func is not supported; got 2")
    refused_export(tmp_path / "m.gguf", tmp_path, "field deepseek2.expert_group_scale is not")
