"""Latency by model size, as the NeMo framework's inference guide draws it, and beside peers."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.floors import numbers
from benchmarks.peers import config_of
from benchmarks.shapes import USE_CASES, Case
from benchmarks.tables import PEERS, model_name

COLOURS = {
    "served": "#2a6f97",
    "ctranslate2": "#c8553d",
    "transformers": "#d9a05b",
    "floor": "#8a8a8a",
}
LINES = {1: "o-", 2: "s--", 4: "^:"}
SIZE = (9.0, 3.6)  # inches
ASKED = USE_CASES["question answering"]


def draw(path: Path, served: list[dict], parallel: list[dict]) -> None:
    """Write the figure: GPTs by size and number of GPUs, and every model beside its peers."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "latency", "font.size": 8}):
        figure = Figure(figsize=SIZE, layout="constrained")
        left, right = figure.subplots(1, 2)
        by_size(left, parallel)
        beside_peers(right, served)
        figure.suptitle(
            f"Milliseconds of a request through the server: {ASKED.input} tokens in, "
            f"{ASKED.output} out, batch 1, bfloat16, H200"
        )
        figure.savefig(path, metadata={"Date": None})


def by_size(axes: Axes, rows: list[dict]) -> None:
    """A line per number of GPUs over the GPTs' parameters, and the floor of one GPU."""
    chosen = [row for row in rows if Case.of(row) == ASKED and not row["model"].startswith("t5")]
    for size in sorted({row["tp_size"] for row in chosen}):
        points = [(billions(row["model"]), row) for row in chosen if row["tp_size"] == size]
        points.sort(key=itemgetter(0))
        label = f"{size} GPU{'s' if size > 1 else ''}"
        x = [parameters for parameters, _ in points]
        axes.plot(x, [row["ms"] for _, row in points], LINES[size], label=label)
        if size == 1:
            floor = [row["floor_ms"] for _, row in points]
            axes.plot(x, floor, "-", color=COLOURS["floor"], label="floor, 1 GPU", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="billions of parameters (GPT)", ylabel="ms")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()


def beside_peers(axes: Axes, rows: list[dict]) -> None:
    """Bars per model: ours, then the peers."""
    chosen = [row for row in rows if Case.of(row) == ASKED and row["tp_size"] == 1]
    series = {"served": [row["ms"] for row in chosen]}
    for peer in ("ctranslate2", "transformers"):
        series[peer] = [row["peers"].get(peer, 0) for row in chosen]
    for index, (name, values) in enumerate(series.items()):
        x = [group + 0.28 * (index - 1) for group in range(len(values))]
        bars = axes.bar(x, values, 0.26, color=COLOURS[name], label=PEERS.get(name, "this server"))
        axes.bar_label(bars, [f"{value:.0f}" if value else "" for value in values], fontsize=6)
    axes.set_xticks(range(len(chosen)), [model_name(row["model"]) for row in chosen])
    axes.set_ylabel("ms")
    axes.margins(y=0.15)
    axes.legend(ncols=3, loc="upper left")


def billions(model: str) -> float:
    return numbers(config_of(model), lambda _: True) / 1e9
