"""The bounds of a policy beside what a report has measured of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher_scripts.config.policy import (
    KEY,
    AgreementBounds,
    BaselineBounds,
    LoadBounds,
    MetricBounds,
    PolicySettings,
    ReferenceBounds,
    ReportBounds,
    SpeedBounds,
    TimeBounds,
)
from launcher_scripts.evaluation import comparison
from launcher_scripts.evaluation.comparison import ComparedAnswers
from launcher_scripts.evaluation.journal import harness_samples, harness_tasks, read_content
from launcher_scripts.evaluation.tasks import task as statistics
from launcher_scripts.evaluation.tasks.task import Interval

Content = Mapping[str, Any]
Show = Callable[[float], str]

TIMES = tuple(field.name for field in dataclasses.fields(TimeBounds))
# The bound of what a twin names.
FINDINGS = "twin.max_findings"
INVALID_REMEDY = (
    "an invalid run does not show the server's speed: measure again with fewer clients, a lower "
    "rate or a client on a machine of its own (docs/load.md)"
)
# What measures a task, by the key of its bounds.
MEASURED_BY = {"metrics": "evaluate.tasks.{}", "harness": "evaluate.harness.tasks with {}"}


def percent(value: float) -> str:
    return f"{100 * value:.4g} %"


def four_digits(value: float) -> str:
    return f"{value:.4g}"


def with_milliseconds(value: float) -> str:
    return f"{value:.4g} ms"


@dataclass(frozen=True)
class Check:
    """A bound with what was measured.

    bound:    its key in the policy; `limit` is the smallest value that is allowed where that ends
              with min or min_<figure>, else the largest
    what:     the figure in words
    measured: a figure of one run has no interval; None: not measured
    how:      what measures it
    by_value: the value decides in spite of an interval
    of_measurement: the bound is on the measurement, not on the model: a broken one decides nothing
    """

    bound: str
    what: str
    measured: Interval | float | None
    limit: float
    how: str
    show: Show = four_digits
    note: str = ""
    by_value: bool = False
    of_measurement: bool = False

    @property
    def at_least(self) -> bool:
        return self.bound.rpartition(".")[2].startswith("min")

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True)
class TaskSection:
    """A task of a report. items: empty where the report does not have them."""

    metrics: Mapping[str, Content]
    items: Sequence[Content]
    section: Content

    def interval(self, name: str) -> Interval:
        """A figure with the report's interval; of right and wrong items with Wilson's."""
        metric = self.metrics[name]
        of_items = comparison.values(self.items, name)
        if of_items is not None and metric["percent"] and comparison.flags(of_items):
            return statistics.share(int(sum(of_items)), len(of_items))
        low = -math.inf if metric["low"] is None else metric["low"]
        high = math.inf if metric["high"] is None else metric["high"]
        count = len(self.items) or self.section["items"]
        return statistics.narrowing(metric["value"], low, high, count, "as reported")


# (the key of its bounds, its name) -> a task, lm-evaluation-harness' own ones too
Tasks = Mapping[tuple[str, str], TaskSection]


def checks(content: Content, policy: PolicySettings, folder: Path) -> Iterator[Check]:
    """Every bound; of if_measured those that something was measured for.

    folder: of the report, and of the files that it names
    """
    tasks = tasks_of(content, folder)
    halves = [("", policy), ("if_measured.", policy.if_measured)]
    explicit = {
        key for _, bounds in halves if bounds is not None for key in _with_explicit_drop(bounds)
    }
    for prefix, bounds in halves:
        if bounds is None:
            continue
        for check in _of_bounds(content, tasks, bounds, explicit):
            if not prefix or check.measured is not None:
                yield replace(check, bound=prefix + check.bound)


def tasks_of(content: Content, folder: Path) -> Tasks:
    """The tasks of a report, in the order of their names."""
    native = {
        ("metrics", name): TaskSection(task["metrics"], task["items"], task)
        for name, task in sorted(content["tasks"].items())
    }
    harness = {
        ("harness", name): TaskSection(task["metrics"], harness_samples(task, folder), task)
        for name, task in sorted(harness_tasks(content).items())
    }
    return {**native, **harness}


def _of_bounds(
    content: Content, tasks: Tasks, bounds: ReportBounds, explicit: Set[tuple[str, str, str]]
) -> Iterator[Check]:
    result = {key: comparison.of_reference(task.section) for key, task in tasks.items()}
    references = {key: others for key, others in result.items() if others is not None}
    baseline = _baseline(tasks, bounds.baseline)
    yield from _figures(tasks, bounds, references, baseline)
    for name, block, others, hint in (
        (
            "reference",
            bounds.reference,
            references,
            "evaluate.tasks.<task>.reference of a task that has it measures it",
        ),
        ("baseline", bounds.baseline, baseline, f"the report of {KEY}.baseline has none of it"),
    ):
        if block is not None:
            yield from _agreement(name, block, tasks, others, explicit, hint)
    if bounds.twin is not None:
        yield from _reference(content.get("twin"), bounds.twin)
    if bounds.speed is not None:
        rows = content.get("speed", {}).get("rows", [])
        yield from _speed(rows, bounds.speed)
    if bounds.load is not None:
        yield from _load(_carried(content.get("load", {})), bounds.load)


def _figures_of(bounds: ReportBounds) -> Iterator[tuple[tuple[str, str], str, MetricBounds]]:
    """((key, task), figure, bounds) in the order of the names."""
    for group in MEASURED_BY:
        for task, figures in sorted((getattr(bounds, group) or {}).items()):
            for metric, limits in sorted(figures.items()):
                yield (group, task), metric, limits


def _with_explicit_drop(bounds: ReportBounds) -> Iterator[tuple[str, str, str]]:
    """The figures whose largest drop is not that of the block."""
    for key, metric, limits in _figures_of(bounds):
        if limits.max_drop is not None:
            yield (*key, metric)


def _baseline(
    tasks: Tasks, bounds: BaselineBounds | None
) -> dict[tuple[str, str], ComparedAnswers]:
    """Return the earlier report's results of each task."""
    if bounds is None:
        return {}
    path = Path(bounds.report)
    return {
        key: comparison.of_report(
            tasks[key].items if key in tasks else [], earlier.items, earlier.metrics, str(path)
        )
        for key, earlier in tasks_of(
            read_content(path, f"{KEY}.baseline.report"), path.parent
        ).items()
    }


