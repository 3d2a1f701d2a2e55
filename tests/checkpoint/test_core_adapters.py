"""LoRA of NeMo 2 and Megatron Bridge. torch writes the checkpoints here, with the names, shapes and
configuration of NeMo 2.5 and Megatron Bridge 0.6: no file of either tool is at hand."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

from launcher_scripts.checkpoint.formats.source_tensor import Piece, SourceTensor
from launcher_scripts.checkpoint.sources.core_adapters import PeftSettings, adapter_of
from launcher_scripts.common.errors import CheckpointError, Problems
from tests.checkpoint.exporting import export_folder, open_weights, refused_export
from tests.checkpoint.kept_lora import check_kept
from tests.checkpoint.peft_maker import PeftMaker
from tests.checkpoint.tiny_models import LLAMA, TinyModel
from tests.checkpoint_maker import small_config

LAYERS, HIDDEN, HEADS, GROUPS, SIZE, FFN = 2, 32, 4, 2, 8, 64
ALPHA, DIM = 8, 4
SHAPES = {
    "self_attention.linear_qkv": ((HEADS + 2 * GROUPS) * SIZE, HIDDEN),
    "self_attention.linear_proj": (HIDDEN, HEADS * SIZE),
    "mlp.linear_fc1": (2 * FFN, HIDDEN),
    "mlp.linear_fc2": (HIDDEN, FFN),
}
CANONICAL = {
    "self_attention.linear_qkv.adapter.adapter_q": (HEADS * SIZE, HIDDEN),
    "self_attention.linear_qkv.adapter.adapter_k": (GROUPS * SIZE, HIDDEN),
    "self_attention.linear_qkv.adapter.adapter_v": (GROUPS * SIZE, HIDDEN),
    "self_attention.linear_proj.adapter": SHAPES["self_attention.linear_proj"],
    "mlp.linear_fc1.adapter.adapter_gate": (FFN, HIDDEN),
    "mlp.linear_fc1.adapter.adapter_up": (FFN, HIDDEN),
}
PLAIN = {f"{name}.adapter": shape for name, shape in SHAPES.items()}
TARGETS = {
    "LoRA": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "DoRA": ["*.linear_qkv", "*.linear_proj", "*.linear_fc1", "*.linear_fc2"],
    "CanonicalLoRA": [
        "linear_q",
        "linear_k",
        "linear_v",
        "linear_proj",
        "linear_fc1_gate",
        "linear_fc1_up",
    ],
}
Tensors = dict[str, torch.Tensor]


def random_adapter(shapes: Mapping[str, tuple[int, int]], dora: bool = False) -> Tensors:
    """Stacked tensors, as both tools name them."""
    generator = torch.Generator().manual_seed(6)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(LAYERS, *shape, generator=generator) * 0.3

    found: Tensors = {}
    for name, (out, size) in shapes.items():
        found[f"decoder.layers.{name}.linear_in.weight"] = random(DIM, size)
        found[f"decoder.layers.{name}.linear_out.weight"] = random(out, DIM)
        if dora:
            found[f"decoder.layers.{name}.weight_magnitude"] = 1 + random(out).abs()
    return found


def per_layer(tensors: Tensors) -> Tensors:
    """As layers that are not all alike are saved: a key per layer."""
    return {
        name.replace(".layers.", f".layers.{layer}."): values[layer]
        for name, values in tensors.items()
        for layer in range(LAYERS)
    }


def write(folder: Path, tensors: Tensors, prefix: str) -> None:
    """A torch_dist folder."""
    folder.mkdir(parents=True)
    state: dict[str, Any] = {prefix + name: values for name, values in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


def settings(method: str, package: str, **more: Any) -> dict[str, Any]:
    return {
        "_target_": f"{package}.{method}",
        "alpha": ALPHA,
        "dim": DIM,
        "dropout": 0.1,
        "dropout_position": "pre",
        "lora_A_init_method": "xavier",
        "target_modules": TARGETS.get(method, []),
        **more,
    }


def bridge(folder: Path, tensors: Tensors, method: str, tp_size: int = 1, **more: Any) -> Path:
    """As Megatron Bridge saves a training with `peft`."""
    step = folder / "iter_0000010"
    write(step, tensors, "")
    peft = settings(method, "megatron.bridge.peft.lora", **more)
    said = {"model": {"tensor_model_parallel_size": tp_size}, "peft": peft}
    (step / "run_config.yaml").write_text(yaml.safe_dump(said))
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return folder


def nemo(folder: Path, tensors: Tensors, method: str, tp_size: int = 1, **more: Any) -> Path:
    """As NeMo 2 saves a training with a model_transform."""
    write(folder / "weights", tensors, "module.")
    (folder / "weights" / "adapter_metadata.json").write_text('{"model_ckpt_path": "/base"}')
    transform = settings(method, "nemo.collections.llm.peft.lora", **more)
    said = {"config": {"tensor_model_parallel_size": tp_size}, "model_transform": transform}
    (folder / "context").mkdir()
    (folder / "context" / "model.yaml").write_text(yaml.safe_dump(said))
    return folder


TOOLS = {"bridge": (bridge, "bridge031_llama31_a"), "nemo": (nemo, "nemo253_llama31_a")}


def base_of(data_dir: Path, tool: str) -> Path:
    return data_dir / "core" / TOOLS[tool][1] / "checkpoint"


def update(tensors: Tensors, name: str, layer: int) -> torch.Tensor:
    """alpha / dim * B A, rows as the layer's."""
    stem = f"decoder.layers.{name}"
    up, down = (tensors[f"{stem}.linear_{side}.weight"][layer] for side in ("out", "in"))
    return ALPHA / DIM * up @ down


