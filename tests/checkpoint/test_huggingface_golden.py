"""Byte for byte what FasterTransformer v5.3's own Hugging Face converters wrote."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

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


def test_xglm_but_for_the_last_bit_of_its_positions(data_dir: Path, tmp_path: Path) -> None:
    original = data_dir / "golden" / "xglm_to1_NO_FT_CONVERTER"
    folder = export_folder(original / "hf", tmp_path)
    expected, found = digests(original), found_digests(folder)
    # torch's float32 sines depend on the processor: theirs are not always the nearest float.
    expected.pop("model.wpe.bin")
    found.pop("model.wpe.bin")
    assert found == expected
    table = np.fromfile(folder / "model.wpe.bin", "<f4").reshape(32, 16)
    theirs = XGLMSinusoidalPositionalEmbedding.get_embedding(34, 16, 1)[2:]
    assert torch.allclose(torch.from_numpy(table), theirs, rtol=0, atol=1.2e-7)
    assert differing_keys(original, folder) == {}
