"""Requests of Triton's Python backend: whether their clients are still there, response senders also
in servers before Triton 2.47 (24.06), and parameters that stand for input tensors.

Triton only says that a client has disconnected when it is asked, so a thread asks all the time.
Before 24.06 a model that does not stream gets no response senders: `execute` returns the responses,
so its thread waits for them, and requests run together only as far as Triton hands them over
together. Parameters are what `/generate` has in "parameters", and each of its keys that names no
input. Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from threading import Event
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

POLL_SECONDS = 0.1  # how often each client is asked about, if the thread may rest as it should
POLLS_AT_ONCE = 8


class Watched(Protocol):
    """Somebody's request."""

    def check_client(self) -> None:
        """End the request if its client has gone."""


class ClientWatch:
    """The thread that asks about the clients of the requests that are not answered yet."""

    def __init__(self, interval: float) -> None:
        """interval: how much longer the thread rests than it asks, at least"""
        self._interval = interval
        self._lock = threading.Lock()
        self._open: dict[Watched, None] = {}  # those asked about last come last
        self._some = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="client-watch", daemon=True)
        self._thread.start()

    def watch(self, request: Watched) -> None:
        with self._lock:
            self._open[request] = None
        self._some.set()

    def forget(self, request: Watched) -> None:
        with self._lock:
            self._open.pop(request, None)

    def close(self) -> None:
        self._closed = True
        self._some.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._some.wait()
            if self._closed:
                return
            started = time.monotonic()
            count = self._ask_some()
            spent = time.monotonic() - started
            share = POLL_SECONDS * min(1.0, POLLS_AT_ONCE / max(count, 1))
            time.sleep(max(share - spent, self._interval * spent))

    def _ask_some(self) -> int:
        """Ask about those whose turn it is; returns how many are open, and keeps none."""
        with self._lock:
            some = list(itertools.islice(self._open, POLLS_AT_ONCE))
            for request in some:
                self._open[request] = self._open.pop(request)
            count = len(self._open)
            if not count:
                self._some.clear()
        for request in some:
            request.check_client()
        return count


OLDEST = "2.39 (23.10)"
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def require_new_enough() -> None:
    """Refuse to load in a server that does not say when a client has gone."""
    if not hasattr(pb_utils.InferenceRequest, "is_cancelled"):
        raise pb_utils.TritonModelException(
            f"this Triton server is too old: {OLDEST} is the oldest that can serve this model; "
            "change the container or deploy.server.tritonserver"
        )


class ReturnedResponse:
    """Takes the place of a response sender: keeps the response until `execute` returns it."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._response: Any = None
        self._answered = Event()

    def send(self, response: Any = None, flags: int = 0) -> None:  # noqa: ARG002
        """Keep the response, which is the request's only one."""
        self._response = response or pb_utils.InferenceResponse([])
        self._answered.set()

    def is_cancelled(self) -> bool:
        return bool(self._request.is_cancelled())

    def wait(self) -> Any:
        """The response."""
        self._answered.wait()
        return self._response


def response_sender(request: Any) -> Any:
    """The request's response sender, or what takes its place."""
    try:
        return request.get_response_sender()
    except pb_utils.TritonModelException:
        return ReturnedResponse(request)


def returned(senders: Sequence[Any]) -> list[Any] | None:
    """Return what `execute` returns if there are no response senders: the responses, once
    complete."""
    waiting = [sender for sender in senders if isinstance(sender, ReturnedResponse)]
    return [sender.wait() for sender in waiting] or None


def failure(message: str, code: str) -> Any:
    """An error as a response. code: the name of one of TritonError's"""
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(error=error)


# Triton's own, which `/generate` leaves among them.
TRITONS = ("id", "timeout", "priority", "binary_data_output")
_UNSIGNED_32, _SIGNED_32, _UNSIGNED_64 = (0, 2**32 - 1), (-(2**31), 2**31 - 1), (0, 2**64 - 1)
_RANGES = {"UINT32": _UNSIGNED_32, "INT32": _SIGNED_32, "UINT64": _UNSIGNED_64}
_TYPES = {"BOOL": bool, "STRING": str}
_NUMBERS = "FP32"


class ParameterError(Exception):
    """A parameter that cannot be used; the message is meant for the client."""


def parameter_values(
    parameters: str,
    kinds: Mapping[str, str],
    present: Collection[str],
    others: Collection[str] = (),
) -> dict[str, Any]:
    """The inputs that the parameters stand for, each with the one value for all rows.

    parameters: as Triton hands them on, JSON
    kinds:      input -> its type as config.pbtxt says it, of those that may be a parameter
    present:    inputs that came as tensors
    others:     parameters that stand for no input

    Raises ParameterError for a name that is none of `kinds`, one that is in `present`, or a value
    of another type.
    """
    result = {}
    for name, value in json.loads(parameters or "{}").items():
        if name in TRITONS or name in others:
            continue
        if name not in kinds:
            choices = ", ".join(sorted(kinds))
            raise ParameterError(f"unknown parameter; got {name!r}; choices: {choices}")
        if name in present:
            raise ParameterError(f"{name} came as an input and as a parameter; send one")
        kind = kinds[name].removeprefix("TYPE_")
        if not _fits(value, kind):
            raise ParameterError(f"the parameter {name} takes {kind}; got {value!r}")
        result[name] = value
    return result


def seconds_allowed(request: Any) -> float | None:
    """Seconds that a request's client waits for the response; None for no limit.

    Raises ParameterError.
    """
    microseconds = request.timeout() or json.loads(request.parameters() or "{}").get("timeout", 0)
    if not _fits(microseconds, "UINT64"):
        raise ParameterError(f"the parameter timeout takes microseconds; got {microseconds!r}")
    return microseconds / 1e6 if microseconds else None


def _fits(value: Any, kind: str) -> bool:
    if kind in _TYPES:
        return isinstance(value, _TYPES[kind])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == _NUMBERS:
        return True
    minimum, maximum = _RANGES.get(kind, (1, 0))
    return isinstance(value, int) and minimum <= value <= maximum
