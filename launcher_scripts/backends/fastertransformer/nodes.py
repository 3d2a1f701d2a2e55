"""A model whose server runs on several nodes: on node 0 it serves, on the others it hosts ranks.

There its initialize() lasts as long as the model does, so that server never looks ready.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.hosts import ATTEMPT_VARIABLE, INTERFACE_VARIABLE, find_node_rank
from launcher_scripts.common.processes import process_name
from launcher_scripts.engine.engine import EngineSettings
from launcher_scripts.engine.ranks.node_group import NodeGroup
from launcher_scripts.engine.ranks.rank_host import POLL_SECONDS, RankHost
from launcher_scripts.engine.ranks.rendezvous import (
    ADVICE,
    find_rendezvous,
    rendezvous_folders,
)

ANSWER_SECONDS = 1.0  # that clients get to be told of a failure
STUB = b"triton_python_backend_stub"  # its arguments: the model's file, a region's name, ...
CLOSING_SECONDS = 2.0  # node 0 unloads its models at the same time, but not in the same moment
LINGER_SECONDS = 5.0  # node 0 tells the reason and ends first


def node_group(env: Mapping[str, str], model: str, model_dir: Path) -> NodeGroup:
    """How this server's processes on all nodes find each other for one model.

    Raises ServerError where the environment contradicts itself.
    """
    return NodeGroup(
        find_node_rank(env),
        model,
        rendezvous_folders(env, model_dir),
        env.get(INTERFACE_VARIABLE),
        int(env.get(ATTEMPT_VARIABLE, "0")),
    )


def host_ranks(group: NodeGroup, settings: EngineSettings) -> None:
    """Host this node's ranks of the model until its engine on node 0 ends, then end the server.

    Raises ServerError when node 0 is not found in time, or is lost.
    """
    node_rank = group.node_rank
    where = f"node {node_rank.node} of {node_rank.nodes} (started by {node_rank.launcher})"
    print(f"{where}: node 0 serves model {group.model}; this server only hosts ranks", flush=True)
    reason = _find(group, settings).run()
    if reason is not None:
        time.sleep(LINGER_SECONDS)
        raise ServerError(reason)
    time.sleep(CLOSING_SECONDS)
    end_server(signal.SIGTERM)


def end_server_later(error: ServerError) -> None:
    """End a server that lost a rank, with an exit code that is not 0, once clients have been told.

    Triton itself would go on, look ready, and answer every request with an error.
    """
    print(f"ending the server: {error}", file=sys.stderr, flush=True)
    threading.Timer(ANSWER_SECONDS, _kill_server).start()


def end_server(number: int) -> None:
    """Send a signal to the server that this process is a worker of."""
    server = os.getppid()
    if process_name(server) == "tritonserver":
        os.kill(server, number)


def _kill_server() -> None:
    """Kill the server, and remove the shared memory of its workers, which it no longer can."""
    server = os.getppid()
    regions = [
        Path("/dev/shm", arguments[2].decode())
        for folder in Path("/proc").glob(f"{server}/task/*/children")
        for child in folder.read_text().split()
        if (arguments := Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"))[0].endswith(STUB)
    ]
    end_server(signal.SIGKILL)
    for region in regions:
        region.unlink(missing_ok=True)


def _find(group: NodeGroup, settings: EngineSettings) -> RankHost:
    """Join the newest engine of this run that lets us."""
    patience = settings.start_timeout
    folders = (settings.checkpoint_dir, settings.draft_checkpoint_dir)
    deadline = time.monotonic() + patience
    said = "nothing"
    while time.monotonic() < deadline:
        for info in find_rendezvous(group.folders, group.node_rank.run).values():
            if info.model != group.model:
                continue
            try:
                return RankHost(group.node_rank, info, folders)
            except (ServerError, OSError) as error:
                said = str(error)
        time.sleep(POLL_SECONDS)
    looked = ", ".join(map(str, group.folders))
    what = f"node 0 of model {group.model} was not found within {patience:g} s in {looked}"
    raise ServerError(problem(what, got=said, change=ADVICE))
