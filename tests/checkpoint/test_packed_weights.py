"""Weights of two to eight bits: the values of the libraries that write them, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from launcher_scripts.checkpoint.formats import source_tensor
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import FLOAT8, SourceTensor
from launcher_scripts.checkpoint.sources import packed_weights
from launcher_scripts.checkpoint.sources.huggingface_quantization import KEY, weight_schemes
from launcher_scripts.common.errors import Problems
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.test_huggingface import contents
from tests.checkpoint.tiny_models import LLAMA

FOLDER = Path(__file__).parents[1] / "data" / "quantized"
FILES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
# What the library itself computes in a narrower type, as a fraction of the largest value.
ROUNDED = {"ct_nvfp4": 2.0**-8, "bnb_int8": 1e-7}


def stored(name: str) -> tuple[dict[str, SourceTensor], np.ndarray, dict[str, Any]]:
    """The tensors of module `m`, the weight by the library's own reader, and its settings."""
    file = f"{name}.safetensors"
    arrays = source_tensor.load_safetensors(Archive(FOLDER).region(file), file)
    with safe_open(FOLDER / file, "np") as opened:
        config = json.loads(opened.metadata()["config"])
    expected = arrays.pop("expected")
    return {key: SourceTensor.full(value) for key, value in arrays.items()}, expected, config


def applied(
    tensors: dict[str, SourceTensor], config: dict[str, Any], **files: dict[str, Any]
) -> list[str]:
    """Put the weights in place of what is stored; the problems."""
    problems = Problems("test")
    present = {f"{name}.json": content for name, content in files.items()}
    for scheme in weight_schemes({KEY: config} if config else {}, present, problems):
        scheme.applied(tensors, problems)
    return problems.messages


@pytest.mark.parametrize("chunk", [1 << 18, 100], ids=["at once", "in chunks"])
@pytest.mark.parametrize("name", FILES)
def test_values_are_those_of_the_library(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "_CHUNK_VALUES", chunk)
    tensors, expected, config = stored(name)
    assert applied(tensors, config) == []
    assert list(tensors) == ["m.weight"]
    values = tensors["m.weight"].read()
    assert values.shape == tensors["m.weight"].shape == expected.shape
    tolerance = ROUNDED.get(name, 0.0) * np.abs(expected).max()
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "file", "settings"),
    [
        ("gptq_4_act_order", "quantize_config", {"bits": 4, "group_size": 16, "desc_act": True}),
        ("awq", "quant_config", {"w_bit": 4, "q_group_size": 16, "zero_point": True}),
        ("modelopt_nvfp4", "hf_quant_config", {"quantization": {"quant_algo": "NVFP4"}}),
    ],
)
def test_settings_in_a_file_of_their_own(name: str, file: str, settings: dict[str, Any]) -> None:
    tensors, expected, _ = stored(name)
    assert applied(tensors, {}, **{file: settings}) == []
    np.testing.assert_array_equal(tensors["m.weight"].read(), expected)


def test_three_bits_lie_across_words() -> None:
    """Of a stream of bits, the lowest first."""
    numbers = np.random.default_rng(0).integers(0, 8, (64, 32))
    bits = (numbers[:, :, None] >> np.arange(3) & 1).astype(np.uint8)

    def packed(values: np.ndarray) -> np.ndarray:  # [count, columns, 3] -> words along the first
        stream = values.swapaxes(0, 1).reshape(values.shape[1], -1)
        return np.packbits(stream, 1, "little").view("<i4").T.copy()

    tensors = {
        "m.qweight": packed(bits),
        "m.qzeros": np.ascontiguousarray(packed(np.swapaxes(bits[:2], 0, 1)).T),
        "m.scales": np.array([[0.5] * 32, [2.0] * 32], np.float16),
    }
    sources = {key: SourceTensor.full(value) for key, value in tensors.items()}
    config = {"quant_method": "gptq", "bits": 3, "group_size": 32, "checkpoint_format": "gptq_v2"}
    assert applied(sources, config) == []
    zeros, scales = np.repeat(numbers[:2], 32, 0), np.repeat(tensors["m.scales"], 32, 0)
    np.testing.assert_array_equal(sources["m.weight"].read(), ((numbers - zeros) * scales).T)


