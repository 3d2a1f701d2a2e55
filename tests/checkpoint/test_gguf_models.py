"""GGUF files that llama.cpp's converter wrote of tiny models give the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher_scripts.contract.requests import GenerateRequest
from tests.checkpoint.engine_answers import answers
from tests.checkpoint.exporting import export_folder

FOLDER = Path(__file__).parents[1] / "data" / "gguf"
FILES = sorted(path.stem for path in FOLDER.glob("*.gguf"))


@pytest.mark.parametrize("name", FILES)
def test_logits(name: str, tmp_path: Path) -> None:
    with np.load(FOLDER / "logits.npz") as reference:
        ids, expected = reference["ids"][0], reference[name]
    folder = export_folder(FOLDER / f"{name}.gguf", tmp_path)
    request = GenerateRequest(tuple(map(int, ids)), 0, return_context_logits=True)
    (answer,) = answers(folder, request)
    assert np.abs(np.asarray(answer.context_logits) - expected).max() <= 1e-5
