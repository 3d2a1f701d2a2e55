"""Checkpoints that NeMo 1.18, 1.23 and 2.0 wrote themselves.

The expected tensors come by another way than the export's: torch loads the file of a checkpoint of
one rank, and NeMo's own resharding and wrapping of the same model must export to the same.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from tests.checkpoint.exporting import export_folder, refused_export, weight_bytes
from tests.checkpoint_maker import rebuilt

FIXTURES = {
    "gpt_gpt2bpe_8layer_bf16_O2_nemo1.23.0": {},
    "gpt_gpt2bpe_alibi_nemo1.23.0": {"position_embedding": "alibi", "activation": "squared_relu"},
    "gpt_gpt2bpe_alibi_qkscale_nemo1.23.0": {"alibi_layer_scaling": True},
    "gpt_gpt2bpe_bf16_O2_nemo1.18.1": {"activation": "gelu_erf"},
    "gpt_gpt2bpe_fused_gelu_nemo1.18.1": {"activation": "gelu"},
    "gpt_gpt2bpe_geglu_layernorm1p_nemo1.18.1": {"gated": True, "normalization": "layernorm"},
    "gpt_gpt2bpe_kv_channels32_nemo1.18.1": {"head_size": 32, "activation": "gelu"},
    "gpt_gpt2bpe_learned_nemo1.18.1": {"position_embedding": "learned", "norm_eps": 1e-5},
    "gpt_gpt2bpe_learned_nemo1.18.1__dir": {},
    "gpt_gpt2bpe_learned_nemo1.18.1__targz": {},
    "gpt_gpt2bpe_learned_nemo1.23.0": {},
    "gpt_gpt2bpe_learned_tp2pp2_nemo1.18.1": {},
    "gpt_gpt2bpe_megatron_legacy_nemo1.18.1": {},
    "gpt_gpt2bpe_post_ln_nemo1.23.0": {"norm_placement": "post", "final_norm": False},
    "gpt_sp_rope_rmsnorm_swiglu_nemo1.18.1": {"normalization": "rmsnorm", "mlp_bias": False},
    "gpt_sp_rope_swiglu_nemo1.18.1": {"rotary_percentage": 0.5, "tied_embeddings": False},
    "gpt_sp_rope_swiglu_tp2_nemo1.18.1": {"rotary_percentage": 0.5, "activation": "silu"},
    "mcore_gpt_learned_gelu_nemo2.0.0": {"activation": "gelu_erf"},
    "mcore_gpt_learned_gelu_tp2pp2_nemo1.23.0": {"position_embedding": "learned"},
    "mcore_gpt_rope_swiglu_gqa_nemo1.23.0": {"num_kv_heads": 2, "gated": True},
}
SAME = {
    "gpt_gpt2bpe_learned_nemo1.18.1__dir": "gpt_gpt2bpe_learned_nemo1.18.1",
    "gpt_gpt2bpe_learned_nemo1.18.1__targz": "gpt_gpt2bpe_learned_nemo1.18.1",
    "gpt_gpt2bpe_learned_tp2pp2_nemo1.18.1": "gpt_gpt2bpe_learned_nemo1.18.1",
    "gpt_sp_rope_swiglu_tp2_nemo1.18.1": "gpt_sp_rope_swiglu_nemo1.18.1",
    "t5_sp_learned_shared_tp2pp2_nemo1.18.1": "t5_sp_learned_shared_nemo1.18.1",
    "t5_sp_relative_geglu_untied_tp2_nemo1.18.1": "t5_sp_relative_geglu_untied_nemo1.18.1",
}
ONE_RANK = [name for name in FIXTURES if name.startswith("gpt_") and name not in SAME]


def source(shared_dir: Path, name: str) -> Path:
    folder = shared_dir / "fixtures" / "nemo" / name
    return next(path for path in (folder / "model.nemo", folder / "model") if path.exists())


@pytest.mark.parametrize("name", FIXTURES)
def test_every_division_holds_the_same_model(name: str, shared_dir: Path, tmp_path: Path) -> None:
    whole = FTCheckpoint.open(export_folder(source(shared_dir, name), tmp_path / "1"))
    halves = FTCheckpoint.open(export_folder(source(shared_dir, name), tmp_path / "2", 2))
    for key, value in FIXTURES[name].items():
        assert getattr(whole.config, key) == value
    expected, found = rebuilt(whole), rebuilt(halves)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, err_msg=key)


@pytest.mark.parametrize("name", SAME)
def test_other_wrapping_same_model(name: str, shared_dir: Path, tmp_path: Path) -> None:
    pair = [export_folder(source(shared_dir, each), tmp_path / each) for each in (name, SAME[name])]
    one, other = map(weight_bytes, pair)
    assert one == other


@pytest.mark.parametrize("name", ONE_RANK)
def test_against_torchs_own_reading(name: str, shared_dir: Path, tmp_path: Path) -> None:
    """Matrices whose stored form is the plain transpose, tables and biases, from torch.load."""
    with tarfile.open(source(shared_dir, name)) as archive:
        member = archive.extractfile("./model_weights.ckpt")
        assert member is not None
        state = torch.load(io.BytesIO(member.read()), weights_only=True)
    checkpoint = FTCheckpoint.open(export_folder(source(shared_dir, name), tmp_path))
    found = rebuilt(checkpoint)
    stem = "model.language_model."
    layer = checkpoint.config.num_layers - 1
    there, here = f"{stem}encoder.layers.{layer}", f"layers.{layer}"
    pairs = {
        "wte": f"{stem}embedding.word_embeddings.weight",
        f"{here}.attention.dense.weight": f"{there}.self_attention.dense.weight",
        f"{here}.mlp.dense_4h_to_h.weight": f"{there}.mlp.dense_4h_to_h.weight",
    }
    for target, key in pairs.items():
        values = state[key].float()
        values = values if target == "wte" else values.T
        np.testing.assert_array_equal(found[target], values.numpy(), err_msg=target)
    qkv = state[f"{there}.self_attention.query_key_value.weight"].float()
    config = checkpoint.config
    query = qkv.unflatten(0, (config.num_heads, 3, config.head_size))[:, 0].flatten(0, 1)
    stored = found[f"{here}.attention.query_key_value.weight"][:, : config.q_size]
    np.testing.assert_array_equal(stored, query.T.numpy())


DELTAS = ("gpt_adapter_linear_nemo1.18.1", "gpt_ia3_nemo1.18.1", "gpt_ptuning_mlp_nemo1.18.1")


@pytest.mark.parametrize("name", DELTAS)
def test_a_delta_is_no_model(name: str, shared_dir: Path, tmp_path: Path) -> None:
    refused_export(source(shared_dir, name), tmp_path, "no models of their own")
