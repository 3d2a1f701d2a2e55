"""Step: judge the report of an evaluation by its policy, and exit with the verdict's code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("judge")

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.config.policy import open_policy
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation import gate
from launcher_scripts.evaluation.gate import promote
from launcher_scripts.evaluation.report import Report
from launcher_scripts.steps.evaluation_step import run_evaluation


def main(argv: Sequence[str] | None = None) -> int:
    return run_evaluation("judge", "Judge an evaluation by its policy.", judge_report, argv)


def judge_report(settings: EvaluateSettings) -> int:
    """0: GO, 1: NO-GO, 2: INCONCLUSIVE; printed, in verdict.json and in the report.

    After GO a server that was held back publishes its address.
    """
    report = Report(Path(settings.results_dir), settings.model_name)
    policy = open_policy(settings.policy)
    if policy is None:
        raise ConfigError(problem("no policy to judge by", change="evaluate.policy"))
    verdict = gate.judge(report.content, policy, report.results_dir)
    report.add_verdict(verdict)
    print("\n".join(["", *verdict.lines(), "", f"verdict: {report.verdict_file}"]), flush=True)
    promote(settings, verdict.verdict)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
