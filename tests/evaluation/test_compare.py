"""Two reports explained, by the command that people type."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.packages import ERROR
from launcher_scripts.evaluation.__main__ import main
from launcher_scripts.evaluation.report_difference import explain
from launcher_scripts.evaluation.tasks import task as statistics
from launcher_scripts.steps import measure_accuracy
from tests.evaluation.fake_server import FakeServer
from tests.evaluation.test_steps import ROOT, announce, settings_file

Content = dict[str, Any]


def metric(value: float, percent: bool = True) -> Content:
    return {"value": value, "low": None, "high": None, "percent": percent, "meaning": ""}


def report() -> Content:
    """Four items of lambada, three right, and a translation of one."""
    rank = {"rank": 0, "device": "cpu", "host": "n1", "pid": 5}
    on = {
        "date": "2026-01-01",
        "protocol": "http",
        "server": {"http": "n1:8000", "pid": 4, "versions": {"torch": "2.6"}, "ranks": [rank]},
        "parameters": {"data_type": "fp32"},
        "digests": {"data": {"items.jsonl": "a" * 64}, "tokenizer": "b" * 64, "manifest": None},
        "client": {"host": "c", "commit": None},
    }
    likelihoods = [-0.5, -1.0, -1.5, -3.0]
    items = [
        {"index": n, "target": f" word{n}", "correct": n < 3, "log_likelihood": value}
        for n, value in enumerate(likelihoods)
    ]
    lambada = {"accuracy": metric(0.75), "perplexity": metric(math.exp(1.5), False)}
    line = {"index": 0, "source": "ein Haus", "target": "a house", "prediction": "a house"}
    return {
        "schema": 1,
        "model": "gpt",
        "tasks": {
            "lambada": {
                "measured_on": on,
                "settings": {"limit": None},
                "metrics": lambada,
                "items": items,
            },
            "translation": {
                "measured_on": on,
                "settings": {"limit": 1},
                "metrics": {"bleu": metric(100.0, False)},
                "items": [line],
                "pace": {"requests": 1, "seconds": 1.0, "tokens": 5, "tokens_per_second": 5.0},
            },
        },
    }


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Content, Content, Path]:
    return report(), copy.deepcopy(report()), tmp_path


def compared(pair: tuple[Content, Content, Path], *options: str) -> int:
    a, b, folder = pair
    for name, content in (("a", a), ("b", b)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "report.json").write_text(json.dumps(content))
    return main(["compare", str(folder / "a"), str(folder / "b" / "report.json"), *options])


def test_the_same_results_of_another_run(pair: tuple[Content, Content, Path], capsys: Any) -> None:
    on = pair[1]["tasks"]["lambada"]["measured_on"]
    on |= {"date": "2026-01-02", "runs": ["2026-01-02"]}
    on["server"]["pid"] = on["server"]["ranks"][0]["pid"] = 77
    assert compared(pair) == 0
    said = capsys.readouterr().out
    assert "no difference" in said and said.endswith("The results are the same.\n")


def test_what_differs_in_the_set_up_comes_first(
    pair: tuple[Content, Content, Path], capsys: Any
) -> None:
    for task in pair[1]["tasks"].values():
        on = task["measured_on"] = copy.deepcopy(task["measured_on"])
        on["server"]["versions"]["torch"] = "2.7"
        on["parameters"]["data_type"] = "bf16"
        on["digests"]["tokenizer"] = "c" * 64
    pair[1]["tasks"]["lambada"]["settings"]["limit"] = 4
    assert compared(pair) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[lines.index("Set-up") + 2 :]][:4]
    assert rows == [
        ["digests.tokenizer", "b" * 12, "c" * 12],
        ["parameters.data_type", "fp32", "bf16"],
        ["settings.limit", "-", "4", "lambada"],
        ["server.versions.torch", "2.6", "2.7"],
    ]


def test_items_that_changed_show_both_texts(
    pair: tuple[Content, Content, Path], capsys: Any
) -> None:
    lambada, translation = pair[1]["tasks"].values()
    lambada["items"][0] |= {"correct": False, "log_likelihood": -4.5}
    lambada["metrics"] = {"accuracy": metric(0.5), "perplexity": metric(math.exp(2.5), False)}
    translation["items"][0]["prediction"] = "a mouse"
    translation["metrics"]["bleu"]["value"] = 50.0
    assert compared(pair) == 1
    said = capsys.readouterr().out
    assert "item 0: source ein Haus, target a house" in said
    assert "    A: prediction a house\n    B: prediction a mouse\n" in said
    assert "A: correct true, log_likelihood -0.5\n    B: correct false, log_likelihood -4.5" in said
    assert "1 of 4 answers changed" in said
    assert "largest difference of an item's log_likelihood: 4\n" in said
    assert "lambada: 1 answers differ; lambada: accuracy differs by -0.25" in said
    (found, other) = explain(*pair[:2], pair[2], pair[2]).sections
    accuracy, perplexity = found.figures.values()
    of_accuracy = statistics.paired_share(0, 1, 4)
    assert (accuracy.low, accuracy.high) == (of_accuracy.low, of_accuracy.high)
    assert perplexity.difference == pytest.approx(math.exp(2.5) - math.exp(1.5))
    of_items = statistics.mean([-4.0, 0.0, 0.0, 0.0])
    of_a = sum(item["log_likelihood"] for item in pair[0]["tasks"]["lambada"]["items"]) / 4
    ends = [math.exp(-of_a) * math.expm1(-end) for end in (of_items.high, of_items.low)]
    assert (perplexity.low, perplexity.high) == pytest.approx(tuple(ends))
    assert other.figures["bleu"].low is None


def test_a_perplexity_of_the_harness_has_an_interval(pair: tuple[Content, Content, Path]) -> None:
    """Its items have the log-likelihood under the figure's name."""
    own = explain(*pair[:2], pair[2], pair[2]).sections[0].figures["perplexity"]
    for content in pair[:2]:
        for item in content["tasks"]["lambada"]["items"]:
            item["perplexity"] = item.pop("log_likelihood")
    assert explain(*pair[:2], pair[2], pair[2]).sections[0].figures["perplexity"] == own
    assert own.low is not None


