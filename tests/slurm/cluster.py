"""A real Slurm cluster of virtual nodes on this machine, for tests.

    python3 -m tests.slurm.cluster start --root /tmp/cluster --nodes 2
    export SLURM_CONF=/tmp/cluster/etc/slurm.conf
    srun --nodes=2 hostname
    python3 -m tests.slurm.cluster stop --root /tmp/cluster

Everything lies under --root; several clusters can run side by side. Needs Debian's slurm-wlm,
munge, libpmix-dev, libslurm-dev and gcc; no privileges.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import alive, command_line, end, processes, read, variables, wait_for
from tests.slurm.accounting import (
    ACCOUNTING_PACKAGES,
    ACCOUNTING_PROGRAMS,
    start_database,
    write_accounting,
)
from tests.slurm.configuration import Paths, write_configuration

LAST_MOMENT = 10.0  # seconds that an ended job's last process may take to go

_PACKAGES = "slurm-wlm munge libpmix-dev libslurm-dev gcc libc6-dev"
_SPANK_SOURCE = Path(__file__).parent / "spank" / "pyxis_double.c"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "gcc")
_LONGEST_SOCKET_PATH = 107
_USABLE = ("idle", "mixed", "allocated", "completing")
_SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class ClusterFailure(Exception):
    """The cluster did not do what it should; the message has the daemons' last words."""


def missing_requirements(with_accounting: bool = False) -> str:
    """What this machine lacks for a cluster, and what to do about it; empty for nothing."""
    if not any(Path("/sys/fs/cgroup").glob("*")):
        return "this machine has no cgroup file system at /sys/fs/cgroup, which slurmd wants"
    programs = [*_PROGRAMS, *(ACCOUNTING_PROGRAMS if with_accounting else ())]
    missing = [name for name in programs if shutil.which(name, path=_SEARCH_PATH) is None]
    if not Path("/usr/include/slurm/spank.h").exists():
        missing.append("slurm/spank.h")
    packages = f"{_PACKAGES} {ACCOUNTING_PACKAGES}" if with_accounting else _PACKAGES
    return f"this machine lacks {', '.join(missing)}: apt-get install {packages}" if missing else ""


def started_nodes(root: Path) -> int:
    """How many nodes the cluster under `root` was started with; 0 for none."""
    return len(list((root / "run").glob("slurmd-*.pid")))


