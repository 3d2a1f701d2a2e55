"""Slurm's answers about jobs and partitions: scontrol first, then sacct, for what has ended."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher_scripts.cluster.job import Resources
from launcher_scripts.cluster.record import FORGOTTEN, UNKNOWN, JobState
from launcher_scripts.common.errors import Problems, problem
from launcher_scripts.config.options import is_same_path

_TIMEOUT = 30.0
_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A")

# The first fields of the lines in which scontrol shows the state of a job.
_STATE_LINES = ("JobState=", "Requeue=", "RunTime=", "NodeList=")

FAILED_PREDECESSOR = "DependencyNeverSatisfied"
# Why a job that waits will wait indefinitely as it is, and what to change. Slurm's words.
BLOCKING_REASONS: Mapping[str, str] = {
    "PartitionTimeLimit": "its time limit is beyond the partition's: run.time_limit of the stage, "
    "or cluster.partition",
    "PartitionNodeLimit": "the partition gives no job as many nodes: deploy.run.nodes, or "
    "cluster.partition",
    "BadConstraints": "no node is as it asks: cluster.constraint, cluster.nodelist",
    FAILED_PREDECESSOR: "the job that it waits for has failed",
    "InvalidAccount": "there is no such account: cluster.account",
    "InvalidQOS": "there is no such quality of service: cluster.qos",
    "AccountNotAllowed": "the partition does not take the account: cluster.account",
    "QOSNotAllowed": "the partition does not take the quality of service: cluster.qos",
    "QOSMaxWallDurationPerJobLimit": "its time limit is beyond that of cluster.qos",
    "AssocMaxWallDurationPerJobLimit": "its time limit is beyond that of cluster.account",
    "QOSMaxNodePerJobLimit": "cluster.qos gives no job as many nodes",
    "AssocMaxNodePerJobLimit": "cluster.account gives no job as many nodes",
    "ReservationDeleted": "its reservation is gone: cluster.reservation",
}
# What sbatch says in a refusal, in small letters, and the keys that it is about.
_PARTS_OF_A_NODE = (
    "cluster.gpus_per_node (null: a cluster without GPUs), cluster.gpus_per_task, cluster.mem or "
    "cluster.cpus_per_task"
)
_REJECTED_KEYS: Mapping[str, str] = {
    "node configuration": _PARTS_OF_A_NODE,
    "generic resource": _PARTS_OF_A_NODE,
    "memory": "cluster.mem",
    "account": "cluster.account or cluster.partition",
    "partition": "cluster.partition",
    "qos": "cluster.qos",
    "reservation": "cluster.reservation",
    "feature": "cluster.constraint",
    "node name": "cluster.nodelist or cluster.exclude",
    "number of nodes": "cluster.nodelist or deploy.run.nodes",
}


def rejected_key(output: str) -> str:
    """The key to change after what sbatch has said; all of the cluster's where it is not clear."""
    keys = (key for words, key in _REJECTED_KEYS.items() if words in output.lower())
    return next(keys, "cluster.*")


def is_answering() -> bool:
    """Return whether this machine has Slurm's commands and its controller can be reached."""
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        return False
    reply = _query("scontrol", "ping")
    return reply is not None and reply.returncode == 0 and " UP" in reply.stdout


def slurm_job_state(job_id: str) -> JobState:
    """The state of a job or of one task of an array."""
    reply = _query("scontrol", "show", "job", job_id)
    if reply is not None and reply.returncode == 0 and reply.stdout.strip():
        return _of_scontrol(reply.stdout.lstrip().partition("\n\n")[0])
    accounted = _of_accounting(job_id)
    if accounted is not None:
        return accounted
    if reply is None or "Invalid job id" not in reply.stdout + reply.stderr:
        output = "scontrol is not on the PATH" if reply is None else reply.stderr.strip()
        return JobState(UNKNOWN, reason=output)
    return JobState(FORGOTTEN, reason="Slurm has forgotten the job, and sacct has no record of it")


def signal_job(job_id: str, *options: str) -> str:
    """Run scancel on a job; returns what it complains of."""
    reply = _query("scancel", *options, job_id)
    return "scancel is not on the PATH" if reply is None else reply.stderr.strip()


def jobs_of_script(script: Path) -> list[str] | None:
    """The jobs that run this script, ended ones too; None where nobody answers."""
    reply = _query("squeue", "--noheader", "--states=all", "--format=%F %o")
    if reply is None or reply.returncode:
        return None
    lines = (line.partition(" ") for line in reply.stdout.splitlines())
    job_ids = (job_id for job_id, _, command in lines if is_same_path(command.strip(), script))
    return list(dict.fromkeys(job_ids))


def check_partition(name: str | None, resources: Resources, problems: Problems, stage: str) -> None:
    """Add what keeps a job out of its partition indefinitely; Slurm would queue it all the same.

    name: a partition, several with commas, or None for the cluster's default
    """
    refusals = []
    for fields in partitions(name):
        refusal = _refusal(fields, resources, stage)
        if refusal is None:
            return
        refusals.append(refusal)
    problems.messages.extend(refusals)


