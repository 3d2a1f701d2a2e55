"""Triton's Python-based backend `fastertransformer`: tensors to requests, answers to tensors.

Every row of a request goes to the engine on its own, so rows of different requests and parameters
run together and each request is answered when its own rows have ended, or, where config.pbtxt says
decoupled, with every token.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from launcher_scripts.backends.fastertransformer.answer import (
    Answer,
    Answers,
    StreamSender,
    error_response,
    reason_of,
    send_last,
)
from launcher_scripts.backends.fastertransformer.answer_tensors import ANSWER_TENSORS, Shape
from launcher_scripts.backends.fastertransformer.forwarded import (
    Channels,
    ChannelSender,
    forwarded_request,
)
from launcher_scripts.backends.fastertransformer.guidance import Guidance
from launcher_scripts.backends.fastertransformer.guided_rows import GuidedRow, GuidedRows
from launcher_scripts.backends.fastertransformer.model_metrics import ModelMetrics
from launcher_scripts.backends.fastertransformer.operations import ServerOperations, operation_of
from launcher_scripts.backends.fastertransformer.request_tensors import padding, to_requests
from launcher_scripts.backends.fastertransformer.server import (
    DEVICE_VARIABLE,
    MAX_WAITING_VARIABLE,
    StatusFile,
    end_server_later,
    engine_settings,
    host_ranks,
    model_type,
    node_group,
)
from launcher_scripts.backends.fastertransformer.server_watch import ServerWatch
from launcher_scripts.backends.fastertransformer.sessions import Sessions, idle_seconds
from launcher_scripts.backends.fastertransformer.shared_stream import SharedAnswer, SharedStreams
from launcher_scripts.backends.older_servers import require_new_enough, response_sender, returned
from launcher_scripts.backends.text_parameters import (
    ParameterError,
    parameter_values,
    seconds_allowed,
)
from launcher_scripts.common.errors import (
    BusyError,
    LauncherError,
    RequestError,
    ServerError,
    problem,
)
from launcher_scripts.contract.contracts import Contract, served_contract
from launcher_scripts.contract.requests import (
    CLIENT_PARAMETER,
    GenerateOutput,
    GenerateRequest,
    shared_id,
)
from launcher_scripts.engine.core.requests import prompt_start_id, real_ids
from launcher_scripts.engine.core.row import SnapshotCallback
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.model.weight_loader import DTYPES

_TYPES = {
    "BOOL": torch.bool,
    "FP32": torch.float32,
    "INT32": torch.int32,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
}
Kind = Callable[..., Answer]  # of a request's answer


class TritonPythonModel:
    """One served model."""

    _engine: Engine

    def initialize(self, args: dict[str, str]) -> None:
        """Load on every rank and generate once; the status file says ready after that.

        On a node that does not serve: host ranks until the end.
        """
        require_new_enough()
        self._serving = False
        self._watch = ServerWatch()
        self._status = StatusFile(args["model_name"])
        self._status.write("loading")
        config = json.loads(args["model_config"])
        try:
            idle = idle_seconds(config)
            settings = engine_settings(
                config,
                Path(args["model_repository"]),
                args["model_version"],
                os.environ.get(DEVICE_VARIABLE, "auto"),
            )
            served = model_type(config)
            self._contract = served_contract(served, sessions=idle is not None)
            self._to_tensors = ANSWER_TENSORS[served]
            group = node_group(os.environ, args["model_name"], Path(args["model_repository"]))
            if not group.node_rank.serves:
                host_ranks(group, settings)
                return
            self._engine = Engine.load(settings, group)
            self._engine.warm_up()
        except LauncherError as error:
            self._status.write("failed", reason=str(error))
            self._watch.close()
            raise pb_utils.TritonModelException(str(error)) from error
        self._max_waiting_rows = int(os.environ.get(MAX_WAITING_VARIABLE, "512"))
        self._streams = pb_utils.using_decoupled_model_transaction_policy(config)
        self._guidance = Guidance(settings.checkpoint_dir, self._engine.config)
        self._guided = GuidedRows(self._guidance, self._engine.submit, self._engine.together)
        self._sessions = None if idle is None else Sessions(self._engine, idle)
        self._operations = ServerOperations(args["model_name"], self._engine)
        weights = self._operations.weights
        self._metrics = ModelMetrics(args["model_name"], self._engine, weights)
        self._answers = Answers(self._metrics.count_failure)
        self._channels = Channels()
        self._shared = SharedStreams(self._answers)
        self._engine.timeline.note("the first tokens are generated")
        self._status.write("ready", ranks=self._engine.ranks, timeline=self._engine.timeline.events)
        self._engine.on_failure(self._lost)
        self._serving = True

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Hand every request's rows to the engine; answers follow through response senders."""
        senders = [response_sender(request) for request in requests]
        for request, local_sender in zip(requests, senders, strict=True):
            sender = StreamSender(local_sender) if self._streams else local_sender
            kind: Kind = Answer
            try:
                if (operation := operation_of(request)) is not None:
                    self._operations.begin(operation, local_sender)
                    continue
                if self._streams and (shared := shared_id(request.request_id())) is not None:
                    if shared.number is None:
                        self._shared.open(shared.stream, sender)
                        continue
                    kind = partial(SharedAnswer, self._shared.find(shared.stream), shared.number)
                if (forwarded := forwarded_request(request)) is not None:
                    channel = self._channels.to(forwarded.channel)
                    empty = pb_utils.InferenceResponse([])
                    sender = ChannelSender(channel, forwarded, partial(send_last, sender, empty))
                if self._sessions is None:
                    self._begin(request, sender, kind)
                else:
                    self._begin_turn(request, sender, kind, self._sessions)
            except Exception as error:  # the other requests go on
                if not isinstance(error, RequestError | ParameterError):
                    traceback.print_exc()
                self._answers.on_failure(reason_of(error), 1)
                send_last(sender, error_response(error))
            if isinstance(sender, ChannelSender) and self._sessions is None:
                sender.hand_over()
        return returned(senders)

    def _begin(self, request: Any, sender: Any, kind: Kind) -> None:
        inputs = input_tensors(request, self._contract)
        tensors = with_parameters(request, self._contract, inputs)
        rows = to_requests(self._contract, tensors)
        self._check_room(len(rows))
        answer = self._answer(
            request, sender, kind, rows, tensors, answered=rows, padding=padding(tensors, rows)
        )
        self._start(request, answer)

    def _start(self, request: Any, answer: Answer, sessions: Sequence[Session] = ()) -> None:
        guided: list[GuidedRow] = []

        def submit(
            row: GenerateRequest, on_progress: SnapshotCallback | None, session: Session | None
        ) -> Future[GenerateOutput]:
            if row.guided_grammar is None:
                return self._engine.submit(row, on_progress, session)
            guided.append(GuidedRow(row, on_progress, session))
            return guided[-1].future

        with self._engine.together():
            answer.start(submit, sessions)
        if guided:
            self._guided.start(guided, client_of(request))

    def _check_room(self, rows: int) -> None:
        """Refuse a request that would wait behind too many; alone in line it may be any size."""
        waiting = self._engine.rows_waiting + self._guided.num_waiting
        if waiting and waiting + rows > self._max_waiting_rows:
            raise BusyError(
                problem(
                    "too many rows wait for this model; send the request again later",
                    got=f"{waiting} and {rows} of this request",
                    choices=(f"at most {self._max_waiting_rows}",),
                    change="deploy.server.max_waiting_rows",
                )
            )

    def _begin_turn(self, request: Any, sender: Any, kind: Kind, sessions: Sessions) -> None:
        """A request of a session: its tensors have an axis of one in front of its rows."""
        key = request.correlation_id()
        end = bool(control(request, "END"))
        inputs = input_tensors(request, self._contract)
        inner = {name: tensor[0] for name, tensor in inputs.items()}
        tensors = with_parameters(request, self._contract, inner)
        rows = to_requests(self._contract, tensors)
        turn = sessions.begin_turn(
            key, start=bool(control(request, "START")), tensors=tensors, rows=rows
        )
        answer = self._answer(
            request,
            sender,
            kind,
            rows,
            tensors,
            answered=turn.shown,
            on_end=lambda: sessions.end_turn(key, turn, end=end),
        )
        self._start(request, answer, turn.sessions)

    def _answer(
        self,
        request: Any,
        sender: Any,
        kind: Kind,
        rows: Sequence[GenerateRequest],
        tensors: Mapping[str, torch.Tensor],
        *,
        answered: Sequence[GenerateRequest],
        padding: int = 0,
        **more: Any,
    ) -> Answer:
        """answered: the rows as the client sees them;  padding: see Shape"""
        forwarded = isinstance(sender, ChannelSender)
        requested = frozenset(request.requested_output_names())
        # What a text model or a client without `news` gets is all that there is so far.
        increments = (
            self._streams
            and not forwarded
            and "news" in requested
            and "is_return_progress" in tensors
            and all(row.sampling.beam_width == 1 for row in rows)
        )
        shape = self._shape(padding, requested, increments)
        answer = kind(
            self._answers,
            sender,
            rows,
            tensors,
            requested,
            lambda outputs: self._to_tensors(answered, outputs, shape),
            streams=self._streams and (not forwarded or sender.streams),
            prompts=self._prompts(answered, shape) if "news" in requested else (),
            increments=increments,
            forwarded=forwarded,
            seconds=seconds_allowed(request),
            **more,
        )
        if forwarded:
            sender.opened(answer)
        return answer

    def _prompts(self, rows: Sequence[GenerateRequest], shape: Shape) -> list[Sequence[int]]:
        """Return the tokens of each row's prompt that its output_ids begin with."""
        if not self._contract.returns_prompts:
            return [()] * len(rows)
        return [real_ids(row, shape.prompt_start_id) for row in rows]

    def _shape(self, padding: int, requested: Collection[str], increments: bool) -> Shape:
        config, dtype = self._engine.config, DTYPES[self._engine.settings.data_type]
        return Shape(padding, config.end_id, dtype, prompt_start_id(config), requested, increments)

    def _lost(self, error: ServerError) -> None:
        """Tell who watches this server; one that nobody watches ends itself."""
        self._status.write("failed", reason=str(error), ranks=self._engine.ranks)
        if not self._status.is_read:
            end_server_later(error)

    def finalize(self) -> None:
        """End every rank; a node that does not serve has ended its own."""
        if self._serving:
            if self._sessions is not None:
                self._sessions.close()
            self._guidance.close()
            self._engine.close()
            self._answers.close()
            self._metrics.close()
        self._watch.close()


