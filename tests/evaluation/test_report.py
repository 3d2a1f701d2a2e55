"""report.json and report.html: what is in them, how sections meet, and what people see."""

import dataclasses
import html.parser
import json
import re

import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.evaluation import BenchmarkSettings, TaskSettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation import plots
from launcher_scripts.evaluation.report import Report, measured_on
from launcher_scripts.evaluation.speed import SpeedRow
from launcher_scripts.evaluation.tables import speed_table, task_table
from launcher_scripts.evaluation.tasks.task import Metric, TaskResult

READY = {
    "http": "node1:8000",
    "models": ["gpt"],
    "versions": {"tritonserver": "2.51.0"},
    "ranks": [{"rank": 0, "pid": 7, "host": "node1", "device": "cpu"}],
}
TASK = TaskSettings("lambada", "items.jsonl")
RESULT = TaskResult(
    metrics={
        "accuracy": Metric(0.345, 0.2741, 0.4158, True, "words"),
        "perplexity": Metric(44.136, 30.634, 63.588, False, "words"),
    },
    items=[
        {"index": 0, "target": " <b>", "correct": True, "log_likelihood": -0.25},
        {"index": 1, "target": " dog", "correct": False, "log_likelihood": -3.5},
    ],
)
SPEED = [
    SpeedRow(size, 60, 20, 10, 100.0 * size, 90.0 * size, 120.0 * size, 130.0 * size, 200.0)
    for size in (1, 2, 8)
]


def environment(tmp_path):
    settings = EvaluateSettings(
        ready_file="ready.json",
        results_dir=str(tmp_path),
        model_name="gpt",
        tokenizer_dir="tokenizer",
        benchmark=BenchmarkSettings(),
        gpu_price=2.5,
    )
    return measured_on(settings, READY)


class Page(html.parser.HTMLParser):
    """The text of a page and what it loads; fails on tags that are not closed in order."""

    VOID = ("meta", "link", "br", "img", "input")

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.links = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data.strip())


@pytest.mark.usefixtures("undrawn")
def test_both_steps_meet_in_one_report(tmp_path):
    measured = environment(tmp_path)
    folder = tmp_path / "results"
    Report(folder, "gpt").add_task(TASK, RESULT, measured)
    Report(folder, "gpt").add_speed(BenchmarkSettings(), SPEED, measured)
    content = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert content["schema"] == 1 and content["model"] == "gpt"
    task = content["tasks"]["lambada"]
    assert task["metrics"]["accuracy"] == {
        "value": 0.345,
        "low": 0.2741,
        "high": 0.4158,
        "percent": True,
        "meaning": "words",
    }
    assert task["items"] == RESULT.items
    assert task["settings"]["batch_size"] == 8
    assert content["speed"]["rows"][2]["latency_p90_ms"] == 960.0
    for section in (task, content["speed"]):
        assert section["measured_on"]["server"] == READY
        assert section["measured_on"]["gpu_price"] == 2.5
        assert section["measured_on"]["reads"] is None  # there is no repository
        client = section["measured_on"]["client"]
        assert client["cores"] >= 1 and client["memory_gib"] > 0
        assert client["processor"] and client["python"] and client["tritonclient"]
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", section["measured_on"]["date"]
        )
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json"]


@pytest.mark.usefixtures("undrawn")
def test_measuring_again_replaces_the_section(tmp_path):
    measured = environment(tmp_path)
    Report(tmp_path, "gpt").add_task(TASK, RESULT, measured)
    Report(tmp_path, "gpt").add_task(TASK, TaskResult(RESULT.metrics, RESULT.items[:1]), measured)
    content = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert len(content["tasks"]["lambada"]["items"]) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not a report: JSONDecodeError"),
        ("{}", "is not a report: KeyError: 'schema'"),
        ("7", "is not a report: TypeError"),
        ('{"schema": 1, "model": "gpt", "tasks": []}', "is not a report: TypeError: its tasks"),
        ('{"schema": 2, "model": "gpt", "tasks": {}}', "has another schema; got 2; choices: 1"),
        ('{"schema": 1, "model": "m", "tasks": {}}', "of another model than gpt; got 'm'; change"),
    ],
)
def test_a_file_that_is_no_report_of_this_model_is_kept(tmp_path, text, says):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        Report(tmp_path, "gpt")
    assert (tmp_path / "report.json").read_text() == text


def test_page_shows_figures_and_loads_nothing(tmp_path):
    measured = environment(tmp_path)
    report = Report(tmp_path, "<script>x & y")
    report.add_task(TASK, RESULT, measured)
    report.add_speed(BenchmarkSettings(), SPEED, measured)
    text = report.html_file.read_text(encoding="utf-8")
    page = Page(text)
    assert "<script" not in text and "<b>" not in text
    for shown in ("<script>x & y", "34.5 %", "27.4 % to 41.6 %", "44.14", "yes", "-3.5000", "<b>"):
        assert shown in page.text, shown
    for shown in ("720.0", "200.0", "2.51.0", "cpu on node1", "60 tokens in, 20 out", "right (1)"):
        assert shown in page.text, shown
    assert text.count('<svg role="img"') == 3
    assert {link for link in page.links if not link.startswith("#")} == {"report.json", "data:,"}


def test_a_page_of_speed_alone(tmp_path):
    report = Report(tmp_path, "gpt")
    report.add_speed(BenchmarkSettings(), SPEED[:1], environment(tmp_path))
    page = Page(report.html_file.read_text(encoding="utf-8"))
    assert "Speed of one client" in page.text and "Quality" not in page.text


def test_latencies_far_apart_are_drawn_on_a_logarithmic_axis():
    rows = [dataclasses.asdict(row) for row in (SPEED[0], SPEED[2])]
    linear, _ = plots.speed(rows)
    rows[1]["latency_p50_ms"] = rows[1]["latency_p90_ms"] = 100_000.0
    logarithmic, _ = plots.speed(rows)
    assert {"100", "1000", "10000", "100000"} <= set(Page(logarithmic).text)
    assert {"0", "200", "400"} <= set(Page(linear).text)


def test_tables_line_up():
    assert task_table("lambada", RESULT).splitlines() == [
        "lambada (2 items)   value     95 % interval",
        "accuracy           34.5 %  27.4 % to 41.6 %",
        "perplexity          44.14    30.63 to 63.59",
    ]
    assert speed_table(SPEED[:1]).splitlines() == [
        "batch size  in  out  p50 [ms]  p90 [ms]  p99 [ms]  tokens/s",
        "1           60   20      90.0     120.0     130.0     200.0",
    ]
