"""The tasks a model can be measured by. A new one is a function here and a line in TASKS."""

from launcher_scripts.evaluation.tasks import scored_tasks, text_tasks
from launcher_scripts.evaluation.tasks.task import Task

TASKS: dict[str, Task] = {
    "lambada": scored_tasks.run_lambada,
    "squad": text_tasks.run_squad,
    "boolq_generate": text_tasks.run_boolq,
    "summarization": text_tasks.run_summarization,
    "translation": text_tasks.run_translation,
    "encode": scored_tasks.run_encode,
}
# Those that ask the reference themselves, because a report does not hold what they compare.
COMPARING = ("encode",)
