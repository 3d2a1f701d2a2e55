"""Engines whose ranks are on other nodes; a node is a process that hosts ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.hosts import NodeRank
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.distributed.heartbeat import Heartbeat, RankProgress
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.messages.message import (
    Decoder,
    Failed,
    Message,
    NodeHello,
    OperationRequest,
    RankHello,
    encode,
)
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.ranks import ranks
from launcher_scripts.engine.ranks.links import (
    Link,
    NodeGroup,
    RendezvousFile,
    RendezvousInfo,
    connect,
    find_rendezvous,
    rendezvous_folders,
)
from launcher_scripts.engine.ranks.operations import OperationError
from launcher_scripts.engine.ranks.ranks import WorkerGroup
from launcher_scripts.engine.runner import weight_exchange
from launcher_scripts.engine.runner.loading import RankSetup
from launcher_scripts.engine.runner.operations import RankOperations
from launcher_scripts.engine.swap import WeightSwaps
from tests.engine.small_models import context_logits, engine_for, random_tensors, write_checkpoint
from tests.engine.test_parallel import GPT2, IDS, long_request, wait_until_gone
from tests.processes import wait_for

pytestmark = pytest.mark.started_ranks

HOST = """
import os, sys
from pathlib import Path
from launcher_scripts.engine.ranks import peers
from launcher_scripts.engine.ranks.rank_host import NodeHost
from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.hosts import NodeRank

peers.WORKER = os.environ.get("TEST_WORKER", peers.WORKER)
node, nodes, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
host = NodeHost(NodeRank(node, nodes, "a test", "run-1"), [folder], timeout=30.0)
try:
    host.run(lambda: False, 5.0)
except ServerError as error:
    sys.exit(str(error))
