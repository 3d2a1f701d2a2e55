"""The gateway as a child process, which is started again when it dies or freezes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.files import has_servers
from launcher_scripts.common.hosts import host_port
from launcher_scripts.common.http_client import HttpClient, any_certificate
from launcher_scripts.common.processes import StopRequest, is_suspended
from launcher_scripts.config.gateway import GatewayJobSettings, GatewaySettings, example_command
from launcher_scripts.config.security import LOOPBACK
from launcher_scripts.config.settings import write_settings
from launcher_scripts.server.addresses import (
    EVERY_ADDRESS,
    GATEWAY,
    ReadyFiles,
    openai_url,
    reserved,
    with_node_address,
)
from launcher_scripts.server.health import check_key
from launcher_scripts.server.process import STATUS_DIR_VARIABLE, ending, start_child

_CHECKOUT = Path(__file__).resolve().parents[2]
_READY, _COMMAND, _DRAINING = "ready: ", "try: ", "draining: "  # how lines of its log begin
_TAIL_LINES = 20
_HEARING_SECONDS = 0.5
_HEALTH_SECONDS = 2.0  # between two questions about its health
_HEALTH_TIMEOUT = 5.0
# Each failure takes seconds. A gateway on a busy machine is only slow; a suspended one is not.
_FAILURES, _SUSPENDED_FAILURES = 6, 1


class _HealthCheck:
    """Asks a gateway whether it lives, over one connection, which no flood of others shuts out.

    failures: how often in a row it has not answered. They are counted, and no time is measured,
    because this process may have been stopped meanwhile.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        host = LOOPBACK if settings.host in EVERY_ADDRESS else settings.host
        scheme, tls = ("https", any_certificate()) if settings.tls_certificate else ("http", None)
        url = f"{scheme}://{host_port(host, settings.port)}"
        self._client = HttpClient(url, _HEALTH_TIMEOUT, tls=tls)
        self.failures = 0
        self._completed = threading.Event()
        threading.Thread(target=self._run, name="gateway's health", daemon=True).start()

    def end(self) -> None:
        self._completed.set()

    def _run(self) -> None:
        while not self._completed.wait(_HEALTH_SECONDS):
            try:
                self._client.request("GET", "/health")
                self.failures = 0
            except OSError:
                self.failures += 1
        self._client.close()


class GatewayProcess:
    """The gateway, by the name `gateway` in the job's log; it is started again when it dies, or
    does not answer.

    It gets its settings by a file. Beside a server it carries the mark of the server's processes,
    so that what ends them ends it.
    """

    def __init__(
        self, settings: GatewaySettings, file: Path, restarts: int, status_dir: Path | None = None
    ) -> None:
        """settings:   with the port to listen on
        file:       where the settings are written
        restarts:   how often it may be started again
        status_dir: of the server beside it
        """
        self.keyed = settings.api_keys is not None
        self.settings = settings
        self._file = file
        self._variables = {} if status_dir is None else {STATUS_DIR_VARIABLE: str(status_dir)}
        self._restarts, self._max_restarts = 0, restarts
        self._draining = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reader: threading.Thread | None = None
        self._health: _HealthCheck | None = None  # once it answers
        self.models: list[str] = []  # those it serves, once it answers

    def start(self) -> None:
        """Write the settings file and start it."""
        write_settings(self.settings, self._file)
        self._launch()

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def poll(self) -> None:
        """Start it again if it has died or is frozen. Raises ServerError where it must not be."""
        reason = self._frozen() or self._completed()
        if reason is None:
            return
        if not self.models or self._restarts >= self._max_restarts:
            raise ServerError(reason)
        self._restarts += 1
        print(
            f"{reason}\nrestart {self._restarts} of {self._max_restarts} of the gateway",
            flush=True,
        )
        self._launch()

    def stop(self, timeout: float) -> None:
        """Let it answer what is running for `timeout` seconds, then end it.

        It is not told a second time, which would end it at once: the end of a job may be told to
        all of its processes.
        """
        if self._process is None:
            return
        self._end_health()
        if not self._draining.wait(_HEARING_SECONDS) and self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"the gateway did not end within {timeout:g} s and is killed", flush=True)
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join(timeout=5)

    def _launch(self) -> None:
        self._end_health()
        self._tail.clear()
        paths = dict.fromkeys([str(_CHECKOUT), *(path for path in sys.path if path)])
        variables = {**self._variables, "PYTHONPATH": os.pathsep.join(paths)}
        module = "launcher_scripts.steps.start_gateway"
        arguments = [sys.executable, "-m", module, "--settings", str(self._file)]
        self._process, self._reader = start_child(arguments, variables, self._repeat_log)

    def _end_health(self) -> None:
        if self._health is not None:
            self._health.end()
        self._health = None

    def _frozen(self) -> str | None:
        """Kill it if it does not answer; how that was, None while it does."""
        if self.pid is None or self._health is None:
            return None
        suspended = is_suspended(self.pid)
        max_failures = _SUSPENDED_FAILURES if suspended else _FAILURES
        if self._health.failures < max_failures or self._process is None:
            return None
        self._process.kill()
        self._process.wait()
        state = " and is suspended" if suspended else ""
        return f"the gateway (process {self._process.pid}) does not answer /health{state}: killed"

    def _completed(self) -> str | None:
        """Describe its end, with its last lines; None while it runs, or was not started."""
        if self._process is None or self._process.poll() is None:
            return None
        if self._reader is not None:
            self._reader.join(timeout=1)
        tail = "".join(f"\n{line}" for line in self._tail)
        reason = ending(self._process.returncode)
        return f"the gateway (process {self._process.pid}) {reason}{tail}"

    def _repeat_log(self, log: IO[str]) -> None:
        """Repeat its log as the job's output, but for its address, which the server gives."""
        for written in log:
            line = written.rstrip("\n")
            self._tail.append(line)
            if line.startswith(_READY):
                self.models = json.loads(line.removeprefix(_READY))["models"]
                self._health = _HealthCheck(self.settings)
            if line.startswith(_DRAINING):
                self._draining.set()
            if line.startswith((_READY, _COMMAND)):
                continue
            # A closed terminal must not stop the reading: the gateway would block on a full pipe.
            with contextlib.suppress(OSError, ValueError):
                print(f"gateway: {line}", flush=True)


