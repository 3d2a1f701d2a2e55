"""The document and the dashboard of metrics speak of the metrics that there are, and of all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from launcher_scripts.contract.metric_names import GATEWAY_METRICS, MODEL_METRICS

DOCS = Path(__file__).parents[1] / "docs"
METRICS = (*MODEL_METRICS, *GATEWAY_METRICS)
ROW = re.compile(r"\| `(launcher_\w+)`( [¹²])? \| (\w+) \| ")
NAME = re.compile(r"\blauncher_\w+")
SELECTED = re.compile(r"(launcher_\w+)(?:\{([^}]*)\})?")
LABELS = {
    sample: {*metric.labels, *({"le"} if sample.endswith("_bucket") else ())}
    for metric in METRICS
    for sample in metric.samples
}


def texts() -> list[str]:
    """Every expression of the dashboard."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(
                text for key in ("expr", "query") if isinstance(text := value.get(key), str)
            )
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                walk(item)

    walk(json.loads((DOCS / "grafana-dashboard.json").read_text()))
    return found


def test_the_table_has_every_metric_once() -> None:
    rows = ROW.findall((DOCS / "metrics.md").read_text())
    assert sorted((name, kind) for name, _, kind in rows) == sorted(
        (metric.name, metric.kind) for metric in METRICS
    )
    marks = {name: mark.strip() for name, mark, _ in rows}
    assert {name for name, mark in marks.items() if mark == "¹"} == {
        metric.name for metric in MODEL_METRICS if metric.labels[0] == "model"
    }
    assert {name for name, mark in marks.items() if mark == "²"} == {
        metric.name for metric in GATEWAY_METRICS if "model_name" in metric.labels
    }


def test_the_document_names_no_other_metric() -> None:
    known = {name for metric in METRICS for name in (metric.name, *metric.samples)}
    named = set(NAME.findall((DOCS / "metrics.md").read_text()))
    assert {name for name in named if not name.endswith("_")} - known == {"launcher_scripts"}


def test_the_dashboard_asks_for_samples_and_labels_that_exist() -> None:
    asked = [match for text in texts() for match in SELECTED.findall(text)]
    assert len(asked) > 20
    for name, selector in asked:
        assert name in LABELS, name
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert labels <= LABELS[name], (name, labels)


def test_the_dashboard_groups_by_labels_that_its_samples_have() -> None:
    target_labels = {"instance"}  # given by Prometheus
    for text in texts():
        names = [name for name, _ in SELECTED.findall(text)]
        for labels in re.findall(r"\bby \(([^)]*)\)", text):
            for name in names:
                assert set(re.split(r",\s*", labels)) <= LABELS[name] | target_labels, text


def test_the_dashboard_shows_every_metric() -> None:
    """Those with another label are the same as others, by older names."""
    asked = {name for text in texts() for name, _ in SELECTED.findall(text)}
    missing = [m.name for m in METRICS if not asked & {m.name, *m.samples}]
    assert missing == [m.name for m in MODEL_METRICS if m.labels[0] == "model"]
