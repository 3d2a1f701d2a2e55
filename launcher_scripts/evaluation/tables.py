"""The small tables that the evaluation steps end with."""

from __future__ import annotations

from collections.abc import Sequence

from launcher_scripts.common.rendering import align
from launcher_scripts.evaluation.harness import HarnessResult
from launcher_scripts.evaluation.load.figures import LoadRun, Percentiles
from launcher_scripts.evaluation.speed import SpeedRow
from launcher_scripts.evaluation.tasks.task import Metric, Pace, TaskResult
from launcher_scripts.evaluation.twin.measurement import TwinResult


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
        other = result.reference.metrics.get(name)
        if other is None:
            cells += ["-", "-"]
        else:
            difference = result.reference.difference[name]
            cells += [
                _figure(other, other.value),
                f"{difference * (100 if other.percent else 1):+.2f}",
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


def twin_table(result: TwinResult) -> str:
    """A line per figure, then every finding."""
    rows = [[f"twin ({len(result.items)} texts)", "value", "95 % interval"]]
    for name, metric in result.metrics.items():
        ends = "" if metric.low is None or metric.high is None else f"{metric.low:.3g} to "
        ends += "" if metric.high is None else f"{metric.high:.3g}"
        rows.append([name.replace("_", " "), f"{metric.value:.3g}", ends])
    found = [f"{finding.name}: {finding.text}" for finding in result.findings]
    found = found or ["nothing was found that rounding does not explain"]
    return "\n".join([align(rows), f"beside {result.reference}", *found])


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


def harness_table(result: HarnessResult) -> str:
    """A line per figure of every task of lm_eval's."""
    rows = [[f"lm_eval {result.version}", "items", "value", "95 % interval"]]
    for name, task in result.tasks.items():
        for metric_name, metric in task.metrics.items():
            value = _figure(metric, metric.value)
            rows.append([f"{name} {metric_name}", str(task.items), value, _ends(metric)])
    return align(rows)


def load_table(runs: Sequence[LoadRun]) -> str:
    """A line per run; times are p50 and p99."""
    head = ["path, load", "requests", "requests/s", "goodput", "tokens/s"]
    head += ["first token [ms]", "between tokens [ms]", "latency [ms]", "valid"]
    lines = [
        [
            f"{run.path}, {run.load.text}",
            str(run.requests),
            f"{run.requests_per_second:.2f}",
            "-" if run.goodput is None else f"{run.goodput:.2f}",
            f"{run.tokens_per_second:.1f}",
            *map(_times, (run.first_token_ms, run.between_tokens_ms, run.latency_ms)),
            "yes" if run.valid else "NO",
        ]
        for run in runs
    ]
    return align([head, *lines])


def _times(times: Percentiles | None) -> str:
    return "-" if times is None else f"{times['p50']:.1f} {times['p99']:.1f}"


def _figure(metric: Metric, value: float) -> str:
    if metric.percent:
        return f"{100 * value:.1f} %"
    # A similarity is near 1, and a difference near 0.
    return f"{value:.2f}" if abs(value) > 1.05 else f"{value:.6g}"


def interval(metric: Metric | None) -> str:
    """The value with the ends of its interval; a dash for none."""
    if metric is None:
        return "-"
    return f"{_figure(metric, metric.value)} ({_ends(metric)})"


def _ends(metric: Metric) -> str:
    if metric.low is None or metric.high is None:
        return "-"
    return f"{_figure(metric, metric.low)} to {_figure(metric, metric.high)}"
