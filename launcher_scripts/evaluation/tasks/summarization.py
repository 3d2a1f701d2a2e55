"""Summarization: articles against their highlights, by ROUGE's F-measures.

data_file is a CSV file with the columns article, highlights and id, as CNN/DailyMail comes in.
Sources: See et al., "Get To The Point", ACL 2017 (the data); Lin, "ROUGE", 2004, as the package
rouge-score computes it, with stemming.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.tasks import TaskSettings
from launcher_scripts.evaluation.tasks.prompts import answers, prompts_of, require_items
from launcher_scripts.evaluation.tasks.task import (
    EvaluatedModel,
    Metric,
    ProgressCallback,
    TaskResult,
    average,
)

TEMPLATE = "summarize: {article}"
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


def run(settings: TaskSettings, asked: EvaluatedModel, progress: ProgressCallback) -> TaskResult:
    """Summarise the articles of settings.data_file."""
    articles = read_articles(settings)
    predictions = answers(
        asked, prompts_of(settings, TEMPLATE, articles, "article"), settings, progress
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
