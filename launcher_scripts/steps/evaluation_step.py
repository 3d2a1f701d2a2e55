"""What the steps of an evaluation have in common: one evaluation alone in a results folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.journal import locked, remove_journals
from launcher_scripts.steps.command import run_step


def run_evaluation(
    step: str,
    description: str,
    body: Callable[[EvaluateSettings], int | None],
    argv: Sequence[str] | None = None,
) -> int:
    """The step of that name as run_step runs it.

    The journals stay until the last step of the job has ended well: what an earlier step measured
    is not asked again when a later one was interrupted.
    """

    def alone(settings: EvaluateSettings) -> int | None:
        with locked(Path(settings.results_dir)) as journals:
            status = body(settings)
            if settings.steps[-1:] in ((), (step,)):
                remove_journals(journals)
        return status

    return run_step(description, EvaluateSettings, alone, argv)
