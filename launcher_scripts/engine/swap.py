"""New weights in a running engine: read beside the steps, exchanged between two, and probed.

The probe's logits are compared with those of the same export by the plain path: loaded whole on the
CPU, by one rank, without CUDA graphs or fused steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.verification import full_tensor
from launcher_scripts.common.errors import BusyError, RequestError, problem
from launcher_scripts.common.files import DigestChain
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import (
    DRAIN_SECONDS,
    SLEEPS,
    ExchangeMode,
    GenerateOutput,
    GenerateRequest,
)
from launcher_scripts.engine.core.interruptible import InterruptibleScheduler
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.messages.message import ExchangeWeights, RefitWeights, Sleep
from launcher_scripts.engine.model.weight_loader import DTYPES, Reader
from launcher_scripts.engine.ranks.operations import OperationError, Operations
from launcher_scripts.engine.runner.loading import assemble_runner, open_checkpoint, read_weights
from launcher_scripts.engine.runner.refit_source import RefitSource, SharedTensors
from launcher_scripts.engine.runner.weight_exchange import (
    HOST,
    check_memory,
    open_exchanged_export,
)
from launcher_scripts.models import value_count
from launcher_scripts.models.family import ModelConfig

PROBE_LENGTHS = (1, 8, 8)
REFERENCE_TOKENS = 64  # of its cache
# The largest difference of the probe's logits, relative to their size; by the compute type.
MAX_DIFFERENCE = {"fp32": 2e-3, "fp16": 0.03, "bf16": 0.1}
MAX_QUANTIZED_DIFFERENCE = 0.3  # of weights or keys and values in bytes


@dataclass(frozen=True)
class SwapResult:
    """The result of an exchange of weights.

    version:    how often they have been exchanged since the start
    digests:    of the weights that are served now, see DigestChain.values
    mixed_rows: rows that began with the weights before, and go on
    difference: of the probe's logits from the reference, relative; max_difference: the limit
    prepare_seconds:  from the call until all ranks could exchange
    exchange_seconds: of the exchange alone;  pause_seconds: between two steps, with the probe
    """

    version: int
    digests: dict[str, Any]
    mode: ExchangeMode
    mixed_rows: int
    difference: float
    max_difference: float
    prepare_seconds: float
    exchange_seconds: float
    pause_seconds: float

    def values(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class WeightSwaps:
    """The weights that an engine serves, which can be exchanged.

    version: how often they have been exchanged;  digests: of them, None without a manifest
    folder:  the export that they are from
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.settings = engine.settings
        self.version = 0
        self._asleep: ExitStack | None = None
        self._waking = threading.Lock()
        self._is_warm = False
        self.folder = Path(engine.settings.checkpoint_dir)
        self.digests = _digests(self.folder)

    def warm_up(self) -> None:
        """Run the probe once with the weights that are served, so that what its passes compile on
        first use is not compiled in the pause of an exchange, when nobody else gets tokens.
        """
        if self._is_warm:
            return
        for request in probe_requests(self._engine.config):
            with suppress(BusyError):  # a server without a free place; an exchange may have one
                self._engine.between_steps(
                    partial(self._probe, requests=[request]), partial(self._has_room, request)
                )
        self._is_warm = True

    def swap(
        self, folder: Path, mode: ExchangeMode = "drain", drain_seconds: float = DRAIN_SECONDS
    ) -> SwapResult:
        """Serve the weights of another export of the same sizes; the server goes on meanwhile.

        Raises ConfigError or CheckpointError before anything is read, for another model or files
        that are missing; OperationError for what ranks find while they read, and where the probe
        disagrees; BusyError while another operation is done, or where requests have not ended in
        `drain_seconds`: the weights before are served then. ServerError where a rank is lost.
        """
        began = time.perf_counter()
        with self._operations():
            checkpoint = open_exchanged_export(self._engine.settings, folder, self._engine.config)
            manifest = DigestChain.of(checkpoint.folder)
            self._check_memory(checkpoint)
            references = self._references(checkpoint, partial(full_tensor, checkpoint))
            operation = ExchangeWeights(checkpoint.folder, manifest.manifest)
            new = (folder, manifest)
            return self._replace(operation, references, new, mode, drain_seconds, began)

    def refit(
        self,
        folder: Path,
        version: str = "",
        mode: ExchangeMode = "mixed",
        drain_seconds: float = DRAIN_SECONDS,
        *,
        probe: bool = False,
        memory: SharedTensors | None = None,
        began: float | None = None,
    ) -> SwapResult:
        """Serve the weights of a transformers folder of the model that is served.

        version: the trainer's name of them;  probe: compare logits with the CPU's, as `swap` does
        memory:  of tensors on GPUs that the folder names, where it is open already
        began:   by time.perf_counter(), when their transfer began, where it is part of the call
        Raises as `swap`.
        """
        began = time.perf_counter() if began is None else began
        with self._operations():
            settings = self._engine.settings
            served = open_checkpoint(settings, verify=False)
            source = RefitSource.of(folder, served, memory)
            source.complete()
            references: list[Tensor] = []
            if probe:
                self._check_memory(served)
                read = partial(source.read, tp_size=1, tp_rank=0)
                references = self._references(served, read)
            digests = DigestChain(source.identity, {}, version or str(self.version + 1))
            operation = RefitWeights(folder, source.identity)
            new = (folder, digests)
            return self._replace(operation, references, new, mode, drain_seconds, began, source)

    def sleep(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Give the device's memory back: the host has the weights, and the cache is dropped.

        Requests that have begun end before; those that wait, wait until `wake`. Raises BusyError
        where they have not ended in `drain_seconds`; OperationError where the host has too little
        memory. It changes nothing where the engine sleeps already.
        """
        if self.sleeping:
            return
        engine = self._engine
        with ExitStack() as stack:
            operations = stack.enter_context(self._operations())
            operations.prepare(Sleep())
            stack.callback(operations.finish)

            def fall_asleep(scheduler: InterruptibleScheduler) -> None:
                scheduler.exchanged_weights(self.version, engine.sessions)
                operations.carry_out("apply")
                scheduler.asleep = True

            engine.between_steps(fall_asleep, drains=True, seconds=drain_seconds)
            engine.closed_for = SLEEPS
            self._asleep = stack.pop_all()

    def wake(self) -> None:
        """Undo `sleep`. It changes nothing where the engine is awake.

        Raises OperationError where a device has too little memory, as beside a training that still
        runs, and then all ranks sleep on; BusyError while it wakes up.
        """
        if not self._waking.acquire(blocking=False):
            raise BusyError("it wakes up already")
        operations = self._engine.operations

        def awake(scheduler: InterruptibleScheduler) -> None:
            try:
                operations.carry_out("revert")
            except OperationError:
                operations.carry_out("apply")  # those that could sleep again
                raise
            scheduler.asleep = False

        try:
            if self._asleep is None:
                return
            self._engine.between_steps(awake)
            stack, self._asleep = self._asleep, None
            with stack:
                self._engine.closed_for = ""
        finally:
            self._waking.release()

    @property
    def sleeping(self) -> bool:
        """Whether the device has neither weights nor cache."""
        return self._asleep is not None

    def _operations(self) -> AbstractContextManager[Operations]:
        if self.sleeping:
            raise BusyError(SLEEPS)
        return self._engine.operations.exclusive()

    def _replace(
        self,
        operation: ExchangeWeights | RefitWeights,
        references: Sequence[Tensor],
        weights: tuple[Path, DigestChain],
        mode: ExchangeMode,
        drain_seconds: float,
        began: float,
        source: RefitSource | None = None,
    ) -> SwapResult:
        """Do the operation; references: of the probe, none where there is none.

        source: of a refit, which this rank need not open again
        """
        engine, operations = self._engine, self._engine.operations
        requests = probe_requests(engine.config) if references else []
        if requests:
            self.warm_up()
        operations.prepare(operation, source)
        prepared = time.perf_counter()
        try:
            rows, difference, seconds, pause = engine.between_steps(
                lambda scheduler: self._exchange(
                    scheduler, operations, requests, references, weights
                ),
                lambda scheduler: not requests or self._has_room(requests[-1], scheduler),
                drains=mode == "drain",
                seconds=drain_seconds,
            )
        finally:
            operations.finish()
        return SwapResult(
            self.version,
            weights[1].values(),
            mode,
            rows,
            difference,
            max_difference(engine.settings),
            prepared - began,
            seconds,
            pause,
        )

    def _references(self, checkpoint: FTCheckpoint, read: Reader) -> list[Tensor]:
        requests = probe_requests(self._engine.config)
        return reference_outputs(self._engine.settings, checkpoint, requests, read)

    def _exchange(
        self,
        scheduler: InterruptibleScheduler,
        operations: Operations,
        requests: Sequence[GenerateRequest],
        references: Sequence[Tensor],
        weights: tuple[Path, DigestChain],
    ) -> tuple[int, float, float, float]:
        """Exchange the weights, and put those before back where the probe disagrees."""
        engine, began = self._engine, time.perf_counter()
        seconds = operations.carry_out("apply")
        limit = max_difference(engine.settings)
        outputs, reason = self._probe(scheduler, requests)
        differences = [inf] if reason else list(map(relative_difference, outputs, references))
        difference = max(differences, default=0.0)
        if not all(item <= limit for item in differences):  # also where one is no number
            operations.carry_out("revert")
            message = (
                f"the logits of a probe with the weights of {weights[0]} are not those of the same "
                f"files on the CPU: the weights before are served again{reason}"
            )
            got, choices = f"a relative difference of {difference:.3g}", [f"at most {limit:g}"]
            raise OperationError(problem(message, got=got, choices=choices))
        self.version += 1
        self.folder, self.digests = weights
        rows = scheduler.exchanged_weights(self.version, engine.sessions)
        return rows, difference, seconds, time.perf_counter() - began

    def _probe(
        self, scheduler: InterruptibleScheduler, requests: Sequence[GenerateRequest]
    ) -> tuple[list[Tensor], str]:
        """Return the outputs of requests, each run before all rows, and the reason of a failure."""
        try:
            return [probed(self._engine.run_alone(scheduler, item)) for item in requests], ""
        except (RequestError, futures.TimeoutError) as error:
            return [], f"; the probe failed: {error}"

    def _has_room(self, request: GenerateRequest, scheduler: InterruptibleScheduler) -> bool:
        return scheduler.make_room(self._engine.row(request))

    def _check_memory(self, checkpoint: FTCheckpoint) -> None:
        """Raise ConfigError where this node has no memory for what its ranks and the probe need,
        one after the other.
        """
        settings = self._engine.settings
        width = torch.finfo(DTYPES[settings.data_type]).bits // 8
        model = value_count(checkpoint.config, 1) * width
        ranks = model * settings.ranks_per_node // settings.parallelism.world_size
        check_memory(max(model, ranks), f"the weights of {checkpoint.folder}")


def probe_requests(config: ModelConfig) -> list[GenerateRequest]:
    """Fixed prompts, whose ids are all over the vocabulary, with their logits or states."""
    prompts = [
        tuple(7919 * (number + 1) * (index + 3) % config.vocab_size for index in range(length))
        for number, length in enumerate(PROBE_LENGTHS)
    ]
    if getattr(config, "encoder_only", False):
        return [GenerateRequest(ids, output_len=0, return_hidden_state=True) for ids in prompts]
    return [GenerateRequest(ids, output_len=0, return_context_logits=True) for ids in prompts]


def probed(output: GenerateOutput) -> Tensor:
    """The logits or states of a probe, float32 [N, width]."""
    values = output.hidden_state if output.context_logits is None else output.context_logits
    result: Tensor = values.float().cpu()
    return result


def relative_difference(values: Tensor, reference: Tensor) -> float:
    """The largest distance of a row of values from the reference's, by the length of that one.

    What all numbers of a row have in common does not count.
    """
    rows, expected = (item - item.mean(dim=-1, keepdim=True) for item in (values, reference))
    distances = (rows - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)
    return float(distances.max())


def max_difference(settings: EngineSettings) -> float:
    """The largest relative difference that rounding explains."""
    in_bytes = settings.quantization is not None or settings.kv_cache_dtype == "fp8"
    return MAX_QUANTIZED_DIFFERENCE if in_bytes else MAX_DIFFERENCE[settings.data_type]


def reference_outputs(
    settings: EngineSettings,
    checkpoint: FTCheckpoint,
    requests: Sequence[GenerateRequest],
    read: Reader,
) -> list[Tensor]:
    """The outputs of requests by the plain path, on the CPU of this rank.

    read: gives whole tensors
    Raises CheckpointError where the parts of the ranks do not make a whole tensor.
    """

    plain = replace(
        settings,
        draft_checkpoint_dir=None,
        parallelism=Parallelism(),
        device="cpu",
        max_batch_size=len(requests),
        max_tokens=REFERENCE_TOKENS,
        kv_cache_dtype="auto",
        enable_custom_all_reduce=False,
        enable_prefix_caching=False,
        nodes=1,
    )
    weights = read_weights(plain, checkpoint, 0, HOST, read)
    engine = Engine.from_runner(
        plain, lambda: assemble_runner(weights, plain, Communicator(), HOST)
    )
    try:
        with engine.together():  # one pass reads all weights once
            outputs = list(map(engine.submit, requests))
        return [probed(output.result()) for output in outputs]
    finally:
        engine.close()


def _digests(folder: Path) -> DigestChain | None:
    try:
        return DigestChain.of(folder)
    except (OSError, ValueError):
        return None