@dataclass(frozen=True)
class TestCluster:
    """A cluster under `root` with nodes n1, n2, ... that pretend to have `gpus` GPUs each.

    accounting: whether sacct knows the jobs, through slurmdbd and a database
    """

    __test__ = False

    root: Path
    nodes: int = 2
    gpus: int = 8
    accounting: bool = False

    @property
    def paths(self) -> Paths:
        return Paths(self.root)

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which Slurm's commands speak to this cluster."""
        outside = ("SLURM_", "SBATCH_", "SRUN_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        return {**kept, "SLURM_CONF": str(self.paths.slurm_conf)}

    @property
    def daemons(self) -> list[str]:
        """The daemons in the order in which they start."""
        accounting = ["mariadbd", "slurmdbd"] if self.accounting else []
        slurmds = [f"slurmd-n{number}" for number in range(1, self.nodes + 1)]
        return ["munged", *accounting, "slurmctld", *slurmds]

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster; its output comes back as text."""
        options = {"env": self.environment, "timeout": 120, **options}
        return subprocess.run(argv, capture_output=True, text=True, check=False, **options)

    def start(self, timeout: float = 180) -> None:
        """Bring every daemon up and wait until all nodes are idle; does nothing when they are."""
        missing = missing_requirements(self.accounting)
        if missing:
            raise ClusterFailure(missing)
        if self.is_up():
            return
        if len(bytes(self.paths.munge_socket)) > _LONGEST_SOCKET_PATH:
            raise ClusterFailure(f"{self.root} is too long a path for sockets: choose another root")
        self.stop()
        write_configuration(self.paths, self.nodes, self.gpus)
        if self.accounting:
            write_accounting(self.paths)
        self._build_spank_plugin()
        try:
            for daemon in self.daemons:
                self.start_daemon(daemon)
                if daemon == "slurmdbd":
                    self._register()
            wait_for(self.is_up, timeout, lambda: f"no idle nodes: {self._last_words()}")
        except (ClusterFailure, TimeoutError):
            self.stop()
            raise

    def is_up(self) -> bool:
        """Whether every daemon runs and every node takes jobs."""
        if not all(self.pid(daemon) for daemon in self.daemons):
            return False
        states = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=batch")
        fine = [line for line in states.stdout.splitlines() if line.split()[1] in _USABLE]
        return states.returncode == 0 and len(fine) == self.nodes

    def stop(self, timeout: float = 120) -> None:
        """End jobs, then daemons; whatever does not end in time is killed."""
        run = self.root / "run"
        if self.pid("slurmctld") and self.pid("munged"):
            self.cancel_all(timeout / 2)
        for program in ("slurmd", "slurmctld", "slurmdbd", "munged", "mariadbd"):
            for path in [*run.glob(f"{program}.pid"), *run.glob(f"{program}-*.pid")]:
                pid = self.pid(path.stem)
                if pid is not None:
                    end(pid, timeout)
                path.unlink(missing_ok=True)
        for pid in [*self.step_daemons(), *self.job_processes()]:
            end(pid, timeout=0)

    def cancel_all(self, timeout: float = 60) -> None:
        """Cancel every job and wait until nothing of them runs, or until the time is over."""
        self.run("scancel", "--user", str(os.getuid()))
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not self.step_daemons(), timeout)

    def wait(self, job_id: str, timeout: float = 600) -> dict[str, str]:
        """Wait for a job's end; returns its fields as scontrol shows them."""
        unfinished = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        wait_for(lambda: self.job(job_id).get("JobState") not in unfinished, timeout)
        return self.job(job_id)

    def job(self, job_id: str) -> dict[str, str]:
        """A job's fields as scontrol shows them; none when it knows no such job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout
        return dict(item.split("=", 1) for item in shown.split() if "=" in item)

    def pid(self, daemon: str) -> int | None:
        """The daemon's process id; None when it does not run, whatever its pid file says."""
        try:
            pid = int(self.paths.pid_file(daemon).read_text())
        except (OSError, ValueError):
            return None
        name = read(Path(f"/proc/{pid}/comm")).decode().strip()
        return pid if alive(pid) and name == daemon.split("-")[0] else None

    def step_daemons(self) -> list[int]:
        """The slurmstepd processes of this cluster: those that have its spank plugin loaded."""
        plugin = str(self.paths.pyxis_double)
        return [
            pid
            for pid, folder in processes()
            if read(folder / "comm").startswith(b"slurmstepd")
            and plugin.encode() in read(folder / "maps")
        ]

    def step_daemon(self, job_id: str, step: str) -> int:
        """The slurmstepd of a step: `slurmstepd: [7.0]`, or `[7.batch]` of the script."""
        (found,) = (pid for pid in self.step_daemons() if f"[{job_id}.{step}]" in command_line(pid))
        return found

    def job_processes(self, job_id: str | None = None) -> list[int]:
        """The processes of this cluster's jobs, or of one job: what a clean end leaves none of."""
        conf = f"SLURM_CONF={self.paths.slurm_conf}".encode()
        job = b"SLURM_JOB_ID=" + (job_id or "").encode()
        found = []
        for pid, _ in processes():
            environment = variables(pid)
            ours = conf in environment and any(item.startswith(job) for item in environment)
            if ours and (job_id is None or job in environment):
                found.append(pid)
        return found

    def left_processes(self, job_id: str | None = None) -> list[str]:
        """Command lines of processes that outlive their jobs.

        What Slurm has just ended may be there for a moment: it tells of a job's end before the
        kernel has removed the last process.
        """
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not self.job_processes(job_id), timeout=LAST_MOMENT)
        return [command_line(pid) for pid in self.job_processes(job_id)]

    def pyxis_record(self) -> list[dict[str, Any]]:
        """What the SPANK test double has seen so far."""
        path = self.paths.pyxis_record
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def containers(self) -> list[str]:
        """<node>/<name> of the containers that lie on the nodes."""
        found = self.paths.containers.glob("*/*")
        return sorted(str(path.relative_to(self.paths.containers)) for path in found)

    def _build_spank_plugin(self) -> None:
        target = self.paths.pyxis_double
        command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(target)]
        built = subprocess.run(
            [*command, str(_SPANK_SOURCE)], capture_output=True, text=True, check=False
        )
        if built.returncode != 0:
            raise ClusterFailure(f"{_SPANK_SOURCE.name} does not compile:\n{built.stderr}")

    def _register(self) -> None:
        """Make the cluster known to the accounting daemon, which takes a moment to listen."""

        def known() -> bool:
            self.run("sacctmgr", "--immediate", "add", "cluster", "test")
            return "test" in self.run("sacctmgr", "--noheader", "show", "cluster").stdout

        wait_for(known, 20, lambda: f"slurmdbd does not answer: {self._last_words()}")

    def start_daemon(self, daemon: str) -> None:
        """Start one of `daemons`, and wait until its process is there."""
        environment = {**self.environment, "PATH": _SEARCH_PATH}
        if daemon == "mariadbd":
            start_database(self.paths, environment)
        else:
            started = self.run(*_daemon_argv(self.paths, daemon), env=environment)
            if started.returncode != 0:
                raise ClusterFailure(f"{daemon} ended: {started.stderr}{self._last_words()}")
        wait_for(
            lambda: self.pid(daemon) is not None,
            20,
            lambda: f"{daemon} did not start: {self._last_words()}",
        )

    def _last_words(self) -> str:
        """The errors in the daemons' logs."""
        words = []
        for path in sorted((self.root / "log").glob("*.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if "error" in line.lower() or "fatal" in line]
            words += [f"{path.name}: {line}" for line in errors[-5:]]
        return "\n".join(["", *words])


def _daemon_argv(paths: Paths, daemon: str) -> list[str]:
    """The command that puts a daemon into the background."""
    program, _, node = daemon.partition("-")
    if program == "slurmd":
        return [program, "-N", node]
    if program != "munged":
        return [program]
    return [
        program,
        "--force",  # the folder of the socket need not be open to other users
        f"--key-file={paths.munge_key}",
        f"--socket={paths.munge_socket}",
        f"--pid-file={paths.pid_file(daemon)}",
        f"--log-file={paths.log(daemon)}",
        f"--seed-file={paths.root}/run/munged.seed",
        "--num-threads=2",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tests.slurm.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("start", "stop", "status"))
    parser.add_argument("--root", type=Path, required=True, help="folder of the cluster")
    parser.add_argument("--nodes", type=int, default=2, help="number of virtual nodes")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs each node pretends to have")
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd, for sacct")
    options = parser.parse_args(argv)
    root = options.root.absolute()
    nodes = options.nodes if options.action == "start" else started_nodes(root)
    cluster = TestCluster(root, nodes, options.gpus, options.accounting)
    if options.action == "stop":
        cluster.stop()
        return 0
    try:
        if options.action == "start":
            cluster.start()
    except (ClusterFailure, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    running = cluster.nodes > 0 and cluster.is_up()
    print(f"{'up' if running else 'down'}: {cluster.nodes} nodes under {cluster.root}")
    if running:
        print(f"export SLURM_CONF={cluster.paths.slurm_conf}")
    return 0 if running else 1


if __name__ == "__main__":
    sys.exit(main())
