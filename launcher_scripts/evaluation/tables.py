"""Tables that the evaluation steps print, and the table of a precision ladder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.packages import VERDICT_FILE, VERDICTS
from launcher_scripts.common.rendering import align
from launcher_scripts.config.evaluation import LadderPrecision
from launcher_scripts.evaluation.harness import HarnessResult
from launcher_scripts.evaluation.journal import harness_tasks
from launcher_scripts.evaluation.load.figures import LoadRun, Percentiles
from launcher_scripts.evaluation.speed import SpeedRow
from launcher_scripts.evaluation.tasks.task import Metric, Speed, TaskResult
from launcher_scripts.evaluation.twin.measurement import ReferenceResult


def task_table(name: str, result: TaskResult) -> str:
    """A line per figure: value and 95 % interval."""
    rows = [[f"{name} ({len(result.items)} items)", "value", "95 % interval"]]
    for metric_name, metric in result.metrics.items():
        rows.append(
            [metric_name.replace("_", " "), _formatted(metric, metric.value), _ends(metric)]
        )
    served = [] if result.pace is None else [speed_line(result.pace)]
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
                _formatted(other, other.value),
                f"{difference * (100 if other.percent else 1):+.2f}",
            ]
    same = len(result.items) - len(result.reference.different)
    count_text = f"{same} of {len(result.items)} answers are the reference's"
    lines = [align(rows), *served, f"{count_text}: {result.reference.source}"]
    if result.reference.pace is not None:
        lines.append(f"the reference: {speed_line(result.reference.pace)}")
    return "\n".join(lines)


def speed_line(speed: Speed) -> str:
    """Requests and seconds; tokens per second where tokens were generated."""
    line = f"{speed.requests} requests in {speed.seconds:.2f} s"
    if speed.tokens_per_second is not None:
        line += f", {speed.tokens} tokens, {speed.tokens_per_second:.0f} tokens/s"
    return line


def reference_table(result: ReferenceResult) -> str:
    """A line per figure, then every finding."""
    rows = [[f"twin ({len(result.items)} texts)", "value", "95 % interval"]]
    for name, metric in result.metrics.items():
        ends = "" if metric.low is None or metric.high is None else f"{metric.low:.3g} to "
        ends += "" if metric.high is None else f"{metric.high:.3g}"
        rows.append([name.replace("_", " "), f"{metric.value:.3g}", ends])
    lines = [f"{finding.name}: {finding.text}" for finding in result.findings]
    lines = lines or ["nothing was found that rounding does not explain"]
    return "\n".join([align(rows), f"beside {result.reference}", *lines])


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
            value = _formatted(metric, metric.value)
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


def _formatted(metric: Metric, value: float) -> str:
    if metric.percent:
        return f"{100 * value:.1f} %"
    # A similarity is near 1, and a difference near 0.
    return f"{value:.2f}" if abs(value) > 1.05 else f"{value:.6g}"


def interval(metric: Metric | None) -> str:
    """The value with the ends of its interval; a dash for none."""
    if metric is None:
        return "-"
    return f"{_formatted(metric, metric.value)} ({_ends(metric)})"


def _ends(metric: Metric) -> str:
    if metric.low is None or metric.high is None:
        return "-"
    return f"{_formatted(metric, metric.low)} to {_formatted(metric, metric.high)}"


GO = VERDICTS[0]
_BEST_FIRST = (0, 2, 1)  # the exit codes of verdicts


@dataclass(frozen=True)
class LadderRow:
    """Results of one precision.

    metrics: by "<task>.<metric>", in the order of the report
    bytes:   of all ranks' weights, matrices as the server keeps them; None: not known
    tokens_per_second: the most of all measurements
    latency_p50_ms:    of the first measurement
    verdict: GO, NO-GO or INCONCLUSIVE; None: nobody judged
    report:  path of the rung's report.json
    failure: why there is no evaluation; None: there is one
    """

    rung: str
    metrics: dict[str, Metric]
    bytes: int | None
    tokens_per_second: float | None
    latency_p50_ms: float | None
    verdict: str | None
    report: str
    failure: str | None = None


def read_row(precision: LadderPrecision, weight_bytes: int | None) -> LadderRow:
    """The row of a precision: from what its report has of this ladder's run, else why not."""
    path = Path(precision.report_dir) / "report.json"
    report = _read(path)
    renewed = bool(report) and _is_newer(path, precision.jobs)
    sections = [
        section
        for section in _sections(report)
        if _server_folder(section) in precision.jobs or (renewed and _was_resumed(section))
    ]
    if not sections:
        return LadderRow(
            precision.name, {}, weight_bytes, None, None, None, str(path), _failure(precision.jobs)
        )
    metrics = {
        f"{name}.{metric}": Metric(**values)
        for name, task in _tasks(report).items()
        if task in sections
        for metric, values in task["metrics"].items()
    }
    speed, first = _speed(
        [section for section in sections if "rows" in section or "runs" in section]
    )
    verdict = _read(path.with_name(VERDICT_FILE)).get("verdict")
    return LadderRow(precision.name, metrics, weight_bytes, speed, first, verdict, str(path))


