"""Replacements of functions that servers before Triton 2.47 (24.06) lack.

A model that does not stream gets response senders since then alone: before, `execute` returns the
responses, so its thread waits for them, and requests run together only as far as Triton hands them
over together. Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any

import triton_python_backend_utils as pb_utils

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
