"""The report's plots, as SVG elements that take their colours from the page around them.

matplotlib draws them in marker colours, each of which becomes a variable of the page's style sheet:
so one plot is right on a light page, on a dark one and on paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

# Stand for the page's colours of lines, text and grid: see templates/report/style.css.
SERIES = ("#010101", "#010102", "#010103", "#010104", "#010105")
INK, GRID = "#010201", "#010202"
PAGE_COLOURS = {
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)},
    INK: "currentColor",
    GRID: "var(--line)",
}
# Lines differ by more than colour; beyond the fifth they repeat.
LINES = cycler(
    color=SERIES,
    marker="os^Dv",
    linestyle=("-", "--", "-.", ":", (0, (5, 1, 1, 1))),
    markersize=[5] * len(SERIES),
)
RIGHT, WRONG = SERIES[:2]
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "grid.color": GRID,
    "savefig.transparent": True,
    **{f"{part}color": INK for part in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.")},
}
SIZE = (4.8, 3.3)  # inches
TIMELINE_POINTS = 300


def speed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Latency and tokens per second against the batch size, a line per pair of lengths.

    None for one batch size: a table says as much.
    """
    if len({row["batch_size"] for row in rows}) < 2:
        return []
    return [
        _speed_plot(rows, "latency_p50_ms", "Latency of a request, p50 with p90 shaded [ms]"),
        _speed_plot(rows, "tokens_per_second", "Generated tokens per second"),
    ]


