"""config.json files, as transformers 4 and 5 write them, read as hyperparameters."""

from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint import huggingface_configs as configs
from launcher_scripts.checkpoint.huggingface import architecture
from launcher_scripts.checkpoint.huggingface_configs import RawConfig
from launcher_scripts.errors import CheckpointError

T5_KEYS = ("shared.weight", "decoder.block.0.layer.0.SelfAttention.q.weight")
T5 = {
    "model_type": "t5",
    "vocab_size": 100,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
}


def raw(values: dict[str, Any], *keys: str) -> RawConfig:
    return RawConfig(values, keys, Path("config.json"))


@pytest.mark.parametrize(
    ("said", "scale"),
    [
        ({}, 0.25),  # the original T5 says nothing
        ({"tie_word_embeddings": True}, 0.25),
        ({"tie_word_embeddings": False}, 1.0),  # transformers 4, T5 v1.1
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, 1.0),  # transformers 5
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, 0.25),
        ({"tie_word_embeddings": True, "model_type": "mt5"}, 1.0),
    ],
)
def test_t5_logits_scale_comes_from_the_raw_file(said: dict[str, Any], scale: float) -> None:
    assert configs.t5(raw({**T5, **said}, *T5_KEYS)).logits_scale == scale


def test_t5_head_is_tied_exactly_when_no_head_is_stored() -> None:
    untied = {**T5, "tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert configs.t5(raw(untied, *T5_KEYS)).tied_embeddings
    assert not configs.t5(raw(untied, *T5_KEYS, "lm_head.weight")).tied_embeddings


@pytest.mark.parametrize(
    ("said", "activation", "gated"),
    [("relu", "relu", False), ("gated-gelu", "gelu", True), ("gated-silu", "silu", True)],
)
def test_t5_activation(said: str, activation: str, gated: bool) -> None:
    config = configs.t5(raw({**T5, "feed_forward_proj": said}, *T5_KEYS))
    assert (config.activation, config.gated) == (activation, gated)


def test_t5_without_decoder_tensors_is_an_encoder() -> None:
    config = configs.t5(raw(T5, "shared.weight"))
    assert config.encoder_only
    assert config.num_decoder_layers == 0


def test_every_missing_size_is_reported_at_once() -> None:
    config = raw({"model_type": "opt", "num_attention_heads": 2})
    configs.opt(config)
    assert [message.split()[0] for message in config.problems.messages] == [
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "ffn_dim",
        "max_position_embeddings",
    ]


@pytest.mark.parametrize(
    ("read", "values", "word"),
    [
        (configs.gpt2, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer"),
        (configs.bloom, {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        (configs.llama, {"rope_scaling": {"rope_type": "yarn"}}, "rope_type"),
        (configs.llama, {"sliding_window": 4096}, "sliding_window"),
        (configs.agm, {"use_alibi_position_embedding": True}, "alibi"),
        (configs.gpt2, {"activation_function": "mish"}, "activation_function"),
    ],
)
def test_what_the_families_cannot_hold_is_refused(read: Any, values: Any, word: str) -> None:
    config = raw(values)
    read(config)
    assert any(word in message and "choices" in message for message in config.problems.messages)


def test_agm_is_told_from_bart_by_its_own_keys() -> None:
    where = Path("config.json")
    assert architecture({"model_type": "bart"}, where).family == "bart"
    assert architecture({"model_type": "bart", "mup_scale": True}, where).family == "agm"


def test_agm_attention_scale() -> None:
    values = {"model_type": "bart", "d_model": 32, "decoder_attention_heads": 2}
    assert configs.agm(raw({**values, "mup_scale": True})).attention_scale == 0.5
    assert configs.agm(raw({**values, "mup_scale": False})).attention_scale == 0.25
    assert configs.agm(raw({**values, "scale_attention": False})).attention_scale == 1.0


def test_unknown_model_types_are_answered_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="got 'rwkv'; choices: agm, bart, bloom, gpt2"):
        architecture({"model_type": "rwkv"}, Path("config.json"))
