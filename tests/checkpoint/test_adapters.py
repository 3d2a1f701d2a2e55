"""Adapters of a small GPT: any source TP and PP, any target TP, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.exporting import export_folder, open_weights
from tests.checkpoint.exporting import refused_export as refused
from tests.checkpoint.kept_lora import check_kept
from tests.checkpoint.parts_maker import (
    Random,
    adapter_layers,
    flat,
    ia3_layers,
    nested,
    ranks,
    write_parts,
)
from tests.checkpoint.reference_forward_gpt import logits
from tests.checkpoint_maker import Variant, make_nemo, small_config

CONFIG = small_config()
CORE = small_config(num_kv_heads=2, position_embedding="rope", tied_embeddings=False)
CLASSIC_STACK, CORE_STACK = "model.language_model.encoder.layers.", "model.decoder.layers."
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
DIVISIONS = [(1, 1), (2, 1), (2, 2), (4, 4)]
IA3_AXES = {"scalers": 0}
ADAPTER_AXES = {"linear_in.weight": 0, "linear_out.weight": 1}
ADAPTERS = {"adapter_tuning": {"type": "parallel_adapter", "norm_position": "pre"}}


def ia3_file(path: Path, seed: int, tp: int = 1, pp: int = 1, **sizes: int) -> str:
    width, ffn = sizes.get("width", CONFIG.kv_size), sizes.get("ffn", CONFIG.ffn_size)
    layers = ia3_layers(Random(seed), sizes.get("layers", CONFIG.num_layers), width, ffn)
    return str(write_parts(path, nested(ranks(layers, IA3_AXES, tp, pp, CLASSIC_STACK))))


@pytest.mark.parametrize(("tp", "pp"), DIVISIONS)
def test_ia3_of_any_division(base: Path, tmp_path: Path, tp: int, pp: int) -> None:
    whole = ia3_file(tmp_path / "whole.nemo", 1)
    cut = ia3_file(tmp_path / "cut.nemo", 1, tp, pp)
    expected, _ = open_weights(export_folder(base, tmp_path / "a", ia3_checkpoints=(whole,)))
    found, config = open_weights(export_folder(base, tmp_path / "b", 4, ia3_checkpoints=(cut,)))
    names = [name for name in found.rows if ".ia3." in name]
    assert len(names) == 3 * config.num_layers
    for name in names:
        assert torch.equal(found[name], expected[name])


def test_ia3_tasks_are_rows_and_fold_to_their_product(base: Path, tmp_path: Path) -> None:
    files = tuple(ia3_file(tmp_path / f"{seed}.nemo", seed) for seed in (1, 2))
    rows, config = open_weights(export_folder(base, tmp_path / "a", 2, ia3_checkpoints=files))
    assert config.parts.ia3_num_tasks == 2
    first, second = (logits(rows, config, IDS, ia3=task) for task in (0, 1))
    assert not torch.allclose(first, second, atol=1e-2)
    for number, expected in enumerate((first, second)):
        folder = export_folder(
            base, tmp_path / f"f{number}", 2, ia3_checkpoints=files[number:][:1], ia3_in_place=True
        )
        folded, config = open_weights(folder)
        torch.testing.assert_close(logits(folded, config, IDS), expected, rtol=1e-4, atol=1e-4)
    both = export_folder(base, tmp_path / "f", 1, ia3_checkpoints=files, ia3_in_place=True)
    name = "layers.2.mlp.dense_4h_to_h.weight"
    product = (rows["layers.2.mlp.ia3.weight"][0] * rows["layers.2.mlp.ia3.weight"][1])[:, None]
    torch.testing.assert_close(open_weights(both)[0][name], rows[name] * product)


def test_ia3_of_grouped_queries_in_half_precision(tmp_path: Path) -> None:
    """Key and value heads that are copied to several ranks, a bfloat16 base, flat names."""
    make_nemo(tmp_path / "base.nemo", CORE, Variant(form="mcore", tp_size=2, dtype="bf16"))
    layers = ia3_layers(Random(3), CORE.num_layers, CORE.kv_size, CORE.ffn_size)
    states = flat(ranks(layers, IA3_AXES, 2, 1, CORE_STACK))
    part = str(write_parts(tmp_path / "ia3.nemo", states))
    rows, config = open_weights(
        export_folder(tmp_path / "base.nemo", tmp_path / "a", 1, ia3_checkpoints=(part,))
    )
    expected = logits(rows, config, IDS, ia3=0)
    folder = export_folder(
        tmp_path / "base.nemo", tmp_path / "b", 4, ia3_checkpoints=(part,), ia3_in_place=True
    )
    stored = np.fromfile(folder / "model.layers.0.attention.query_key_value.bias.3.bin", np.float32)
    query = CORE.q_size // 4
    key = rows["layers.0.attention.query_key_value.bias"][CORE.q_size : CORE.q_size + CORE.kv_size]
    scaled = key * rows["layers.0.attention.k.ia3.weight"][0]
    np.testing.assert_array_equal(stored[query : query + 8], scaled[-8:].numpy())
    assert expected.isfinite().all()


@pytest.mark.parametrize(("tp", "pp"), DIVISIONS)
def test_adapters_of_any_division(base: Path, tmp_path: Path, tp: int, pp: int) -> None:
    layers = adapter_layers(Random(4), CONFIG.num_layers, CONFIG.hidden_size, 8)
    files = {
        "a": nested(ranks(layers, ADAPTER_AXES, 1, 1, CLASSIC_STACK)),
        "b": flat(ranks(layers, ADAPTER_AXES, tp, pp, CLASSIC_STACK)),
    }
    models = []
    for name, states in files.items():
        part = str(write_parts(tmp_path / f"{name}.nemo", states, ADAPTERS))
        tp_size = 1 if name == "a" else 4
        folder = export_folder(base, tmp_path / name, tp_size, adapter_checkpoints=(part,))
        models.append(open_weights(folder))
    assert models[0][1] == models[1][1]
    assert models[0][1].adapter_size == 8
    expected, found = (logits(weights, config, IDS) for weights, config in models)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("tp", "pp"), DIVISIONS)
def test_lora_of_any_division(base: Path, tmp_path: Path, tp: int, pp: int) -> None:
    random = Random(5)
    shapes = {
        "self_attention:lora_kqv_adapter": (CONFIG.hidden_size, CONFIG.qkv_size),
        "self_attention:lora_dense_attention_adapter": (CONFIG.q_size, CONFIG.hidden_size),
        "mlp:lora_4htoh_adapter": (CONFIG.ffn_size, CONFIG.hidden_size),
    }
    layers = {
        layer: {
            f".{name}|linear_{side}.weight": random(*shape)
            for name, (size, out) in shapes.items()
            for side, shape in (("in", (4, size)), ("out", (out, 4)))
        }
        for layer in range(CONFIG.num_layers)
    }
    axes = {
        "lora_kqv_adapter|linear_in.weight": 0,
        "linear_in.weight": 1,
        "linear_out.weight": 0,
    }
    states = flat(ranks(layers, axes, tp, pp, CLASSIC_STACK))
    tuning = {"peft": {"lora_tuning": {"adapter_dim": 4, "alpha": 8}}}
    part = str(write_parts(tmp_path / "lora.nemo", states, tuning))
    plain, _ = open_weights(export_folder(base, tmp_path / "a"))
    found, config = open_weights(
        export_folder(base, tmp_path / "b", 2, adapter_checkpoints=(part,))
    )
    assert not config.parts.names
    for layer, tensors in layers.items():
        update = {
            name: 2 * tensors[f".{name}|linear_out.weight"] @ tensors[f".{name}|linear_in.weight"]
            for name in shapes
        }
        kqv, dense, down = update.values()
        # Rows (head, [q, k, v], dimension) to columns [q | k | v].
        kqv = kqv.unflatten(0, (CONFIG.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        for name, change in (
            ("attention.query_key_value", kqv),
            ("attention.dense", dense),
            ("mlp.dense_4h_to_h", down),
        ):
            name = f"layers.{layer}.{name}.weight"
            torch.testing.assert_close(found[name], plain[name] + change.T)
    check_kept(base, tmp_path / "c", (part,), [found])


@pytest.mark.parametrize("in_place", [False, True])
def test_ia3_of_another_model(base: Path, tmp_path: Path, in_place: bool) -> None:
    part = ia3_file(tmp_path / "p.nemo", 1, width=16, layers=6)
    text = refused(
        base, tmp_path, "should not have", ia3_checkpoints=(part,), ia3_in_place=in_place
    )
    assert "layers.5.mlp.ia3.weight" in text
    assert "layers.0.attention.k.ia3.weight" in text
    few = ia3_file(tmp_path / "few.nemo", 1, layers=2)
    text = refused(base, tmp_path, "missing", ia3_checkpoints=(few,), ia3_in_place=in_place)
    assert "layers.3.attention.v.ia3.weight" in text


def test_parts_of_another_family_or_kind(base: Path, tmp_path: Path) -> None:
    layers = ia3_layers(Random(1), 4, 32, 40)
    states = nested(
        ranks(layers, IA3_AXES, 1, 1, "enc_dec_model.enc_dec_model.encoder.model.layers.")
    )
    t5 = str(write_parts(tmp_path / "t5.nemo", states))
    text = refused(base, tmp_path, "another family", ia3_checkpoints=(t5,))
    assert "t5" in text
    gpt = ia3_file(tmp_path / "gpt.nemo", 1)
    missing = str(tmp_path / "nothing.nemo")
    text = refused(
        base,
        tmp_path,
        "does not belong",
        adapter_checkpoints=(gpt,),
        prompt_checkpoints=(str(base), missing),
    )
    assert "does not exist" in text
    assert "export.model.prompt_checkpoints" in text


def test_lora_that_does_not_fit(base: Path, tmp_path: Path) -> None:
    random = Random(10)

    def part(name: str, layers: int, rank: int, **raw: Any) -> str:
        tensors = {
            layer: {
                ".self_attention:lora_kqv_adapter|linear_in.weight": random(4, 32),
                ".self_attention:lora_kqv_adapter|linear_out.weight": random(96, rank),
            }
            for layer in range(layers)
        }
        states = flat(ranks(tensors, {}, 1, 1, CLASSIC_STACK))
        return str(write_parts(tmp_path / name, states, raw))

    for name, layers, rank, message in (
        ("rank.nemo", 4, 3, "does not fit"),
        ("few.nemo", 2, 4, "layers.3.self_attention.query_key_value.weight is missing"),
        ("many.nemo", 5, 4, "does not have"),
    ):
        refused(base, tmp_path, message, adapter_checkpoints=(part(name, layers, rank),))
    wrong = part("alpha.nemo", 4, 4, peft={"lora_tuning": {"alpha": "x", "adapter_dim": 4}})
    refused(base, tmp_path, "alpha and adapter_dim must be numbers", adapter_checkpoints=(wrong,))
    selected = part("some.nemo", 2, 4, peft={"lora_tuning": {"layer_selection": [1, 2]}})
    export_folder(base, tmp_path / "some", adapter_checkpoints=(selected,))


def test_adapters_that_cannot_be_divided(base: Path, tmp_path: Path) -> None:
    layers = adapter_layers(Random(11), CONFIG.num_layers, CONFIG.hidden_size, 6)
    states = nested(ranks(layers, ADAPTER_AXES, 1, 1, CLASSIC_STACK))
    part = str(write_parts(tmp_path / "p.nemo", states, ADAPTERS))
    refused(base, tmp_path, "choices: 1, 2", 4, adapter_checkpoints=(part,))
    refused(base, tmp_path, "one set of adapters", adapter_checkpoints=(part, part))
    tied = {"adapter_tuning": {"weight_tying": True}}
    other = str(write_parts(tmp_path / "tied.nemo", states, tied))
    refused(base, tmp_path, "weight_tying", adapter_checkpoints=(other,))


def test_the_manifest_names_the_parts(base: Path, tmp_path: Path) -> None:
    part = ia3_file(tmp_path / "p.nemo", 1)
    folder = export_folder(base, tmp_path, ia3_checkpoints=(part,))
    assert part in (folder / "manifest.json").read_text()
