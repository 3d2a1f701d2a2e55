"""float16 models whose hidden states are far from zero: one row and two give float32's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import wait

import numpy as np
import pytest

from launcher_scripts.contract.requests import GenerateRequest
from tests.engine.small_models import engine_for, generate
from tests.gpu.test_steps import gpt, t5

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

PROMPTS = ((3, 41, 7, 19, 23), (60, 2, 33, 11, 48, 5, 9))
LENGTH = 8
CHANNEL, LARGE = 5, 6e4  # float16 ends at 65,504


def in_half(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights for both types."""
    return {name: values.astype(np.float16).astype(np.float32) for name, values in tensors.items()}


def t5_with_a_large_channel():
    """The norms' gains make up for most of what the channel takes from the others."""
    config, tensors, _ = t5()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].copy()  # may be the embeddings
    for name, values in tensors.items():
        if "norm" in name:
            values *= 0.1 * LARGE / np.sqrt(config.hidden_size)
            values[CHANNEL] = 0 if "final" in name else 1.2  # more than float16 holds
        elif name in ("shared.weight", "shared.weight_T") or "embed_tokens" in name:
            table = values if values.shape[1] == config.hidden_size else values.T
            table[:, CHANNEL] = LARGE
    return config, in_half(tensors)


def gpt_with_a_mean():
    config, tensors, _ = gpt()
    tensors["wte"] = tensors["wte"] + 40
    return config, in_half(tensors)


@pytest.mark.parametrize("make", [t5_with_a_large_channel, gpt_with_a_mean])
def test_tokens_equal_those_in_float32(make):
    config, tensors = make()
    exact = engine_for(config, tensors)
    expected = [generate(exact, prompt, LENGTH) for prompt in PROMPTS]
    exact.close()
    engine = engine_for(config, tensors, device="cuda", data_type="fp16")
    assert [generate(engine, prompt, LENGTH) for prompt in PROMPTS] == expected
    futures = [engine.submit(GenerateRequest(prompt, LENGTH)) for prompt in PROMPTS]
    wait(futures)
    assert [list(future.result().output_ids) for future in futures] == expected
    engine.close()
