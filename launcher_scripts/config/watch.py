"""Options of the stage `watch`, which evaluates every checkpoint that a training writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.exit_codes import ERROR
from launcher_scripts.config.options import ConfigPath, check_options, option

NEWEST, OLDEST = ORDERS = ("newest", "oldest")


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The keys of the block `watch` besides `run`.

    Fractions are 0 to 1, times are in seconds; None: no limit.
    """

    training_dir: ConfigPath
    interval: float = option(300.0, "seconds between two looks at the folder", lower=0)
    order: str = option(NEWEST, "which waiting checkpoint is next", choices=ORDERS)
    parallel: int = option(1, "maximum number of checkpoints evaluated concurrently", lower=1)
    attempts: int = option(2, "maximum number of attempts per checkpoint", lower=1)
    level: float = option(0.05, "probability of a false alarm in a series without a drop")
    max_drop: float = option(0.02, "drop that counts as a regression, as in evaluate.policy")
    baseline: ConfigPath | None = option(None, "report.json that every checkpoint is compared with")
    max_checkpoints: int | None = option(None, "end after this many evaluations", lower=1)
    idle_timeout: float | None = option(
        None, "end after this many seconds without a new checkpoint", lower=0
    )

    def __post_init__(self) -> None:
        problems = Problems("the watch settings")
        check_options(self, problems, "watch.{}".format)
        for name in ("level", "max_drop"):
            if not 0 < getattr(self, name) < 1:
                problems.add(
                    f"{name} is a fraction between 0 and 1",
                    got=getattr(self, name),
                    change=f"watch.{name}",
                )
        problems.raise_if_any(ConfigError)


@dataclass(frozen=True, kw_only=True)
class WatchSettings(WatchOptions):
    """Evaluate the checkpoints in training_dir; reports and the trend go to results_dir.

    command:   argv that exports, serves and evaluates a checkpoint, without the keys that differ
               from checkpoint to checkpoint
    successor: argv that submits the next look to the scheduler, or empty: this process looks on
    folder:    working directory of both
    job_folder: of this look's job; those of earlier looks are beside it
    """

    error_code: ClassVar[int] = ERROR

    results_dir: str
    model_name: str
    command: tuple[str, ...]
    successor: tuple[str, ...] = ()
    folder: str = "."
    job_folder: str | None = None
