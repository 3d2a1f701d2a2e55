"""GGUF files that llama.cpp's converter wrote of tiny models give the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder

FOLDER = Path(__file__).parents[1] / "data" / "gguf"
FILES = sorted(path.stem for path in FOLDER.glob("*.gguf"))


@pytest.mark.parametrize("name", FILES)
def test_logits(name: str, tmp_path: Path) -> None:
    with np.load(FOLDER / "logits.npz") as reference:
        ids, expected = reference["ids"][0], reference[name]
    folder = export_folder(FOLDER / f"{name}.gguf", tmp_path)
    engine = Engine.load(EngineSettings(folder, device="cpu"))
    try:
        request = GenerateRequest(tuple(map(int, ids)), 0, return_context_logits=True)
        found = np.asarray(engine.submit(request).result(60).context_logits)
    finally:
        engine.close()
    assert np.abs(found - expected).max() <= 1e-5