def stored(rows: torch.Tensor) -> torch.Tensor:
    """Rows of linear_qkv, per group its queries, key and value, as columns [q | k | v]."""
    groups = rows.reshape(GROUPS, HEADS // GROUPS + 2, SIZE, -1)
    query, key, value = groups[:, :-2], groups[:, -2], groups[:, -1]
    return torch.cat([part.reshape(-1, rows.shape[-1]) for part in (query, key, value)]).T


def check(found: Any, plain: Any, layer: int, updates: Mapping[str, torch.Tensor]) -> None:
    for name, change in updates.items():
        row = f"layers.{layer}.{name}.weight"
        torch.testing.assert_close(found[row], plain[row] + change, rtol=0, atol=2e-6)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("tool", TOOLS)
def test_lora_is_added_in_the_cores_own_layout(data_dir, tmp_path, tool, stacked) -> None:
    tensors = random_adapter(PLAIN)
    saved = tensors if stacked else per_layer(tensors)
    adapter = str(TOOLS[tool][0](tmp_path / "adapter", saved, "LoRA"))
    base = base_of(data_dir, tool)
    plain, _ = open_weights(export_folder(base, tmp_path / "a"))
    found, _ = open_weights(export_folder(base, tmp_path / "b", 2, adapter_checkpoints=(adapter,)))
    check_kept(base, tmp_path / "c", (adapter,), [found])
    for layer in range(LAYERS):
        qkv, proj, fc1, fc2 = (update(tensors, name, layer) for name in PLAIN)
        check(
            found,
            plain,
            layer,
            {
                "attention.query_key_value": stored(qkv),
                "attention.dense": proj.T,
                "mlp.dense_h_to_4h": fc1[:FFN].T,
                "mlp.dense_h_to_4h_2": fc1[FFN:].T,
                "mlp.dense_4h_to_h": fc2.T,
            },
        )


@pytest.mark.parametrize("tp_size", [1, 2])
def test_canonical_lora_of_bridge(data_dir: Path, tmp_path: Path, tp_size: int) -> None:
    """Query, key and value are added head by head; gate and up are stored as if they were fused."""
    tensors = random_adapter(CANONICAL)
    saved = dict(tensors)
    for part in ("gate", "up"):
        name = f"decoder.layers.mlp.linear_fc1.adapter.adapter_{part}.linear_out.weight"
        ranks = [rank.chunk(2, dim=1) for rank in tensors[name].chunk(tp_size, dim=1)]
        saved[name] = torch.cat([half for halves in zip(*ranks, strict=True) for half in halves], 1)
    adapter = str(bridge(tmp_path / "adapter", saved, "CanonicalLoRA", tp_size))
    base = base_of(data_dir, "bridge")
    plain, _ = open_weights(export_folder(base, tmp_path / "a"))
    found, _ = open_weights(export_folder(base, tmp_path / "b", adapter_checkpoints=(adapter,)))
    for layer in range(LAYERS):
        query, key, value, proj, gate, up = (update(tensors, name, layer) for name in CANONICAL)
        check(
            found,
            plain,
            layer,
            {
                "attention.query_key_value": torch.cat([query, key, value]).T,
                "attention.dense": proj.T,
                "mlp.dense_h_to_4h": gate.T,
                "mlp.dense_h_to_4h_2": up.T,
            },
        )


@pytest.mark.parametrize("tp_size", [1, 2])
def test_canonical_lora_of_nemo_is_added_as_it_was_trained(data_dir, tmp_path, tp_size) -> None:
    """Each rank of the training added [queries, keys, values] to rows that lie group by group."""
    names = {name: shape for name, shape in CANONICAL.items() if "fc1" not in name}
    tensors = random_adapter(names)
    targets = TARGETS["CanonicalLoRA"][:4]
    folder = tmp_path / "adapter"
    adapter = str(nemo(folder, tensors, "CanonicalLoRA", tp_size, target_modules=targets))
    base = base_of(data_dir, "nemo")
    plain, _ = open_weights(export_folder(base, tmp_path / "a"))
    found, _ = open_weights(export_folder(base, tmp_path / "b", adapter_checkpoints=(adapter,)))
    for layer in range(LAYERS):
        parts = [update(tensors, name, layer).chunk(tp_size) for name in list(names)[:3]]
        rows = torch.cat([part[rank] for rank in range(tp_size) for part in parts])
        check(found, plain, layer, {"attention.query_key_value": stored(rows)})


@pytest.mark.parametrize("tp_size", [1, 2])
def test_dora_gives_rows_their_length(data_dir: Path, tmp_path: Path, tp_size: int) -> None:
    """Magnitudes of linear_fc1 lie rank by rank."""
    tensors = random_adapter(PLAIN, dora=True)
    saved = dict(tensors)
    name = "decoder.layers.mlp.linear_fc1.adapter.weight_magnitude"
    ranks = zip(*(half.chunk(tp_size, dim=1) for half in tensors[name].chunk(2, 1)), strict=True)
    saved[name] = torch.cat([part for parts in ranks for part in parts], dim=1)
    adapter = str(bridge(tmp_path / "adapter", saved, "DoRA", tp_size))
    base = base_of(data_dir, "bridge")
    plain, _ = open_weights(export_folder(base, tmp_path / "a"))
    found, _ = open_weights(export_folder(base, tmp_path / "b", adapter_checkpoints=(adapter,)))
    for layer in range(LAYERS):
        qkv, _, fc1, fc2 = (update(tensors, module, layer) for module in PLAIN)
        lengths = [
            tensors[f"decoder.layers.{module}.weight_magnitude"][layer, :, None] for module in PLAIN
        ]
        gate, up = lengths[2].chunk(2)
        for row, change, length in (
            ("attention.query_key_value", stored(qkv), stored(lengths[0])),
            ("mlp.dense_h_to_4h", fc1[:FFN].T, gate.T),
            ("mlp.dense_h_to_4h_2", fc1[FFN:].T, up.T),
            ("mlp.dense_4h_to_h", fc2.T, lengths[3].T),
        ):
            name = f"layers.{layer}.{row}.weight"
            merged = plain[name] + change
            expected = merged / merged.norm(dim=0, keepdim=True) * length
            torch.testing.assert_close(found[name], expected, rtol=0, atol=2e-6)


def test_the_base_may_be_of_another_format(tmp_path: Path) -> None:
    """The fused layers' LoRA in a folder of transformers, whose layers are not fused."""
    sizes = {**LLAMA, "hidden_size": HIDDEN, "intermediate_size": FFN, "tie_word_embeddings": False}
    model = TinyModel("LlamaForCausalLM", "LlamaConfig", sizes).save(tmp_path / "base")
    tensors = random_adapter(PLAIN)
    adapter = str(bridge(tmp_path / "adapter", tensors, "LoRA"))
    folder = export_folder(tmp_path / "base", tmp_path / "b", adapter_checkpoints=(adapter,))
    found, _ = open_weights(folder)
    maker = PeftMaker(model)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        qkv, _, fc1, _ = (update(tensors, name, layer) for name in PLAIN)
        names = [f"{stem}.self_attn.{part}_proj.weight" for part in "qkv"]
        fused = torch.cat([maker.merged[name] for name in names]).T
        row = found[f"layers.{layer}.attention.query_key_value.weight"]
        torch.testing.assert_close(row, fused + stored(qkv), rtol=0, atol=2e-6)
        up = maker.merged[f"{stem}.mlp.up_proj.weight"] + fc1[FFN:]
        row = found[f"layers.{layer}.mlp.dense_h_to_4h_2.weight"]
        torch.testing.assert_close(row, up.T, rtol=0, atol=2e-6)


@pytest.mark.parametrize("wrapped", ["", ".to_wrap"])
def test_a_model_that_was_saved_with_its_adapters_is_read_merged(data_dir, tmp_path, wrapped):
    base = base_of(data_dir, "bridge")
    step = base / "iter_0000000"
    reader = FileSystemReader(step)
    entries = reader.read_metadata().state_dict_metadata
    model = {
        name: torch.empty(entry.size) for name, entry in entries.items() if hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(model, storage_reader=reader, no_dist=True)
    model = {
        re.sub(r"(linear_\w+)\.weight$", rf"\1{wrapped}.weight", name): values
        for name, values in model.items()
    }
    tensors = random_adapter(PLAIN)
    alone = str(bridge(tmp_path / "alone", tensors, "LoRA"))
    both = tmp_path / "both" / "iter_0000010"
    write(both, model | tensors, "")
    shutil.copytree(step / "tokenizer", both / "tokenizer")
    said = yaml.safe_load((step / "run_config.yaml").read_text())
    said["peft"] = settings("LoRA", "megatron.bridge.peft.lora")
    (both / "run_config.yaml").write_text(yaml.safe_dump(said))
    found = export_folder(tmp_path / "both", tmp_path / "a")
    expected = export_folder(base, tmp_path / "b", adapter_checkpoints=(alone,))
    names = sorted(path.name for path in expected.glob("*.bin"))
    assert [(found / name).read_bytes() for name in names] == [
        (expected / name).read_bytes() for name in names
    ]
    text = "holds a whole model with its adapters"
    refused_export(base, tmp_path, text, adapter_checkpoints=(str(tmp_path / "both"),))
    refused_export(Path(alone), tmp_path, "holds adapters alone: name it in export.model.adapter")


@pytest.mark.parametrize(("pieces", "shuffled"), [(4, True), (2, False)])
def test_lora_of_a_layer_without_a_gate(pieces: int, shuffled: bool) -> None:
    """Two ranks: before Bridge 0.5.0 the first halves of both are stored before the others."""
    rows = torch.arange(16 * DIM, dtype=torch.float32).reshape(16, DIM)
    stored_rows = torch.cat([rows[0:4], rows[8:12], rows[4:8], rows[12:]]) if shuffled else rows
    parts = stored_rows.numpy().reshape(pieces, -1, DIM)
    up = SourceTensor.of_pieces(
        (16, DIM), [Piece((n * len(part), 0), part) for n, part in enumerate(parts)], "up"
    )
    stem = "decoder.layers.0.mlp.linear_fc1.adapter"
    down = SourceTensor.full(np.zeros((DIM, 8), np.float32))
    tensors = {f"{stem}.linear_in.weight": down, f"{stem}.linear_out.weight": up}
    said = PeftSettings(settings("LoRA", "x"), Problems("the adapter"), 2, False)
    adapter = adapter_of(Path("adapter"), tensors, said, small_config(), ("mcore",))
    (found,) = adapter.updates["decoder.layers.0.mlp.linear_fc1.weight"]
    np.testing.assert_array_equal(found.up.read(), rows.numpy())
    tensors[f"{stem}.linear_out.weight"] = SourceTensor.full(stored_rows.numpy())
    with pytest.raises(CheckpointError, match="does not show in which order its rows are"):
        adapter_of(Path("adapter"), tensors, said, small_config(), ("mcore",))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"_target_": "x.MultiLoRA"}, "_target_ is not supported; got 'MultiLoRA'"),
        ({"alpha": None}, "alpha and dim must be positive numbers"),
        ({"dim": 8}, "has another rank than dim says"),
        ({"of_tomorrow": 1}, "of_tomorrow is not supported; got 1"),
        ({"_target_": "x.DoRA"}, r"not complete; got \['linear_in', 'linear_out'\]"),
        (
            {"target_modules": ["linear_qkv"]},
            r"does not name decoder\.layers\.1\.mlp\.linear_fc2",
        ),
        (
            {"target_modules": ["*.layers.0.*.linear_qkv", "linear_proj"]},
            r"does not name decoder\.layers\.1\.self_attention\.linear_qkv",
        ),
    ],
)
def test_configurations_that_are_not_what_the_tensors_are(data_dir, tmp_path, said, words) -> None:
    adapter = str(bridge(tmp_path / "adapter", random_adapter(PLAIN), "LoRA", **said))
    base = base_of(data_dir, "bridge")
    text = refused_export(base, tmp_path, words, adapter_checkpoints=(adapter,))
    assert adapter in text


