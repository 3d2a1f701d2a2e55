"""Step: have lm_eval ask the served model its tasks, and put what it found into the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("run_harness")

from launcher_scripts.clients.model_client import open_client
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.files import value_digest
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation import journal
from launcher_scripts.evaluation.harness import find_gateway, lm_eval_version, run_harness
from launcher_scripts.evaluation.report import Report, measured_on, set_up
from launcher_scripts.evaluation.tables import harness_table
from launcher_scripts.steps.evaluation_step import run_evaluation

FOLDER = "harness"


def main(argv: Sequence[str] | None = None) -> int:
    return run_evaluation("run_harness", "Run lm_eval on a served model.", measure_harness, argv)


def measure_harness(settings: EvaluateSettings) -> None:
    """All tasks in one run of lm_eval; reported when it has ended."""
    harness = settings.harness
    if harness is None or not harness.tasks:
        raise ConfigError(problem("no task for lm_eval", change="evaluate.harness.tasks"))
    version = lm_eval_version(harness)
    report = Report(Path(settings.results_dir), settings.model_name)
    client, ready = open_client(settings)
    with client:
        environment = measured_on(settings, ready, parameters=client.parameters)
    gateway = find_gateway(settings, harness, ready)
    answers = _answers(settings, set_up(environment, lm_eval=version))
    result = run_harness(harness, version, gateway, report.results_dir / FOLDER, answers)
    report.add_harness(harness, result, environment)
    print("\n".join([harness_table(result), "", f"report: {report.html_file}"]))


def _answers(settings: EvaluateSettings, served: dict[str, Any]) -> Path:
    """Return the path where lm_eval keeps answers: only those of the same model, tokenizer and
    version."""
    folder = Path(settings.results_dir) / journal.FOLDER
    if not settings.resume:
        for old in folder.glob(f"{FOLDER}-*.db"):
            old.unlink()
    return folder / f"{FOLDER}-{value_digest(served)[:16]}"


if __name__ == "__main__":
    sys.exit(main())
