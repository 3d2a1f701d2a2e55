"""A watch over a training's folder, with a command that writes reports as evaluations do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.evaluation import WatchSettings
from launcher_scripts.steps.watch import watch
from launcher_scripts.watch.series import JOURNAL, Series
from launcher_scripts.watch.training import SavedCheckpoint
from launcher_scripts.watch.watcher import Runs, Watcher
from tests.browser import browser
from tests.evaluation.test_page import emulate, needs_browser
from tests.jobs.fake_gateway import fake_gateway
from tests.processes import wait_for
from tests.server.test_protection import certificates

# Stands in for main.py: the checkpoint's file says which items are right, or what goes wrong.
COMMAND = """
import json, os, sys, time
from pathlib import Path

keys = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
checkpoint = keys["export.model.checkpoint_path"].strip("'").replace(r"\\${", "${")
content = json.loads((Path(checkpoint) / "x").read_text())
folder = Path(keys["evaluate.run.results_dir"])
folder.mkdir(parents=True, exist_ok=True)
with (folder / "calls").open("a") as calls:
    calls.write("x")
if content.get("hangs") and not (folder / "let").exists():
    (folder / "pid").write_text(str(os.getpid()))
    while content.get("right") and not (folder / "let").exists():
        time.sleep(0.05)
    if not content.get("right"):
        time.sleep(600)
if content.get("error"):
    sys.exit("error: " + content["error"])
