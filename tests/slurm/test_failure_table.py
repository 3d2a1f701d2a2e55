"""What a user sees when something breaks, row by row: what is said, the exit code, and how soon.

    python3 -m pytest -m slow -s tests/slurm/test_failure_table.py

prints the table of docs/failures.md at its end. The seconds are those from the fault, or from the
submission, until `jobs wait` says so; `left` counts processes, and files in shared memory.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.processes import parent, read, wait_for
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.serving import NODES, TP2, Served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tritonserver")]
CHECKOUT = Path(__file__).resolve().parents[2]
UNREADY_SECONDS = 5.5
SHORT = ("export.run.time_limit=0:01:00", "deploy.run.time_limit=0:02:00")


class Table:
    """The rows as they are measured."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def add(self, what: str, said: str, code: int | str, seconds: float, left: int) -> None:
        row = f"| {what} | {said} | {code} | {seconds:.1f} | {left} |"
        self.rows.append(row)
        print(row, flush=True)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    shown = Table()
    yield shown
    head = "| what happens | message | exit code | seconds | left |\n|---|---|---|---|---|"
    print("\n".join(["", head, *shown.rows]))


def jobs(results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python3 -m launcher_scripts.jobs ...` on a folder of results."""
    return subprocess.run(
        [sys.executable, "-m", "launcher_scripts.jobs", *words, f"--results={results}"],
        cwd=CHECKOUT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )


def left(slurm: TestCluster, job_id: str, log: str, seconds: float = 10) -> int:
    """How many processes and files in shared memory are there of a job after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        names = set(re.findall(r"launcher-server-\w{8}", log))
        files = [path for name in names for path in Path("/dev/shm").glob(f"{name}*")]
        found = len(slurm.job_processes(job_id)) + len(files)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


# What is refused before anything is queued.
REFUSED = {
    "wrong partition": (("cluster.partition=absent",), "invalid partition specified: absent"),
    "time limit beyond the partition's": (
        ("cluster.partition=single", "export.run.time_limit=0:30:00"),
        "the deploy job would wait indefinitely (PartitionTimeLimit)",
    ),
    "missing image file": (
        ("container=/no/such/image.sqsh", "cluster.container_runtime=pyxis"),
        "the container image is not there; got '/no/such/image.sqsh'",
    ),
    "upper case in an image's name": (
        ("container=nvcr.io/NVIDIA/nemo", "cluster.container_runtime=pyxis"),
        "with IMAGE in lower case; got 'nvcr.io#NVIDIA/nemo'; change container",
    ),
    "no room for the evaluation": (
        ("stages=[export,deploy,evaluate]", "evaluate.in_deploy_job=False", "deploy.run.nodes=2"),
        "the evaluate job could never start beside the deploy job",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(slurm: TestCluster, launch: Submit, table: Table, what: str) -> None:
    arguments, reason = REFUSED[what]
    started = time.monotonic()
    ran = launch("stages=[export,deploy]", *TP2, *arguments, check=False)
    table.add(what, f"`{reason}`; nothing is queued", ran.returncode, time.monotonic() - started, 0)
    assert ran.returncode == 3
    assert reason in ran.stderr
    assert slurm.run("squeue", "--noheader").stdout == ""
    assert not launch.results.exists()


def test_a_disk_that_is_full_when_the_job_is_submitted(
    slurm: TestCluster, launch: Submit, table: Table, full_disk: Path
) -> None:
    (full_disk / "ballast").write_bytes(bytes(60 << 10))
    started = time.monotonic()
    ran = launch("stages=[export]", *TP2, f"base_results_dir={full_disk}", check=False)
    seconds = time.monotonic() - started
    said = "`No space left on device`; nothing is queued"
    table.add("full disk at the submission", said, ran.returncode, seconds, 0)
    assert (ran.returncode, "No space left on device" in ran.stderr) == (3, True)
    assert slurm.run("squeue", "--noheader").stdout == ""


def test_a_checkpoint_that_was_not_copied_to_its_end(
    slurm: TestCluster, launch: Submit, table: Table
) -> None:
    data = _checkpoint(launch).read_bytes()
    short = _other_checkpoint(launch, data[: len(data) * 3 // 4])
    started = time.monotonic()
    ran = launch("stages=[export,deploy]", *TP2, *short, check=False)
    seconds = time.monotonic() - started
    said = "`unexpected end of data`; nothing is queued"
    table.add("checkpoint not copied to its end", said, ran.returncode, seconds, 0)
    assert (ran.returncode, "unexpected end of data" in ran.stderr) == (3, True)
    assert slurm.run("squeue", "--noheader").stdout == ""


def _checkpoint(launch: Submit) -> Path:
    (named,) = (item for item in launch.arguments if item.startswith("export.model.checkpoint"))
    return Path(named.partition("=")[2])


def _other_checkpoint(launch: Submit, data: bytes) -> tuple[str, ...]:
    other = _checkpoint(launch).with_name("other.nemo")
    other.write_bytes(data)
    return (f"export.model.checkpoint_path={other}",)


def _damaged_checkpoint(launch: Submit) -> tuple[str, ...]:
    """A copy with half of one of its chunks."""
    damaged = io.BytesIO()
    with tarfile.open(_checkpoint(launch)) as whole, tarfile.open(fileobj=damaged, mode="w") as new:
        for member in whole.getmembers():
            file = whole.extractfile(member)
            data = b"" if file is None else file.read()
            if member.name.endswith("word_embeddings.weight/0.0"):
                data = data[: len(data) // 2]
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return _other_checkpoint(launch, damaged.getvalue())


def _slow_export(launch: Submit) -> tuple[str, ...]:
    program = launch.results.parent.parent / "slow_python"
    program.write_text("#!/bin/sh\nsleep 600\n")
    program.chmod(0o755)
    return (f"cluster.python={program}", *SHORT)


def _container(*more: str) -> Callable[[Submit], tuple[str, ...]]:
    return lambda _: ("cluster.container_runtime=pyxis", *more)


def _missing_mount(launch: Submit) -> tuple[str, ...]:
    image = launch.results.parent.parent / "image.sqsh"
    image.write_bytes(b"hsqs")
    mounts = "container_mounts=[/no/such/folder:/data]"
    return ("cluster.container_runtime=pyxis", f"container={image}", mounts)


# What fails in its job: arguments, what is said, the job's state, the exit code of `jobs wait`.
FAILING: dict[str, tuple[Callable[[Submit], tuple[str, ...]], str, str, int]] = {
    "image that the registry does not have": (
        _container("container='nvcr.io#nvidia/absent:1'"),
        "pyxis: failed to import docker image: nvcr.io#nvidia/absent:1",
        "FAILED",
        1,
    ),
    "missing mount": (
        _missing_mount,
        "pyxis: --container-mounts: source path does not exist: /no/such/folder",
        "FAILED",
        1,
    ),
    "damaged checkpoint": (_damaged_checkpoint, "a chunk has another size", "FAILED", 1),
    "an export beyond its time limit (1 minute)": (
        _slow_export,
        "DUE TO TIME LIMIT",
        "TIMEOUT",
        143,
    ),
}


@pytest.mark.parametrize("what", FAILING)
def test_what_fails_in_its_job(
    slurm: TestCluster, launch: Submit, table: Table, image: Path, what: str
) -> None:
    make, reason, state, code = FAILING[what]
    arguments = [a.replace("docker://any", str(image)) for a in make(launch)]
    started = time.monotonic()
    launch("stages=[export,deploy]", *TP2, *arguments)
    record = launch.record("export")
    waited = jobs(launch.results, "wait", record["job_id"])
    seconds, log = time.monotonic() - started, launch.log("export")
    remains = left(slurm, record["job_id"], log)
    table.add(what, f"{state}; `{reason}`", waited.returncode, seconds, remains)
    assert reason in log
    assert reason in waited.stderr
    assert (waited.returncode, remains) == (code, 0)
    assert slurm.wait(record["job_id"])["JobState"] == state
    assert slurm.wait(launch.record("deploy")["job_id"])["JobState"] == "CANCELLED"


def test_a_disk_that_is_too_small_for_the_export(
    slurm: TestCluster, launch: Submit, table: Table, full_disk: Path
) -> None:
    started = time.monotonic()
    launch("stages=[export]", *TP2, f"base_results_dir={full_disk}")
    (folder,) = full_disk.glob("tiny/export_*/jobs/001")
    waited = jobs(full_disk, "wait", str(folder))
    job_id = (folder / "job_id").read_text().strip()
    said = "FAILED; `needs … bytes; got '… bytes free on that disk'`"
    remains = left(slurm, job_id, "")
    seconds = time.monotonic() - started
    table.add("a disk that is too small for the export", said, waited.returncode, seconds, remains)
    assert (waited.returncode, remains) == (1, 0)
    assert "bytes free on that disk" in waited.stderr
    assert list(full_disk.rglob("*.bin")) == []


def test_an_altered_shard(
    slurm: TestCluster, launch: Submit, table: Table, repository: Path, tmp_path: Path
) -> None:
    altered = shutil.copytree(repository, tmp_path / "altered")
    shard = next(altered.glob("tiny/1/2-gpu/*dense_h_to_4h.weight.0.bin"))
    data = bytearray(shard.read_bytes())
    data[0] ^= 0xFF
    shard.write_bytes(data)
    started = time.monotonic()
    launch("stages=[deploy]", *NODES, f"deploy.model_repository={altered}")
    record = launch.record("deploy")
    waited = jobs(launch.results, "wait", record["job_id"])
    seconds, log = time.monotonic() - started, launch.log("deploy")
    remains = left(slurm, record["job_id"], log)
    said = f"FAILED; `{shard.name} is altered`"
    table.add("altered shard in the repository", said, waited.returncode, seconds, remains)
    assert f"{shard.name} is altered" in waited.stderr
    assert (waited.returncode, remains) == (1, 0)


@dataclass(frozen=True)
class Loss:
    """A process of a running server that gets a signal.

    find: the process;  code: that of `jobs wait`
    file_stays: whether the ready file does, which says when the server was last alive
    """

    find: Callable[[Served], int]
    says: str
    code: int = 1
    number: int = signal.SIGKILL
    file_stays: bool = False


def _srun(served: Served) -> int:
    return next(
        pid
        for pid in served.slurm.job_processes(served.job_id)
        if read(Path(f"/proc/{pid}/comm")) == b"srun\n"
    )


LOSSES = {
    "kill -9 rank on node 1": Loss(
        lambda served: served.rank(0), "rank 0 of model tiny (process {pid}) died"
    ),
    "kill -9 rank on node 2": Loss(
        lambda served: served.rank(1),
        "rank 1 on node 1 (n2, pid {pid}) was ended by SIGKILL while waiting after step",
    ),
    "kill -STOP rank on node 2": Loss(
        lambda served: served.rank(1),
        "rank 1 on node 1 (n2, pid {pid}) is stopped (SIGSTOP) while waiting after step",
        number=signal.SIGSTOP,
    ),
    "kill -9 tritonserver": Loss(
        lambda served: int(served.ready["pid"]), "the server was killed by SIGKILL"
    ),
    "kill -9 the step on node 1": Loss(
        lambda served: served.step("n1"), "srun: error: n1: task 0: Killed", 137, file_stays=True
    ),
    "kill -9 the step on node 2": Loss(
        lambda served: served.step("n2"), "srun: error: n2: task 1: Killed", 137
    ),
    "kill -9 srun": Loss(_srun, "Killed", 137, file_stays=True),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_ends_the_job_with_the_reason(
    slurm: TestCluster, serve: Any, launch: Submit, table: Table, what: str
) -> None:
    loss = LOSSES[what]
    served = serve()
    pid = loss.find(served)
    command = [sys.executable, "-m", "launcher_scripts.jobs", "wait", served.job_id]
    waiting = subprocess.Popen(
        [*command, f"--results={launch.results}"],
        cwd=CHECKOUT,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(1)
    start = time.monotonic()
    os.kill(pid, loss.number)
    while served.answers():
        assert time.monotonic() - start < UNREADY_SECONDS
        time.sleep(0.05)
    noticed = time.monotonic() - start
    _, said = waiting.communicate(timeout=120)
    over = time.monotonic() - start
    state, _, log = served.end()
    remains = left(slurm, served.job_id, log)
    says = loss.says.format(pid=pid)
    row = f"not ready after {noticed:.1f} s; {state}; `{loss.says.format(pid='…')}`"
    table.add(what, row, waiting.returncode, over, remains)
    assert (state, waiting.returncode, remains) == ("FAILED", loss.code, 0)
    assert says in log
    assert says in said
    assert served.ready_file.exists() == loss.file_stays
    assert not loss.file_stays or "alive_at" in served.ready_file.read_text()


def test_a_server_near_its_time_limit(
    slurm: TestCluster, serve: Any, launch: Submit, table: Table
) -> None:
    started = time.monotonic()
    served = serve("deploy.run.time_limit=0:02:00")
    waited = jobs(launch.results, "wait", served.job_id)
    seconds = time.monotonic() - started
    state, _, log = served.end()
    remains = left(slurm, served.job_id, log)
    said = f"{state}; `stopping the server: SIGTERM`"
    table.add("a server near its time limit (2 minutes)", said, waited.returncode, seconds, remains)
    assert (state, waited.returncode, remains) == ("COMPLETED", 0, 0), log
    assert "stopping the server: SIGTERM" in log


@pytest.fixture
def node_daemon(slurm: TestCluster) -> Iterator[Callable[[], None]]:
    """Kills the slurmd of node 1; it is back after the test."""

    def kill() -> None:
        pid = slurm.pid("slurmd-n1")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    yield kill
    if slurm.pid("slurmd-n1") is None:
        slurm.start_daemon("slurmd-n1")
    wait_for(slurm.is_up)


def test_a_node_s_daemon_that_stays_away(
    slurm: TestCluster, serve: Any, launch: Submit, table: Table, node_daemon: Callable[[], None]
) -> None:
    served = serve()
    started = time.monotonic()
    node_daemon()
    waited = jobs(launch.results, "wait", served.job_id)
    seconds = time.monotonic() - started
    alone = left(slurm, served.job_id, served.log(), 0)
    slurm.start_daemon("slurmd-n1")
    back = time.monotonic()
    remains = left(slurm, served.job_id, served.log(), 30)
    said = f"NODE_FAIL; {alone} left until slurmd is back and {time.monotonic() - back:.1f} s more"
    table.add("kill -9 slurmd, which stays away", said, waited.returncode, seconds, remains)
    assert waited.returncode in (1, 137)  # what Slurm notes of the lost processes differs
    assert remains == 0
    assert "NODE_FAIL" in waited.stderr


def _daemon_of(pid: int) -> int:
    """The slurmstepd above a process."""
    while not read(Path(f"/proc/{pid}/comm")).startswith(b"slurmstepd"):
        pid = parent(pid)
    return pid


@pytest.mark.parametrize("step", ["0", "batch"])
def test_a_killed_step_daemon(
    slurm: TestCluster, serve: Any, launch: Submit, table: Table, step: str
) -> None:
    """Slurm notices nothing; cancelling ends what goes on."""
    served = serve()
    started = time.monotonic()
    daemon = (
        _daemon_of(served.step("n1")) if step == "0" else slurm.step_daemon(served.job_id, step)
    )
    os.kill(daemon, signal.SIGKILL)
    if step == "0":
        while served.answers():
            assert time.monotonic() - started < UNREADY_SECONDS
            time.sleep(0.05)
    seconds = time.monotonic() - started
    time.sleep(5)
    seen = jobs(launch.results, "status", served.job_id)
    alone = left(slurm, served.job_id, "", 0)
    assert jobs(launch.results, "cancel", served.job_id).returncode == 0
    remains = left(slurm, served.job_id, served.log())
    what = f"kill -9 slurmstepd of the {'server' if step == '0' else 'script'}"
    word = "STARTING" if step == "0" else "READY"
    said = f"{word}; {alone} processes go on until `cancel`"
    table.add(what, said, seen.returncode, seconds if step == "0" else 0.0, remains)
    assert word in seen.stdout
    assert (seen.returncode, remains) == (3 if step == "0" else 0, 0)
