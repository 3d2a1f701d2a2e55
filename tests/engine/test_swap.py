"""New weights in a running engine: equal to a fresh start's, on all ranks or on none."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    RequestError,
    ServerError,
)
from launcher_scripts.common.files import DigestChain
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.results import StepResult
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.messages.message import ExchangeWeights, OperationRequest
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.ranks.operations import OperationError
from launcher_scripts.engine.runner import weight_exchange
from launcher_scripts.engine.runner.operations import RankOperations
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.engine.swap import WeightSwaps, probe_requests
from tests.engine.small_models import (
    LATENT,
    LLAMA,
    context_logits,
    load_engine,
    random_tensors,
    small_config,
    write_checkpoint,
)
from tests.engine.small_t5 import SOURCE, VARIANTS, t5_config, t5_tensors
from tests.processes import wait_for

IDS = (5, 60, 11, 11, 2, 33, 47, 0, 9, 28)
GPT2 = small_config(num_layers=2, end_id=67, max_positions=512)
MODERN = small_config(num_layers=2, end_id=67, **LLAMA)


def exports(folder: Path, config, tp: int = 1) -> tuple[Path, Path]:
    """Two exports of the same sizes."""
    return tuple(
        write_checkpoint(folder / name / f"{tp}-gpu", config, random_tensors(config, seed), tp)
        for name, seed in (("first", 0), ("second", 1))
    )


@pytest.mark.parametrize(
    ("config", "tp", "pp", "more"),
    [
        (GPT2, 1, 1, {}),
        (MODERN, 1, 1, {"quantization": "int8"}),
        (small_config(end_id=67, **LATENT), 1, 1, {"data_type": "bf16"}),
        (GPT2, 2, 1, {}),
        (MODERN, 1, 2, {}),
    ],
    ids=["gpt2", "int8", "mla_bf16", "tp2", "pp2"],
)
def test_logits_are_those_of_a_fresh_start(tmp_path: Path, config, tp, pp, more):
    first, second = exports(tmp_path, config, tp)
    fresh = load_engine(tmp_path / "second", config, {}, tp, pp, **more)
    expected = context_logits(fresh, IDS)
    fresh.close()
    engine = load_engine(tmp_path / "first", config, {}, tp, pp, **more)
    before = context_logits(engine, IDS)
    assert not torch.equal(before, expected)
    swaps = WeightSwaps(engine)
    result = swaps.swap(second)
    assert torch.equal(context_logits(engine, IDS), expected)
    assert result.version == swaps.version == 1
    assert result.difference <= result.max_difference
    swaps.swap(first, "mixed")
    assert torch.equal(context_logits(engine, IDS), before)
    engine.close()


def test_an_exchange_in_pieces_is_undone_by_another(monkeypatch):
    monkeypatch.setattr(weight_exchange, "CHUNK_BYTES", 10)
    served = [
        torch.arange(7.0),
        torch.arange(12).view(3, 4).bfloat16(),
        torch.arange(12.0).view(3, 4).t(),
        torch.tensor(3.0),
        torch.arange(5, dtype=torch.int8),
    ]
    pairs = [(tensor, tensor + 100) for tensor in served]
    before = [(one.clone(), other.clone()) for one, other in pairs]
    for expected in ([pair[::-1] for pair in before], before):
        weight_exchange.exchange(pairs)
        assert all(
            torch.equal(got, right)
            for pair, rights in zip(pairs, expected, strict=True)
            for got, right in zip(pair, rights, strict=True)
        )


@pytest.mark.parametrize("model_type", ["T5", "T5-Encoder"])
def test_an_encoder_decoder_and_its_encoder(tmp_path: Path, model_type):
    config = t5_config(**VARIANTS["nemo"])
    first, second = (
        write_checkpoint(tmp_path / name / "1-gpu", config, t5_tensors(config, seed), 1)
        for name, seed in (("first", 0), ("second", 1))
    )
    request = GenerateRequest(SOURCE, output_len=0, return_hidden_state=True)
    states = []
    for folder in (first, second):
        engine = load_engine(folder.parent, config, {}, 1, 1, model_type=model_type)
        states.append(engine.submit(request).result(60).hidden_state)
        if folder == first:
            WeightSwaps(engine).swap(second)
            states.append(engine.submit(request).result(60).hidden_state)
        engine.close()
    before, after, expected = states
    assert torch.equal(after, expected)
    assert not torch.equal(before, after)


@pytest.fixture(name="served")
def served_engine(tmp_path: Path) -> Iterator[tuple[Engine, WeightSwaps, Path, Path]]:
    first, second = exports(tmp_path, GPT2)
    engine = load_engine(
        tmp_path / "first", GPT2, {}, 1, 1, max_batch_size=4, enable_prefix_caching=True
    )
    yield engine, WeightSwaps(engine), first, second
    engine.close()


def with_rows(engine: Engine, monkeypatch, count: int, output_len: int) -> list:
    """Futures of rows that begin when all ranks are prepared, before the weights are exchanged."""
    futures, started = [], threading.Event()
    prepare = engine.operations.prepare

    def prepare_then_begin(operation: ExchangeWeights, source: None) -> None:
        prepare(operation, source)
        futures.extend(
            engine.submit(GenerateRequest(IDS[number:], output_len), lambda _: started.set())
            for number in range(count)
        )
        assert started.wait(60)

    monkeypatch.setattr(engine.operations, "prepare", prepare_then_begin)
    return futures


def test_drain_lets_rows_end_with_the_weights_they_began_with(served, monkeypatch):
    engine, swaps, _, second = served
    expected = [
        engine.submit(GenerateRequest(IDS[number:], 60)).result(60).output_ids
        for number in range(6)
    ]
    futures = with_rows(engine, monkeypatch, 6, 60)  # two of them wait
    swaps.swap(second)
    outputs = [future.result(60) for future in futures]
    for ids, output in zip(expected, outputs, strict=True):
        version = output.weights_versions[0]
        assert output.weights_versions == (version, version)
        assert (output.output_ids == ids) == (version == 0)
    assert {output.weights_versions for output in outputs} == {(0, 0), (1, 1)}


def test_mixed_rows_go_on_and_say_so(served, monkeypatch):
    engine, swaps, first, second = served
    futures = with_rows(engine, monkeypatch, 6, 400)
    result = swaps.swap(second, "mixed")
    outputs = [future.result(60) for future in futures]
    assert [len(output.output_ids) for output in outputs] == [400] * 6
    versions = [output.weights_versions for output in outputs]
    assert versions.count((0, 1)) == result.mixed_rows > 0
    assert (0, 0) not in versions
    assert swaps.folder == second
    assert swaps.digests == DigestChain.of(second) != DigestChain.of(first)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_rows_of_several_ranks_go_on(tmp_path: Path, monkeypatch, tp, pp):
    """With stages, steps are in flight when the weights are to be exchanged."""
    first, second = exports(tmp_path, GPT2, tp)
    engine = load_engine(tmp_path / "first", GPT2, {}, tp, pp, max_batch_size=4)
    swaps = WeightSwaps(engine)
    before = context_logits(engine, IDS)
    futures = with_rows(engine, monkeypatch, 6, 150)
    swaps.swap(second, "mixed")
    swaps.swap(first, "drain")
    outputs = [future.result(120) for future in futures]
    assert [len(output.output_ids) for output in outputs] == [150] * 12
    versions = [output.weights_versions for output in outputs]
    assert versions.count((0, 1)) > 0
    assert set(versions) <= {(0, 0), (0, 1), (1, 1), (2, 2)}
    assert torch.equal(context_logits(engine, IDS), before)
    engine.close()


def test_rows_that_are_cancelled_do_not_hold_up_an_exchange(served):
    """It waits for the only row, which leaves without a step."""
    engine, *_ = served
    started, cancelled = threading.Event(), threading.Event()

    def on_token(_) -> None:
        started.set()
        cancelled.wait(60)

    future = engine.submit(GenerateRequest(IDS, 60), on_token)
    assert started.wait(60)
    results: list[str] = []
    exchange = threading.Thread(
        target=lambda: results.append(engine.between_steps(lambda _: "done", drains=True)),
        daemon=True,
    )
    exchange.start()
    wait_for(lambda: engine._inbox.qsize() > 0)
    future.cancel()
    cancelled.set()
    exchange.join(30)
    assert results == ["done"]


def test_rows_that_do_not_end_in_time_keep_the_weights(served, monkeypatch):
    engine, swaps, _, second = served
    before = context_logits(engine, IDS)
    futures = with_rows(engine, monkeypatch, 4, 450)
    with pytest.raises(BusyError, match="rows were still running"):
        swaps.swap(second, "drain", 0.0)
    assert [future.result(60).weights_versions for future in futures] == [(0, 0)] * 4
    assert torch.equal(context_logits(engine, IDS), before)
    assert swaps.version == 0


def test_prefixes_and_sessions_of_the_weights_before_are_dropped(served):
    engine, swaps, _, second = served
    prompt = IDS * 4
    engine.submit(GenerateRequest(prompt, 2)).result(60)
    assert engine.submit(GenerateRequest(prompt, 2)).result(60).num_cached_tokens > 0
    session = Session(session_len=60, memory_len=60)
    engine.submit(GenerateRequest(IDS, 3), session=session).result(60)
    swaps.swap(second)
    assert engine.cache_tokens_used == 0
    assert engine.submit(GenerateRequest(prompt, 2)).result(60).num_cached_tokens == 0
    assert engine.submit(GenerateRequest(prompt, 2)).result(60).num_cached_tokens > 0
    with pytest.raises(RequestError, match="the session has ended"):
        engine.submit(GenerateRequest(IDS[:2], 3), session=session).result(60)


def test_other_sizes_are_refused_by_name_before_anything_is_read(served, tmp_path, monkeypatch):
    _, swaps, _, _ = served
    wider = replace(GPT2, ffn_size=64, norm_eps=1e-3)
    other = write_checkpoint(tmp_path / "other" / "1-gpu", wider, random_tensors(wider), 1)
    monkeypatch.setattr(FTCheckpoint, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ConfigError) as raised:
        swaps.swap(other)
    assert "ffn_size is another one; got 64; choices: 48" in str(raised.value)
    assert "norm_eps" in str(raised.value)
    assert swaps.version == 0


def test_altered_files_are_refused(served):
    engine, swaps, _, second = served
    before = context_logits(engine, IDS)
    path = next(second.glob("*wte*"))
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(OperationError, match=f"{path.name} is altered"):
        swaps.swap(second)
    (second / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no manifest"):
        swaps.swap(second)
    assert torch.equal(context_logits(engine, IDS), before)


def test_passes_of_the_pause_have_run_before(served, monkeypatch):
    """On a GPU the first pass of a kind compiles its kernels, which takes seconds."""
    engine, swaps, first, second = served
    passes: list[tuple[tuple[int, ...], int]] = []
    launch = Runner.launch

    def note(runner: Runner, plan: Plan) -> StepResult:
        if runner is engine._runner:
            passes.append((tuple(part.count for part in plan.prefill), len(plan.decode)))
        return launch(runner, plan)

    monkeypatch.setattr(Runner, "launch", note)
    alone = [((len(request.input_ids),), 0) for request in probe_requests(engine.config)]
    swaps.warm_up()
    assert passes == alone
    swaps.swap(second)
    assert passes == 2 * alone
    swaps.swap(first)
    assert passes == 3 * alone


def test_a_probe_that_disagrees_puts_the_weights_back(served, monkeypatch):
    """As with a rank that has kept a layer of the weights before."""
    engine, swaps, first, second = served
    before = context_logits(engine, IDS)
    futures = with_rows(engine, monkeypatch, 4, 300)
    whole = weight_exchange.exchange
    monkeypatch.setattr(weight_exchange, "exchange", lambda pairs: whole(pairs[:-3]))
    with pytest.raises(OperationError, match="the weights before are served again"):
        swaps.swap(second, "mixed")
    assert [future.result(60).weights_versions for future in futures] == [(0, 0)] * 4
    assert torch.equal(context_logits(engine, IDS), before)
    assert (swaps.version, swaps.folder) == (0, first)


def test_a_second_swap_during_one_is_refused(served):
    engine, swaps, _, second = served
    with engine.operations.exclusive(), pytest.raises(BusyError, match="another operation"):
        swaps.swap(second)
    swaps.swap(second)
    assert swaps.version == 1


def test_too_little_memory_is_said_before(served, monkeypatch):
    _, swaps, _, second = served
    monkeypatch.setattr(weight_exchange, "available_memory", lambda *_: 1000)
    with pytest.raises(ConfigError, match="GB of host memory"):
        swaps.swap(second)


@pytest.mark.started_ranks
@pytest.mark.parametrize("moment", ["prepare", "apply"])
def test_a_rank_that_dies_ends_the_server_with_its_name(tmp_path: Path, monkeypatch, moment):
    """Nobody is answered by a mixture: those that wait get the reason."""
    _, second = exports(tmp_path, GPT2, 2)
    engine = load_engine(tmp_path / "first", GPT2, {}, 2, 1)
    pid = engine.ranks[1].pid
    swaps = WeightSwaps(engine)
    original = RankOperations.perform

    def perform(operations: RankOperations, request: OperationRequest, *more) -> None:
        if request.action == moment:
            os.kill(pid, signal.SIGKILL)
        original(operations, request, *more)

    monkeypatch.setattr(RankOperations, "perform", perform)
    with pytest.raises(ServerError, match=r"rank 1 .*SIGKILL"):
        swaps.swap(second)
    with pytest.raises(ServerError, match=r"rank 1 .*SIGKILL"):
        engine.submit(GenerateRequest(IDS, 3)).result(60)
    engine.close()
