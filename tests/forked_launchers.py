"""Launchers that are forked from a process that has imported and parsed what all of them do.

That is most of what a launcher costs. tests/login/test_entry.py starts one as a user does, and so
do the tests that send it signals.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.processes import signal_when_parent_dies

CHECKOUT = Path(__file__).resolve().parents[1]
TIMEOUT = 300


@dataclass(frozen=True)
class Order:
    """What a launcher is started with, and where its two outputs go."""

    script: str
    arguments: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    outputs: tuple[str, str]


class ForkedLaunchers:
    """Runs launchers, each in a process of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="launchers-")  # a socket's path is short
        self._address = str(Path(self._folder.name, "socket"))
        self._listening = socket.create_server(self._address, family=socket.AF_UNIX)
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._listening.fileno())],
            cwd=CHECKOUT,
            pass_fds=[self._listening.fileno()],
        )

    def run(
        self, *arguments: str, script: Path, cwd: Path, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """What `python3 script arguments` does, prints and ends with."""
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            outputs = (f"{folder}/out", f"{folder}/err")
            order = Order(str(script), arguments, str(cwd), env, outputs)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(TIMEOUT)
                connection.connect(self._address)
                connection.sendall(json.dumps(asdict(order)).encode() + b"\n")
                code = int(connection.makefile().readline())
            said = [Path(path).read_text(encoding="utf-8") for path in outputs]
        return subprocess.CompletedProcess([order.script, *arguments], code, *said)

    def close(self) -> None:
        self._listening.close()
        self._server.terminate()
        self._server.wait()
        self._folder.cleanup()


def next_order(listening: socket.socket) -> dict[str, Any]:
    """An order, in a process of its own; its exit code goes back to whoever gave the order."""
    while True:
        connection, _ = listening.accept()
        with connection:
            if not os.fork():
                order: dict[str, Any] = json.loads(connection.makefile().readline())
                launcher = os.fork()
                if not launcher:
                    return order
                code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
                connection.sendall(f"{code}\n".encode())
                os._exit(0)
        while os.waitpid(-1, os.WNOHANG)[0]:
            """Those that have ended."""


def import_all() -> None:
    """What every launcher imports, and the grammars' tables, which grow with what is parsed."""
    from hydra import compose, initialize_config_dir

    import main

    main.register()
    with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
        compose("config", ["stages=[export,deploy,evaluate]", "cluster_type=bcm"])


def serve(listening: socket.socket) -> None:
    """Until the tests end; returns in every launcher, as one that a shell has started."""
    signal_when_parent_dies(signal.SIGTERM)
    import_all()
    order = next_order(listening)
    listening.close()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for number, path in enumerate(order["outputs"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = [order["script"], *order["arguments"]]
    sys.path[0] = str(Path(order["script"]).parent)
    runpy.run_path(order["script"], run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
