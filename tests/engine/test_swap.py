"""New weights in a running engine: equal to a fresh start's, on all ranks or on none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher_scripts.engine.swap import WeightSwaps
from tests.engine.small_models import (
    LATENT,
    context_logits,
    load_engine,
    random_tensors,
    small_config,
    write_checkpoint,
)

IDS = (5, 60, 11, 11, 2, 33, 47, 0, 9, 28)
GPT2 = small_config(num_layers=2, end_id=67, max_positions=512)
MODERN = small_config(
    num_layers=2,
    end_id=67,
    position_embedding="rope",
    normalization="rmsnorm",
    activation="silu",
    gated=True,
    attention_bias=False,
    mlp_bias=False,
    tied_embeddings=False,
    num_kv_heads=2,
)


def exports(folder: Path, config, tp: int = 1) -> tuple[Path, Path]:
    """Two exports of the same sizes."""
    return tuple(
        write_checkpoint(folder / name / f"{tp}-gpu", config, random_tensors(config, seed), tp)
        for name, seed in (("first", 0), ("second", 1))
    )


@pytest.mark.parametrize(
    ("config", "tp", "pp", "more"),
    [
        (GPT2, 1, 1, {}),
        (MODERN, 1, 1, {"quantization": "int8"}),
        (small_config(end_id=67, **LATENT), 1, 1, {"data_type": "bf16"}),
        (GPT2, 2, 1, {}),
        (MODERN, 1, 2, {}),
    ],
    ids=["gpt2", "int8", "mla_bf16", "tp2", "pp2"],
)
def test_logits_are_those_of_a_fresh_start(tmp_path: Path, config, tp, pp, more):
    first, second = exports(tmp_path, config, tp)
    fresh = load_engine(tmp_path / "second", config, {}, tp, pp, **more)
    expected = context_logits(fresh, IDS)
    fresh.close()
    engine = load_engine(tmp_path / "first", config, {}, tp, pp, **more)
    before = context_logits(engine, IDS)
    assert not torch.equal(before, expected)
    swaps = WeightSwaps(engine)
    result = swaps.swap(second)
    assert torch.equal(context_logits(engine, IDS), expected)
    assert result.version == swaps.version == 1
    assert result.difference <= result.max_difference
    swaps.swap(first, "mixed")
    assert torch.equal(context_logits(engine, IDS), before)
    engine.close()
