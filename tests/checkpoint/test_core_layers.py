"""Hybrids, gated delta nets and heterogeneous models of Megatron-LM core give what the same models
of transformers give, whose logits tests/engine compares."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from launcher_scripts.checkpoint.sources.core_layers import pattern_of
from launcher_scripts.checkpoint.sources.core_options import of_bridge, of_nemo2, read_core_gpt
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint import core_maker
from tests.checkpoint.core_maker import State
from tests.checkpoint.exporting import export_folder, open_weights, refused_export
from tests.checkpoint.kept_lora import check_kept
from tests.checkpoint.test_core_experts import write_zarr
from tests.checkpoint.tiny_models import LATER_DECODERS, TinyModel
from tests.engine.test_hybrids import FAMILIES, made
from tests.engine.test_later_decoders import save_nas

# Values of a checkpoint of transformers that say the same in another way, or ids of tokens.
TOKENS = ("start_id", "end_id", "pad_id")
EPS = ("mixer_norm_eps", "latent_norm_eps")
# Tensors whose rows ranks share; others are shared by their columns.
ROWS = (
    *("A_log", "dt_bias", ".D", "mixer.norm.weight"),
    *("linear_qkv.weight", "fc1.weight", "embeddings.weight", "layer.weight"),
)


def check(source: Path, reference: Path, folder: Path, tp_size: int = 1, **other: Any) -> None:
    """Both export to the same weights and hyperparameters.  other: values that differ"""
    exports = [
        export_folder(path, folder / name, tp_size, processes=1)
        for path, name in ((source, "core"), (reference, "reference"))
    ]
    files = {path.name for path in exports[1].glob("*.bin")}
    assert files == {path.name for path in exports[0].glob("*.bin")}
    for name in files:
        got, want = (np.fromfile(export / name, np.float32) for export in exports)
        np.testing.assert_allclose(got, want, atol=1e-6, err_msg=name)
    got_config, want_config = (vars(read_config(export).config) for export in exports)
    skipped = (*TOKENS, *EPS, *(name for name in want_config if name.startswith("_")))
    assert {name: value for name, value in got_config.items() if name not in skipped} == {
        name: other.get(name, value) for name, value in want_config.items() if name not in skipped
    }


@pytest.fixture(params=["nemotron_h", "nemotron_h latent"])
def nemotron(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind, fields = FAMILIES[request.param]
    plain = {**fields, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
    monkeypatch.setitem(FAMILIES, request.param, (kind, plain))
    return made(request.param)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_hybrid_of_bridge(nemotron: Any, tp_size: int, tmp_path: Path) -> None:
    """Cut at pipeline stages, with layers for multi-token prediction that are left out."""
    nemotron.save_pretrained(tmp_path / "hf")
    tensors = core_maker.nemotron_h(nemotron)
    options = core_maker.nemotron_h_options(nemotron.config)
    pattern = options["hybrid_layer_pattern"]
    options["hybrid_layer_pattern"] = f"{pattern[:2]}|{pattern[2:]}/M*/M*"
    tensors["mtp.layers.0.enorm.weight"] = torch.ones(4)
    core_maker.write(tmp_path / "core", tensors, options)
    check(tmp_path / "core", tmp_path / "hf", tmp_path, tp_size)


def test_the_layers_of_ratios_are_read_off_the_tensors(nemotron: Any) -> None:
    names = core_maker.nemotron_h(nemotron)
    options = core_maker.nemotron_h_options(nemotron.config)
    pattern = options.pop("hybrid_layer_pattern")
    ratios = {"is_hybrid_model": True, "hybrid_attention_ratio": 0.2, "hybrid_mlp_ratio": 0.4}
    assert pattern_of(of_bridge(options | ratios, ""), names) == pattern
    assert pattern_of(of_bridge({"_target_": "GPTModelProvider"}, ""), names) is None


@pytest.mark.parametrize(
    ("of", "provider"),
    [
        (of_bridge, "megatron.bridge.models.mamba.mamba_provider.MambaModelProvider"),
        (
            of_bridge,
            "megatron.bridge.models.nemotronh.nemotron_h_provider.NemotronHModelProvider8B",
        ),
        (of_nemo2, "nemo.collections.llm.gpt.model.ssm.NemotronHConfig8B"),
    ],
)
def test_what_a_provider_does_not_say(of: Any, provider: str) -> None:
    """Its values are the class's; nothing of a hybrid is noted as not read."""
    raw = {
        "_target_": provider,
        "hybrid_override_pattern": "M-*",
        "hybrid_attention_ratio": 0.1,
        "is_hybrid_model": True,
        "mtp_hybrid_override_pattern": "*E",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 16,
        "mamba_head_dim": 16,
        "mamba_num_groups": 2,
    }
    options = of(raw, "it")
    config = read_core_gpt(options).config(8)
    assert config.layer_branches == "mamba2,mlp,attention"
    assert (config.mamba_num_heads, config.mamba_state_size, config.conv_kernel) == (8, 128, 4)
    assert (config.position_embedding, config.normalization) == ("none", "rmsnorm")
    assert (config.tied_embeddings, config.mlp_bias, config.mixer_norm_eps) == (False, False, 1e-5)
    assert options.check_keys() == ()


