"""Requests of Triton: whether their clients are still there, and servers that are older."""

from __future__ import annotations

import gc
import importlib
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backend.fakes import Request, Response
from tests.backend.test_model import CONFIG, arguments, request
from tests.engine.small_models import engine_for, generate, random_tensors, write_checkpoint
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
    for entry in requests:
        watch.watch(entry)
    wait_for(lambda: min(request.asked for request in requests) > 1)
    counts = [request.asked for request in requests]
    assert max(counts) - min(counts) <= 1
    for entry in requests:
        watch.forget(entry)
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


class OldRequest(Request):
    """A request of a model that does not stream, before 24.06."""

    def get_response_sender(self) -> Any:
        raise RuntimeError(
            "'get_response_sender' function must be called only when the model is using the "
            "decoupled transaction policy."
        )


@pytest.fixture
def model(backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LAUNCHER_STATUS_DIR", str(tmp_path))
    monkeypatch.setenv("LAUNCHER_DEVICE", "cpu")
    write_checkpoint(tmp_path / "tiny" / "1" / "1-gpu", CONFIG, random_tensors(CONFIG), 1)
    model = backend.TritonPythonModel()
    model.initialize(arguments(tmp_path / "tiny"))
    yield model
    model.finalize()


def old(ids: Any, lengths: Any, output_lens: Any) -> OldRequest:
    given = request(ids, lengths, output_lens)
    return OldRequest(given.tensors, given.requested)


def test_responses_are_returned_in_order_where_there_are_no_senders(model: Any) -> None:
    requests = [
        old([[3, 4, 5]], [3], [[9]]),
        old([[6, 7]], [9], [[2]]),
        old([[6, 7], [8, 9]], [2, 2], [[1], [2]]),
    ]
    long, wrong, short = model.execute(requests)
    engine = engine_for(CONFIG, random_tensors(CONFIG))
    wanted = [generate(engine, ids, n) for ids, n in (((3, 4, 5), 9), ((6, 7), 1), ((8, 9), 2))]
    engine.close()
    assert long.tensors["output_ids"].tolist() == [[[3, 4, 5, *wanted[0]]]]
    assert isinstance(wrong, Response) and "input_lengths" in str(wrong.error())
    assert short.tensors["sequence_length"].tolist() == [[3], [4]]
    assert short.tensors["output_ids"][1, 0].tolist() == [8, 9, *wanted[2]]


def test_a_model_that_streams_has_senders_everywhere(model: Any) -> None:
    model._streams = True
    one = request([[3, 4]], [2], [[4]])
    assert model.execute([one]) is None
    assert one.answered.wait(60)
    assert one.answers[-1].tensors["sequence_length"].tolist() == [[6]]


def test_a_server_whose_requests_do_not_say_that_they_are_cancelled_is_refused(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = sys.modules["triton_python_backend_utils"]
    monkeypatch.setattr(utils, "InferenceRequest", type("InferenceRequest", (), {}))
    with pytest.raises(RuntimeError, match=r"too old: 2\.39 \(23\.10\) is the oldest"):
        backend.TritonPythonModel().initialize(arguments(tmp_path / "tiny"))
