"""Ctrl-C while the launcher starts: it ends, whatever Python is doing at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher_scripts import launcher
from launcher_scripts.common.processes import SignalInterruption

# Runs in the launcher: a signal comes at an import, while a finalizer runs.
AT_AN_IMPORT = """
import os, signal, sys

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), int(os.environ["SIGNAL_NUMBER"]))
        for _ in range(1000):
            pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["SIGNAL_AT"]:
            Finalized()

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def command(checkout: Path, arguments: list[str]) -> list[str]:
    main = str(checkout / "main.py")
    return [sys.executable, main, "cluster_type=interactive", *arguments, "stages=[export]"]


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("hydra", signal.SIGINT),
        ("omegaconf", signal.SIGTERM),
        ("stages.plan", signal.SIGINT),
        ("hydra._internal.hydra", signal.SIGHUP),
        ("submitit", signal.SIGINT),
    ],
)
def test_a_signal_in_a_finalizer_of_an_import_is_not_lost(
    command: list[str], tmp_path: Path, module: str, number: int
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(AT_AN_IMPORT)
    where = {"PYTHONPATH": str(tmp_path / "site"), "SIGNAL_AT": module}
    env = {**os.environ, **where, "SIGNAL_NUMBER": str(int(number))}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 128 + number, ended.stdout
    assert ended.stderr == f"error: stopped by {signal.Signals(number).name}\n"
    assert not (tmp_path / "the results").exists()


@pytest.mark.parametrize("after", [0.1, 0.2, 0.3, 0.5, 0.8, 1.4])
def test_a_signal_at_any_time_ends_the_launcher(
    command: list[str], tmp_path: Path, after: float
) -> None:
    env = {**os.environ, "EXPORT_WAITS": str(tmp_path / "pid")}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE) as process:
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    # Before the launcher's first line Python itself ends.
    assert process.returncode in (128 + signal.SIGINT, -signal.SIGINT, 1)


def test_a_signal_that_python_drops_is_found_by_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: dropped.append(found.exc_type))

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass

    interruption = SignalInterruption()
    with interruption.listening():
        interruption.check()
        Finalized()
        assert dropped == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            interruption.check()


def test_closed_standard_streams(command: list[str], tmp_path: Path) -> None:
    """As some daemons start programs."""
    closed = subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command], cwd=tmp_path, check=False
    )
    assert closed.returncode == 0
    (folder,) = (tmp_path / "the results").glob("tiny/export_*/jobs/001")
    assert (folder / "ran").read_text() == "convert_checkpoint\nwrite_model_repository\n"


def test_an_interruption_before_main_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "launcher_arguments", interrupted)
    assert launcher.main(["serve", "model"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "error: stopped by SIGINT\n"
