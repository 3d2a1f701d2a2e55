"""report.html: what is in a report as one page, which loads nothing.

Here stands what the page says; templates/report/ says how it looks. Every section is optional.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher_scripts.common.rendering import render
from launcher_scripts.evaluation import plots, speed

Section = Mapping[str, Any]

# Rows of one table at most: report.json holds all of them.
MAX_ITEMS = 200
MAX_CHANGES = 100
MAX_TIMELINES = 6
MAX_LETTERS = 1500  # letters of one text
WORDS_COMPARED = 400  # of two texts side by side: more take too long

# The sections in their order; each has a template of its name.
TITLES = {
    "quality": "Quality",
    "changes": "Answers that changed",
    "twin": "Beside the original",
    "harness": "lm-evaluation-harness",
    "ladder": "Precisions",
    "load": "Load",
    "speed": "Speed of one client",
    "cost": "Cost",
    "floors": "What the hardware allows",
    "provenance": "Provenance",
}
MEASURED = ("twin", "harness", "ladder", "load", "speed")
VERDICTS = {
    "GO": ("go", "This model may go live."),
    "NO-GO": ("no", "This model must not go live."),
    "INCONCLUSIVE": ("open", "The measurements cannot tell whether this model may go live."),
}
LEVELS = {
    "fail": ("no", "failed"),
    "inconclusive": ("open", "cannot tell"),
    "pass": ("go", "passed"),
}


def html(report: Section) -> str:
    """The page of what report.json holds."""
    tasks = {name: _task(task) for name, task in report["tasks"].items()}
    runs = report.get("load", {}).get("runs", [])
    parts = {
        "quality": tasks,
        "changes": {name: view for name, view in tasks.items() if view["changes"]},
        "twin": _reference(report["twin"]) if report.get("twin") else None,
        "harness": _harness(report["harness"]) if report.get("harness") else None,
        "ladder": _ladder(report["ladder"]) if report.get("ladder") else None,
        "load": {"plots": _load_plots(runs), "timelines": list(_timelines(runs))} if runs else None,
        "speed": {"plots": plots.speed(report["speed"]["rows"])} if report.get("speed") else None,
        "cost": speed.cost_table(report),
        "floors": speed.floor_table(report),
        "provenance": _provenance(report),
    }
    return render(
        "report.html.j2",
        report=report,
        verdict=_verdict(report.get("verdict")),
        key_figures=list(_key_figures(report)),
        titles={name: heading for name, heading in TITLES.items() if parts[name]},
        parts=parts,
        figure=formatted,
        milliseconds=milliseconds,
        money=money,
        size=size,
        title=title,
        cell=cell,
        plain=bound_text,
        hardware=hardware,
        run_name=run_name,
        shown=MAX_ITEMS,
    )


def formatted(value: float | None, percent: bool = False) -> str:
    """A number as people read it: percentages with one decimal, four digits of others."""
    if value is None:
        return "-"
    if percent:
        return f"{100 * value:.1f} %"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{2 if abs(value) >= 0.1 else 4}f}"


def milliseconds(value: float | None) -> str:
    """A time as precisely as it matters."""
    return "-" if value is None else f"{value:,.{0 if value >= 100 else 1}f}"


def size(count: int | None) -> str:
    """Bytes in GB, or in MB where those are few."""
    if count is None:
        return "-"
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def money(dollars: float | None) -> str:
    """Cents, or two digits of less than ten of them."""
    return (
        "-" if dollars is None else f"{dollars:.2f} USD" if dollars >= 0.1 else f"{dollars:.2g} USD"
    )


def title(name: str) -> str:
    """A key as words."""
    return name.replace("_", " ")


def bound_text(value: Any) -> str:
    """A bound or what was measured, whatever it is, with four digits."""
    if not isinstance(value, float):
        return cell(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def cell(value: Any) -> str:
    """An item's field."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, (list, tuple)):
        return clipped("; ".join(map(str, value)))
    return "-" if value is None else clipped(str(value))


def clipped(text: str, length: int = MAX_LETTERS) -> str:
    return text if len(text) <= length else f"{text[:length]} …"


def hardware(server: Section) -> str:
    """Describe the hardware of a server's ranks, or of all its replicas."""
    devices = [str(rank.get("device")) for rank in server.get("ranks", [])]
    counts = Counter(device.partition("(")[2].rstrip(")") or device for device in devices)
    names = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "unknown hardware"
    replicas = server.get("replicas")
    return f"{len(replicas)} servers, each on {names}" if replicas else names


def run_name(run: Section) -> str:
    """A load run in words."""
    if run["mode"] == "closed":
        return f"{run['clients']} client{'' if run['clients'] == 1 else 's'}"
    return "trace" if run["rate"] is None else f"{run['rate']:g} requests/s"