def test_an_item_changed_where_anything_of_it_is_judged_otherwise(
    pair: tuple[Content, Content, Path],
) -> None:
    for content, last in zip(pair, (True, False), strict=False):
        content["tasks"]["lambada"]["items"][3]["last_token_correct"] = last
    assert compared(pair) == 1
    assert list(explain(*pair[:2], pair[2], pair[2]).sections[0].changed) == [3]


def test_numbers_may_differ_by_the_tolerance(pair: tuple[Content, Content, Path]) -> None:
    pair[1]["tasks"]["lambada"]["metrics"]["perplexity"]["value"] += 1e-4
    assert compared(pair) == 0
    assert compared(pair, "--tolerance", "1e-6") == 1


def test_items_that_one_report_lacks(pair: tuple[Content, Content, Path], capsys: Any) -> None:
    pair[0]["tasks"]["lambada"]["items"].pop()
    pair[1]["tasks"]["lambada"]["items"][0]["target"] = " another"
    assert compared(pair) == 1
    said = capsys.readouterr().out
    assert "lambada (2 items in both, 1 in A alone, 2 in B alone)" in said
    assert "lambada: the items are not the same" in said


def test_reports_with_nothing_in_common_are_not_comparable(
    pair: tuple[Content, Content, Path], capsys: Any
) -> None:
    for task in pair[1]["tasks"].values():
        task.pop("pace", None)
        for item in task["items"]:
            item["target"] = "other"
    assert compared(pair) == 2
    assert "no item and no measurement in common" in capsys.readouterr().out
    pair[1]["tasks"] = {}
    assert compared(pair, "--json") == 2
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == 2 and found["only_a"] == ["lambada", "translation"]


