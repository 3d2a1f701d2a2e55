"""Checkpoints written by NeMo itself: exported, run, and compared with NeMo's own logits.

Reference runs were in the source's type, so bfloat16 sources are compared more loosely.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkpoint.exporting import export_folder
from tests.engine.fixture_logits import DIVISIONS, TOLERANCE, logits_of

NOT_PLAIN = re.compile("ptl|ptuning|ia3|adapter|peft")
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
    "t5_gpt2bpe_learned_relative_xattn_nemo1.18.1",
    "t5_sp_fused_geglu_relative_shared_nemo1.18.1",
    "t5_sp_learned_shared_nemo1.18.1",
    "t5_sp_learned_shared_nemo1.23.0",
    "t5_sp_learned_shared_tp2pp2_nemo1.18.1",
    "t5_sp_relative_geglu_untied_nemo1.18.1",
    "t5_sp_relative_geglu_untied_tp2_nemo1.18.1",
    "t5_sp_relative_rmsnorm_nobias_nemo1.18.1",
)


def source_of(fixture: Path) -> Path:
    """The archive or folder of a fixture."""
    archives = sorted(fixture.glob("*.nemo"))
    return archives[0] if archives else fixture / "model"


def allowed(name: str) -> float:
    """How far fp32 may be from the reference of this fixture."""
    return BF16_TOLERANCE if any(mark in name for mark in BF16_SOURCES) else TOLERANCE


@DIVISIONS
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_nemos(shared_dir: Path, tmp_path: Path, record_property, name, tp, pp):
    fixture = shared_dir / "fixtures" / "nemo" / name
    folder = export_folder(source_of(fixture), tmp_path, tp, processes=1)
    ours, nemos = logits_of(folder, fixture / "reference.npz", tp, pp)
    difference = float((ours - nemos).abs().max())
    record_property("max_abs_difference", difference)
    print(f"{name} TP {tp} PP {pp}: {difference:.2e}")
    assert difference <= allowed(name)


def test_every_plain_fixture_is_listed(shared_dir: Path):
    found = {
        path.name
        for path in (shared_dir / "fixtures" / "nemo").iterdir()
        if path.name.startswith(("gpt_", "mcore_gpt_", "t5_")) and not NOT_PLAIN.search(path.name)
    }
    assert found == set(NAMES)
