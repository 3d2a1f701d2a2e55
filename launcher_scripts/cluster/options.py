"""What every kind of cluster is configured with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from launcher_scripts.common.errors import ConfigError, Problems


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The keys that conf/cluster/*.yaml have in common.

    gpus_per_node: GPUs that a job gets on every node; None: not known, so not checked
    setup:         lines of bash that a job's script runs before its steps
    python:        interpreter that runs the steps, as seen by them; None: see Stage.python
    overlay:       folder of packages that this interpreter lacks (requirements/overlay.py)
    """

    type: str
    gpus_per_node: int | str | None = None
    python: str | None = None
    overlay: str | None = None
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = Problems("the cluster's configuration")
        self._check(problems)
        problems.raise_if_any(ConfigError)

    def _check(self, problems: Problems) -> None:
        """Every value ends up on a line of a script."""
        for name, value in asdict(self).items():
            values = value if isinstance(value, tuple) else (value,)
            if not all(str(item).isprintable() for item in values):
                problems.add("not on one line", got=value, change=f"cluster.{name}")
        if self.gpus_per_node is not None and not self.num_gpus:
            problems.add(
                "gpus_per_node must be at least 1, or null for a cluster without GPUs",
                got=self.gpus_per_node,
                change="cluster.gpus_per_node",
            )

    @property
    def num_gpus(self) -> int | None:
        """The number of `gpus_per_node`; 0 for a text that has none, None if it is not set."""
        if self.gpus_per_node is None or isinstance(self.gpus_per_node, int):
            return None if self.gpus_per_node is None else max(0, self.gpus_per_node)
        return 0
