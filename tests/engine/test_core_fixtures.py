"""Checkpoints of Megatron-LM core, Megatron Bridge and NeMo 2: exported, run, and compared with the
core's own logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.checkpoint.export import export
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.parallel import Parallelism
from launcher_scripts.settings import ExportSettings, TokenizerSettings
from tests.engine.test_nemo_fixtures import TOLERANCE, logits_of

# name -> the folder within the checkpoint that a user may name, too
FIXTURES = {
    "bridge031_llama31_a": "iter_0000000",
    "mcore012_gpt_release_a": "",
    "mcore012_llama31_tp2pp2_a": "iter_0000004",
    "mcore012_llama_optim_a": "",
    "mcore019_gpt_learned_tp2pp2_a": "",
    "mcore019_llama31_tp2pp2_a": "iter_0000006",
    "mcore019_qwen2_a": "",
    "nemo253_llama31_a": "model--step=10-consumed_samples=40.0-last",
}


def exported(source: Path, out: Path, tp_size: int, tokenizer: str = "none") -> Path:
    return export(
        ExportSettings(
            model_name="fixture",
            model_type="gpt3",
            checkpoint_path=str(source),
            triton_model_dir=str(out / "fixture"),
            parallelism=Parallelism(tp_size),
            processes=1,
            tokenizer=TokenizerSettings(source=tokenizer),
        )
    )


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_the_cores(name: str, tp: int, pp: int, shared_dir: Path, tmp_path: Path):
    fixture = shared_dir / "fixtures" / "core" / name
    folder = exported(fixture / "checkpoint", tmp_path, tp)
    settings = EngineSettings(
        folder, parallelism=Parallelism(tp, pp), device="cpu", max_batch_size=8
    )
    engine = Engine.load(settings)
    try:
        got, want = logits_of(engine, fixture / "reference.npz")
    finally:
        engine.close()
    assert (got - want).abs().max() <= TOLERANCE
