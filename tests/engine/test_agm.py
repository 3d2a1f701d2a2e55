"""Agm on the engine: every position's logits, and generation, as the plain forward has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.runner.loading import open_checkpoint
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.test_huggingface_agm import IDS, forward, make
from tests.engine.small_agm import agm_config, agm_tensors, plain_greedy, plain_logits
from tests.engine.small_models import context_logits, engine_for, generate, load_engine

PROMPTS = ((5, 60, 11, 2, 33), (7,), tuple(range(3, 40)))
TOLERANCE = 2e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"attention_scale": 8**-0.5, "activation": "gelu"},
    "untied": {"tied_embeddings": False, "logits_bias": False},
}


def check(engine: Engine, variant: str) -> None:
    config = agm_config(**VARIANTS[variant])
    tensors = agm_tensors(config)
    for prompt in PROMPTS:
        expected = plain_logits(config, tensors, prompt)
        torch.testing.assert_close(context_logits(engine, prompt), expected, rtol=0, atol=TOLERANCE)
        assert generate(engine, prompt, 9) == plain_greedy(config, tensors, prompt, 9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens(variant: str) -> None:
    config = agm_config(**VARIANTS[variant])
    engine = engine_for(config, agm_tensors(config))
    try:
        check(engine, variant)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (2, 1),
        pytest.param(1, 3, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_several_ranks(tmp_path: Path, tp: int, pp: int) -> None:
    config = agm_config()
    engine = load_engine(tmp_path, config, agm_tensors(config), tp, pp)
    try:
        check(engine, "plain")
    finally:
        engine.close()


def test_an_exported_checkpoint(tmp_path: Path) -> None:
    """From a Hugging Face folder, against the model's own unfused forward pass."""
    state = make(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, 1)
    settings = EngineSettings(folder, model_type="Agm", device="cpu", max_batch_size=2)
    engine = Engine.load(settings)
    try:
        got = context_logits(engine, tuple(IDS[0].tolist()))
    finally:
        engine.close()
    torch.testing.assert_close(got, forward(state, 2.0), rtol=0, atol=TOLERANCE)
    with pytest.raises(
        ConfigError, match="cannot be served as this model_type; got 'GPT'; choices: Agm"
    ):
        open_checkpoint(EngineSettings(folder, model_type="GPT", device="cpu"), verify=False)


def test_int8_weights() -> None:
    config = agm_config()
    tensors = agm_tensors(config)
    engine = engine_for(config, tensors, quantization="int8")
    try:
        got = context_logits(engine, PROMPTS[0])
    finally:
        engine.close()
    expected = plain_logits(config, tensors, PROMPTS[0])
    assert 0 < (got - expected).norm() <= 0.05 * expected.norm()
