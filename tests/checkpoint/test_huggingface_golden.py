"""Byte for byte what FasterTransformer v5.3's own Hugging Face converters wrote."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from launcher_scripts.checkpoint.layout.layouts import fairseq_sinusoids
from launcher_scripts.models.gpt import GPTConfig
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.golden_cases import differing_keys, digests, found_digests

CASES = {"hf_gpt2_to2": 2, "hf_bloom_to1": 1, "hf_t5_v11_to1": 1}
MORE_CASES = {"hf_t5_v10_to1": "fp32", "hf_t5_v11_fp16_to1": "fp16"}
# The original says that every T5 is tied, and its runtime then scales the logits of untied ones.
UNTIED = {"decoder.tie_word_embeddings": (True, False)}


@pytest.mark.parametrize("case", CASES)
def test_same_bytes_and_keys(case: str, data_dir: Path, tmp_path: Path) -> None:
    original = data_dir / "golden" / case
    folder = export_folder(original / "hf", tmp_path, CASES[case])
    assert found_digests(folder) == digests(original)
    assert differing_keys(original, folder) == (UNTIED if "v11" in case else {})


@pytest.mark.parametrize("case", MORE_CASES)
def test_same_bytes_for_all(case: str, shared_dir: Path, tmp_path: Path) -> None:
    original = shared_dir / "golden" / case
    folder = export_folder(original / "input" / "hf", tmp_path, 1, MORE_CASES[case])
    assert found_digests(folder) == digests(original)
    assert differing_keys(original, folder) == (UNTIED if "v11" in case else {})


def test_the_encoder_alone(shared_dir: Path, tmp_path: Path) -> None:
    original = shared_dir / "golden" / "hf_t5_encoder_to1"
    folder = export_folder(original / "input" / "hf", tmp_path, encoder_only=True)
    assert found_digests(folder) == digests(original)
    assert differing_keys(original, folder) == {}


def test_xglm_as_this_processor_computes_it(data_dir: Path, tmp_path: Path) -> None:
    """torch's sines may differ by their last bit between processors, transformers' with them."""
    original = data_dir / "golden" / "xglm_to1_NO_FT_CONVERTER"
    folder = export_folder(original / "hf", tmp_path)
    positions = XGLMSinusoidalPositionalEmbedding.get_embedding(34, 16, 1)[2:].numpy()
    here = {"model.wpe.bin": hashlib.sha256(positions.tobytes()).hexdigest()}
    assert found_digests(folder) == digests(original) | here
    assert differing_keys(original, folder) == {}


@pytest.mark.parametrize("pad_id", [1, 5])
def test_xglms_positions_are_those_of_transformers(pad_id: int) -> None:
    config = GPTConfig(9, 1, 18, 1, 1, 18, 4, 700, pad_id=pad_id)
    theirs = XGLMSinusoidalPositionalEmbedding.get_embedding(702, 18, pad_id)[2:]
    assert np.array_equal(fairseq_sinusoids([], config), theirs.numpy())
