"""Work within limits: what exceeds one is named, and the next item finds a process again."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest

from launcher_scripts.common.limited_process import (
    LimitedProcesses,
    WorkLimitError,
    WorkLimits,
)


def make_worker(prefix: str) -> Callable[[str], Any]:
    """Run by the processes of these tests."""

    def work(kind: str) -> Any:
        if kind == "loop":
            while True:
                pass
        if kind == "memory":
            return len("x" * (1 << 30))
        if kind == "crash":
            return ctypes.string_at(0)
        if kind == "sleep":
            time.sleep(3600)
        return prefix + kind

    return work


@pytest.mark.parametrize(
    ("kind", "limits", "message"),
    [
        ("loop", WorkLimits(cpu_seconds=0.2), r"more than 0\.2 s of a processor"),
        ("memory", WorkLimits(memory_mib=64), "more than 64 MiB of memory"),
        ("crash", WorkLimits(), "nested too deeply"),
        ("sleep", WorkLimits(seconds=0.2), r"longer than 0\.2 s"),
    ],
)
def test_an_item_beyond_a_limit_is_refused_and_the_next_one_is_not(kind, limits, message):
    processes = LimitedProcesses(f"{__name__}:make_worker", "item ", limits, count=1)
    with pytest.raises(WorkLimitError, match=message):
        processes.call(kind)
    if kind != "sleep":  # which has a limit that a busy machine may reach
        assert processes.call("a") == "item a"
