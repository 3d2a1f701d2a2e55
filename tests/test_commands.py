"""The commands of people: one line for what is missing, and silence when nobody reads on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.common.command_line import with_open_output
from tests.test_house import ROOT

STEPS = sorted(
    path.stem
    for path in (ROOT / "launcher_scripts/steps").glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
COMMANDS = [
    ("launcher_scripts.jobs", "list"),
    ("launcher_scripts.evaluation", "judge", "report"),
    ("launcher_scripts.clients", "issue_request", "request.json"),
    *((f"launcher_scripts.steps.{step}", "--help") for step in STEPS),
]


def run(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_missing_package_is_one_line(command: tuple[str, ...]) -> None:
    ran = run("-S", "-m", *command)  # without the packages of the environment
    assert ran.returncode == 3, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: "), line
    assert " has no package " in line or " does not have " in line, line


@pytest.mark.parametrize(
    ("command", "codes"),
    [  # that of SIGPIPE where output is not buffered until the command has ended
        (("launcher_scripts.launcher", "--help"), {0, 141}),
        (("launcher_scripts.jobs", "list", "--results=tests"), {0, 141}),
        (("launcher_scripts.jobs", "--help"), {0}),
        (("launcher_scripts.evaluation", "--help"), {0}),
        (("launcher_scripts.clients", "nothing"), {3}),
        (("launcher_scripts.steps.write_example_models", "--help"), {0}),
    ],
    ids=str,
)
def test_a_closed_pipe_is_not_an_error(command: tuple[str, ...], codes: set[int]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = run("-m", *command, stdout=writer)
    finally:
        os.close(writer)
    assert ran.returncode in codes, ran.stderr
    assert "Traceback" not in ran.stderr and "BrokenPipe" not in ran.stderr


def test_other_broken_pipes_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> int:
        raise BrokenPipeError("a socket")

    with (tmp_path / "output").open("w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError, match="a socket"):
            with_open_output(body)
        assert with_open_output(lambda: 5) == 5
