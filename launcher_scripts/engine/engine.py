"""The engine: requests in, generated rows out; the same on CPU and GPU, on one rank or many."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from launcher_scripts.common.errors import BusyError, RequestError, ServerError
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.engine.core.interruptible import InterruptibleScheduler, Interruption
from launcher_scripts.engine.core.prefix_cache import prefix_of
from launcher_scripts.engine.core.requests import (
    check_request,
    may_grow,
    parts,
    prompt_in_session,
    warm_up_request,
)
from launcher_scripts.engine.core.results import Pending, StepResult
from launcher_scripts.engine.core.row import Guide, Row, SnapshotCallback
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.core.statistics import Statistics
from launcher_scripts.engine.distributed.heartbeat import DEVICE
from launcher_scripts.engine.messages.message import Operation, RankInfo
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.ranks.links import ONE_NODE, NodeGroup
from launcher_scripts.engine.ranks.operations import LoRATable, Operations, Replies
from launcher_scripts.engine.ranks.ranks import NAMING_SECONDS, Ranks
from launcher_scripts.engine.runner.graphs import Recording, device_memory
from launcher_scripts.engine.runner.kernel_precompiler import KernelPrecompiler
from launcher_scripts.engine.runner.loading import (
    PREFILL_TOKENS,
    EngineSettings,
    Timeline,
    assemble_runner,
    load_both,
    open_checkpoints,
    prepare_process,
    rank_device,
)
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.models.adapters import adapters_of
from launcher_scripts.models.family import ModelConfig

STEPS_AHEAD = {"cpu": 0, "cuda": 1}
STOP_SECONDS = 20.0
MASK_POLL_SECONDS = 0.005
STEP_POLL_SECONDS = 0.002  # between looks at a step that may end sooner than estimated
Build = Callable[["Engine"], Runner]

__all__ = ["Engine", "EngineSettings"]


class _Submitting(threading.local):
    """The rows that a thread submits together; None: each by itself."""

    rows: list[Row] | None = None


class Engine:
    """Rank 0 of a model in service; it starts the other ranks and tells them what to do.

    One thread steps: rows join and leave between steps. On CUDA it launches a step before it has
    read the one before, so the device never waits for the host. With pipeline stages as many steps
    more are under way, each of other rows, so that all stages work at the same time.
    """

    loras: LoRATable

    def __init__(self, settings: EngineSettings, build: Build) -> None:
        """Start the stepping thread, which calls `build` for its runner; see `load`."""
        self.settings = settings
        self.statistics = Statistics()
        self._build = build
        self._inbox: SimpleQueue[list[Row] | Session | Interruption | None] = SimpleQueue()
        self._submitting = _Submitting()
        self._pending = Pending()
        self._lock = threading.Lock()
        self._error: ServerError | None = None
        self._closed = False
        self._settled = threading.Event()  # loaded, or failed
        self._failure_callbacks: list[Callable[[ServerError], None]] = []
        replies = Replies()
        self._ranks = Ranks(settings, self._fail, replies.add)
        self._replies = replies
        self._operations: Operations | None = None
        self._interruption: Interruption | None = None
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._runner: Runner | None = None
        self._scheduler: InterruptibleScheduler | None = None
        self.closed_for = ""  # the reason why no request is taken now
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, settings: EngineSettings, group: NodeGroup = ONE_NODE) -> Engine:
        """Verify the checkpoint, start every rank, load, and return when all are ready.

        With several nodes in `group`, as many as the ranks can be divided over hold some. Raises
        CheckpointError, ConfigError or ServerError.
        """
        settings = replace(settings, nodes=settings.parallelism.spread(group.node_rank.nodes))
        checkpoints = open_checkpoints(settings, verify=False)
        rank_device(settings, settings.parallelism.world_size - 1)
        device = rank_device(settings, 0)
        precompiler = KernelPrecompiler(settings, *checkpoints.configs, device)
        # Digests are compared while the weights are read: both take the same bytes off the disk.
        verifier = ThreadPoolExecutor(1)
        verification = settings.verify and verifier.submit(open_checkpoints, settings, verify=True)
        verifier.shutdown(wait=False)

        def build(engine: Engine) -> Runner:
            prepare_process(settings, device)
            engine._ranks.start(group)
            weights, draft = load_both(settings, checkpoints, 0, device)
            engine._ranks.timeline.note("rank 0 has its weights")
            if verification:
                verification.result()
                engine._ranks.timeline.note("the checkpoint is verified")
            communicator = engine._ranks.meet(device)
            precompiler.wait(engine._ranks.timeline)
            return assemble_runner(weights, settings, communicator, device, draft=draft)

        try:
            return cls._ready(cls(settings, build))
        except ServerError:
            if verification:
                verification.result()  # an altered file is the cause of what failed
            raise

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
    def block_tokens(self) -> int:
        return self._loaded.decoder.cache.table.tokens

    @property
    def cache_tokens_used(self) -> int:
        """Tokens of the cache that belong to rows and sessions now."""
        return 0 if self._scheduler is None else self._scheduler.used_tokens

    @property
    def rows_running(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.rows_running

    @property
    def rows_queued(self) -> int:
        """Rows that came and have no place yet."""
        return max(0, len(self._pending) - self.rows_running)

    @property
    def rows_waiting(self) -> int:
        """Rows that came and do not run yet, if each of those that run is one."""
        return max(0, len(self._pending) - self.settings.max_batch_size)

    @property
    def ranks(self) -> list[RankInfo]:
        """Locations of all ranks, rank 0 first."""
        return list(self._ranks.infos)

    @property
    def timeline(self) -> Timeline:
        """When the steps of the start were done."""
        return self._ranks.timeline

    def submit(
        self,
        request: GenerateRequest,
        on_progress: SnapshotCallback | None = None,
        session: Session | None = None,
        guide: Guide | None = None,
    ) -> Future[GenerateOutput]:
        """Queue one row. The future carries RequestError for a wrong request, and ServerError
        when the engine is lost. Cancelling it frees the row's place.

        on_progress gets a snapshot of the row after each token but the last, which is the future's.
        It is called by the thread that steps, in order, so it must return at once. A request of a
        session goes on where the one before ended; close_session must be called for it one day.
        guide is made of the request's guided_grammar and knows nothing of other rows.
        """
        future: Future[GenerateOutput] = Future()
        try:
            if self.closed_for:
                raise BusyError(self.closed_for)
            slots, size = self.settings.max_batch_size, self.block_tokens
            check_request(request, self.config, self.cache_tokens, slots, session, size)
            slot = self.loras.enter(request.lora_adapter, future)
        except RequestError as error:
            future.set_exception(error)
            return future
        if request.num_speculative_tokens and not self._loaded.drafts.are_possible:
            request = replace(request, num_speculative_tokens=0)
        row = self.row(request, future, on_progress, session, guide)
        prompt = row.prompt
        if session is not None:
            self._sessions.add(session)
            row.prompt = prompt_in_session(session, request, prompt)
            # States that have got a token too many cannot give it back to the session.
            row.waits_for_tokens |= self.config.has_row_states
        else:
            row.grows = may_grow(request, self.config) and not self.settings.deterministic
            # By the adapter's number, which is never used again, as its slot is.
            if self.settings.enable_prefix_caching:
                more = size, self.settings.fixed_chunk
                row.prefix = prefix_of(request, prompt, row.row_capacity, self.config, *more)
        if slot != request.lora_adapter:
            row.request = replace(request, lora_adapter=slot)
        with self._lock:
            if self._error is None and not self._closed:
                if session is not None:
                    session.begin_turn(request)
                self._pending.add(future)
                if self._submitting.rows is None:
                    self._inbox.put([row])
                else:
                    self._submitting.rows.append(row)
                return future
        future.set_exception(self._error or ServerError("the engine is closed"))
        return future

    def row(
        self,
        request: GenerateRequest,
        future: Future[GenerateOutput] | None = None,
        on_progress: SnapshotCallback | None = None,
        session: Session | None = None,
        guide: Guide | None = None,
    ) -> Row:
        end_id = self.config.end_id if request.end_id is None else request.end_id
        source, prompt = parts(request, self.config)
        return Row(
            request,
            future or Future(),
            prompt,
            end_id,
            source,
            on_progress,
            session=session,
            guide=guide,
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have the rows that this thread submits meanwhile begin at the same time, not the first of
        them alone and the others beside it, in the smaller steps of prompts beside decoding.
        """
        rows: list[Row] = []
        self._submitting.rows = rows
        try:
            yield
        finally:
            self._submitting.rows = None
            self._inbox.put(rows)

    def close_session(self, session: Session) -> None:
        """Free what the session holds, as soon as a request of it that runs has ended."""
        self._inbox.put(session)

    @property
    def operations(self) -> Operations:
        """What is done by all ranks between two steps."""
        if self._operations is None:
            raise self._error or ServerError("the engine is not loaded")
        return self._operations

    def operate(self, operation: Operation) -> None:
        """Have an operation done by all ranks between two steps, while rows go on.

        Raises OperationError where a rank cannot, BusyError, and ServerError where one is lost.
        """
        with self.operations.exclusive() as operations:
            operations.prepare(operation)
            self.between_steps(lambda _: operations.carry_out("apply"))
            operations.finish()

    def between_steps(
        self,
        function: Callable[[InterruptibleScheduler], Any],
        is_ready: Callable[[InterruptibleScheduler], bool] = lambda _: True,
        *,
        drains: bool = False,
        seconds: float = 60.0,
    ) -> Any:
        """Return what `function` returns, called between two steps, with none in flight.

        See Interruption. Raises BusyError where it is not ready within `seconds`, what the function
        raises, and ServerError where the engine is lost; the engine ends with that in the function.
        """
        interruption = Interruption(function, is_ready, drains, time.monotonic() + seconds)
        self._pending.add(interruption.future)
        self._inbox.put(interruption)
        with self._lock:
            error = self._error or (ServerError("the engine is closed") if self._closed else None)
        if error is not None:
            raise error
        return interruption.future.result()

    def run_alone(self, scheduler: InterruptibleScheduler, request: GenerateRequest) -> Any:
        """Return the output of a request that runs before all rows; called between two steps."""
        row, runner = self.row(request), self._loaded
        with scheduler.alone(row):
            while (plan := scheduler.plan()) is not None:
                self._ranks.begin_step(plan)
                result = runner.execute(plan)
                self._ranks.progress.end_step()
                scheduler.apply(result)
        return row.future.result(0)

    @property
    def sessions(self) -> list[Session]:
        """All sessions that requests may go on with."""
        return list(self._sessions)

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
        self._ranks.close(failed=failed)
        if failed:
            self._thread.join(NAMING_SECONDS)
        self._pending.fail(self._error or ServerError("the engine was closed"))

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

    def _run(self) -> None:
        try:
            self._runner = self._build(self)
            self._runner.decoder.say_general_paths()
            self._ranks.complete(self._runner.device)
            self._operations = Operations(self._ranks, self._replies, self._runner, self.settings)
            recording = self._record(self._runner)
            self.loras = LoRATable(adapters_of(self.config), self.operate)
            self._settled.set()
            self._step_until_closed(self._runner, recording)
            self._ranks.dismiss()
            self._runner.close()
        except Exception as error:
            self._fail(self._ranks.cause(error))
            self._ranks.leave()

    def _record(self, runner: Runner) -> Recording:
        """Have the graphs of decode steps made that requests will need."""

        def on_plan(plan: Plan) -> None:
            self._ranks.begin_step(plan)
            runner.execute(plan)
            self._ranks.progress.end_step()

        shapes = runner.shapes_to_record()
        memory = partial(device_memory, runner.device)
        recording = Recording(shapes, on_plan, memory)
        done = recording.record_at_load()
        if done is not None:
            print(done, flush=True)
            self._ranks.timeline.note("decode steps are recorded")
        return recording

    def _step_until_closed(self, runner: Runner, recording: Recording) -> None:
        stages = self.settings.parallelism.pp_size
        ahead = STEPS_AHEAD[runner.device.type] + stages - 1
        scheduler = InterruptibleScheduler(
            self.settings.max_batch_size,
            runner.decoder.cache.capacity,
            self.settings.fixed_chunk or PREFILL_TOKENS[runner.device.type],
            self.statistics,
            recorded_tokens=runner.recorded_tokens,
            inter_token_target=self.settings.inter_token_target,
            drafts=runner.draft_options,
            snapshots=runner.decoder.cache.row_states.snapshots,
            block_tokens=runner.decoder.cache.table.tokens,
            stages=stages,
            one_by_one=self.settings.deterministic,
        )
        self._scheduler = scheduler
        launched: deque[StepResult] = deque()
        waits = False  # whether all rows that run wait for the masks of their guides
        while self._gather(
            scheduler,
            launched,
            MASK_POLL_SECONDS * waits
            if launched or scheduler.rows or self._interruption is not None
            else recording.pause(),
        ):
            if self._interruption is not None and self._interruption.attempt(scheduler, launched):
                self._interruption, recording.stopped = None, scheduler.asleep
            plan = scheduler.plan()
            waits = plan is None and not launched
            if plan is not None:
                recording.disturbed()
                self._ranks.begin_step(plan)
                launched.append(runner.execute(plan))
                self._ranks.progress.end_step()
            if launched and (plan is None or len(launched) > ahead):
                with self._ranks.progress.phase(DEVICE):
                    scheduler.apply(launched.popleft())
            elif plan is None and recording.pause() == 0.0:
                recording.record_next()
        for result in launched:
            scheduler.apply(result)

    def _gather(
        self,
        scheduler: InterruptibleScheduler,
        launched: Sequence[StepResult],
        seconds: float | None,
    ) -> bool:
        """Receive until the next step has to be launched; see `_receive`."""
        is_open = self._receive(scheduler, seconds)
        while is_open and launched and (spare := scheduler.spare_seconds()) > 0:
            if launched[0].is_done:
                break
            is_open = self._receive(scheduler, min(spare, STEP_POLL_SECONDS))
        return is_open

    def _receive(self, scheduler: InterruptibleScheduler, seconds: float | None) -> bool:
        """Hand new rows, and sessions that end, to the scheduler; False when the engine closes.

        seconds: to wait for the first; None: until one comes
        """
        while True:
            try:
                received = self._inbox.get(block=seconds != 0.0, timeout=seconds)
            except Empty:
                return True
            if received is None:
                return False
            if isinstance(received, Session):
                scheduler.close_session(received)
            elif isinstance(received, Interruption):
                self._interruption = received
            else:
                for row in received:
                    scheduler.add(row)
            seconds = 0.0

    def _fail(self, error: ServerError) -> None:
        """Take the first failure: every pending row gets it, and so do later ones."""
        with self._lock:
            if self._error is not None or self._closed:
                return
            self._error = error
            callbacks = list(self._failure_callbacks)
        self._pending.fail(error)
        self._settled.set()
        for callback in callbacks:
            callback(error)
