"""Progress: a bar for a person, a few lines for a log."""

from __future__ import annotations

import io

from launcher_scripts.checkpoint.layout.writing import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_ten_lines() -> None:
    log = io.StringIO()
    progress = Progress("exporting", 1000 * 2**20, log)
    for _ in range(1000):
        progress.add(2**20)
    progress.close()
    lines = log.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("exporting: 10% of 1000 MiB, ")
    assert lines[-1].startswith("exporting: 100% of 1000 MiB, ")


def test_a_terminal_gets_a_bar() -> None:
    terminal = Terminal()
    progress = Progress("exporting", 4 * 2**20, terminal)
    progress.add(2 * 2**20)
    progress.add(2 * 2**20)
    progress.close()
    drawn = terminal.getvalue().split("\r")
    assert "exporting [###############---------------] 50% of 4 MiB" in drawn[1]
    assert f"[{'#' * 30}] 100% of 4 MiB" in drawn[-1]
    assert drawn[-1].endswith("\n")
