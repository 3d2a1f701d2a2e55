"""The tasks a model can be measured by. A new one is a file here and a line in TASKS."""

from launcher_scripts.evaluation.tasks import (
    boolq_generate,
    encode,
    lambada,
    squad,
    summarization,
    translation,
)
from launcher_scripts.evaluation.tasks.task import Task

TASKS: dict[str, Task] = {
    "lambada": lambada.run,
    "squad": squad.run,
    "boolq_generate": boolq_generate.run,
    "summarization": summarization.run,
    "translation": translation.run,
    "encode": encode.run,
}
# Those that ask the reference themselves, because a report does not hold what they compare.
COMPARING = ("encode",)
# What computes a task's figures, and is needed when all has been asked.
PACKAGES = {"summarization": ("rouge_score",), "translation": ("sacrebleu",)}
