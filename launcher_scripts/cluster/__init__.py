"""The kinds of cluster; `cluster_type` names one of them."""

from typing import Any

from launcher_scripts.cluster.cluster import Cluster
from launcher_scripts.cluster.interactive import BcpCluster, InteractiveCluster
from launcher_scripts.cluster.slurm import SlurmCluster

CLUSTERS: dict[str, type[Cluster[Any]]] = {
    "bcm": SlurmCluster,
    "bcp": BcpCluster,
    "interactive": InteractiveCluster,
}
