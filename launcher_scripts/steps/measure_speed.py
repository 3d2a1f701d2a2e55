"""Step: measure how fast the served model generates and put the figures into the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.steps.packages import check_packages

if __name__ == "__main__":
    check_packages("measure_speed", "jinja2", "matplotlib", "numpy", "tritonclient", "yaml")

from launcher_scripts.common.errors import ConfigError, lookup, problem
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.evaluation.ready import connect
from launcher_scripts.evaluation.report import Report, measured_on
from launcher_scripts.evaluation.speed import check_batch_sizes, read_vocab_size, sweep
from launcher_scripts.evaluation.tables import speed_table
from launcher_scripts.steps.command import run_step


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Measure how fast a served model is.", EvaluateSettings, measure, argv)


def measure(settings: EvaluateSettings) -> None:
    """The whole sweep of the settings; reported when all of it is measured."""
    benchmark = settings.benchmark
    if benchmark is None:
        raise ConfigError(problem("no speed to measure", change="evaluate.benchmark"))
    report = Report(Path(settings.results_dir), settings.model_name)
    vocab_size = read_vocab_size(Path(settings.tokenizer_dir))
    client, ready = connect(settings)
    with client:
        check_batch_sizes(benchmark, client.max_batch_size())
        environment = measured_on(settings, ready)
        rows = []
        encodes = lookup(CONTRACTS, client.model_type, "model_type").encoder_only
        for row in sweep(benchmark, vocab_size, client.generate, encodes=encodes):
            rows.append(row)
            print(
                f"speed: batch size {row.batch_size}, {row.input_len} tokens in, "
                f"{row.output_len} out: {row.latency_p50_ms:.1f} ms",
                file=sys.stderr,
                flush=True,
            )
    report.add_speed(benchmark, rows, environment)
    print("\n".join([speed_table(rows), "", f"report: {report.html_file}"]))


if __name__ == "__main__":
    sys.exit(main())
