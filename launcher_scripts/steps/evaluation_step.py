"""Code shared by the steps of an evaluation: one at a time in its folder, and results elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import LauncherError, problem
from launcher_scripts.common.packages import VERDICT_FILE
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.journal import FILE_NAME, locked, read_content, remove_journals
from launcher_scripts.steps.command import run_step

_MAX_PARAM = 500  # characters of a value that MLflow takes


def run_evaluation(
    step: str,
    description: str,
    body: Callable[[EvaluateSettings], int | None],
    argv: Sequence[str] | None = None,
) -> int:
    """The step of that name as run_step runs it.

    The journals stay until the last step of the job has ended well: what an earlier step measured
    is not asked again when a later one was interrupted.
    """

    def exclusive(settings: EvaluateSettings) -> int | None:
        check_exports(settings)
        with locked(Path(settings.results_dir)) as journals:
            status = body(settings)
            if settings.steps[-1:] in ((), (step,)):
                for name in settings.export:
                    export_results(settings, EXPORTERS[name])
                remove_journals(journals)
        return status

    return run_step(description, EvaluateSettings, exclusive, argv)


class ExportError(LauncherError):
    """Results could not be exported; they are in the results folder."""


def check_exports(settings: EvaluateSettings) -> None:
    """Raise ExportError before anything is measured, if a package is missing."""
    for name in settings.export:
        if find_spec(name) is None:
            text = f"evaluate.export needs the package {name} in the job's Python"
            raise ExportError(problem(text, change=f"pip install {name}, or 'evaluate.export=[]'"))


@dataclass(frozen=True)
class Results:
    """Results of an evaluation: their folder, the report, and the files that people look at."""

    model: str
    folder: Path
    report: dict[str, Any]
    files: list[Path]

    @classmethod
    def of(cls, settings: EvaluateSettings) -> Results:
        folder = Path(settings.results_dir)
        report = read_content(folder, "evaluate.run.results_dir")
        names = (FILE_NAME, "report.html", VERDICT_FILE)
        files = [folder / name for name in names if (folder / name).exists()]
        return cls(settings.model_name, folder, report, files)


@dataclass(frozen=True)
class Exporter:
    """A row of EXPORTERS.

    write:  writes the results, and returns where they are
    change: the variable by which a user says where
    """

    title: str
    write: Callable[[Results], str]
    change: str


def export_results(settings: EvaluateSettings, exporter: Exporter) -> None:
    """Write the results elsewhere. Raises ExportError where it fails."""
    results = Results.of(settings)
    try:
        location = exporter.write(results)
    except Exception as error:
        text = f"cannot export the results to {exporter.title}: {error}"
        change = f"env_vars.{exporter.change}, or 'evaluate.export=[]'"
        raise ExportError(problem(text, change=change)) from error
    print(f"exported to {exporter.title}: {location}", flush=True)


def _to_mlflow(results: Results) -> str:
    """Write a run of MLflow: parameters, figures, the report and the verdict as artifacts.

    MLFLOW_TRACKING_URI says where, by default the folder mlruns of the results folder;
    MLFLOW_EXPERIMENT_NAME is the model's name by default.
    """
    import mlflow

    folder, report = results.folder, results.report
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow 3 prefers databases
        mlflow.set_tracking_uri((folder / "mlruns").absolute().as_uri())
    if "MLFLOW_EXPERIMENT_NAME" not in os.environ:
        mlflow.set_experiment(results.model)
    with mlflow.start_run(run_name=folder.name) as run:
        mlflow.log_params(dict(tracked_parameters(report)))
        for name, value, step in figures(report):
            mlflow.log_metric(name, value, step=step)
        if "verdict" in report:
            mlflow.set_tag("verdict", report["verdict"]["verdict"])
        for path in results.files:
            mlflow.log_artifact(str(path))
    return f"run {run.info.run_id} of {mlflow.get_tracking_uri()}"


def _to_wandb(results: Results) -> str:
    """Write a run of Weights & Biases: settings, figures, the verdict, and the report's files.

    WANDB_API_KEY or WANDB_MODE say where; without both the run is offline, in the folder wandb of
    the results folder. WANDB_PROJECT is the model's name by default.
    """
    import wandb

    folder, report = results.folder, results.report
    mode = None if {"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys() else "offline"
    project = os.environ.get("WANDB_PROJECT", results.model)
    steps: dict[int, dict[str, float]] = {}
    for name, value, step in figures(report):
        steps.setdefault(step, {})[name] = value
    with wandb.init(
        project=project,
        name=folder.name,
        dir=str(folder),
        config=dict(tracked_parameters(report)),
        mode=mode,
    ) as run:
        for step, values in sorted(steps.items()):
            run.log(values, step=step)
        if "verdict" in report:
            run.summary["verdict"] = report["verdict"]["verdict"]
        artifact = wandb.Artifact("evaluation", type="evaluation")
        for path in results.files:
            artifact.add_file(str(path))
        run.log_artifact(artifact)
        return str(run.url or run.dir)


EXPORTERS = {
    "mlflow": Exporter("MLflow", _to_mlflow, "MLFLOW_TRACKING_URI"),
    "wandb": Exporter("Weights & Biases", _to_wandb, "WANDB_MODE=offline"),
}


def sections(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The measured sections of a report by name; a task has its own."""
    yield from report["tasks"].items()
    for name, section in report.items():
        if name != "tasks" and isinstance(section, dict) and "settings" in section:
            yield name, section


def tracked_parameters(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings of every section as texts."""
    yield "model", str(report["model"])
    for section, content in sections(report):
        for key, value in _flat(content["settings"]):
            yield f"{section}.{key}", str(value)[:_MAX_PARAM]


def figures(report: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """Name, value and step of every figure; the runs of a load test are its steps."""
    for section, content in sections(report):
        for name, metric in content.get("metrics", {}).items():
            value = metric.get("value") if isinstance(metric, dict) else None
            if isinstance(value, int | float):
                yield f"{section}.{name}", float(value), 0
        for step, run in enumerate(content.get("runs", ())):
            for name in ("requests_per_second", "tokens_per_second", "failed"):
                if run.get(name) is not None:
                    yield f"{section}.{name}", float(run[name]), step


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", item) for name, item in _flat(value))
        else:
            yield key, value
