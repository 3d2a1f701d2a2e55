"""Latent attention: what its cache holds, both of its forms, and the routers it comes with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from launcher_scripts.engine.model.latent_attention import LatentAttention
from launcher_scripts.kernels import reference
from launcher_scripts.kernels.operands import ExpertGroups, Linear, Router
from launcher_scripts.models.adapters import Adapters
from launcher_scripts.models.gpt import GPTConfig
from tests.engine.small_models import LATENT, random_tensors, runner_for, small_config

LORA = Adapters(lora_names=("a", "b"), lora_rank=3, lora_targets=("attention.kv_up",))


def layer_of(config: GPTConfig) -> LatentAttention:
    """The attention of the first layer, with a cache of drawn numbers."""
    _, runner = runner_for(config, random_tensors(config), max_tokens=64)
    (layer,) = runner.decoder.stack.layers[0].of_kind(LatentAttention)
    layer.cache.keys.normal_()
    return layer


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("parts", [Adapters(), LORA], ids=["plain", "lora"])
def test_both_forms_are_one(seed: int, window: int, parts: Adapters) -> None:
    """Rows of several lengths, absorbed together, and expanded one by one."""
    generator = torch.Generator().manual_seed(seed)
    layer = layer_of(small_config(**LATENT, parts=parts, sliding_window=window or None))
    starts = torch.tensor([0, 20, 33])
    lengths = torch.randint(1, 14, (3,), generator=generator)
    query = torch.randn(3, layer.heads.num_heads, layer.heads.head_size, generator=generator)
    adapters = torch.tensor([1, -1, 0]) if parts.lora_names else None
    outside = (lengths - window).clamp(min=0) if window else torch.zeros_like(lengths)
    rows = starts + outside, lengths - outside, int((lengths - outside).max())
    absorbed = layer.attend_rows(query, rows, lengths - 1, adapters)
    for row in range(3):
        own = None if adapters is None else adapters[row : row + 1]
        start, past = int(starts[row]), int(lengths[row]) - 1
        expanded = layer.attend_prompt(query[row : row + 1], start, past, window, own)
        torch.testing.assert_close(absorbed[row : row + 1], expanded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_prompt_may_be_cut_anywhere(cut: int) -> None:
    """Tokens from before are expanded with the new ones."""
    layer = layer_of(small_config(**LATENT))
    query = torch.randn(9, layer.heads.num_heads, layer.heads.head_size)
    whole = layer.attend_prompt(query, 3, 0, 0, None)
    parts = (
        layer.attend_prompt(query[:cut], 3, 0, 0, None),
        layer.attend_prompt(query[cut:], 3, cut, 0, None),
    )
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_a_token_takes_what_the_formula_says(dtype: str, size: int) -> None:
    """Latent vector and turning part, of every layer, whatever the heads."""
    for heads in (2, 8):
        config = small_config(num_layers=3, **{**LATENT, "num_heads": heads, "num_kv_heads": heads})
        _, runner = runner_for(config, random_tensors(config), data_type=dtype, max_tokens=50)
        cache = runner.decoder.cache
        assert cache.token_bytes == 3 * (12 + 4) * size
        assert cache.layers[0].keys.shape == (1, 80, 16)


def test_steps_take_the_fast_path() -> None:
    config = small_config(**LATENT)
    _, runner = runner_for(config, random_tensors(config))
    assert runner.decoder.step is not None


def chosen(scores: list[float], router: Router) -> tuple[list[int], list[float]]:
    """What `route` gives for a token whose logits are these."""
    x = torch.tensor([scores])
    linear = Linear(torch.eye(len(scores)))
    experts, weights = reference.route(x, replace(router, linear=linear))
    return experts[0].tolist(), weights[0].tolist()


ROUTER = Router(Linear(torch.eye(1)), 2, "sigmoid", normalized=False)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_experts_are_those_of_the_best_groups() -> None:
    logits = [3.0, -5.0, 2.0, 1.9, 0.0, 0.1]  # by their best: groups 0, 1, 2; by two: 1, 2, 0
    best = replace(ROUTER, groups=ExpertGroups(3, 1, 1))
    assert chosen(logits, best)[0] == [0, 1]
    pair = replace(ROUTER, groups=ExpertGroups(3, 1, 2))
    assert chosen(logits, pair)[0] == [2, 3]
    two = replace(ROUTER, groups=ExpertGroups(3, 2, 1))
    assert chosen(logits, two)[0] == [0, 2]
    assert chosen(logits, replace(two, groups=ExpertGroups(3, 2, 2), per_token=3))[0] == [2, 3, 5]


def test_a_bias_chooses_groups_and_experts_and_weighs_nothing() -> None:
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    router = replace(ROUTER, groups=ExpertGroups(3, 1, 2), bias=bias, scaling_factor=2.5)
    experts, weights = chosen([3.0, -5.0, 2.0, 1.9, 0.0, 0.1], router)
    assert experts == [5, 4]
    assert weights == pytest.approx([2.5 * sigmoid(0.1), 2.5 * sigmoid(0.0)])


def test_groups_with_negative_choices_are_taken_before_others() -> None:
    """Those outside count as minus infinity: a bias may make every score negative."""
    router = replace(ROUTER, groups=ExpertGroups(2, 1, 1), bias=torch.full((4,), -9.0))
    assert chosen([0.0, 1.0, 2.0, -3.0], router)[0] == [2, 3]
