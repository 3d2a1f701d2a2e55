"""The trend of a series: trend.json for programs, trend.html for people."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher_scripts.common.files import atomic_write
from launcher_scripts.common.rendering import render
from launcher_scripts.config.evaluation import WatchSettings
from launcher_scripts.watch.series import JUDGED, STATES, Entry, Series

FILE_NAME = "trend.json"
PAGE_NAME = "trend.html"
SCHEMA = 1
_WIDTH, _HEIGHT, _BORDER = 640.0, 160.0, 12.0
_CLASSES = {"GO": "go", "NO-GO": "no", "INCONCLUSIVE": "open"}


@dataclass(frozen=True)
class Point:
    """A figure of a checkpoint in a plot: x, value and the ends of its interval in the plot's unit.

    css: class of the verdict's colour
    """

    x: float
    y: float
    low: float
    high: float
    css: str
    title: str


@dataclass(frozen=True)
class Plot:
    """A figure over the steps. smallest and largest: values at the lower and upper border."""

    name: str
    smallest: str
    largest: str
    points: tuple[Point, ...]


def write_trend(series: Series, settings: WatchSettings) -> None:
    """Write trend.json and trend.html anew; readers see the old or the new ones."""
    entries = [_values(series, entry) for entry in series.in_state(*STATES)]
    latest = series.latest_go()
    content = {
        "schema": SCHEMA,
        "model": settings.model_name,
        "training_dir": settings.training_dir,
        "level": settings.level,
        "max_drop": settings.max_drop,
        "latest_go": None if latest is None else latest.name,
        "checkpoints": entries,
    }
    folder = series.folder
    atomic_write(folder / FILE_NAME, json.dumps(content, indent=1, allow_nan=False) + "\n")
    page = render(
        "trend.html.j2",
        trend=content,
        plots=list(_plots(series.in_state(JUDGED))),
        css=_CLASSES,
        width=_WIDTH,
        height=_HEIGHT,
        text=_text,
    )
    atomic_write(folder / PAGE_NAME, page)


def _values(series: Series, entry: Entry) -> dict[str, Any]:
    """An entry as trend.json has it; `report` is a path below the trend's folder, or None."""
    report = series.evaluation_of(entry) / "report.html"
    return {
        "name": entry.name,
        "step": entry.step,
        "path": str(entry.path),
        "state": entry.state,
        "verdict": entry.verdict,
        "evaluation": entry.measured,
        "regressions": entry.regressions,
        "figures": entry.metrics,
        "reason": entry.reason,
        "swap": entry.swap,
        "report": os.path.relpath(report, series.folder) if report.exists() else None,
    }


def _plots(entries: list[Entry]) -> Iterator[Plot]:
    for name in dict.fromkeys(name for entry in entries for name in entry.metrics):
        measured = [entry for entry in entries if name in entry.metrics]
        figures = [entry.metrics[name] for entry in measured]
        ends = [value for metric in figures for value in _ends(metric)]
        low, high = min(ends), max(ends)
        span = (high - low) or abs(high) or 1.0
        first, last = measured[0].step, measured[-1].step
        points = tuple(
            Point(
                x=_position(entry.step, first, (last - first) or 1, _WIDTH),
                y=_HEIGHT - _position(metric["value"], low, span, _HEIGHT),
                low=_HEIGHT - _position(_ends(metric)[0], low, span, _HEIGHT),
                high=_HEIGHT - _position(_ends(metric)[1], low, span, _HEIGHT),
                css=_CLASSES[str(entry.verdict)],
                title=f"{entry.name}: {_text(metric)}, {entry.verdict}",
            )
            for entry, metric in zip(measured, figures, strict=True)
        )
        percent = figures[0]["percent"]
        yield Plot(name, _number(low, percent), _number(high, percent), points)


def _ends(metric: dict[str, Any]) -> tuple[float, float]:
    value = metric["value"]
    low, high = metric["low"], metric["high"]
    return (value if low is None else low), (value if high is None else high)


def _position(value: float, first: float, span: float, size: float) -> float:
    return round(_BORDER + (size - 2 * _BORDER) * (value - first) / span, 1)


def _text(metric: dict[str, Any]) -> str:
    """A figure with its interval."""
    number = _number(metric["value"], metric["percent"])
    if metric["low"] is None:
        return number
    low, high = (_number(metric[end], metric["percent"]) for end in ("low", "high"))
    return f"{number} ({low} to {high})"


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.4g}"
