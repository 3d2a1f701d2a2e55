"""Triton's Python-based backend `fastertransformer`: tensors to requests, answers to tensors.

Every row of a request goes to the engine on its own, so rows of different requests and parameters
run together and each request is answered when its own rows have ended.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from launcher_scripts.backends.fastertransformer.conversions import CONVERSIONS, Conversion, Shape
from launcher_scripts.backends.fastertransformer.parameters import engine_settings
from launcher_scripts.backends.fastertransformer.status import DEVICE_VARIABLE, StatusFile
from launcher_scripts.contracts import CONTRACTS
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.prompts import prompt_start_id
from launcher_scripts.engine.weights import DTYPES
from launcher_scripts.errors import LauncherError, RequestError
from launcher_scripts.protocol import GenerateOutput, GenerateRequest, Tensor


class TritonPythonModel:
    """One served model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load on every rank and generate once; the status file says ready after that."""
        self._status = StatusFile.of_server(args["model_name"])
        self._status.write("loading")
        try:
            settings = engine_settings(
                json.loads(args["model_config"]),
                Path(args["model_repository"]),
                args["model_version"],
                os.environ.get(DEVICE_VARIABLE, "auto"),
            )
            self._contract = CONTRACTS[settings.model_type]
            self._conversion = CONVERSIONS[settings.model_type]
            if settings.enable_custom_all_reduce:
                print("enable_custom_all_reduce: ranks sum over NCCL, with the same result")
            self._engine = Engine.load(settings)
            self._engine.warm_up()
        except LauncherError as error:
            self._status.write("failed", reason=str(error))
            raise pb_utils.TritonModelException(str(error)) from error
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._status.write("ready", ranks=self._engine.ranks)
        self._engine.on_failure(
            lambda error: self._status.write("failed", reason=str(error), ranks=self._engine.ranks)
        )

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand every request's rows to the engine; answers follow through response senders."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensors = input_tensors(request, self._contract.inputs)
                rows = self._conversion.to_requests(tensors)
            except RequestError as error:
                send(sender, error_response(error))
                continue
            answer = _Answer(
                self._engine,
                self._conversion,
                rows,
                tensors["input_ids"].shape[1],
                set(request.requested_output_names()),
                sender,
                self._answers,
            )
            answer.start()

    def finalize(self) -> None:
        """End every rank."""
        self._engine.close()
        self._answers.shutdown()


class _Answer:
    """One request on its way: answers once, when all of its rows have ended or one has failed."""

    def __init__(
        self,
        engine: Engine,
        conversion: Conversion,
        rows: Sequence[GenerateRequest],
        width: int,
        wanted: set[str],
        sender: Any,
        answers: ThreadPoolExecutor,
    ) -> None:
        self._engine = engine
        self._conversion = conversion
        self._rows = rows
        self._width = width
        self._wanted = wanted
        self._sender = sender
        self._answers = answers
        self._lock = threading.Lock()
        self._left = len(rows)
        self._futures: list[Future[GenerateOutput]] = []

    def start(self) -> None:
        self._futures = [self._engine.submit(row) for row in self._rows]
        for future in self._futures:
            future.add_done_callback(self._row_ended)

    def _row_ended(self, _: Future[GenerateOutput]) -> None:
        """Leave the engine's thread at once; it has the next step to launch."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._answers.submit(self._send)

    def _send(self) -> None:
        errors = [error for future in self._futures if (error := future.exception())]
        if errors:
            send(self._sender, error_response(errors[0]))
            return
        shape = Shape(
            self._width,
            self._engine.config.end_id,
            DTYPES[self._engine.settings.data_type],
            prompt_start_id(self._engine.config),
        )
        outputs = [future.result() for future in self._futures]
        tensors = self._conversion.to_tensors(self._rows, outputs, shape)
        send(
            self._sender,
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor.from_dlpack(name, torch.utils.dlpack.to_dlpack(tensor))
                    for name, tensor in tensors.items()
                    if name in self._wanted
                ]
            ),
        )


def input_tensors(request: Any, inputs: Sequence[Tensor]) -> dict[str, torch.Tensor]:
    """The contract's tensors of a request, over DLPack: numpy 2 misreads this backend's arrays."""
    found = {}
    for spec in inputs:
        tensor = pb_utils.get_input_tensor_by_name(request, spec.name)
        if tensor is not None:
            found[spec.name] = torch.utils.dlpack.from_dlpack(tensor.to_dlpack())
    return found


def error_response(error: BaseException) -> Any:
    """The request's own error; a wrong request is the client's, anything else the server's."""
    code = (
        pb_utils.TritonError.INVALID_ARG
        if isinstance(error, RequestError)
        else pb_utils.TritonError.INTERNAL
    )
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))


def send(sender: Any, response: Any) -> None:
    """The one response of a request."""
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
