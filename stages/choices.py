"""The choices of conf/ that a command line names, checked before Hydra looks for them.

Hydra answers a wrong choice of a group that has folders of its own (`export=gpt3/x`) without saying
which there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from launcher_scripts.errors import ConfigError, Problems

_CHOICE = re.compile(r"(?P<group>\w+)(?:@[\w.]+)?=(?P<choice>[\w.\-/]+)")
_NO_CHOICES = ("", "null")


def check_choices(arguments: Iterable[str], conf: Path) -> None:
    """Raises ConfigError for every `group=choice` that `conf` has no file of.

    Whatever is no plain choice, or may come from another folder, is left to Hydra.
    """
    arguments = list(arguments)
    if any(argument.startswith(("--config-dir", "-cd")) for argument in arguments):
        return
    problems = Problems("the command line")
    for argument in arguments:
        match = _CHOICE.fullmatch(argument)
        if match is None or not (conf / match["group"]).is_dir():
            continue
        folder, choice = conf / match["group"], match["choice"].removesuffix(".yaml")
        if choice not in _NO_CHOICES and not (folder / f"{choice}.yaml").is_file():
            files = (path.relative_to(folder) for path in sorted(folder.rglob("*.yaml")))
            problems.add(
                f"unknown {match['group']}",
                got=choice,
                choices=[path.with_suffix("").as_posix() for path in files],
                change=match["group"],
            )
    problems.raise_if_any(ConfigError)
