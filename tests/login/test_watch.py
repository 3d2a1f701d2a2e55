"""The stage `watch`: what it is refused with, and a series of two checkpoints on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.evaluation import WatchSettings
from tests.login.conftest import LOCAL, Planner, Run

WATCH = "stages=[watch]"
ITEMS = [{"index": index, "correct": index % 2 == 0} for index in range(40)]
METRIC = {"value": 0.5, "low": None, "high": None, "percent": True}
TASK = {"metrics": {"accuracy": METRIC}, "items": ITEMS}
REPORT = json.dumps({"schema": 1, "model": "tiny", "tasks": {"lambada": TASK}})


@pytest.fixture
def training(tmp_path: Path, nemo_file: Path) -> Path:
    """A training that has written two .nemo files."""
    folder = tmp_path / "a training"
    folder.mkdir()
    for step in (10, 20):
        shutil.copy(nemo_file, folder / f"gpt--val_loss=2.1-step={step}.nemo")
    return folder


def series_keys(training: Path, checkout: Path) -> tuple[str, ...]:
    """The keys of a watch over `training` whose evaluations are stand-ins."""
    return (
        f"watch.training_dir='{training}'",
        f"+env_vars.CHECKOUT='{checkout}'",
        "+env_vars.REPORT='" + REPORT.replace("'", "\\'") + "'",
    )


def settings_of(plan: Planner, *overrides: str) -> WatchSettings:
    (stage,) = plan(WATCH, *overrides).stages
    assert isinstance(stage.settings, WatchSettings)
    return stage.settings


def test_a_checkpoint_gets_the_keys_of_the_command_line(
    plan: Planner, arguments: list[str], training: Path
) -> None:
    key = f"watch.training_dir='{training}'"
    settings = settings_of(plan, LOCAL, *arguments, key, "+env_vars.X=1")
    passed = settings.command[2:]
    assert "stages=[export,deploy,evaluate]" in passed
    assert "+env_vars.X=1" in passed
    assert "export.run.model_train_name=tiny" in passed
    assert not [text for text in passed if "checkpoint_path" in text or "base_results" in text]
    assert not [text for text in passed if text.startswith("watch")]
    assert settings.successor == ()


def test_on_slurm_the_next_look_waits_for_this_one(
    plan: Planner, arguments: list[str], training: Path
) -> None:
    keys = ("cluster_type=bcm", f"watch.training_dir='{training}'", "watch.interval=600")
    own = "cluster.sbatch_args=['--wckey=x']"
    successor = settings_of(plan, *arguments, *keys, own).successor
    assert WATCH in successor
    assert successor[-2:] == (
        "watch.cluster.sbatch_args=['--wckey=x','--begin=now+600']",
        "watch.cluster.dependency=singleton",
    )
    # The next look's own next look has these keys once.
    again = settings_of(plan, *arguments, *keys, own, *(f"++{key}" for key in successor[-2:]))
    assert again.successor == successor


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages=[export,watch]", "a watch starts the other stages itself"),
        (
            "watch.training_dir=/missing",
            r"the watch's training_dir is not there.*watch\.training_dir",
        ),
        ("evaluate.stop_server=False", r"evaluate\.stop_server=True"),
        ("evaluate.policy=null", r"a watch needs verdicts.*evaluate\.policy"),
        ("evaluate.ladder=[fp32]", r"evaluate\.ladder=null"),
        ("watch.order=random", r"newest.*oldest.*watch\.order"),
        ("watch.level=0", r"a fraction.*watch\.level"),
        ("watch.parallel=0", r"watch\.parallel"),
        ("watch.baseline=/missing/report.json", r"watch\.baseline"),
    ],
)
def test_refused(
    plan: Planner, arguments: list[str], training: Path, override: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){says}"):
        plan(WATCH, LOCAL, *arguments, f"watch.training_dir='{training}'", override)


def test_a_series_in_the_foreground(
    run: Run, arguments: list[str], training: Path, checkout: Path, tmp_path: Path
) -> None:
    keys = (*series_keys(training, checkout), "watch.interval=0.2", "watch.idle_timeout=0")
    result = run(WATCH, LOCAL, *arguments, *keys)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "the results" / "tiny" / "watch"
    content = json.loads((folder / "trend.json").read_text())
    found = [(entry["step"], entry["verdict"]) for entry in content["checkpoints"]]
    assert found == [(10, "GO"), (20, "GO")]
    name = "gpt--val_loss-2.1-step-20"
    assert (folder / "latest-GO").resolve().name == name
    log = (folder / "checkpoints" / name / "watch.log").read_text()
    assert "judging the report" in log
    again = run(WATCH, LOCAL, *arguments, *keys)
    assert again.returncode == 0
    assert (folder / "checkpoints" / name / "watch.log").read_text() == log