def choose_rung(rows: Sequence[LadderRow]) -> tuple[str | None, str]:
    """The rung to serve, if any, and why: that of the fewest bytes among those that are GO."""
    judged = [row for row in rows if row.verdict is not None]
    if not judged:
        return None, "No rung has a verdict: evaluate.policy says what a rung must reach."
    good = [row for row in judged if row.verdict == GO]
    if not good:
        verdicts = ", ".join(f"{row.rung} {row.verdict}" for row in judged)
        return None, f"No rung is GO: {verdicts}."
    best = min(good, key=_cost)
    if len(good) == 1:
        return best.rung, f"{best.rung} is the only rung that is GO."
    named = ", ".join(row.rung for row in good)
    return best.rung, f"{best.rung} takes the fewest bytes of the rungs that are GO: {named}."


def exit_code(rows: Sequence[LadderRow]) -> int:
    """Exit code of the best verdict of a precision; 0 without a verdict."""
    verdicts = {row.verdict for row in rows}
    return next((code for code in _BEST_FIRST if VERDICTS[code] in verdicts), 0)


def _cost(row: LadderRow) -> tuple[float, float]:
    """The fewest bytes first, then the most tokens per second."""
    return (
        float("inf") if row.bytes is None else row.bytes,
        -(row.tokens_per_second or 0.0),
    )


def ladder_table(rows: Sequence[LadderRow]) -> str:
    """A line per rung, and below it why a rung has no figures."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    head = ["rung", *names, "MB", "tokens/s", "p50 [ms]", "verdict"]
    lines = [
        [
            row.rung,
            *(interval(row.metrics.get(name)) for name in names),
            "-" if row.bytes is None else f"{row.bytes / 1e6:.1f}",
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
            "-" if row.latency_p50_ms is None else f"{row.latency_p50_ms:.1f}",
            "failed" if row.failure else row.verdict or "-",
        ]
        for row in rows
    ]
    failures = [f"{row.rung}: {row.failure}" for row in rows if row.failure]
    return "\n".join([align([head, *lines]), *failures])


def _tasks(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Native tasks and those of lm-evaluation-harness."""
    others = {f"harness.{name}": task for name, task in harness_tasks(report).items()}
    return {**report.get("tasks", {}), **others}


def _sections(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every part of the report that says what it was measured on."""
    named = [report[name] for name in ("speed", "load", "twin") if report.get(name)]
    return [*_tasks(report).values(), *named]


def _server_folder(section: Mapping[str, Any]) -> str | None:
    """The folder of the job of the server that was measured."""
    server = (section.get("measured_on") or {}).get("server") or {}
    folder: str | None = (server.get("job") or {}).get("folder")
    return folder


def _was_resumed(section: Mapping[str, Any]) -> bool:
    """Return whether results of earlier runs may be in it: the server is that of the last new
    one."""
    return "runs" in (section.get("measured_on") or {})


def _is_newer(report: Path, jobs: Sequence[str]) -> bool:
    """Return whether a report was written after the last job was submitted."""
    records = [Path(job) / "job.json" for job in jobs[-1:]]
    return any(
        record.exists() and record.stat().st_mtime <= report.stat().st_mtime for record in records
    )


def _speed(sections: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """The most tokens per second, and the first median latency in ms."""
    rows = [row for section in sections for row in section.get("rows", ())]
    runs = [run for section in sections for run in section.get("runs", ()) if run["valid"]]
    speeds = [row["tokens_per_second"] for row in (*rows, *runs)]
    latencies = [row["latency_p50_ms"] for row in rows]
    latencies += [run["latency_ms"]["p50"] for run in runs]
    return max(speeds, default=None), next(iter(latencies), None)


def _failure(jobs: Sequence[str]) -> str:
    """Return the last line of the first job that failed, as far as its log has one."""
    for job in map(Path, jobs):
        for log in sorted(job.glob("*.out")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if "error: " in line]
            if errors:
                return f"{errors[-1].strip()} ({log})"
    last = f", see {jobs[-1]}" if jobs else ""
    return f"there is no report of this run{last}"


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a file; empty where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