"""


class Node:
    """Another node of an engine, hosting ranks."""

    def __init__(self, folder: Path, node: int, nodes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(node), str(nodes), str(folder / "ranks")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def output(self) -> str:
        return self.process.communicate(timeout=180)[0]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(autouse=True)
def one_thread_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes share this machine's cores, which none of them knows."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def group(tmp_path: Path):
    """Starts an engine over nodes; everything is ended after the test."""
    engines: list[Engine] = []
    nodes: list[Node] = []

    def start(tp: int, pp: int, count: int, **more) -> tuple[Engine, list[Node]]:
        tensors = random_tensors(GPT2)
        folder = tmp_path / f"{tp}-gpu"
        if not folder.exists():
            write_checkpoint(folder, GPT2, tensors, tp)
        nodes.extend(Node(tmp_path, node, count) for node in range(1, count))
        settings = EngineSettings(
            folder, parallelism=Parallelism(tp, pp), device="cpu", max_batch_size=4, **more
        )
        node_rank = NodeRank(0, count, "a test", "run-1")
        engines.append(Engine.load(settings, NodeGroup(node_rank, "tiny", (tmp_path / "ranks",))))
        return engines[-1], nodes

    yield start
    for engine in engines:
        engine.close()
    for node in nodes:
        node.end()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_two_nodes_agree_with_one_rank(group, tmp_path: Path, tp: int, pp: int):
    engine, (node,) = group(tp, pp, 2)
    (published,) = (tmp_path / "ranks").iterdir()
    assert published.stat().st_mode & 0o777 == 0o600
    alone = engine_for(GPT2, random_tensors(GPT2))
    request = GenerateRequest(IDS, 12)
    assert engine.submit(request).result(60) == alone.submit(request).result(60)
    assert [info.rank for info in engine.ranks] == [0, 1]
    assert [what for what, _ in engine.timeline.events][-1] == "all ranks are ready"
    engine.close()
    alone.close()
    output = node.output()
    assert node.process.returncode == 0, output
    assert "hosts ranks [1] of model tiny for rank 0 at" in output
    assert "model tiny is closed" in output
    assert list((tmp_path / "ranks").iterdir()) == []


def test_a_model_that_needs_fewer_nodes_leaves_the_others_idle(group):
    engine, (node,) = group(1, 1, 2)
    assert len(engine.submit(GenerateRequest(IDS, 3)).result(60).output_ids) == 3
    time.sleep(1)
    engine.close()
    assert "hosts ranks [] of model tiny" in node.output()
    assert node.process.returncode == 0


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("rank", signal.SIGKILL),
        ("node", signal.SIGSTOP),
        pytest.param("rank", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("node", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_what_is_lost_on_another_node_is_named(group, who: str, number: int):
    engine, (node,) = group(2, 1, 2)
    rank = engine.ranks[1].pid
    futures = [engine.submit(long_request()) for _ in range(30)]
    futures[0].result(60)
    told: list[str] = []
    engine.on_failure(lambda error: told.append(str(error)))
    os.kill(rank if who == "rank" else node.process.pid, number)
    with pytest.raises(ServerError) as raised:
        futures[-1].result(120)
    reason = str(raised.value)
    wait_for(lambda: told == [reason])
    if who == "rank":
        assert f"rank 1 on node 1 ({engine.ranks[1].host}, pid {rank})" in reason
        assert ("SIGKILL" if number == signal.SIGKILL else "SIGSTOP") in reason
        assert " step " in reason
    else:
        assert f"pid {node.process.pid})" in reason
        assert ", with rank 1" in reason or "rank 1 on node 1" in reason
    engine.close()
    if number == signal.SIGSTOP and who == "node":
        os.kill(node.process.pid, signal.SIGCONT)
    wait_until_gone([rank])


def test_new_weights_are_served_by_the_ranks_of_all_nodes_or_of_none(
    group, tmp_path: Path, monkeypatch
):
    engine, _ = group(2, 1, 2)
    swaps = WeightSwaps(engine)
    folder = tmp_path / "second" / "2-gpu"
    second = write_checkpoint(folder, GPT2, random_tensors(GPT2, 1), 2)
    before = context_logits(engine, IDS)
    path = next(second.glob("*dense_h_to_4h.weight.1.bin"))  # which rank 1 alone reads
    sound = path.read_bytes()
    path.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
    with pytest.raises(OperationError, match=rf"rank 1 on node 1 .*{path.name} is altered"):
        swaps.swap(second)
    assert torch.equal(context_logits(engine, IDS), before)
    path.write_bytes(sound)
    exchange = weight_exchange.exchange
    with monkeypatch.context() as patch:  # rank 0 keeps some tensors, rank 1 exchanges all
        patch.setattr(weight_exchange, "exchange", lambda pairs: exchange(pairs[:-3]))
        with pytest.raises(OperationError, match="the weights before are served again"):
            swaps.swap(second)
    assert torch.equal(context_logits(engine, IDS), before)
    assert swaps.version == 0
    swaps.swap(second)
    expected = engine_for(GPT2, random_tensors(GPT2, 1))
    assert torch.allclose(context_logits(engine, IDS), context_logits(expected, IDS), atol=1e-4)
    expected.close()


@pytest.mark.parametrize("moment", [pytest.param("prepare", marks=pytest.mark.slow), "apply"])
def test_a_rank_of_another_node_that_dies_during_an_exchange_ends_the_server(
    group, tmp_path: Path, monkeypatch, moment: str
):
    engine, _ = group(2, 1, 2)
    folder = tmp_path / "second" / "2-gpu"
    second = write_checkpoint(folder, GPT2, random_tensors(GPT2, 1), 2)
    pid, perform = engine.ranks[1].pid, RankOperations.perform

    def perform_and_kill(operations: RankOperations, request: OperationRequest, *more) -> None:
        if request.action == moment:
            os.kill(pid, signal.SIGKILL)
        perform(operations, request, *more)

    monkeypatch.setattr(RankOperations, "perform", perform_and_kill)
    with pytest.raises(ServerError, match=r"rank 1 on node 1 .*SIGKILL"):
        WeightSwaps(engine).swap(second)
    with pytest.raises(ServerError, match=r"rank 1 on node 1 .*SIGKILL"):
        engine.submit(GenerateRequest(IDS, 3)).result(60)


@pytest.mark.parametrize(
    ("way", "sizes", "what"),
    [
        ("computing", (2, 1), "hangs computing step 20"),
        pytest.param("computing", (1, 2), "hangs computing step 20", marks=pytest.mark.slow),
        pytest.param("exchanging", (2, 1), "hangs in step 20, all_reduce", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_while_its_beat_goes_on(
    group, monkeypatch, way: str, sizes: tuple[int, int], what: str
):
    monkeypatch.setenv("TEST_WORKER", "tests.engine.hanging_worker")
    monkeypatch.setenv("TEST_HANGS_WHILE", way)
    engine, _ = group(*sizes, 2)
    with pytest.raises(ServerError, match=rf"rank 1 on node 1 .* {what}"):
        engine.submit(long_request()).result(120)


@pytest.fixture
def join(tmp_path: Path):
    """A WorkerGroup of three nodes with a rank each, and who comes to it with the token.

    join(hello) -> link; join.workers: the group; join.lost: what it took for a failure
    """
    settings = EngineSettings(tmp_path, parallelism=Parallelism(3), device="cpu", nodes=3)
    folders = (tmp_path / "ranks",)
    group = NodeGroup(NodeRank(0, 3, "a test", "run-1"), "tiny", folders)
    links: list[Link] = []
    lost: list[ServerError] = []

    def come(hello: Message) -> Link:
        (info,) = find_rendezvous(folders, "run-1").values()
        links.append(connect(info.addresses, info.port, bytes.fromhex(info.token), 60))
        links[-1].send(hello)
        return links[-1]

    come.workers = WorkerGroup(settings, group, RankProgress(), lost.append, lambda *_: None)
    come.lost = lost
    yield come
    come.workers.close()
    for link in links:
        link.close()


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [
        (RankHello(0, 1, "n"), "unexpected connection from RankHello(rank=0"),
        (RankHello(3, 1, "n"), "unexpected connection from RankHello(rank=3"),
        (NodeHello(0, 3, 1, "n"), "unexpected connection from NodeHello(node=0, nodes=3"),
        (NodeHello(3, 3, 1, "n"), "unexpected connection from NodeHello(node=3, nodes=3"),
        (NodeHello(1, 2, 1, "n"), "unexpected connection from NodeHello(node=1, nodes=2"),
        (Heartbeat(), "expected a message of type RankHello, NodeHello: "),
    ],
)
def test_an_unexpected_process_is_turned_away(join, hello: Message, refusal: str):
    link = join(hello)
    assert link.receive(Decoder(Failed)).reason.startswith(refusal)
    with pytest.raises(EOFError):
        link.receive(Decoder(Failed))
    assert join.lost == []


def test_a_second_process_for_a_rank_is_turned_away(join):
    first = join(RankHello(1, 1, "n"))
    assert isinstance(first.receive(Decoder(RankSetup)), RankSetup)
    second = join(RankHello(1, 2, "n"))
    assert "unexpected connection" in second.receive(Decoder(Failed)).reason
    assert join.lost == []


def test_a_plan_is_encoded_once_for_all_ranks(join, monkeypatch):
    links = [join(RankHello(rank, rank, "n")) for rank in (1, 2)]
    for link in links:
        link.receive(Decoder(RankSetup))
    encoded: list[Message] = []

    def counted(message: Message) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(ranks, "encode", counted)
    plan = Plan(decode=(0, 3), longest=17)
    join.workers.send(plan)
    assert [link.receive(Decoder(Plan)) for link in links] == [plan, plan]
    assert encoded == [plan]


def test_nobody_joins(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "2-gpu", GPT2, random_tensors(GPT2), 2)
    settings = EngineSettings(folder, parallelism=Parallelism(2), device="cpu", start_timeout=2.0)
    group = NodeGroup(NodeRank(0, 2, "a test", "run-1"), "tiny", (tmp_path / "ranks",))
    with pytest.raises(ServerError, match=r"not within 2 s: never joined: rank 1 on node 1"):
        Engine.load(settings, group)
    assert list((tmp_path / "ranks").iterdir()) == []


def test_rank_0_is_found_where_it_could_write(tmp_path: Path):
    folders = rendezvous_folders({"HOME": str(tmp_path / "home")}, tmp_path / "model")
    (tmp_path / "model").write_text("no folder")
    info = RendezvousInfo("tiny", ("10.0.0.1", "n1"), 4321, "aa", 1)
    file = RendezvousFile(folders, "run-1", info)
    assert list(find_rendezvous(folders, "run-1").values()) == [info]
    assert find_rendezvous(folders, "run-10") == {}
    file.withdraw()
    assert find_rendezvous(folders, "run-1") == {}
    assert not (tmp_path / "home" / ".launcher").exists()
    assert rendezvous_folders({"LAUNCHER_RENDEZVOUS": "/a"}, tmp_path) == (Path("/a"),)


def test_no_folder_takes_the_address(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ServerError, match=r"no folder to tell the other nodes.*LAUNCHER_RENDEZVOUS"
    ):
        RendezvousFile([tmp_path / "file" / "x"], "run-1", RendezvousInfo("tiny", (), 1, "aa"))


def test_a_damaged_or_foreign_file_is_no_invitation(tmp_path: Path):
    (tmp_path / "ranks-run-1-a.json").write_text("{")
    (tmp_path / "ranks-run-1-b.json").write_text(json.dumps({"addresses": [], "extra": 1}))
    assert find_rendezvous([tmp_path], "run-1") == {}
