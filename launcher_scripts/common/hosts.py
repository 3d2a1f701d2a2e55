"""This node: its rank among the nodes of a server, and its GPUs; and this launcher on a cluster's
login node, over the system's ssh.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher_scripts.common.errors import ClusterError, ConfigError, Problems, ServerError, problem
from launcher_scripts.common.processes import CHECKOUT


@dataclass(frozen=True)
class Launcher:
    """The environment variables with which a launching program numbers its processes.

    rank, size:   variables with this process's number and how many there are
    per_node:     variable with the number of processes on this node, where there is one
    node_count:   variable with the number of nodes, where there is one
    run:          variables that together name this run; "" stands for one that is not set
    needs:        a variable without which the others do not mean this
    """

    name: str
    rank: str
    size: str
    run: tuple[str, ...]
    per_node: str | None = None
    node_count: str | None = None
    needs: str | None = None


# What mpirun hands on of a binding that was asked for.
_BINDINGS = ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy")
# The innermost first: mpirun may itself run inside a Slurm job.
LAUNCHERS = (
    Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "NGC_JOB_ID"),
        per_node="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "srun (Slurm)",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        node_count="SLURM_STEP_NUM_NODES",
        needs="SLURM_STEP_ID",
    ),
    Launcher("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", ("PMI_JOBID", "HYDI_CONTROL_FD")),
    Launcher(
        "bcprun",
        "RANK",
        "WORLD_SIZE",
        ("NGC_JOB_ID", "MASTER_PORT"),
        per_node="LOCAL_WORLD_SIZE",
        needs="NGC_JOB_ID",
    ),
)
PMIX_RANK = "PMIX_RANK"

# What the program that starts a server tells the backend inside of it.
RENDEZVOUS_VARIABLE = "LAUNCHER_RENDEZVOUS"  # the folder where the nodes find rank 0
INTERFACE_VARIABLE = "LAUNCHER_INTERFACE"  # the network interface between the ranks
ATTEMPT_VARIABLE = "LAUNCHER_ATTEMPT"  # how often the server was started again before
HINT = "the command that starts the server: one task per node, as in srun -N 2 -n 2 --mpi=pmix"


@dataclass(frozen=True)
class NodeRank:
    """This process among those of one server; node 0 serves.

    launcher: what started them
    run:      names this start of the server, the same on every node
    """

    node: int = 0
    nodes: int = 1
    launcher: str = "nothing"
    run: str = "alone"

    @property
    def serves(self) -> bool:
        return self.node == 0


SINGLE_NODE = NodeRank()


def find_node_rank(env: Mapping[str, str]) -> NodeRank:
    """This process's node rank, from the environment; a process that nothing launched is alone.

    Raises ServerError naming the variables that contradict each other.
    """
    launchers = [
        row for row in LAUNCHERS if row.rank in env and (not row.needs or row.needs in env)
    ]
    if not launchers:
        return SINGLE_NODE
    problems = Problems("the environment of this server's process")
    row = launchers[0]
    rank, size = (_number(env, name, problems) for name in (row.rank, row.size))
    problems.raise_if_any(ServerError)
    if not rank < size:
        problems.add(f"{row.rank} must be below {row.size} = {size}", got=rank, change=HINT)
    _check_one_per_node(env, row, size, problems)
    _check_others(env, launchers, rank, size, problems)
    problems.raise_if_any(ServerError)
    if size == 1:
        return NodeRank(launcher=row.name)
    run = "-".join(re.sub(r"[^\w.]", "_", env.get(name, "")) for name in row.run)
    return NodeRank(rank, size, row.name, run)


def unbind_from_core(env: Mapping[str, str]) -> str | None:
    """Give this process all CPUs of its job where mpirun has bound it to a core, which is what
    mpirun does with one or two processes unless it is told otherwise: a server, its models and its
    ranks would share that core. Returns a note, or None if nothing was changed.
    """
    is_single = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    if not is_single or any(name in env for name in _BINDINGS):
        return None
    before = os.sched_getaffinity(0)
    # The kernel leaves out the CPUs that the job's cpuset does not have.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    after = os.sched_getaffinity(0)
    if after == before:
        return None
    return (
        f"mpirun bound this server to {len(before)} of {len(after)} CPUs: it uses all of them "
        "(mpirun --bind-to keeps a binding)"
    )


def address_towards(host: str) -> str:
    """The address that this node's packets to `host` carry (IPv4); nothing is sent.

    Raises OSError where there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def host_port(host: str, port: int | None) -> str:
    """host:port, with an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_name(env: Mapping[str, str]) -> str:
    """This node as its cluster calls it."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def _check_one_per_node(
    env: Mapping[str, str], row: Launcher, size: int, problems: Problems
) -> None:
    """A server has all GPUs of its node, so a second one beside it cannot be meant."""
    if (
        row.per_node is not None
        and row.per_node in env
        and _number(env, row.per_node, problems) > 1
    ):
        got = f"{row.per_node}={env[row.per_node]}"
        problems.add(f"{row.name} started several servers on this node", got=got, change=HINT)
    if row.node_count is not None and row.node_count in env:
        nodes = _number(env, row.node_count, problems)
        if nodes != size:
            got = f"{row.size}={size}, {row.node_count}={nodes}"
            problems.add("there must be as many tasks as nodes", got=got, change=HINT)


