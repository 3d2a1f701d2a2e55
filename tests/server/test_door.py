"""Who gets an answer from a server whose gateway has keys: every port, every path, every user."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import tritonclient.grpc as triton

from launcher_scripts.clients.connection import channel_arguments
from launcher_scripts.clients.model_client import open_client
from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.http_client import UNIX, query
from launcher_scripts.config.gateway import OPEN_PATHS, DeployedGateway, GatewaySettings
from launcher_scripts.config.settings import BenchmarkSettings, EvaluateSettings
from launcher_scripts.jobs.status import ServerLoad, is_ready, load_of
from launcher_scripts.server.health import PATHS, check_closed, check_key, listening, open_answers
from tests.gateway.processes import gateway
from tests.http_requests import metric_families, send
from tests.processes import command_line, wait_for
from tests.server.processes import CHECKOUT, RunningStep, running
from tests.server.repositories import export, text_config

KEY = "sk-of-the-tests"
NOBODY = 65534
MODEL = "tiny"
DOCUMENT = CHECKOUT / "docs" / "security.md"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"tests={KEY}\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def closed(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStep]:
    """A server whose gateway wants a key."""
    folder = tmp_path_factory.mktemp("closed")
    repository = export(folder, text_config(), name=MODEL, decoupled=True).model_repository
    with running(
        folder / "job", repository, gateway=DeployedGateway(port=0, api_keys=str(keys))
    ) as step:
        modes: set[str] = set()

        def look() -> bool:
            for region in step.shared_memory():
                with contextlib.suppress(FileNotFoundError):
                    modes.add(oct(region.stat().st_mode & 0o777))
            return step.settings.ready_file.exists() or step.finished()

        wait_for(look, 300, step.said)
        step.wait_until_ready()
        assert modes == {"0o600"}  # Triton's shared memory has names until the server is ready
        yield step
        assert step.stop() == 0, step.err


def grpc_calls(client: Any) -> dict[str, Callable[[], Any]]:
    """One call of every part of Triton's interface."""
    ids = triton.InferInput("input_ids", [1, 2], "UINT32")
    ids.set_data_from_numpy(np.ones((1, 2), np.uint32))
    limit = {"client_timeout": 60.0}
    return {
        "ServerReady": lambda: client.is_server_ready(**limit),
        "ServerMetadata": lambda: client.get_server_metadata(**limit),
        "ModelConfig": lambda: client.get_model_config(MODEL, **limit),
        "ModelStatistics": lambda: client.get_inference_statistics(MODEL, **limit),
        "RepositoryIndex": lambda: client.get_model_repository_index(**limit),
        "SystemSharedMemoryStatus": lambda: client.get_system_shared_memory_status(**limit),
        "TraceSetting": lambda: client.get_trace_settings(**limit),
        "LogSettings": lambda: client.get_log_settings(**limit),
        "ModelInfer": lambda: client.infer(MODEL, [ids], **limit),
    }


def grpc_outcomes(address: str) -> dict[str, str]:
    """Call -> whether the server answers it; a refusal of the call's content is an answer."""
    outcomes = {}
    with triton.InferenceServerClient(**channel_arguments(address, None)) as client:
        for name, call in grpc_calls(client).items():
            try:
                call()
                outcomes[name] = "answers"
            except Exception as error:
                reached = "failed to connect" not in str(error)
                outcomes[name] = "answers" if reached else "no connection"
    return outcomes


def gateway_status(openai: str, method: str, path: str, key: str | None) -> int:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    if "chat" in path:
        body = {"model": MODEL, "messages": [], "max_tokens": 1}
    content = body if method == "POST" else None
    return send(f"{urlsplit(openai).netloc}{path}", content, key=key, method=method).status_code


