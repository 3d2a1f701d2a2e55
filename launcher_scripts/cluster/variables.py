"""The variables of a job: which of them its script exports, and which its commands are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# They would change how the script finds Slurm's programs, and neither enroot nor pyxis takes
# them over from a job.
_OF_THE_NODE = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
# enroot keeps variables as lines of a file, and takes quotes around a value off.
_NO_LINE = re.compile(r"|.*\n.*|[\"'].*[\"']\s*", re.DOTALL)


@dataclass(frozen=True)
class Variables:
    """exported: for all of a script; given: in front of a step's command, as arguments of env."""

    exported: Mapping[str, str]
    given: Mapping[str, str]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Variables:
        given = {
            name: value
            for name, value in env.items()
            if name in _OF_THE_NODE or _NO_LINE.fullmatch(value)
        }
        return cls({name: env[name] for name in env if name not in given}, given)
