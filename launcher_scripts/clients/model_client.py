"""A served model: found by its ready file, then queried."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.connection import MAX_IN_FLIGHT
from launcher_scripts.clients.contract_tensors import (
    States,
    output_names,
    request_tensors,
    row_outputs,
)
from launcher_scripts.clients.remote import RemoteServer, find_models, parameters_of
from launcher_scripts.common.errors import ConfigError, ServerError, lookup, problem
from launcher_scripts.common.files import STALE_SECONDS, replica_files, seconds_silent
from launcher_scripts.common.quantization import kv_cache_dtype_of, quantization_of
from launcher_scripts.common.tokenizer import SpecialIds
from launcher_scripts.config.options import is_same_path
from launcher_scripts.config.security import ClientTls
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest


class Client:
    """Asks one model of one server, or of its replicas. To be used from one thread, and closed."""

    def __init__(
        self,
        address: str,
        model_name: str,
        *,
        protocol: str = "http",
        request_timeout: float = 600.0,
        tls: ClientTls | None = None,
    ) -> None:
        """address: host:port of the server's `protocol` (http, grpc), or several replicas' with
        commas between them, over which the requests are spread; times in seconds.
        """
        self.address = address
        self.model_name = model_name
        self._servers = [
            RemoteServer(
                item,
                protocol=protocol,
                request_timeout=request_timeout,
                timeout_key="evaluate.request_timeout",
                tls=tls,
            )
            for item in address.split(",")
        ]
        self._first = self._servers[0]  # they serve the same repository
        self._in_flight = [0] * len(self._servers)
        self._sent = [0] * len(self._servers)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def is_ready(self) -> bool:
        """Return whether every server answers and serves the model. One that is not there does
        not."""
        return all(server.is_ready(self.model_name) for server in self._servers)

    def max_batch_size(self) -> int:
        """The most rows that the model takes in one request."""
        return int(self.parameters["max_batch_size"])

    def generate(self, rows: Sequence[GenerateRequest]) -> list[GenerateOutput]:
        """The rows' outputs, asked for in one request.

        Raises ServerError when the server refuses the request or is gone, RequestError when the
        rows do not fit into one request.
        """
        tensors = request_tensors(rows, self.model_type)
        names = output_names(rows, self.model_type)
        server = self._idlest()
        self._sent[server] += 1
        return row_outputs(rows, self._servers[server].infer(self.model_name, tensors, names))

    def score(
        self, rows: Iterable[Sequence[int]], in_flight: int = 8
    ) -> Iterator[NDArray[np.float32]]:
        """The logits at every position of every row of ids, in order, [len(row), vocab] each.

        Every row is a request of its own, `in_flight` of them at a time, so the server batches
        them and no more than these logits are in memory. Raises ServerError as generate does, and
        ConfigError for a model that gives no logits of its prompts.
        """
        if not lookup(CONTRACTS, self.model_type, "model_type").scores_prompts:
            raise ConfigError(
                problem(
                    f"{self.model_name} gives no logits of a prompt: only a decoder-only model can",
                    got=self.model_type,
                    change="evaluate.tasks",
                )
            )
        requests = (
            [GenerateRequest(tuple(row), output_len=0, return_context_logits=True)] for row in rows
        )
        for output in self._each(requests, in_flight):
            yield output.context_logits

    def hidden_states(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[States]:
        """An encoder's states at every position of every row, in order; asked as in score.

        Raises ServerError as generate does, and ConfigError for a model that is not an encoder.
        """
        if not lookup(CONTRACTS, self.model_type, "model_type").encoder_only:
            raise ConfigError(
                problem(
                    f"{self.model_name} gives no hidden states: only an encoder does",
                    got=self.model_type,
                    change="evaluate.tasks, or export.run.model_type=t5-encoder",
                )
            )
        for output in self.generate_rows(rows, in_flight):
            yield output.hidden_state

    def generate_rows(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        """Every row's output, in order; a request each, `in_flight` of them at a time."""
        return self._each(([row] for row in rows), in_flight)

    @cached_property
    def special_ids(self) -> SpecialIds:
        """Special IDs of the served preprocessing; none without one."""
        text = find_models(self._first, self.model_name).text
        if "preprocessing" not in text:
            return SpecialIds()
        return SpecialIds.of(parameters_of(self._first.model_config(text["preprocessing"])))

    def encode(self, text: str) -> list[int] | None:
        """The ids that the served preprocessing makes of a text; None where there is none."""
        name = find_models(self._first, self.model_name).text.get("preprocessing")
        if name is None:
            return None
        tensors = {
            "QUERY": np.array([[text.encode()]], dtype=object),
            "REQUEST_OUTPUT_LEN": np.ones((1, 1), dtype=np.uint32),
        }
        outputs = self._first.infer(name, tensors, ("INPUT_ID", "REQUEST_INPUT_LEN"))
        return [
            int(token_id)
            for token_id in outputs["INPUT_ID"][0, : int(outputs["REQUEST_INPUT_LEN"][0, 0])]
        ]

    def precision(self, weight_data_type: str) -> str:
        """The coarsest of the types that the model is stored, computed and cached in.

        weight_data_type: of its files
        """
        parameters = self.parameters
        computed = parameters.get("data_type") or "fp32"
        if kv_cache_dtype_of(parameters.get("kv_cache_dtype"), "{}") == "fp8":
            return "fp8"
        mode = int(parameters.get("int8_mode") or 0)
        if quantization := quantization_of(mode, parameters.get("quantization"), "{}"):
            return quantization
        return max(weight_data_type, computed, key=("fp32", "fp16", "bf16").index)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Parameters of config.pbtxt, as texts, and max_batch_size."""
        config = self._first.model_config(self.model_name)
        return {"max_batch_size": config.get("max_batch_size", 0), **parameters_of(config)}

    @cached_property
    def model_type(self) -> str:
        """As config.pbtxt says it."""
        return str(self.parameters.get("model_type") or "GPT")

    @property
    def streams(self) -> bool:
        """Return whether the model answers as tokens come (`decoupled`)."""
        return self._first.streams(self.model_name)

    def requests_received(self) -> int:
        """Number of requests that the model has received since its servers started."""
        return sum(server.requests_received(self.model_name) for server in self._servers)

    def _each(
        self, requests: Iterable[list[GenerateRequest]], in_flight: int
    ) -> Iterator[GenerateOutput]:
        waiting: deque[Callable[[], list[GenerateOutput]]] = deque()
        for request in requests:
            waiting.append(self._submit(request))
            if len(waiting) >= min(in_flight, MAX_IN_FLIGHT):
                yield from waiting.popleft()()
        while waiting:
            yield from waiting.popleft()()

    def _submit(self, rows: Sequence[GenerateRequest]) -> Callable[[], list[GenerateOutput]]:
        tensors = request_tensors(rows, self.model_type)
        names = output_names(rows, self.model_type)
        server = self._idlest()
        answer = self._servers[server].submit(self.model_name, tensors, names)
        self._sent[server] += 1
        self._in_flight[server] += 1

        def outputs() -> list[GenerateOutput]:
            try:
                return row_outputs(rows, answer())
            finally:
                self._in_flight[server] -= 1

        return outputs

    def _idlest(self) -> int:
        """The server with the fewest requests in flight; those that had less come first."""
        return min(range(len(self._servers)), key=lambda n: (self._in_flight[n], self._sent[n]))


POLL_SECONDS = 0.2
PROBE_SECONDS = 10.0  # how long a server may take to say that it is ready


def open_client(settings: EvaluateSettings) -> tuple[Client, dict[str, Any]]:
    """A client of the servers that the ready files name, and what the first of them says.

    Waits until every file is there and every server answers that the model is ready, at most
    settings.ready_timeout seconds. With several servers the content has their addresses under
    `replicas`; `protocol` is the client's, which is gRPC for a model that streams wherever the
    servers answer over it. Raises ServerError when that time is over.
    """
    deadline = time.monotonic() + settings.ready_timeout
    while True:
        reason, ready = _read_ready_files(settings)
        if ready is not None:
            with _client(ready, settings, PROBE_SECONDS) as probe:
                answers = probe.is_ready()
            if answers:
                ready = _for_streams(ready, settings)
                return _client(ready, settings, settings.request_timeout), ready
            reason = f"{_addresses(ready)}, which {settings.ready_file} names, does not "
            reason += "answer ready"
        if time.monotonic() >= deadline:
            raise ServerError(
                problem(
                    f"no server was ready within {settings.ready_timeout:g} s: {reason}",
                    change="evaluate.ready_timeout or evaluate.ready_file",
                )
            )
        time.sleep(POLL_SECONDS)


def _for_streams(ready: dict[str, Any], settings: EvaluateSettings) -> dict[str, Any]:
    """`ready`; of a model that streams, what the files say for gRPC where that is answered."""
    with _client(ready, settings, settings.request_timeout) as client:
        if not client.streams:
            return ready
    _, result = _read_ready_files(replace(settings, protocol="grpc"))
    if result is None:
        return ready
    with _client(result, settings, PROBE_SECONDS) as probe:
        return result if probe.is_ready() else ready


def _client(ready: dict[str, Any], settings: EvaluateSettings, request_timeout: float) -> Client:
    return Client(
        _addresses(ready),
        settings.model_name,
        protocol=ready["protocol"],
        request_timeout=request_timeout,
        tls=settings.grpc_tls,
    )


def _addresses(ready: dict[str, Any]) -> str:
    """The address to ask, or those of all replicas with commas between them."""
    return ",".join(ready.get("replicas", [ready[ready["protocol"]]]))


def _read_ready_files(settings: EvaluateSettings) -> tuple[str, dict[str, Any] | None]:
    """Return the first server's data with all addresses; or why there is nothing to use yet."""
    contents = []
    for path in replica_files(Path(settings.ready_file), settings.replicas):
        reason, ready = _read_ready_file(path, settings)
        if ready is None:
            return reason, None
        contents.append(ready)
    if settings.replicas:
        contents[0]["replicas"] = [ready[contents[0]["protocol"]] for ready in contents]
    return "", contents[0]


def _read_ready_file(path: Path, settings: EvaluateSettings) -> tuple[str, dict[str, Any] | None]:
    """The server's ready file with the `protocol` to use, or why there is none to use yet.

    A closed server, whose gateway has keys, speaks gRPC alone.
    """
    try:
        ready = json.loads(path.read_text(encoding="utf-8"))
        ready["protocol"] = "grpc" if "#" in ready.get("grpc", "") else settings.protocol
        if ready["protocol"] not in ready:
            return f"{path} gives no {settings.protocol} address", None
        if settings.model_name not in ready.get("models", [settings.model_name]):
            return f"{path} names models {ready['models']}, not {settings.model_name}", None
        job_folder = settings.server_job_folder
        folder = ready.get("job", {}).get("folder")
        if job_folder is not None and not is_same_path(folder or "", job_folder):
            return f"{path} is of the server of {folder}, not of {job_folder}", None
        age = seconds_silent(ready)
        if age is not None and age > STALE_SECONDS:
            return f"{path} was last renewed {age:.0f} s ago: its server was killed", None
    except FileNotFoundError:
        return f"{path} is not there", None
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}", None
    return "", ready
