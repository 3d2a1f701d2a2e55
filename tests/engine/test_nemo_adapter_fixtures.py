"""Prompts, IA3, adapters and LoRA that NeMo wrote: exported, and run with NeMo's own logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.exporting import export_folder
from tests.checkpoint.test_nemo_adapters import FIXTURES
from tests.engine.fixture_logits import DIVISIONS, TOLERANCE, logits_of


@DIVISIONS
@pytest.mark.parametrize("name", FIXTURES)
def test_logits_equal_nemos(shared_dir: Path, tmp_path: Path, name: str, tp: int, pp: int) -> None:
    nemo, kind = shared_dir / "fixtures" / "nemo", FIXTURES[name]
    base = json.loads((nemo / name / "MANIFEST.json").read_text())["base_model_fixture"]
    parts = {kind: (str(nemo / name / "model.nemo"),)}
    folder = export_folder(nemo / base / "model.nemo", tmp_path, tp, **parts)
    got, logits = logits_of(folder, nemo / name / "reference.npz", tp, pp, kind=kind)
    difference = float((got - logits).abs().max())
    print(f"{name} TP {tp} PP {pp}: {difference:.2e}")
    assert difference <= TOLERANCE
