"""Logits of a fixture in the engine, beside those that its maker gave for the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings

TOLERANCE = 2e-4
DIVISIONS = pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
Pair = tuple[torch.Tensor, torch.Tensor]


def logits_of(
    folder: Path, reference: Path, tp: int = 1, pp: int = 1, *, kind: str = "", **more: Any
) -> Pair:
    """Ours and the maker's at every position of every row, of a decoder its own: [B, T, vocab].

    kind: prompt_checkpoints or ia3_checkpoints, where the rows ask for the only one there is
    more: further fields of EngineSettings
    """
    values = {"device": "cpu", "max_batch_size": 8, **more}
    engine = Engine.load(EngineSettings(folder, parallelism=Parallelism(tp, pp), **values))
    try:
        rows, logits = _rows(reference, kind, engine.config.parts.prompt_start_id)
        futures = [engine.submit(row) for row in rows]
        got = torch.stack([future.result(60).context_logits for future in futures])
    finally:
        engine.close()
    assert got.shape[:2] == logits.shape[:2]
    width = min(got.shape[-1], logits.shape[-1])
    return got[..., :width], logits[..., :width]


def _rows(
    reference: Path, kind: str, prompt_start_id: int
) -> tuple[list[GenerateRequest], torch.Tensor]:
    """The rows that the maker ran, with this project's ids of virtual tokens; and its logits."""
    with np.load(reference) as arrays:
        found = dict(arrays)
    prompt = kind == "prompt_checkpoints"
    ids = found["tokens" if "tokens" in found else "encoder_tokens"]
    if prompt:
        ids = found["full_tokens"]
        length = len(found["virtual_embeddings"])
        ids[:, :length] = prompt_start_id + np.arange(length)
    decoders = found.get("decoder_tokens", np.zeros((len(ids), 0)))
    rows = [
        GenerateRequest(
            tuple(row),
            output_len=0,
            decoder_input_ids=tuple(decoder),
            return_context_logits=True,
            prompt_task=0 if prompt else None,
            ia3_task=0 if kind == "ia3_checkpoints" else None,
        )
        for row, decoder in zip(ids.tolist(), decoders.astype(int).tolist(), strict=True)
    ]
    return rows, torch.from_numpy(found["logits"]).float()
