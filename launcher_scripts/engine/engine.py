"""The engine: requests in, generated rows out; the same on CPU and GPU, on one rank or many."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch
from torch.distributed import TCPStore

from launcher_scripts.engine.communicator import (
    Communicator,
    ProcessGroupCommunicator,
    open_store,
)
from launcher_scripts.engine.loading import (
    PREFILL_TOKENS,
    EngineSettings,
    assemble_runner,
    load_weights,
    open_checkpoint,
    prepare_process,
    rank_device,
    rank_info,
)
from launcher_scripts.engine.messages import Loaded, RankInfo, Ready
from launcher_scripts.engine.requests import check_request, parts, warm_up_request
from launcher_scripts.engine.results import StepResult
from launcher_scripts.engine.row import Row
from launcher_scripts.engine.runner import Runner
from launcher_scripts.engine.scheduler import Scheduler
from launcher_scripts.engine.workers import WorkerGroup
from launcher_scripts.errors import RequestError, ServerError
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.protocol import GenerateOutput, GenerateRequest

STEPS_AHEAD = {"cpu": 0, "cuda": 1}
NAMING_SECONDS = 3.0
STOP_SECONDS = 20.0

__all__ = ["Engine", "EngineSettings"]


class Engine:
    """Rank 0 of a model in service; it starts the other ranks and tells them what to do.

    One thread steps: rows join and leave between steps. On CUDA it launches a step before it has
    read the one before, so the device never waits for the host.
    """

    def __init__(self, settings: EngineSettings, build: Callable[[Engine], Runner]) -> None:
        """Start the stepping thread, which calls `build` for its runner; see `load`."""
        self.settings = settings
        self._build = build
        self._inbox: SimpleQueue[Row | None] = SimpleQueue()
        self._pending: set[Future[GenerateOutput]] = set()
        self._lock = threading.Lock()
        self._error: ServerError | None = None
        self._closed = False
        self._settled = threading.Event()  # loaded, or failed
        self._failure_callbacks: list[Callable[[ServerError], None]] = []
        self._workers: WorkerGroup | None = None
        self._communicator: Communicator | None = None
        self._runner: Runner | None = None
        self._ranks: list[RankInfo] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, settings: EngineSettings) -> Engine:
        """Verify the checkpoint, start every rank, load, and return when all are ready.

        Raises CheckpointError, ConfigError or ServerError.
        """
        checkpoint = open_checkpoint(settings, verify=settings.verify)
        rank_device(settings, settings.parallelism.world_size - 1)

        def build(engine: Engine) -> Runner:
            device = rank_device(settings, 0)
            prepare_process(settings, device)
            store = engine._start_workers()
            weights = load_weights(settings, checkpoint, 0, device)
            communicator = engine._meet(store, device)
            runner = assemble_runner(weights, settings, communicator, device)
            engine._await(Ready)
            return runner

        return cls._ready(cls(settings, build))

    @classmethod
    def from_runner(cls, settings: EngineSettings, build: Callable[[], Runner]) -> Engine:
        """An engine of one rank over a runner that `build` makes on the engine's thread."""
        return cls._ready(cls(settings, lambda _: build()))

    @property
    def config(self) -> ModelConfig:
        return self._loaded.decoder.config

    @property
    def cache_tokens(self) -> int:
        return self._loaded.decoder.cache.capacity

    @property
    def ranks(self) -> list[RankInfo]:
        """Where every rank runs, rank 0 first."""
        return list(self._ranks)

    def submit(
        self,
        request: GenerateRequest,
        on_progress: Callable[[GenerateOutput], None] | None = None,
    ) -> Future[GenerateOutput]:
        """Queue one row. The future carries RequestError for a wrong request, and ServerError
        when the engine is lost. Cancelling it frees the row's place.

        on_progress gets the row's tokens so far after each but the last, which is the future's.
        It is called by the thread that steps, in order, so it must return at once.
        """
        future: Future[GenerateOutput] = Future()
        try:
            check_request(request, self.config, self.cache_tokens)
        except RequestError as error:
            future.set_exception(error)
            return future
        end_id = self.config.end_id if request.end_id is None else request.end_id
        source, prompt = parts(request, self.config)
        row = Row(request, future, prompt, end_id, source, on_progress)
        with self._lock:
            if self._error is None and not self._closed:
                self._pending.add(future)
                future.add_done_callback(self._pending_done)
                self._inbox.put(row)
                return future
        future.set_exception(self._error or ServerError("the engine is closed"))
        return future

    def warm_up(self) -> None:
        """Generate a few tokens, so that what happens on first use happens now."""
        self.submit(warm_up_request(self.config, self.cache_tokens)).result()

    def on_failure(self, callback: Callable[[ServerError], None]) -> None:
        """Call `callback` once if a rank is lost, from whichever thread notices."""
        with self._lock:
            self._failure_callbacks.append(callback)
            error = self._error
        if error is not None:
            callback(error)

    def close(self) -> None:
        """Stop after the step in flight; rows that have not ended get ServerError.

        The thread gets STOP_SECONDS: ranks that wait for each other must not hold up the end.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            failed = self._error is not None
        self._inbox.put(None)
        if not failed:
            self._thread.join(STOP_SECONDS)
        if self._workers is not None:
            self._workers.kill() if failed else self._workers.close()
        if failed:
            self._thread.join(NAMING_SECONDS)
        self._fail_pending(self._error or ServerError("the engine was closed"))

    @property
    def _loaded(self) -> Runner:
        if self._runner is None:
            raise ServerError("the engine is not loaded")
        return self._runner

    @classmethod
    def _ready(cls, engine: Engine) -> Engine:
        engine._settled.wait()
        if engine._error is not None:
            error = engine._error
            engine.close()
            raise error
        return engine

    def _start_workers(self) -> TCPStore | None:
        """Start the other ranks and open the place where they will meet."""
        if self.settings.parallelism.world_size == 1:
            return None
        store = open_store(self.settings.start_timeout)
        self._workers = WorkerGroup(self.settings, store.port, self._fail)
        return store

    def _meet(self, store: TCPStore | None, device: torch.device) -> Communicator:
        """Join the other ranks once all have read their weights."""
        if store is None:
            return Communicator()
        self._await(Loaded)
        self._communicator = ProcessGroupCommunicator(
            self.settings.parallelism, 0, store, device, self.settings.start_timeout
        )
        return self._communicator

    def _await(self, message: type) -> None:
        timeout = self.settings.start_timeout
        if self._workers is not None and not self._workers.wait_for(message, timeout):
            raise self._error or ServerError(f"the ranks did not load within {timeout:.0f} s")

    def _leave_group(self) -> None:
        """After a failure on the CPU; NCCL would wait for the lost rank, so it ends with us."""
        if self._communicator is not None and self.settings.device_type == "cpu":
            with suppress(RuntimeError):
                self._communicator.close()

    def _run(self) -> None:
        try:
            self._runner = self._build(self)
            self._ranks = [rank_info(0, self._runner.device)]
            if self._workers is not None:
                self._ranks += self._workers.infos
            self._settled.set()
            self._step_until_closed(self._runner)
            if self._workers is not None:
                self._workers.dismiss()
            self._runner.close()
        except Exception as error:
            self._fail(self._named(error))
            self._leave_group()

    def _step_until_closed(self, runner: Runner) -> None:
        scheduler = Scheduler(
            self.settings.max_batch_size,
            runner.decoder.cache.capacity,
            PREFILL_TOKENS[runner.device.type],
        )
        launched: deque[StepResult] = deque()
        while self._receive(scheduler, wait=not (launched or scheduler.rows)):
            plan = scheduler.plan()
            if plan is not None:
                if self._workers is not None:
                    self._workers.send(plan)
                launched.append(runner.execute(plan))
            if launched and (plan is None or len(launched) > STEPS_AHEAD[runner.device.type]):
                scheduler.apply(launched.popleft())
        for result in launched:
            scheduler.apply(result)

    def _receive(self, scheduler: Scheduler, *, wait: bool) -> bool:
        """Hand new rows to the scheduler; False when the engine closes."""
        while True:
            try:
                row = self._inbox.get(block=wait)
            except Empty:
                return True
            if row is None:
                return False
            scheduler.add(row)
            wait = False

    def _named(self, error: Exception) -> ServerError:
        """The cause of a failed step: a lost rank, where that is what broke a collective."""
        if isinstance(error, ServerError):
            return error
        if self._workers is not None:
            for _ in range(int(NAMING_SECONDS / 0.1)):
                if self._error is not None:
                    return self._error
                threading.Event().wait(0.1)
        return ServerError(f"rank 0 failed: {type(error).__name__}: {error}")

    def _fail(self, error: ServerError) -> None:
        """Take the first failure: every pending row gets it, and so do later ones."""
        with self._lock:
            if self._error is not None or self._closed:
                return
            self._error = error
            callbacks = list(self._failure_callbacks)
        self._fail_pending(error)
        self._settled.set()
        for callback in callbacks:
            callback(error)

    def _fail_pending(self, error: ServerError) -> None:
        with self._lock:
            pending, self._pending = self._pending, set()
        for future in pending:
            try:
                future.set_exception(error)
            except InvalidStateError:
                continue  # answered or cancelled meanwhile

    def _pending_done(self, future: Future[GenerateOutput]) -> None:
        with self._lock:
            self._pending.discard(future)
