"""The tasks a model can be measured by. A new one is a file here and a line in TASKS."""

from launcher_scripts.evaluation.tasks import lambada
from launcher_scripts.evaluation.tasks.task import Task

TASKS: dict[str, Task] = {
    "lambada": lambada.run,
}
