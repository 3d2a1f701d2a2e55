"""What a GGUF file says of its model is read, changes nothing, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from launcher_scripts.checkpoint.formats.gguf_file import Fields, open_gguf
from launcher_scripts.checkpoint.sources.gguf_parameters import rope_parameters
from launcher_scripts.common.errors import CheckpointError
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.gguf_maker import finish

SOURCE = Path(__file__).parents[1] / "data" / "gguf" / "llama.gguf"


def changed(path: Path, source: Path = SOURCE, **tensors: np.ndarray) -> gguf.GGUFWriter:
    """A writer of a copy, with `tensors` besides; the caller adds fields and calls finish."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    return writer


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
    }
    writer.add_key_value(key, value, kinds[type(value)])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.sliding_window", 4096),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.attention.causal", False),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.residual_scale", 0.5),
        ("llama.something.new", 1),
        ("llama.rope.scaling.yarn_ext_factor", 0.5),
    ],
)
def test_a_field_that_may_change_the_model_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    writer = changed(tmp_path / "a.gguf")
    add(writer, key, value)
    finish(writer)
    message = rf"field {re.escape(key)} is not supported; got {value}"
    refused_export(tmp_path / "a.gguf", tmp_path, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.rope.scaling.type", "su", "unknown rope.scaling.type; got 'su'; choices: none, li"),
        ("llama.rope.scaling.type", "longrope", "rope_factors_long.weight go together"),
        ("general.type", "adapter", "unknown general.type; got 'adapter'; choices: model"),
        ("split.count", 3, r"is one of 3 parts of a GGUF file, .*; got \['a\.gguf'\]"),
        ("split.count", "3", r"is one of .* parts of a GGUF file, .*; got \['a\.gguf'\]"),
        ("llama.vocab_size", 99, r"vocab_size is not the rows of token_embd.weight; got \(67, 16"),
        ("llama.attention.head_count_kv", 4, "the heads do not fit the tensors"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    writer = changed(tmp_path / "a.gguf")
    writer.kv_data[0].pop(key, None)
    add(writer, key, value)
    finish(writer)
    refused_export(tmp_path / "a.gguf", tmp_path, message)


def test_fields_that_change_nothing_are_read_over(tmp_path: Path) -> None:
    writer = changed(tmp_path / "a.gguf")
    for key, value in {
        "llama.attention.sliding_window": 0,
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.logit_scale": 1.0,
        "llama.tensor_data_layout": "Meta AI original pth",
        "general.author": "someone",
        "split.count": 1,
    }.items():
        add(writer, key, value)
    finish(writer)
    finish(changed(tmp_path / "plain.gguf"))
    found, plain = (
        {
            path.name: path.read_bytes()
            for path in folder.iterdir()
            if path.suffix in (".bin", ".ini")
        }
        for folder in (
            export_folder(tmp_path / f"{name}.gguf", tmp_path / name) for name in ("a", "plain")
        )
    )
    assert found == plain


@pytest.mark.parametrize("name", ["attn_sinks", "attn_q_norm"])
def test_a_tensor_too_many_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    finish(changed(tmp_path / "a.gguf", **{f"blk.0.{name}": np.ones(4, np.float32)}))
    message = rf"- blk\.0\.{name}\.weight is a tensor this model should not have"
    refused_export(tmp_path / "a.gguf", tmp_path, message)


def test_rope_freqs_of_a_model_that_does_not_rotate_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs": np.ones(2, np.float32)}
    finish(changed(tmp_path / "a.gguf", SOURCE.with_name("gpt2.gguf"), **factors))
    refused_export(tmp_path / "a.gguf", tmp_path, r"no rotary positions.*'rope_freqs\.weight'")


def llama3(factor: float, base: float, context: int, size: int) -> tuple[dict[str, Any], Any]:
    """Llama 3.1's parameters, and by how much transformers divides the frequencies."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }
    config = LlamaConfig(head_dim=size, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return parameters, (plain / scaled).numpy()


def read_rope(path: Path, factors: np.ndarray, size: int, base: float) -> dict[str, Any]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(131072)
    writer.add_rope_freq_base(base)
    finish(writer)
    fields = Fields(open_gguf(path), path)
    found = rope_parameters(fields, size, {"rope_freqs.weight": factors})
    fields.raise_problems()
    return found


@pytest.mark.parametrize(
    "case", [(8.0, 5e5, 8192, 128), (32.0, 5e5, 8192, 64), (4.0, 1e4, 512, 32)]
)
def test_the_rule_behind_rope_freqs_is_found(tmp_path: Path, case: Any) -> None:
    expected, factors = llama3(*case)
    found = read_rope(tmp_path / "a.gguf", factors, case[3], case[1])
    assert found == expected


def test_other_rope_freqs_are_kept_number_by_number(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 2.25, 7.0], np.float32)
    found = read_rope(tmp_path / "a.gguf", factors, 8, 1e4)
    assert found["rope_type"] == "longrope"
    assert found["short_factor"] == found["long_factor"] == [1.0, 1.5, 2.25, 7.0]
    assert found["attention_factor"] == 1.0
    assert "rope_type" not in read_rope(tmp_path / "b.gguf", np.ones(4, np.float32), 8, 1e4)


@pytest.mark.parametrize("factors", [[1.0, 2.0], [1.0, 0.0, 1.0, 1.0], [1.0, np.nan, 1.0, 1.0]])
def test_rope_freqs_that_cannot_be_are_refused(tmp_path: Path, factors: list[float]) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must be 4 numbers above 0"):
        read_rope(tmp_path / "a.gguf", np.array(factors, np.float32), 8, 1e4)
