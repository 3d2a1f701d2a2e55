"""report.json as it is read again: to add to it, to compare with it, to judge it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.untrusted import parse_json, read_plain
from launcher_scripts.evaluation.tasks.task import Metric, Speed, TaskResult

FILE_NAME = "report.json"
SCHEMA = 1


def read_content(path: Path, change: str) -> dict[str, Any]:
    """The content of a report.json, or of the one in a folder.

    change: what names the file, for the error. Raises ConfigError for what is not a report.
    """
    file = report_file(path)
    if not file.exists():
        raise ConfigError(problem("there is no report", got=str(file), change=change))
    try:
        content = parse_json(read_plain(file))
        schema, _ = content["schema"], content["model"]
        if not isinstance(content["tasks"], dict):
            raise TypeError("its tasks are not a mapping")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            problem(f"{file} is not a report: {type(error).__name__}: {error}", change=change)
        ) from error
    if schema != SCHEMA:
        raise ConfigError(
            problem(f"{file} has another schema", got=schema, choices=[SCHEMA], change=change)
        )
    return dict(content)


def report_file(path: Path) -> Path:
    """The report.json that a path means: itself, or the one in the folder."""
    return path / FILE_NAME if path.is_dir() else path


def harness_tasks(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tasks of lm-evaluation-harness, each with what they have in common: measured_on,
    settings and, unless it has its own, version.
    """
    harness = content.get("harness") or {}
    shared = {name: harness.get(name) for name in ("measured_on", "settings", "version")}
    return {name: {**shared, **task} for name, task in harness.get("tasks", {}).items()}


def harness_samples(task: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Read lm-evaluation-harness's output for each item of a task, below `folder`/harness.

    Its file of samples has a JSON object a line, with doc_id, target, the filter that the answer
    went through, and the item's own figures; index is (doc_id, filter). None where the file is
    gone; ConfigError for a damaged one.
    """
    path = folder / "harness" / str(task.get("samples"))
    try:
        lines = [parse_json(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        return [{**line, "index": (line["doc_id"], line.get("filter"))} for line in lines]
    except OSError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} is not a samples file: {type(error).__name__}: {error}"
        raise ConfigError(problem(message)) from error


def harness_items(task: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The items of a task of lm-evaluation-harness, in the order of its doc_id.

    Each has index (the doc_id), target, what the task's figures are made of, and prediction where a
    text was generated. What went through a filter has the filter's name behind its own, as figures
    have: exact_match,strict-match.
    """
    items: dict[int, dict[str, Any]] = {}
    for sample in harness_samples(task, folder):
        try:
            index = int(sample["doc_id"])
            item = items.setdefault(index, {"index": index, "target": str(sample["target"])})
            item.update(_answers(sample, task["metrics"]))
        except (ValueError, KeyError, TypeError) as error:
            message = (
                f"{task.get('samples')} is not a samples file: {type(error).__name__}: {error}"
            )
            raise ConfigError(problem(message, got=str(sample)[:100])) from error
    return [items[index] for index in sorted(items)]


def _answers(sample: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The answer that went through a filter, and its values; nothing where no figure is of it."""
    of_filter = sample.get("filter", "none")
    suffix = "" if of_filter == "none" else f",{of_filter}"
    names = [name for name in metrics if name.partition(",")[2] == suffix[1:]]
    result: dict[str, Any] = {}
    answers = sample.get("filtered_resps") or [None]
    if names and isinstance(answers[0], str):
        result[f"prediction{suffix}"] = answers[0]
    for name in names:
        value = sample.get(name.removesuffix(suffix))
        if isinstance(value, (bool, int, float)):
            right = metrics[name]["percent"] and value in (0, 1)
            result[name] = bool(value) if right else float(value)
    return result


def task_result(section: Mapping[str, Any]) -> TaskResult:
    """A task's section without its reference. Raises KeyError, TypeError or ValueError."""
    metrics = {name: Metric(**values) for name, values in section["metrics"].items()}
    items = [{**item, "index": int(item["index"])} for item in section["items"]]
    speed = Speed(**section["pace"]) if section.get("pace") else None
    return TaskResult(metrics, items, pace=speed)
