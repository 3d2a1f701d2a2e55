"""Step: measure what load the served model carries and put the runs into the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("measure_load")

from launcher_scripts.clients.model_client import open_client
from launcher_scripts.common.errors import ConfigError, ServerError, problem
from launcher_scripts.config.options import paths_in
from launcher_scripts.config.policy import open_policy
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.journal import FOLDER, Journal
from launcher_scripts.evaluation.load.figures import LoadRun, Saturation
from launcher_scripts.evaluation.load.load_test import LoadTest
from launcher_scripts.evaluation.report import Report, measured_on, set_up
from launcher_scripts.evaluation.tables import load_table
from launcher_scripts.steps.evaluation_step import run_evaluation

# Of the settings: no run's figures depend on these.
_LIMITS = ("api_key_file", "find_saturation", "saturation_runs", "time_limit")


def main(argv: Sequence[str] | None = None) -> int:
    description = "Measure what load a served model carries."
    return run_evaluation("measure_load", description, measure_load, argv)


def measure_load(settings: EvaluateSettings) -> None:
    """Every run of the settings; each is in the report when it ends.

    Raises ServerError when no run is valid, unless a policy judges them.
    """
    load = settings.load
    if load is None:
        raise ConfigError(problem("no load to measure", change="evaluate.load"))
    report = Report(Path(settings.results_dir), settings.model_name)
    client, ready = open_client(settings)
    saturation: Saturation | None = None
    with client, ExitStack() as stack:
        files = [named.path for named in paths_in(load)]
        environment = measured_on(settings, ready, data=files, parameters=client.parameters)
        options = {name: value for name, value in asdict(load).items() if name not in _LIMITS}
        served = set_up(environment, settings=options, request_timeout=settings.request_timeout)
        file = Path(settings.results_dir) / FOLDER / "load.jsonl"
        journal = stack.enter_context(Journal(file, served, environment, resume=settings.resume))

        def noted(run: LoadRun) -> None:
            log_run(run)
            if run.valid:  # an interrupted job may be why it is not: the next one runs it again
                journal.note(asdict(run))
            report.add_load(load, test.runs, saturation, journal.measured_on)

        test = LoadTest(settings, load, client, noted, list(map(LoadRun.of, journal.stored)))
        test.run_all()
        if load.find_saturation:
            saturation = test.saturation()
        report.add_load(load, test.runs, saturation, journal.measured_on)
    print(load_table(test.runs))
    if saturation is not None:
        print(f"{saturation.path}: {saturation.text}")
    print(f"\nreport: {report.html_file}")
    if not any(run.valid for run in test.runs) and not is_judged(settings):
        raise ServerError(f"no run of the load test is valid: {test.runs[0].invalid_reasons[0]}")


def is_judged(settings: EvaluateSettings) -> bool:
    """Return whether the evaluation's policy has bounds on the load."""
    policy = open_policy(settings.policy)
    halves = () if policy is None else (policy, policy.if_measured)
    return any(bounds is not None and bounds.load is not None for bounds in halves)


def log_run(run: LoadRun) -> None:
    line = f"load: {run.path}, {run.load.text}: {run.tokens_per_second:.1f} tokens/s"
    print("; ".join((line, *run.invalid_reasons)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
