"""Checkpoints of Megatron-LM core, Megatron Bridge and NeMo 2: exported, run, and compared with the
core's own logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from tests.checkpoint.exporting import export_folder
from tests.engine.fixture_logits import DIVISIONS, TOLERANCE, logits_of

# Name -> what its configuration says. Those in tests/data are of every tool.
FIXTURES = {
    "bridge031_llama31_a": {"rotary_scaling": "llama3", "rotary_original_positions": 8192},
    "mcore012_gpt_release_a": {"position_embedding": "learned", "tied_embeddings": True},
    "mcore012_llama31_tp2pp2_a": {"rotary_scaling_factor": 8.0},
    "mcore012_llama_optim_a": {"normalization": "rmsnorm"},
    "mcore012_qwen3_bf16_a": {"qk_norm": True},
    "mcore012_t5_learned_a": {"position_embedding": "learned", "max_positions": 32},
    "mcore012_torchfmt_llama_tp2_a": {"gated": True},
    "bridge_qwen2moe_a": {
        "normalized_experts": False,
        "shared_expert_size": 20,
        "ffn_size": 12,
        "attention_dense_bias": False,
    },
    "bridge_dense_a": {
        "dense_layers": "0",
        "dense_ffn_size": 24,
        "router_score_function": "sigmoid",
        "router_scaling_factor": 2.5,
        "expert_bias": True,
    },
    "bridge_gpt_oss_a": {
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "full_attention_layers": "1",
        "mlp_bias": True,
        "rotary_scaling": "factors",
        "router_bias": True,
        "sliding_window": 5,
    },
    "mcore014_mixtral_a": {
        "num_experts": 4,
        "experts_per_token": 2,
        "normalized_experts": True,
        "ffn_size": 24,
    },
    "mcore016_shared_a": {"shared_expert_size": 20, "shared_expert_gate": False},
    "mcore016_t5_relative_a": {"position_embedding": "relative", "num_buckets": 32},
    "mcore019_gpt_learned_tp2pp2_a": {"position_embedding": "learned"},
    "mcore019_llama31_tp2pp2_a": {"rotary_scaling": "llama3"},
    "mcore019_qwen2_a": {"attention_bias": True, "attention_dense_bias": False},
    "mcore019_qwen3_nonhomog_a": {"qk_norm": True},
    "nemo253_llama31_a": {"rotary_scaling_factor": 8.0},
    "nemo2_window_a": {
        "sliding_window": 5,
        "full_attention_layers": "1,3",
        "softmax_scale": 0.3,
    },
}


@pytest.fixture
def fixture(request: pytest.FixtureRequest, data_dir: Path) -> Path:
    """The folder of the fixture that the test's parameter names."""
    own = data_dir / "core" / request.param
    return (
        own if own.is_dir() else request.getfixturevalue("shared_dir") / "fixtures/core" / own.name
    )


@DIVISIONS
@pytest.mark.parametrize("fixture", FIXTURES, indirect=True)
def test_logits_are_the_cores(fixture: Path, tp: int, pp: int, tmp_path: Path) -> None:
    folder = export_folder(fixture / "checkpoint", tmp_path, tp, processes=1)
    got, want = logits_of(folder, fixture / "reference.npz", tp, pp)
    assert (got - want).abs().max() <= TOLERANCE
    config = read_config(folder).config
    assert {name: getattr(config, name) for name in FIXTURES[fixture.name]} == FIXTURES[
        fixture.name
    ]


@DIVISIONS
def test_latent_attention_of_the_core(shared_dir: Path, tp: int, pp: int, tmp_path: Path) -> None:
    """Saved by core 0.20, whose common state lies among the tensors."""
    fixture = shared_dir / "fixtures" / "families" / "mcore_mla_a"
    folder = export_folder(fixture / "ckpt", tmp_path, tp, processes=1)
    got, want = logits_of(folder, fixture / "reference.npz", tp, pp)
    assert (got - want).abs().max() <= TOLERANCE
    assert read_config(folder).config.kv_lora_rank == 24


def test_every_fixture_is_listed(shared_dir: Path, data_dir: Path) -> None:
    places = (shared_dir / "fixtures" / "core", data_dir / "core")
    folders = {path.name for place in places for path in place.iterdir() if path.is_dir()}
    assert folders == {*FIXTURES}
