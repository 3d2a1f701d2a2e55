"""The processes of one server on several nodes, as an engine needs to know them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.common.hosts import ALONE, NodeRank


@dataclass(frozen=True)
class NodeGroup:
    """How an engine on node 0 meets the other nodes.

    node_rank: this process among them
    model:     the model's name, by which the others know what they join
    folders:   where rank 0 leaves its address
    interface: name or network of the interface that the ranks' connections use; None: any
    attempt:   how often the server was started again before
    """

    node_rank: NodeRank = ALONE
    model: str = ""
    folders: tuple[Path, ...] = ()
    interface: str | None = None
    attempt: int = 0


ONE_NODE = NodeGroup()
