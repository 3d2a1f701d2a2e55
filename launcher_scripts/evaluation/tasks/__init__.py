"""The tasks a model can be measured by. A new one is a file here and a line in TASKS."""

from launcher_scripts.evaluation.tasks import encode, lambada, questions, reference_texts
from launcher_scripts.evaluation.tasks.task import Task

TASKS: dict[str, Task] = {
    "lambada": lambada.run,
    "squad": questions.run_squad,
    "boolq_generate": questions.run_boolq,
    "summarization": reference_texts.run_summarization,
    "translation": reference_texts.run_translation,
    "encode": encode.run,
}
# Those that ask the reference themselves, because a report does not hold what they compare.
COMPARING = ("encode",)
