"""Questions about a text: BoolQ and SQuAD, by exact match and F1 of the words.

BoolQ: yes-or-no questions about a passage, by accuracy of the generated answers.

data_file has a JSON object a line: passage, question, answer (true or false, also as text). The
first word that a model generates counts: yes or true, no or false; anything else is wrong, as in
the FasterTransformer backend's tools/t5_utils/boolq_test.py. lm-eval's boolq is another task: it
compares the log-likelihoods of yes and no.

Data set: Clark et al., "BoolQ: Exploring the Surprising Difficulty of Natural Yes/No Questions",
NAACL 2019.

SQuAD: questions about a paragraph, by exact match and F1 of the words.

data_file has SQuAD 1.1's JSON layout. An answer is normalised as the data set's own script does
it (lower case, no punctuation, no articles, single blanks) and compared with every given answer;
the best counts. What a model generates after a line's end does not belong to its answer.

Data set: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.evaluation.tasks.prompts import (
    answers,
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
    generated = answers(model, prompts, settings, progress)
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


def judge(index: int, question: Question, generated: str) -> dict[str, Any]:
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
    generated = answers(model, prompts, settings, progress)
    pairs = zip(questions, generated, strict=True)
    items = [judge(index, question, text) for index, (question, text) in enumerate(pairs)]
    return TaskResult(summarise_squad(items), items)
