"""A gateway in a job of its own, from start to end: one before all servers of a deployment."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from launcher_scripts.common.processes import StopRequest
from launcher_scripts.common.ready_file import has_servers
from launcher_scripts.config.gateway import example_command
from launcher_scripts.config.settings import GatewayJobSettings
from launcher_scripts.server.addresses import openai_url, with_node_address
from launcher_scripts.server.gateway_process import GatewayProcess
from launcher_scripts.server.port_probe import check_key
from launcher_scripts.server.ports import GATEWAY, reserved
from launcher_scripts.server.ready_files import ReadyFiles

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
    wanted = (GATEWAY, host, settings.gateway.port or 0, f"{settings.stage}.port")
    with stop.listening(), reserved([wanted]) as ports:
        process = _process(settings, host, ports[GATEWAY])
        try:
            process.start()
            while stop.received is None and not process.models:
                process.look()
                time.sleep(_POLL_SECONDS)
            if process.models:
                url = openai_url(settings, host, ports[GATEWAY])
                if process.keyed:
                    check_key(url, process.models[0], process.settings)
                _announce(settings, url, process, ready_files)
            timeout, served_at = settings.idle_timeout, time.monotonic()
            while stop.received is None:
                process.look()
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
    told = settings.gateway.settings(
        settings.ready,
        host,
        port,
        drain_timeout=settings.stop_timeout,
        ready_timeout=settings.ready_timeout,
        tokenizer_dir=settings.tokenizer_dir,
        public_host=settings.public_host,
    )
    folder = Path(settings.job_folder or settings.results_dir)
    return GatewayProcess(told, folder / "gateway.yaml", settings.restarts)


def _announce(
    settings: GatewayJobSettings, url: str, process: GatewayProcess, ready_files: ReadyFiles
) -> None:
    job = {"folder": settings.job_folder, "id": os.environ.get("SLURM_JOB_ID")}
    facts = {"openai": url, "models": process.models, "ready": settings.ready, "job": job}
    command = example_command(url, process.models[0], keyed=process.keyed)
    print(f"try: {command}", flush=True)
    ready_files.write(facts)
    print(f"ready: {json.dumps(facts)}", flush=True)