right = content["right"]
items = [{"index": index, "correct": index < right} for index in range(100)]
metric = {"value": right / 100, "low": None, "high": None, "percent": True}
task = {"metrics": {"accuracy": metric}, "items": items}
report = {"schema": 1, "model": "tiny", "tasks": {"lambada": task}}
(folder / "report.json").write_text(json.dumps(report))
verdict = {"verdict": content.get("verdict", "GO")}
(folder / "verdict.json").write_text(json.dumps(verdict))
sys.exit({"GO": 0, "NO-GO": 1, "INCONCLUSIVE": 2}[verdict["verdict"]])
"""

Save = Callable[..., Path]


@pytest.fixture
def training(tmp_path: Path) -> Path:
    folder = tmp_path / "training"
    folder.mkdir()
    return folder


@pytest.fixture
def save(training: Path) -> Save:
    """Write a checkpoint as Megatron-LM does."""

    def save(step: int, **content: Any) -> Path:
        folder = training / f"iter_{step:07d}"
        folder.mkdir(exist_ok=True)
        (folder / "x").write_text(json.dumps(content))
        (training / "latest_checkpointed_iteration.txt").write_text(str(step))
        return folder

    return save


@pytest.fixture
def settings(tmp_path: Path, training: Path) -> Callable[..., WatchSettings]:
    command = tmp_path / "command.py"
    command.write_text(COMMAND)

    def settings(**options: Any) -> WatchSettings:
        return WatchSettings(
            training_dir=str(training),
            results_dir=str(tmp_path / "series"),
            model_name="tiny",
            command=(sys.executable, str(command)),
            folder=str(tmp_path),
            **{"interval": 0.1, "order": "oldest", "idle_timeout": 0.0, **options},
        )

    return settings


Settings = Callable[..., WatchSettings]


def trend(settings: WatchSettings) -> dict[str, Any]:
    content = json.loads((Path(settings.results_dir) / "trend.json").read_text())
    return {**content, "checkpoints": {entry["step"]: entry for entry in content["checkpoints"]}}


def calls(settings: WatchSettings, step: int) -> int:
    folder = Path(settings.results_dir) / "checkpoints" / f"iter_{step:07d}" / "evaluation"
    path = folder / "calls"
    return len(path.read_text()) if path.exists() else 0


def test_every_checkpoint_is_judged_and_a_drop_is_no_go(settings: Settings, save: Save) -> None:
    for step, right in ((10, 50), (20, 60), (30, 30), (40, 61)):
        save(step, right=right)
    chosen = settings()
    assert watch(chosen) == 0
    content = trend(chosen)
    verdicts = {step: entry["verdict"] for step, entry in content["checkpoints"].items()}
    assert verdicts == {10: "GO", 20: "GO", 30: "NO-GO", 40: "GO"}
    third = content["checkpoints"][30]
    assert third["evaluation"] == "GO"
    assert third["regressions"][0]["against"] == "the last GO, iter_0000020"
    assert third["figures"]["lambada.accuracy"]["value"] == 0.3
    assert content["latest_go"] == "iter_0000040"
    link = Path(chosen.results_dir) / "latest-GO"
    assert link.resolve().name == "iter_0000040"
    page = (link.parent / "trend.html").read_text()
    assert "lambada&#39;s accuracy dropped by 30 % against the last GO, iter_0000020" in page


def test_names_that_are_no_utf_8_are_evaluated(settings: Settings, training: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(training) + b"/gpt \xff ${x}--step=10"))
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "metadata.json").write_text("{}")
    (folder / "x").write_text(json.dumps({"right": 80}))
    assert watch(settings(max_checkpoints=1)) == 0
    entry = trend(settings())["checkpoints"][10]
    assert entry["name"] == r"gpt \xff ${x}--step=10"
    assert entry["verdict"] == "GO"


def test_the_same_command_again_evaluates_nothing_twice(settings: Settings, save: Save) -> None:
    save(10, right=50)
    chosen = settings()
    assert watch(chosen) == 0
    save(20, right=49, verdict="INCONCLUSIVE")
    assert watch(chosen) == 2
    assert watch(chosen) == 2
    assert [calls(chosen, step) for step in (10, 20)] == [1, 1]


@pytest.mark.parametrize(("error", "tls"), [("", True), ("the probe disagrees", False)])
def test_a_server_gets_the_weights_of_the_newest_go(
    settings: Settings, save: Save, tmp_path: Path, error: str, *, tls: bool
) -> None:
    (tmp_path / "pem").mkdir()
    pem = certificates(tmp_path / "pem") if tls else {}
    files = (pem["server.pem"], pem["server.key"]) if tls else None
    ca = pem.get("ca.pem")
    save(10, right=50)
    save(20, right=50, verdict="NO-GO")
    with fake_gateway(tmp_path, error, files) as (ready, bodies):
        chosen = settings(swap="after_go", swap_server=str(ready), swap_ca=ca)
        results = Path(chosen.results_dir) / "checkpoints" / "iter_0000010"
        repository = results / "tiny" / "export_1" / "model_repo"
        repository.mkdir(parents=True)
        assert watch(chosen) == 1
        assert watch(chosen) == 1
    assert [body["checkpoint"] for body in bodies] == [str(repository)]
    swaps = {step: entry["swap"] for step, entry in trend(chosen)["checkpoints"].items()}
    assert swaps[20] == ""
    assert swaps[10] == (f"the weights were not exchanged: {error}" if error else "served")


def test_swaps_need_a_server(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="swap_server"):
        settings(swap="after_go")


def test_newest_first_and_only_so_many(settings: Settings, save: Save) -> None:
    for step in (10, 20, 30):
        save(step, right=50)
    chosen = settings(order="newest", max_checkpoints=1, idle_timeout=None)
    assert watch(chosen) == 0
    assert [calls(chosen, step) for step in (10, 20, 30)] == [0, 0, 1]


def test_a_failure_is_tried_again_and_named(
    settings: Settings, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save(10, right=50)
    save(20, error="no such architecture")
    chosen = settings()
    assert watch(chosen) == 3
    entry = trend(chosen)["checkpoints"][20]
    assert (entry["state"], entry["reason"]) == ("failed", "no such architecture")
    assert calls(chosen, 20) == 2
    assert "iter_0000020: failed: no such architecture" in capsys.readouterr().out


def test_a_checkpoint_that_changes_is_not_read(settings: Settings, save: Save) -> None:
    save(10, right=50)
    with Series(Path(settings().results_dir)) as series, Runs(settings(), series) as runs:
        watcher = Watcher(settings(), series, runs)
        watcher.poll()
        save(10, right=51, more="still written")
        watcher.poll()
        (entry,) = series.in_state("written")
        watcher.poll()
        assert entry.name in [one.name for one in series.in_state("started")]
    assert trend(settings())["checkpoints"][10]["state"] == "started"


def test_a_checkpoint_that_is_saved_again_is_evaluated_again(
    settings: Settings, save: Save
) -> None:
    save(10, right=50)
    assert watch(settings()) == 0
    save(10, right=55)
    assert watch(settings()) == 0
    assert trend(settings())["checkpoints"][10]["figures"]["lambada.accuracy"]["value"] == 0.55
    second = Path(settings().results_dir) / "checkpoints" / "iter_0000010.2"
    assert (second / "evaluation" / "report.json").is_file()


def test_deleted_checkpoints_are_skipped(settings: Settings, save: Save) -> None:
    gone = save(10, right=50)
    hanging = save(20, hangs=True)
    chosen = settings(order="newest")
    with Series(Path(chosen.results_dir)) as series, Runs(chosen, series) as runs:
        watcher = Watcher(chosen, series, runs)
        for _ in range(2):
            watcher.poll()
        pid = Path(chosen.results_dir) / "checkpoints" / hanging.name / "evaluation" / "pid"
        wait_for(lambda: pid.exists() and pid.read_text() != "")
        for folder in (gone, hanging):
            (folder / "x").unlink()
            folder.rmdir()
        os.kill(int(pid.read_text()), signal.SIGKILL)
        wait_for(lambda: watcher.poll() or not series.in_state("started"))
    reasons = {step: entry["reason"] for step, entry in trend(chosen)["checkpoints"].items()}
    assert reasons == {
        10: "deleted by the training",
        20: "deleted by the training during its evaluation",
    }


def test_a_verdict_stays_when_the_training_deletes_file_by_file(
    settings: Settings, save: Save
) -> None:
    """As `save_total_limit` does; the folder is looked at while some files are left."""
    folder = save(10, right=50)
    (folder / "optimizer").write_text("x")
    assert watch(settings()) == 0
    with Series(Path(settings().results_dir)) as series, Runs(settings(), series) as runs:
        watcher = Watcher(settings(), series, runs)
        (folder / "optimizer").unlink()
        watcher.poll()
        assert [entry.version for entry in series.in_state("written")] == [2]
        (folder / "x").unlink()
        folder.rmdir()
        watcher.poll()
    assert watch(settings()) == 0
    entry = trend(settings())["checkpoints"][10]
    assert (entry["state"], entry["verdict"]) == ("judged", "GO")
    assert calls(settings(), 10) == 1


def test_a_checkpoint_that_goes_after_it_was_read_is_judged(settings: Settings, save: Save) -> None:
    folder = save(10, right=50, hangs=True)
    chosen = settings()
    evaluation = Path(chosen.results_dir) / "checkpoints" / folder.name / "evaluation"
    with Series(Path(chosen.results_dir)) as series, Runs(chosen, series) as runs:
        watcher = Watcher(chosen, series, runs)
        for _ in range(2):
            watcher.poll()
        wait_for(lambda: (evaluation / "pid").exists())
        (folder / "more").write_text("a part of the deletion shows")
        watcher.poll()
        assert len(series.in_state("started")) == 1
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        (evaluation / "let").touch()
        wait_for(lambda: watcher.poll() or not series.in_state("started"))
    assert trend(chosen)["checkpoints"][10]["verdict"] == "GO"


@needs_browser
def test_the_trend_page_fits_a_phone(settings: Settings, save: Save, tmp_path: Path) -> None:
    for step, right in ((10, 50), (20, 20)):
        save(step, right=right)
    save(30, error="/results/" + "a_long_name_" * 9)
    chosen = settings()
    watch(chosen)
    with browser(tmp_path) as page:
        page.open((Path(chosen.results_dir) / "trend.html").as_uri())
        emulate(page, 390)
        assert page.run("return document.documentElement.scrollWidth") <= 390
        assert page.run("return document.querySelectorAll('circle').length") == 2
        assert "dropped by 30 %" in page.text("main")


def test_only_so_many_exports_stay(settings: Settings, save: Save) -> None:
    """The latest GO's, too; reports of all."""
    chosen = settings(keep_exports=1)
    folder = Path(chosen.results_dir) / "checkpoints"
    for step, verdict in ((10, "GO"), (20, "GO"), (30, "INCONCLUSIVE"), (40, "INCONCLUSIVE")):
        save(step, right=50, verdict=verdict)
        repository = folder / f"iter_{step:07d}" / "tiny" / "export_tp1" / "model_repo"
        (repository / "tiny" / "1").mkdir(parents=True)
    watch(chosen)
    left = sorted(path.parents[2].name for path in folder.glob("*/*/*/model_repo"))
    assert left == ["iter_0000020", "iter_0000040"]
    assert all(calls(chosen, step) == 1 for step in (10, 20, 30, 40))
    assert (folder / "iter_0000010" / "evaluation" / "report.json").is_file()


