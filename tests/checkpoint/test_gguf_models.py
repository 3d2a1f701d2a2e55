"""GGUF files that llama.cpp's converter wrote of tiny models give the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint import reference_forward_gpt
from tests.checkpoint.exporting import export_folder, open_weights, refused_export

FOLDER = Path(__file__).parents[1] / "data" / "gguf"
REFUSED = {
    "llama_yarn": "unknown rope_type; got 'yarn'",
    "mixtral": r"llama\.expert_count is not supported; got 4",
    "qwen2moe": "unknown architecture; got 'qwen2moe'",
}
FILES = sorted(path.stem for path in FOLDER.glob("*.gguf") if path.stem not in REFUSED)


@pytest.mark.parametrize("name", FILES)
def test_logits(name: str, tmp_path: Path) -> None:
    with np.load(FOLDER / "logits.npz") as reference:
        ids, expected = torch.from_numpy(reference["ids"]), reference[name]
    folder = export_folder(FOLDER / f"{name}.gguf", tmp_path, 2)
    found = reference_forward_gpt.logits(*open_weights(folder), ids)[0].numpy()
    assert np.abs(found - expected).max() <= 2e-6 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_no_family_computes_is_refused_by_name(name: str, tmp_path: Path) -> None:
    refused_export(FOLDER / f"{name}.gguf", tmp_path, REFUSED[name])
