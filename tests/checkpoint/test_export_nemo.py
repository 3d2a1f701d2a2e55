"""Every kind of NeMo GPT checkpoint exports to exactly its own weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import ALGORITHM, content_digest
from launcher_scripts.common.files import DigestChain
from tests.checkpoint.exporting import export_folder
from tests.checkpoint_maker import Variant, make_nemo, rebuilt, small_config

ROPE = {"position_embedding": "rope", "rotary_percentage": 0.5}
LLAMA = {
    **ROPE,
    "normalization": "rmsnorm",
    "activation": "silu",
    "gated": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tied_embeddings": False,
}
CASES = {
    "plain": ({}, Variant()),
    "gzip": ({}, Variant(container="gzip")),
    "folder": ({}, Variant(container="folder")),
    "tp2": ({}, Variant(tp_size=2)),
    "tp2pp2": ({}, Variant(tp_size=2, pp_size=2)),
    "pp4 untied": ({"tied_embeddings": False}, Variant(pp_size=4)),
    "exact gelu": ({"activation": "gelu_erf"}, Variant()),
    "bf16 O2": ({}, Variant(dtype="bf16", o2_names=True)),
    "fp16": ({}, Variant(dtype="fp16")),
    "alibi": (
        {
            "position_embedding": "alibi",
            "alibi_layer_scaling": True,
            "activation": "squared_relu",
        },
        Variant(),
    ),
    "post_ln": ({"norm_placement": "post", "final_norm": False}, Variant()),
    "kv_channels": ({"head_size": 12}, Variant(tp_size=2)),
    "layernorm1p": ({}, Variant(plus_one=True, dtype="bf16")),
    "legacy": ({}, Variant(legacy_qkv=True)),
    "legacy tp2": ({}, Variant(legacy_qkv=True, tp_size=2)),
    "geglu": ({"gated": True}, Variant(tp_size=2)),
    "fast-swiglu": (LLAMA, Variant(fused_gate=True)),
    "fast-swiglu tp2": (LLAMA, Variant(fused_gate=True, tp_size=2)),
    "mcore ranks": ({}, Variant("mcore", tp_size=2, pp_size=2)),
    "mcore local norms": ({}, Variant("mcore", local_norms=True, plus_one=True)),
    "mcore gqa ranks": ({**LLAMA, "num_kv_heads": 2}, Variant("mcore", tp_size=2)),
    "zarr": ({}, Variant("zarr")),
    "zarr gqa": ({**LLAMA, "num_kv_heads": 2}, Variant("zarr", tp_size=2)),
    "zarr bf16 folder": ({}, Variant("zarr", dtype="bf16", container="folder")),
    "torch_dist": ({}, Variant("torch_dist", dtype="bf16")),
    "torch_dist gqa": ({**LLAMA, "num_kv_heads": 1}, Variant("torch_dist")),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "tp_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))]
)
def test_every_tensor_arrives(case: str, tp_size: int, tmp_path: Path) -> None:
    changes, variant = CASES[case]
    config = small_config(**changes)
    stored = make_nemo(tmp_path / "source", config, variant)
    folder = export_folder(tmp_path / "source", tmp_path, tp_size)
    checkpoint = FTCheckpoint.open(folder)
    assert checkpoint.config == config
    assert (checkpoint.tp_size, folder.name) == (tp_size, f"{tp_size}-gpu")
    found = rebuilt(checkpoint)
    assert found.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize(("ranks", "tp_size"), [(3, 2), (6, 4), (2, 3), (3, 12)])
def test_sizes_need_not_divide_each_other(ranks: int, tp_size: int, tmp_path: Path) -> None:
    config = small_config(num_heads=12, num_kv_heads=12, ffn_size=48)
    stored = make_nemo(tmp_path / "source.nemo", config, Variant(tp_size=ranks))
    found = rebuilt(FTCheckpoint.open(export_folder(tmp_path / "source.nemo", tmp_path, tp_size)))
    for name, values in stored.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_fp16_is_numpys_rounding(tmp_path: Path) -> None:
    stored = make_nemo(tmp_path / "source.nemo", small_config())
    folder = export_folder(tmp_path / "source.nemo", tmp_path, 2, "fp16")
    found = rebuilt(FTCheckpoint.open(folder))
    for name, values in stored.items():
        np.testing.assert_array_equal(found[name], values.astype(np.float16), err_msg=name)


SHAPES = st.fixed_dictionaries(
    {
        "num_layers": st.sampled_from([2, 4]),
        "head_size": st.sampled_from([2, 6, 8]),
        "num_kv_heads": st.sampled_from([1, 2, 4]),
        "gated": st.booleans(),
        "tied_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "normalization": st.sampled_from(["layernorm", "rmsnorm"]),
        "position_embedding": st.sampled_from(["learned", "rope", "none"]),
    }
)


@settings(max_examples=15)
@given(
    shape=SHAPES,
    form=st.sampled_from(["nemo", "mcore", "zarr"]),
    source=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]),
    target=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["fp32", "bf16"]),
    fused=st.booleans(),
)
def test_any_division_becomes_any_other(
    shape: dict,
    form: str,
    source: tuple[int, int],
    target: int,
    dtype: str,
    fused: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shape = {**shape, "mlp_bias": shape["attention_bias"]}
    tp_size, pp_size = source
    if form == "nemo":
        shape["num_kv_heads"] = 4
    if shape["num_kv_heads"] % tp_size:
        tp_size = 1
    variant = Variant(
        form, tp_size, pp_size, dtype=dtype, fused_gate=fused and form == "nemo" and shape["gated"]
    )
    folder = tmp_path_factory.mktemp("any")
    stored = make_nemo(folder / "source.nemo", small_config(**shape), variant)
    found = rebuilt(FTCheckpoint.open(export_folder(folder / "source.nemo", folder, target)))
    assert found.keys() == stored.keys()
    assert all(np.array_equal(found[name], values) for name, values in stored.items())


def test_the_manifest_has_the_sources_digest(tmp_path: Path) -> None:
    """That of the lines that b3sum prints; the served digests lead back to it."""
    make_nemo(tmp_path / "source.nemo", small_config())
    digest = content_digest((tmp_path / "source.nemo").read_bytes(), ALGORITHM)
    lines = content_digest(f"{digest}  source.nemo\n".encode(), ALGORITHM)
    folder = export_folder(tmp_path / "source.nemo", tmp_path)
    chain = DigestChain.of(folder)
    assert chain.source == {"source.nemo": f"{ALGORITHM}:{lines}"}
    again = DigestChain.of(export_folder(tmp_path / "source.nemo", tmp_path / "other"))
    assert again.fingerprint.rpartition("_")[2] == chain.fingerprint.rpartition("_")[2]
    assert again.source == chain.source


def test_digests_of_the_source_come_later(tmp_path: Path) -> None:
    """An export without them gets them when it is kept; the weights stay."""
    make_nemo(tmp_path / "source.nemo", small_config())
    folder = export_folder(tmp_path / "source.nemo", tmp_path, digest_source=False)
    assert DigestChain.of(folder).source == {}
    assert DigestChain.of(folder).fingerprint.count("_") == 1
    export_folder(tmp_path / "source.nemo", tmp_path, digest_source=False)
    assert DigestChain.of(folder).source == {}
    export_folder(tmp_path / "source.nemo", tmp_path)
    assert list(DigestChain.of(folder).source) == ["source.nemo"]
    FTCheckpoint.open(folder)
