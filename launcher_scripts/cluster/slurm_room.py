"""Whether a job finds room beside the server it needs: Slurm would let it wait indefinitely."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.cluster import slurm_queue
from launcher_scripts.cluster.job import Job
from launcher_scripts.cluster.slurm_options import SlurmOptions
from launcher_scripts.common.errors import Problems

_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_FEATURE = re.compile(r"\w+")
_SHARED_PARTITIONS = ("FORCE", "YES")  # what jobs take of a node is not theirs alone there
_ALL = float("inf")


@dataclass(frozen=True)
class NodeShare:
    """What a job takes of each of its nodes, or what a node has; memory in megabytes."""

    cpus: float
    memory: float
    gpus: float

    def beside(self, other: NodeShare) -> NodeShare:
        return NodeShare(self.cpus + other.cpus, self.memory + other.memory, self.gpus + other.gpus)

    def within(self, node: NodeShare) -> bool:
        return self.cpus <= node.cpus and self.memory <= node.memory and self.gpus <= node.gpus


@dataclass(frozen=True)
class _Cluster:
    """What matters of Slurm's configuration. memory: whether it counts as a resource."""

    nodes: tuple[Mapping[str, str], ...]
    memory: bool
    default_memory: Mapping[str, str]


def check_room(job: Job, options: SlurmOptions, problems: Problems) -> None:
    """Add that `job` could never start while its server runs, where Slurm's nodes say so."""
    if job.server is None or job.server.service is None:
        return
    if options.constraint is not None and not _FEATURE.fullmatch(options.constraint):
        return  # which nodes it means is Slurm's to say
    if options.partition != _options_of(job.server, options).partition:
        return  # they may share no node
    cluster = _ask_cluster()
    partitions = slurm_queue.partitions(options.partition)
    if not partitions or not cluster.nodes:
        return
    if any(_has_room(job, job.server, options, fields, cluster) for fields in partitions):
        return
    server, names = job.server, " or ".join(f["PartitionName"] for f in partitions)
    taken = server.resources.nodes * max(1, server.replicas)
    counts = [len(_eligible(options, fields, cluster)) for fields in partitions]
    within = "evaluate.in_deploy_job=True (the client runs in the deployment's job), "
    problems.add(
        f"the {job.stage} job could never start beside the {server.stage} job, which takes {taken} "
        f"of the {max(counts)} node(s) that both may use in the partition {names} for itself",
        change=f"{within if job.service is None else ''}cluster.partition, or what the deployment "
        "takes of a node (cluster.exclusive=False with cluster.mem, cluster.cpus_per_task and "
        "cluster.gpus_per_node)",
    )


def _has_room(
    job: Job, server: Job, options: SlurmOptions, partition: Mapping[str, str], cluster: _Cluster
) -> bool:
    if partition.get("OverSubscribe", "").partition(":")[0] in _SHARED_PARTITIONS:
        return True
    whole = partition.get("OverSubscribe") == "EXCLUSIVE"
    taken, wanted = (
        _share(_options_of(one, options).sbatch(one), partition, cluster, whole=whole)
        for one in (server, job)
    )
    nodes = _eligible(options, partition, cluster)
    both = wanted.beside(taken)
    if sum(both.within(_node(node)) for node in nodes) >= job.resources.nodes:
        return True
    others = len(nodes) - server.resources.nodes * max(1, server.replicas)
    return others >= job.resources.nodes


def _options_of(job: Job, options: SlurmOptions) -> SlurmOptions:
    return job.options if isinstance(job.options, SlurmOptions) else options


def _share(
    parameters: Mapping[str, Any],
    partition: Mapping[str, str],
    cluster: _Cluster,
    *,
    whole: bool,
) -> NodeShare:
    """What a job with these options of sbatch takes of a node."""
    if whole or parameters["exclusive"] is True:
        return NodeShare(_ALL, _ALL, _ALL)
    cpus = parameters["ntasks_per_node"] * (parameters["cpus_per_task"] or 1)
    gpus = str(parameters["gpus_per_node"] or parameters["gpus_per_task"] or 0)
    memory = 0.0
    if cluster.memory:
        memory = _memory(parameters["mem"], cpus, (partition, cluster.default_memory))
    return NodeShare(cpus, memory, int(gpus.rpartition(":")[2]))


def _memory(asked: str | None, cpus: int, defaults: Iterable[Mapping[str, str]]) -> float:
    """Megabytes of a node; Slurm gives a job that does not ask all of it, or the default."""
    if asked is None:
        for fields in defaults:
            for name, times in (("DefMemPerNode", 1), ("DefMemPerCPU", cpus)):
                if fields.get(name, "").isdecimal() and int(fields[name]):
                    return float(fields[name]) * times
        return _ALL
    unit = asked[-1].upper()
    number = float(asked[:-1] if unit in _MEGABYTES else asked)
    return number * _MEGABYTES.get(unit, 1) or _ALL


def _eligible(
    options: SlurmOptions, partition: Mapping[str, str], cluster: _Cluster
) -> list[Mapping[str, str]]:
    """The nodes of the partition that the options leave to both jobs."""
    only, without = (slurm_queue.host_names(x) for x in (options.nodelist, options.exclude))
    name = partition["PartitionName"]
    return [
        node
        for node in cluster.nodes
        if name in node.get("Partitions", "").split(",")
        and (not only or node["NodeName"] in only)
        and node["NodeName"] not in without
        and (not options.constraint or options.constraint in node["ActiveFeatures"].split(","))
    ]


def _node(fields: Mapping[str, str]) -> NodeShare:
    gpus = sum(int(count) for count in _GPUS.findall(fields.get("Gres", "")))
    return NodeShare(int(fields["CPUTot"]), int(fields["RealMemory"]), gpus)


def _ask_cluster() -> _Cluster:
    config = slurm_queue.configuration()
    return _Cluster(
        tuple(slurm_queue.nodes()),
        "MEMORY" in config.get("SelectTypeParameters", "").upper(),
        config,
    )
