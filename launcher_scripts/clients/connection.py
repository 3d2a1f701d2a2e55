"""The door to tritonclient: one transport to a server, with arrays in and arrays out."""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.errors import ConfigError, ServerError, problem
from launcher_scripts.config.security import SERVER_NAME, ClientTls

MAX_IN_FLIGHT = 256
# Logits outgrow the usual limits, and the server is no one's to reach through a proxy.
GRPC_ARGUMENTS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]
# Triton's names of the types that the contract uses
NUMPY_TYPES = {
    "UINT8": np.uint8,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP32": np.float32,
    "FP16": np.float16,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}
BFLOAT16 = "bfloat16"  # BF16's name; numpy has no such type of its own
TRITON_TYPES = {np.dtype(kind).name: name for name, kind in NUMPY_TYPES.items()}
TRITON_TYPES[BFLOAT16] = "BF16"

Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class SequenceStep:
    """A request's position in a stateful sequence; ids are positive."""

    sequence_id: int
    start: bool = False
    end: bool = False


class HttpConnection:
    """Requests over HTTP, which Triton cannot encrypt; many may be in flight at once from the one
    thread that uses it.
    """

    def __init__(
        self, address: str, request_timeout: float, verbose: bool = False, _tls: object = None
    ) -> None:
        import gevent
        from gevent.pool import Group
        from tritonclient import http

        self._module = http
        self._pending = Group()
        self._client = http.InferenceServerClient(
            address,
            verbose=verbose,
            concurrency=MAX_IN_FLIGHT,
            connection_timeout=request_timeout,
            network_timeout=request_timeout,
        )
        # A failed request raises where its answer is awaited; gevent need not print it as well.
        gevent.get_hub().exception_stream = None

    def is_ready(self, model_name: str) -> bool:
        return bool(self._client.is_server_ready() and self._client.is_model_ready(model_name))

    def model_config(self, model_name: str) -> dict[str, Any]:
        return dict(self._client.get_model_config(model_name))

    def models(self) -> list[str]:
        """The names of the models that the server serves."""
        return ready_names(self._client.get_model_repository_index())

    def statistics(self, model_name: str) -> dict[str, Any]:
        """Return Triton's statistics of the model since the server started."""
        return dict(self._client.get_inference_statistics(model_name)["model_stats"][0])

    def submit(
        self,
        model_name: str,
        tensors: Tensors,
        outputs: Sequence[str] | None,
        step: SequenceStep | None = None,
    ) -> Callable[[], Tensors]:
        """Send one request; the result waits for its answer. outputs None: all that there are."""
        request = infer_arguments(self._module, model_name, tensors, outputs, step)
        pending = self._pending.spawn(self._client.infer, **request)

        def answer() -> Tensors:
            result = pending.get()
            matches = result.get_response().get("outputs", [])
            names = outputs or [output["name"] for output in matches]
            return {name: result.as_numpy(name) for name in names}

        return answer

    def infer(self, model_name: str, *request: Any) -> Tensors:
        """The outputs of one request; see submit."""
        return self.submit(model_name, *request)()

    def submit_streamed(self, model_name: str, *_: object) -> Callable[[], Tensors]:
        raise _grpc_only(model_name)

    def stream(self, model_name: str, *_: object) -> Generator[Tensors, None, None]:
        raise _grpc_only(model_name)

    def close(self) -> None:
        """Give up what is still in flight, which the client's own close would wait for."""
        self._pending.kill()
        self._client.close()


class GrpcConnection:
    """Requests over gRPC; one that streams has a client of tritonclient, which has one stream."""

    def __init__(
        self,
        address: str,
        request_timeout: float,
        verbose: bool = False,
        tls: ClientTls | None = None,
    ) -> None:
        from tritonclient import grpc

        self._module = grpc
        self._timeout = request_timeout
        self._connect = partial(
            grpc.InferenceServerClient, verbose=verbose, **channel_arguments(address, tls)
        )
        self._client = self._connect()
        self._idle: list[Any] = []  # clients without a stream
        self._streaming: list[Any] = []

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

    def models(self) -> list[str]:
        answer = self._client.get_model_repository_index(as_json=True, client_timeout=self._timeout)
        return ready_names(answer.get("models", []))

    def statistics(self, model_name: str) -> dict[str, Any]:
        answer = self._client.get_inference_statistics(
            model_name, as_json=True, client_timeout=self._timeout
        )
        return dict(answer["model_stats"][0])

    def submit(
        self,
        model_name: str,
        tensors: Tensors,
        outputs: Sequence[str] | None,
        step: SequenceStep | None = None,
    ) -> Callable[[], Tensors]:
        future: Future[Any] = Future()

        def done(result: Any, error: Any) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        request = infer_arguments(self._module, model_name, tensors, outputs, step)
        self._client.async_infer(**request, callback=done, client_timeout=self._timeout)
        return lambda: received(future.result(), outputs)

    def infer(
        self,
        model_name: str,
        tensors: Tensors,
        outputs: Sequence[str] | None,
        step: SequenceStep | None = None,
    ) -> Tensors:
        """As submit, but the thread waits for the answer, for which no other one is started."""
        request = infer_arguments(self._module, model_name, tensors, outputs, step)
        return received(self._client.infer(**request, client_timeout=self._timeout), outputs)

    def submit_streamed(
        self,
        model_name: str,
        tensors: Tensors,
        outputs: Sequence[str] | None,
        step: SequenceStep | None = None,
    ) -> Callable[[], Tensors]:
        """As submit, of a decoupled model: the result is its last response, the whole answer."""
        responses = self._responses(model_name, tensors, outputs, step)
        next(responses)
        return lambda: deque(responses, maxlen=1).pop()

    def stream(
        self, model_name: str, tensors: Tensors, step: SequenceStep | None = None
    ) -> Generator[Tensors, None, None]:
        """Every response to one request, as it comes; closing the iterator cancels the request."""
        responses = self._responses(model_name, tensors, None, step)
        next(responses)
        return responses

    def _responses(
        self,
        model_name: str,
        tensors: Tensors,
        outputs: Sequence[str] | None,
        step: SequenceStep | None,
    ) -> Generator[Tensors, None, None]:
        """Nothing once the request is sent, then every response.

        The stream is cancelled only while it runs: Triton keeps an ended one's model.
        """
        arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client = self._idle.pop() if self._idle else self._connect()
        self._streaming.append(client)
        final = False
        try:
            client.start_stream(
                callback=lambda result, error: arrived.put((result, error)),
                stream_timeout=self._timeout,
            )
            request = infer_arguments(self._module, model_name, tensors, outputs, step)
            client.async_stream_infer(**request, enable_empty_final_response=True)
            yield {}
            while not final:
                result, error = arrived.get()
                if error is not None:
                    final = True
                    raise error
                response = result.get_response()
                final = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield received(result, outputs)
        finally:
            client.stop_stream(cancel_requests=not final)
            self._streaming.remove(client)
            self._idle.append(client)

    def close(self) -> None:
        """Give up what is still in flight."""
        for client in self._streaming:
            client.stop_stream(cancel_requests=True)
        for client in (self._client, *self._idle, *self._streaming):
            client.close()


