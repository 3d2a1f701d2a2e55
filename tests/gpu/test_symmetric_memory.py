"""Sums through shared memory: right, equal on all ranks, and safe to repeat in a CUDA graph."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest
import torch
from numpy import array_equal
from numpy.linalg import norm

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.communicator import (
    LOOPBACK,
    ProcessGroupCommunicator,
    join_store,
    open_store,
)
from launcher_scripts.engine.model.families import kernels_for
from launcher_scripts.kernels.operands import Linear, Norm

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

SHAPES = [(1, 1), (1, 515), (3, 255), (8, 8192), (64, 2050), (64, 8192), (65, 2048)]
ROUNDS = 50
MAX_ROWS = 64


def part(rank: int, rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(100 * rank + size))


def check_rank(rank: int, tp: int, port: int, results) -> None:
    """Adds `ROUNDS` times, each the sum of the one before, so a race would show."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator = ProcessGroupCommunicator(
        Parallelism(tp), rank, join_store(LOOPBACK, port, 60), device, 60
    )
    communicator.use_peer_memory()
    kernels, sums = kernels_for("cuda"), {}
    for shape in SHAPES:
        source = part(rank, *shape).to(device)
        once = kernels.sum_over_ranks(source.clone(), communicator)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x = source
            for _ in range(ROUNDS):
                x = kernels.sum_over_ranks(x / tp, communicator)
        for _ in range(3):
            graph.replay()
        sums[shape] = (once.cpu().numpy(), x.cpu().numpy())
    torch.cuda.synchronize()
    graph.reset()
    communicator.close()
    results.put((rank, sums))


def accumulate_rank(rank: int, tp: int, port: int, results) -> None:
    """Adds a projection of its part to hidden states again and again, each behind the one before;
    with the ranks' peer buffers and without."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator = ProcessGroupCommunicator(
        Parallelism(tp), rank, join_store(LOOPBACK, port, 60), device, 60
    )
    kernels = kernels_for("cuda")
    hidden, inner = 1030, 515
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(hidden, tp * inner, generator=generator) / 99
    bias = torch.randn(hidden, generator=generator).to(device)
    linear = Linear(weight.chunk(tp, 1)[rank].contiguous().to(device), bias)
    rms_norm = Norm("rmsnorm", torch.randn(hidden, generator=generator).to(device), None, 1e-5)
    first = torch.randn(MAX_ROWS, hidden, generator=generator).to(device)

    def chain(rows, dtype):
        x = kernels.hidden(first[:rows], rms_norm, dtype)
        own = replace(linear, weight=linear.weight.to(dtype))
        for _ in range(ROUNDS):
            part = x.operand[:, rank : rank + inner] / x.operand.norm()  # so that x cannot grow
            x = kernels.accumulate_over_ranks(part, own, x, rms_norm, communicator)
        return x.exact

    def chains():
        return [
            chain(1, torch.float32),
            *(chain(rows, torch.bfloat16) for rows in (1, 3, MAX_ROWS)),
        ]

    values = torch.randn(3, generator=torch.Generator().manual_seed(rank)).to(device)
    ids = torch.arange(3, device=device) + 3 * rank

    def best():
        return kernels.largest_of_ranks(values, ids, communicator)

    def kept(made):
        return [each.cpu().numpy() for each in made]

    found, expected = [kept(chains())], best().tolist()
    communicator.use_peer_memory()
    assert communicator.peer_buffers is not None
    chains(), best()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        tokens, made = best(), chains()
    for _ in range(3):
        graph.replay()
        found.append(kept(made))
        assert tokens.tolist() == expected
    torch.cuda.synchronize()
    graph.reset()
    communicator.close()
    results.put((rank, found))


def of_all_ranks(function, tp: int) -> dict:
    """What every rank puts: function(rank, tp, port, results) in a process per GPU."""
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    context = multiprocessing.get_context("spawn")
    store, results = open_store(LOOPBACK, 60), context.Queue()
    ranks = [
        context.Process(target=function, args=(rank, tp, store.port, results)) for rank in range(tp)
    ]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join()
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_projections_through_peer_buffers(tp):
    found = of_all_ranks(accumulate_rank, tp)
    want, *replayed = found[0]
    for chains in replayed:
        for got, right, error in zip(chains, want, (1e-5, 5e-3, 5e-3, 5e-3), strict=True):
            assert norm(got - right) <= error * norm(right)
    for rank in range(1, tp):
        for mine, theirs in zip(replayed, found[rank][1:], strict=True):
            assert all(map(array_equal, mine, theirs))


@pytest.mark.parametrize("tp", [2, 4])
def test_sums(tp):
    found = of_all_ranks(check_rank, tp)
    for shape in SHAPES:
        want = sum(part(rank, *shape).double() for rank in range(tp))
        for rank in range(tp):
            once, repeated = (torch.from_numpy(array) for array in found[rank][shape])
            torch.testing.assert_close(once.double(), want, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(repeated.double(), want / tp, atol=1e-5, rtol=1e-5)
            assert torch.equal(once, torch.from_numpy(found[0][shape][0]))
