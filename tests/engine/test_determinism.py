"""One prompt has one answer: alone, among others, streamed, in a session, on any division."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import wait

import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.session import Session
from launcher_scripts.kernels import reference
from tests.engine.small_models import engine_for, load_engine, random_tensors, small_config
from tests.engine.small_t5 import NEMO, t5_config, t5_tensors

DIVISIONS = [(1, 1), pytest.param((2, 1), marks=pytest.mark.slow), (1, 2)]
MODELS = {
    "gpt": (small_config(end_id=67, position_embedding="alibi"), random_tensors),
    "t5": (t5_config(**NEMO), t5_tensors),
}
METHODS = {
    "greedy": SamplingParameters(),
    "sampled": SamplingParameters(
        top_k=20, top_p=0.9, temperature=1.3, repetition_penalty=1.2, random_seed=5
    ),
}
TURNS = [((3, 4, 5), 6), ((7,), 9), ((8, 9, 10, 11), 4)]


def requests() -> list[GenerateRequest]:
    """Eight rows of other lengths and methods than each other."""
    source = random.Random(0)
    return [
        GenerateRequest(
            tuple(source.randrange(67) for _ in range(source.randrange(1, 20))),
            source.randrange(8, 30),
            METHODS[("greedy", "sampled")[number % 2]],
        )
        for number in range(8)
    ]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    config, tensors = MODELS[request.param]
    return config, tensors(config)


@pytest.fixture(scope="module")
def expected(model):
    """The answers of one rank, each row alone."""
    engine = engine_for(*model)
    answers = [engine.submit(request).result(60).output_ids for request in requests()]
    sessions = [talk(engine, memory) for memory in (90, 9)] if model[0] is MODELS["gpt"][0] else []
    engine.close()
    return answers, sessions


def talk(engine, memory: int) -> list[tuple[int, ...]]:
    session = Session(90, memory)
    turns = [
        engine.submit(GenerateRequest(ids, count), session=session).result(60).output_ids
        for ids, count in TURNS
    ]
    engine.close_session(session)
    return turns


def check_context(engine) -> None:
    """Logits and summed states belong to each other, as the last layer norm says."""
    prompts = [(3, 4, 5, 6), (7,), (60, 2, 9)]
    asked = [
        GenerateRequest(ids, 0, return_context_embeddings=True, return_context_logits=True)
        for ids in prompts
    ]
    answers = [future.result(60) for future in [engine.submit(request) for request in asked]]
    for ids, answer in zip(prompts, answers, strict=True):
        single = [
            engine.submit(GenerateRequest(ids[:count], 2, return_context_embeddings=True))
            for count in range(1, len(ids) + 1)
        ]
        sums = [future.result(60).context_embeddings for future in single]
        torch.testing.assert_close(sums[-1], answer.context_embeddings, atol=1e-4, rtol=1e-4)
        head = engine._loaded.decoder.weights.head
        if head is None or engine.settings.parallelism.tp_size > 1:
            continue
        states = torch.stack([sums[0], *(b - a for a, b in itertools.pairwise(sums))])
        logits = reference.logits(states, head)[:, : engine.config.vocab_size]
        torch.testing.assert_close(logits, answer.context_logits, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("division", DIVISIONS, ids=lambda sizes: "tp{}_pp{}".format(*sizes))
def test_a_prompt_has_one_answer(tmp_path, model, expected, division):
    config, tensors = model
    answers, sessions = expected
    engine = load_engine(tmp_path, config, tensors, *division)
    alone = [engine.submit(request).result(60).output_ids for request in requests()]
    assert alone == answers
    pieces: list[list[tuple[int, ...]]] = [[] for _ in requests()]
    futures = [
        engine.submit(
            request, lambda snapshot, number=number: pieces[number].append(snapshot.output())
        )
        for number, request in enumerate(requests())
    ]
    wait(futures, 60)
    assert [future.result().output_ids for future in futures] == answers
    for ids, streamed in zip(answers, pieces, strict=True):
        assert [output.output_ids for output in streamed] == [
            ids[:count] for count in range(1, len(ids))
        ]
    if config is MODELS["gpt"][0]:
        check_context(engine)
    if sessions:
        assert [talk(engine, memory) for memory in (90, 9)] == sessions
    engine.close()
