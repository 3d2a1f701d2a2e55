"""The files that describe a test cluster: slurm.conf, gres.conf and plugstack.conf."""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass
from pathlib import Path

UNPACK_SECONDS = 0.3  # that a container takes to be there, and to be gone
GRACE_SECONDS = 20  # that a job has to end when a more urgent one takes its place


@dataclass(frozen=True)
class Paths:
    """Everything a test cluster has lies under one folder."""

    root: Path

    @property
    def slurm_conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    @property
    def munge_key(self) -> Path:
        return self.root / "etc" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.root / "run" / "munge.socket"

    @property
    def pyxis_double(self) -> Path:
        return self.root / "lib" / "pyxis_double.so"

    @property
    def pyxis_record(self) -> Path:
        """What the SPANK test double saw, one JSON object per line."""
        return self.root / "log" / "pyxis.jsonl"

    @property
    def containers(self) -> Path:
        """<node>/<name> of what the test double has unpacked."""
        return self.root / "containers"

    @property
    def plugstack(self) -> Path:
        return self.root / "etc" / "plugstack.conf"

    def pid_file(self, daemon: str) -> Path:
        return self.root / "run" / f"{daemon}.pid"

    def log(self, daemon: str) -> Path:
        return self.root / "log" / f"{daemon}.log"


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on; all are held until the last one is found."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]
    finally:
        for item in sockets:
            item.close()


def write_configuration(paths: Paths, nodes: int, gpus: int) -> None:
    """Write the configuration of a cluster of virtual nodes n1, n2, ... on this machine."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    folders = ["etc", "run", "log", "lib", "dev", "state"]
    folders += [f"{kind}/{name}" for name in names for kind in ("spool", "tmp")]
    for folder in folders:
        (paths.root / folder).mkdir(parents=True, exist_ok=True)
    if not paths.munge_key.exists():
        paths.munge_key.touch(mode=0o600)
        paths.munge_key.write_bytes(os.urandom(128))
    controller_port, *node_ports = free_ports(1 + nodes)
    node_lines = [
        f"NodeName={name} NodeHostname={_short_hostname()} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs=4 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN"
        for name, port in zip(names, node_ports, strict=True)
    ]
    paths.slurm_conf.write_text(
        _slurm_conf(paths, controller_port) + "\n".join(node_lines) + "\n"
        f"PartitionName=batch Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE "
        f"GraceTime={GRACE_SECONDS} State=UP\n"
        f"PartitionName=single Nodes=n1 MaxTime=1:00:00 State=UP\n"
        f"PartitionName=urgent Nodes=n[1-{nodes}] PriorityTier=2 PreemptMode=OFF State=UP\n",
        encoding="utf-8",
    )
    etc = paths.slurm_conf.parent
    (etc / "gres.conf").write_text(_gpu_files(paths, gpus), encoding="utf-8")
    write_plugstack(paths)


def write_plugstack(paths: Paths, scope: str = "global") -> None:
    """Load the test double; `scope` is pyxis' container_scope, by default as pyxis has it."""
    paths.plugstack.write_text(
        f"required {paths.pyxis_double} record={paths.pyxis_record} "
        f"containers={paths.containers} container_scope={scope} seconds={UNPACK_SECONDS}\n",
        encoding="utf-8",
    )


def _slurm_conf(paths: Paths, controller_port: int) -> str:
    """The part of slurm.conf above the nodes.

    A job of the partition `urgent` takes the place of others, which have GRACE_SECONDS to end.

    Every virtual node has a temporary folder of its own (TmpFS): nodes that share one fail in
    srun --mpi=pmix, each wanting to create the same server folder. The processes of a step are
    found through /proc, so that neither control groups nor privileges are needed.
    """
    root = paths.root
    return f"""\
ClusterName=test
SlurmctldHost={_short_hostname()}(127.0.0.1)
SlurmUser={getpass.getuser()}
SlurmdUser={getpass.getuser()}
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={paths.munge_socket}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
TmpFS={root}/tmp/%n
SlurmctldPidFile={paths.pid_file("slurmctld")}
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={paths.log("slurmctld")}
SlurmdLogFile={root}/log/slurmd-%n.log
PlugStackConfig={paths.plugstack}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
CompleteWait=0
KillWait=10
MessageTimeout=25
TCPTimeout=10
SlurmdTimeout=30
MinJobAge=300
JobAcctGatherType=jobacct_gather/none
"""


def _gpu_files(paths: Paths, gpus: int) -> str:
    """gres.conf, after creating what stands for the GPUs: Slurm counts device files."""
    if gpus == 0:
        return ""
    for number in range(gpus):
        device = paths.root / "dev" / f"gpu{number}"
        device.unlink(missing_ok=True)
        device.symlink_to("/dev/null")
    return f"Name=gpu File={paths.root}/dev/gpu[0-{gpus - 1}]\n"


def _short_hostname() -> str:
    return socket.gethostname().split(".")[0]