_POLL_SECONDS = 0.2
_END_SECONDS = 5.0  # for the gateway to end when its requests have had their time


def serve_gateway(settings: GatewayJobSettings) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, and answer what is running then.

    With settings.idle_timeout it also ends when there was no server for that time.

    The ready file has the address once the gateway answers. Raises ServerError with the end of its
    log when it cannot start, and when it dies once more than settings.restarts.
    """
    settings = with_node_address(settings)
    host = str(settings.host)
    ready_files = ReadyFiles(settings)
    ready_files.prepare()
    stop = StopRequest()
    requested = (GATEWAY, host, settings.gateway.port or 0, f"{settings.stage}.port")
    with stop.listening(), reserved([requested]) as ports:
        process = _process(settings, host, ports[GATEWAY])
        try:
            process.start()
            while stop.received is None and not process.models:
                process.poll()
                time.sleep(_POLL_SECONDS)
            if process.models:
                url = openai_url(settings, host, ports[GATEWAY])
                if process.keyed:
                    check_key(url, process.models[0], process.settings)
                _announce(settings, url, process, ready_files)
            timeout, served_at = settings.idle_timeout, time.monotonic()
            while stop.received is None:
                process.poll()
                ready_files.keep_alive()
                if timeout is not None:
                    if has_servers(map(Path, settings.ready)):
                        served_at = time.monotonic()
                    elif time.monotonic() - served_at >= timeout:
                        break
                time.sleep(_POLL_SECONDS)
            idle = "no server is left (deploy.idle_timeout)"
            print(f"stopping the gateway: {stop.name if stop.received else idle}", flush=True)
        finally:
            ready_files.remove()
            process.stop(settings.stop_timeout + _END_SECONDS)


def _process(settings: GatewayJobSettings, host: str, port: int) -> GatewayProcess:
    options = settings.gateway.settings(
        settings.ready,
        host,
        port,
        drain_timeout=settings.stop_timeout,
        ready_timeout=settings.ready_timeout,
        tokenizer_dir=settings.tokenizer_dir,
        public_host=settings.public_host,
    )
    folder = Path(settings.job_folder or settings.results_dir)
    return GatewayProcess(options, folder / "gateway.yaml", settings.restarts)


def _announce(
    settings: GatewayJobSettings, url: str, process: GatewayProcess, ready_files: ReadyFiles
) -> None:
    job = {"folder": settings.job_folder, "id": os.environ.get("SLURM_JOB_ID")}
    content = {"openai": url, "models": process.models, "ready": settings.ready, "job": job}
    command = example_command(url, process.models[0], keyed=process.keyed)
    print(f"try: {command}", flush=True)
    ready_files.write(content)
    print(f"ready: {json.dumps(content)}", flush=True)
