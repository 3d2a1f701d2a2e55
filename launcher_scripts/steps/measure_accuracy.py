"""Step: ask the served model the evaluation's tasks and put the figures into the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.common.packages import TASK_PACKAGES, check_packages

if __name__ == "__main__":
    check_packages("measure_accuracy")

from launcher_scripts.clients.model_client import open_client
from launcher_scripts.common.errors import ConfigError, lookup, problem
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.comparison import compared, open_reference, timed
from launcher_scripts.evaluation.journal import FOLDER, Journal
from launcher_scripts.evaluation.report import (
    Report,
    data_files,
    files_of,
    measured_on,
    questions_of,
    reference_set_up,
    set_up,
)
from launcher_scripts.evaluation.tables import task_table
from launcher_scripts.evaluation.tasks import COMPARING, TASKS
from launcher_scripts.evaluation.tasks.prompts import read_tokenizer
from launcher_scripts.evaluation.tasks.task import EvaluatedModel, ProgressCallback, TaskResult
from launcher_scripts.steps.evaluation_step import run_evaluation


def main(argv: Sequence[str] | None = None) -> int:
    description = "Measure what a served model knows."
    return run_evaluation("measure_accuracy", description, measure_accuracy, argv)


def measure_accuracy(settings: EvaluateSettings) -> None:
    """Every task of the settings, one after the other; each is reported when it is done."""
    report = Report(Path(settings.results_dir), settings.model_name)
    if not settings.tasks:
        raise ConfigError(problem("no task to measure", choices=TASKS, change="evaluate.tasks"))
    for task in settings.tasks:
        lookup(TASKS, task.name, "evaluate.tasks")
        check_packages(f"the task {task.name}", *TASK_PACKAGES.get(task.name, ()))
    tokenizer = read_tokenizer(Path(settings.tokenizer_dir))
    client, ready = open_client(settings)
    tables = []
    with client:
        folder = Path(settings.tokenizer_dir)
        model = EvaluatedModel(client, tokenizer, folder, client.special_ids)
        for task_settings in settings.tasks:
            generation = task_settings.generation
            spoken = model.between(generation.source_language, generation.target_language)
            environment = measured_on(
                settings,
                ready,
                data=data_files(task_settings),
                parameters=client.parameters,
            )
            result = measure_task(settings, task_settings, spoken, report, environment)
            tables.append(task_table(task_settings.name, result))
    print("\n".join([*tables, "", f"report: {report.html_file}"]))


def measure_task(
    settings: EvaluateSettings,
    task_settings: TaskSettings,
    model: EvaluatedModel,
    report: Report,
    environment: dict[str, Any],
) -> TaskResult:
    """One task, reported when it is answered, and again when its reference is."""
    name, resume = task_settings.name, settings.resume
    task = TASKS[name]
    reference = None if name in COMPARING else open_reference(task_settings)
    folder = Path(settings.results_dir) / FOLDER
    special = model.special
    special_ids = (special.opening, special.closing, special.decoder)
    questions = {"settings": questions_of(task_settings), "special_ids": special_ids}
    comparing = {"reference": files_of(Path(str(task_settings.reference)))}
    served = set_up(environment, **questions, **(comparing if name in COMPARING else {}))
    with Journal(folder / f"{name}.jsonl", served, environment, resume=resume) as journal:
        result = timed(task, task_settings, model, log_progress(name), journal)
        environment = journal.measured_on
    report.add_task(task_settings, result, environment)
    if reference is None:
        return result
    path = Path(str(task_settings.reference))
    of_reference = reference_set_up(environment, path, **questions)
    file = folder / f"{name}.reference.jsonl"
    with Journal(file, of_reference, environment, resume=resume) as journal:
        progress = log_progress(f"{name}'s reference")
        result = compared(task, task_settings, model, progress, result, reference, journal)
    report.add_task(task_settings, result, environment)
    return result


def log_progress(name: str) -> ProgressCallback:
    """A line on stderr at every tenth of the items."""

    def progress(done: int, total: int) -> None:
        if done * 10 // total > (done - 1) * 10 // total:
            print(f"{name}: {done} of {total} items", file=sys.stderr, flush=True)

    return progress


if __name__ == "__main__":
    sys.exit(main())
