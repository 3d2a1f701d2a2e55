"""One service from start to end: serve a model repository until stopped or until it fails."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.files import atomic_write
from launcher_scripts.common.hosts import (
    ATTEMPT_VARIABLE,
    INTERFACE_VARIABLE,
    RENDEZVOUS_VARIABLE,
    SINGLE_NODE,
    NodeRank,
)
from launcher_scripts.common.http_client import UNIX
from launcher_scripts.common.processes import (
    EXITED,
    NAME_PREFIX,
    SUSPENDED,
    StopRequest,
    process_name,
    process_stat,
    remove_leftovers,
    seconds_since,
    temporary_folder,
)
from launcher_scripts.config.gateway import example_command
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.models.repository import check_repository, is_remote
from launcher_scripts.server.addresses import (
    GATEWAY,
    ReadyFiles,
    addresses,
    gateway_host,
    job_identity,
    local_address,
    openai_url,
    ports_in_use,
    reserved_ports,
    with_node_address,
)
from launcher_scripts.server.gateway_process import GatewayProcess
from launcher_scripts.server.health import (
    IdleDetector,
    ModelStatus,
    TritonClient,
    all_ready,
    check_closed,
    check_key,
    failures,
    read_statuses,
)
from launcher_scripts.server.installation import Installation, find_installation
from launcher_scripts.server.process import (
    REASON,
    SECOND_STARTS,
    LostWorkerDetector,
    Protection,
    ServerProcess,
    launch_credentials,
)


def rendezvous_folder(settings: DeploySettings) -> Path:
    """Folder where the nodes of this server find rank 0 of each model."""
    return Path(settings.job_folder or settings.results_dir) / "ranks"


def group_env(settings: DeploySettings, node_rank: NodeRank, attempt: int) -> dict[str, str]:
    """Variables for the backend: what it needs to know about the other nodes, if there are any."""
    if node_rank.nodes == 1:
        return {}
    env = {
        RENDEZVOUS_VARIABLE: str(rendezvous_folder(settings)),
        ATTEMPT_VARIABLE: str(attempt),
    }
    if settings.network_interface is not None:
        env[INTERFACE_VARIABLE] = settings.network_interface
    return env


_POLL_SECONDS = 0.2
# What a server needs to unload its models after its last request, and what one gets that is broken.
_UNLOAD_SECONDS = 5.0
_NAMING_SECONDS = 1.0
_SUSPENDED_SECONDS = 2.0  # that a process may be stopped for, by a debugger or a signal
_FAILED_SECONDS = 5.0


def serve_repository(settings: DeploySettings, node_rank: NodeRank = SINGLE_NODE) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, or until settings.idle_timeout without requests.

    A server that was ready is started again settings.restarts times, and one that lost a worker
    before (see lost_workers) SECOND_STARTS times, on one node. Raises ServerError with the reason
    and the end of the server's log when the server does not become ready or stops by itself.
    Nothing of it is left running in any case.
    """
    check_repository(settings.model_repository)
    installation = find_installation(settings.tritonserver, settings.numpy_dir)
    settings = with_node_address(settings)
    ready_files = ReadyFiles(settings)
    ready_files.prepare()
    for name in remove_leftovers():
        print(f"removed what the killed server {name} had left on this node", flush=True)
    stop = StopRequest()
    restarts = second_starts = 0
    was_ready = False
    with stop.listening(), launch_credentials(settings) as credentials:
        while True:
            env = group_env(settings, node_rank, restarts)
            may_start_again = node_rank.nodes == 1 and second_starts < SECOND_STARTS
            run = _Run(settings, installation, stop, ready_files, env, may_start_again, credentials)
            try:
                run.until_stopped()
                return
            except ServerError as error:
                was_ready = was_ready or run.was_ready
                if stop.received is not None:
                    raise
                if run.lost_worker and may_start_again:
                    second_starts += 1
                    count = f"second start, {second_starts} of {SECOND_STARTS}"
                elif was_ready and restarts < settings.restarts:
                    restarts += 1
                    count = f"restart {restarts} of {settings.restarts}"
                else:
                    raise
                print(f"{error}\n{count}: {_reason(error)}", flush=True)


