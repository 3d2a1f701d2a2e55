"""The command that explains two reports: what differs in the set-up, then figures, then items."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.rendering import align
from launcher_scripts.evaluation.report_content import read_content, report_file
from launcher_scripts.evaluation.report_difference import (
    Figure,
    ReportDifference,
    SectionDifference,
    explain,
)

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
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print what differs; 0: the same results, 1: others, 2: not comparable.

    Raises ConfigError for options that no report can be compared by.
    """
    problems = Problems("the command line")
    problems.check_at_least("--items", given.items, 0)
    problems.check_at_least("--tolerance", given.tolerance, 0)
    problems.raise_if_any(ConfigError)
    try:
        a, b = (read_content(path, "the command line") for path in (given.a, given.b))
        folder_a, folder_b = (report_file(path).parent for path in (given.a, given.b))
        found = explain(a, b, folder_a, folder_b)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_COMPARABLE
    reasons = found.reasons(given.tolerance)
    code = NOT_COMPARABLE if not found.comparable else OTHER if reasons else SAME
    if given.as_json:
        values = dataclasses.asdict(found)
        head = {"a": str(given.a), "b": str(given.b), "exit_code": code, "reasons": reasons}
        print(json.dumps(head | values, indent=1, ensure_ascii=False))
        return code
    for name, path, model in zip("AB", (given.a, given.b), found.models, strict=True):
        print(f"{name}: {path}, {model}")
    print("\n".join(_text(found, given.items)))
    print("\n" + _result(code, reasons))
    return code


def _result(code: int, reasons: list[str]) -> str:
    if code == NOT_COMPARABLE:
        return "The reports have no item and no measurement in common."
    if code == SAME:
        return "The results are the same."
    return "The results are not the same: " + "; ".join(reasons)


def _text(found: ReportDifference, items: int) -> Iterator[str]:
    yield "\nSet-up"
    rows = [["", "A", "B", ""]]
    everywhere = {name for each in found.set_up for name in each.sections}
    for each in found.set_up:
        whose = "" if set(each.sections) == everywhere else ", ".join(each.sections)
        rows.append([each.name, _short(each.a), _short(each.b), whose])
    yield align(rows, left=True) if rows[1:] else "no difference"
    for section in found.sections:
        yield from _section(section, items)
    if found.measured:
        yield "\nMeasured"
        rows = [["", "A", "B", "B / A"]]
        for name, a, b in found.measured:
            rows.append([name, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}" if a else "-"])
        yield align(rows)


def _section(section: SectionDifference, items: int) -> Iterator[str]:
    counted = f"{section.shared} items in both"
    for name, missing in (("A", section.missing_b), ("B", section.missing_a)):
        counted += f", {missing} in {name} alone" if missing else ""
    yield f"\n{section.name} ({counted})"
    rows = [["", "A", "B", "difference", "95 % interval (paired)"]]
    rows += [_figure_row(name, figure) for name, figure in section.figures.items()]
    yield align(rows)
    for key, value in section.largest.items():
        yield f"largest difference of an item's {key}: {value:.2g}"
    if section.changed:
        yield f"{len(section.changed)} of {section.shared} answers changed"
    for index in list(section.changed)[:items]:
        yield from _item(index, *section.changed[index])
    if len(section.changed) > items:
        yield f"  and {len(section.changed) - items} more: --items"


def _figure_row(name: str, figure: Figure) -> list[str]:
    scale, form = (100.0, ".2f") if figure.percent else (1.0, ".4f")
    values = [format(value * scale, form) for value in (figure.a, figure.b)]
    row = [name.replace("_", " ") + (" [%]" if figure.percent else ""), *values]
    row.append(format(figure.difference * scale, "+" + form))
    if figure.low is None or figure.high is None:
        return [*row, "-"]
    return [*row, f"{figure.low * scale:+{form[1:]}} to {figure.high * scale:+{form[1:]}}"]


def _item(index: int, a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """The item, and the two answers below each other."""
    said = [f"{key} {_short(a[key])}" for key in QUESTION_KEYS if key in a]
    yield f"  item {index}: " + ", ".join(said)
    for name, item in (("A", a), ("B", b)):
        own = {key: item[key] for key in item if key not in (*QUESTION_KEYS, "index")}
        yield f"    {name}: " + ", ".join(f"{key} {_short(value)}" for key, value in own.items())


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
