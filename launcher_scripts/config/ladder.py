"""The precision ladder: one model exported, served and evaluated in several precisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.exit_codes import ERROR
from launcher_scripts.common.quantization import QUANTIZATIONS

RUNGS = ("fp32", "bf16", "fp16", *QUANTIZATIONS)


@dataclass(frozen=True)
class LadderRung:
    """One precision, and where its jobs leave what is known of it.

    report_dir:     results folder of its evaluation
    checkpoint_dir: folder of its weights; None: in a cloud storage
    jobs:           folders of its jobs, in order
    """

    name: str
    report_dir: str
    checkpoint_dir: str | None = None
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class LadderSettings:
    """Compare the rungs' evaluations; the report goes to results_dir."""

    error_code: ClassVar[int] = ERROR

    results_dir: str
    model_name: str
    rungs: tuple[LadderRung, ...]


def check_rungs(names: tuple[str, ...]) -> None:
    """Raises ConfigError for rungs that do not exist, or that are named twice."""
    problems = Problems("the ladder")
    for name in names:
        problems.check_choice("rung", name, RUNGS, "evaluate.ladder")
    if len(set(names)) < len(names):
        problems.add("a rung is named twice", got=list(names), change="evaluate.ladder")
    problems.raise_if_any(ConfigError)