class _Run:
    """One start of the server, to its end."""

    def __init__(
        self,
        settings: DeploySettings,
        installation: Installation,
        stop: StopRequest,
        ready_files: ReadyFiles,
        env: Mapping[str, str],
        stop_early: bool,
        credentials: Path | None,
    ) -> None:
        """stop_early: end a start that has lost a worker, where the server itself would wait.
        credentials: see launch_credentials
        """
        self._settings = settings
        self._installation = installation
        self._stop = stop
        self._ready_files = ready_files
        self._env = env
        self._stop_early = stop_early
        self._credentials = credentials
        self.was_ready = False
        self.lost_worker = False

    def until_stopped(self) -> None:
        settings, stop = self._settings, self._stop
        with (
            tempfile.TemporaryDirectory(prefix=NAME_PREFIX, dir=temporary_folder()) as folder,
            contextlib.ExitStack() as stack,
        ):
            idle: str | None = None
            ports = stack.enter_context(reserved_ports(settings))
            protection = Protection(settings, Path(folder), self._credentials)
            process = ServerProcess(
                settings, self._installation, ports, Path(folder), protection, self._env
            )
            gateway = _gateway(settings, ports, Path(folder))
            timeout = settings.stop_timeout + _UNLOAD_SECONDS
            try:
                service = RunningService(
                    settings, process, ports, stop, protection, self._ready_files, gateway
                )
                if service.wait_until_ready(self._stop_early):
                    stack.close()
                if service.open_gateway():
                    service.check_door()
                    service.announce()
                    self.was_ready = True
                    idle = service.watch()
                print(f"stopping the server: {idle or stop.name}", flush=True)
            except ServerError as error:
                # The end of a job is told to all of its processes at once: the server may be gone
                # a moment before this process hears of it.
                time.sleep(_POLL_SECONDS)
                if stop.received is None:
                    timeout = min(timeout, _FAILED_SECONDS)
                    if gateway is not None and gateway.pid is not None:
                        # Its requests end with the server, with their errors, and then it does.
                        process.kill(gateway.pid)
                    raise
                print(f"stopping the server: {stop.name} ({_reason(error)})", flush=True)
            finally:
                self.lost_worker = process.lost_worker and not self.was_ready
                self._ready_files.remove()
                end = time.monotonic() + timeout
                if gateway is not None:
                    gateway.stop(timeout)
                process.stop(max(_UNLOAD_SECONDS, end - time.monotonic()))


