"""The report's plots, as SVG text to stand inside an HTML page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, ScalarFormatter

# Okabe and Ito's colours, which people with colour blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
WRONG, RIGHT = "#D55E00", "#0072B2"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


def speed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Latency and tokens per second against the batch size, a line per pair of lengths."""
    return [
        _speed_plot(
            rows, "latency_p50_ms", "latency of a request [ms]: p50, and p50 to p90 shaded"
        ),
        _speed_plot(rows, "tokens_per_second", "generated tokens per second"),
    ]


def task(items: Sequence[Mapping[str, Any]]) -> str | None:
    """How likely the right answers were, by whether the model chose them; None without such."""
    if not items or not {"log_likelihood", "correct"} <= items[0].keys():
        return None
    with rc_context(STYLE):
        figure, axes = _figure()
        groups = [
            [item["log_likelihood"] for item in items if item["correct"] is right]
            for right in (True, False)
        ]
        edges = np.histogram_bin_edges([item["log_likelihood"] for item in items], bins=30)
        labels = [f"right ({len(groups[0])})", f"wrong ({len(groups[1])})"]
        axes.hist(groups, bins=edges.tolist(), stacked=True, color=[RIGHT, WRONG], label=labels)
        axes.set_xlabel("log-likelihood of the target")
        axes.set_ylabel("items")
        axes.legend(loc="upper left")
        return _svg(figure)


def _speed_plot(rows: Sequence[Mapping[str, Any]], value: str, label: str) -> str:
    pairs = list(dict.fromkeys((row["input_len"], row["output_len"]) for row in rows))
    with rc_context(STYLE):
        figure, axes = _figure()
        for index, pair in enumerate(pairs):
            chosen = [row for row in rows if (row["input_len"], row["output_len"]) == pair]
            chosen.sort(key=lambda row: int(row["batch_size"]))
            sizes = [row["batch_size"] for row in chosen]
            colour = COLOURS[index % len(COLOURS)]
            name = f"{pair[0]} tokens in, {pair[1]} out"
            axes.plot(sizes, [row[value] for row in chosen], "o-", color=colour, label=name)
            if value == "latency_p50_ms":
                low, high = ([row[f"latency_{p}_ms"] for row in chosen] for p in ("p50", "p90"))
                axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        _batch_axis(axes, sorted({row["batch_size"] for row in rows}))
        _value_axis(axes, [row[value] for row in rows])
        axes.set_title(label, loc="left", fontsize=10)
        figure.legend(loc="outside lower left", ncols=2)
        return _svg(figure)


def _batch_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("rows in a request (batch size)")


def _value_axis(axes: Axes, values: Sequence[float]) -> None:
    """From 0, or logarithmic where the values are too far apart to be read that way."""
    if max(values) <= 10 * min(values):
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.0, 3.8), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element, without the XML declaration that HTML does not take."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
