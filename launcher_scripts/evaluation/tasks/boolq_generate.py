"""BoolQ: yes-or-no questions about a passage, by accuracy of the generated answers.

data_file has a JSON object a line: passage, question, answer (true or false, also as text). The
first word that a model generates counts: yes or true, no or false; anything else is wrong, as in
the FasterTransformer backend's tools/t5_utils/boolq_test.py. lm-eval's boolq is another task: it
compares the log-likelihoods of yes and no.

Data set: Clark et al., "BoolQ: Exploring the Surprising Difficulty of Natural Yes/No Questions",
NAACL 2019.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher_scripts.common.errors import Problems
from launcher_scripts.config.tasks import TaskSettings
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
    fraction,
)

TEMPLATE = "Passage: {passage}\nQuestion: {question}\nAnswer:"
WORDS = {"yes": True, "true": True, "no": False, "false": False}
ANSWERS = ("true", "false")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Question:
    passage: str
    question: str
    answer: bool

    @property
    def fields(self) -> dict[str, str]:
        return {"passage": self.passage, "question": self.question}


def read_questions(settings: TaskSettings) -> list[Question]:
    """The first `limit` questions; raises ConfigError that names every line that is none."""
    lines = read_lines(settings.data_file, f"evaluate.tasks.{settings.name}.data_file")
    problems = Problems(f"the questions in {settings.data_file}")
    questions = []
    for number, line in numbered(lines, settings.limit):
        try:
            entry = json.loads(line)
            given = str(entry["answer"]).lower()
            passage, question = str(entry["passage"]), str(entry["question"])
        except (ValueError, KeyError, TypeError):
            problems.add(f"line {number} needs passage, question and answer", got=line[:60])
            continue
        if given not in ANSWERS:
            problems.add(f"the answer of line {number} is neither true nor false", got=given)
        questions.append(Question(passage, question, given == "true"))
    require_items(questions, problems)
    return questions


def understood(generated: str) -> bool | None:
    """The answer in a text; None where it is none."""
    word = _WORD.search(generated)
    return WORDS.get(word.group().lower()) if word else None


def summarise(items: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    """Accuracy, and how many were answered at all."""
    return {
        "accuracy": fraction([item["correct"] for item in items], "answers that are right"),
        "answered": fraction(
            [understood(item["prediction"]) is not None for item in items],
            "texts that begin with yes, no, true or false",
        ),
    }


def run(settings: TaskSettings, asked: EvaluatedModel, progress: ProgressCallback) -> TaskResult:
    """Answer the questions of settings.data_file."""
    questions = read_questions(settings)
    prompts = prompts_of(settings, TEMPLATE, (question.fields for question in questions), "passage")
    generated = answers(asked, prompts, settings, progress)
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
    return TaskResult(summarise(items), items)