@pytest.fixture
def killed(settings: Settings, save: Save, tmp_path: Path) -> Iterator[WatchSettings]:
    """The settings of a watch that was killed during its second evaluation."""
    save(10, right=50)
    save(20, right=51, hangs=True)
    chosen = settings()
    file = tmp_path / "watch.yaml"
    file.write_text(
        yaml.safe_dump({**vars(chosen), "command": list(chosen.command), "successor": []})
    )
    step = subprocess.Popen(
        [sys.executable, "-m", "launcher_scripts.steps.watch", "--settings", str(file)]
    )
    folder = Path(chosen.results_dir) / "checkpoints" / "iter_0000020" / "evaluation"
    try:
        wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text() != "")
        with pytest.raises(ConfigError, match="another watch"):
            Series(Path(chosen.results_dir))
    finally:
        step.kill()
        step.wait()
    (folder / "let").touch()
    child = int((folder / "pid").read_text())
    wait_for(lambda: not Path(f"/proc/{child}").exists())
    yield chosen


def test_a_killed_watch_goes_on_where_it_stopped(killed: WatchSettings) -> None:
    # Half a line, as a full disk or a lost node leaves it.
    with (Path(killed.results_dir) / JOURNAL).open("ab") as journal:
        journal.write(b'{"event": "judg')
    assert watch(killed) == 0
    assert {step: entry["verdict"] for step, entry in trend(killed)["checkpoints"].items()} == {
        10: "GO",
        20: "GO",
    }
    assert [calls(killed, step) for step in (10, 20)] == [1, 2]


def test_a_corrupt_journal_is_named(tmp_path: Path) -> None:
    checkpoint = SavedCheckpoint("iter_1", tmp_path, 1, "signature")
    with Series(tmp_path) as series:
        series.poll([checkpoint])
    (tmp_path / JOURNAL).write_text('{"event": "seen"}\n')
    with pytest.raises(ConfigError, match=r"line 1 is corrupt.*watch\.run\.results_dir"):
        Series(tmp_path)