def test_lora_of_some_layers(data_dir: Path, tmp_path: Path) -> None:
    """Wildcards choose them; what they choose must be there."""
    tensors = per_layer(random_adapter({"mlp.linear_fc2.adapter": (HIDDEN, FFN)}))
    some = {name: values for name, values in tensors.items() if ".layers.1." in name}
    base = base_of(data_dir, "bridge")
    plain, _ = open_weights(export_folder(base, tmp_path / "a"))
    wanted = {"target_modules": ["*.layers.1.mlp.linear_fc2"]}
    adapter = str(bridge(tmp_path / "adapter", some, "LoRA", **wanted))
    found, _ = open_weights(export_folder(base, tmp_path / "b", adapter_checkpoints=(adapter,)))
    changed = {row for row in plain.rows if not torch.equal(found[row], plain[row])}
    assert changed == {"layers.1.mlp.dense_4h_to_h.weight"}
    all_layers = {"target_modules": ["*.linear_fc2"]}
    adapter = str(bridge(tmp_path / "other", some, "LoRA", **all_layers))
    words = r"LoRA of decoder\.layers\.0\.mlp\.linear_fc2 is missing"
    refused_export(base, tmp_path, words, adapter_checkpoints=(adapter,))


def test_lora_of_another_base_and_of_layers_that_are_missing(data_dir, tmp_path) -> None:
    shapes = {**PLAIN, "mlp.linear_fc2.adapter": (HIDDEN, FFN + 8), "mlp.router.adapter": (4, 4)}
    del shapes["self_attention.linear_proj.adapter"]
    adapter = str(bridge(tmp_path / "adapter", random_adapter(shapes), "LoRA"))
    base = base_of(data_dir, "bridge")
    text = refused_export(base, tmp_path, "the adapter", adapter_checkpoints=(adapter,))
    for words in (
        "learned for decoder.layers.0.mlp.linear_fc2.weight does not fit",
        "no module of the base has decoder.layers.1.mlp.router.weight",
        "LoRA of decoder.layers.1.self_attention.linear_proj is missing",
    ):
        assert words in text


