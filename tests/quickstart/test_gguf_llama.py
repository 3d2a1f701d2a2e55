"""GGUF weights as an mcore GPT: row orders, padding with zeros, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from launcher_scripts.checkpoint.gguf_llama import GGUFLlama, nemo_config
from launcher_scripts.errors import CheckpointError

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB, LAYERS = 24, 6, 2, 4, 32, 10, 2


def _hf_weights() -> dict[str, np.ndarray]:
    """Random weights of one layer in the order that rotates by halves, rows as outputs."""
    generator = np.random.default_rng(5)
    shapes = {
        "attn_q": (HEADS * HEAD, HIDDEN),
        "attn_k": (KV_HEADS * HEAD, HIDDEN),
        "attn_v": (KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    return {
        name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
    }


def _neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is row i of its first half and row 2i+1 of its second, as GGUF has it."""
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(HEAD // 2):
            for half in range(2):
                out[head * HEAD + 2 * i + half] = weight[head * HEAD + half * HEAD // 2 + i]
    return out


def _write(
    path: Path, weights: dict[str, np.ndarray], architecture: str = "llama", leave_out: str = ""
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(16)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(list("abcdefghij"))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, weight in weights.items():
            if name == leave_out:
                continue
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            stored = weight if heads is None else _neighbours(weight, heads)
            writer.add_tensor(f"blk.{layer}.{name}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def llama(tmp_path: Path) -> GGUFLlama:
    return GGUFLlama(_write(tmp_path / "tiny.gguf", _hf_weights()))


def test_rows_of_a_group_are_its_queries_then_key_then_value(llama: GGUFLlama) -> None:
    hf = _hf_weights()
    qkv = llama.weights()["decoder.layers.1.self_attention.linear_qkv.weight"].read()
    groups = qkv.reshape(KV_HEADS, HEADS // KV_HEADS + 2, HEAD, HIDDEN)
    np.testing.assert_array_equal(groups[:, :3].reshape(-1, HIDDEN), hf["attn_q"])
    np.testing.assert_array_equal(groups[:, 3].reshape(-1, HIDDEN), hf["attn_k"])
    np.testing.assert_array_equal(groups[:, 4].reshape(-1, HIDDEN), hf["attn_v"])


def test_the_gate_comes_before_up(llama: GGUFLlama) -> None:
    hf = _hf_weights()
    fc1 = llama.weights()["decoder.layers.0.mlp.linear_fc1.weight"].read()
    np.testing.assert_array_equal(fc1, np.concatenate([hf["ffn_gate"], hf["ffn_up"]]))


def test_padding_groups_do_not_change_the_attention_output(llama: GGUFLlama) -> None:
    key = "decoder.layers.0.self_attention."
    plain, padded = llama.weights(), llama.weights(query_groups=4)
    qkv = padded[f"{key}linear_qkv.weight"].read()
    rows = plain[f"{key}linear_qkv.weight"].shape[0]
    np.testing.assert_array_equal(qkv[:rows], plain[f"{key}linear_qkv.weight"].read())
    assert qkv.shape == (2 * rows, HIDDEN)
    assert not qkv[rows:].any()
    # Whatever the added heads hand over, the projection drops it.
    heads = np.random.default_rng(0).standard_normal((7, 2 * HEADS * HEAD), dtype=np.float32)
    wide = padded[f"{key}linear_proj.weight"].read()
    narrow = plain[f"{key}linear_proj.weight"].read()
    np.testing.assert_allclose(
        heads @ wide.T, heads[:, : HEADS * HEAD] @ narrow.T, rtol=0, atol=1e-5
    )


def test_announced_shapes_are_the_shapes_that_are_read(llama: GGUFLlama) -> None:
    for groups in (2, 4):
        for key, weight in llama.weights(groups).items():
            assert weight.read().shape == weight.shape, key
            assert weight.read().dtype == np.float32, key


def test_the_configuration_describes_the_padded_model(llama: GGUFLlama) -> None:
    config = nemo_config(llama, "abc_tokenizer.json", query_groups=4)
    assert (config["num_attention_heads"], config["num_query_groups"]) == (12, 4)
    assert (config["kv_channels"], config["hidden_size"]) == (HEAD, HIDDEN)
    assert config["layernorm_epsilon"] == 1e-5
    assert config["rotary_base"] == 100000.0
    assert config["share_embeddings_and_output_weights"] is True
    assert config["tokenizer"]["model"] == "nemo:abc_tokenizer.json"
    assert config["tokenizer"]["special_tokens"] == {"bos_token": "b", "eos_token": "c"}


def test_fewer_groups_than_the_file_has_are_refused(llama: GGUFLlama) -> None:
    with pytest.raises(CheckpointError, match="query_groups"):
        llama.weights(query_groups=1)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf", _hf_weights(), architecture="bert")
    with pytest.raises(CheckpointError, match="unknown architecture; got 'bert'"):
        GGUFLlama(path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf", _hf_weights(), leave_out="ffn_up")
    with pytest.raises(CheckpointError, match=r"2 problems(.|\n)*blk\.1\.ffn_up\.weight"):
        GGUFLlama(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(CheckpointError, match="cannot read"):
        GGUFLlama(path)
