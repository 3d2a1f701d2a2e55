"""The only door to tritonclient: rows to generate or to score, asked of a running server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.errors import ServerError, lookup, problem
from launcher_scripts.evaluation.tensors import (
    NUMPY_TYPES,
    output_names,
    request_tensors,
    row_outputs,
)
from launcher_scripts.protocol import GenerateOutput, GenerateRequest

MOST_IN_FLIGHT = 256
# Logits outgrow the usual limits, and the server is no one's to reach through a proxy.
GRPC_ARGUMENTS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]

Tensors = dict[str, NDArray[Any]]


class Connection(Protocol):
    """One transport to the server. Its errors are those of the library beneath."""

    def is_ready(self, model_name: str) -> bool: ...

    def model_config(self, model_name: str) -> dict[str, Any]: ...

    def submit(
        self, model_name: str, tensors: Tensors, outputs: Sequence[str]
    ) -> Callable[[], Tensors]:
        """Send one request; the result waits for its answer."""
        ...

    def close(self) -> None: ...


class HttpConnection:
    """Requests over HTTP; many may be in flight at once from the one thread that uses it."""

    def __init__(self, address: str, request_timeout: float) -> None:
        import gevent
        from gevent.pool import Group
        from tritonclient import http

        self._module = http
        self._pending = Group()
        self._client = http.InferenceServerClient(
            address,
            concurrency=MOST_IN_FLIGHT,
            connection_timeout=request_timeout,
            network_timeout=request_timeout,
        )
        # A failed request raises where its answer is awaited; gevent need not print it as well.
        gevent.get_hub().exception_stream = None

    def is_ready(self, model_name: str) -> bool:
        return bool(self._client.is_server_ready() and self._client.is_model_ready(model_name))

    def model_config(self, model_name: str) -> dict[str, Any]:
        return dict(self._client.get_model_config(model_name))

    def submit(
        self, model_name: str, tensors: Tensors, outputs: Sequence[str]
    ) -> Callable[[], Tensors]:
        pending = self._pending.spawn(
            self._client.infer,
            model_name,
            _infer_inputs(self._module, tensors),
            outputs=[self._module.InferRequestedOutput(name) for name in outputs],
        )

        def answer() -> Tensors:
            result = pending.get()
            return {name: result.as_numpy(name) for name in outputs}

        return answer

    def close(self) -> None:
        """Give up what is still in flight, which the client's own close would wait for."""
        self._pending.kill()
        self._client.close()


class GrpcConnection:
    """Requests over gRPC."""

    def __init__(self, address: str, request_timeout: float) -> None:
        from tritonclient import grpc

        self._module = grpc
        self._timeout = request_timeout
        self._client = grpc.InferenceServerClient(address, channel_args=GRPC_ARGUMENTS)

    def is_ready(self, model_name: str) -> bool:
        return bool(
            self._client.is_server_ready(client_timeout=self._timeout)
            and self._client.is_model_ready(model_name, client_timeout=self._timeout)
        )

    def model_config(self, model_name: str) -> dict[str, Any]:
        answer = self._client.get_model_config(
            model_name, as_json=True, client_timeout=self._timeout
        )
        return dict(answer["config"])

    def submit(
        self, model_name: str, tensors: Tensors, outputs: Sequence[str]
    ) -> Callable[[], Tensors]:
        future: Future[Any] = Future()

        def done(result: Any, error: Any) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._client.async_infer(
            model_name,
            _infer_inputs(self._module, tensors),
            callback=done,
            outputs=[self._module.InferRequestedOutput(name) for name in outputs],
            client_timeout=self._timeout,
        )

        def answer() -> Tensors:
            result = future.result()
            return {name: result.as_numpy(name) for name in outputs}

        return answer

    def close(self) -> None:
        self._client.close()


CONNECTIONS: dict[str, Callable[[str, float], Connection]] = {
    "http": HttpConnection,
    "grpc": GrpcConnection,
}


class Client:
    """Asks one model of one server. To be used from one thread, and closed."""

    def __init__(
        self,
        address: str,
        model_name: str,
        *,
        protocol: str = "http",
        request_timeout: float = 600.0,
    ) -> None:
        """address: host:port of the server's `protocol` (http, grpc); times in seconds."""
        self.address = address
        self.model_name = model_name
        self._request_timeout = request_timeout
        self._connection = lookup(CONNECTIONS, protocol, "protocol")(address, request_timeout)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def is_ready(self) -> bool:
        """Whether the server answers and serves the model. A server that is not there is not."""
        try:
            return self._connection.is_ready(self.model_name)
        except Exception:  # whatever the transport raises: not ready yet
            return False

    def max_batch_size(self) -> int:
        """The most rows that the model takes in one request."""
        try:
            return int(self._connection.model_config(self.model_name).get("max_batch_size", 0))
        except Exception as error:
            raise self._failure(error) from error

    def generate(self, rows: Sequence[GenerateRequest]) -> list[GenerateOutput]:
        """The rows' outputs, asked for in one request.

        Raises ServerError when the server refuses the request or is gone, RequestError when the
        rows do not fit into one request.
        """
        return self._submit(rows)()

    def score(
        self, rows: Iterable[Sequence[int]], in_flight: int = 8
    ) -> Iterator[NDArray[np.float32]]:
        """The logits at every position of every row of ids, in order, [len(row), vocab] each.

        Every row is a request of its own, `in_flight` of them at a time, so the server batches
        them and no more than these logits are in memory. Raises ServerError as generate does.
        """
        waiting: deque[Callable[[], list[GenerateOutput]]] = deque()
        for row in rows:
            request = GenerateRequest(tuple(row), output_len=0, return_context_logits=True)
            waiting.append(self._submit([request]))
            if len(waiting) >= min(in_flight, MOST_IN_FLIGHT):
                yield waiting.popleft()()[0].context_logits
        while waiting:
            yield waiting.popleft()()[0].context_logits

    def _submit(self, rows: Sequence[GenerateRequest]) -> Callable[[], list[GenerateOutput]]:
        tensors = request_tensors(rows)
        names = output_names(rows)
        try:
            answer = self._connection.submit(self.model_name, tensors, names)
        except Exception as error:
            raise self._failure(error) from error

        def outputs() -> list[GenerateOutput]:
            try:
                received = answer()
            except Exception as error:
                raise self._failure(error) from error
            return row_outputs(rows, received)

        return outputs

    def _failure(self, error: Exception) -> ServerError:
        """What `error`, of whichever transport, means for the user."""
        from tritonclient.utils import InferenceServerException

        status = message = str(error)
        if isinstance(error, InferenceServerException):
            status, message = str(error.status()), str(error.message())
        if isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in status:
            return ServerError(
                problem(
                    f"the server at {self.address} gave no answer for model {self.model_name} "
                    f"within {self._request_timeout:g} s",
                    change="evaluate.request_timeout",
                )
            )
        if isinstance(error, InferenceServerException) and "UNAVAILABLE" not in status:
            return ServerError(
                f"the server at {self.address} refused a request to model {self.model_name}: "
                f"{message}"
            )
        kind = "" if message else f" {type(error).__name__}"
        return ServerError(f"the server at {self.address} is gone: {message}{kind}")


def _infer_inputs(module: Any, tensors: Tensors) -> list[Any]:
    """The tensors as `module`'s (tritonclient.http or .grpc) inputs."""
    names = {np.dtype(kind): name for name, kind in NUMPY_TYPES.items()}
    inputs = []
    for name, array in tensors.items():
        tensor = module.InferInput(name, list(array.shape), names[array.dtype])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs
