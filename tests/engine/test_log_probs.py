"""Which inputs give the model's own log-probabilities, as docs/tensors.md says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine
from tests.engine.small_models import context_logits, engine_for, random_tensors, run, small_config

CONFIG = small_config(end_id=67)
PROMPT = (5, 60, 11, 11, 2)
COUNT = 12


@pytest.fixture(scope="module")
def engine():
    loaded = engine_for(CONFIG, random_tensors(CONFIG))
    yield loaded
    loaded.close()


def asked(engine: Engine, **sampling: Any) -> GenerateOutput:
    parameters = SamplingParameters(**sampling)
    return run(engine, PROMPT, COUNT, sampling=parameters, return_log_probs=True)


def own(engine: Engine, ids: tuple[int, ...]) -> list[float]:
    """The log-probability that the model's logits give each of the generated tokens."""
    logits = context_logits(engine, (*PROMPT, *ids))[len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(ids)), list(ids)].tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 1e-6},
        {"top_p": 0.9, "random_seed": 3},
        {"top_p": 1.0, "random_seed": 4},
        {"top_k": CONFIG.vocab_size, "random_seed": 5},
        {"beam_width": 3},
    ],
    ids=str,
)
def test_output_log_probs_of_the_whole_vocabulary_are_the_models_own(engine, sampling):
    for beam in asked(engine, **sampling).hypotheses:
        expected = own(engine, beam.output_ids)
        assert beam.output_log_probs == pytest.approx(expected, abs=1e-4)
        assert beam.cum_log_probs == pytest.approx(sum(expected), abs=1e-3)


def test_a_tiny_top_p_gives_the_greedy_tokens(engine):
    assert asked(engine, top_p=1e-6).output_ids == asked(engine).output_ids


@pytest.mark.parametrize("sampling", [{}, {"top_k": 1}, {"top_k": 4, "random_seed": 6}], ids=str)
def test_among_k_tokens_only_the_sums_are_the_models_own(engine, sampling):
    """Of one candidate, the greedy token, the share is all; so the sum's steps are to be taken."""
    answer = asked(engine, **sampling)
    expected = own(engine, answer.output_ids)
    assert answer.cum_log_probs == pytest.approx(sum(expected), abs=1e-3)
    if sampling.get("top_k", 1) == 1:
        assert answer.output_log_probs == (0.0,) * COUNT
    else:
        assert sum(answer.output_log_probs) > answer.cum_log_probs + 1


def test_the_steps_of_a_streams_sums_are_the_models_own(engine):
    sums: list[float] = [0.0]
    request = GenerateRequest(PROMPT, COUNT, return_log_probs=True)
    future = engine.submit(request, lambda snapshot: sums.append(snapshot.output().cum_log_probs))
    answer = future.result(60)
    sums.append(answer.cum_log_probs)
    steps = [after - before for before, after in pairwise(sums)]
    assert steps == pytest.approx(own(engine, answer.output_ids), abs=1e-3)


def test_penalties_and_temperature_are_part_of_them(engine):
    answer = asked(engine, top_p=1e-6, temperature=0.5)
    assert answer.cum_log_probs > sum(own(engine, answer.output_ids)) + 1
