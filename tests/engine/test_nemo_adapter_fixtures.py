"""Prompts, IA3, adapters and LoRA that NeMo wrote: exported, and run with NeMo's own logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.test_nemo_adapters import FIXTURES, IA3, PROMPT

TOLERANCE = 2e-4


def requests(reference: Path, kind: str, start_id: int) -> tuple[list[GenerateRequest], np.ndarray]:
    """The rows NeMo ran, with this project's ids of virtual tokens; and its logits."""
    with np.load(reference) as arrays:
        found = dict(arrays)
    ids = found["tokens" if "tokens" in found else "encoder_tokens"]
    if kind == PROMPT:
        ids = found["full_tokens"]
        length = len(found["virtual_embeddings"])
        ids[:, :length] = start_id + np.arange(length)
    decoders = found.get("decoder_tokens", np.zeros((len(ids), 0)))
    rows = [
        GenerateRequest(
            tuple(row),
            output_len=0,
            decoder_input_ids=tuple(decoder),
            return_context_logits=True,
            prompt_task=0 if kind == PROMPT else None,
            ia3_task=0 if kind == IA3 else None,
        )
        for row, decoder in zip(ids.tolist(), decoders.astype(int).tolist(), strict=True)
    ]
    return rows, found["logits"]


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", FIXTURES)
def test_logits_equal_nemos(shared_dir: Path, tmp_path: Path, name: str, tp: int, pp: int) -> None:
    nemo, kind = shared_dir / "fixtures" / "nemo", FIXTURES[name]
    base = json.loads((nemo / name / "MANIFEST.json").read_text())["base_model_fixture"]
    parts = {kind: (str(nemo / name / "model.nemo"),)}
    folder = export_folder(nemo / base / "model.nemo", tmp_path, tp, **parts)
    engine = Engine.load(
        EngineSettings(folder, parallelism=Parallelism(tp, pp), device="cpu", max_batch_size=4)
    )
    try:
        start_id = engine.config.parts.prompt_start_id
        rows, logits = requests(nemo / name / "reference.npz", kind, start_id)
        futures = [engine.submit(row) for row in rows]
        got = torch.stack([future.result(60).context_logits for future in futures])
    finally:
        engine.close()
    difference = float((got - torch.from_numpy(logits)).abs().max())
    print(f"{name} TP {tp} PP {pp}: {difference:.2e}")
    assert got.shape == logits.shape
    assert difference <= TOLERANCE