def words_of(numbers: np.ndarray, bits: int) -> np.ndarray:
    """int32 words along the first axis of a stream of bits, the lowest first."""
    text = ["".join(f"{number:0{bits}b}"[::-1] for number in column) for column in numbers.T]
    words = [[int(row[n : n + 32][::-1], 2) for n in range(0, len(row), 32)] for row in text]
    return np.array(words, np.uint32).T.view(np.int32).copy()


def less_one(words: np.ndarray, ones: list[int]) -> np.ndarray:
    """Words less one in each of their numbers, as one subtraction of the word."""
    cycle = [ones[column % len(ones)] for column in range(words.shape[1])]
    values = (words.astype(np.int64) - cycle) % (1 << 32)
    return values.astype(np.uint32).view(np.int32)


ONES = {2: [0x55555555], 4: [0x11111111], 8: [0x01010101]}
GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:5.7.0"]}, "format": "gptq", "pack_impl": "cpu"}
# bits, group_size, act-order, checkpoint_format, what else the settings say, what words are less by
GPTQ = [
    (2, 32, False, "gptq", {}, ONES[2]),
    (3, 64, True, "gptq", GPTQMODEL, [0x24924924, 0x92492492, 0x49249249]),
    (3, -1, False, "gptq_v2", {}, []),
    (4, -1, False, "gptq", GPTQMODEL, ONES[4]),
    (4, 32, True, "gptq", {}, ONES[4]),
    (4, 64, False, "gptq_v2", {}, []),
    (4, 128, True, "gptq_v2", {}, []),
    (4, 128, False, "gptq", {"dynamic": {"-:.*lm_head.*": {}}}, ONES[4]),
    (8, 128, False, "gptq", {}, ONES[8]),
]