def _figures(
    tasks: Tasks,
    bounds: ReportBounds,
    references: Mapping[tuple[str, str], ComparedAnswers],
    baseline: Mapping[tuple[str, str], ComparedAnswers],
) -> Iterator[Check]:
    """The bounds of single figures."""
    for (group, name), metric, limits in _figures_of(bounds):
        task, label, key = (
            tasks.get((group, name)),
            f"{name}'s {metric}",
            f"{group}.{name}.{metric}",
        )
        hint = f"{MEASURED_BY[group].format(name)} measures it"
        measured: Interval | None = None
        show = four_digits
        drops = []
        if task is not None and metric in task.metrics:
            measured = task.interval(metric)
            show = percent if task.metrics[metric]["percent"] else four_digits
            sides = [side[group, name] for side in (references, baseline) if (group, name) in side]
            drops = [
                _drop(f"{key}.max_drop", name, metric, task, others, limits.max_drop)
                for others in sides
                if limits.max_drop is not None and metric in others.metrics
            ]
        elif task is not None:
            hint = f"the figures of {name} are {', '.join(sorted(task.metrics))}"
        if limits.min is not None:
            yield Check(f"{key}.min", label, measured, limits.min, hint, show)
        if limits.max is not None:
            yield Check(f"{key}.max", label, measured, limits.max, hint, show)
        yield from drops
        if limits.max_drop is not None and not drops:
            hint = f"{hint}, {KEY}.baseline or the task's reference is what it is compared with"
            label = f"the drop of {label}"
            yield Check(f"{key}.max_drop", label, None, limits.max_drop, hint, percent)