def port_table(ready: dict[str, Any]) -> str:
    """Port, path, and what comes without and with the key, of the running server."""
    rows = []
    opens = [("GET", path) for path in sorted(OPEN_PATHS)]
    for method, path in (*opens, *(each for each in PATHS if each[1] not in OPEN_PATHS)):
        if path.startswith("/v2"):
            continue
        found = [gateway_status(ready["openai"], method, path, key) for key in (None, KEY)]
        rows.append(("gateway", f"{method} {path}", *map(str, found)))
    plain, secret = (grpc_outcomes(each) for each in (ready["grpc"].split("#")[0], ready["grpc"]))
    rows += [("Triton's gRPC", name, plain[name], secret[name]) for name in secret]
    for name in ("http", "metrics"):
        address = ready["listens_on"][name]
        folder = Path(address.removeprefix(UNIX)).parent
        for method, template in PATHS:
            path = template.format(model=MODEL)
            if (path == "/metrics") != (name == "metrics") or path.startswith("/v1"):
                continue
            if name == "http" and not path.startswith("/v2"):
                continue
            query(address, path, 60.0, method=method)  # any status is an answer
            others = "no connection" if folder.stat().st_mode & 0o077 == 0 else "answers"
            rows.append((f"Triton's {name} socket", f"{method} {template}", others, "answers"))
    lines = ["| port | request | without | with |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


@pytest.mark.usefixtures("tritonserver")
def test_the_documents_table_is_what_a_running_server_does(closed: RunningStep) -> None:
    table = port_table(closed.ready)
    assert table in DOCUMENT.read_text(encoding="utf-8"), f"docs/security.md needs\n{table}"


@pytest.mark.usefixtures("tritonserver")
def test_nothing_listens_on_the_network_but_grpc_and_the_gateway(closed: RunningStep) -> None:
    pids = [pid for pid, _ in closed.survivors()]
    ready = closed.ready
    known = {int(ready["grpc"].split("#")[0].rpartition(":")[2]), urlsplit(ready["openai"]).port}
    assert {port for _, port in listening(pids)} >= known
    for host, port in listening(pids):
        said = list(open_answers(host, port, MODEL))
        assert port in known or said == []
        assert all(path in OPEN_PATHS for _, path, _ in said)
    assert "http" not in ready and "metrics" not in ready


@pytest.mark.usefixtures("tritonserver")
def test_other_users_of_the_node_learn_and_reach_nothing(closed: RunningStep) -> None:
    ready = closed.ready
    pem = unquote(ready["grpc"].split("#")[1])
    secret = Path(pem).read_text().splitlines()[1]
    for pid, command in closed.survivors():
        assert secret not in command and KEY not in command
        assert secret not in command_line(pid)
    assert secret not in closed.said() and KEY not in closed.said()
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    sockets = [ready["listens_on"][name].removeprefix(UNIX) for name in ("http", "metrics")]
    files = [pem, *(f"/proc/{pid}/environ" for pid, _ in closed.survivors())]
    program = f"""
import os, socket, sys
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
for path, use in [(path, open) for path in {files}] + [
    (path, socket.socket(socket.AF_UNIX).connect) for path in {sockets}
]:
    try:
        use(path)
    except PermissionError:
        continue
    sys.exit(f"another user may use {{path}}")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("tritonserver")
def test_nobody_else_may_open_what_the_server_makes(closed: RunningStep) -> None:
    """Triton's shared memory has prompts, and its name from the start until the server is ready."""
    children = [pid for pid, _ in closed.survivors() if pid != closed.process.pid]
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in children]
    assert len(statuses) >= 3  # the server, its workers and the gateway
    assert all("\nUmask:\t0077\n" in status for status in statuses)


@pytest.mark.usefixtures("tritonserver")
def test_prometheus_scrapes_a_closed_server_with_a_key(closed: RunningStep) -> None:
    address = urlsplit(closed.ready["openai"]).netloc
    server = closed.ready["grpc"].partition("#")[0]

    def families() -> dict[str, Any]:
        return metric_families(f"{address}/servers/metrics", key=KEY)

    wait_for(lambda: "launcher_num_requests_running" in families())  # the fleet has looked at it
    found = families()
    assert found["nv_inference_request_success"].type == "counter"
    (sample,) = found["launcher_num_requests_running"].samples
    assert sample.labels == {"server": server, "model_name": MODEL}
    # Whoever may not read the keys sees no load.
    assert load_of({**closed.ready, "api_keys": "/nowhere"}) == ServerLoad()


@pytest.mark.usefixtures("tritonserver")
def test_our_own_clients_come_in_by_the_ready_file(closed: RunningStep, tmp_path: Path) -> None:
    file = closed.settings.ready_file
    settings = EvaluateSettings(
        ready_file=str(file),
        results_dir=str(tmp_path),
        model_name=MODEL,
        tokenizer_dir="",
        benchmark=BenchmarkSettings(),
        protocol="http",
    )
    client, ready = open_client(settings)
    with client:
        assert ready["protocol"] == "grpc"
        assert client.requests_received() >= 1
    assert is_ready(closed.ready)
    assert load_of(closed.ready).running == 0
    with gateway(tmp_path / "another", "--ready", str(file)) as started:
        said = gateway_status(started.facts["openai"], "POST", "/v1/completions", None)
        assert said == 200


class _OpenDoor(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 401)
        self.end_headers()

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_a_port_that_answers_without_a_key_is_named() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OpenDoor) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        with pytest.raises(
            ServerError, match=rf"127.0.0.1:{port} answers GET /metrics .*got '200'"
        ):
            check_closed([os.getpid()], MODEL)
        check_closed([os.getpid()], MODEL, gateway_port=port)
        server.shutdown()


def test_grpc_in_plain_text_is_an_open_port() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert [each for each in open_answers("127.0.0.1", port, MODEL) if each[0] == "gRPC"]
    finally:
        server.stop(None)


def test_a_gateway_that_is_not_reached_by_its_published_address_fails_the_start(
    keys: Path,
) -> None:
    settings = GatewaySettings(("ready.json",), api_keys=str(keys))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    with pytest.raises(ServerError, match=r"published address .*deploy.server.public_host"):
        check_key(f"http://127.0.0.1:{port}/v1", MODEL, settings)