def of_rank(tensors: State, rank: int, count: int) -> State:
    """One tensor-parallel rank's tensors: what is stored in parts has its share of every one."""
    result: State = {}
    for name, tensor in tensors.items():
        stem = name.rpartition(".")[0]
        full = stem if stem.endswith(("weight", "bias")) else name
        share = tensor
        if full is stem or name.endswith(ROWS):
            share = tensor.chunk(count)[rank]
        elif name.endswith(("_proj.weight", "fc2.weight")):
            share = tensor.chunk(count, 1)[rank]
        result[full] = torch.cat([result[full], share]) if full in result else share
    return result


def test_a_hybrid_in_a_file_of_each_rank(tmp_path: Path) -> None:
    """Each rank holds its part of z, x, B, C and dt, one after the other."""
    model = _of_width_4()
    model.save_pretrained(tmp_path / "hf")
    options = core_maker.nemotron_h_options(model.config)
    args = {
        **{name: value for name, value in options.items() if not name.startswith("_")},
        "squared_relu": True,
        "group_query_attention": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "none",
        "num_moe_experts": None,
        "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    }
    tensors = core_maker.nemotron_h(model)
    for rank in range(2):
        folder = tmp_path / "ranks" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        state = of_rank(tensors, rank, 2)
        file = {"model": state, "args": argparse.Namespace(**args), "checkpoint_version": 3.0}
        torch.save(file, folder / "model_optim_rng.pt")
    check(tmp_path / "ranks", tmp_path / "hf", tmp_path)


def _of_width_4() -> Any:
    kind, fields = FAMILIES["nemotron_h"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "nemotron_h", (kind, {**fields, "conv_kernel": 4}))
        return made("nemotron_h")


@pytest.mark.parametrize("tp_size", [1, 2])
def test_gated_delta_nets_of_bridge(tp_size: int, tmp_path: Path) -> None:
    model = made("qwen3_next")
    model.save_pretrained(tmp_path / "hf")
    core_maker.write(
        tmp_path / "core",
        core_maker.qwen3_next(model),
        core_maker.qwen3_next_options(model.config),
    )
    plain = {"zero_centered_norm": None, "router_scaling_factor": 1.0}
    check_centred(tmp_path, tp_size, plain)


def check_centred(folder: Path, tp_size: int, plain: dict[str, Any]) -> None:
    """The core's norms are exported with one added, transformers' as they are."""
    exports = [
        export_folder(folder / name, folder / f"of {name}", tp_size, processes=1)
        for name in ("core", "hf")
    ]
    names = {path.name for path in exports[1].glob("*.bin")}
    assert names == {path.name for path in exports[0].glob("*.bin")}
    configs = [read_config(export).config for export in exports]
    centred = configs[1].zero_centered_norm
    for name in names:
        got, want = (np.fromfile(export / name, np.float32) for export in exports)
        added = float(bool(centred) and "norm" in name and ".delta." not in name)
        np.testing.assert_allclose(got, want + added, atol=1e-6, err_msg=name)
    same = [
        {name: value for name, value in vars(config).items() if name[0] != "_"} | plain
        for config in configs
    ]
    for name in TOKENS:
        same[0][name] = same[1][name]
    assert same[0] == same[1]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_heterogeneous_layers_of_megatron(tp_size: int, tmp_path: Path) -> None:
    """The arguments lie among the tensors, as core 0.20 stores them."""
    model = save_nas(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    raw = json.loads(config.read_text())
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    config.write_text(json.dumps(raw))
    tensors = core_maker.nemotron_nas(model, raw)
    args = argparse.Namespace(**core_maker.nemotron_nas_options(raw))
    core_maker.write(tmp_path / "core", tensors, args=args)
    check(tmp_path / "core", tmp_path / "hf", tmp_path, tp_size)


def grouped_deepseek() -> Any:
    """A DeepSeek-V3 whose groups are as good as the sum of their two best experts, as the core's
    are for so many experts of a token."""
    tiny = LATER_DECODERS["deepseek_v3"]
    values = {**tiny.values, "num_experts_per_tok": 4, "attention_bias": False}
    return TinyModel(tiny.model, tiny.config, values).make()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_latent_attention_with_experts_in_groups(tp_size: int, tmp_path: Path) -> None:
    model = grouped_deepseek()
    model.save_pretrained(tmp_path / "hf")
    options = core_maker.deepseek_options(model.config)
    core_maker.write(tmp_path / "core", core_maker.deepseek(model), options)
    check(tmp_path / "core", tmp_path / "hf", tmp_path, tp_size)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["latent", "hybrid", "delta", "heterogeneous"])
def test_ranks_share_a_model_of_megatron(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """Logits are those of transformers."""
    if kind == "latent":
        model = grouped_deepseek()
        options = core_maker.deepseek_options(model.config)
        core_maker.write(tmp_path / "core", core_maker.deepseek(model), options)
    elif kind == "hybrid":
        model = _of_width_4()
        options = core_maker.nemotron_h_options(model.config)
        core_maker.write(tmp_path / "core", core_maker.nemotron_h(model), options)
    elif kind == "delta":
        model = made("qwen3_next")
        options = core_maker.qwen3_next_options(model.config)
        core_maker.write(tmp_path / "core", core_maker.qwen3_next(model), options)
    else:
        model = save_nas(tmp_path / "hf")
        raw = json.loads((tmp_path / "hf" / "config.json").read_text())
        options = core_maker.nemotron_nas_options(raw)
        scaling = {"rope_scaling": True, "rope_scaling_factor": 8.0, "old_context_len": 16}
        tensors = core_maker.nemotron_nas(model, raw)
        bridge = {
            **options,
            **scaling,
            "num_query_groups": 4,
            "activation_func": {"_target_": "torch.nn.functional.silu"},
            "gated_linear_unit": True,
            "layernorm_epsilon": raw["rms_norm_eps"],
            "share_embeddings_and_output_weights": False,
        }
        core_maker.write(tmp_path / "core", tensors, bridge)
    folder = export_folder(tmp_path / "core", tmp_path, shape[0], processes=1)
    engine = Engine.load(EngineSettings(folder, parallelism=Parallelism(*shape), device="cpu"))
    try:
        ids = tuple(range(3, 40))
        request = GenerateRequest(ids, 4, end_id=0, return_context_logits=True)
        got = torch.as_tensor(engine.submit(request).result(120).context_logits)
    finally:
        engine.close()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert float((got - expected).abs().max() / expected.abs().max()) <= 2e-4


def lora(module: str, rows: int, columns: int) -> State:
    generator = torch.Generator().manual_seed(3)
    return {
        f"{module}.adapter.linear_in.weight": torch.randn(4, columns, generator=generator),
        f"{module}.adapter.linear_out.weight": torch.randn(rows, 4, generator=generator),
    }


@pytest.mark.parametrize("form", ["parts", "ranks"])
def test_lora_of_mamba_is_merged(form: str, tmp_path: Path) -> None:
    """Its rows lie in parts, as the base's, or one rank's after the other's."""
    model = _of_width_4()
    tensors = core_maker.nemotron_h(model)
    module, config = "decoder.layers.0.mixer.in_proj", model.config
    inner = config.mamba_num_heads * config.mamba_head_dim
    group = config.n_groups * config.ssm_state_size
    sizes = {"z": inner, "x": inner, "B": group, "C": group, "dt": config.mamba_num_heads}
    adapter = lora(module, sum(sizes.values()), config.hidden_size)
    down, up = adapter.values()
    base = torch.cat([tensors[f"{module}.weight.{part}"] for part in sizes])
    changed = dict(core_maker.cut(f"{module}.weight", base + 2 * up @ down, sizes))
    options = core_maker.nemotron_h_options(config)
    core_maker.write(tmp_path / "merged", tensors | changed, options)
    name = f"{module}.adapter.linear_out.weight"
    if form == "parts":
        stored = adapter | dict(core_maker.cut(name, adapter.pop(name), sizes))
        core_maker.write(tmp_path / "core", tensors | stored, options)
    else:
        parts = [part.chunk(2) for part in up.split(list(sizes.values()))]
        rows = torch.cat([part[rank] for rank in range(2) for part in parts])
        stored = {key: values.numpy() for key, values in (tensors | adapter).items()}
        stored[name] = rows.numpy()

        def chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
            return (shape[0] // 2, *shape[1:]) if shape == tuple(up.shape) else shape

        write_zarr(tmp_path / "core", stored, chunks)
    peft = {"_target_": "megatron.bridge.peft.lora.LoRA", "alpha": 8, "dim": 4}
    ranks = 2 if form == "ranks" else 1
    raw = {
        "model": {**options, "tensor_model_parallel_size": ranks},
        "peft": {**peft, "target_modules": ["*.layers.0.mixer.in_proj"]},
    }
    (tmp_path / "core" / "run_config.yaml").write_text(yaml.safe_dump(raw))
    exports = [
        export_folder(tmp_path / name, tmp_path / f"of {name}", processes=1)
        for name in ("core", "merged")
    ]
    for path in exports[1].glob("*.bin"):
        got = np.fromfile(exports[0] / path.name, np.float32)
        np.testing.assert_allclose(got, np.fromfile(path, np.float32), rtol=1e-5, atol=1e-5)


LATENT = ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")


@pytest.mark.parametrize("kind", ["latent", "delta", "delta in parts"])
def test_lora_of_latent_attention_and_delta_nets(kind: str, tmp_path: Path) -> None:
    """Merged, and kept beside the weights for requests to choose."""
    model = grouped_deepseek() if kind == "latent" else made("qwen3_next")
    maker = "deepseek" if kind == "latent" else "qwen3_next"
    tensors = getattr(core_maker, maker)(model)
    options = getattr(core_maker, f"{maker}_options")(model.config)
    stem = "decoder.layers.0.self_attention"
    modules = [f"linear_{name}" for name in LATENT] if kind == "latent" else ["in_proj", "out_proj"]
    adapter: State = {}
    changed = dict(tensors)
    for module in modules:
        name = f"{stem}.{module}.weight"
        parts = {key: values for key, values in tensors.items() if key.startswith(name)}
        rows, columns = (
            sum(len(part) for part in parts.values()),
            next(iter(parts.values())).shape[1],
        )
        pair = lora(f"{stem}.{module}", rows, columns)
        down, up = pair.values()
        updates = (2 * up @ down).split([len(part) for part in parts.values()])
        changed |= {
            key: values + update
            for (key, values), update in zip(parts.items(), updates, strict=True)
        }
        if kind == "delta in parts" and len(parts) > 1:
            key = f"{stem}.{module}.adapter.linear_out.weight"
            sizes = {part.rpartition(".")[2]: len(values) for part, values in parts.items()}
            pair |= dict(core_maker.cut(key, pair.pop(key), sizes))
        adapter |= pair
    for name, state in (("base", tensors), ("merged", changed)):
        core_maker.write(tmp_path / name, state, options)
    core_maker.write(tmp_path / "lora", adapter, {"tensor_model_parallel_size": 1})
    raw = yaml.safe_load((tmp_path / "lora" / "run_config.yaml").read_text())
    peft = {"_target_": "megatron.bridge.peft.lora.LoRA", "alpha": 8, "dim": 4}
    raw["peft"] = {**peft, "target_modules": [f"*.layers.0.*.{module}" for module in modules]}
    (tmp_path / "lora" / "run_config.yaml").write_text(yaml.safe_dump(raw))
    adapters = (str(tmp_path / "lora"),)
    want, _ = open_weights(export_folder(tmp_path / "merged", tmp_path / "a", 2, processes=1))
    got, config = open_weights(
        export_folder(
            tmp_path / "base", tmp_path / "b", 2, processes=1, adapter_checkpoints=adapters
        )
    )
    for name in want.rows:
        for layer in range(config.num_layers):
            if f"layers.{layer}." in name:
                torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)
    kept = check_kept(tmp_path / "base", tmp_path / "c", adapters, [want])
    assert len(kept.parts.lora_targets) == len(modules)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_pattern": "M+"}, r"has layers that are not supported; got \['\+'\]"),
        ({"hybrid_layer_pattern": "MD|*"}, r"has layers that are not supported; got \['D'\]"),
        (
            {"hybrid_layer_pattern": "M*", "multi_latent_attention": True, "qk_layernorm": True},
            "layers of several kinds together with multi_latent_attention",
        ),
        ({"experimental_attention_variant": "gdn2"}, "attention_variant is not supported; got 'gd"),
        ({"experimental_attention_variant": "gdn"}, "linear_attention_freq is not supported"),
        ({"linear_attention_freq": 4}, "linear_attention_freq needs experimental_attention_var"),
        ({"heterogeneous_block_specs": True}, "heterogeneous_block_specs needs heterogeneous_la"),
        (
            {"heterogeneous_layers_config_encoded_json": "{"},
            "heterogeneous_layers_config_encoded_json is damaged",
        ),
        (
            {
                "hybrid_layer_pattern": "MG",
                "linear_conv_kernel_dim": 3,
            },
            "must have one width of convolutions",
        ),
        (
            {"hybrid_stack_spec": {"_target_": "mine.stack_spec"}},
            "hybrid_stack_spec is not supported, which may change the network",
        ),
        (
            {"spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "gated_delta_product_x"]},
            "spec is not supported",
        ),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    least = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
    with pytest.raises(CheckpointError, match=message):
        read_core_gpt(of_bridge({**least, "position_embedding_type": "rope", **changes}, "it"))


def test_a_part_of_a_tensor_that_is_missing(tmp_path: Path) -> None:
    model = _of_width_4()
    tensors = core_maker.nemotron_h(model)
    del tensors["decoder.layers.0.mixer.in_proj.weight.B"]
    core_maker.write(tmp_path / "core", tensors, core_maker.nemotron_h_options(model.config))
    refused_export(tmp_path / "core", tmp_path, "layers.0.mixer.in_proj.weight lacks parts, or")
