"""Engines with a prefix cache answer as without it, whatever is found, waited for or given up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import STEPS_AHEAD, Engine
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS
from tests.engine.small_agm import agm_config, agm_tensors
from tests.engine.small_models import (
    LATENT,
    EagerGraphs,
    engine_for,
    load_engine,
    random_tensors,
    small_config,
)
from tests.engine.test_prefix_cache import CONFIG, Ids, text
from tests.engine.test_statistics import values

TENSORS = random_tensors(CONFIG)


def random_requests(draw: random.Random, stems: list[Ids], count: int) -> list[GenerateRequest]:
    """Texts that begin as others, go on where others ended, or stand alone."""
    made = []
    for _ in range(count):
        stem = draw.choice(stems)
        ids = (
            *stem[: draw.choice((len(stem), len(stem), 40))],
            *text(draw.randrange(1, 30), draw.random()),
        )
        sampling = draw.choice(
            (
                SamplingParameters(),
                SamplingParameters(beam_width=3),
                SamplingParameters(top_k=20, temperature=1.5, random_seed=draw.randrange(99)),
                SamplingParameters(repetition_penalty=1.25, no_repeat_ngram_size=2),
            )
        )
        asked = draw.choice(({}, {}, {}, {"num_prompt_log_probs": 1}))
        made.append(
            GenerateRequest(
                ids,
                draw.choice((1, 5, 30)),
                sampling,
                cache_salt=draw.choice((0, 0, 5)),
                return_log_probs=True,
                **asked,
            )
        )
        if draw.random() < 0.5:
            stems.append((*ids, *text(20, draw.random())))
    return made


def check_same(plain: Engine, sharing: Engine, draw: random.Random, rounds: int) -> None:
    """Answers of both; some rows are cancelled, and chats go on with what was answered."""
    chat: Ids = text(30, seed=77)
    stems = [text(draw.choice((20, 70, 150)), seed) for seed in range(4)]
    for _ in range(rounds):
        requests = [*random_requests(draw, stems, 12), GenerateRequest(chat, 12)]
        wanted = [plain.submit(request) for request in requests]
        futures = []
        for request in requests:
            futures.append(sharing.submit(request))
            if draw.random() < 0.3:
                sharing.submit(request).cancel()
            if draw.random() < 0.3:
                futures[-1].result(60)
        for want, got in zip(wanted, futures, strict=True):
            want, got = want.result(60), got.result(60)
            assert [each.output_ids for each in got.hypotheses] == [
                each.output_ids for each in want.hypotheses
            ]
            assert got.output_log_probs == pytest.approx(want.output_log_probs, abs=1e-3)
            if want.prompt_log_probs is not None:
                one, other = (each.prompt_log_probs.log_probs for each in (want, got))
                torch.testing.assert_close(other, one, rtol=0, atol=1e-3)
        chat = (*chat, *got.output_ids, 1, 2, 3)
    assert sharing.cache_tokens_used == 0


def test_an_answer_counts_the_cached_tokens_of_its_prompt() -> None:
    engine = engine_for(CONFIG, TENSORS, max_tokens=2000, enable_prefix_caching=True)
    ids = text(70)
    asked = [(ids, 0), (ids, 0), (ids[:40], 0), (ids, 5), (text(70, seed=1), 0)]
    beams = SamplingParameters(beam_width=2)
    outputs = [
        engine.submit(GenerateRequest(prompt, 3, sampling, cache_salt=salt)).result(60)
        for prompt, salt in asked
        for sampling in (SamplingParameters(), beams)
    ]
    assert [output.num_cached_tokens for output in outputs[::2]] == [0, 64, 32, 0, 0]
    assert outputs[3].num_cached_tokens == 64


def hits(engine: Engine) -> float:
    return values(engine.statistics, names.PREFIX_HITS)[""]


MODERN = small_config(end_id=67, max_positions=400, position_embedding="rope", num_kv_heads=2)
LONG = small_config(
    end_id=67,
    max_positions=400,
    position_embedding="rope",
    rotary_scaling="longrope",
    rotary_original_positions=90,
    rotary_factors="1,1,1,1",
    rotary_long_factors="1,2,3,4",
)
WINDOW = small_config(
    end_id=67,
    max_positions=400,
    position_embedding="rope",
    sliding_window=20,
    full_attention_layers="1",
    rotary_local_base=100.0,
)
OF_LATENT = small_config(end_id=67, max_positions=400, **LATENT)
MODELS = {
    "latent": (OF_LATENT, random_tensors(OF_LATENT)),
    "gpt": (CONFIG, TENSORS),
    "rope": (MODERN, random_tensors(MODERN)),
    "longrope": (LONG, random_tensors(LONG)),
    "window": (WINDOW, random_tensors(WINDOW)),
    "agm": (agm_config(), agm_tensors(agm_config())),
}


@pytest.mark.parametrize(
    ("model", "tokens", "budget"),
    [
        ("gpt", 700, 2048),
        ("gpt", 4000, 50),
        pytest.param("rope", 900, 100, marks=pytest.mark.slow),
        ("longrope", 900, 300),
        ("window", 900, 80),
        ("latent", 900, 90),
        pytest.param("agm", 2000, 64, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_without_the_cache(
    monkeypatch: pytest.MonkeyPatch, model: str, tokens: int, budget: int
) -> None:
    """In caches so small that rows wait and what is kept is given up, and in large ones."""
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", budget)
    plain = engine_for(*MODELS[model])
    sharing = engine_for(*MODELS[model], max_tokens=tokens, enable_prefix_caching=True)
    check_same(plain, sharing, random.Random(tokens), rounds=1)
    assert hits(sharing) > 40
    assert hits(plain) == 0
    plain.close()
    sharing.close()


def test_answers_are_the_same_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where short prompts are graphs, and a step is launched before the last one's tokens come."""
    monkeypatch.setitem(STEPS_AHEAD, "cpu", 1)
    plain = engine_for(CONFIG, TENSORS)
    sharing = engine_for(CONFIG, TENSORS, graphs=EagerGraphs(), enable_prefix_caching=True)
    check_same(plain, sharing, random.Random(1), rounds=1)
    assert hits(sharing) > 50
    plain.close()
    sharing.close()


def test_ranks_copy_alike(tmp_path: Path) -> None:
    plain = engine_for(CONFIG, TENSORS)
    sharing = load_engine(
        tmp_path, CONFIG, TENSORS, 2, 1, max_tokens=900, enable_prefix_caching=True
    )
    check_same(plain, sharing, random.Random(2), rounds=1)
    assert hits(sharing) > 50
    plain.close()
    sharing.close()


def test_sessions_go_on_beside_rows_that_share() -> None:
    """What a session has is its own."""
    plain = engine_for(CONFIG, TENSORS)
    sharing = engine_for(CONFIG, TENSORS, max_tokens=400, enable_prefix_caching=True)
    answers = []
    for engine in (plain, sharing):
        sessions = [Session(120, 120), Session(150, 40)]
        said = []
        for turn in range(3):
            request = GenerateRequest(text(30, turn), 10)
            for session in sessions:
                said.append(engine.submit(request, session=session).result(60).output_ids)
                other = engine.submit(GenerateRequest((*text(30, turn), turn), 10))
                said.append(other.result(60).output_ids)
        for session in sessions:
            engine.close_session(session)
        answers.append(said)
        engine.close()
    assert answers[0] == answers[1]
    assert hits(sharing) == 3 * 16
