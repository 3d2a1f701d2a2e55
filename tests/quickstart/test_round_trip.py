"""A GGUF model written as a .nemo file, exported by the launcher's own converter, read back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.tokenizer import chat_templates, load_tokenizer, tokenizer_files
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.models.gpt_weights import weights as gpt_weights
from launcher_scripts.steps import quickstart
from tests.quickstart.tiny_gguf import (
    FFN,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TEMPLATE,
    hf_weights,
    write_gguf,
)

GROUPS = 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> FTCheckpoint:
    """The tiny model exported for two ranks."""
    folder = tmp_path_factory.mktemp("round_trip")
    source = write_gguf(folder / "tiny.gguf", hf_weights())
    nemo = quickstart.write_nemo_file(source, folder / "tiny.nemo")
    settings = ExportSettings(
        model_name="tiny",
        model_type="gpt3",
        checkpoint_path=str(nemo),
        triton_model_dir=str(folder / "model_repo" / "tiny"),
        parallelism=Parallelism(tp_size=2),
        processes=2,
    )
    return FTCheckpoint.open(export(settings))


def _whole(checkpoint: FTCheckpoint, name: str, axis: int) -> np.ndarray:
    """One tensor of layer 0, the two ranks' parts put together along `axis`."""
    spec = next(spec for spec in gpt_weights(checkpoint.config) if spec.name == name)
    return np.concatenate([checkpoint.read(spec, 0, rank) for rank in range(2)], axis=axis)


def test_the_hyperparameters_arrive(exported: FTCheckpoint) -> None:
    config = exported.config
    assert (config.num_heads, config.num_kv_heads) == (GROUPS * HEADS // KV_HEADS, GROUPS)
    assert (config.head_size, config.hidden_size, config.ffn_size) == (HEAD, HIDDEN, FFN)
    assert (config.position_embedding, config.rotary_base) == ("rope", 100000.0)
    assert (config.normalization, config.norm_eps) == ("rmsnorm", 1e-5)
    assert (config.activation, config.gated, config.tied_embeddings) == ("silu", True, True)
    assert (config.attention_bias, config.mlp_bias) == (False, False)
    assert config.vocab_size == 128  # the padded table, as FasterTransformer keeps it


def test_the_tokenizer_arrives_with_its_special_tokens(exported: FTCheckpoint) -> None:
    tokenizer = load_tokenizer(exported.folder)
    assert tokenizer.encode("abba") == [2, 1, 0]
    assert (tokenizer.start_id, tokenizer.end_id) == (1, 2)
    assert (exported.config.start_id, exported.config.end_id) == (1, 2)


def test_the_chat_template_and_the_defaults_arrive(exported: FTCheckpoint) -> None:
    files = {path.name: path.read_bytes() for path in tokenizer_files(exported.folder)}
    assert chat_templates(files) == {"default": TEMPLATE}
    defaults = {"temperature": 0.5, "eos_token_id": [2, 3]}
    assert json.loads(files["generation_config.json"]) == defaults


def test_the_mlp_arrives(exported: FTCheckpoint) -> None:
    hf = hf_weights()
    for name, key, axis in (
        ("layers.*.mlp.dense_h_to_4h.weight", "ffn_gate", 1),
        ("layers.*.mlp.dense_h_to_4h_2.weight", "ffn_up", 1),
        ("layers.*.mlp.dense_4h_to_h.weight", "ffn_down", 0),
    ):
        np.testing.assert_array_equal(_whole(exported, name, axis), hf[key].T)


def test_the_attention_arrives_with_its_padding(exported: FTCheckpoint) -> None:
    hf = hf_weights()
    spec = next(
        spec
        for spec in gpt_weights(exported.config)
        if spec.name == "layers.*.attention.query_key_value.weight"
    )
    ranks = [exported.read(spec, 0, rank) for rank in range(2)]  # [hidden, q | k | v]
    q_size, kv_size = GROUPS * HEADS // KV_HEADS * HEAD // 2, GROUPS * HEAD // 2
    for part, (start, size) in {
        "q": (0, q_size),
        "k": (q_size, kv_size),
        "v": (q_size + kv_size, kv_size),
    }.items():
        whole = np.concatenate([rank[:, start : start + size] for rank in ranks], axis=1)
        real = hf[f"attn_{part}"].shape[0]
        np.testing.assert_array_equal(whole[:, :real], hf[f"attn_{part}"].T)
        assert not whole[:, real:].any()
    dense = _whole(exported, "layers.*.attention.dense.weight", 0)
    np.testing.assert_array_equal(dense[: HEADS * HEAD], hf["attn_output"].T)
    assert not dense[HEADS * HEAD :].any()
