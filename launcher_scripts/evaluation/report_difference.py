"""Two reports explained: what differs in their set-ups, in their figures, and item by item.

B is compared with A, so a difference is B's value minus A's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.rendering import align
from launcher_scripts.evaluation.comparison import (
    ANSWER_KEYS,
    FIELDS,
    flags,
    is_perplexity,
    same_item,
)
from launcher_scripts.evaluation.journal import (
    harness_items,
    harness_tasks,
    read_content,
    report_file,
    value_differences,
)
from launcher_scripts.evaluation.tasks import task as statistics

# When and by which processes something was measured, which differs between any two reports.
PASSING = ("date", "runs")
PASSING_OF_SERVER = ("alive_at", "timeline", "pid", "job")
PASSING_OF_RANK = ("pid", "model")
# The order in which people ask what differs; all else follows.
FIRST = ("digests.", "parameters.", "settings.", "server.", "client.", "seeds.")


@dataclass(frozen=True)
class Difference:
    """One value of the set-ups, where it differs.

    sections: whose it is; a, b: None where a report does not say it
    """

    name: str
    a: Any
    b: Any
    sections: tuple[str, ...]


@dataclass(frozen=True)
class MetricDifference:
    """One figure of both reports.

    low, high: ends of the 95 % interval of the difference over the items that both have, paired;
               None where the figure has no value per item, or there are too few
    """

    a: float
    b: float
    difference: float
    low: float | None
    high: float | None
    percent: bool


@dataclass(frozen=True)
class SectionDifference:
    """The comparison of two sections of the same name.

    shared:  items of the same target that both have; missing_a, missing_b: those one lacks
    changed: index -> (A's item, B's item), where the answers differ
    largest: number of an item -> its largest difference over the shared items
    """

    name: str
    figures: dict[str, MetricDifference]
    shared: int
    missing_a: int
    missing_b: int
    changed: dict[int, tuple[dict[str, Any], dict[str, Any]]]
    largest: dict[str, float]


@dataclass(frozen=True)
class ReportDifference:
    """B beside A.

    only_a, only_b: sections that the other one lacks
    measured:       of what differs between any two runs: what, A's value, B's value
    verdicts:       A's and B's; None without one
    """

    models: tuple[str, str]
    set_up: list[Difference]
    sections: list[SectionDifference]
    only_a: list[str]
    only_b: list[str]
    measured: list[tuple[str, float, float]]
    verdicts: tuple[str | None, str | None]

    @property
    def comparable(self) -> bool:
        """Return whether the reports have anything in common."""
        return bool(self.measured) or any(
            section.shared or not section.missing_a + section.missing_b for section in self.sections
        )

    def reasons(self, tolerance: float) -> list[str]:
        """Why the results are not the same; none where they are.

        tolerance: how far numbers may be apart, relative to A's where that is larger than 1
        """
        result = [f"{name} is in A alone" for name in self.only_a]
        result += [f"{name} is in B alone" for name in self.only_b]
        for section in self.sections:
            if section.changed:
                result.append(f"{section.name}: {len(section.changed)} answers differ")
            if section.missing_a or section.missing_b:
                result.append(f"{section.name}: the items are not the same")
            for name, difference in section.figures.items():
                if abs(difference.difference) > tolerance * max(1.0, abs(difference.a)):
                    result.append(f"{section.name}: {name} differs by {difference.difference:+.6g}")
        if self.verdicts[0] != self.verdicts[1]:
            result.append(f"the verdicts are {self.verdicts[0]} and {self.verdicts[1]}")
        return result


def explain(
    a: Mapping[str, Any], b: Mapping[str, Any], folder_a: Path, folder_b: Path
) -> ReportDifference:
    """The contents of two report.json, which lie in these folders."""
    sections_a, sections_b = dict(_sections(a, folder_a)), dict(_sections(b, folder_b))
    shared = [name for name in sections_a if name in sections_b]
    return ReportDifference(
        models=(a["model"], b["model"]),
        set_up=_set_up(a, b, {name: (sections_a[name], sections_b[name]) for name in shared}),
        sections=[
            _section(name, sections_a[name], sections_b[name])
            for name in shared
            if "metrics" in sections_a[name] and "metrics" in sections_b[name]
        ],
        only_a=[name for name in sections_a if name not in sections_b],
        only_b=[name for name in sections_b if name not in sections_a],
        measured=list(_measured(a, b)),
        verdicts=(_verdict(a), _verdict(b)),
    )


def _sections(content: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every section by its name; a task of lm-evaluation-harness is one of its own."""
    yield from content["tasks"].items()
    for name in ("speed", "twin", "load"):
        if content.get(name):
            yield name, content[name]
    for name, task in harness_tasks(content).items():
        yield f"harness {name}", {**task, "items": harness_items(task, folder)}


def _verdict(content: Mapping[str, Any]) -> str | None:
    verdict = content.get("verdict")
    return str(verdict["verdict"]) if verdict else None


