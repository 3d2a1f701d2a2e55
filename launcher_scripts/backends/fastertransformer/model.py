"""Triton's Python-based backend `fastertransformer`: tensors to requests, answers to tensors, and
metrics that a model adds to the server's; `metric_names` describes them.
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections import Counter
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
    failed_response,
    reason_of,
    send_last,
)
from launcher_scripts.backends.fastertransformer.answer_tensors import ANSWER_TENSORS, Shape
from launcher_scripts.backends.fastertransformer.guidance import Guidance
from launcher_scripts.backends.fastertransformer.operations import ServerOperations, operation_of
from launcher_scripts.backends.fastertransformer.request_tensors import padding, to_requests
from launcher_scripts.backends.fastertransformer.server import (
    DEVICE_VARIABLE,
    MAX_WAITING_VARIABLE,
    ServerWatch,
    StatusFile,
    end_server_later,
    engine_settings,
    host_ranks,
    model_type,
    node_group,
)
from launcher_scripts.backends.fastertransformer.streams import (
    Channels,
    ChannelSender,
    SharedAnswer,
    SharedStreams,
    forwarded_request,
)
from launcher_scripts.backends.fastertransformer.waiting_rows import (
    GuidedRow,
    GuidedRows,
    Sessions,
    idle_seconds,
)
from launcher_scripts.backends.triton_requests import (
    ParameterError,
    parameter_values,
    require_new_enough,
    response_sender,
    returned,
    seconds_allowed,
)
from launcher_scripts.common.errors import (
    BusyError,
    LauncherError,
    RequestError,
    ServerError,
    problem,
)
from launcher_scripts.contract import metric_names as names
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
from launcher_scripts.engine.core.statistics import Sample
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.model.weight_loader import DTYPES

_SECONDS = 1.0


class ModelMetrics:
    """One model's metrics, brought up to date every second."""

    def __init__(
        self, model: str, engine: Engine, weights: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Start from the engine's counters, so that its warm-up is left out.

        weights: gives the version and the digests of those that are served
        """
        self._model, self._engine, self._weights = model, engine, weights
        self._fingerprints: dict[str, Any] = {}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._gauges = {metric.name: self._add(metric, metric.name) for metric in names.GAUGES}
        self._reported: dict[str, float] = {}
        self._failures = {
            reason: self._add(names.FAILURE, names.FAILURE.name, (("reason", reason),))
            for reason in (names.REJECTED, names.CANCELLED, names.FAILED)
        }
        self._failures[names.PREEMPTED.name] = self._add(names.PREEMPTED, names.PREEMPTED.name)
        metrics = {name: metric for metric in names.MODEL_METRICS for name in metric.samples}
        self._recorded: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in engine.statistics.samples():
            key = (sample.name, sample.labels)
            self._metrics[key] = self._add(metrics[sample.name], *key)
            self._recorded[key] = sample.value
        self._steps = engine.statistics.steps, engine.statistics.step_rows
        self._unsent: Counter[str] = Counter()  # failures by reason, and names.GIVEN_UP
        self._lock = threading.Lock()  # of these
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def count_failure(self, reason: str, rows: int) -> None:
        """So many rows of a request will not be answered; any thread may say so at any time.

        reason: one of metric_names' values of `reason`
        """
        with self._lock:
            self._unsent[reason] += rows
            if reason == names.CANCELLED:
                self._unsent[names.PREEMPTED.name] += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _add(
        self, metric: names.MetricSpec, name: str, labels: tuple[tuple[str, str], ...] = ()
    ) -> Any:
        """The server's value of that name and labels, the model's label included."""
        kind = pb_utils.MetricFamily
        if name not in self._families:
            self._families[name] = pb_utils.MetricFamily(
                name=name,
                description=metric.meaning,
                kind=kind.COUNTER if metric.kind == names.COUNTER else kind.GAUGE,
            )
        return self._families[name].Metric(labels={metric.labels[0]: self._model, **dict(labels)})

    def _run(self) -> None:
        while True:
            for sample in self._engine.statistics.samples():
                self._count(sample)
            with self._lock:
                failures, self._unsent = self._unsent, Counter()
            for reason, count in failures.items():
                self._failures[reason].increment(count)
            self._show_weights()
            for name, value in self._levels().items():
                if self._reported.get(name) != value:
                    self._reported[name] = value
                    self._gauges[name].set(value)
            if self._closing.wait(_SECONDS):
                return

    def _count(self, sample: Sample) -> None:
        key = (sample.name, sample.labels)
        more = sample.value - self._recorded[key]
        if more:
            self._recorded[key] = sample.value
            self._metrics[key].increment(more)

    def _show_weights(self) -> None:
        """Let the fingerprint of the weights that are served have the value 1, others 0."""
        digests = self._weights()["digests"]
        current = digests["system_fingerprint"] if digests else "unknown"
        if self._reported.get(current):
            return
        for fingerprint, metric in self._fingerprints.items():
            self._reported[fingerprint] = 0
            metric.set(0)
        if current not in self._fingerprints:
            labels = (("system_fingerprint", current),)
            name = names.WEIGHTS_INFO.name
            self._fingerprints[current] = self._add(names.WEIGHTS_INFO, name, labels)
        self._reported[current] = 1
        self._fingerprints[current].set(1)

    def _levels(self) -> dict[str, float]:
        """The gauges' values now."""
        engine = self._engine
        used, capacity = engine.cache_tokens_used, engine.cache_tokens
        before, self._steps = self._steps, (engine.statistics.steps, engine.statistics.step_rows)
        steps, rows = (now - then for now, then in zip(self._steps, before, strict=True))
        return {
            names.RUNNING.name: engine.rows_running,
            names.WAITING.name: engine.rows_queued,
            names.CACHE_USE.name: used / capacity if capacity else 0.0,
            names.BATCH.name: rows / steps if steps else 0.0,
            names.CACHE_TOKENS.name: capacity,
            names.CACHE_USED.name: used,
            names.WEIGHTS_VERSION.name: self._weights()["version"],
        }


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
                send_last(sender, failed_response(error))
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
