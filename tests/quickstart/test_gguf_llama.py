"""GGUF weights as an mcore GPT: row orders, padding with zeros, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher_scripts.checkpoint.sources.nemo_writer import GGUFLlama, nemo_config
from launcher_scripts.common.errors import CheckpointError
from tests.quickstart.tiny_gguf import (
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    hf_weights,
    write_gguf,
)


@pytest.fixture
def llama(tmp_path: Path) -> GGUFLlama:
    return GGUFLlama(write_gguf(tmp_path / "tiny.gguf", hf_weights()))


def test_rows_of_a_group_are_its_queries_then_key_then_value(llama: GGUFLlama) -> None:
    hf = hf_weights()
    qkv = llama.weights()["decoder.layers.1.self_attention.linear_qkv.weight"].read()
    groups = qkv.reshape(KV_HEADS, HEADS // KV_HEADS + 2, HEAD, HIDDEN)
    np.testing.assert_array_equal(groups[:, :3].reshape(-1, HIDDEN), hf["attn_q"])
    np.testing.assert_array_equal(groups[:, 3].reshape(-1, HIDDEN), hf["attn_k"])
    np.testing.assert_array_equal(groups[:, 4].reshape(-1, HIDDEN), hf["attn_v"])


def test_the_gate_comes_before_up(llama: GGUFLlama) -> None:
    hf = hf_weights()
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
    config = nemo_config(llama, {"model": "abc_tokenizer.json"}, query_groups=4)
    assert (config["num_attention_heads"], config["num_query_groups"]) == (12, 4)
    assert (config["kv_channels"], config["hidden_size"]) == (HEAD, HIDDEN)
    assert config["layernorm_epsilon"] == 1e-5
    assert config["rotary_base"] == 100000.0
    assert config["share_embeddings_and_output_weights"] is True
    assert config["tokenizer"]["model"] == "nemo:abc_tokenizer.json"
    assert config["tokenizer"]["special_tokens"] == {"bos_token": "b", "eos_token": "ab"}


def test_fewer_groups_than_the_file_has_are_refused(llama: GGUFLlama) -> None:
    with pytest.raises(CheckpointError, match="query_groups"):
        llama.weights(query_groups=1)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", hf_weights(), architecture="bert")
    with pytest.raises(CheckpointError, match="unknown architecture; got 'bert'"):
        GGUFLlama(path)


@pytest.mark.parametrize("name", ["llama_31", "mixtral", "qwen2"])
def test_what_the_configuration_does_not_speak_of_is_refused(name: str, data_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a plain Llama"):
        GGUFLlama(data_dir / "gguf" / f"{name}.gguf")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", hf_weights(), leave_out="ffn_up")
    with pytest.raises(CheckpointError, match=r"2 problems(.|\n)*blk\.1\.ffn_up\.weight"):
        GGUFLlama(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(CheckpointError, match="is damaged or was cut short"):
        GGUFLlama(path)


def test_the_vocabulary_is_filled_up_as_nemo_does(llama: GGUFLlama) -> None:
    table = llama.weights()["embedding.word_embeddings.weight"].read()
    assert table.shape == (128, HIDDEN)
    assert table[:VOCAB].all()
    assert not table[VOCAB:].any()
