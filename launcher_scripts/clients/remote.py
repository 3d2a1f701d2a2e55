"""A running server as a client sees it: its models, and errors meant for the user."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from launcher_scripts.clients.connection import (
    CONNECTIONS,
    SequenceStep,
    Tensors,
    failure_details,
    is_decoupled,
)
from launcher_scripts.common.errors import ConfigError, LauncherError, ServerError, lookup, problem
from launcher_scripts.config.security import ClientTls
from launcher_scripts.models.repository import TEXT_MODELS


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
        """Return whether the server answers and serves the model. A server that is not there is
        not."""
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
        """Return whether the model answers a request with several responses (`decoupled`)."""
        if model_name not in self._streams:
            self._streams[model_name] = is_decoupled(self.model_config(model_name))
        return self._streams[model_name]

    def requests_received(self, model_name: str) -> int:
        """Number of requests that the model has received since the server started."""
        with self._failures_of(f"the statistics of model {model_name}"):
            statistics = self._connection.statistics(model_name)
        return int(statistics.get("inference_stats", {}).get("success", {}).get("count", 0))

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
        message = f"model {model_name}"
        streams, connection = self.streams(model_name), self._connection
        send = connection.submit_streamed if streams else connection.submit
        with self._failures_of(message):
            answer = send(model_name, tensors, outputs, step)

        def outputs_of_request() -> Tensors:
            with self._failures_of(message):
                return answer()

        return outputs_of_request

    def stream(
        self, model_name: str, tensors: Tensors, step: SequenceStep | None = None
    ) -> Generator[Tensors, None, None]:
        """The responses to one request as they come (gRPC alone); closing cancels the request."""
        with self._failures_of(f"model {model_name}"):
            yield from self._connection.stream(model_name, tensors, step)

    @contextmanager
    def _failures_of(self, message: str) -> Iterator[None]:
        """Turn errors of the transport into errors that are meant for the user."""
        try:
            yield
        except LauncherError:
            raise
        except Exception as error:
            raise self._failure(error, message) from error

    def _failure(self, error: Exception, subject: str) -> ServerError:
        """Return the user's error for `error` of any transport."""
        status, message, is_rejected = failure_details(error)
        if isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in status:
            return ServerError(
                problem(
                    f"the server at {self.address} gave no answer for {subject} "
                    f"within {self._request_timeout:g} s",
                    change=self._timeout_key,
                )
            )
        if is_rejected and "UNAVAILABLE" not in status:
            return ServerError(
                f"the server at {self.address} refused a request to {subject}: {message}"
            )
        kind = "" if message else f" {type(error).__name__}"
        return ServerError(f"the server at {self.address} is gone: {message}{kind}")


DEFAULT_MODEL = "fastertransformer"
_OUR_BACKEND = "fastertransformer"


@dataclass(frozen=True)
class ServerModels:
    """One model that generates, and the names of the text models around it (role -> name).

    model_type: what config.pbtxt says of the model
    decoupled:  whether it answers a request with several responses
    sessions:   whether a request goes on where the one before it ended
    """

    name: str
    model_type: str
    decoupled: bool
    sessions: bool
    text: dict[str, str]

    def text_model(self, role: str) -> str:
        """The text model of a role; raises ConfigError where the server has none."""
        if role not in self.text:
            raise ConfigError(
                problem(
                    f"the server has no {role} model for {self.name}",
                    choices=sorted(self.text.values()),
                    change="export.model.tokenizer",
                )
            )
        return self.text[role]


def find_models(server: RemoteServer, requested: str | None) -> ServerModels:
    """The model called `requested`; without a name the tools' usual one, else the only one."""
    served = server.models()
    if requested is not None and requested not in served:
        raise ConfigError(
            problem("the server has no such model", got=requested, choices=served, change="--model")
        )
    name = requested or (DEFAULT_MODEL if DEFAULT_MODEL in served else None)
    configs = {item: server.model_config(item) for item in ([name] if name else served)}
    if name is None:
        candidates = [
            item for item, config in configs.items() if config.get("backend") == _OUR_BACKEND
        ]
        if len(candidates) != 1:
            raise ConfigError(
                problem("which model is meant", choices=candidates or served, change="--model")
            )
        (name,) = candidates
    config = configs[name]
    text = {}
    for role in TEXT_MODELS:
        companions = [item for item in (f"{name}_{role}", role) if item in served]
        text.update({role: companions[0]} if companions else {})
    model_type = parameter(config, "model_type") or "GPT"
    return ServerModels(name, model_type, is_decoupled(config), "sequence_batching" in config, text)


def parameters_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a config.pbtxt as JSON."""
    parameters = config.get("parameters", {})
    return {name: str(value.get("string_value", "")) for name, value in parameters.items()}


def parameter(config: Mapping[str, Any], name: str) -> str | None:
    """A parameter of config.pbtxt; None where it has none of that name."""
    return parameters_of(config).get(name)
