"""Prompts and rows that decode in one pass: the tokens of each row alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core import step_budget
from launcher_scripts.engine.core.scheduler import Scheduler
from launcher_scripts.engine.core.step_budget import PromptBudget
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.runner.prompt_batch import Sizes, recorded_tokens
from tests.engine.small_models import EagerGraphs, engine_for, load_engine
from tests.engine.test_growing_rows import same_answers
from tests.engine.test_prefix_cache import text
from tests.engine.test_prefix_sharing import CONFIG, MODELS, TENSORS
from tests.engine.test_prompt_batch import prompts_of
from tests.engine.test_scheduling import answer, row

SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(),
    SamplingParameters(top_k=5, temperature=0.7, random_seed=3),
    SamplingParameters(top_p=0.8, repetition_penalty=1.1, random_seed=8),
)


def requests_of(draw: random.Random, count: int) -> Iterator[GenerateRequest]:
    for _ in range(count):
        yield GenerateRequest(
            text(draw.randrange(1, 90), draw.random()),
            draw.randrange(1, 20),
            draw.choice(SAMPLINGS),
            return_log_probs=draw.random() < 0.3,
            return_context_logits=draw.random() < 0.1,
        )


def check_same(alone: Engine, together: Engine, seed: int, count: int = 10) -> None:
    requests = list(requests_of(random.Random(seed), count))
    wanted = [alone.submit(request) for request in requests]
    for want in wanted:
        want.result(60)
    for _ in same_answers(wanted, [together.submit(request) for request in requests]):
        pass
    alone.close()
    together.close()


@pytest.mark.parametrize(
    "model", ["gpt", pytest.param("rope", marks=pytest.mark.slow), "longrope", "window", "latent"]
)
def test_a_row_gets_its_tokens_beside_prompts(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Prompts are cut, too, so that most of their passes have rows that decode."""
    monkeypatch.setattr(step_budget, "MIN_MIXED_TOKENS", 20)
    alone = engine_for(*MODELS[model], max_batch_size=1)
    check_same(alone, engine_for(*MODELS[model], max_batch_size=6), seed=len(model))


def test_passes_are_filled_up_to_graphs() -> None:
    graphs = EagerGraphs()
    alone = engine_for(CONFIG, TENSORS, max_batch_size=1)
    check_same(
        alone, engine_for(CONFIG, TENSORS, max_batch_size=6, graphs=graphs), seed=2, count=30
    )
    sizes = {sizes for sizes, *_ in prompts_of(graphs.asked)}
    assert {size.decoding for size in sizes} >= {0, 4, 6}
    assert Sizes(58, 2, 1, 6) in sizes


@pytest.mark.parametrize(("tp", "pp"), [pytest.param(2, 1, marks=pytest.mark.slow), (1, 2)])
def test_ranks_get_the_same_tokens(tmp_path: Path, tp: int, pp: int) -> None:
    alone = engine_for(CONFIG, TENSORS, max_batch_size=1)
    check_same(alone, load_engine(tmp_path, CONFIG, TENSORS, tp, pp), seed=4)


def steps_of(decoding: int, prompt: int) -> list[int]:
    """The tokens of a prompt in each step, beside so many rows that decode."""
    recorded = partial(recorded_tokens, max_rows=1024)
    scheduler = Scheduler(
        decoding + 1,
        20_000 + 200 * decoding,
        8192,
        recorded_tokens=recorded,
        inter_token_target=0.05,
    )
    for _ in range(decoding):
        scheduler.add(row(3, 50))
    if decoding:
        scheduler.apply(answer(scheduler.plan()))
    scheduler.add(row(prompt, 5))
    counts = []
    while sum(counts) < prompt:
        plan = scheduler.plan()
        assert len(plan.decode) == decoding
        counts += [part.count for part in plan.prefill]
        unfinished = [part.slot for part in plan.prefill] if sum(counts) < prompt else []
        scheduler.apply(answer(plan, unfinished=unfinished))
    return counts


@pytest.mark.parametrize(
    ("decoding", "prompt", "counts"),
    [
        (0, 9000, [8192, 808]),
        (1, 1100, [511, 589]),
        (20, 32, [32]),
        (200, 900, [768, 132]),
        (512, 1600, [1536, 64]),
    ],
)
def test_a_prompt_leaves_the_rows_that_decode_their_time(
    monkeypatch: pytest.MonkeyPatch, decoding: int, prompt: int, counts: list[int]
) -> None:
    """It begins at once, and before a step was timed no more of it runs in a step than delays the
    others a little, or than a CUDA graph has room for.
    """
    monkeypatch.setattr(PromptBudget, "observe", lambda *_: None)
    assert steps_of(decoding, prompt) == counts


def test_rows_submitted_together_begin_in_one_step() -> None:
    """The first one does not begin alone, with the others' prompts cut to go beside it."""
    engine = engine_for(*MODELS["gpt"], max_batch_size=4)
    requests = [GenerateRequest(text(20 + at, 0.5), 1) for at in range(4)]
    wanted = [engine.submit(request).result(60).output_ids for request in requests]
    before = engine.statistics.steps
    with engine.together():
        futures = [engine.submit(request) for request in requests[:3]]
        other = Thread(target=lambda: engine.submit(requests[3]).result(60))
        other.start()
        other.join(60)  # another thread's row does not wait for the end of this block
        assert not any(future.done() for future in futures)
    assert [future.result(60).output_ids for future in futures] == wanted[:3]
    assert engine.statistics.steps == before + 2
    engine.close()


def test_rows_submitted_together_before_an_error_run() -> None:
    engine = engine_for(*MODELS["gpt"], max_batch_size=4)
    with pytest.raises(KeyError), engine.together():
        future = engine.submit(GenerateRequest(text(20, 0.5), 3))
        raise KeyError
    assert len(future.result(60).output_ids) == 3
    engine.close()
