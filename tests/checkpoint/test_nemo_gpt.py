"""model_config.yaml: NeMo's defaults, and what its releases read differently."""

from __future__ import annotations

from typing import Any

import pytest

from launcher_scripts.checkpoint.sources.nemo import NemoModel, nemo_version, read_nemo_gpt
from launcher_scripts.checkpoint.sources.training_options import TrainingOptions
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.models.gpt import GPTConfig

LEAST = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def options_of(raw: dict[str, Any]) -> TrainingOptions:
    return TrainingOptions(raw, Problems("model_config.yaml"))


def read(core: bool = False, local_norms: bool = False, **raw: Any) -> NemoModel:
    return read_nemo_gpt(options_of({**LEAST, **raw}), core=core, local_norms=local_norms)


def test_defaults_are_nemos() -> None:
    found = read()
    assert GPTConfig(vocab_size=8, **found.fields) == GPTConfig(
        vocab_size=8,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_size=16,
        ffn_size=256,
        max_positions=32,
    )
    assert found.dialects == ("nemo",)


@pytest.mark.parametrize(
    ("raw", "activation", "gated"),
    [
        ({}, "gelu", False),
        ({"bias_activation_fusion": True}, "gelu", False),
        ({"bias_activation_fusion": False}, "gelu_erf", False),
        ({"bias_gelu_fusion": False}, "gelu_erf", False),
        ({"bias_activation_fusion": False, "openai_gelu": True}, "gelu", False),
        ({"activation": "geglu", "bias_activation_fusion": False}, "gelu_erf", True),
        ({"activation": "fast-geglu"}, "gelu", True),
        ({"activation": "reglu"}, "relu", True),
        ({"activation": "fast-swiglu"}, "silu", True),
        ({"activation": "squared-relu"}, "squared_relu", False),
    ],
)
def test_activations(raw: dict[str, Any], activation: str, gated: bool) -> None:
    fields = read(**raw).fields
    assert (fields["activation"], fields["gated"]) == (activation, gated)


@pytest.mark.parametrize(
    ("version", "dialects"),
    [
        (None, ("nemo",)),
        ("1.18.1", ("nemo",)),
        ("1.20.0", ("nemo_legacy", "nemo")),
        ("2.0.0rc1", ("nemo_legacy", "nemo")),
    ],
)
def test_megatron_legacy_by_release(version: str | None, dialects: tuple[str, ...]) -> None:
    assert read(megatron_legacy=True, nemo_version=version).dialects == dialects


def test_alibi_by_release() -> None:
    old = read(position_embedding_type="alibi", nemo_version="1.18.1")
    assert old.fields["position_embedding"] == "none"
    assert "trained without positions" in old.notes[0]
    new = read(position_embedding_type="alibi", nemo_version="1.23.0")
    assert new.fields["position_embedding"] == "alibi"
    assert new.fields["alibi_layer_scaling"] is True
    off = {"apply_query_key_layer_scaling": False}
    plain = read(position_embedding_type="alibi", nemo_version="1.23.0", **off)
    assert plain.fields["alibi_layer_scaling"] is False
    assert not new.notes


def test_layer_scaling_cancels_without_alibi() -> None:
    assert read(apply_query_key_layer_scaling=True).fields["alibi_layer_scaling"] is False


@pytest.mark.parametrize(
    ("raw", "core", "local", "dialects"),
    [
        ({"activation": "fast-swiglu"}, False, False, ("nemo_fused_gate", "nemo")),
        ({"activation": "swiglu"}, False, False, ("nemo",)),
        ({"activation": "swiglu"}, True, False, ("mcore_fused_gate", "mcore")),
        ({"normalization": "layernorm1p"}, False, False, ("nemo_plus_one", "nemo")),
        ({"layernorm_zero_centered_gamma": True}, True, False, ("mcore_plus_one", "mcore")),
        (
            {"normalization": "layernorm1p"},
            True,
            True,
            ("mcore_local_plus_one", "mcore_local", "mcore"),
        ),
    ],
)
def test_dialects(raw: dict[str, Any], core: bool, local: bool, dialects: tuple[str, ...]) -> None:
    assert read(core, local, **raw).dialects == dialects


def test_positions_and_groups() -> None:
    fields = read(
        core=True,
        position_embedding_type="rope",
        rotary_percentage=0.5,
        rotary_base=50000,
        seq_len_interpolation_factor=4,
        num_query_groups=2,
        kv_channels=24,
        max_position_embeddings=None,
        encoder_seq_length=128,
    ).fields
    config = GPTConfig(vocab_size=8, **fields)
    assert (config.rotary_size, config.rotary_base, config.rotary_interpolation_factor) == (
        12,
        50000.0,
        4.0,
    )
    assert (config.num_kv_heads, config.max_positions) == (2, 128)


def test_versions() -> None:
    assert nemo_version(options_of({"nemo_version": "1.23.0"})) == (1, 23)
    assert nemo_version(options_of({"nemo_version": "2.0.0rc1"})) == (2, 0)
    assert nemo_version(options_of({})) == (0, 0)


@pytest.mark.parametrize("value", ["x", 1.5, -1])
def test_sizes_are_whole_numbers(value: object) -> None:
    for key in ("num_layers", "kv_channels", "ffn_hidden_size", "max_position_embeddings"):
        with pytest.raises(
            CheckpointError, match=f"{key} must be a positive number; got {value!r}"
        ):
            read(**{key: value})


def test_an_epsilon_may_be_a_text_and_must_be_a_number() -> None:
    assert read(layernorm_epsilon="1e-3").fields["norm_eps"] == 1e-3
    with pytest.raises(CheckpointError, match="layernorm_epsilon must be a positive number"):
        read(layernorm_epsilon="small")