def _verdict(verdict: Section | None) -> dict[str, Any] | None:
    """The badge, and the reasons by level in the gate's own order."""
    if verdict is None:
        return None
    shape, sentence = VERDICTS.get(verdict["verdict"], VERDICTS["INCONCLUSIVE"])
    reasons = [
        {**reason, "shape": LEVELS[reason["level"]][0], "word": LEVELS[reason["level"]][1]}
        for reason in verdict["reasons"]
    ]
    passed = [reason for reason in reasons if reason["level"] == "pass"]
    others = [reason for reason in reasons if reason["level"] != "pass"]
    return {
        **verdict,
        "shape": shape,
        "sentence": sentence,
        "others": others,
        "passed": passed,
    }


def _key_figures(report: Section) -> Iterator[dict[str, str]]:
    """Iterate over the key metrics: quality, similarity to the original, speed, cost."""
    for name, task in list(report["tasks"].items())[:3]:
        for metric, values in list(task["metrics"].items())[:1]:
            low, high = (formatted(values[end], values["percent"]) for end in ("low", "high"))
            label = f"{title(name)}: {title(metric)}"
            yield _key(
                label, formatted(values["value"], values["percent"]), f"95 %: {low} to {high}"
            )
    top1 = report.get("twin", {}).get("metrics", {}).get("top1")
    if top1:
        yield _key("same likeliest token", formatted(top1["value"], True), "as the original's")
    best = max(_valid(report), key=lambda run: float(run["tokens_per_second"]), default=None)
    if best:
        where = f"{best['path']}, {run_name(best)}"
        yield _key("tokens per second", formatted(best["tokens_per_second"]), where)
        first = best["first_token_ms"] or {"p50": None, "p99": None}
        after, latest = milliseconds(first["p50"]), milliseconds(first["p99"])
        yield _key("time to first token", f"{after} ms", f"p99 {latest} ms; {where}")
        cost = speed.cost_table(report)
        if cost and cost["price"] is not None:
            lowest = min(row["cost"] for row in cost["rows"] if row["cost"] is not None)
            note = f"at {cost['price']:g} USD per GPU hour"
            yield _key("a million tokens", money(lowest), note)
    elif report.get("speed", {}).get("rows"):
        row = report["speed"]["rows"][0]
        sizes = f"{row['batch_size']} x {row['input_len']} in, {row['output_len']} out"
        yield _key("a request, p50", f"{row['latency_p50_ms']:,.1f} ms", sizes)


