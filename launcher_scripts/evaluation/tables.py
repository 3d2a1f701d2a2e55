"""The small tables that the evaluation steps end with."""

from __future__ import annotations

from collections.abc import Sequence

from launcher_scripts.evaluation.speed import SpeedRow
from launcher_scripts.evaluation.tasks.task import Metric, Pace, TaskResult


def task_table(name: str, result: TaskResult) -> str:
    """A line per figure: value and 95 % interval."""
    rows = [[f"{name} ({len(result.items)} items)", "value", "95 % interval"]]
    for metric_name, metric in result.metrics.items():
        rows.append([metric_name.replace("_", " "), _figure(metric, metric.value), _ends(metric)])
    served = [] if result.pace is None else [pace_line(result.pace)]
    if result.reference is None:
        return "\n".join([align(rows), *served])
    rows[0] += ["reference", "difference"]
    for cells, name in zip(rows[1:], result.metrics, strict=True):
        metric = result.reference.metrics.get(name)
        if metric is None:
            cells += ["-", "-"]
        else:
            difference = result.reference.difference[name]
            cells += [
                _figure(metric, metric.value),
                f"{difference * (100 if metric.percent else 1):+.2f}",
            ]
    same = len(result.items) - len(result.reference.different)
    counted = f"{same} of {len(result.items)} answers are the reference's"
    lines = [align(rows), *served, f"{counted}: {result.reference.source}"]
    if result.reference.pace is not None:
        lines.append(f"the reference: {pace_line(result.reference.pace)}")
    return "\n".join(lines)


def pace_line(pace: Pace) -> str:
    """Requests and seconds; tokens per second where tokens were generated."""
    line = f"{pace.requests} requests in {pace.seconds:.2f} s"
    if pace.tokens_per_second is not None:
        line += f", {pace.tokens} tokens, {pace.tokens_per_second:.0f} tokens/s"
    return line


def speed_table(rows: Sequence[SpeedRow]) -> str:
    """A line per measurement."""
    head = ["batch size", "in", "out", "p50 [ms]", "p90 [ms]", "p99 [ms]", "tokens/s"]
    lines = [
        [
            str(row.batch_size),
            str(row.input_len),
            str(row.output_len),
            *(
                f"{value:.1f}"
                for value in (
                    row.latency_p50_ms,
                    row.latency_p90_ms,
                    row.latency_p99_ms,
                    row.tokens_per_second,
                )
            ),
        ]
        for row in rows
    ]
    return align([head, *lines])


def _figure(metric: Metric, value: float) -> str:
    return f"{100 * value:.1f} %" if metric.percent else f"{value:.2f}"


def interval(metric: Metric | None) -> str:
    """The value with the ends of its interval; a dash for none."""
    if metric is None:
        return "-"
    return f"{_figure(metric, metric.value)} ({_ends(metric)})"


def _ends(metric: Metric) -> str:
    if metric.low is None or metric.high is None:
        return "-"
    return f"{_figure(metric, metric.low)} to {_figure(metric, metric.high)}"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
