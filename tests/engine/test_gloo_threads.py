"""How many threads of gloo a rank keeps, which wake up all the time, also on an idle server."""

from __future__ import annotations

from multiprocessing import Queue
from pathlib import Path

import pytest
import torch

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.communicator import (
    LOOPBACK,
    ProcessGroupCommunicator,
    join_store,
    open_store,
)
from tests.forked_steps import FORKSERVER


def count(parallelism: Parallelism, rank: int, port: int, results: Queue[int]) -> None:
    store = join_store(LOOPBACK, port, 60)
    communicator = ProcessGroupCommunicator(parallelism, rank, store, torch.device("cpu"), 60)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    results.put(names.count("gloo_tcp_loop"))
    communicator.minimum(0)
    communicator.close()


@pytest.mark.parametrize(
    ("parallelism", "groups"),
    [
        pytest.param(Parallelism(2, 1), 2, id="tp", marks=pytest.mark.slow),
        pytest.param(Parallelism(1, 2), 3, id="pp"),
    ],
)
def test_a_rank_is_in_no_group_of_its_own(parallelism: Parallelism, groups: int) -> None:
    """All ranks are one group; the tensor-parallel ones another, the stages two more."""
    store, results = open_store(LOOPBACK, 60), FORKSERVER.Queue()
    ranks = [
        FORKSERVER.Process(target=count, args=(parallelism, rank, store.port, results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    assert [results.get(timeout=120) for _ in ranks] == [groups, groups]
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
