"""How fast a task's answers came: counted, reported, and beside a reference's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from launcher_scripts.config.evaluation import GenerationSettings, TaskSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.evaluation.comparison import TimedModel, compare, read_report, timed
from launcher_scripts.evaluation.tables import task_table
from launcher_scripts.evaluation.tasks import TASKS
from launcher_scripts.evaluation.tasks.task import Speed
from tests.evaluation.test_comparison import result
from tests.evaluation.text_tasks import Prepared, Words, asked, no_progress


def test_tokens_are_counted_until_the_last_answer() -> None:
    ticks = iter((10.0, 11.0, 12.5))
    model = TimedModel(Prepared(Words(), ["a b c", "d"]), lambda: next(ticks))
    rows = [GenerateRequest((0,), 4), GenerateRequest((1,), 4)]
    assert [len(output.output_ids) for output in model.generate_rows(rows, 1)] == [3, 1]
    assert model.pace == Speed(requests=2, seconds=2.5, tokens=4, tokens_per_second=1.6)


def test_scored_prompts_have_no_tokens_per_second() -> None:
    class Scores:
        def score(self, rows, in_flight):
            assert in_flight == 8
            yield from rows

    ticks = iter((0.0, 3.0))
    model = TimedModel(Scores(), lambda: next(ticks))
    assert list(model.score([[1, 2]])) == [[1, 2]]
    assert model.pace == Speed(requests=1, seconds=3.0, tokens=0, tokens_per_second=None)


def test_a_translation_has_its_pace_beside_its_quality(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("ein Haus\nein Hund\n")
    (tmp_path / "target").write_text("a house\na dog\n")
    settings = TaskSettings(
        "translation",
        str(tmp_path / "source"),
        generation=GenerationSettings(target_file=str(tmp_path / "target")),
    )
    whole = timed(
        TASKS["translation"], settings, asked(["a house", "a big dog"], tmp_path), no_progress
    )
    assert whole.pace is not None
    assert (whole.pace.requests, whole.pace.tokens) == (2, 5)
    assert "2 requests in " in task_table("translation", whole).splitlines()[-1]


def test_a_reference_has_its_own(tmp_path: Path) -> None:
    section = {**asdict(result(0.75, "a")), "settings": {"limit": None}}
    section["pace"] = asdict(Speed(24, 8.94, 61374, 6862.0))
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema": 1, "model": "m", "tasks": {"boolq": section}}))
    reference = read_report(path, TaskSettings("boolq", "data"))
    assert compare(result(0.5, "a"), reference, "theirs").pace == Speed(24, 8.94, 61374, 6862.0)