def _agreement(
    name: str,
    bounds: AgreementBounds,
    tasks: Tasks,
    all_others: Mapping[tuple[str, str], ComparedAnswers],
    explicit: Set[tuple[str, str, str]],
    hint: str,
) -> Iterator[Check]:
    """The bounds of all figures and answers beside others'."""
    answered: set[str] = set()
    for key, others in all_others.items():
        if key not in tasks:
            missing = f"{MEASURED_BY[key[0]].format(key[1])} measures it"
            yield Check(name, f"{key[1]} of {others.source}", None, 0, missing)
            continue
        for check in _task_agreement(name, bounds, key, tasks[key], others, explicit):
            answered.add(check.bound)
            yield check
    for field in ("max_drop", "min_agreement", "max_log_likelihood_difference"):
        limit, bound = getattr(bounds, field), f"{name}.{field}"
        # A drop may be bounded figure by figure.
        if limit is not None and bound not in answered and not (field == "max_drop" and explicit):
            label = f"{field} of the agreement with a {name}"
            yield Check(bound, label, None, limit, hint)


def _task_agreement(
    name: str,
    bounds: AgreementBounds,
    key: tuple[str, str],
    task: TaskSection,
    others: ComparedAnswers,
    explicit: Set[tuple[str, str, str]],
) -> Iterator[Check]:
    hint = f"{others.source} has no item in common with it"
    if bounds.max_drop is not None:
        for metric in sorted(set(task.metrics) & set(others.metrics)):
            if (*key, metric) not in explicit:
                yield _drop(f"{name}.max_drop", key[1], metric, task, others, bounds.max_drop)
    if bounds.min_agreement is not None:
        limit, alike = bounds.min_agreement, others.alike
        same = statistics.share(sum(alike), len(alike)) if alike else None
        label = f"{key[1]}'s share of items answered as by {others.source}"
        note = f"{sum(alike)} of {len(alike)} items"
        yield Check(f"{name}.min_agreement", label, same, limit, hint, percent, note, limit == 1)
    if bounds.max_log_likelihood_difference is not None:
        label = f"the largest difference of an item's log-likelihood in {key[1]}"
        max_difference = comparison.log_likelihood_difference(others)
        if max_difference is not None or not others.pairs:
            limit = bounds.max_log_likelihood_difference
            yield Check(f"{name}.max_log_likelihood_difference", label, max_difference, limit, hint)


def _drop(
    bound: str,
    task_name: str,
    metric: str,
    task: TaskSection,
    others: ComparedAnswers,
    limit: float,
) -> Check:
    label = f"the drop of {task_name}'s {metric} from {others.source}"
    hint = f"{others.source} has no item in common with it"
    drop = comparison.drop(metric, task.metrics[metric], others)
    interval, note = (None, "") if drop is None else drop
    return Check(bound, label, interval, limit, hint, percent, note)


def _reference(section: Content | None, bounds: ReferenceBounds) -> Iterator[Check]:
    hint = "evaluate.twin measures it"
    items = (section or {}).get("items", [])
    for field, key, label, show in (
        ("max_kl", "kl", "the mean KL divergence from the twin", four_digits),
        ("min_top1", "top1", "the top-1 agreement with the twin", percent),
    ):
        limit = getattr(bounds, field)
        if limit is not None:
            values = [item[key] for item in items if item.get(key) is not None]
            measured = statistics.mean(values) if values else None
            yield Check(f"twin.{field}", label, measured, limit, hint, show)
    if bounds.max_log_likelihood_difference is not None:
        max_difference = max((abs(item["difference"]) for item in items), default=None)
        label = "the largest difference of an item's log-likelihood from the twin's"
        limit = bounds.max_log_likelihood_difference
        yield Check("twin.max_log_likelihood_difference", label, max_difference, limit, hint)
    if bounds.max_findings is not None:
        findings = None if section is None else section.get("findings", [])
        note = "; ".join(f"{one['name']}: {one['text']}" for one in findings or [])
        count = None if findings is None else float(len(findings))
        label = "the number of findings of the twin"
        yield Check(FINDINGS, label, count, bounds.max_findings, hint, four_digits, note)


