"""A running server as a client sees it: models asked by name, errors meant for the user."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from launcher_scripts.clients.connection import (
    CONNECTIONS,
    SequenceStep,
    Tensors,
    failure_facts,
    is_decoupled,
)
from launcher_scripts.common.errors import LauncherError, ServerError, lookup, problem
from launcher_scripts.config.security import ClientTls


class RemoteServer:
    """One connection to one server. To be used from one thread, and closed."""

    def __init__(
        self,
        address: str,
        *,
        protocol: str = "http",
        request_timeout: float = 600.0,
        timeout_key: str | None = None,
        verbose: bool = False,
        tls: ClientTls | None = None,
    ) -> None:
        """address: host:port of the server's `protocol` (http, grpc); times in seconds.

        timeout_key: what to change where an answer takes longer, for the error.
        tls: for a server whose gRPC speaks TLS.
        """
        self.address = address
        self._request_timeout = request_timeout
        self._timeout_key = timeout_key
        connect = lookup(CONNECTIONS, protocol, "protocol")
        self._connection = connect(address, request_timeout, verbose, tls)
        self._streams: dict[str, bool] = {}

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def is_ready(self, model_name: str) -> bool:
        """Whether the server answers and serves the model. A server that is not there is not."""
        try:
            return self._connection.is_ready(model_name)
        except Exception:  # whatever the transport raises: not ready yet
            return False

    def models(self) -> list[str]:
        """The names of all models that the server serves."""
        with self._failures_of("its list of models"):
            return self._connection.models()

    def model_config(self, model_name: str) -> dict[str, Any]:
        """The model's config.pbtxt, as Triton's JSON."""
        with self._failures_of(f"model {model_name}"):
            return self._connection.model_config(model_name)

    def streams(self, model_name: str) -> bool:
        """Whether the model answers a request with several responses (`decoupled`)."""
        if model_name not in self._streams:
            self._streams[model_name] = is_decoupled(self.model_config(model_name))
        return self._streams[model_name]

    def requests_taken(self, model_name: str) -> int:
        """How many requests the model has taken since the server began."""
        with self._failures_of(f"the statistics of model {model_name}"):
            found = self._connection.statistics(model_name)
        return int(found.get("inference_stats", {}).get("success", {}).get("count", 0))

    def infer(
        self,
        model_name: str,
        tensors: Tensors,
        outputs: Sequence[str] | None = None,
        step: SequenceStep | None = None,
    ) -> Tensors:
        """The outputs of one request (all there are, unless named); of a stream the last.

        Raises ServerError when the server refuses the request or is gone.
        """
        if self.streams(model_name):
            return self.submit(model_name, tensors, outputs, step)()
        with self._failures_of(f"model {model_name}"):
            return self._connection.infer(model_name, tensors, outputs, step)

    def submit(
        self,
        model_name: str,
        tensors: Tensors,
        outputs: Sequence[str] | None = None,
        step: SequenceStep | None = None,
    ) -> Callable[[], Tensors]:
        """Send one request; the result waits for its outputs and raises as infer does."""
        what = f"model {model_name}"
        streams, connection = self.streams(model_name), self._connection
        send = connection.submit_streamed if streams else connection.submit
        with self._failures_of(what):
            answer = send(model_name, tensors, outputs, step)

        def outputs_of_request() -> Tensors:
            with self._failures_of(what):
                return answer()

        return outputs_of_request

    def stream(
        self, model_name: str, tensors: Tensors, step: SequenceStep | None = None
    ) -> Generator[Tensors, None, None]:
        """The responses to one request as they come (gRPC alone); closing cancels the request."""
        with self._failures_of(f"model {model_name}"):
            yield from self._connection.stream(model_name, tensors, step)

    @contextmanager
    def _failures_of(self, what: str) -> Iterator[None]:
        """What the transport raises becomes an error that is meant for the user."""
        try:
            yield
        except LauncherError:
            raise
        except Exception as error:
            raise self._failure(error, what) from error

    def _failure(self, error: Exception, what: str) -> ServerError:
        """What `error`, of whichever transport, means for the user."""
        status, message, refused = failure_facts(error)
        if isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in status:
            return ServerError(
                problem(
                    f"the server at {self.address} gave no answer for {what} "
                    f"within {self._request_timeout:g} s",
                    change=self._timeout_key,
                )
            )
        if refused and "UNAVAILABLE" not in status:
            return ServerError(
                f"the server at {self.address} refused a request to {what}: {message}"
            )
        kind = "" if message else f" {type(error).__name__}"
        return ServerError(f"the server at {self.address} is gone: {message}{kind}")