def partitions(names: str | None) -> list[dict[str, str]]:
    """Return Slurm's data of the partitions that a job may run in; see check_partition."""
    reply = _listed("partition")
    if names is None:
        return [fields for fields in reply if fields.get("Default") == "YES"]
    return [fields for fields in reply if fields.get("PartitionName") in names.split(",")]


def nodes() -> list[dict[str, str]]:
    """Return Slurm's data of every node."""
    return _listed("node")


def slurm_configuration() -> dict[str, str]:
    """Slurm's configuration as it is in force."""
    reply = _query("scontrol", "show", "config")
    lines = reply.stdout.splitlines() if reply is not None else []
    pairs = (line.partition("=") for line in lines)
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def mpi_types() -> list[str]:
    """The names that this machine's `srun --mpi` accepts; empty if it cannot be asked."""
    reply = _query("srun", "--mpi=list")
    if reply is None or reply.returncode:
        return []
    names = re.findall(r"^(?:srun:)?[ \t]+([a-z]\w*)$", reply.stdout + reply.stderr, re.MULTILINE)
    versions = re.findall(r"pmix_v\d+", reply.stdout + reply.stderr)
    return list(dict.fromkeys([*names, *versions]))


def host_names(hosts: str | None) -> list[str]:
    """The nodes that a list in Slurm's notation (n[1-3],m7) names."""
    reply = _query("scontrol", "show", "hostnames", hosts) if hosts else None
    return reply.stdout.split() if reply is not None else []


def slurm_seconds(text: str) -> int:
    """A time in Slurm's notation: minutes, [days-]hours:minutes[:seconds], minutes:seconds."""
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _query(*argv: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command of Slurm; None if the command is missing."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 1, "", f"{argv[0]} gave no answer")


def _listed(kind: str) -> list[dict[str, str]]:
    """Every object of a kind, as `scontrol show` prints its fields."""
    reply = _query("scontrol", "--oneliner", "show", kind)
    lines = reply.stdout.splitlines() if reply is not None and reply.returncode == 0 else []
    return list(map(_fields, lines))


def _fields(line: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in line.split() if "=" in item)


def _of_scontrol(text: str) -> JobState:
    """The state of the job in scontrol's lines. Names, comments and paths have lines of their own,
    whose text is not read.
    """
    lines = (line.strip() for line in text.splitlines())
    fields = _fields(" ".join(line for line in lines if line.startswith(_STATE_LINES)))
    nodes, reason, ran = (fields.get(name, "") for name in ("NodeList", "Reason", "RunTime"))
    state = JobState(
        fields.get("JobState", ""),
        nodes="" if nodes == "(null)" else nodes,
        reason="" if reason == "None" else reason,
        seconds=slurm_seconds(ran) if ran.replace("-", ":").replace(":", "").isdigit() else None,
        restarts=int(fields.get("Restarts", 0)),
    )
    return _with_exit_code(state, fields.get("ExitCode", ""))


def _of_accounting(job_id: str) -> JobState | None:
    columns = "State,ExitCode,NodeList,Elapsed"
    reply = _query(
        *("sacct", "--allocations", "--noheader", "--parsable2", "--duplicates"),
        *(f"--format={columns}", f"--jobs={job_id}"),
    )
    if reply is None or reply.returncode or not reply.stdout.strip():
        return None
    name, code, nodes, elapsed = reply.stdout.splitlines()[-1].split("|")
    word, _, reason = name.partition(" ")  # "CANCELLED by 1000"
    state = JobState(
        word,
        nodes="" if nodes == "None assigned" else nodes,
        reason=reason,
        seconds=slurm_seconds(elapsed),
    )
    return _with_exit_code(state, code)


def _with_exit_code(state: JobState, code: str) -> JobState:
    """Slurm's `code:signal` as a shell says it; a job that did not work never has 0."""
    if not state.finished:
        return state
    number, _, signal = code.partition(":")
    shell = 128 + int(signal) if int(signal or 0) else int(number or 0)
    shell = shell if state.succeeded else shell or 1
    return replace(state, exit_code=shell)


def _refusal(fields: Mapping[str, str], resources: Resources, stage: str) -> str | None:
    """Why a partition never runs a job with these resources; None where it may."""
    name, longest, max_nodes = (
        fields.get(key, "") for key in ("PartitionName", "MaxTime", "MaxNodes")
    )
    limited = longest not in ("", *_UNLIMITED)
    if limited and slurm_seconds(resources.time_limit) > slurm_seconds(longest):
        return problem(
            f"the {stage} job would wait indefinitely (PartitionTimeLimit): the partition {name} "
            f"runs no job longer than {longest}",
            got=resources.time_limit,
            change=f"{stage}.run.time_limit or cluster.partition",
        )
    if max_nodes.isdecimal() and resources.nodes > int(max_nodes):
        return problem(
            f"the {stage} job would wait indefinitely (PartitionNodeLimit): the partition {name} "
            f"gives a job at most {max_nodes} nodes",
            got=resources.nodes,
            change=f"{stage}.run.nodes or cluster.partition",
        )
    return None