def _set_up(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    sections: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> list[Difference]:
    """Return the differences in the set-ups, the decisive ones first; shared ones are listed
    once."""
    result: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
    for section, (in_a, in_b) in sections.items():
        for name, one, other in value_differences(_lasting(in_a), _lasting(in_b)):
            key = (name, repr(one), repr(other))
            result.setdefault(key, (one, other, []))[2].append(section)
    listed = [
        Difference(name, one, other, tuple(of)) for (name, *_), (one, other, of) in result.items()
    ]
    order = {start: index for index, start in enumerate(FIRST)}
    listed.sort(key=lambda d: next((order[s] for s in FIRST if d.name.startswith(s)), len(FIRST)))
    if a["model"] != b["model"]:
        listed.insert(0, Difference("model", a["model"], b["model"], ()))
    return listed


def _lasting(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section's set-up without what differs between any two runs."""
    on = dict(section.get("measured_on") or {})
    for name in PASSING:
        on.pop(name, None)
    server = dict(on.get("server") or {})
    for name in PASSING_OF_SERVER:
        server.pop(name, None)
    for rank in server.pop("ranks", []):
        lasting = {name: value for name, value in rank.items() if name not in PASSING_OF_RANK}
        server[f"rank {rank.get('rank')}"] = lasting
    on["server"] = server
    on["digests"] = {n: v for n, v in (on.get("digests") or {}).items() if n != "reasons"}
    return {**on, **{name: section.get(name) for name in ("settings", "version")}}


def _section(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> SectionDifference:
    items_a, items_b = _items(a), _items(b)
    shared = [index for index, item in items_a.items() if same_item(item, items_b)]
    pairs = {index: (items_a[index], items_b[index]) for index in shared}
    figures = {
        metric: _metric_difference(metric, values, b["metrics"][metric], list(pairs.values()))
        for metric, values in a["metrics"].items()
        if metric in b["metrics"]
    }
    return SectionDifference(
        name=name,
        figures=figures,
        shared=len(shared),
        missing_a=len(items_b) - len(shared),
        missing_b=len(items_a) - len(shared),
        changed={
            index: (one, other) for index, (one, other) in pairs.items() if _changed(one, other)
        },
        largest=_max_differences(list(pairs.values())),
    )


def _items(section: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    return {int(item["index"]): item for item in section.get("items") or []}


def _changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the answers differ, or what is right or wrong of them, as far as both have
    it."""
    return any(
        one[name] != other[name]
        for name in one.keys() & other.keys()
        if name.partition(",")[0] in ANSWER_KEYS
        or isinstance(one[name], bool)
        or isinstance(other[name], bool)
    )


def _metric_difference(
    name: str,
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    pairs: list[tuple[dict[str, Any], dict[str, Any]]],
) -> MetricDifference:
    """A figure with the paired interval of its difference (see statistics).

    lm-eval's items call a log-likelihood by the figure's name: perplexity.
    """
    field = FIELDS.get(name, name)
    key = field if all(field in item for pair in pairs for item in pair) else name
    low = high = None
    if all(_is_number(item.get(key)) for pair in pairs for item in pair) and len(pairs) > 1:
        values = [(float(one[key]), float(other[key])) for one, other in pairs]
        if flags([value for pair in values for value in pair]):
            won, lost = sum(x < y for x, y in values), sum(x > y for x, y in values)
            interval = statistics.paired_share(won, lost, len(values))
        else:
            interval = statistics.mean([y - x for x, y in values])
            if is_perplexity(name):
                of_a = math.exp(-sum(x for x, _ in values) / len(values))
                interval = interval.mapped(lambda change: of_a * math.expm1(-change))
        low, high = interval.low, interval.high
    difference = b["value"] - a["value"]
    return MetricDifference(a["value"], b["value"], difference, low, high, bool(a["percent"]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def _max_differences(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """Return the largest differences of the items' numbers, besides flags."""
    max_differences: dict[str, float] = {}
    for one, other in pairs:
        for key in one.keys() & other.keys() - {"index"}:
            if isinstance(one[key], float) and isinstance(other[key], float):
                max_differences[key] = max(
                    max_differences.get(key, 0.0), abs(one[key] - other[key])
                )
    return {key: max_differences[key] for key in sorted(max_differences) if max_differences[key]}


def _measured(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Rates and latencies, which are never quite the same."""
    rates_a, rates_b = dict(_rates(a)), dict(_rates(b))
    for name, value in rates_a.items():
        if name in rates_b:
            yield name, value, rates_b[name]


def _rates(content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for row in (content.get("speed") or {}).get("rows", []):
        label = f"speed, batch size {row['batch_size']}, {row['input_len']} tokens in, "
        label += f"{row['output_len']} out"
        yield f"{label}: p50 [ms]", row["latency_p50_ms"]
        yield f"{label}: tokens/s", row["tokens_per_second"]
    for run in (content.get("load") or {}).get("runs", []):
        many = f"{run['clients']} clients" if run["clients"] else f"{run['rate']} requests/s"
        label = f"load, {run['path']}, {many}"
        yield f"{label}: p50 [ms]", run["latency_ms"]["p50"]
        yield f"{label}: tokens/s", run["tokens_per_second"]
    for name, task in content["tasks"].items():
        rate = (task.get("pace") or {}).get("tokens_per_second")
        if rate is not None:
            yield f"{name}: tokens/s", rate


SAME, OTHER, NOT_COMPARABLE = 0, 1, 2
TOLERANCE = 1e-4
ITEMS = 20
TEXT = 300  # characters of an item's text
# What tells people which item it is.
QUESTION_KEYS = ("id", "question", "source", "target", "targets")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="report.json or its folder")
    parser.add_argument("--json", dest="as_json", action="store_true", help="all of it as JSON")
    about = "items to show of those that changed (%(default)s)"
    parser.add_argument("--items", type=int, default=ITEMS, metavar="N", help=about)
    about = "how far apart figures may be and count as the same, relative to A's where that is "
    about += "larger than 1 (%(default)s)"
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, metavar="X", help=about)
    parser.set_defaults(run=print_difference)


def print_difference(args: argparse.Namespace) -> int:
    """Print what differs; 0: the same results, 1: others, 2: not comparable.

    Raises ConfigError for options that no report can be compared by.
    """
    problems = Problems("the command line")
    problems.check_minimum("--items", args.items, 0)
    problems.check_minimum("--tolerance", args.tolerance, 0)
    problems.raise_if_any(ConfigError)
    try:
        a, b = (read_content(path, "the command line") for path in (args.a, args.b))
        folder_a, folder_b = (report_file(path).parent for path in (args.a, args.b))
        difference = explain(a, b, folder_a, folder_b)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_COMPARABLE
    reasons = difference.reasons(args.tolerance)
    code = NOT_COMPARABLE if not difference.comparable else OTHER if reasons else SAME
    if args.as_json:
        values = dataclasses.asdict(difference)
        head = {"a": str(args.a), "b": str(args.b), "exit_code": code, "reasons": reasons}
        print(json.dumps(head | values, indent=1, ensure_ascii=False))
        return code
    for name, path, model in zip("AB", (args.a, args.b), difference.models, strict=True):
        print(f"{name}: {path}, {model}")
    print("\n".join(_text(difference, args.items)))
    print("\n" + _result(code, reasons))
    return code


def _result(code: int, reasons: list[str]) -> str:
    if code == NOT_COMPARABLE:
        return "The reports have no item and no measurement in common."
    if code == SAME:
        return "The results are the same."
    return "The results are not the same: " + "; ".join(reasons)


def _text(difference: ReportDifference, items: int) -> Iterator[str]:
    yield "\nSet-up"
    rows = [["", "A", "B", ""]]
    everywhere = {name for change in difference.set_up for name in change.sections}
    for item in difference.set_up:
        whose = "" if set(item.sections) == everywhere else ", ".join(item.sections)
        rows.append([item.name, _short(item.a), _short(item.b), whose])
    yield align(rows, left=True) if rows[1:] else "no difference"
    for section in difference.sections:
        yield from _print_section(section, items)
    if difference.measured:
        yield "\nMeasured"
        rows = [["", "A", "B", "B / A"]]
        for name, a, b in difference.measured:
            rows.append([name, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}" if a else "-"])
        yield align(rows)


def _print_section(section: SectionDifference, items: int) -> Iterator[str]:
    num_items = f"{section.shared} items in both"
    for name, missing in (("A", section.missing_b), ("B", section.missing_a)):
        num_items += f", {missing} in {name} alone" if missing else ""
    yield f"\n{section.name} ({num_items})"
    rows = [["", "A", "B", "difference", "95 % interval (paired)"]]
    rows += [_metric_row(name, difference) for name, difference in section.figures.items()]
    yield align(rows)
    for key, value in section.largest.items():
        yield f"largest difference of an item's {key}: {value:.2g}"
    if section.changed:
        yield f"{len(section.changed)} of {section.shared} answers changed"
    for index in list(section.changed)[:items]:
        yield from _item(index, *section.changed[index])
    if len(section.changed) > items:
        yield f"  and {len(section.changed) - items} more: --items"


def _metric_row(name: str, difference: MetricDifference) -> list[str]:
    scale, form = (100.0, ".2f") if difference.percent else (1.0, ".4f")
    values = [format(value * scale, form) for value in (difference.a, difference.b)]
    row = [name.replace("_", " ") + (" [%]" if difference.percent else ""), *values]
    row.append(format(difference.difference * scale, "+" + form))
    if difference.low is None or difference.high is None:
        return [*row, "-"]
    return [*row, f"{difference.low * scale:+{form[1:]}} to {difference.high * scale:+{form[1:]}}"]


def _item(index: int, a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """The item, and the two answers below each other."""
    parts = [f"{key} {_short(a[key])}" for key in QUESTION_KEYS if key in a]
    yield f"  item {index}: " + ", ".join(parts)
    for name, item in (("A", a), ("B", b)):
        answer = {key: item[key] for key in item if key not in (*QUESTION_KEYS, "index")}
        yield f"    {name}: " + ", ".join(f"{key} {_short(value)}" for key, value in answer.items())


def _short(value: Any) -> str:
    """A value on one line; a digest by its beginning, and - for what a report does not say."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return text[:12]
    text = " ".join(text.split())
    return text if len(text) <= TEXT else text[:TEXT] + "..."
