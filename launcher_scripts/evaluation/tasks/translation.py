"""Translation: lines of a text against a human's translations, by sacrebleu's BLEU and chrF.

data_file holds a sentence a line, generation.target_file its translations in the same order; both
may be gzipped. Sources: Post, "A Call for Clarity in Reporting BLEU Scores", WMT 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.config.tasks import TaskSettings
from launcher_scripts.evaluation.tasks.prompts import answers, prompts_of, read_lines
from launcher_scripts.evaluation.tasks.task import (
    EvaluatedModel,
    Metric,
    ProgressCallback,
    TaskResult,
)

TEMPLATE = "{source}"
RESAMPLES = 1000  # of the items, for the 95 % interval


def read_pairs(settings: TaskSettings) -> tuple[list[str], list[str]]:
    """(sources, targets), `limit` of each; raises ConfigError when they do not pair."""
    key = f"evaluate.tasks.{settings.name}"
    target_key = f"{key}.generation.target_file"
    sources = read_lines(settings.data_file, f"{key}.data_file")
    targets = read_lines(settings.generation.target_file or "", target_key)
    if len(sources) != len(targets) or not sources:
        raise ConfigError(
            problem(
                "sources and targets must have the same number of lines, at least one",
                got=f"{len(sources)} and {len(targets)}",
                change=target_key,
            )
        )
    return sources[: settings.limit], targets[: settings.limit]


def corpus_scores(predictions: Sequence[str], targets: Sequence[str]) -> dict[str, Metric]:
    """BLEU and chrF of all predictions together, in sacrebleu's units (0 to 100)."""
    from sacrebleu.metrics import BLEU, CHRF

    metrics = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        resamples = RESAMPLES if len(predictions) > 1 else 1
        score = metric.corpus_score(list(predictions), [list(targets)], n_bootstrap=resamples)
        signature = str(metric.get_signature().format(short=True))
        low = high = None
        if resamples > 1:
            # sacrebleu's interval lies around the mean of its resamples; both are NumPy's float32.
            mean, half_width = float(score._mean), float(score._ci)
            low, high = mean - half_width, mean + half_width
        metrics[name] = Metric(score.score, low, high, False, f"sacrebleu {signature}")
    return metrics


def run(settings: TaskSettings, asked: EvaluatedModel, progress: ProgressCallback) -> TaskResult:
    """Translate settings.data_file and compare with settings.generation.target_file."""
    sources, targets = read_pairs(settings)
    prompts = prompts_of(settings, TEMPLATE, ({"source": source} for source in sources), "source")
    predictions = answers(asked, prompts, settings, progress)
    rows = zip(sources, targets, predictions, strict=True)
    return TaskResult(
        corpus_scores(predictions, targets),
        [
            {"index": index, "source": source, "target": target, "prediction": prediction}
            for index, (source, target, prediction) in enumerate(rows)
        ],
    )
