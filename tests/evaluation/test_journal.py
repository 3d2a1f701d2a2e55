"""An interrupted evaluation goes on where it was, in the same set-up alone, and alone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.common.packages import ERROR
from launcher_scripts.config.evaluation import BenchmarkSettings, GenerationSettings, TaskSettings
from launcher_scripts.evaluation.journal import Journal, locked, value_differences
from launcher_scripts.steps import measure_accuracy, measure_speed
from tests.evaluation.fake_server import FakeServer
from tests.evaluation.test_steps import ROOT, announce, settings_file
from tests.processes import wait_for

STEPS = ("measure_accuracy", "measure_speed")
BEGUN = {"date": "2026-01-01"}


def opened(path: Path, set_up: object = 1, **options: bool) -> Journal:
    return Journal(path / "journal" / "t.jsonl", {"set_up": set_up}, BEGUN, **options)


def ask(*asked: int) -> Callable[[int], Iterator[int]]:
    """Results that are their own numbers; a 99 is a fault."""

    def results(first: int) -> Iterator[int]:
        for result in asked[first:]:
            if result == 99:
                raise RuntimeError("interrupted")
            yield result

    return results


def interrupted(path: Path) -> None:
    """Two results of three."""
    with opened(path) as journal, pytest.raises(RuntimeError, match="interrupted"):
        list(journal.continued(ask(0, 1, 99), lambda: {"seconds": 2.5}))


def test_results_of_an_interrupted_run_are_not_asked_again(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with opened(tmp_path) as journal:
        assert (journal.stored, journal.counts) == ([0, 1], {"seconds": 2.5})
        assert list(journal.continued(ask(99, 99, 7))) == [0, 1, 7]
        assert journal.measured_on == {**BEGUN, "runs": ["2026-01-01"] * 2}
    with opened(tmp_path) as journal:
        assert list(journal.continued(ask(99, 99, 99))) == [0, 1, 7]
        assert len(journal.measured_on["runs"]) == 2  # this run asked nothing


@pytest.mark.parametrize(
    "torn",
    [b'{"result": 1', b'{"result": 1}', b"\0\0\0\0\n", b"7\n", b'{"other": 1}\n{"result": 5}\n'],
)
def test_a_torn_line_is_written_again(torn: bytes, tmp_path: Path) -> None:
    interrupted(tmp_path)
    path = tmp_path / "journal" / "t.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-1]) + torn)
    with opened(tmp_path) as journal:
        assert list(journal.continued(ask(99, 8, 9))) == [0, 8, 9]
    with opened(tmp_path) as journal:
        assert journal.stored == [0, 8, 9]


@pytest.mark.parametrize("content", [b"", b'{"journal"', b"\xff\n"])
def test_a_journal_without_its_first_line_holds_nothing(content: bytes, tmp_path: Path) -> None:
    interrupted(tmp_path)
    (tmp_path / "journal" / "t.jsonl").write_bytes(content)
    for kept in ([], [3]):
        with opened(tmp_path) as journal:
            assert journal.stored == kept
            assert list(journal.continued(ask(3))) == [3]


@pytest.mark.parametrize(
    ("set_up", "options", "says"),
    [
        ({"limit": 5}, {}, "t starts over: other set_up"),
        (1, {"resume": False}, "t starts over: evaluate.resume is False"),
    ],
)
def test_another_set_up_begins_anew_and_keeps_the_old_results(
    set_up: object, options: dict[str, bool], says: str, tmp_path: Path, capsys: Any
) -> None:
    interrupted(tmp_path)
    before = (tmp_path / "journal" / "t.jsonl").read_bytes()
    with opened(tmp_path, set_up, **options) as journal:
        assert list(journal.continued(ask(5))) == [5]
    assert says in capsys.readouterr().err
    assert (tmp_path / "journal" / "t.jsonl.old").read_bytes() == before


def test_differences_are_named() -> None:
    one = {"a": {"x": 1, "y": [1]}, "b": None}
    other = {"a": {"x": 1, "y": [2]}, "c": {"d": 0}}
    assert value_differences(one, one) == []
    assert value_differences(one, other) == [("a.y", [1], [2]), ("c", None, {"d": 0})]


def test_a_results_folder_has_one_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    with locked(folder) as journals:
        says = rf"another evaluation \(process {os.getpid()} on .*\) writes into {folder}"
        with pytest.raises(ConfigError, match=says), locked(folder):
            pass
        (journals / "kept.jsonl").write_text("")
    assert [path.name for path in journals.iterdir()] == ["kept.jsonl"]
    with locked(tmp_path / "empty"):
        pass
    assert not (tmp_path / "empty").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*Not a directory.*results_dir"):
        locked(tmp_path / "file" / "results").__enter__()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path / "results"):
        pass
    assert "lock cannot be locked: " in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_lock_that_was_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before had it open still; a third one may hold the file of that name by now."""
    flock, path = fcntl.flock, tmp_path / "journal" / "lock"
    held = []

    def after_removal(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        held.append(descriptor)
        if len(held) == 1:
            path.unlink()

    monkeypatch.setattr("fcntl.flock", after_removal)
    with locked(tmp_path):
        assert len(held) == 2 and path.exists()


def test_a_link_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "t.jsonl").symlink_to(tmp_path / "precious")
    with opened(tmp_path) as journal, pytest.raises(ConfigError, match="cannot write"):
        list(journal.continued(ask(1)))
    assert not (tmp_path / "precious").exists()


