"""Every kind of NeMo T5 checkpoint exports to exactly its own weights, and computes what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.models.t5_weights import weights
from tests.checkpoint.exporting import export_folder, open_weights, refused_export
from tests.checkpoint.golden_cases import differing_keys, digests, found_digests
from tests.checkpoint.reference_forward_t5 import logits
from tests.checkpoint.t5_maker import T5Variant, make_t5, small_t5

RELATIVE = {"position_embedding": "relative", "num_buckets": 8, "max_distance": 16}
GOOGLE = {
    **RELATIVE,
    "normalization": "rmsnorm",
    "activation": "gelu_erf",
    "gated": True,
    "bias": False,
    "logits_bias": False,
    "tied_embeddings": False,
    "attention_scale": 1.0,
}
EQUAL = {"num_decoder_layers": 2}
CASES: dict[str, tuple[dict[str, Any], T5Variant]] = {
    "plain": ({}, T5Variant()),
    "flat": (EQUAL, T5Variant(flat=True)),
    "folder bf16": ({}, T5Variant(container="folder", dtype="bf16")),
    "tp2": ({}, T5Variant(tp_size=2)),
    "tp2 pp2": ({}, T5Variant(2, 2, 1)),
    "pp3 relative": (RELATIVE, T5Variant(1, 3, 1)),
    "pp4 split 2": (RELATIVE, T5Variant(2, 4, 2)),
    "relative": ({**RELATIVE, "relative_bias_layer_scaling": True}, T5Variant()),
    "cross-attention bias": ({**RELATIVE, "cross_attention_relative_bias": True}, T5Variant(2)),
    "as Google's": (GOOGLE, T5Variant(2)),
    "own decoder tables": ({"shared_embeddings": False}, T5Variant(2)),
    "head without bias": ({"tied_embeddings": False, "logits_bias": False}, T5Variant(2)),
    "head with bias": ({"tied_embeddings": False}, T5Variant()),
    "geglu": ({"gated": True}, T5Variant(tp_size=2)),
    "fast-geglu": ({"gated": True}, T5Variant(tp_size=2, fused_gate=True)),
    "legacy": ({}, T5Variant(tp_size=2, legacy_qkv=True)),
    "layernorm1p": ({}, T5Variant(plus_one=True)),
}
GOLDEN = {
    "nemo_t5_tp1_to4": 4,
    "nemo_t5_tp2_to1": 1,
    "nemo_t5_real_shared_to2": 2,
    "nemo_t5_prompt_to1": 1,
    "nemo_t5_ia3_to1": 1,
}
FIXTURES = (
    "t5_gpt2bpe_learned_relative_xattn_nemo1.18.1",
    "t5_sp_fused_geglu_relative_shared_nemo1.18.1",
    "t5_sp_learned_shared_nemo1.18.1",
    "t5_sp_learned_shared_nemo1.23.0",
    "t5_sp_learned_shared_tp2pp2_nemo1.18.1",
    "t5_sp_relative_geglu_untied_nemo1.18.1",
    "t5_sp_relative_geglu_untied_tp2_nemo1.18.1",
    "t5_sp_relative_rmsnorm_nobias_nemo1.18.1",
)


def check(folder: Path, config: Any, stored: dict[str, np.ndarray]) -> None:
    assert FTCheckpoint.open(folder).config == config
    found, _ = open_weights(folder)
    names = {
        spec.tensor_name(layer)
        for spec in weights(config)
        for layer in spec.layer_numbers(config)
        if spec.required
    }
    assert names == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(found[name].numpy(), values, err_msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_every_tensor_arrives(case: str, tp_size: int, tmp_path: Path) -> None:
    changes, variant = CASES[case]
    config = small_t5(**changes)
    stored = make_t5(tmp_path / "source", config, variant)
    check(export_folder(tmp_path / "source", tmp_path, tp_size), config, stored)


@settings(max_examples=10)
@given(
    case=st.sampled_from(sorted(CASES)),
    ranks=st.sampled_from([1, 2, 4]),
    stages=st.sampled_from([(1, 0), (2, 1), (3, 1), (3, 2), (4, 2)]),
    target=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["fp32", "bf16"]),
)
def test_any_division_becomes_any_other(
    case: str,
    ranks: int,
    stages: tuple[int, int],
    target: int,
    dtype: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    changes, variant = CASES[case]
    sharing = changes.get("shared_embeddings", True) and changes.get("tied_embeddings", True)
    pp_size, split = stages if sharing else (1, 0)
    config = small_t5(**changes)
    asked = T5Variant(
        ranks,
        pp_size,
        split,
        dtype=dtype,
        fused_gate=variant.fused_gate,
        legacy_qkv=variant.legacy_qkv,
        plus_one=variant.plus_one,
        flat=variant.flat,
    )
    folder = tmp_path_factory.mktemp("t5")
    stored = make_t5(folder / "source.nemo", config, asked)
    check(export_folder(folder / "source.nemo", folder, target), config, stored)


DIFFERING = {
    "encoder and decoder differ in hidden_size": {"decoder": {"hidden_size": 64}},
    "encoder and decoder differ in position_embedding": {
        "decoder": {"position_embedding_type": "relative"}
    },
    "arch is not supported": {"encoder": {"arch": "perceiver"}},
    "transformer_block_type is not supported": {"decoder": {"transformer_block_type": "post_ln"}},
    "position_embedding_type is not supported": {"encoder": {"position_embedding_type": "alibi"}},
    "num_attention_heads must be a positive number": {"encoder": {"num_attention_heads": None}},
}


@pytest.mark.parametrize("message", DIFFERING)
def test_what_cannot_be_represented(message: str, tmp_path: Path) -> None:
    config = small_t5(**EQUAL)
    sections = {
        name: {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 6}
        | DIFFERING[message].get(name, {})
        for name in ("encoder", "decoder")
    }
    make_t5(tmp_path / "s.nemo", config, T5Variant(raw=sections))
    refused_export(tmp_path / "s.nemo", tmp_path, message)


@pytest.mark.parametrize("case", GOLDEN)
def test_the_originals_bytes(case: str, shared_dir: Path, tmp_path: Path) -> None:
    """The base model of a prompt-learning or IA3 case is all that this export writes."""
    folder = shared_dir / "golden" / case
    ids = TokenizerSettings("none", start_id=60, end_id=61, pad_id=62)
    source = folder / "input" / "m.nemo"
    exported = export_folder(source, tmp_path, GOLDEN[case], tokenizer=ids)
    expected = {
        name: digest
        for name, digest in digests(folder).items()
        if "prompt_table" not in name and ".ia3." not in name
    }
    assert found_digests(exported) == expected
    if case == "nemo_t5_tp1_to4" or case == "nemo_t5_tp2_to1":
        assert differing_keys(folder, exported) == {}
        theirs = (folder / "config.ini").read_text().splitlines()
        ours = iter((exported / "config.ini").read_text().splitlines())
        assert all(line in ours for line in theirs if not line.startswith("_name_or_path"))


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_nemos_own_logits(name: str, tp_size: int, shared_dir: Path, tmp_path: Path) -> None:
    folder = shared_dir / "fixtures" / "nemo" / name
    found, config = open_weights(export_folder(folder / "model.nemo", tmp_path, tp_size))
    reference = np.load(folder / "reference.npz")
    encoder, decoder = (
        torch.from_numpy(reference[key]).long() for key in ("encoder_tokens", "decoder_tokens")
    )
    ours = logits(found, config, encoder, decoder).numpy()
    np.testing.assert_allclose(ours, reference["logits"], rtol=0, atol=2e-4)
