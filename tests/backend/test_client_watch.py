"""The thread that asks whether the clients of open requests are still there."""

from __future__ import annotations

import gc
import importlib
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes import wait_for


class OpenRequest:
    """A request whose client was asked about so many times."""

    def __init__(self) -> None:
        self.asked = 0

    def check_client(self) -> None:
        self.asked += 1


@pytest.fixture
def module(backend: Any) -> Any:  # noqa: ARG001
    return importlib.import_module("launcher_scripts.backends.triton_requests")


@pytest.fixture
def watch(module: Any) -> Iterator[Any]:
    watch = module.ClientWatch(interval=1.0)
    yield watch
    watch.close()


def test_all_are_asked_about_in_turn_until_they_are_forgotten(module: Any, watch: Any) -> None:
    requests = [OpenRequest() for _ in range(2 * module.POLLS_AT_ONCE + 1)]
    for request in requests:
        watch.watch(request)
    wait_for(lambda: min(request.asked for request in requests) > 1)
    counts = [request.asked for request in requests]
    assert max(counts) - min(counts) <= 1
    for request in requests:
        watch.forget(request)
    time.sleep(0.05)  # a turn that has begun
    counts = [request.asked for request in requests]
    time.sleep(0.3)
    assert [request.asked for request in requests] == counts


def test_a_forgotten_request_is_kept_by_nobody(watch: Any) -> None:
    """Its tensors lie in memory that the server wants back."""
    requests = [OpenRequest()]
    watch.watch(requests[0])
    wait_for(lambda: requests[0].asked)
    watch.forget(requests[0])
    gone = weakref.ref(requests.pop())
    gc.collect()
    wait_for(lambda: gone() is None, 10)
