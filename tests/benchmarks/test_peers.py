"""Peers run apart, and their failures are figures too."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.in_flight import InFlightReport
from benchmarks.peers import peer_lines
from benchmarks.serve import Report
from benchmarks.serving import Answered

ROW = {"model": "tiny", "rows": 8, "input": 60, "output": 20}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that `-m played_peer` runs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "played_peer.py"


def test_lines_of_a_peer_and_its_last_words(module: Path, tmp_path: Path) -> None:
    module.write_text('print("no figure")\nprint(\'{"ms": 3}\')\nraise SystemExit("no memory")\n')
    lines = list(peer_lines("played_peer", [], tmp_path, 60))
    assert lines == [{"ms": 3}, {"error": "no memory"}]


def test_a_peer_that_hangs_is_ended(module: Path, tmp_path: Path) -> None:
    module.write_text("print('{\"ms\": 3}', flush=True)\nimport time\ntime.sleep(600)\n")
    lines = list(peer_lines("played_peer", [], tmp_path, 1))
    assert lines == [{"ms": 3}, {"error": "took longer than 1 s"}]


def test_a_report_puts_a_peers_figure_beside_ours(tmp_path: Path) -> None:
    report = Report(Namespace(out=tmp_path / "out.json", in_flight=None))
    report.add({**ROW, "tp_size": 1, "ms": 40.0, "peers": {}})
    report.add_peer("ctranslate2", {"version": "4.8.5"})
    report.add_peer("ctranslate2", {**ROW, "ms": 60.0})
    report.add_peer("transformers", {"model": "tiny", "error": "OutOfMemoryError"})
    (row,) = report.facts["rows"]
    assert row["tokens_per_s"] == 4000
    assert row["peers"] == {"ctranslate2": 60.0} and row["ratios"] == {"ctranslate2": 1.5}
    assert report.facts["machine"]["ctranslate2"] == "4.8.5"
    assert report.facts["errors"] == [
        {"peer": "transformers", "model": "tiny", "error": "OutOfMemoryError"}
    ]
    assert (tmp_path / "out.json").is_file()


def test_the_best_way_of_the_peer_makes_the_ratio() -> None:
    report = InFlightReport("tiny", None)
    report.add({"clients": 8, "in_flight_tokens_per_s": 300.0, "peer_tokens_per_s": {}})
    for strategy, speed in (("one batch", 50.0), ("rows leave", 100.0)):
        report.add_peer({"clients": 8, "strategy": strategy, "tokens_per_s": speed})
    assert report.facts["rows"][0]["ratio_to_ctranslate2"] == 3.0


def test_tokens_count_for_the_time_in_which_they_came() -> None:
    answered = Answered(asked=1.0, answered=5.0, tokens=40)
    assert answered.tokens_between(0.0, 9.0) == 40
    assert answered.tokens_between(2.0, 4.0) == 20
    assert answered.tokens_between(4.0, 9.0) == 10
    assert answered.tokens_between(6.0, 9.0) == 0
