"""Sessions: keys and values stay between requests, and a window slides where memory is short."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import wait

import pytest
import torch

from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.row import Snapshot
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.messages.plan import Bounds
from launcher_scripts.engine.model.network import Network
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS
from launcher_scripts.kernels import reference
from launcher_scripts.kernels.operands import LayerCache
from tests.engine.small_models import (
    EagerGraphs,
    engine_for,
    random_tensors,
    runner_for,
    small_config,
)
from tests.engine.small_t5 import GOOGLE, t5_config, t5_tensors

KINDS = {
    "learned": small_config(end_id=67, max_positions=200),
    "rope": small_config(end_id=67, max_positions=200, position_embedding="rope", num_kv_heads=2),
    "alibi": small_config(end_id=67, max_positions=200, position_embedding="alibi"),
}
TURNS = [((3, 4, 5), 6), ((7,), 9), ((8, 9, 10, 11, 12, 13), 4), ((1, 2), 12), ((20, 21, 22), 5)]


@pytest.fixture(scope="module", params=KINDS)
def engine(request):
    loaded = engine_for(KINDS[request.param], random_tensors(KINDS[request.param]))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def learned():
    loaded = engine_for(KINDS["learned"], random_tensors(KINDS["learned"]), max_tokens=400)
    yield loaded
    loaded.close()


def play(
    engine: Engine, session: Session, turns: Sequence[tuple[tuple[int, ...], int]], **more: object
) -> list[GenerateOutput]:
    answers = []
    for ids, count in turns:
        request = GenerateRequest(ids, count, **more)
        answers.append(engine.submit(request, session=session).result(60))
    engine.close_session(session)
    return answers


def test_a_session_goes_on_as_one_long_prompt(engine):
    answers = play(engine, Session(200, 200), TURNS)
    text: tuple[int, ...] = ()
    for (ids, count), answer in zip(TURNS, answers, strict=True):
        text += ids
        assert (
            answer.output_ids == engine.submit(GenerateRequest(text, count)).result(60).output_ids
        )
        text += answer.output_ids


def windowed_next(network: Network, text: Sequence[int], window: int) -> int:
    """The likeliest next token by the plainest forward pass there is, with banded attention."""
    positions = torch.arange(len(text))
    x = network.stack.embed(torch.tensor(text), positions)
    rotary, *_ = network._tables(positions)
    for layer in network.stack.layers:
        (attention,), (mlp,) = layer.branches
        heads, size = attention.heads, attention.heads.head_size
        cache = LayerCache(
            torch.zeros(heads.num_kv_heads, len(text), size),
            torch.zeros(heads.num_kv_heads, len(text), size),
        )
        qkv = reference.project(x, attention.in_proj)
        query = reference.store_kv(qkv, heads, rotary, torch.arange(len(text)), cache)
        key = cache.keys.repeat_interleave(heads.group, 0)
        value = cache.values.repeat_interleave(heads.group, 0)
        distance = torch.arange(len(text)) - torch.arange(len(text))[:, None]
        scores = query.transpose(0, 1) @ key.transpose(1, 2) * size**-0.5
        if attention.scores.slopes is not None:
            scores = scores + attention.scores.slopes[:, None, None] * distance
        scores = scores.masked_fill((distance > 0) | (distance <= -window), float("-inf"))
        out = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(text), -1)
        x = reference.project_add(out, attention.out_proj, x)
        hidden = reference.mlp_up(x, mlp.in_proj, mlp.gate, mlp.activation)
        x = reference.project_add(hidden, mlp.out_proj, x)
    return int(network.logits(x[-1:]).argmax())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [7, 16])
def test_attention_covers_the_last_tokens_only(kind, memory):
    config, tensors = KINDS[kind], random_tensors(KINDS[kind])
    engine = engine_for(config, tensors, max_tokens=2 * memory + 16)
    answers = play(engine, Session(200, memory), TURNS)
    engine.close()
    decoder = runner_for(config, tensors)[1].decoder
    text: list[int] = []
    with torch.inference_mode():
        for (ids, _), answer in zip(TURNS, answers, strict=True):
            text += ids
            for token in answer.output_ids:
                assert windowed_next(decoder, text, memory) == token
                text.append(token)


def test_the_window_matters(learned):
    whole = play(learned, Session(100, 100), TURNS)
    short = play(learned, Session(100, 7), TURNS)
    assert whole[0].output_ids[:4] == short[0].output_ids[:4]
    assert [answer.output_ids for answer in whole] != [answer.output_ids for answer in short]


def test_sessions_run_beside_each_other_and_beside_other_rows(learned):
    expected = {}
    for number in range(3):
        turns = [((number, *ids), count) for ids, count in TURNS]
        expected[number] = play(learned, Session(100, 11), turns)
    got: dict[int, list[GenerateOutput]] = {}

    def run(number: int) -> None:
        turns = [((number, *ids), count) for ids, count in TURNS]
        got[number] = play(learned, Session(100, 11), turns)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    others = [learned.submit(GenerateRequest((5, 6), 40)) for _ in range(2)]
    for thread in threads:
        thread.join(60)
    wait(others, 60)
    assert got == expected


def test_a_window_sends_no_other_row_the_general_way():
    config = KINDS["rope"]
    graphs = EagerGraphs()
    engine = engine_for(config, random_tensors(config), graphs=graphs)
    session, request = Session(200, 8), GenerateRequest((5, 6, 7), 30)
    alone = [
        engine.submit(request).result(60),
        engine.submit(request, session=session).result(60),
    ]
    engine.close_session(session)
    graphs.asked.clear()
    session = Session(200, 8)
    together = [engine.submit(request) for _ in range(3)]
    together.append(engine.submit(request, session=session))
    answers = [future.result(60).output_ids for future in together]
    assert answers == [alone[0].output_ids] * 3 + [alone[1].output_ids]
    assert alone[0].output_ids != alone[1].output_ids
    steps = [key for key in graphs.asked if isinstance(key[1], Bounds)]
    assert {(rows, bounds.general) for rows, bounds, _ in steps} >= {(4, False), (1, True)}
    assert all(rows == 1 for rows, bounds, _ in steps if bounds.general)
    engine.close()


def test_a_long_context_runs_in_pieces(monkeypatch):
    config = KINDS["rope"]
    engine = engine_for(config, random_tensors(config))
    turns = [(tuple(range(20)), 3), (tuple(range(30, 50)), 3)]
    expected = [play(engine, Session(100, memory), turns) for memory in (100, 22)]
    engine.close()
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 6)
    pieces = engine_for(config, random_tensors(config))
    assert [play(pieces, Session(100, memory), turns) for memory in (100, 22)] == expected
    pieces.close()


def test_sampling_in_a_session_is_that_of_the_whole_text(learned):
    sampling = SamplingParameters(
        top_k=20, random_seed=3, repetition_penalty=1.3, min_length=2, temperature=1.2
    )
    answers = play(learned, Session(100, 100), TURNS[:3], sampling=sampling)
    text: tuple[int, ...] = ()
    for (ids, count), answer in zip(TURNS[:3], answers, strict=True):
        text += ids
        alone = learned.submit(GenerateRequest(text, count, sampling)).result(60)
        assert answer.output_ids == alone.output_ids
        text += answer.output_ids


def test_an_end_token_is_no_part_of_the_session(learned):
    first = learned.submit(GenerateRequest((3, 4), 8)).result(60).output_ids
    end = first[3]
    kept = first[: first.index(end)]
    session = Session(100, 100)
    answer = learned.submit(GenerateRequest((3, 4), 8, end_id=end), session=session).result(60)
    assert answer.output_ids == (*kept, end)
    after = learned.submit(GenerateRequest((9,), 3), session=session).result(60)
    alone = learned.submit(GenerateRequest((3, 4, *kept, 9), 3)).result(60)
    assert after.output_ids == alone.output_ids
    learned.close_session(session)


def test_a_request_without_ids_goes_on(learned):
    whole = learned.submit(GenerateRequest((3, 4), 9)).result(60).output_ids
    session = Session(100, 100)
    parts = [
        learned.submit(GenerateRequest(ids, 3), session=session).result(60).output_ids
        for ids in ((3, 4), (), ())
    ]
    assert sum(parts, ()) == whole
    learned.close_session(session)
    ended = Session(100, 100)
    first = learned.submit(GenerateRequest((3, 4), 1, end_id=whole[0]), session=ended).result(60)
    rest = learned.submit(GenerateRequest((), 4), session=ended).result(60)
    assert first.output_ids + rest.output_ids == whole[:5]
    learned.close_session(ended)


def test_a_request_for_no_tokens_is_heard(learned):
    session = Session(100, 100)
    first = learned.submit(GenerateRequest((3, 4, 5), 0), session=session).result(60)
    assert first.output_ids == ()
    after = learned.submit(GenerateRequest((9,), 3), session=session).result(60)
    alone = learned.submit(GenerateRequest((3, 4, 5, 9), 3)).result(60)
    assert after.output_ids == alone.output_ids
    silent = Session(100, 100)
    learned.submit(GenerateRequest((3,), 0), session=silent).result(60)
    with pytest.raises(RequestError, match="no token to go on from"):
        learned.submit(GenerateRequest((), 3), session=silent).result(60)
    for each in (session, silent):
        learned.close_session(each)


@pytest.mark.parametrize("kind", ["rope", "alibi"])
def test_a_windows_context_may_be_cut_anywhere(monkeypatch, kind):
    config = KINDS[kind]
    turns = [(tuple(range(30)), 3), (tuple(range(20, 60)), 4)]
    engine = engine_for(config, random_tensors(config))
    expected = play(engine, Session(150, 41), turns)
    monkeypatch.setattr("launcher_scripts.kernels.reference_attention.QUERIES_AT_ONCE", 7)
    assert play(engine, Session(150, 41), turns) == expected
    engine.close()


def test_a_cancelled_request_leaves_what_it_has_said(learned):
    session = Session(150, 150)
    started = threading.Event()
    seen: list[tuple[int, ...]] = []

    def progress(snapshot: Snapshot) -> None:
        seen.append(snapshot.output().output_ids)
        if len(seen) == 4:
            started.set()

    future = learned.submit(GenerateRequest((3, 4), 100), progress, session)
    assert started.wait(30)
    future.cancel()
    learned.submit(GenerateRequest((1,), 2)).result(60)
    assert not session.busy
    after = learned.submit(GenerateRequest((9,), 3), session=session).result(60)
    alone = learned.submit(GenerateRequest((3, 4, *seen[-1], 9), 3)).result(60)
    assert after.output_ids == alone.output_ids
    learned.close_session(session)


def test_closed_sessions_give_their_place_back():
    config = KINDS["learned"]
    engine = engine_for(config, random_tensors(config), max_tokens=60)
    for _ in range(5):
        session = Session(60, 60)
        engine.submit(GenerateRequest((1, 2), 5), session=session).result(60)
        engine.close_session(session)
    held = Session(40, 40)
    engine.submit(GenerateRequest((1, 2), 5), session=held).result(60)
    waiting = Session(40, 40)
    future = engine.submit(GenerateRequest((1, 2), 5), session=waiting)
    with pytest.raises(TimeoutError):
        future.result(0.2)
    engine.close_session(held)
    assert future.result(60)
    running = engine.submit(GenerateRequest((3,), 20), session=waiting)
    engine.close_session(waiting)
    assert len(running.result(60).output_ids) == 20
    assert len(engine.submit(GenerateRequest((1,), 58)).result(60).output_ids) == 58
    engine.close()


def test_a_session_goes_on_while_another_waits_for_its_end():
    config = KINDS["learned"]
    engine = engine_for(config, random_tensors(config), max_tokens=60)
    held, waiting = Session(40, 40), Session(40, 40)
    engine.submit(GenerateRequest((1, 2), 5), session=held).result(60)
    other = engine.submit(GenerateRequest((1, 2), 5), session=waiting)
    assert len(engine.submit(GenerateRequest((3,), 4), session=held).result(20).output_ids) == 4
    assert not other.done()
    engine.close_session(held)
    assert other.result(60)
    engine.close()


@pytest.mark.parametrize(
    ("session", "request_", "reason"),
    [
        (Session(10, 10), GenerateRequest((1, 2, 3), 8), r"too low \(10\) vs. total output size"),
        (Session(50, 2), GenerateRequest((1, 2, 3), 8), r"too low \(2\) vs. input length \(3\)"),
        (Session(0, 5), GenerateRequest((1,), 1), "at least 1"),
        (Session(900, 900), GenerateRequest((1,), 1), "key/value cache, which holds 400"),
        (Session(900, 100), GenerateRequest((1,), 300), "has 200"),
        (Session(50, 50, busy=True), GenerateRequest((1,), 1), "has not ended"),
        (Session(50, 50, closed=True), GenerateRequest((1,), 1), "has ended"),
        (
            Session(50, 50),
            GenerateRequest((1,), 1, SamplingParameters(beam_width=2)),
            "one beam",
        ),
        (
            Session(50, 50),
            GenerateRequest((1,), 1, soft_prompt=True, prompt_embedding=torch.zeros(1, 32)),
            "prefix_soft_prompt",
        ),
    ],
)
def test_what_a_session_cannot_do_is_said(learned, session, request_, reason):
    with pytest.raises(RequestError, match=reason):
        learned.submit(request_, session=session).result(60)


def test_positions_count_on_through_a_session(learned):
    session = Session(400, 50)
    for _ in range(3):
        learned.submit(GenerateRequest((1,) * 10, 50), session=session).result(60)
    with pytest.raises(RequestError, match="would need 239 positions, and the model has 200"):
        learned.submit(GenerateRequest((1,) * 10, 50), session=session).result(60)
    assert learned.submit(GenerateRequest((1,) * 5, 6), session=session).result(60)
    learned.close_session(session)


def test_an_encoder_decoder_has_no_sessions():
    config = t5_config(**GOOGLE)
    engine = engine_for(config, t5_tensors(config))
    with pytest.raises(RequestError, match="decoder-only"):
        engine.submit(GenerateRequest((1, 2), 2), session=Session(50, 50)).result(60)
    engine.close()
