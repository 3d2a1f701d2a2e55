"""A T5Gemma on the GPU: what the CPU says."""

from __future__ import annotations

import pytest

from tests.engine.small_models import engine_for, generate
from tests.engine.small_t5 import decoder_logits, t5_config
from tests.gpu.test_t5 import SOURCES, calm_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
CONFIG = t5_config(
    hidden_size=64,
    head_size=32,
    ffn_size=96,
    num_kv_heads=2,
    position_embedding="rope",
    max_positions=512,
    rotary_base=10000.0,
    attention_scale=32**-0.5,
    gated=True,
    activation="gelu",
    shared_embeddings=False,
    sandwich_norms=True,
    zero_centered_norm=True,
    embedding_scale=8.0,
    attention_softcap=20.0,
    logits_softcap=30.0,
    sliding_window=16,
    full_attention_layers="1",
)


def test_logits_and_tokens() -> None:
    tensors = calm_tensors(CONFIG)
    answers = []
    for device in ("cpu", "cuda"):
        engine = engine_for(CONFIG, tensors, device=device)
        logits = [decoder_logits(engine, source, SOURCES[1]) for source in SOURCES[:4]]
        answers.append((logits, [generate(engine, source, 24) for source in SOURCES[:4]]))
        engine.close()
    (expected, texts), (found, same) = answers
    assert same == texts
    for wanted, got in zip(expected, found, strict=True):
        assert (got - wanted).abs().max() <= 1e-3
