"""Texts beside human ones: summaries by ROUGE, translations by BLEU and chrF.

Summarization: articles against their highlights, by ROUGE's F-measures.

data_file is a CSV file with the columns article, highlights and id, as CNN/DailyMail comes in.
Sources: See et al., "Get To The Point", ACL 2017 (the data); Lin, "ROUGE", 2004, as the package
rouge-score computes it, with stemming.

Translation: lines of a text against a human's translations, by sacrebleu's BLEU and chrF.

data_file holds a sentence a line, generation.target_file its translations in the same order; both
may be gzipped. Sources: Post, "A Call for Clarity in Reporting BLEU Scores", WMT 2018.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.evaluation.tasks.prompts import answers, prompts_of, read_lines, require_items
from launcher_scripts.evaluation.tasks.task import (
    EvaluatedModel,
    Metric,
    ProgressCallback,
    TaskResult,
    average,
)

SUMMARY_TEMPLATE = "summarize: {article}"
COLUMNS = ("id", "article", "highlights")
MEASURES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def read_articles(settings: TaskSettings) -> list[dict[str, str]]:
    """The first `limit` rows, each with COLUMNS."""
    key = f"evaluate.tasks.{settings.name}.data_file"
    limit = csv.field_size_limit(sys.maxsize)  # an article is longer than csv expects of a field
    try:
        with Path(settings.data_file).open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))[: settings.limit]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(problem(f"cannot read the articles: {error}", change=key)) from error
    finally:
        csv.field_size_limit(limit)  # which is the whole process's
    problems = Problems(f"the articles in {settings.data_file}")
    for number, row in enumerate(rows, start=1):
        missing = [column for column in COLUMNS if not row.get(column)]
        if missing:
            problems.add(f"article {number} lacks columns", got=missing, choices=COLUMNS)
    require_items(rows, problems)
    return [{column: row[column] for column in COLUMNS} for row in rows]


def lines_of(text: str) -> str:
    """A sentence a line: rougeLsum compares summaries sentence by sentence."""
    return _SENTENCE_END.sub("\n", text.strip())


def score(prediction: str, target: str) -> dict[str, float]:
    """F-measures, fractions."""
    from rouge_score.rouge_scorer import RougeScorer

    scores = RougeScorer(list(MEASURES), use_stemmer=True).score(
        lines_of(target), lines_of(prediction)
    )
    return {name: float(scores[name].fmeasure) for name in MEASURES}


def summarise(items: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    """The mean of every measure."""
    return {
        name: average([item[name] for item in items], True, f"mean F-measure of {name}")
        for name in MEASURES
    }


def run_summarization(
    settings: TaskSettings, model: EvaluatedModel, progress: ProgressCallback
) -> TaskResult:
    """Summarise the articles of settings.data_file."""
    articles = read_articles(settings)
    predictions = answers(
        model, prompts_of(settings, SUMMARY_TEMPLATE, articles, "article"), settings, progress
    )
    items = [
        {
            "index": index,
            "id": article["id"],
            "target": article["highlights"],
            "prediction": prediction,
            **score(prediction, article["highlights"]),
        }
        for index, (article, prediction) in enumerate(zip(articles, predictions, strict=True))
    ]
    return TaskResult(summarise(items), items)


TRANSLATION_TEMPLATE = "{source}"
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


def run_translation(
    settings: TaskSettings, model: EvaluatedModel, progress: ProgressCallback
) -> TaskResult:
    """Translate settings.data_file and compare with settings.generation.target_file."""
    sources, targets = read_pairs(settings)
    prompts = prompts_of(
        settings, TRANSLATION_TEMPLATE, ({"source": source} for source in sources), "source"
    )
    predictions = answers(model, prompts, settings, progress)
    rows = zip(sources, targets, predictions, strict=True)
    return TaskResult(
        corpus_scores(predictions, targets),
        [
            {"index": index, "source": source, "target": target, "prediction": prediction}
            for index, (source, target, prediction) in enumerate(rows)
        ],
    )