class RunningService:
    """A started server on its way to ready, and then watched."""

    def __init__(
        self,
        settings: DeploySettings,
        process: ServerProcess,
        ports: Mapping[str, int],
        stop: StopRequest,
        protection: Protection,
        ready_files: ReadyFiles,
        gateway: GatewayProcess | None = None,
    ) -> None:
        self._settings = settings
        self._process = process
        self._gateway = gateway
        self._ports = ports
        self._stop = stop
        self._ready_files = ready_files
        self._sockets = {name: f"{UNIX}{path}" for name, path in protection.sockets.items()}
        self._protection = protection
        http, self._metrics = (
            self._sockets.get(name) or local_address(settings.hosts[name], ports[name])
            for name in ("http", "metrics")
        )
        self._client = TritonClient(http, protection.headers)
        self._watched: dict[int, str] = {}
        self._suspended: dict[int, float] = {}
        self._server_started = time.time()

    def wait_until_ready(self, stop_early: bool) -> bool:
        """True when every model answers; False when somebody asked to stop before."""
        deadline = time.monotonic() + self._settings.ready_timeout
        waits_for_lost = LostWorkerDetector(self._process.pid)
        while self._stop.received is None:
            statuses = self._check()
            if all_ready(self._client, statuses):
                return True
            if stop_early and waits_for_lost():
                self._process.lost_worker = True
                raise self._error(REASON)
            if time.monotonic() > deadline:
                raise self._error(
                    problem(
                        f"the server was not ready within {self._settings.ready_timeout:g} s",
                        got=_states(statuses),
                        change="deploy.server.ready_timeout",
                    )
                )
            time.sleep(_POLL_SECONDS)
        return False

    def open_gateway(self) -> bool:
        """Start the gateway, if there is to be one.

        True when it answers; False when somebody asked to stop before.
        """
        gateway = self._gateway
        if gateway is not None and self._stop.received is None:
            repository = _absolute(self._settings.model_repository)
            content = {**self._addresses(), **self._sockets, "model_repository": repository}
            server = json.dumps(content)
            atomic_write(Path(gateway.settings.ready[0]), server)
            gateway.start()
        while self._stop.received is None:
            if gateway is None or gateway.models:
                return True
            self._check()
            gateway.poll()
            time.sleep(_POLL_SECONDS)
        return False

    def _addresses(self) -> dict[str, str]:
        """host:port of every interface, as clients use it."""
        published = addresses(self._settings, self._ports)
        return {**published, "grpc": self._protection.client_address(published["grpc"])}

    def check_door(self) -> None:
        """Check that a server whose gateway has keys opens for them, and for nobody without one."""
        if not self._settings.is_closed or self._stop.received is not None:
            return
        gateway, pids = self._gateway, self._process.members()
        if gateway is not None:
            check_key(self._openai, gateway.models[0], gateway.settings)
        check_closed(pids, next(iter(self._client.models()), ""), self._ports.get(GATEWAY))

    @property
    def _openai(self) -> str:
        """The base URL of the gateway, which has to listen."""
        return openai_url(self._settings, gateway_host(self._settings), self._ports[GATEWAY])

    def announce(self) -> None:
        """Write the ready file, or the candidate's: from now on others may use the server."""
        statuses = self._check()
        self._watched = self._processes(statuses)
        self._process.hide_memory()
        content: dict[str, Any] = {
            **self._addresses(),
            "listens_on": {**self._settings.hosts, **self._sockets},
            "models": sorted(self._client.models()),
            "model_repository": _absolute(self._settings.model_repository),
            "versions": {
                "tritonserver": self._client.version(),
                **{name: value for s in statuses for name, value in s.versions.items()},
            },
            "ranks": [{"model": s.model, **rank} for s in statuses for rank in s.ranks],
            "pid": self._process.pid,
            "job": job_identity(self._settings),
            "timeline": self._timeline(statuses),
        }
        if GATEWAY in self._ports:
            content["openai"] = self._openai
        if self._gateway is not None:  # whoever waits for the file finds the line in the log
            model, keyed = self._gateway.models[0], self._gateway.keyed
            if keyed:
                content["api_keys"] = _absolute(str(self._gateway.settings.api_keys))
            print(f"try: {example_command(content['openai'], model, keyed=keyed)}", flush=True)
        self._ready_files.write(content)
        print(f"ready: {json.dumps(content)}", flush=True)
        print(f"seconds of the start:\n{start_table(content['timeline'])}", flush=True)

    def watch(self) -> str | None:
        """Return when somebody asks to stop; raise when any part of the server dies before.

        With deploy.idle_timeout also return when there was no request for that time: the reason.
        """
        timeout = self._settings.idle_timeout
        is_idle = None if timeout is None else IdleDetector(self._metrics, timeout)
        while self._stop.received is None:
            if is_idle is not None and is_idle():
                return f"no request for {timeout:g} s (deploy.idle_timeout)"
            self._check()
            if self._gateway is not None:
                self._gateway.poll()
            published = self._ready_files.publish()
            if published is not None:
                print(f"the verdict is GO, published: {published}", flush=True)
            self._ready_files.keep_alive()
            troubles = self._troubles()
            if troubles:
                self._let_backend_say_why()
                raise self._error("; ".join(self._troubles() or troubles))
            time.sleep(_POLL_SECONDS)
        return None

    def _troubles(self) -> list[str]:
        """The watched processes that cannot go on, parents before the children that die of it."""
        return [
            f"{label} (process {pid}) {failure}"
            for pid, label in self._watched.items()
            if (failure := self._failure(pid)) is not None
        ]

    def _failure(self, pid: int) -> str | None:
        """Why a process cannot go on; None while it runs."""
        try:
            state = process_stat(pid).state
        except OSError:
            state = EXITED[0]
        if state in EXITED:
            return "died"
        if state not in SUSPENDED:
            self._suspended.pop(pid, None)
            return None
        since = self._suspended.setdefault(pid, time.monotonic())
        return "is suspended" if time.monotonic() - since > _SUSPENDED_SECONDS else None

    def _timeline(self, statuses: list[ModelStatus]) -> list[Event]:
        """Return the events until now, on every model's side as well."""
        return [
            ("this step was started", round(process_started(), 3)),
            ("the server was started", round(self._server_started, 3)),
            *((f"{s.model}: {event}", at) for s in statuses for event, at in s.timeline),
            ("ready", round(time.time(), 3)),
        ]

    def _let_backend_say_why(self) -> None:
        """The backend may know more of a process's death; raises what it says."""
        deadline = time.monotonic() + _NAMING_SECONDS
        while time.monotonic() < deadline:
            self._check()
            time.sleep(_POLL_SECONDS)

    def _processes(self, statuses: list[ModelStatus]) -> dict[int, str]:
        """pid -> name of every process here that must live as long as the server."""
        watched = {self._process.pid: "the server"}
        members = self._process.members()
        for pid in members:
            with contextlib.suppress(OSError):
                if process_name(pid).startswith("triton_python"):
                    watched[pid] = "a worker of Triton's Python backend"
        for status in statuses:
            for rank in status.ranks:
                if int(rank["pid"]) in members:
                    watched[int(rank["pid"])] = f"rank {rank['rank']} of model {status.model}"
        return watched

    def _check(self) -> list[ModelStatus]:
        """The models' states; raises when one failed or the server ended."""
        has_exited = self._process.exit_code() is not None
        statuses = read_statuses(self._process.status_dir)
        failed = failures(statuses)
        if has_exited:
            log = self._process.errors()
            lost = [REASON] if self._process.lost_worker and not self._watched else []
            failed = [f"the server {self._process.end_reason()}", *failed, *lost, *log]
            for name, port in ports_in_use(self._settings.hosts, self._ports).items():
                key = f"deploy.server.{name}_port (0: a free one)"
                failed.append(problem("a port is in use", got=port, change=key))
        if failed:
            raise self._error("\n".join(failed))
        return statuses

    def _error(self, reason: str) -> ServerError:
        # The reason is the last word: who is shown the end of the job's log sees it.
        log = self._process.tail()
        error = ServerError(f"the end of the server's log:\n{log}\nerror: {reason}")
        error.problems = (reason,)
        return error