def test_a_folder_that_does_not_say_how_it_was_trained(data_dir: Path, tmp_path: Path) -> None:
    write(tmp_path / "adapter", random_adapter(PLAIN), "")
    refused_export(
        base_of(data_dir, "bridge"),
        tmp_path,
        "does not say how its adapters were trained; choices: section peft of run_config.yaml",
        adapter_checkpoints=(str(tmp_path / "adapter"),),
    )


def test_a_t5_of_the_core(data_dir: Path, tmp_path: Path) -> None:
    base = data_dir / "core" / "mcore016_t5_relative_a" / "checkpoint"
    plain, config = open_weights(export_folder(base, tmp_path / "a"))
    inner, hidden, layers = config.inner_size, config.hidden_size, config.num_layers
    generator = torch.Generator().manual_seed(6)
    tensors = {
        f"encoder.layers.{name}.linear_{side}.weight": torch.randn(
            layers, *shape, generator=generator
        )
        for name, out, size in (
            ("self_attention.linear_qkv.adapter", 3 * inner, hidden),
            ("mlp.linear_fc2.adapter", hidden, config.ffn_size),
        )
        for side, shape in (("in", (DIM, size)), ("out", (out, DIM)))
    }
    adapter = str(bridge(tmp_path / "adapter", tensors, "LoRA"))
    found, _ = open_weights(export_folder(base, tmp_path / "b", adapter_checkpoints=(adapter,)))
    renamed = {name.replace("encoder.", "decoder."): values for name, values in tensors.items()}
    for layer in range(layers):
        rows = update(renamed, "self_attention.linear_qkv.adapter", layer)
        heads = rows.reshape(config.num_heads, 3, config.head_size, hidden)
        for number, part in enumerate("qkv"):
            name = f"encoder.block.{layer}.layer.0.SelfAttention.{part}.weight"
            change = heads[:, number].reshape(inner, hidden).T
            torch.testing.assert_close(found[name], plain[name] + change, rtol=0, atol=1e-5)
        name = f"encoder.block.{layer}.layer.1.DenseReluDense.wo.weight"
        change = update(renamed, "mlp.linear_fc2.adapter", layer).T
        torch.testing.assert_close(found[name], plain[name] + change, rtol=0, atol=1e-5)
