"""What the processes of one server on several nodes must know of each other."""

from __future__ import annotations

from pathlib import Path

from launcher_scripts.common.hosts import (
    ATTEMPT_VARIABLE,
    INTERFACE_VARIABLE,
    RENDEZVOUS_VARIABLE,
    NodeRank,
)
from launcher_scripts.config.settings import DeploySettings


def rendezvous_folder(settings: DeploySettings) -> Path:
    """Where the nodes of this server find rank 0 of each model."""
    return Path(settings.job_folder or settings.results_dir) / "ranks"


def group_env(settings: DeploySettings, node_rank: NodeRank, attempt: int) -> dict[str, str]:
    """Variables for the backend: what it needs to know about the other nodes, if there are any."""
    if node_rank.nodes == 1:
        return {}
    env = {
        RENDEZVOUS_VARIABLE: str(rendezvous_folder(settings)),
        ATTEMPT_VARIABLE: str(attempt),
    }
    if settings.network_interface is not None:
        env[INTERFACE_VARIABLE] = settings.network_interface
    return env
