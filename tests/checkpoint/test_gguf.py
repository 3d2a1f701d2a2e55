"""GGUF files: what llama.cpp's converter makes of a Llama gives the logits of transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.steps.quickstart import gguf_file
from tests.checkpoint import reference_forward_gpt
from tests.checkpoint.exporting import (
    export_folder,
    open_weights,
    refused_export,
    weight_bytes,
)
from tests.checkpoint.gguf_maker import finish
from tests.checkpoint.tiny_models import LLAMA, TinyModel

IDS = torch.tensor([[1, 5, 30, 2, 66, 9]])
# llama.cpp quantises blocks of 32 values along a row.
WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(
    model: PreTrainedModel, path: Path, kind: gguf.GGMLQuantizationType, **split: Any
) -> None:
    """The model as llama.cpp's converter writes it: pairs that rotate together are neighbours."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama", **split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            halves = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        matrix = values.ndim == 2
        target = kind if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_name(name), gguf.quantize(values, target), raw_dtype=target)
    finish(writer)


def _name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{PARTS[rest.removesuffix('.weight')]}.weight"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return TinyModel("LlamaForCausalLM", "LlamaConfig", WIDE).make()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_logits(model: PreTrainedModel, tmp_path: Path, tp_size: int) -> None:
    write(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32)
    folder = export_folder(tmp_path / "m.gguf", tmp_path, tp_size)
    found = reference_forward_gpt.logits(*open_weights(folder), IDS)
    with torch.no_grad():
        expected = model(IDS).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_quantised_tensors_are_dequantised(model: PreTrainedModel, tmp_path: Path) -> None:
    write(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    weights, _ = open_weights(export_folder(tmp_path / "m.gguf", tmp_path, 2))
    for layer in range(2):
        exact = model.model.layers[layer].mlp.down_proj.weight.numpy(force=True)
        kind = gguf.GGMLQuantizationType.Q8_0
        expected = gguf.dequantize(gguf.quantize(exact, kind), kind)
        found = weights[f"layers.{layer}.mlp.dense_4h_to_h.weight"]
        assert np.array_equal(found, expected.T)


@pytest.mark.parametrize("small_first", [False, True])
def test_a_split_file_is_the_whole_one(
    model: PreTrainedModel, tmp_path: Path, small_first: bool
) -> None:
    kind = gguf.GGMLQuantizationType.F32
    write(model, tmp_path / "m.gguf", kind)
    split = {"split_max_tensors": 9, "small_first_shard": small_first}
    write(model, tmp_path / "s.gguf", kind, **split)
    parts = sorted(tmp_path.glob("s-*.gguf"))
    whole = weight_bytes(export_folder(tmp_path / "m.gguf", tmp_path / "whole"))
    for number, part in enumerate((parts[0], parts[-1])):
        assert weight_bytes(export_folder(part, tmp_path / f"part{number}")) == whole


def test_parts_of_several_files_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.F32
    write(model, tmp_path / "s.gguf", kind, split_max_tensors=9)
    first, second, *_, last = sorted(tmp_path.glob("s-*.gguf"))
    second.rename(tmp_path / "away.gguf")
    refused_export(first, tmp_path, r"is one of 3 parts of a GGUF file, and the others are not")
    second.write_bytes(last.read_bytes())
    message = r"s-00002-of-00003\.gguf is a part of another file: split\.no; got 2; choices: 1"
    assert "two of its parts have tensors of one name" in refused_export(last, tmp_path, message)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    finish(writer)
    refused_export(tmp_path / "m.gguf", tmp_path, "unknown architecture; got 'mamba'")


def test_another_file_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    refused_export(tmp_path / "hf", tmp_path, "is not a GGUF file", source="gguf")


@pytest.mark.slow
def test_a_real_model_answers(tmp_path: Path) -> None:
    folder = export_folder(gguf_file(), tmp_path, 1, "bf16", tokenizer=TokenizerSettings("auto"))
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    logits = reference_forward_gpt.logits(*open_weights(folder), ids)
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
    config = FTCheckpoint.open(folder).config
    assert (config.start_id, config.end_id) == (tokenizer.start_id, tokenizer.end_id)