@pytest.mark.parametrize(("bits", "size", "is_ordered", "name", "more", "ones"), GPTQ)
def test_gptq_of_any_groups_and_zero_points(
    bits: int, size: int, is_ordered: bool, name: str, more: dict[str, Any], ones: list[int]
) -> None:
    """Zero points of 0, of which 1 is borrowed from their neighbours, and of the most."""
    draw, (inputs, outputs), top = np.random.default_rng(bits + size), (256, 96), 1 << bits
    group = inputs if size == -1 else size
    order = np.arange(inputs) // group
    order = draw.permutation(order) if is_ordered else order
    numbers = draw.integers(0, top, (inputs, outputs))
    zeros = draw.choice([0, 1, top - 1, top // 2], (inputs // group, outputs))
    scales = draw.uniform(0.1, 1, zeros.shape).astype(np.float16)
    stored_zeros = np.ascontiguousarray(words_of(zeros.T, bits).T)
    tensors = {
        "m.qweight": words_of(numbers, bits),
        "m.qzeros": less_one(stored_zeros, ones) if ones else stored_zeros,
        "m.scales": scales,
        "m.g_idx": order.astype(np.int32),
    }
    sources = {key: SourceTensor.full(value) for key, value in tensors.items()}
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False}
    config |= {"desc_act": is_ordered, "checkpoint_format": name, "lm_head": False, **more}
    assert applied(sources, config) == []
    expected = (numbers - zeros[order]).astype(np.float32) * scales[order].astype(np.float32)
    np.testing.assert_array_equal(sources["m.weight"].read(), expected.T)


@pytest.mark.parametrize("size", [-1, 32, 64, 128])
def test_awq_of_any_groups(size: int) -> None:
    """Eight neighbouring outputs share a word, in an order of their own; the settings are those
    that GPTQModel writes."""
    draw, (inputs, outputs) = np.random.default_rng(size + 1), (256, 40)
    group = inputs if size == -1 else size
    numbers = draw.integers(0, 16, (inputs, outputs))
    zeros = draw.integers(0, 16, (inputs // group, outputs))
    scales = draw.uniform(0.1, 1, zeros.shape).astype(np.float16)

    def packed(values: np.ndarray) -> np.ndarray:
        eights = values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return np.ascontiguousarray(words_of(eights.reshape(len(values), -1).T, 4).T)

    tensors = {"m.qweight": packed(numbers), "m.qzeros": packed(zeros), "m.scales": scales}
    sources = {key: SourceTensor.full(value) for key, value in tensors.items()}
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True}
    config |= {"version": "gemm", "format": "gemm", "checkpoint_format": "gemm", "lm_head": False}
    config |= {"pack_dtype": "int32", "desc_act": False, "modules_to_not_convert": ["lm_head"]}
    assert applied(sources, config) == []
    expected = (numbers - zeros.repeat(group, 0)) * scales.repeat(group, 0).astype(np.float32)
    np.testing.assert_array_equal(sources["m.weight"].read(), expected.astype(np.float32).T)


def test_biases_of_zeros_that_gptq_adds_are_removed() -> None:
    tensors, _, config = stored("gptq_4")
    parts = {key.removeprefix("m."): tensor for key, tensor in tensors.items()}
    zeros, ones = (SourceTensor.full(np.full(24, value, np.float16)) for value in (0, 1))
    biases = {"0.up.bias": zeros, "1.up.bias": zeros, "0.q.bias": zeros, "1.q.bias": ones}
    modules = [name.removesuffix(".bias") for name in biases]
    both = {f"{module}.{key}": tensor for module in modules for key, tensor in parts.items()}
    tensors = {**both, **biases, "norm.bias": zeros}
    assert applied(tensors, config) == []
    assert sorted(name for name in tensors if name.endswith("bias")) == [
        *("0.q.bias", "1.q.bias", "norm.bias")
    ]


def changed(tensor: SourceTensor, change: Any) -> SourceTensor:
    return SourceTensor.full(np.ascontiguousarray(change(tensor.read())))


def state(**changes: Any) -> Any:
    """Values of a quant_state of bitsandbytes changed."""

    def change(values: np.ndarray) -> np.ndarray:
        text = json.dumps(json.loads(values.tobytes()) | changes)
        return np.frombuffer(text.encode(), np.uint8)

    return change


STATE = "weight.quant_state.bitsandbytes__nf4"
MISFITS: list[tuple[str, str, Any, str]] = [
    ("gptq_4", "qzeros", None, "lacks m.qzeros"),
    ("gptq_4", "scales", lambda v: v[:2], "qzeros have another shape"),
    ("gptq_4", "qzeros", lambda v: v.astype(np.int64), "qzeros are not int32"),
    ("gptq_4", "scales", lambda v: v.astype(np.int32), "scales are not floats"),
    ("gptq_4_act_order", "g_idx", lambda v: v + 1, "g_idx names groups beyond 4"),
    ("gptq_4_act_order", "g_idx", lambda v: v[:8], "qweight has another shape"),
    ("awq", "qweight", lambda v: v[:, :2], "qzeros have another shape"),
    ("awq", "scales", lambda v: v[:1], "scales have another shape"),
    ("ct_int4_group", "weight_shape", lambda v: v * 4, r"shape \(96, 256\) does not fit"),
    ("ct_int4_group", "weight_shape", lambda v: v - v - 1, "does not fit"),
    ("ct_int4_group", "weight_scale", lambda v: v[:, :3], "weight_scale has another shape"),
    ("ct_int4_group_asym", "weight_zero_point", None, "weight_zero_point is missing"),
    ("ct_int4_group_asym", "weight_zero_point", lambda v: v[:2], "weight_zero_point has"),
    ("ct_int4_actorder", "weight_g_idx", lambda v: v - 1, "weight_g_idx names groups beyond 4"),
    ("ct_int8_asym", "weight_zero_point", lambda v: v[:5], "weight_zero_point has another"),
    ("ct_nvfp4", "weight_global_scale", None, "lacks m.weight_global_scale"),
    ("ct_nvfp4", "weight_scale", lambda v: v[:, :2], "weight_scale has another shape"),
    ("ct_mxfp4", "weight_scale", lambda v: v.astype(np.float32), "weight_scale is not uint8"),
    ("modelopt_nvfp4", "weight_scale_2", lambda v: np.stack([v, v]), "is not one number"),
    ("modelopt_mxfp8", "weight_scale", lambda v: v[:, :1], "do not fit its shape"),
    ("bnb_int8", "SCB", lambda v: v[:3], "SCB has another shape"),
    ("bnb_int8", "weight_format", lambda v: v + 1, "weight_format is not that of rows"),
    ("bnb_nf4", STATE, None, "quant_state is missing"),
    ("bnb_nf4", STATE, lambda v: v[:9], "bitsandbytes__nf4|Unterminated|Expecting"),
    ("bnb_nf4", STATE, state(shape=[1 << 40, 1 << 40]), "does not fit"),
    ("bnb_nf4", STATE, state(shape=[float("inf"), 1]), "is damaged"),
    ("bnb_nf4", STATE, state(blocksize=0), "has impossible sizes"),
    ("bnb_nf4", STATE, state(blocksize=32), "weight.absmax does not have 48 scales"),
    ("bnb_nf4_double", "weight.nested_absmax", None, "the nested scales do not fit"),
    ("bnb_nf4", "weight.quant_map", lambda v: v[:8], "quant_map has another shape"),
]


@pytest.mark.parametrize(("name", "key", "change", "words"), MISFITS)
def test_tensors_that_do_not_fit_are_refused(name: str, key: str, change: Any, words: str) -> None:
    tensors, _, config = stored(name)
    whole = tensors.pop(f"m.{key}")
    if change is not None:
        tensors[f"m.{key}"] = changed(whole, change)
    (message,) = applied(tensors, config)
    assert re.search(words, message), message


def settings(name: str, **changes: Any) -> dict[str, Any]:
    return stored(name)[2] | changes


def weights(name: str, **changes: Any) -> dict[str, Any]:
    """Settings of compressed-tensors with those of the weights changed."""
    config = stored(name)[2]
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


UNSUPPORTED = [
    (settings("gptq_4", bits=5), r"bits is not supported; got 5"),
    (settings("gptq_4", group_size=0), r"group_size must be a size; got 0"),
    (settings("gptq_4", checkpoint_format="marlin"), "checkpoint_format .*'marlin'"),
    (settings("gptq_4", format="gptq_v2"), r"format is not supported; got \['gptq', 'gptq_v2'\]"),
    (settings("gptq_4", rotation="hadamard"), "rotation is not known"),
    (settings("gptq_4", dynamic={"+:.*up.*": {"bits": 8}}), "dynamic may leave modules out"),
    (settings("awq", checkpoint_format="gemv_fast"), "checkpoint_format .*'gemv_fast'"),
    (settings("awq", dynamic={"+:.*up.*": {"group_size": 64}}), "dynamic may leave modules out"),
    (settings("awq", version="gemv"), "version is not supported; got 'gemv'"),
    (settings("awq", zero_point=False), "zero_point is not supported; got False"),
    (settings("awq", bits=8), "bits is not supported; got 8"),
    (weights("ct_int4_group", num_bits=5), r"weights\.num_bits is not supported; got 5"),
    (weights("ct_int4_group", strategy="block"), r"weights\.strategy is not supported"),
    (weights("ct_int4_group", rotation=1), r"weights\.rotation is not known"),
    (weights("ct_nvfp4", symmetric=False), r"weights\.symmetric is not supported"),
    (settings("ct_int4_group", format="marlin-24"), "format is not supported; got 'marlin-24'"),
    (settings("modelopt_nvfp4", quant_algo="NVFP4_AWQ"), "quant_algo .*'NVFP4_AWQ'"),
    (settings("modelopt_nvfp4", pre_quant_scale=True), "pre_quant_scale is not supported"),
    (settings("modelopt_nvfp4", quant_algo="MIXED_PRECISION"), "quantized_layers is missing"),
    (settings("bnb_nf4", bnb_4bit_quant_storage="bfloat16"), "quant_storage is not supported"),
    (settings("bnb_nf4", load_in_8bit=True), "must set one of load_in_4bit and load_in_8bit"),
]


@pytest.mark.parametrize(("config", "words"), UNSUPPORTED)
def test_other_settings_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    problems = Problems("test")
    weight_schemes({KEY: config}, {}, problems)
    assert any(re.search(words, message) for message in problems.messages), problems.messages


WRITTEN: dict[str, Any] = {
    "gptq": transformers.GPTQConfig(bits=4, dataset="c4", group_size=128),
    "awq": transformers.AwqConfig(),
    "nf4": transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "int8": transformers.BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_settings_that_transformers_writes(name: str) -> None:
    config = json.loads(json.dumps(WRITTEN[name].to_dict()))
    problems = Problems("test")
    assert weight_schemes({KEY: config}, {}, problems)
    assert problems.messages == []


def in_nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of ModelOpt's NVFP4, and the weight that they stand for."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.reshape(len(weight), -1, 16)
    double = weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(-1) / 6 / double).to(torch.float8_e4m3fn)
    wide = (scales.float() * double)[:, :, None]
    code = (groups.abs() / wide).unsqueeze(-1).sub(numbers).abs().argmin(-1)
    nibbles = (code + 8 * (groups < 0)).reshape(len(weight), -1, 2).to(torch.uint8)
    meant = (numbers[code] * groups.sign() * wide).reshape(weight.shape)
    packed = nibbles[..., 0] | nibbles[..., 1] << 4
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": double}, meant


def test_a_model_of_mixed_precision(tmp_path: Path) -> None:
    """ModelOpt's: attention in FP8, the MLP's first half in NVFP4, the rest as it was."""
    torch.manual_seed(0)
    for folder in ("hf", "wide"):
        LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / folder)
    state = load_file(tmp_path / "hf" / "model.safetensors")
    meant, layers = dict(state), {}
    for name in [name for name in state if "_proj.weight" in name and "down" not in name]:
        stem = name.removesuffix(".weight")
        if ".mlp." in name:
            parts, meant[name] = in_nvfp4(state.pop(name))
            layers[stem] = {"quant_algo": "NVFP4", "group_size": 16}
        else:
            scale = state[name].abs().max() / 448
            fp8 = (state[name] / scale).to(torch.float8_e4m3fn)
            parts, meant[name] = {"weight": fp8, "weight_scale": scale}, fp8.float() * scale
            parts["k_scale" if "k_proj" in name else "input_scale"] = torch.ones(())
            layers[stem] = {"quant_algo": "FP8"}
        state |= {f"{stem}.{key}": value for key, value in parts.items()}
    save_file(state, tmp_path / "hf" / "model.safetensors")
    save_file(meant, tmp_path / "wide" / "model.safetensors")
    path = tmp_path / "hf" / "config.json"
    raw = json.loads(path.read_text())
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    path.write_text(json.dumps(raw | {KEY: config | {"quant_method": "modelopt"}}))
    folder = export_folder(tmp_path / "hf", tmp_path / "a", tp_size=2, verify=True)
    wide = export_folder(tmp_path / "wide", tmp_path / "b", tp_size=2)
    assert contents(folder) == contents(wide)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert "weights stored in nvfp4 are dequantized" in json.dumps(manifest.source["notes"])
    path.write_text(json.dumps(raw))
    refused_export(tmp_path / "hf", tmp_path, "tensors are in fp8|should not have|made of uint8")


@pytest.mark.parametrize("axes", [2, 4])
def test_fp8_in_modelopts_blocks(axes: int) -> None:
    """Of 128 x 128 numbers, neither of which divides the weight; scales [blocks, 1, blocks, 1]."""
    torch.manual_seed(0)
    numbers, scales = torch.randn(130, 200).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
    tensors = {
        "m.weight": SourceTensor.full(numbers.view(torch.uint8).numpy().view(FLOAT8)),
        "m.weight_scale": SourceTensor.full(
            (scales if axes == 2 else scales[:, None, :, None]).numpy()
        ),
    }
    assert applied(tensors, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}) == []
    np.testing.assert_array_equal(tensors["m.weight"].read(), (numbers.float() * spread).numpy())


def test_int8_of_modelopt() -> None:
    tensors, expected, _ = stored("ct_int8")
    scales = tensors["m.weight_scale"].read()[:, 0]
    tensors["m.weight_scale"] = SourceTensor.full(scales)
    assert applied(tensors, {"quant_method": "modelopt", "quant_algo": "W8A16"}) == []
    np.testing.assert_array_equal(tensors["m.weight"].read(), expected)