def task(items: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the likelihood of the right answers, by whether the model chose them; None without
    such."""
    if not items or not {"log_likelihood", "correct"} <= items[0].keys():
        return None
    title = "Log-likelihood of the target, right and wrong items"
    with rc_context(STYLE):
        metric, axes = _new_plot(title)
        groups = [
            [item["log_likelihood"] for item in items if item["correct"] is right]
            for right in (True, False)
        ]
        edges = np.histogram_bin_edges([item["log_likelihood"] for item in items], bins=30)
        labels = [f"right ({len(groups[0])})", f"wrong ({len(groups[1])})"]
        axes.hist(groups, bins=edges.tolist(), stacked=True, color=[RIGHT, WRONG], label=labels)
        axes.set_xlabel("log-likelihood")
        axes.set_ylabel("items")
        axes.legend(loc="upper left")
        return _svg(metric, title, f"Histogram of {len(items)} items: {', '.join(labels)}.")


def positions(rows: Sequence[Mapping[str, Any]]) -> str:
    """A twin's divergence by position, on a logarithmic axis."""
    title = "Divergence from the original by position [nats]"
    with rc_context(STYLE):
        metric, axes = _new_plot(title)
        middle = range(len(rows))
        axes.plot(middle, [row["kl"] for row in rows], "o-", color=SERIES[0])
        if min(row["kl"] for row in rows) > 0:
            _log_axis(axes)
        axes.xaxis.set_major_locator(FixedLocator(list(middle)))
        axes.set_xticklabels([f"{row['first']}-{row['last']}" for row in rows])
        axes.set_xlabel("position in the text [tokens]")
        ends = [
            f"{row['kl']:.1e} at {row['first']} to {row['last']}" for row in (rows[0], rows[-1])
        ]
        return _svg(metric, title, f"Mean KL divergence: {ends[0]}, {ends[1]}.")


def load_plot(runs: Sequence[Mapping[str, Any]], by: str) -> list[str]:
    """Valid runs: throughput by `by` (clients or rate), and latency against throughput."""
    lines = {}
    for path in dict.fromkeys(run["path"] for run in runs):
        selected = [run for run in runs if run["path"] == path]
        lines[path] = sorted(selected, key=lambda run: float(run[by]))
    label = {"clients": "clients", "rate": "requests sent per second"}[by]
    return [_throughput_plot(lines, by, label), _latency_plot(lines, label)]


def timeline(run: Mapping[str, Any], name: str) -> str:
    """Tokens and requests per second over a run's time."""
    seconds, tokens, requests = _thinned(run["timeline"])
    title = f"{name}: tokens and requests per second"
    with rc_context(STYLE):
        metric = Figure(figsize=SIZE, layout="constrained")
        panels = metric.subplots(2, 1, sharex=True)
        panels[0].set_title(title, loc="left", fontsize=10)
        labelled = (("tokens/s", tokens), ("requests/s", requests))
        for axes, (label, values), colour in zip(panels, labelled, SERIES, strict=False):
            axes.plot(seconds, values, "-", color=colour)
            axes.set_ylim(bottom=0)
            axes.set_ylabel(label)
            axes.yaxis.set_major_formatter(THOUSANDS)
        panels[1].set_xlabel("seconds since the start")
        ends = f"{min(tokens):,.0f} to {max(tokens):,.0f} tokens/s"
        return _svg(metric, title, f"Between {ends} and at most {max(requests):,.1f} requests/s.")


def _thinned(points: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    """Seconds, tokens and requests per second; means over equal spans where there are many."""
    span = -(-len(points) // TIMELINE_POINTS)
    groups = [points[start : start + span] for start in range(0, len(points), span)]
    means = [
        [float(np.mean([point[key] for point in group])) for group in groups]
        for key in ("second", "tokens", "requests")
    ]
    return means[0], means[1], means[2]


def _throughput_plot(lines: Mapping[str, Sequence[Mapping[str, Any]]], by: str, label: str) -> str:
    title = f"Generated tokens per second by {label}"
    with rc_context(STYLE):
        metric, axes = _new_plot(title)
        for (path, runs), style in zip(lines.items(), LINES(), strict=False):
            axes.plot(
                [run[by] for run in runs],
                [run["tokens_per_second"] for run in runs],
                label=path,
                **style,
            )
        _count_axis(axes, sorted({run[by] for runs in lines.values() for run in runs}))
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(THOUSANDS)
        metric.legend(loc="outside lower left", ncols=3)
        return _svg(metric, title, _best_of(lines))


def _latency_plot(lines: Mapping[str, Sequence[Mapping[str, Any]]], label: str) -> str:
    title = "Time to the first token [ms] against throughput"
    with rc_context(STYLE):
        metric, axes = _new_plot(title)
        for (path, runs), style in zip(lines.items(), LINES(), strict=False):
            tokens = [run["tokens_per_second"] for run in runs]
            first = [run["first_token_ms"] for run in runs]
            axes.plot(tokens, [times["p50"] for times in first], label=f"{path} p50", **style)
            faint = {**style, "alpha": 0.55, "linewidth": 1, "fillstyle": "none"}
            axes.plot(tokens, [times["p99"] for times in first], label=f"{path} p99", **faint)
        axes.set_xlabel("generated tokens per second")
        axes.xaxis.set_major_formatter(THOUSANDS)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        _value_axis(
            axes,
            [
                run["first_token_ms"][key]
                for runs in lines.values()
                for run in runs
                for key in ("p50", "p99")
            ],
        )
        metric.legend(loc="outside lower left", ncols=3)
        return _svg(metric, title, f"A point per number of {label}. {_best_of(lines)}")


def _best_of(lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Describe the plot for readers who cannot see it."""
    best = {
        path: max(runs, key=lambda run: run["tokens_per_second"]) for path, runs in lines.items()
    }
    return " ".join(
        f"{path}: at most {run['tokens_per_second']:,.0f} tokens/s, with a first token after "
        f"{run['first_token_ms']['p50']:g} ms (p50) and {run['first_token_ms']['p99']:g} ms (p99)."
        for path, run in best.items()
    )


def _speed_plot(rows: Sequence[Mapping[str, Any]], value: str, title: str) -> str:
    pairs = list(dict.fromkeys((row["input_len"], row["output_len"]) for row in rows))
    with rc_context(STYLE):
        metric, axes = _new_plot(title)
        for pair, style in zip(pairs, LINES(), strict=False):
            selected = [row for row in rows if (row["input_len"], row["output_len"]) == pair]
            selected.sort(key=lambda row: int(row["batch_size"]))
            sizes = [row["batch_size"] for row in selected]
            name = f"{pair[0]} tokens in, {pair[1]} out"
            axes.plot(sizes, [row[value] for row in selected], label=name, **style)
            if value == "latency_p50_ms":
                low, high = ([row[f"latency_{p}_ms"] for row in selected] for p in ("p50", "p90"))
                axes.fill_between(sizes, low, high, color=style["color"], alpha=0.2, linewidth=0)
        _count_axis(axes, sorted({row["batch_size"] for row in rows}))
        axes.set_xlabel("rows in a request (batch size)")
        values = [row[value] for row in rows]
        _value_axis(axes, values)
        metric.legend(loc="outside lower left", ncols=2)
        return _svg(metric, title, f"Between {min(values):,.1f} and {max(values):,.1f}.")


def _count_axis(axes: Axes, counts: Sequence[float]) -> None:
    """A tick for each count: by powers of two, as one chooses them."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(counts[0] / 1.3, counts[-1] * 1.3)
    axes.xaxis.set_major_locator(FixedLocator(list(counts)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _value_axis(axes: Axes, values: Sequence[float]) -> None:
    """From 0, or logarithmic where the values are too far apart to be read that way."""
    if max(values) <= 10 * min(values):
        axes.set_ylim(0, 1.08 * max(values))
    else:
        _log_axis(axes)


def _log_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


THOUSANDS = FuncFormatter(lambda value, _: f"{value:,g}")


def _new_plot(title: str) -> tuple[Figure, Axes]:
    """Small enough for its text to be read on a phone."""
    metric = Figure(figsize=SIZE, layout="constrained")
    axes = metric.add_subplot()
    axes.set_title(title, loc="left", fontsize=10)
    return metric, axes


def _svg(metric: Figure, title: str, description: str) -> str:
    """The figure as an <svg> element: nothing in it touches the page around it."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": f"{title} {description}"}):
        metric.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r"font-family: [^;]*; ", "", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    for colour, variable in PAGE_COLOURS.items():
        text = text.replace(colour, variable)
    box = re.search(r'viewBox="[^"]*"', text)
    words = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return re.sub(r"<svg[^>]*>", f'<svg role="img" {box[0] if box else ""}>{words}', text, count=1)