def _check_others(
    env: Mapping[str, str], launchers: list[Launcher], rank: int, size: int, problems: Problems
) -> None:
    """Two launchers must not disagree: then variables of one have leaked into the other.

    mpirun starts its own helpers through srun, so fewer Slurm tasks than ranks are normal there.
    """
    row = launchers[0]
    if PMIX_RANK in env and _number(env, PMIX_RANK, problems) != rank:
        got = f"{row.rank}={rank}, {PMIX_RANK}={env[PMIX_RANK]}"
        problems.add(f"{row.name} and PMIx number this process differently", got=got, change=HINT)
    for other in launchers[1:]:
        others = _number(env, other.size, problems)
        if others > size:
            got = f"{row.size}={size}, {other.size}={others}"
            message = f"{row.name} and {other.name} started different numbers of processes"
            problems.add(message, got=got, change=HINT)


def _number(env: Mapping[str, str], name: str, problems: Problems) -> int:
    text = env.get(name, "")
    if text.isdecimal():
        return int(text)
    problems.add(f"{name} must be a number", got=text or "nothing", change=HINT)
    return 1


_QUERY = "--query-gpu=index,uuid,memory.total,compute_cap"
_TIMEOUT = 30.0
# The first compute capability with bfloat16 in its matrix units (Ampere).
_BF16_CAPABILITY = 8.0


@dataclass(frozen=True)
class Gpu:
    """One GPU.  memory: bytes;  compute_capability: 0.0 if the driver does not tell it"""

    memory: int
    compute_capability: float

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= _BF16_CAPABILITY


def visible_gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", _QUERY, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[2].isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        rows = [row for row in rows if _is_named(row, names)]
    return tuple(Gpu(int(row[2]) << 20, _field_number(row[3])) for row in rows)


def _is_named(row: list[str], names: list[str]) -> bool:
    """True if one of CUDA's names means the GPU: its index, or the start of its UUID."""
    index, uuid = row[0], row[1]
    return any(
        name == index or (name.startswith("GPU-") and uuid.startswith(name)) for name in names
    )


def _field_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


_COPIED = ("main.py", "conf", "launcher_scripts", "requirements", "stages", "templates")
_IGNORED = ("__pycache__", "results")
_FOLDER = "$HOME/.cache/nemo-deployment-launcher"
_ABSENT = 97  # exit code where the copy is not there
_SSH_FAILED = 255
_HOST = re.compile(r"[\w@.:%\[\]+-]+", re.ASCII)


@dataclass(frozen=True)
class LoginNode:
    """A login node, as ssh names it: user@host, or a Host of ~/.ssh/config.

    python: the interpreter there, with the launcher's packages
    """

    host: str
    python: str = "python3"

    def __post_init__(self) -> None:
        if self.host.startswith("-") or not _HOST.fullmatch(self.host):
            text = problem("not a host of ssh", got=self.host, change="cluster.ssh=user@login")
            raise ConfigError(text)

    def run(self, arguments: Sequence[str], *, capture: bool = False) -> tuple[int, str]:
        """Run Python with these arguments in the copy; copies first where that is not there.

        Returns the exit code, and what it printed if `capture` is set. Raises ClusterError where
        ssh fails.
        """
        files = dict(_files())
        digest = hashlib.sha256()
        for name, content in files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        folder = f'"{_FOLDER}/{digest.hexdigest()[:16]}"'
        words = shlex.join([self.python, *arguments])
        script = f"cd {folder} 2>/dev/null || exit {_ABSENT}; exec {words}"
        result = self._ssh(script, capture=capture)
        if result.returncode == _ABSENT:
            copying = (
                f'set -e; d={folder}; mkdir -p "$d.$$"; tar -xf - -C "$d.$$"; '
                'mv -T "$d.$$" "$d" || { rm -rf "$d.$$"; [ -d "$d" ]; }'
            )
            if self._ssh(copying, content=_archive(files)).returncode:
                raise ClusterError(
                    problem("cannot copy the launcher", change=f"space on {self.host}")
                )
            result = self._ssh(script, capture=capture)
        return result.returncode, (result.stdout or b"").decode("utf-8", "replace")

    def _ssh(
        self, script: str, *, content: bytes = b"", capture: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        # The login shell there may be another one than sh.
        command = ["ssh", "--", self.host, shlex.join(["sh", "-c", script])]
        output = subprocess.PIPE if capture else None
        try:
            result = subprocess.run(command, check=False, stdout=output, input=content)
        except OSError as error:
            raise ClusterError(f"cannot run ssh: {error}") from error
        if result.returncode == _SSH_FAILED:
            text = f"ssh cannot reach {self.host}; try: ssh {self.host} true"
            raise ClusterError(problem(text, change="cluster.ssh"))
        return result


def _files() -> Iterator[tuple[str, bytes]]:
    """The files to copy, by their paths in the checkout."""
    for name in _COPIED:
        path = CHECKOUT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            relative = file.relative_to(CHECKOUT)
            if file.is_file() and not set(relative.parts) & set(_IGNORED):
                yield str(relative), file.read_bytes()


def _archive(files: dict[str, bytes]) -> bytes:
    """The files as a tar archive."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), (CHECKOUT / name).stat().st_mode & 0o777
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def submit(host: str, python: str, arguments: Sequence[str]) -> int:
    """Run this command line of main.py on the login node; returns its exit code."""
    keys = {argument.partition("=")[0].lstrip("+") for argument in arguments}
    results = next((a for a in arguments if a.startswith("base_results_dir=")), "")
    if not results.partition("=")[2].strip("'\"").startswith("/"):
        raise ConfigError(
            problem(
                "results of a job that is submitted over ssh need a folder of the cluster",
                got=results or "no base_results_dir",
                change="base_results_dir=/absolute/path",
            )
        )
    local = {"cluster.ssh", "cluster.ssh_python"} & keys
    others = [a for a in arguments if a.partition("=")[0].lstrip("+") not in local]
    return LoginNode(host, python).run(["main.py", *others, "cluster.ssh=null"])[0]
