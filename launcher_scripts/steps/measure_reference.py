"""Ask NeMo's own model the tasks of an evaluation, to compare the served model with.

    python3 -m launcher_scripts.steps.measure_reference --settings evaluate_hydra.yaml \
        --checkpoint gpt.nemo --results-dir /results/nemo_reference

It runs in a Python with nemo_toolkit (docs/nemo-toolkit.md). The settings are those of the
evaluate stage, in its job folder; evaluate.tasks.<task>.reference takes the report.json.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("measure_reference")

from launcher_scripts.common.command_line import CommandParser
from launcher_scripts.common.errors import LauncherError, lookup
from launcher_scripts.common.files import CHAIN
from launcher_scripts.config.settings import EvaluateSettings, read_settings
from launcher_scripts.evaluation.comparison import timed
from launcher_scripts.evaluation.journal import Journal, locked, remove_journals
from launcher_scripts.evaluation.report import (
    Report,
    data_files,
    measured_on,
    questions_of,
    reference_set_up,
)
from launcher_scripts.evaluation.tables import task_table
from launcher_scripts.evaluation.tasks import TASKS
from launcher_scripts.evaluation.tasks.megatron_models import NemoReference
from launcher_scripts.evaluation.tasks.prompts import read_tokenizer
from launcher_scripts.evaluation.tasks.task import EvaluatedModel
from launcher_scripts.steps.measure_accuracy import log_progress


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="measure_reference", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="of the evaluate stage")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a .nemo that you trust")
    parser.add_argument("--results-dir", type=Path, required=True, help="for the report")
    args = parser.parse_args(argv)
    try:
        settings = read_settings(EvaluateSettings, args.settings)
        measure_reference(settings, args.checkpoint.absolute(), args.results_dir.absolute())
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def measure_reference(settings: EvaluateSettings, checkpoint: Path, results_dir: Path) -> None:
    """Every task of the settings; each is reported when it is done."""
    report = Report(results_dir, settings.model_name)
    tokenizer = read_tokenizer(Path(settings.tokenizer_dir))
    model = NemoReference(checkpoint)
    rank = {"rank": 0, "device": model.device, "host": platform.node()}
    server = {settings.protocol: model.name, "versions": model.versions, "ranks": [rank]}
    requested = EvaluatedModel(model, tokenizer, Path(settings.tokenizer_dir))
    with locked(results_dir) as journals:
        for task in settings.tasks:
            run = lookup(TASKS, task.name, "evaluate.tasks")
            environment = measured_on(settings, server, data=data_files(task))
            reasons = {"manifest": f"{model.name} was asked, not the served checkpoint"}
            environment["digests"] |= {**dict.fromkeys(CHAIN), "reasons": reasons}
            asks = reference_set_up(environment, checkpoint, settings=questions_of(task))
            file, resume = journals / f"{task.name}.jsonl", settings.resume
            with Journal(file, asks, environment, resume=resume) as journal:
                result = timed(run, task, requested, log_progress(task.name), journal)
                report.add_task(task, result, journal.measured_on)
            print(task_table(task.name, result))
        remove_journals(journals)
    print(f"report: {report.json_file}")


if __name__ == "__main__":
    sys.exit(main())
