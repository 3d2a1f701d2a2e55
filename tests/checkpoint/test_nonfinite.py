"""NaN and infinite weights: named by their source and refused, or exported where asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.formats.source_tensor import widened
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.megatron_maker import Maker
from tests.checkpoint.test_export_failures import edited
from tests.checkpoint.test_gguf import write
from tests.checkpoint.tiny_models import DECODERS
from tests.checkpoint_maker import make_nemo, rebuilt, small_config

NAN, INF = float("nan"), float("inf")
DATA_TYPES = ("fp32", "fp16", "bf16")


def nemo(folder: Path) -> tuple[Path, str]:
    """A checkpoint with three such values, and the tensor that has them."""
    make_nemo(folder / "s.nemo", small_config())
    key = "encoder.layers.1.mlp.dense_4h_to_h.weight"

    def change(state: dict[str, Any]) -> None:
        state[f"model.language_model.{key}"][3, 4:7] = torch.tensor([NAN, INF, -INF])

    return edited(folder / "s.nemo", change), key


def safetensors(folder: Path) -> tuple[Path, str]:
    DECODERS["gpt2"].make().save_pretrained(folder / "hf")
    state = load_file(folder / "hf" / "model.safetensors")
    (key,) = (key for key in state if key.endswith("h.1.mlp.c_proj.weight"))
    state[key][3, 4:7] = torch.tensor([NAN, INF, -INF])
    save_file(state, folder / "hf" / "model.safetensors", {"format": "pt"})
    return folder / "hf", "h.1.mlp.c_proj.weight"


def torch_files(folder: Path) -> tuple[Path, str]:
    path, key = safetensors(folder)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    return path, key


def megatron(folder: Path) -> tuple[Path, str]:
    path = Maker().write(folder / "megatron") / "mp_rank_00" / "model_optim_rng.pt"
    loaded = torch.load(path, weights_only=False)
    encoder = loaded["model"]["language_model"]["encoder"]
    encoder["layers.1.mlp.dense_4h_to_h.weight"][3, 4:7] = torch.tensor([NAN, INF, -INF])
    torch.save(loaded, path)
    return folder / "megatron", "encoder.layers.1.mlp.dense_4h_to_h.weight"


def gguf_file(folder: Path) -> tuple[Path, str]:
    model = DECODERS["llama"].make()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4:7] = torch.tensor([NAN, INF, -INF])
    write(model, folder / "m.gguf", gguf.GGMLQuantizationType.F32)
    return folder / "m.gguf", "blk.1.ffn_down.weight"


SOURCES = {
    "nemo": nemo,
    "megatron": megatron,
    "safetensors": safetensors,
    "torch": torch_files,
    "gguf": gguf_file,
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_the_tensor_is_named(tmp_path: Path, name: str, data_type: str) -> None:
    source, key = SOURCES[name](tmp_path)
    text = refused_export(source, tmp_path, "1 problem in the weights of", data_type=data_type)
    assert f"- {key} has 3 NaN or infinite values of " in text
    assert text.endswith("; change export.model.allow_nonfinite")


def test_all_tensors_are_named_at_once(tmp_path: Path) -> None:
    """Also those that are too large for the type, of a source that several rows are made of."""
    make_nemo(tmp_path / "s.nemo", small_config())
    stem = "model.language_model."

    def change(state: dict[str, Any]) -> None:
        state[f"{stem}embedding.word_embeddings.weight"][0] = NAN
        state[f"{stem}encoder.layers.0.self_attention.query_key_value.bias"][-1] = INF
        state[f"{stem}encoder.layers.2.mlp.dense_h_to_4h.weight"][1, 1] = -70000.0

    source = edited(tmp_path / "s.nemo", change)
    text = refused_export(source, tmp_path, "3 problems in the weights of", 2, data_type="fp16")
    hidden = small_config().hidden_size
    assert f"- embedding.word_embeddings.weight has {hidden} NaN or infinite values of " in text
    assert f"query_key_value.bias has 1 NaN or infinite values of {3 * hidden}; change" in text
    assert "layers.2.mlp.dense_h_to_4h.weight does not fit fp16: its values reach 70000" in text


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_they_pass_where_that_is_asked_for(tmp_path: Path, data_type: str) -> None:
    source, _ = nemo(tmp_path)
    more = {"allow_nonfinite": True, "verify": True}
    folder = export_folder(source, tmp_path, 2, data_type, **more)
    found = widened(rebuilt(FTCheckpoint.open(folder))["layers.1.mlp.dense_4h_to_h.weight"])
    assert np.isnan(found[4, 3])
    assert found[5, 3] == np.inf
    assert found[6, 3] == -np.inf
    assert np.isfinite(found).sum() == found.size - 3


def test_what_is_too_large_is_refused_beside_what_may_pass(tmp_path: Path) -> None:
    source, _ = nemo(tmp_path)

    def change(state: dict[str, Any]) -> None:
        state["model.language_model.encoder.layers.1.mlp.dense_4h_to_h.weight"][0, 0] = 1e5

    more = {"data_type": "fp16", "allow_nonfinite": True}
    refused_export(edited(source, change), tmp_path, "fit fp16: its values reach 100000", **more)
