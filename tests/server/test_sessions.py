"""Interactive text generation through a real sequence batcher, ids and text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine
from tests.engine.small_models import engine_for, random_tensors
from tests.server.processes import running
from tests.server.repositories import NO_TEXT, TOKENIZERS, export, text_config
from tests.server.requests import Client, Stream, ids_request, text_rows

pytestmark = pytest.mark.usefixtures("tritonserver")

CONFIG = text_config(max_positions=512)
CACHE_TOKENS = 64 * 512
TURNS = [((5, 6, 7), 4), ((400,), 6), ((9, 8, 7, 6, 5), 3)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """An interactive model as exported, one that streams, and one with the documented `direct`
    strategy and a short patience.
    """
    folder = tmp_path_factory.mktemp("sessions")
    as_exported = {"max_batch_size": 1, "interactive": True}
    settings = export(folder, CONFIG, name="chat", **as_exported)
    export(folder, CONFIG, name="live", decoupled=True, **as_exported)
    direct = export(folder, CONFIG, name="direct", pp=2, tokenizer=NO_TEXT, **as_exported)
    config = Path(direct.triton_model_dir) / "config.pbtxt"
    text, changed = re.subn(r"oldest \{.*\}", "direct { }", config.read_text())
    config.write_text(text.replace("microseconds: 60000000", "microseconds: 1000000"))
    assert changed == 1
    # Triton counts refused requests of sessions as running, and waits for them.
    with running(folder / "job", settings.model_repository, stop_timeout=2.0) as step:
        yield step.wait_until_ready()
        assert step.stop() == 0, step.err
        assert step.survivors() == []


@pytest.fixture(params=["http", "grpc"])
def client(served: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(served, request.param) as client:
        yield client


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = engine_for(CONFIG, random_tensors(CONFIG))
    yield engine
    engine.close()


def step(number: int, first: bool = False, last: bool = False) -> dict[str, Any]:
    return {"sequence_id": number, "sequence_start": first, "sequence_end": last}


def turn(rows: list[tuple[int, ...]], output_len: int, **more: Any) -> dict[str, np.ndarray]:
    """A request's tensors with the sequence batcher's axis in front."""
    return {name: value[None] for name, value in ids_request(rows, output_len, **more).items()}


def texts(engine: Engine, session: Session, turns: Any, **more: Any) -> list[list[int]]:
    """The whole session after every turn, as the engine has it."""
    text: list[int] = []
    found = []
    for ids, count in turns:
        request = GenerateRequest(ids, count, **more)
        answer = engine.submit(request, session=session).result(60)
        if found and not found[-1][1]:
            text.pop()
        text += [*ids, *answer.output_ids]
        found.append((list(text), answer.output_ids[-1] != engine.config.end_id))
    engine.close_session(session)
    return [whole for whole, _ in found]


def answered(answer: dict[str, np.ndarray], row: int = 0) -> list[int]:
    length = int(answer["sequence_length"][0, row, 0])
    return answer["output_ids"][0, row, 0, :length].tolist()


@pytest.mark.parametrize(("model", "memory"), [("chat", 200), ("chat", 6), ("direct", 6)])
def test_a_session_is_one_text(client: Client, engine: Engine, model: str, memory: int) -> None:
    expected = texts(engine, Session(200, memory), TURNS)
    for number, (ids, count) in enumerate(TURNS):
        lengths = {"session_len": 200, "memory_len": memory} if number == 0 else {}
        answer = client.infer(
            model,
            sequence=step(7, number == 0, number == len(TURNS) - 1),
            **turn([ids], count, is_return_log_probs=True, **lengths),
        )
        before = len(expected[number - 1]) if number else 0
        assert answer["output_ids"].shape[:3] == (1, 1, 1)
        assert answered(answer) == expected[number]
        assert answer["response_input_lengths"].shape == (1, 1, 1)
        assert answer["output_log_probs"].shape == (1, 1, 1, count)
        assert before + len(ids) >= int(answer["response_input_lengths"][0, 0, 0]) > 0


def test_sessions_are_served_at_once(served: dict[str, Any], engine: Engine) -> None:
    def talk(number: int) -> list[list[int]]:
        turns = [((number, *ids), count) for ids, count in TURNS]
        with Client(served, "grpc") as client:
            return [
                answered(
                    client.infer(
                        "chat",
                        sequence=step(number, at == 0, at == len(turns) - 1),
                        **turn([ids], count, session_len=200, runtime_top_k=9, random_seed=number),
                    )
                )
                for at, (ids, count) in enumerate(turns)
            ]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(talk, range(20, 28)))
    for number, got in zip(range(20, 28), answers, strict=True):
        turns = [((number, *ids), count) for ids, count in TURNS]
        sampling = SamplingParameters(top_k=9, random_seed=number)
        assert got == texts(engine, Session(200, 200), turns, sampling=sampling)


def test_rows_of_a_session_go_on_together(client: Client, engine: Engine) -> None:
    rows = [[(5, 6), (7,)], [(8,), (9, 10, 11)]]
    answers = [
        client.infer(
            "chat", sequence=step(31, at == 0, at == 1), **turn(prompts, 4, session_len=60)
        )
        for at, prompts in enumerate(rows)
    ]
    for row in range(2):
        expected = texts(engine, Session(60, 60), [(rows[0][row], 4), (rows[1][row], 4)])
        assert [answered(answer, row) for answer in answers] == expected


def test_a_session_may_stream(served: dict[str, Any], engine: Engine) -> None:
    expected = texts(engine, Session(100, 100), TURNS[:2])
    with Stream(served) as stream:
        for number, (ids, count) in enumerate(TURNS[:2]):
            stream.send(
                "live", step(5, number == 0, number == 1), **turn([ids], count, session_len=100)
            )
            responses = [stream.next() for _ in range(count)]
            assert [last for _, last in responses] == [False] * (count - 1) + [True]
            whole = expected[number]
            assert [answered(response) for response, _ in responses] == [
                whole[: len(whole) - count + seen] for seen in range(1, count + 1)
            ]


def test_wrong_requests_of_a_session(served: dict[str, Any], engine: Engine) -> None:
    with Client(served, "grpc") as client:
        with pytest.raises(InferenceServerException, match="START flag"):
            client.infer("chat", sequence=step(41), **turn([(1,)], 2))
        with pytest.raises(InferenceServerException, match="needs session_len"):
            client.infer("chat", sequence=step(42, True), **turn([(1,)], 2))
        with pytest.raises(InferenceServerException, match="Session size too low"):
            client.infer("chat", sequence=step(43, True), **turn([(1,)], 9, session_len=5))
        with pytest.raises(InferenceServerException, match="there is no session 43"):
            client.infer("chat", sequence=step(43), **turn([(1,)], 2))
        with pytest.raises(InferenceServerException, match=r"3 rows need 32784 tokens .* 32768"):
            many = [(1,), (2,), (3,)]
            client.infer("chat", sequence=step(43, True), **turn(many, 2, session_len=10923))
        client.infer("chat", sequence=step(44, True), **turn([(1, 2)], 2, session_len=20))
        for wrong, reason in (
            (turn([(1,), (2,)], 1), "session 44 has 1 rows; got 2"),
            (turn([(1,)], 40), "Session size too low"),
            (turn([(499,)], 1), "outside of the vocabulary"),
        ):
            with pytest.raises(InferenceServerException, match=reason):
                client.infer("chat", sequence=step(44), **wrong)
        answer = client.infer("chat", sequence=step(44, last=True), **turn([(3,)], 2))
        assert answered(answer) == texts(engine, Session(20, 20), [((1, 2), 2), ((3,), 2)])[-1]
        with pytest.raises(InferenceServerException, match="START flag"):
            client.infer("chat", sequence=step(44), **turn([(1,)], 2))


def test_an_idle_session_gives_its_place_back(served: dict[str, Any]) -> None:
    """The first takes all but a few tokens of the cache, so the second must wait for its end."""
    with Client(served, "grpc") as client:
        whole = turn([(1,)], 2, session_len=CACHE_TOKENS - 10)
        client.infer("direct", sequence=step(51, True), **whole)
        client.infer("direct", sequence=step(52, True, True), **whole)
        with pytest.raises(InferenceServerException, match="START flag"):
            client.infer("direct", sequence=step(51), **turn([(1,)], 2))


def test_a_session_of_text(client: Client, engine: Engine) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    said = ["Hello the", " quick", " brown fox"]
    turns = [(tuple(tokenizer.encode(text)), 5) for text in said]
    expected = texts(engine, Session(300, 300), turns)
    before: list[int] = []
    for number, text in enumerate(said):
        lengths = {"session_len": np.array([[[300]]], np.uint32)} if number == 0 else {}
        answer = client.infer(
            "ensemble",
            sequence=step(61, number == 0, number == 2),
            INPUT_0=text_rows(text)[None],
            INPUT_1=np.array([[[5]]], np.uint32),
            is_return_prompt=np.array([[[number == 2]]]),
            **lengths,
        )
        whole = tokenizer.decode(expected[number])
        start = tokenizer.decode([*before, *turns[number][0]])
        got = answer["OUTPUT_0"][0, 0, 0, 0].decode()
        assert got == (whole if number == 2 else whole[len(start) :])
        assert answer["OUTPUT_DELTA"][0, 0, 0, 0].decode() == whole[len(start) :]
        before = expected[number]


def test_a_session_of_text_is_free_for_its_next_request_when_its_client_leaves(
    served: dict[str, Any],
) -> None:
    """A session takes one request at a time, and this one would go on for many seconds."""
    lengths = {"session_len": np.array([[[500]]], np.uint32)}
    asked = {"INPUT_0": text_rows("Hello")[None], "INPUT_1": np.array([[[490]]], np.uint32)}
    leaving = Stream(served)
    leaving.send("live_ensemble", step(71, True), **asked, **lengths)
    leaving.next()
    leaving.cancel()
    with Stream(served) as stream:
        short = {**asked, "INPUT_1": np.array([[[2]]], np.uint32)}
        stream.send("live_ensemble", step(71, True, True), **short, **lengths)
        response, _ = stream.next()
    assert response["OUTPUT_0"].shape == (1, 1, 1, 1)
