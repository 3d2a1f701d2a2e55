"""Step: ask the served model the evaluation's tasks and put the answers' worth into the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.steps.packages import check_packages

if __name__ == "__main__":
    check_packages("measure_accuracy", "jinja2", "matplotlib", "numpy", "tritonclient", "yaml")

from launcher_scripts.common.errors import ConfigError, lookup, problem
from launcher_scripts.common.tokenizer import TokenizerError, load_tokenizer
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.comparison import compared, open_reference, timed
from launcher_scripts.evaluation.ready import connect
from launcher_scripts.evaluation.report import Report, measured_on
from launcher_scripts.evaluation.tables import task_table
from launcher_scripts.evaluation.tasks import COMPARING, PACKAGES, TASKS
from launcher_scripts.evaluation.tasks.task import Asked, Progress
from launcher_scripts.steps.command import run_step


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Measure what a served model knows.", EvaluateSettings, measure, argv)


def measure(settings: EvaluateSettings) -> None:
    """Every task of the settings, one after the other; each is reported when it is done."""
    if not settings.tasks:
        raise ConfigError(problem("no task to measure", choices=TASKS, change="evaluate.tasks"))
    tasks = [lookup(TASKS, task.name, "evaluate.tasks") for task in settings.tasks]
    for task in settings.tasks:
        check_packages(f"the task {task.name}", *PACKAGES.get(task.name, ()))
    report = Report(Path(settings.results_dir), settings.model_name)
    try:
        tokenizer = load_tokenizer(Path(settings.tokenizer_dir))
    except TokenizerError as error:
        raise ConfigError(problem(str(error), change="evaluate.tokenizer_dir")) from error
    client, ready = connect(settings)
    tables = []
    with client:
        asked = Asked(
            client,
            tokenizer,
            client.special_ids("closing"),
            Path(settings.tokenizer_dir),
            client.special_ids("opening"),
            client.special_ids("decoder"),
        )
        for task, task_settings in zip(tasks, settings.tasks, strict=True):
            own = task_settings.name in COMPARING
            reference = None if own else open_reference(task_settings)
            environment = measured_on(settings, ready)
            result = timed(task, task_settings, asked, log_progress(task_settings.name))
            report.add_task(task_settings, result, environment)
            if reference is not None:
                progress = log_progress(f"{task_settings.name}'s reference")
                result = compared(task, task_settings, asked, progress, result, reference)
                report.add_task(task_settings, result, environment)
            tables.append(task_table(task_settings.name, result))
    print("\n".join([*tables, "", f"report: {report.html_file}"]))


def log_progress(name: str) -> Progress:
    """A line on stderr at every tenth of the items."""

    def progress(done: int, total: int) -> None:
        if done * 10 // total > (done - 1) * 10 // total:
            print(f"{name}: {done} of {total} items", file=sys.stderr, flush=True)

    return progress


if __name__ == "__main__":
    sys.exit(main())
