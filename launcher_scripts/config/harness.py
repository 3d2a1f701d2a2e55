"""What lm-evaluation-harness is asked to measure, as a part of EvaluateSettings."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.config.options import check_options, option
from launcher_scripts.config.paths import ConfigPath, SecretPath

KEY = "evaluate.harness"
_NAME = re.compile(r"\w[\w.:+-]*")


@dataclass(frozen=True)
class HarnessSettings:
    """lm-evaluation-harness (lm_eval) asks the model through a gateway's completions.

    tasks:    lm_eval's names of tasks and groups; none: it asks nothing
    data:     the folder that has the data sets, each as <owner>/<name>, as the hub calls it
    gateway:  its address, http://host:port/v1, or its ready file; None: the server's own gateway
    api_keys: of a gateway that wants one: lines NAME=key, of which the first is used
    python:   the interpreter that has lm_eval; None: the job's
    """

    tasks: tuple[str, ...] = ()
    data: ConfigPath | None = None
    limit: int | None = option(None, "most items of a task; by default all", least=1)
    num_fewshot: int | None = option(
        None, "few-shot examples of an item; by default the task's own number", least=0
    )
    concurrency: int = option(8, "requests in flight", least=1)
    gateway: str | None = None
    api_keys: SecretPath | None = None
    python: str | None = None

    def __post_init__(self) -> None:
        problems = Problems("the settings of lm_eval")
        check_options(self, problems, f"{KEY}.{{}}".format)
        for name in self.tasks:
            if not _NAME.fullmatch(name):
                problems.add("not a name of a task", got=name, change=f"{KEY}.tasks")
        if self.tasks and self.data is None:
            problems.add(
                "lm_eval downloads nothing: it needs a folder with the data sets of its tasks",
                change=f"{KEY}.data (docs/evaluation.md)",
            )
        problems.raise_if_any(ConfigError)

    @property
    def gateway_is_file(self) -> bool:
        """Whether `gateway` is a ready file, not an address."""
        return self.gateway is not None and "://" not in self.gateway