def input_tensors(request: Any, contract: Contract) -> dict[str, torch.Tensor]:
    """The contract's tensors of a request, over DLPack: numpy 2 misreads this backend's arrays.

    Raises RequestError that names those that are missing: Triton counts inputs, and optional ones
    make up for them.
    """
    result = {
        name: torch.utils.dlpack.from_dlpack(tensor.to_dlpack())
        for tensor in request.inputs()
        if (name := tensor.name()) in contract.by_name
    }
    if missing := [name for name in contract.required if name not in result]:
        message = f"required inputs are missing: {', '.join(missing)}"
        raise RequestError(problem(message, got=list(result)))
    return result


def with_parameters(
    request: Any, contract: Contract, tensors: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The tensors of a request, batch axis first, and those that its parameters stand for.

    Raises ParameterError for one that is not an optional input with one value per row.
    """
    if forwarded_request(request) is not None:
        return tensors
    kinds = contract.parameters
    values = parameter_values(request.parameters(), kinds, tensors, (CLIENT_PARAMETER,))
    rows = len(next(iter(tensors.values())))
    created = {
        name: torch.full((rows, 1), value, dtype=_TYPES[kinds[name]])
        for name, value in values.items()
    }
    return {**tensors, **created}


def client_of(request: Any) -> str:
    """Returns the name that a gateway has for the client of a request; "" of any other request."""
    if forwarded_request(request) is not None:
        return ""
    return str(json.loads(request.parameters() or "{}").get(CLIENT_PARAMETER, ""))


def control(request: Any, name: str) -> int:
    """A control input of the sequence batcher: START or END."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return 0
    return int(torch.utils.dlpack.from_dlpack(tensor.to_dlpack()).reshape(-1)[0])
