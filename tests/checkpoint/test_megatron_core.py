"""Distributed checkpoints of Megatron-LM core: recognised, and what their tools say of them."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts.checkpoint.export import open_source
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import T5_TABLE
from launcher_scripts.checkpoint.sources.core_options import (
    of_arguments,
    of_bridge,
    of_nemo2,
    read_core_gpt,
)
from launcher_scripts.checkpoint.sources.core_t5 import read_core_t5
from launcher_scripts.common.errors import CheckpointError

NEMO2 = "nemo253_llama31_a/checkpoint/model--step=10-consumed_samples=40.0-last"
ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "max_position_embeddings": 16,
    "norm_epsilon": 1e-6,
}


@pytest.mark.parametrize(
    ("place", "tool", "kind"),
    [
        ("bridge031_llama31_a/checkpoint", "Megatron Bridge", "tokenizer.json"),
        ("bridge031_llama31_a/checkpoint/iter_0000000", "Megatron Bridge", "tokenizer.json"),
        ("nemo253_llama31_a/checkpoint", "NeMo 2", "tokenizer.json"),
        (NEMO2, "NeMo 2", "tokenizer.json"),
        ("mcore019_qwen3_nonhomog_a/checkpoint", "Megatron-LM", None),
        ("mcore019_qwen3_nonhomog_a/checkpoint/iter_0000008", "Megatron-LM", None),
    ],
)
def test_each_tool_is_known_by_what_lies_there(data_dir, place, tool, kind) -> None:
    checkpoint = open_source(Archive(data_dir / "core" / place))
    assert checkpoint.describe()["tool"] == tool
    if kind is None:
        with pytest.raises(CheckpointError, match=r"holds no tokenizer; .* change export\.model"):
            checkpoint.tokenizer_files()
        assert "num_layers:3" in checkpoint.extra_files()["args.txt"].decode()
    else:
        assert kind in checkpoint.tokenizer_files()


def test_tensors_alone_are_no_model(data_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not say what its model is; choices: args in"):
        open_source(Archive(data_dir / "core" / NEMO2 / "weights"))


def test_the_tracker_says_which_iteration_is_meant(data_dir: Path, tmp_path: Path) -> None:
    source = data_dir / "core" / "mcore019_qwen3_nonhomog_a" / "checkpoint"
    for step in ("iter_0000008", "iter_0000004"):
        shutil.copytree(source / "iter_0000008", tmp_path / step)
    with pytest.raises(
        CheckpointError, match=r"must hold one checkpoint; got \['iter_0000004/', 'iter"
    ):
        open_source(Archive(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8\n")
    assert open_source(Archive(tmp_path)).describe()["folder"] == "iter_0000008"


def test_the_epsilon_has_two_names() -> None:
    newer = {**ARGUMENTS, "norm_epsilon": None, "layernorm_epsilon": 1e-7}
    assert read_core_gpt(of_arguments(ARGUMENTS, "")).fields["norm_eps"] == 1e-6
    assert read_core_gpt(of_arguments(newer, "")).fields["norm_eps"] == 1e-7


@pytest.mark.parametrize("name", ["apply_layernorm_1p", "layernorm_zero_centered_gamma"])
def test_norms_centred_at_zero_have_two_names(name: str) -> None:
    assert read_core_gpt(of_arguments({**ARGUMENTS, name: True}, "")).plus_one
    assert not read_core_gpt(of_arguments({**ARGUMENTS, name: False}, "")).plus_one


def test_megatrons_models_ignore_the_factor_of_their_arguments() -> None:
    args = {**ARGUMENTS, "use_rope_scaling": True, "position_embedding_type": "rope"}
    asked = of_arguments({**args, "rope_scaling_factor": 32.0}, "")
    assert read_core_gpt(asked).fields["rotary_scaling_factor"] == 8.0
    assert "asked for rope_scaling_factor 32.0, but" in asked.notes[0]
    assert of_arguments(args, "").notes == ()
    bridge = {**ARGUMENTS, "rope_scaling": True, "rope_scaling_factor": 32.0}
    assert read_core_gpt(of_bridge(bridge, "")).fields["rotary_scaling_factor"] == 32.0


@pytest.mark.parametrize("of", [of_arguments, of_bridge])
def test_latent_attention_until_core_0_13(of: Any) -> None:
    """Its releases scaled scores by mscale, and called the positions before yarn otherwise."""
    latent = {
        **ARGUMENTS,
        "position_embedding_type": "rope",
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "rotary_scaling_factor": 10.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "max_position_embeddings": 4096,
    }
    since = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    newer, older = (read_core_gpt(of(said, "")).fields for said in (latent | since, latent))
    wanted = latent | since | {"original_max_position_embeddings": 4096}
    same = read_core_gpt(of(wanted, "")).fields
    ratio = ((1 + 0.1 * math.log(10)) / (1 + 0.05 * math.log(10))) ** 2
    assert older["softmax_scale"] == pytest.approx(newer["softmax_scale"] * ratio)
    assert {**older, "softmax_scale": None} == {**same, "softmax_scale": None} != newer


def test_nemos_class_says_whether_ropes_are_scaled() -> None:
    assert read_core_gpt(of_nemo2(ARGUMENTS, "")).fields.get("rotary_scaling") is None
    scaled = {**ARGUMENTS, "scale_factor": 4, "old_context_len": 1024}
    fields = read_core_gpt(of_nemo2(scaled, "")).fields
    assert (fields["rotary_scaling_factor"], fields["rotary_original_positions"]) == (4.0, 1024)


@pytest.mark.parametrize(
    ("said", "activation", "gated"),
    [
        ({}, "gelu", False),
        ({"bias_gelu_fusion": False}, "gelu_erf", False),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_erf", False),
        ({"swiglu": True}, "silu", True),
        ({"squared_relu": True}, "squared_relu", False),
    ],
)
def test_activations(said, activation, gated) -> None:
    fields = read_core_gpt(of_arguments(ARGUMENTS | said, "")).fields
    assert (fields["activation"], fields["gated"]) == (activation, gated)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"multi_latent_attention": True}, "qk_layernorm of latent attention is not supported"),
        ({"window_size": 128}, "window_size is not supported; got 128; choices: .tokens before"),
        ({"window_size": [128, 4]}, r"window_size is not supported; got \[128, 4\]"),
        ({"window_size": [4, 0], "window_attn_skip_freq": [1]}, r"skip_freq is not .* a list of 2"),
        (
            {"position_embedding_type": "mrope"},
            "position_embedding_type is not supported; got 'mrope'",
        ),
        (
            {"position_embedding_type": "yarn"},
            "yarn_original_max_position_embeddings must be a positive number",
        ),
        ({"swiglu": False, "quick_geglu": True}, "clamp_value is not supported; choices: 7.0"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset is not supported; got 1.0"),
        ({"softmax_type": "off-by-one"}, "softmax_type is not supported; got 'off-by-one'"),
        ({"num_layers": None}, "num_layers must be a positive number"),
    ],
)
def test_what_is_not_known_is_refused_by_name(said, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_core_gpt(of_arguments(ARGUMENTS | said, "the arguments"))


EXPERTS = {"num_experts": 8, "add_bias_linear": False}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_apply_probs_on_input", True),
        ("moe_layer_freq", -1),
        ("moe_layer_freq", [0, 1, 1]),
        ("moe_layer_freq", [0, 2]),
        ("moe_layer_freq", "[0]+[1]"),
        ("moe_mlp_glu_interleave_size", 32),
        ("moe_router_enable_expert_bias", True),
        ("moe_router_force_load_balancing", True),
        ("moe_router_group_topk", 2),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
        ("moe_router_score_function", "sqrtsoftplus"),
        ("moe_router_topk_scaling_factor", -2.5),
    ],
)
def test_experts_that_work_in_other_ways_are_refused_by_name(key, value) -> None:
    with pytest.raises(CheckpointError, match=rf"1 problem in the arguments:\n.*{key}"):
        read_core_gpt(of_arguments(ARGUMENTS | EXPERTS | {key: value}, "the arguments"))


@pytest.mark.parametrize(
    ("said", "dense"), [(1, None), (2, "1,3"), ([0, 1, 1, 0], "0,3"), ((0, 0, 0, 1), "0,1,2")]
)
def test_layers_without_experts(said, dense) -> None:
    more = {"num_layers": 4, "moe_layer_freq": said, "moe_ffn_hidden_size": 12}
    config = read_core_gpt(of_arguments({**ARGUMENTS, **EXPERTS, **more}, "")).config(8)
    assert config.dense_layers == dense
    assert config.dense_ffn_size == (dense and ARGUMENTS["ffn_hidden_size"])
    assert config.ffn_size == 12


@pytest.mark.parametrize(("per_token", "normalized"), [(1, False), (2, True)])
def test_sigmoids_of_several_experts_are_normalized(per_token, normalized) -> None:
    more = {"moe_router_score_function": "sigmoid", "moe_router_topk": per_token}
    config = read_core_gpt(of_arguments({**ARGUMENTS, **EXPERTS, **more}, "")).config(8)
    assert config.normalized_experts is normalized
    assert config.router_score_function == "sigmoid"


def test_the_settings_of_experts_mean_nothing_without_experts() -> None:
    options = of_arguments(ARGUMENTS | {"moe_router_score_function": "sigmoid", "moe_x": 1}, "")
    assert "num_experts" not in read_core_gpt(options).fields
    assert options.check_keys() == ()


def test_what_a_training_drops_is_noted() -> None:
    options = of_arguments(ARGUMENTS | EXPERTS | {"moe_expert_capacity_factor": 1.5}, "here")
    read_core_gpt(options)
    assert options.check_keys() == ("here: nothing reads moe_expert_capacity_factor=1.5",)


@pytest.mark.parametrize(
    ("said", "window", "full"),
    [
        ({"window_size": (4, 0)}, 5, None),
        ({"window_size": [4, -1], "window_attn_skip_freq": 2}, 5, "1,3"),
        ({"window_size": [0, 0], "window_attn_skip_freq": [1, 0, 0, 1]}, 1, "1,2"),
        ({"window_size": [-1, 0]}, None, None),
        ({"window_size": None, "window_attn_skip_freq": 2}, None, None),
    ],
)
def test_windows(said, window, full) -> None:
    options = of_arguments({**ARGUMENTS, "num_layers": 4, **said}, "")
    config = read_core_gpt(options).config(8)
    assert (config.sliding_window, config.full_attention_layers) == (window, full)
    assert options.check_keys() == ()


@pytest.mark.parametrize(
    ("said", "layers"), [(2, "1,3"), ([1, 0, 0, 1], "0,3"), ([0, 0, 0, 0], None), (None, None)]
)
def test_layers_without_rotary_positions(said, layers) -> None:
    options = of_arguments({**ARGUMENTS, "num_layers": 4, "no_rope_freq": said}, "")
    assert read_core_gpt(options).config(8).unrotated_layers == layers
    assert options.check_keys() == ()


@pytest.mark.parametrize("said", [-1, [1, 0], [2, 0, 0, 0], [[], 0, 0, 0], "2"])
def test_layers_without_rotary_positions_are_named_wrongly(said) -> None:
    with pytest.raises(CheckpointError, match="no_rope_freq is not supported; got"):
        read_core_gpt(of_arguments({**ARGUMENTS, "num_layers": 4, "no_rope_freq": said}, ""))


@pytest.mark.parametrize("name", ["GemmaConfig2B", "CodeGemmaConfig7B", "GemmaModelProvider"])
@pytest.mark.parametrize("of", [of_bridge, of_nemo2])
def test_gemmas_class_scales_the_embeddings(of, name) -> None:
    package = "nemo.collections.llm.gpt.model.gemma"
    said = {**ARGUMENTS, "_target_": f"{package}.{name}"}
    assert read_core_gpt(of(said, "")).fields["embedding_scale"] == pytest.approx(32**0.5)
    assert read_core_gpt(of(ARGUMENTS, "")).fields["embedding_scale"] is None
    for later in ("Gemma2Config9B", "Gemma3ModelProvider"):
        with pytest.raises(CheckpointError, match=f"this class are not supported; got '.*{later}"):
            read_core_gpt(of({**said, "_target_": f"{package}.{later}"}, ""))


BRIDGE, NEMO, CORE = "megatron.bridge.models.", "nemo.collections.llm.", "megatron.core.models."
LOCAL = f"{CORE}gpt.gpt_layer_specs.get_gpt_layer_local_spec"


@pytest.mark.parametrize(
    "said",
    [
        {"_target_": f"{BRIDGE}gpt_provider.GPTModelProvider"},
        {"_target_": f"{BRIDGE}llama.llama_provider.Llama31ModelProvider405B"},
        {"_target_": f"{BRIDGE}qwen.qwen_provider.Qwen3MoEModelProvider30B_A3B"},
        {"_target_": f"{BRIDGE}gpt_oss.gpt_oss_provider.GPTOSSProvider20B"},
        {"_target_": f"{NEMO}gpt.model.mixtral.MixtralConfig8x7B"},
        {"_target_": f"{NEMO}t5.model.t5.T5Config220M"},
        {"transformer_layer_spec": {"_target_": f"{BRIDGE}gpt_provider.default_layer_spec"}},
        {"transformer_layer_spec": {"_target_": LOCAL, "_partial_": True, "qk_layernorm": True}},
        {"transformer_layer_spec": None},
        {"spec": ["local"]},
        {"spec": []},
        {"spec": LOCAL.rsplit(".", 1)},
        {"_target_": f"{BRIDGE}qwen.qwen_provider.Qwen3NextModelProvider80B_A3B"},
        {"_target_": f"{BRIDGE}llama_nemotron.provider.LlamaNemotronHeterogeneousProvider"},
        {"spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]},
    ],
)
def test_classes_and_specs_that_build_a_plain_network(said: dict[str, Any]) -> None:
    read_core_gpt(of_bridge({**ARGUMENTS, **said}, ""))


@pytest.mark.parametrize(
    "said",
    [
        {"_target_": f"{BRIDGE}ministral3.ministral3_provider.Ministral3ModelProvider3B"},
        {"_target_": f"{BRIDGE}falcon_h1.falconh1_provider.FalconH1ModelProvider"},
        {"_target_": f"{BRIDGE}llama.llama4_provider.Llama4ModelProvider"},
        {"_target_": "my_models.LlamaModelProvider"},
        {"_target_": "GPTModelProvider"},
        {"transformer_layer_spec": {"_target_": "my_models.default_layer_spec"}},
        {"transformer_layer_spec": {"_target_": f"{CORE}gpt.gpt_layer_specs.get_mlp_module_spec"}},
        {"transformer_layer_spec": {"_target_": LOCAL, "qk_l2_norm": True}},
        {"transformer_layer_spec": {"module": {"_target_": "my_models.Layer"}}},
        {"transformer_layer_spec": "my_spec"},
        {"spec": ["my_models", "layer_spec"]},
        {"spec": 1},
    ],
)
def test_classes_and_specs_that_may_change_the_network(said: dict[str, Any]) -> None:
    (key,) = said
    with pytest.raises(CheckpointError, match=f"{key}.* not supported"):
        read_core_gpt(of_bridge({**ARGUMENTS, **said}, ""))


def test_all_that_is_wrong_with_a_t5_is_said_at_once() -> None:
    wrong = {"ffn_hidden_size": "wide", "norm_epsilon": "small", "kv_channels": "narrow"}
    tensors = {T5_TABLE: SourceTensor((7, 32), np.dtype(np.float32), ())}
    with pytest.raises(CheckpointError) as raised:
        read_core_t5(of_arguments({**ARGUMENTS, **wrong}, "here"), tensors)
    for name in ("ffn_hidden_size", "layernorm_epsilon", "kv_channels"):
        assert name in str(raised.value)
