"""Servers as somebody would start them by hand, without a step of this project around them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher_scripts.server.addresses import PORT_NAMES
from launcher_scripts.server.installation import OUR_PROGRAMS
from tests.http_requests import is_served
from tests.processes import wait_for
from tests.slurm.configuration import free_ports


class WrappedServer:
    """`<launching command> tritonserver --model-repository ...` for each of `nodes` processes.

    With a launching command it is started once, and starts the processes itself. Nodes that are
    really one machine need ports of their own, which `$NODE` (a shell expression) chooses.
    """

    def __init__(
        self,
        folder: Path,
        repository: Path,
        env: Mapping[str, str],
        launching: Sequence[str] = (),
        node: str = "0",
        nodes: int = 1,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ports = free_ports(3 * nodes)
        self.log = folder / f"server-{node if node.isdigit() else 'all'}.log"
        options = [
            "tritonserver",
            f"--model-repository={repository}",
            *(f"--{name}-address=127.0.0.1" for name in PORT_NAMES),
        ]
        programs = (OUR_PROGRAMS, Path(sys.executable).parent, env["PATH"])
        path = os.pathsep.join(map(str, programs))
        numbers = " ".join(map(str, self.ports))
        script = (
            f'ports=({numbers}); first=$((3 * ({node}))); exec "$@" '
            + " ".join(
                f"--{name}-port=${{ports[first + {i}]}}" for i, name in enumerate(PORT_NAMES)
            )
            + f" --backend-config=python,shm-region-prefix-name=wrapped{os.getpid()}_"
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*launching, "bash", "-c", script, "bash", *options],
                env={**env, "PATH": path, "TMPDIR": str(folder), "LAUNCHER_DEVICE": "cpu"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ready(self, node: int = 0) -> bool:
        return is_served(f"127.0.0.1:{self.ports[3 * node]}/v2/health/ready")

    def wait_until_ready(self) -> dict[str, str]:
        """The addresses, as a ready file has them."""
        wait_for(lambda: self.ready() or self.process.poll() is not None, said=self.log.read_text)
        assert self.process.poll() is None, self.log.read_text()
        return {name: f"127.0.0.1:{self.ports[i]}" for i, name in enumerate(PORT_NAMES)}

    def wait(self, timeout: float = 180) -> int:
        return self.process.wait(timeout)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for region in Path("/dev/shm").glob(f"wrapped{os.getpid()}_*"):
            region.unlink(missing_ok=True)
