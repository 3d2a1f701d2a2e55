"""Results exported to MLflow and Weights & Biases."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.evaluation import BenchmarkSettings
from launcher_scripts.config.settings import EvaluateSettings, write_settings
from launcher_scripts.steps import evaluation_step
from launcher_scripts.steps.evaluation_step import figures, run_evaluation, tracked_parameters

EXAMPLE = Path(__file__).with_name("example_report.json")


def run_last_step(folder: Path, *export: str) -> int:
    """The last step of an evaluation whose report is the example; its verdict is 2."""
    settings = EvaluateSettings(
        ready_file="ready.json",
        results_dir=str(folder / "results"),
        model_name="gpt_1.3b",
        tokenizer_dir="tokenizer",
        benchmark=BenchmarkSettings(),
        steps=("measure_speed", "judge"),
        export=export,
    )
    write_settings(settings, folder / "settings.yaml")

    def body(_: EvaluateSettings) -> int:
        shutil.copy(EXAMPLE, folder / "results" / "report.json")
        return 2

    arguments = ["--settings", str(folder / "settings.yaml")]
    return run_evaluation("judge", "The last step.", body, arguments)


def test_every_figure_and_setting_has_a_name() -> None:
    report = json.loads(EXAMPLE.read_text())
    rows = list(figures(report))
    assert ("lambada.accuracy", 0.775, 0) in rows
    assert ("translation.bleu", 25.8, 0) in rows
    steps = [step for name, _, step in rows if name == "load.tokens_per_second"]
    assert steps == list(range(len(report["load"]["runs"])))
    values = dict(tracked_parameters(report))
    assert values["lambada.limit"] == "40"
    assert values["lambada.generation.template"] == "None"
    assert values["model"] == report["model"]
    assert max(map(len, values.values())) <= 500


def test_a_missing_package_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation_step, "find_spec", lambda _: None)
    assert run_last_step(tmp_path, "mlflow") == 3
    said = "evaluate.export needs the package mlflow in the job's Python; change pip install mlflow"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "results" / "report.json").exists()
    assert run_last_step(tmp_path) == 2
    with pytest.raises(ConfigError, match="unknown export; got 'mlflo'; choices: mlflow, wandb"):
        run_last_step(tmp_path, "mlflo")


def test_a_run_of_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    mlflow = importlib.import_module("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # as it was at the end
    assert run_last_step(tmp_path, "mlflow") == 2
    assert "exported to MLflow: run " in capsys.readouterr().out
    client = mlflow.MlflowClient((tmp_path / "results" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("gpt_1.3b")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["lambada.accuracy"] == 0.775
    assert run.data.params["lambada.limit"] == "40"
    assert run.data.tags["verdict"] == "NO-GO"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.json"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    assert run_last_step(tmp_path, "mlflow") == 3
    assert "cannot export the results to MLflow" in capsys.readouterr().err


def test_a_run_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run_last_step(tmp_path, "wandb") == 2
    assert "exported to Weights & Biases: " in capsys.readouterr().out
    (log,) = (tmp_path / "results" / "wandb").glob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    for item in (b"lambada.accuracy", b"0.775", b"lambada.limit", b"NO-GO", b"report.json"):
        assert item in content
    monkeypatch.setenv("WANDB_PROJECT", "a/b")  # which is no name of a project
    assert run_last_step(tmp_path, "wandb") == 3
    assert "cannot export the results to Weights & Biases" in capsys.readouterr().err
