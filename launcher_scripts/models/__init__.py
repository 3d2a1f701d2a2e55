"""The model families: one row each."""

from launcher_scripts.models import gpt
from launcher_scripts.models.family import Family

FAMILIES = {"gpt": Family("gpt", gpt.GPTConfig, gpt.weights)}
