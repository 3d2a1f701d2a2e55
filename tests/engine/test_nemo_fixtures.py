"""Checkpoints written by NeMo itself: exported, run, and compared with NeMo's own logits.

Reference runs were in the source's type, so bfloat16 sources are compared more loosely.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.checkpoint.convert.export import export
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.settings import ExportSettings, TokenizerSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings

NOT_PLAIN_GPT = re.compile("ptl|ptuning|ia3|adapter|peft")
TOLERANCE = 2e-4
BF16_TOLERANCE = 8e-2
BF16_SOURCES = ("bf16", "nemo2.0.0")
NAMES = (
    "gpt_gpt2bpe_8layer_bf16_O2_nemo1.23.0",
    "gpt_gpt2bpe_alibi_nemo1.23.0",
    "gpt_gpt2bpe_alibi_qkscale_nemo1.23.0",
    "gpt_gpt2bpe_bf16_O2_nemo1.18.1",
    "gpt_gpt2bpe_fused_gelu_nemo1.18.1",
    "gpt_gpt2bpe_geglu_layernorm1p_nemo1.18.1",
    "gpt_gpt2bpe_kv_channels32_nemo1.18.1",
    "gpt_gpt2bpe_learned_nemo1.18.1",
    "gpt_gpt2bpe_learned_nemo1.18.1__dir",
    "gpt_gpt2bpe_learned_nemo1.18.1__targz",
    "gpt_gpt2bpe_learned_nemo1.23.0",
    "gpt_gpt2bpe_learned_tp2pp2_nemo1.18.1",
    "gpt_gpt2bpe_megatron_legacy_nemo1.18.1",
    "gpt_gpt2bpe_post_ln_nemo1.23.0",
    "gpt_sp_rope_rmsnorm_swiglu_nemo1.18.1",
    "gpt_sp_rope_swiglu_nemo1.18.1",
    "gpt_sp_rope_swiglu_tp2_nemo1.18.1",
    "mcore_gpt_learned_gelu_nemo2.0.0",
    "mcore_gpt_learned_gelu_tp2pp2_nemo1.23.0",
    "mcore_gpt_rope_swiglu_gqa_nemo1.23.0",
)


def source_of(fixture: Path) -> Path:
    """The archive or folder of a fixture."""
    archives = sorted(fixture.glob("*.nemo"))
    return archives[0] if archives else fixture / "model"


def exported(fixture: Path, out: Path, tp_size: int) -> Path:
    settings = ExportSettings(
        model_name="fixture",
        model_type="gpt3",
        checkpoint_path=str(source_of(fixture)),
        triton_model_dir=str(out / "fixture"),
        parallelism=Parallelism(tp_size),
        processes=1,
        tokenizer=TokenizerSettings(source="none"),
    )
    return export(settings)


def logits_of(engine: Engine, reference: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and NeMo's at every position of every row of the reference, [B, T, vocab] both."""
    with np.load(reference) as arrays:
        tokens, logits = arrays["tokens"], torch.from_numpy(arrays["logits"]).float()
    futures = [
        engine.submit(
            GenerateRequest(tuple(row.tolist()), output_len=0, return_context_logits=True)
        )
        for row in tokens
    ]
    got = torch.stack([future.result(60).context_logits for future in futures])
    width = min(got.shape[-1], logits.shape[-1])
    return got[..., :width], logits[..., :width]


def allowed(name: str) -> float:
    """How far fp32 may be from the reference of this fixture."""
    return BF16_TOLERANCE if any(mark in name for mark in BF16_SOURCES) else TOLERANCE


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
    engine = Engine.load(
        EngineSettings(
            exported(fixture, tmp_path, tp),
            parallelism=Parallelism(tp, pp),
            device="cpu",
            max_batch_size=8,
        )
    )
    try:
        ours, nemos = logits_of(engine, fixture / "reference.npz")
    finally:
        engine.close()
    difference = float((ours - nemos).abs().max())
    record_property("max_abs_difference", difference)
    print(f"{name} TP {tp} PP {pp}: {difference:.2e}")
    assert difference <= allowed(name)


def test_every_plain_gpt_fixture_is_listed(shared_dir: Path):
    found = {
        path.name
        for path in (shared_dir / "fixtures" / "nemo").iterdir()
        if path.name.startswith(("gpt_", "mcore_gpt_")) and not NOT_PLAIN_GPT.search(path.name)
    }
    assert found == set(NAMES)