def _gateway(
    settings: DeploySettings, ports: Mapping[str, int], folder: Path
) -> GatewayProcess | None:
    options = settings.gateway
    if options is None or GATEWAY not in ports:
        return None
    content = options.settings(
        [str(folder / "gateway-ready.json")],
        gateway_host(settings),
        ports[GATEWAY],
        drain_timeout=settings.stop_timeout,
        public_host=settings.public_host,
    )
    return GatewayProcess(content, folder / "gateway.yaml", settings.restarts, folder / "status")


def _reason(error: ServerError) -> str:
    """Return the reason of a failure, without the log."""
    return "; ".join(error.problems) or str(error)


def _states(statuses: list[ModelStatus]) -> dict[str, str]:
    return {status.model: status.state for status in statuses}


def _absolute(repository: str) -> str:
    """The repository for readers in other working directories."""
    return repository if is_remote(repository) else str(Path(repository).absolute())


Event = tuple[str, float]


def process_started() -> float:
    """When this process was started, in seconds since 1970."""
    return time.time() - seconds_since(process_stat(os.getpid()).started)


def start_table(events: Iterable[Event]) -> str:
    """Each event with the seconds since the first one and since the one before.

    >>> print(start_table([("b", 12.5), ("a", 10.0)]))
      0.00    +0.00  a
      2.50    +2.50  b
    """
    lines = []
    ordered = sorted(events, key=lambda event: event[1])
    before = first = ordered[0][1]
    for message, at in ordered:
        lines.append(f"{at - first:6.2f}  {at - before:+6.2f}  {message}")
        before = at
    return "\n".join(lines)