def many_items(job: Path) -> tuple[TaskSettings, ...]:
    """A scoring and a generating task of 24 items each."""
    letters = "abcdefghijk"
    texts = [f"{letters[n % 11]}b {letters[n % 7]}" for n in range(24)]
    (job / "items.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (job / "source").write_text("\n".join(texts) + "\n")
    generation = GenerationSettings(target_file=str(job / "source"), output_len=3)
    return (
        TaskSettings("lambada", str(job / "items.jsonl"), batch_size=2),
        TaskSettings("translation", str(job / "source"), batch_size=2, generation=generation),
    )


def same(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what is measured and when."""
    sections = [*report["tasks"].values(), report["speed"]]
    for section in sections:
        del section["measured_on"]["date"], section["measured_on"]["runs"]
        section.pop("pace", None)
    for row in report["speed"]["rows"]:
        for name in [name for name in row if name.endswith(("_ms", "_per_second"))]:
            del row[name]
    return report


class Holding(FakeServer):
    """Answers `answers` more inferences and then none, until that is set anew; None: all."""

    answers: int | None = None

    @property
    def delay(self) -> float:
        if self.answers is None:
            return 0.0
        self.answers -= 1
        return 0.0 if self.answers >= 0 else 3600.0

    @delay.setter
    def delay(self, _value: float) -> None:
        """What a plain one is given."""


def kill_when(step: str, arguments: list[str], there: Callable[[], bool]) -> None:
    """Run a step as a process of its own until something is there, and end it as a crash does."""
    command = [sys.executable, "-m", f"launcher_scripts.steps.{step}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: there() or process.poll() is not None)
    finally:
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors


def lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def test_a_killed_evaluation_goes_on_to_the_same_report(job: Path, capsys: Any) -> None:
    sweep = BenchmarkSettings(batch_sizes=(1, 2), lengths=((4, 3),), requests=2, warmup=1)
    values = {"tasks": many_items(job), "benchmark": sweep, "steps": STEPS}
    arguments = ["--settings", settings_file(job, **values)]
    report, journals = job / "results" / "report.json", job / "results" / "journal"
    with Holding() as server:
        announce(job, server)
        for step in (measure_accuracy, measure_speed):
            assert step.main(arguments) == 0
        assert not journals.exists()
        whole = json.loads(report.read_text())
        report.unlink()

        server.answers = 24 + 10
        kill_when(STEPS[0], arguments, lambda: lines(journals / "translation.jsonl") > 8)
        kept = lines(journals / "translation.jsonl") - 2
        assert "lambada" in json.loads(report.read_text())["tasks"]
        server.answers = None
        before = len(server.received)
        assert measure_accuracy.main(arguments) == 0
        assert len(server.received) - before == 24 - kept

        server.answers = 3 + 1
        kill_when(STEPS[1], arguments, lambda: lines(journals / "speed.jsonl") > 2)
        server.answers = None
        before = len(server.received)
        assert measure_accuracy.main(arguments) == 0  # the whole job again: nothing is asked
        assert len(server.received) == before
        assert measure_speed.main(arguments) == 0
        assert len(server.received) - before == 3
    said = capsys.readouterr().err
    assert f"translation continues after {kept} results of the evaluation begun " in said
    assert "speed continues after 1 results" in said
    resumed = json.loads(report.read_text())
    assert len(resumed["tasks"]["translation"]["measured_on"]["runs"]) == 2
    assert len(resumed["tasks"]["lambada"]["measured_on"]["runs"]) == 1
    assert resumed["tasks"]["translation"]["pace"]["requests"] == 24
    assert resumed["tasks"]["translation"]["pace"]["tokens"] == 24 * 3
    assert same(resumed) == same(whole)
    assert not journals.exists()


def test_a_reference_goes_on_as_well(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than the served model."""
    (job / "original").mkdir()
    (task, _) = many_items(job)
    task = TaskSettings("lambada", task.data_file, batch_size=2, reference=str(job / "original"))
    arguments = ["--settings", settings_file(job, tasks=(task,))]
    scored = []

    class Original:
        name = "the original"

        def __init__(self, _path: Path) -> None:
            pass

        def score(self, rows: Any, _in_flight: int) -> Iterator[Any]:
            from tests.evaluation.fake_server import logits_after

            for row in rows:
                if len(scored) == 10:
                    scored.append(None)
                    raise ConfigError("interrupted")
                scored.append(row)
                yield logits_after(row)

    monkeypatch.setattr("launcher_scripts.evaluation.comparison.TransformersModel", Original)
    with FakeServer() as server:
        announce(job, server)
        assert measure_accuracy.main(arguments) == ERROR
        assert measure_accuracy.main(arguments) == 0
        assert len(server.received) == 24
    assert len(scored) == 24 + 1
    section = json.loads((job / "results" / "report.json").read_text())["tasks"]["lambada"]
    assert section["reference"]["pace"]["requests"] == 24
    assert section["reference"]["different"] == []


def test_other_data_are_asked_anew(job: Path, capsys: Any) -> None:
    tasks = many_items(job)[:1]
    arguments = ["--settings", settings_file(job, tasks=tasks)]
    with FakeServer(hang_up=5) as server:
        announce(job, server)
        assert measure_accuracy.main(arguments) == ERROR
    (job / "items.jsonl").write_text('{"text": "a b"}\n')
    with FakeServer() as server:
        announce(job, server)
        assert measure_accuracy.main(arguments) == 0
        assert len(server.received) == 1
    said = capsys.readouterr().err
    # Without a manifest another server may serve another model, too.
    assert "lambada starts over: other data.items.jsonl, server.http; the results until" in said
    assert [path.name for path in (job / "results" / "journal").iterdir()] == ["lambada.jsonl.old"]


def test_a_server_that_was_started_anew_serves_the_same_by_its_manifest(job: Path) -> None:
    (job / "manifest.json").write_text("{}")
    arguments = ["--settings", settings_file(job, tasks=many_items(job)[:1])]
    with FakeServer(hang_up=5) as server:
        announce(job, server)
        assert measure_accuracy.main(arguments) == ERROR
    kept = lines(job / "results" / "journal" / "lambada.jsonl") - 2
    assert kept > 0
    with FakeServer() as server:
        announce(job, server)
        assert measure_accuracy.main(arguments) == 0
        assert len(server.received) == 24 - kept


def test_two_evaluations_of_one_folder_are_refused(job: Path, capsys: Any) -> None:
    arguments = ["--settings", settings_file(job)]
    with locked(job / "results"):
        assert measure_speed.main(arguments) == ERROR
    assert "writes into" in capsys.readouterr().err