def _speed(rows: Sequence[Content], bounds: SpeedBounds) -> Iterator[Check]:
    hint = "evaluate.benchmark measures it"
    key, label = "speed.max_latency_ms", "the sweep's largest latency"
    times = [{name: row[f"latency_{name}_ms"] for name in TIMES} for row in rows]
    yield from _times(key, label, bounds.max_latency_ms, times, hint)
    yield from _best("speed", rows, "tokens_per_second", bounds.min_tokens_per_second, hint)


def _carried(load: Content) -> list[Content]:
    """The runs without those of a search that went beyond the saturation: it looks for overload."""
    full = load.get("saturation") or {}

    def beyond(run: Content) -> bool:
        sizes = ((run[size], full.get(size)) for size in ("clients", "rate"))
        more = any(one is not None and limit is not None and one > limit for one, limit in sizes)
        return more and run["path"] == full["path"]

    return [run for run in load.get("runs", []) if not beyond(run)]


def _load(runs: Sequence[Content], bounds: LoadBounds) -> Iterator[Check]:
    """Times and throughput come from valid runs alone."""
    hint = "evaluate.load measures it"
    filters = {name: getattr(bounds, name) for name in ("path", "clients", "rate")}
    filters = {name: value for name, value in filters.items() if value is not None}
    runs = [run for run in runs if all(run[name] == value for name, value in filters.items())]
    if bounds.max_failed is not None:
        failed = float(sum(run["failed"] for run in runs)) if runs else None
        note = f"of {sum(run['requests'] for run in runs)} requests"
        label, limit = "the number of failed requests", bounds.max_failed
        yield Check("load.max_failed", label, failed, limit, hint, four_digits, note)
    if bounds.max_invalid is not None:
        reasons = [text for run in runs if not run["valid"] for text in run["invalid_reasons"]]
        invalid = float(sum(not run["valid"] for run in runs)) if runs else None
        label, limit = "the number of invalid runs", bounds.max_invalid
        note = "; ".join(dict.fromkeys([*reasons, *([INVALID_REMEDY] if reasons else [])]))
        check = Check("load.max_invalid", label, invalid, limit, hint, four_digits, note)
        yield replace(check, of_measurement=True)
    valid = [run for run in runs if run["valid"]]
    hint = f"a valid run measures it: {hint}" if runs else hint
    for field, label in (
        ("first_token_ms", "the time to the first token"),
        ("between_tokens_ms", "the time between tokens"),
        ("latency_ms", "the latency"),
    ):
        values = [run[field] for run in valid if run.get(field) is not None]
        limits = getattr(bounds, f"max_{field}")
        yield from _times(f"load.max_{field}", f"{label} under load", limits, values, hint)
    for field in ("requests_per_second", "tokens_per_second", "goodput"):
        yield from _best("load", valid, field, getattr(bounds, f"min_{field}"), hint)


def _times(
    bound: str, label: str, bounds: TimeBounds | None, rows: Sequence[Content], hint: str
) -> Iterator[Check]:
    """The largest one of every percentile that is bounded."""
    for name in TIMES:
        limit = getattr(bounds, name, None)
        if limit is not None:
            slowest = max((times[name] for times in rows), default=None)
            yield Check(
                f"{bound}.{name}", f"{label} ({name})", slowest, limit, hint, with_milliseconds
            )


def _best(
    section: str, rows: Sequence[Content], field: str, limit: float | None, hint: str
) -> Iterator[Check]:
    """The largest of a throughput."""
    if limit is not None:
        best = max((row[field] for row in rows if row.get(field) is not None), default=None)
        label = f"the best {field.replace('_', ' ')} of the {section} test"
        yield Check(f"{section}.min_{field}", label, best, limit, hint)