def test_measurements_and_verdicts_stand_side_by_side(
    pair: tuple[Content, Content, Path], capsys: Any
) -> None:
    row = {"batch_size": 1, "input_len": 60, "output_len": 20}
    run = {"path": "grpc", "clients": 4, "rate": None, "tokens_per_second": 100.0}
    metrics = {"acc,none": metric(0.5)}
    for content, ms, verdict in zip(pair, (10.0, 5.0), ("GO", "NO-GO"), strict=False):
        speed = [{**row, "latency_p50_ms": ms, "tokens_per_second": 20_000 / ms}]
        content["speed"] = {"rows": speed, "settings": {}}
        content["load"] = {"runs": [{**run, "latency_ms": {"p50": ms}}]}
        content["verdict"] = {"verdict": verdict}
        content["harness"] = {"tasks": {"boolq": {"metrics": metrics, "items": 2}}, "version": ms}
    assert compared(pair, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["reasons"] == ["the verdicts are GO and NO-GO"]
    assert found["measured"][:2] == [
        ["speed, batch size 1, 60 tokens in, 20 out: p50 [ms]", 10.0, 5.0],
        ["speed, batch size 1, 60 tokens in, 20 out: tokens/s", 2000.0, 4000.0],
    ]
    assert ["load, grpc, 4 clients: p50 [ms]", 10.0, 5.0] in found["measured"]
    assert [section["name"] for section in found["sections"]][-1] == "harness boolq"
    assert [each["name"] for each in found["set_up"]] == ["version"]
    compared(pair)
    assert "speed, batch size 1, 60 tokens in, 20 out: p50 [ms]    10.0     5.0   0.50" in (
        capsys.readouterr().out
    )


def test_the_harness_items_are_those_of_its_samples(
    pair: tuple[Content, Content, Path], capsys: Any
) -> None:
    """Its files have a line for every document, and for every filter of it."""
    metrics = {"acc": metric(0.5), "bits_per_byte": metric(1.0, False)}
    for name, content, right, text in zip("ab", pair, (1.0, 0.0), ("yes", "no"), strict=False):
        samples = [
            {"doc_id": 1, "target": 0, "acc": 1.0, "bits_per_byte": 1.0, "filtered_resps": ["x"]},
            {
                "doc_id": 0,
                "target": 1,
                "acc": right,
                "bits_per_byte": 0.5,
                "filtered_resps": [text],
            },
            {"doc_id": 0, "target": 1, "acc": 0.0, "filter": "another", "filtered_resps": ["z"]},
        ]
        folder = pair[2] / name / "harness"
        folder.mkdir(parents=True)
        (folder / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
        task = {"metrics": metrics, "items": 2, "samples": "s.jsonl", "version": 1}
        content["harness"] = {"tasks": {"boolq": task}, "version": "0.4"}
    assert compared(pair) == 1
    said = capsys.readouterr().out
    assert "harness boolq (2 items in both)" in said
    assert "  item 0: target 1\n    A: prediction yes, acc true, bits_per_byte 0.5\n" in said
    assert "    B: prediction no, acc false, bits_per_byte 0.5\n" in said
    (pair[2] / "b" / "harness" / "s.jsonl").write_text('{"doc_id": 0}\n')
    assert compared(pair) == 2
    assert "s.jsonl is not a samples file: KeyError: 'target'" in capsys.readouterr().err
    (pair[2] / "b" / "harness" / "s.jsonl").unlink()
    assert compared(pair) == 1
    assert "harness boolq (0 items in both, 2 in A alone)" in capsys.readouterr().out


def test_the_harness_items_have_the_answers_of_every_filter(
    pair: tuple[Content, Content, Path], capsys: Any
) -> None:
    """Figures, intervals and answers are those of the filters that both reports have."""
    said = {"strict-match": ("####1", "####1"), "flexible-extract": ("1", "2"), "other": ("x", "y")}
    for side, content in enumerate(pair[:2]):
        names = [name for name in said if side or name != "other"]
        samples = [
            {
                "doc_id": doc,
                "target": "1",
                "filter": name,
                "exact_match": float(said[name][side and not doc] in ("1", "####1")),
                "filtered_resps": [said[name][side and not doc]],
            }
            for name in names
            for doc in range(4)
        ]
        folder = pair[2] / "ab"[side] / "harness"
        folder.mkdir(parents=True)
        (folder / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
        values = {"strict-match": 1.0, "flexible-extract": 0.75 if side else 1.0, "other": 0.0}
        metrics = {f"exact_match,{name}": metric(values[name]) for name in names}
        task = {"metrics": metrics, "items": 4, "samples": "s.jsonl", "version": 3}
        content["harness"] = {"tasks": {"gsm8k": task}, "version": "0.4"}
    assert compared(pair) == 1
    text = capsys.readouterr().out
    assert "harness gsm8k (4 items in both)" in text
    assert "1 of 4 answers changed" in text
    assert "prediction,flexible-extract 1, exact_match,flexible-extract true" in text
    assert "prediction,flexible-extract 2, exact_match,flexible-extract false" in text
    assert not [line for line in text.splitlines() if "exact match,other" in line]
    found = explain(*pair[:2], pair[2] / "a", pair[2] / "b").sections[-1].figures
    strict, flexible = (found[f"exact_match,{name}"] for name in list(said)[:2])
    assert (strict.difference, flexible.difference) == (0.0, -0.25)
    assert flexible.low is not None and strict.low is not None


def test_options_that_are_none_are_no_verdict(
    pair: tuple[Content, Content, Path], capsys: Any
) -> None:
    assert compared(pair, "--items", "-3", "--tolerance", "nan") == ERROR
    said = capsys.readouterr().err
    assert "--items must be at least 0; got -3" in said
    assert "--tolerance must be at least 0; got nan" in said
    with pytest.raises(SystemExit, match=str(ERROR)):
        compared(pair, "--itmes", "3")
    said = capsys.readouterr().err
    assert said.startswith("usage: python3 -m launcher_scripts.evaluation compare")
    assert said.endswith("error: unrecognized arguments: --itmes 3\n")


def test_what_is_no_report_is_named(pair: tuple[Content, Content, Path], capsys: Any) -> None:
    assert main(["compare", str(pair[2] / "a"), str(pair[2] / "b")]) == 2
    assert f"there is no report; got '{pair[2] / 'a'}'; change" in capsys.readouterr().err
    compared(pair)
    (pair[2] / "b" / "report.json").write_text("{")
    assert main(["compare", str(pair[2] / "a"), str(pair[2] / "b")]) == 2
    assert "report.json is not a report: JSONDecodeError" in capsys.readouterr().err


def test_real_reports_of_two_servers(job: Path) -> None:
    """As a command of its own, over what the step writes."""
    for folder in ("a", "b"):
        arguments = ["--settings", settings_file(job, results_dir=str(job / folder))]
        with FakeServer() as server:
            announce(job, server)
            assert measure_accuracy.main(arguments) == 0
    command = [sys.executable, "-m", "launcher_scripts.evaluation", "compare"]
    done = subprocess.run(
        [*command, job / "a", job / "b"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "lambada (3 items in both)" in done.stdout
    lines = done.stdout.splitlines()
    rows = lines[lines.index("Set-up") + 2 : lines.index("lambada (3 items in both)") - 1]
    assert [row.split()[0] for row in rows] == ["server.http"]
