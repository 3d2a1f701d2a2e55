"""T5 checkpoints written by NeMo itself: exported, run, and compared with NeMo's own logits."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder

NOT_PLAIN_T5 = re.compile("ptl|ptuning|ia3|adapter|peft")
TOLERANCE = 2e-4
NAMES = (
    "t5_gpt2bpe_learned_relative_xattn_nemo1.18.1",
    "t5_sp_fused_geglu_relative_shared_nemo1.18.1",
    "t5_sp_learned_shared_nemo1.18.1",
    "t5_sp_learned_shared_nemo1.23.0",
    "t5_sp_learned_shared_tp2pp2_nemo1.18.1",
    "t5_sp_relative_geglu_untied_nemo1.18.1",
    "t5_sp_relative_geglu_untied_tp2_nemo1.18.1",
    "t5_sp_relative_rmsnorm_nobias_nemo1.18.1",
)


def logits_of(engine: Engine, reference: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and NeMo's at every decoder position of every row, [B, T, vocab] both."""
    with np.load(reference) as arrays:
        sources, decoders = (
            [tuple(row) for row in arrays[name].tolist()]
            for name in ("encoder_tokens", "decoder_tokens")
        )
        logits = torch.from_numpy(arrays["logits"]).float()
    futures = [
        engine.submit(
            GenerateRequest(
                source, output_len=0, decoder_input_ids=decoder, return_context_logits=True
            )
        )
        for source, decoder in zip(sources, decoders, strict=True)
    ]
    got = torch.stack([future.result(60).context_logits for future in futures])
    width = min(got.shape[-1], logits.shape[-1])
    assert got.shape[:2] == logits.shape[:2]
    return got[..., :width], logits[..., :width]


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_nemos(shared_dir: Path, tmp_path: Path, record_property, name, tp, pp):
    fixture = shared_dir / "fixtures" / "nemo" / name
    folder = export_folder(fixture / "model.nemo", tmp_path, tp)
    engine = Engine.load(
        EngineSettings(folder, parallelism=Parallelism(tp, pp), device="cpu", max_batch_size=4)
    )
    try:
        ours, nemos = logits_of(engine, fixture / "reference.npz")
    finally:
        engine.close()
    difference = float((ours - nemos).abs().max())
    record_property("max_abs_difference", difference)
    print(f"{name} TP {tp} PP {pp}: {difference:.2e}")
    assert difference <= TOLERANCE


def test_every_plain_t5_fixture_is_listed(shared_dir: Path):
    found = {
        path.name
        for path in (shared_dir / "fixtures" / "nemo").iterdir()
        if path.name.startswith("t5_") and not NOT_PLAIN_T5.search(path.name)
    }
    assert found == set(NAMES)