def _key(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _valid(report: Section) -> list[Section]:
    return [run for run in report.get("load", {}).get("runs", []) if run["valid"]]


def _task(task: Section) -> dict[str, Any]:
    """A task's figures beside its reference's, and the items that changed."""
    reference = task.get("reference")
    return {
        "rows": _metric_rows(task["metrics"], reference),
        "plot": plots.task(task["items"]),
        "changes": _changes(task["items"], reference) if reference else [],
        "compared": len(task["items"]),
    }


def _metric_rows(metrics: Section, reference: Section | None = None) -> list[dict[str, Any]]:
    """A row for each metric: its texts, and where its interval's plot has its marks."""
    reference_metrics = reference["metrics"] if reference else {}
    rows = []
    for name, metric in metrics.items():
        percent, other = metric["percent"], reference_metrics.get(name)
        difference = (reference or {}).get("difference", {}).get(name)
        ends = [formatted(metric[end], percent) for end in ("low", "high")]
        rows.append(
            {
                "name": title(name),
                "value": formatted(metric["value"], percent),
                "interval": "-" if metric["low"] is None else f"{ends[0]} to {ends[1]}",
                "marks": _values(metric, other),
                "reference": formatted(other["value"], percent) if other else None,
                "difference": None
                if difference is None
                else f"{difference * (100 if percent else 1):+.2f}",
                "meaning": metric["meaning"],
            }
        )
    return rows


def _values(metric: Section, reference: Section | None) -> dict[str, float | None]:
    """Positions from 0 to 100: percentages on their whole scale, others on one of their own."""
    values = {"value": metric["value"], "low": metric["low"], "high": metric["high"]}
    values["reference"] = reference["value"] if reference else None
    numbers = [value for value in values.values() if value is not None]
    low, high = (0.0, 1.0) if metric["percent"] else (min(numbers), max(numbers))
    margin = 0.0 if metric["percent"] else 0.15 * ((high - low) or 1.0)
    low, width = low - margin, (high - low) + 2 * margin
    return {
        name: None if value is None else round(100 * (value - low) / width, 2)
        for name, value in values.items()
    }


def _changes(items: Sequence[Section], reference: Section) -> list[dict[str, Any]]:
    """The items that the reference answers otherwise, both answers side by side."""
    by_index = {item["index"]: item for item in items}
    changes = []
    for index in reference["different"][:MAX_CHANGES]:
        local, original = by_index[index], reference["items"][str(index)]
        both = [_answer(item) for item in (local, original)]
        served, other = _side_by_side(*both)
        question = next(
            (local[key] for key in ("target", "targets", "source") if key in local), None
        )
        changes.append(
            {"index": index, "served": served, "reference": other, "target": cell(question).strip()}
        )
    return changes


def _answer(item: Section) -> str:
    if "prediction" in item:
        return clipped(str(item["prediction"]))
    words = {True: "right", False: "wrong"}.get(item.get("correct", None), "-")
    likely = item.get("log_likelihood")
    return words if likely is None else f"{words} (log-likelihood {likely:.4f})"


def _side_by_side(
    served: str, reference: str
) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both texts in pieces, each with whether the other lacks it."""
    left, right = (re.findall(r"\s+|\S+", text) for text in (served, reference))
    if max(len(left), len(right)) > WORDS_COMPARED:
        return [(served, False)], [(reference, False)]
    pieces: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([], [])
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        pieces[0].append(("".join(left[start:end]), tag != "equal"))
        pieces[1].append(("".join(right[other_start:other_end]), tag != "equal"))
    return tuple([piece for piece in side if piece[0]] for side in pieces)  # type: ignore[return-value]


def _reference(section: Section) -> dict[str, Any]:
    return {
        "rows": _metric_rows(section["metrics"]),
        "plot": plots.positions(section["positions"]) if section["positions"] else None,
    }


def _harness(harness: Section) -> list[dict[str, Any]]:
    """A row for each metric of each task; what it counts stands where its meaning does."""
    return [
        {
            **row,
            "name": f"{name}: {row['name']}",
            "meaning": f"{row['meaning']}; {task['items']:,} items, version {task.get('version')}",
        }
        for name, task in harness["tasks"].items()
        for row in _metric_rows(task["metrics"])
    ]


def _ladder(ladder: Section) -> dict[str, Any]:
    """The metrics of any rung, by name, as columns."""
    names = dict.fromkeys(name for row in ladder["rows"] for name in row["metrics"])
    rows = [
        {**row, "figures": {cells["name"]: cells for cells in _metric_rows(row["metrics"])}}
        for row in ladder["rows"]
    ]
    return {"columns": [title(name) for name in names], "rows": rows}


def _load_plots(runs: Sequence[Section]) -> list[str]:
    """Closed and open loops apart, where there are at least two runs to draw a line through."""
    drawn = []
    for mode, by in (("closed", "clients"), ("open", "rate")):
        measured = [run for run in runs if run["valid"] and run["first_token_ms"]]
        selected = [run for run in measured if run["mode"] == mode and run[by]]
        if len(selected) > 1:
            drawn += plots.load_plot(selected, by)
    return drawn


def _timelines(runs: Sequence[Section]) -> Iterator[dict[str, Any]]:
    """Iterate over the timelines of each path, the fastest run first, invalid ones included."""
    drawn = sorted(
        (run for run in runs if len(run["timeline"]) > 1),
        key=lambda run: (run["valid"], run["tokens_per_second"]),
        reverse=True,
    )
    best: dict[str, Section] = {}
    for run in drawn:
        best.setdefault(run["path"], run)
    paths = dict.fromkeys(run["path"] for run in runs)
    ordered = [best[path] for path in paths if path in best]
    ordered += [run for run in drawn if run is not best[run["path"]]]
    for run in ordered[:MAX_TIMELINES]:
        name = f"{run['path']}, {run_name(run)}{'' if run['valid'] else ' (invalid)'}"
        yield {"svg": plots.timeline(run, name), "first": best[run["path"]] is run}


def _provenance(report: Section) -> list[dict[str, Any]]:
    """Sections that were measured on the same stand together, with what they were measured on."""
    groups: list[dict[str, Any]] = []
    for name, section in _measured(report):
        on = section["measured_on"]
        set_up = _set_up(on)
        group = next((group for group in groups if group["facts"] == set_up), None)
        if group is None:
            group = {"facts": set_up, "names": [], "sections": []}
            groups.append(group)
        group["names"].append(title(name))
        group["sections"].append((name, on, section["settings"]))
    return groups


def _measured(report: Section) -> Iterator[tuple[str, Section]]:
    yield from report["tasks"].items()
    sections = ((name, report.get(name) or {}) for name in MEASURED)
    yield from ((name, section) for name, section in sections if "measured_on" in section)


def _set_up(on: Section) -> dict[str, Any]:
    """Return the set-up of a section, a line each."""
    server = on.get("server", {})
    lines = {
        kind: server[kind] for kind in ("http", "grpc", "openai", "replicas") if kind in server
    }
    for rank in server.get("ranks", []):
        lines[f"rank {rank['rank']}"] = f"{rank.get('device')} on {rank.get('host')}"
    lines["versions"] = server.get("versions", {})
    lines["client"] = on["client"]
    for kind, digest in on.get("digests", {}).items():
        lines[f"digest of {kind}"] = digest
    hidden = {"date", "protocol", "server", "client", "digests"}
    return lines | {key: value for key, value in on.items() if key not in hidden}
