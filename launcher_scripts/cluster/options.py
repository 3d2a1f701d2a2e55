"""What every kind of cluster is configured with, and how a cluster comes of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.config.schema import build


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The keys that conf/cluster/*.yaml have in common.

    gpus_per_node: GPUs that a job gets on every node; None: not known, so not checked
    python:        interpreter that runs the steps, as seen by them; None: see Stage.python
    overlay:       folder of packages that this interpreter lacks (requirements/overlay.py)
    """

    type: str
    gpus_per_node: int | None
    python: str | None
    overlay: str | None = None

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
        if self.gpus_per_node is not None and self.gpus_per_node < 1:
            problems.add(
                "gpus_per_node must be at least 1, or null for a cluster without GPUs",
                got=self.gpus_per_node,
                change="cluster.gpus_per_node",
            )


Options = TypeVar("Options", bound=ClusterOptions)
Made = TypeVar("Made", bound="ConfiguredCluster[Any]")


class ConfiguredCluster(Generic[Options]):
    """A kind of cluster with its options."""

    options_type: ClassVar[type[ClusterOptions]]
    serves_others: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options

    @classmethod
    def from_config(cls: type[Made], values: Mapping[str, Any]) -> Made:
        options: Any = build(cls.options_type, values, "the cluster's configuration", key="cluster")
        return cls(options)

    @property
    def gpus_per_node(self) -> int | None:
        return self.options.gpus_per_node

    @property
    def python(self) -> str | None:
        return self.options.python

    @property
    def overlay(self) -> str | None:
        return self.options.overlay