# One transport to the server. Its errors are those of the library beneath.
Connection = HttpConnection | GrpcConnection
CONNECTIONS: dict[str, Callable[[str, float, bool, ClientTls | None], Connection]] = {
    "http": HttpConnection,
    "grpc": GrpcConnection,
}


def failure_details(error: Exception) -> tuple[str, str, bool]:
    """(status, message, whether it is the server's own refusal) of a transport's error."""
    from tritonclient.utils import InferenceServerException

    if isinstance(error, InferenceServerException):
        return str(error.status()), str(error.message()), True
    return str(error), str(error), False


def is_decoupled(config: Mapping[str, Any]) -> bool:
    """Return whether a model streams: it answers a request with several responses.

    config: its config.pbtxt, as Triton's JSON
    """
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))


def _grpc_only(model_name: str) -> ServerError:
    return ServerError(
        problem(
            f"model {model_name} streams, which only gRPC can carry",
            got="http",
            choices=("grpc",),
            change="the protocol, and the address to that which ready.json gives for it",
        )
    )


def received(result: Any, outputs: Sequence[str] | None = None) -> Tensors:
    """The arrays of a gRPC answer by name; outputs None: all that it has."""
    names = outputs or [output.name for output in result.get_response().outputs]
    return {name: result.as_numpy(name) for name in names}


def ready_names(index: Sequence[dict[str, Any]]) -> list[str]:
    """The names of the models that serve, of Triton's index of its repository."""
    return sorted({str(entry["name"]) for entry in index if entry.get("state") == "READY"})


def channel_arguments(
    address: str, tls: ClientTls | None, options: Sequence[tuple[str, Any]] = GRPC_ARGUMENTS
) -> dict[str, Any]:
    """Return the arguments of tritonclient.grpc and .grpc.aio for a channel to a server.

    address: host:port, and for a closed server after a # the file of its credentials, as its ready
             file says it: a PEM file of key and certificate, which both sides show and trust
    tls:     for other servers whose gRPC speaks TLS
    Raises ConfigError for credentials that cannot be read.
    """
    url, _, credentials = address.partition("#")
    arguments: dict[str, Any] = {"url": url, "channel_args": list(options)}
    if credentials:
        path = unquote(credentials)
        if not os.access(path, os.R_OK):
            message = "the credentials of the server cannot be read: only its owner may use it"
            raise ConfigError(problem(message, got=path, change="the user, or the address"))
        tls = ClientTls(path, path, path)
        arguments["channel_args"] += [("grpc.ssl_target_name_override", SERVER_NAME)]
    if tls is None:
        return arguments
    return {
        **arguments,
        "ssl": True,
        "root_certificates": tls.ca,
        "private_key": tls.key,
        "certificate_chain": tls.certificate,
    }


def infer_arguments(
    module: Any,
    model_name: str,
    tensors: Mapping[str, Any],
    outputs: Sequence[str] | None,
    step: SequenceStep | None = None,
) -> dict[str, Any]:
    """Return the arguments of `module` for one request: tritonclient.http, .grpc or .grpc.aio.

    outputs: names; None: all that there are
    """
    inputs = []
    for name, array in tensors.items():
        tensor = module.InferInput(name, list(array.shape), TRITON_TYPES[array.dtype.name])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    requested = None if outputs is None else [module.InferRequestedOutput(name) for name in outputs]
    request: dict[str, Any] = {"model_name": model_name, "inputs": inputs, "outputs": requested}
    if step is not None:
        request |= {
            "sequence_id": step.sequence_id,
            "sequence_start": step.start,
            "sequence_end": step.end,
        }
    return request
