"""Checkpoints whose weights are stored in FP8: exported as the wide weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from launcher_scripts.checkpoint.export import open_source
from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import FLOAT8, widened
from launcher_scripts.checkpoint.layout.tasks import plan_tasks
from launcher_scripts.checkpoint.verification import Forecast
from launcher_scripts.models import family_of
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.test_huggingface import contents
from tests.checkpoint.tiny_models import LLAMA

BLOCK = (8, 16)  # neither divides all sizes of the model
Made = Callable[..., Path]


def group(**weights: Any) -> dict[str, Any]:
    said = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **weights}
    return {"group_0": {"targets": ["Linear"], "weights": said, "output_activations": None}}


def compressed(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        **more,
    }


FINE_GRAINED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": ["lm_head"],
}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
# quantization_config, the name of the scales, and what shares one of them
SCHEMES: dict[str, tuple[dict[str, Any] | None, str, tuple[int, int] | None]] = {
    "tensor": (compressed(config_groups=group(strategy="tensor")), "weight_scale", None),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "weight_scale",
        (1, 1 << 20),
    ),
    "channel": (compressed(config_groups=group(strategy="channel")), "weight_scale", (1, 1 << 20)),
    "compressed block": (
        compressed(config_groups=group(strategy="block", block_structure=list(BLOCK))),
        "weight_scale",
        BLOCK,
    ),
    "block": (FINE_GRAINED, "weight_scale_inv", BLOCK),
    "modelopt": (None, "weight_scale", None),
}


def in_fp8(weight: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3, scales, and the weight they stand for."""
    high, wide = block or weight.shape
    rows, columns = (
        -(-size // part) for size, part in zip(weight.shape, (high, wide), strict=True)
    )
    scales = torch.rand(rows, columns) + 0.01
    spread = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return stored, scales if block else scales[0, 0], stored.float() * spread


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A folder with the projections in FP8; `wide` beside it has what they stand for."""

    def make(scheme: str = "tensor", config: dict[str, Any] | None = None, **tensors: Any) -> Path:
        said, scale_name, block = SCHEMES[scheme]
        torch.manual_seed(0)
        folder, wide = tmp_path / "hf", tmp_path / "wide"
        for place in (folder, wide):
            LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(place)
        state = load_file(folder / "model.safetensors")
        meant = dict(state)
        for name in [name for name in state if "proj" in name]:
            stem = name.removesuffix("weight")
            state[name], state[stem + scale_name], meant[name] = in_fp8(state[name], block)
            for scale in ("input_scale", "activation_scale"):
                state[stem + scale] = torch.ones(())
        save_file(state | tensors, folder / "model.safetensors")
        save_file(meant, wide / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text())
        if config is not None or said is not None:
            raw["quantization_config"] = said if config is None else config
            (folder / "config.json").write_text(json.dumps(raw))
        else:
            modelopt = {"producer": {"name": "modelopt"}, "quantization": MODELOPT}
            (folder / "hf_quant_config.json").write_text(json.dumps(modelopt))
        return folder

    return make


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_stored_is_widened(made: Made, tmp_path: Path, scheme: str) -> None:
    folder = made(scheme)
    found = export_folder(folder, tmp_path / "a", tp_size=2, verify=True)
    expected = export_folder(tmp_path / "wide", tmp_path / "b", tp_size=2)
    assert contents(found) == contents(expected)
    manifest = read_manifest(found)
    assert manifest is not None
    assert "weights stored in fp8 are widened" in json.dumps(manifest.source["notes"])


def test_a_byte_is_read_of_a_weight_in_fp8(made: Made, tmp_path: Path) -> None:
    small, wide = (open_source(Archive(place)) for place in (made(), tmp_path / "wide"))
    specs = family_of(small.config).weights(small.config)
    found, expected = (
        Forecast.of("huggingface", "gpt", plan_tasks(each, specs, "fp8"), 1000, 10**9)
        for each in (small, wide)
    )
    assert found.parameters == expected.parameters
    in_bytes = 2 * (16 * (16 + 2 * 8 + 16) + 3 * 16 * 24)  # of two layers' projections
    assert expected.bytes_to_read - found.bytes_to_read == 3 * in_bytes


def test_every_number_of_fp8() -> None:
    bits = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(widened(bits.view(FLOAT8)), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "unknown quant_method; got 'aqlm'; choices: fp8, "),
        (FINE_GRAINED | {"fmt": "e5m2"}, "fmt is not supported; got 'e5m2'"),
        (FINE_GRAINED | {"weight_block_size": [8]}, "weight_block_size must be two sizes"),
        (FINE_GRAINED | {"rotation": "hadamard"}, "rotation is not known here; got 'hadamard'"),
        (compressed(config_groups=group(num_bits=4)), "weights.num_bits is not supported; got 4"),
        (compressed(config_groups=group(type="int")), "weights.type is not supported; got 'int'"),
        (compressed(config_groups=group(strategy="group")), "strategy is not supported"),
        (compressed(config_groups=None), "config_groups must be a mapping"),
        (
            compressed(config_groups=group(), format="pack-quantized"),
            "weights.type is not supported",
        ),
        (
            compressed(config_groups=group(), sparsity_config={"format": "sparse-24-bitmask"}),
            "format is not supported; got 'sparse-24-bitmask'",
        ),
        (
            compressed(config_groups=group(), transform_config={"config_groups": {"R1": {}}}),
            "transform_config is not known here",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo .* got 'W4A8_AWQ'"),
    ],
)
def test_other_schemes_are_refused(
    made: Made, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    refused_export(made(config=config), tmp_path, message)


def test_scales_that_do_not_fit_are_refused(made: Made, tmp_path: Path) -> None:
    wrong = {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(3)}
    message = r"the scales of layers.0.mlp.up_proj.weight do not fit its shape \(24, 16\)"
    refused_export(made(**wrong), tmp_path, message)


def test_weights_without_a_scale_are_refused(made: Made, tmp_path: Path) -> None:
    lost = {"lm_head.weight": torch.ones(67, 16).to(torch.float8_e4m3fn)}
    refused_export(made(**lost), tmp_path, "lm_head.weight is in fp8 and has 0 scales")
    refused_export(made(config={}, **lost), tmp_path, "unknown quant_method")


def test_fp8_that_nothing_explains_is_refused(made: Made, tmp_path: Path) -> None:
    folder = made("modelopt")
    (folder / "hf_quant_config.json").unlink()
    refused_export(folder, tmp_path, r"tensors are in fp8, and quantization_config is missing")
