"""Step: measure how fast the served model generates and put the figures into the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("measure_speed")

from launcher_scripts.clients.model_client import open_client
from launcher_scripts.common.errors import ConfigError, lookup, problem
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.evaluation.journal import FOLDER, Journal
from launcher_scripts.evaluation.report import Report, measured_on, set_up
from launcher_scripts.evaluation.speed import SpeedRow, check_batch_sizes, sweep
from launcher_scripts.evaluation.tables import speed_table
from launcher_scripts.evaluation.tasks.prompts import read_vocab_size
from launcher_scripts.steps.evaluation_step import run_evaluation


def main(argv: Sequence[str] | None = None) -> int:
    description = "Measure how fast a served model is."
    return run_evaluation("measure_speed", description, measure_speed, argv)


def measure_speed(settings: EvaluateSettings) -> None:
    """The whole sweep of the settings; reported when all of it is measured."""
    report = Report(Path(settings.results_dir), settings.model_name)
    benchmark = settings.benchmark
    if benchmark is None:
        raise ConfigError(problem("no speed to measure", change="evaluate.benchmark"))
    vocab_size = read_vocab_size(Path(settings.tokenizer_dir))
    client, ready = open_client(settings)
    with client:
        check_batch_sizes(benchmark, client.max_batch_size())
        seeds = {"prompts": "[batch size, input tokens, output tokens] of each row"}
        environment = measured_on(settings, ready, parameters=client.parameters, seeds=seeds)
        served = set_up(environment, settings=asdict(benchmark), vocab_size=vocab_size)
        file = Path(settings.results_dir) / FOLDER / "speed.jsonl"

        encodes = lookup(CONTRACTS, client.model_type, "model_type").encoder_only

        def send(first: int) -> Iterator[dict[str, Any]]:
            rows = sweep(benchmark, vocab_size, client.generate, first=first, encodes=encodes)
            return map(asdict, rows)

        rows = []
        with Journal(file, served, environment, resume=settings.resume) as journal:
            for values in journal.continued(send):
                rows.append(row := SpeedRow(**values))
                print(
                    f"speed: batch size {row.batch_size}, {row.input_len} tokens in, "
                    f"{row.output_len} out: {row.latency_p50_ms:.1f} ms",
                    file=sys.stderr,
                    flush=True,
                )
    report.add_speed(benchmark, rows, journal.measured_on)
    print("\n".join([speed_table(rows), "", f"report: {report.html_file}"]))


if __name__ == "__main__":
    sys.exit(main())
