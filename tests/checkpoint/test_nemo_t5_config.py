"""model_config.yaml of a T5: NeMo's defaults, and the ids that NeMo gives its special tokens."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from launcher_scripts.checkpoint.sources.nemo import NemoModel, read_nemo_t5, t5_token_ids
from launcher_scripts.checkpoint.sources.training_options import TrainingOptions
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import TokenIds
from launcher_scripts.common.errors import Problems
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.models.t5 import T5Config

LEAST = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def options_of(raw: dict[str, Any]) -> TrainingOptions:
    return TrainingOptions(raw, Problems("model_config.yaml"))


def read(encoder: dict[str, Any] | None = None, **raw: Any) -> NemoModel:
    stack = {**LEAST, **(encoder or {})}
    return read_nemo_t5(options_of({"encoder": stack, "decoder": stack, **raw}))


def test_defaults_are_nemos() -> None:
    found = read(max_position_embeddings=32)
    assert found.dialects == ("nemo",)
    assert T5Config(vocab_size=8, **found.fields) == T5Config(
        vocab_size=8,
        num_layers=2,
        num_decoder_layers=2,
        hidden_size=64,
        num_heads=4,
        head_size=16,
        ffn_size=256,
        position_embedding="learned",
        max_positions=32,
        normalization="layernorm",
        norm_eps=1e-5,
        activation="gelu",
        bias=True,
        logits_bias=True,
        attention_scale=0.25,
    )


def test_flat_files_describe_both_stacks() -> None:
    flat = {**LEAST, "max_position_embeddings": 32}
    assert read_nemo_t5(options_of(flat)) == read(max_position_embeddings=32)


SAID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "relative": (
        {"position_embedding_type": "relative"},
        {"num_buckets": 32, "max_distance": 128, "relative_bias_layer_scaling": True},
    ),
    "unscaled bias": (
        {"position_embedding_type": "relative", "apply_query_key_layer_scaling": False},
        {"relative_bias_layer_scaling": False, "cross_attention_relative_bias": False},
    ),
    "cross-attention": (
        {
            "position_embedding_type": "relative",
            "relative_position_bias_self_attention_only": False,
        },
        {"cross_attention_relative_bias": True},
    ),
    "learned has no relative bias": (
        {"relative_position_bias_self_attention_only": False},
        {"cross_attention_relative_bias": False, "relative_bias_layer_scaling": False},
    ),
    "as Google's": (
        {"normalize_attention_scores": False, "normalization": "rmsnorm", "bias": False},
        {"attention_scale": 1.0, "normalization": "rmsnorm", "bias": False},
    ),
    "exact gelu": (
        {"activation": "geglu", "bias_activation_fusion": False},
        {"activation": "gelu_erf", "gated": True},
    ),
    "openai gelu": (
        {"bias_activation_fusion": False, "openai_gelu": True},
        {"activation": "gelu", "gated": False},
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_what_a_stack_says(case: str) -> None:
    section, fields = SAID[case]
    found = read(section)
    assert {key: found.fields[key] for key in fields} == fields


def test_sharing() -> None:
    found = read(
        share_token_embeddings=False,
        share_decoder_tokens_head_embeddings=False,
        tokens_head_bias=False,
    )
    assert not found.fields["shared_embeddings"]
    assert not found.fields["tied_embeddings"]
    assert not found.fields["logits_bias"]


def test_dialects() -> None:
    assert read({"activation": "fast-swiglu"}).dialects == ("nemo_fused_gate", "nemo")
    assert read({"megatron_legacy": True}).dialects == ("nemo_legacy", "nemo")
    assert read({"normalization": "layernorm1p"}).dialects == ("nemo_plus_one", "nemo")


@cache
def vocabulary(**options: Any) -> bytes:
    """A SentencePiece model of 40 pieces."""
    model = io.BytesIO()
    sentences = iter(["the quick brown fox jumps over a lazy dog and runs on"] * 20)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def ids(folder: Path, model: bytes, **raw: Any) -> TokenIds:
    (folder / "tokenizer.model").write_bytes(model)
    return t5_token_ids(raw, load_tokenizer(folder))


def size(folder: Path) -> int:
    return load_tokenizer(folder).vocab_size


def test_nemo_appends_what_a_vocabulary_lacks(tmp_path: Path) -> None:
    """<cls>, <sep> and <mask>, then the roles that have no piece, before the sentinels."""
    model = vocabulary(pad_id=-1, eos_id=1, unk_id=0, bos_id=-1)
    found = ids(tmp_path, model, tokenizer={"num_sentinel_tokens": 100})
    top = load_tokenizer(tmp_path).vocab_size + 3
    assert found == TokenIds(start_id=top + 1, end_id=1, pad_id=top)


def test_a_piece_called_pad_is_found_by_its_name(tmp_path: Path) -> None:
    """Google's vocabularies: id 0 does not count as padding, but the piece <pad> is there."""
    found = ids(tmp_path, vocabulary(pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    assert found == TokenIds(load_tokenizer(tmp_path).vocab_size + 3, 1, 0)


def test_a_vocabulary_with_all_of_them(tmp_path: Path) -> None:
    model = vocabulary(unk_id=0, bos_id=1, eos_id=2, pad_id=3)
    assert ids(tmp_path, model) == TokenIds(1, 2, 3)


def test_models_from_hugging_face_start_with_padding(tmp_path: Path) -> None:
    model = vocabulary(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    section = {"num_sentinel_tokens": 100, "add_sentinel_tokens_first": True}
    assert ids(tmp_path, model, tokenizer=section) == TokenIds(0, 1, 0)


def test_a_training_that_starts_with_padding(tmp_path: Path) -> None:
    model = vocabulary(unk_id=0, bos_id=1, eos_id=2, pad_id=3)
    assert ids(tmp_path, model, data={"decoder_starts_with_pad": True}) == TokenIds(3, 2, 3)
