"""A ladder's table: what every precision is worth, what it takes, and which one to serve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.exit_codes import VERDICT_FILE, VERDICTS
from launcher_scripts.common.rendering import align
from launcher_scripts.config.ladder import LadderRung
from launcher_scripts.evaluation.report_content import harness_tasks
from launcher_scripts.evaluation.tables import interval
from launcher_scripts.evaluation.tasks.task import Metric

GO = VERDICTS[0]
_BEST_FIRST = (0, 2, 1)  # the exit codes of verdicts


@dataclass(frozen=True)
class LadderRow:
    """What is known of one precision.

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


def read_row(rung: LadderRung, weight_bytes: int | None) -> LadderRow:
    """The row of a rung: from what its report has of this ladder's run, else why not."""
    path = Path(rung.report_dir) / "report.json"
    report = _read(path)
    renewed = bool(report) and _is_newer(path, rung.jobs)
    sections = [
        section
        for section in _sections(report)
        if _server_folder(section) in rung.jobs or (renewed and _was_resumed(section))
    ]
    if not sections:
        return LadderRow(
            rung.name, {}, weight_bytes, None, None, None, str(path), _failure(rung.jobs)
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
    return LadderRow(rung.name, metrics, weight_bytes, speed, first, verdict, str(path))


def choose(rows: Sequence[LadderRow]) -> tuple[str | None, str]:
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
    """Of the best verdict of a rung: whether one can go live. 0 where nobody judged."""
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
    """Whether results of earlier runs may be in it: the server is that of the last new one."""
    return "runs" in (section.get("measured_on") or {})


def _is_newer(report: Path, jobs: Sequence[str]) -> bool:
    """Whether a report was written after the last job was submitted."""
    records = [Path(job) / "job.json" for job in jobs[-1:]]
    return any(
        record.exists() and record.stat().st_mtime <= report.stat().st_mtime for record in records
    )


def _speed(sections: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """The most tokens per second, and the first median latency in ms."""
    rows = [row for section in sections for row in section.get("rows", ())]
    runs = [run for section in sections for run in section.get("runs", ()) if run["valid"]]
    speeds = [each["tokens_per_second"] for each in (*rows, *runs)]
    latencies = [row["latency_p50_ms"] for row in rows]
    latencies += [run["latency_ms"]["p50"] for run in runs]
    return max(speeds, default=None), next(iter(latencies), None)


def _failure(jobs: Sequence[str]) -> str:
    """What the first job that failed said last, as far as its log tells."""
    for job in map(Path, jobs):
        for log in sorted(job.glob("*.out")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            said = [line for line in lines if "error: " in line]
            if said:
                return f"{said[-1].strip()} ({log})"
    last = f", see {jobs[-1]}" if jobs else ""
    return f"there is no report of this run{last}"


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a file; empty where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
