"""What an evaluation asks of one served model: rows to generate or to score."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.connection import MAX_IN_FLIGHT
from launcher_scripts.clients.models import find_models, parameters_of
from launcher_scripts.clients.remote import RemoteServer
from launcher_scripts.common.errors import ConfigError, lookup, problem
from launcher_scripts.common.quantization import kv_cache_dtype_of, quantization_of
from launcher_scripts.common.tokenizer import SpecialIds
from launcher_scripts.config.security import ClientTls
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.served.tensors import (
    States,
    output_names,
    request_tensors,
    row_outputs,
)


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
                each,
                protocol=protocol,
                request_timeout=request_timeout,
                timeout_key="evaluate.request_timeout",
                tls=tls,
            )
            for each in address.split(",")
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
        """Whether every server answers and serves the model. One that is not there does not."""
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
        chosen = self._least_busy()
        self._sent[chosen] += 1
        return row_outputs(rows, self._servers[chosen].infer(self.model_name, tensors, names))

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
        for output in self.generate_each(rows, in_flight):
            yield output.hidden_state

    def generate_each(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        """Every row's output, in order; a request each, `in_flight` of them at a time."""
        return self._each(([row] for row in rows), in_flight)

    @cached_property
    def special_ids(self) -> SpecialIds:
        """Those that the served preprocessing knows of; none without one."""
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
        made = self._first.infer(name, tensors, ("INPUT_ID", "REQUEST_INPUT_LEN"))
        return [int(each) for each in made["INPUT_ID"][0, : int(made["REQUEST_INPUT_LEN"][0, 0])]]

    def precision(self, weight_data_type: str) -> str:
        """The coarsest of the types that the model is stored, computed and cached in.

        weight_data_type: of its files
        """
        said = self.parameters
        computed = said.get("data_type") or "fp32"
        if kv_cache_dtype_of(said.get("kv_cache_dtype"), "{}") == "fp8":
            return "fp8"
        mode = int(said.get("int8_mode") or 0)
        if quantization := quantization_of(mode, said.get("quantization"), "{}"):
            return quantization
        return max(weight_data_type, computed, key=("fp32", "fp16", "bf16").index)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Those of config.pbtxt, as texts, and max_batch_size."""
        config = self._first.model_config(self.model_name)
        return {"max_batch_size": config.get("max_batch_size", 0), **parameters_of(config)}

    @cached_property
    def model_type(self) -> str:
        """As config.pbtxt says it."""
        return str(self.parameters.get("model_type") or "GPT")

    @property
    def streams(self) -> bool:
        """Whether the model answers as tokens come (`decoupled`)."""
        return self._first.streams(self.model_name)

    def requests_taken(self) -> int:
        """How many requests the model has taken since its servers began."""
        return sum(server.requests_taken(self.model_name) for server in self._servers)

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
        chosen = self._least_busy()
        answer = self._servers[chosen].submit(self.model_name, tensors, names)
        self._sent[chosen] += 1
        self._in_flight[chosen] += 1

        def outputs() -> list[GenerateOutput]:
            try:
                return row_outputs(rows, answer())
            finally:
                self._in_flight[chosen] -= 1

        return outputs

    def _least_busy(self) -> int:
        """The server with the fewest requests in flight; those that had less come first."""
        return min(range(len(self._servers)), key=lambda n: (self._in_flight[n], self._sent[n]))
