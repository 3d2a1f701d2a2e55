"""Tasks of texts: BoolQ and SQuAD by exact match and F1 of the words, summaries by ROUGE,
translations by BLEU and chrF.
"""

from __future__ import annotations

import csv
import json
import re
import string
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.evaluation.tasks.prompts import (
    generate_texts,
    numbered,
    prompts_of,
    read_lines,
    require_items,
)
from launcher_scripts.evaluation.tasks.task import (
    EvaluatedModel,
    Metric,
    ProgressCallback,
    TaskResult,
    average,
    fraction,
)

BOOLQ_TEMPLATE = "Passage: {passage}\nQuestion: {question}\nAnswer:"
WORDS = {"yes": True, "true": True, "no": False, "false": False}
ANSWERS = ("true", "false")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class YesNoQuestion:
    passage: str
    question: str
    answer: bool

    @property
    def fields(self) -> dict[str, str]:
        return {"passage": self.passage, "question": self.question}


def read_boolq(settings: TaskSettings) -> list[YesNoQuestion]:
    """The first `limit` questions; raises ConfigError that names every line that is none."""
    lines = read_lines(settings.data_file, f"evaluate.tasks.{settings.name}.data_file")
    problems = Problems(f"the questions in {settings.data_file}")
    questions = []
    for number, line in numbered(lines, settings.limit):
        try:
            entry = json.loads(line)
            answer = str(entry["answer"]).lower()
            passage, question = str(entry["passage"]), str(entry["question"])
        except (ValueError, KeyError, TypeError):
            problems.add(f"line {number} needs passage, question and answer", got=line[:60])
            continue
        if answer not in ANSWERS:
            problems.add(f"the answer of line {number} is neither true nor false", got=answer)
        questions.append(YesNoQuestion(passage, question, answer == "true"))
    require_items(questions, problems)
    return questions


def understood(generated: str) -> bool | None:
    """The answer in a text; None where it is none."""
    word = _WORD.search(generated)
    return WORDS.get(word.group().lower()) if word else None


def summarise_boolq(items: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    """Accuracy, and how many were answered at all."""
    return {
        "accuracy": fraction([item["correct"] for item in items], "answers that are right"),
        "answered": fraction(
            [understood(item["prediction"]) is not None for item in items],
            "texts that begin with yes, no, true or false",
        ),
    }


def run_boolq(
    settings: TaskSettings, model: EvaluatedModel, progress: ProgressCallback
) -> TaskResult:
    """Answer the questions of settings.data_file."""
    questions = read_boolq(settings)
    prompts = prompts_of(
        settings, BOOLQ_TEMPLATE, (question.fields for question in questions), "passage"
    )
    generated = generate_texts(model, prompts, settings, progress)
    items = [
        {
            "index": index,
            "question": question.question,
            "target": question.answer,
            "prediction": text,
            "correct": understood(text) is question.answer,
        }
        for index, (question, text) in enumerate(zip(questions, generated, strict=True))
    ]
    return TaskResult(summarise_boolq(items), items)


SQUAD_TEMPLATE = "Context: {context}\n\nQuestion: {question}\n\nAnswer:"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    """One question with every answer that counts as right."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]

    @property
    def fields(self) -> dict[str, str]:
        return {"context": self.context, "question": self.question}


def read_squad(settings: TaskSettings) -> list[Question]:
    """The first `limit` questions, in the file's order."""
    key = f"evaluate.tasks.{settings.name}.data_file"
    try:
        content = json.loads(Path(settings.data_file).read_text(encoding="utf-8-sig"))
        questions = list(_questions(content))[: settings.limit]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            problem(
                f"{settings.data_file} is not in SQuAD 1.1's layout: "
                f"{type(error).__name__}: {error}",
                change=key,
            )
        ) from error
    problems = Problems(f"the questions in {settings.data_file}")
    for question in questions:
        if not question.answers:
            problems.add(f"question {question.id} has no answer")
    require_items(questions, problems)
    return questions


def _questions(content: Any) -> Iterator[Question]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = tuple(_text(answer, "text") for answer in entry["answers"])
                context, question = _text(paragraph, "context"), _text(entry, "question")
                yield Question(str(entry["id"]), context, question, answers)


def _text(entry: Any, name: str) -> str:
    value = entry[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text; got {value!r}")
    return value


def normalised(answer: str) -> str:
    """Lower case, without punctuation and articles, with single blanks."""
    bare = answer.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the normalised words.

    >>> f1("the cat sat", "a cat")
    0.6666666666666666
    """
    predicted, right = normalised(prediction).split(), normalised(answer).split()
    shared = sum((Counter(predicted) & Counter(right)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(right)
    return 2 * precision * recall / (precision + recall)


def judge_answers(index: int, question: Question, generated: str) -> dict[str, Any]:
    """One item of the report."""
    lines = generated.splitlines()
    prediction = lines[0].strip() if lines else ""
    return {
        "index": index,
        "id": question.id,
        "targets": list(question.answers),
        "prediction": prediction,
        "exact_match": any(normalised(prediction) == normalised(a) for a in question.answers),
        "f1": max(f1(prediction, answer) for answer in question.answers),
    }


def summarise_squad(items: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    """Exact match and F1 over all questions."""
    return {
        "exact_match": fraction(
            [item["exact_match"] for item in items], "answers that equal a given one"
        ),
        "f1": average([item["f1"] for item in items], True, "mean F1 of the answers' words"),
    }


def run_squad(
    settings: TaskSettings, model: EvaluatedModel, progress: ProgressCallback
) -> TaskResult:
    """Answer the questions of settings.data_file."""
    questions = read_squad(settings)
    prompts = prompts_of(
        settings, SQUAD_TEMPLATE, (question.fields for question in questions), "context"
    )
    generated = generate_texts(model, prompts, settings, progress)
    pairs = zip(questions, generated, strict=True)
    items = [judge_answers(index, question, text) for index, (question, text) in enumerate(pairs)]
    return TaskResult(summarise_squad(items), items)


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


def summarise_scores(items: Sequence[dict[str, Any]]) -> dict[str, Metric]:
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
    predictions = generate_texts(
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
    return TaskResult(summarise_scores(items), items)


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
    predictions = generate_texts(model, prompts, settings, progress)
    rows = zip(sources, targets, predictions, strict=True)
    return TaskResult(
        corpus_scores(predictions, targets),
        [
            {"index": index, "source": source, "target": target, "prediction": prediction}
            for index, (source, target, prediction) in enumerate(rows)
        ],
    )
