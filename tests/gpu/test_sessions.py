"""Sessions and streams on CUDA: the tokens of the CPU, also where windows slide under graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine
from tests.engine.small_models import engine_for, random_tensors
from tests.gpu.test_engine import wider

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

KINDS = [
    {},
    {"position_embedding": "rope", "num_kv_heads": 2},
    {"position_embedding": "alibi", "num_kv_heads": 1},
]
TURNS = [(5, 40), (1, 60), (30, 20), (3, 90), (17, 1), (2, 33)]
MEMORIES = (600, 64, 37)


def talk(engine: Engine, memory: int, seed: int) -> list[tuple[int, ...]]:
    """The answers of one session; every other turn is sampled."""
    session = Session(600, memory)
    answers = []
    for number, (size, count) in enumerate(TURNS):
        ids = tuple((seed + 7 * number + 3 * place) % 500 for place in range(size))
        sampling = SamplingParameters(top_k=(0, 5)[number % 2], random_seed=seed)
        request = GenerateRequest(ids, count, sampling)
        answers.append(engine.submit(request, session=session).result(120).output_ids)
    engine.close_session(session)
    return answers


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_sessions_say_what_they_say_on_the_cpu(changes):
    config = wider(**changes)
    tensors = random_tensors(config)
    reference = engine_for(config, tensors)
    expected = [talk(reference, memory, memory) for memory in MEMORIES]
    reference.close()
    engine = engine_for(config, tensors, device="cuda")
    assert [talk(engine, memory, memory) for memory in MEMORIES] == expected
    with ThreadPoolExecutor(6) as pool:
        beside = pool.map(lambda memory: talk(engine, memory, memory), MEMORIES * 2)
        alone = [engine.submit(GenerateRequest((5, 6), 150)) for _ in range(2)]
        assert list(beside) == expected * 2
        assert alone[0].result(120) == alone[1].result(120)
    engine.close()


def test_streams_are_the_answer_token_by_token():
    config = wider()
    engine = engine_for(config, random_tensors(config), device="cuda")
    pieces: list[list[tuple[int, ...]]] = [[] for _ in range(12)]
    futures = [
        engine.submit(
            GenerateRequest((number, 3, 9), 20 + 5 * number),
            lambda snapshot, number=number: pieces[number].append(snapshot.output().output_ids),
        )
        for number in range(12)
    ]
    for streamed, future in zip(pieces, futures, strict=True):
        ids = future.result(120).output_ids
        assert streamed == [ids[:count] for count in range(1, len(ids))]
    engine.close()
