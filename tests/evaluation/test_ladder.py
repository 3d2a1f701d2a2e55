"""The table of a ladder: rows from the reports of this run, the rung to take, and why."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.fastertransformer.manifest import FileEntry, Manifest
from launcher_scripts.common.errors import ServerError
from launcher_scripts.config.evaluation import LadderPrecision, LadderSettings
from launcher_scripts.evaluation.tables import LadderRow, choose_rung, exit_code, read_row
from launcher_scripts.steps.write_ladder import precision_bytes, write_ladder
from tests.whole_job import run_whole_job

ACCURACY = {"value": 0.5, "low": 0.4, "high": 0.6, "percent": True, "meaning": "right ones"}


def rung(folder: Path, name: str, **report: Any) -> LadderPrecision:
    """A rung whose server's job folder is <folder>/<name>/deploy, with a report if there is one."""
    report_dir, deploy = folder / name / "evaluate", folder / name / "deploy"
    deploy.mkdir(parents=True)
    report_dir.mkdir()
    if report:
        content = {"schema": 1, "model": "tiny", "tasks": {}, **report}
        (report_dir / "report.json").write_text(json.dumps(content))
    return LadderPrecision(name, str(report_dir), None, (str(deploy),))


def measured(folder: Path, name: str) -> dict[str, Any]:
    server = {"job": {"folder": str(folder / name / "deploy")}}
    return {"measured_on": {"server": server}}


def task(folder: Path, name: str) -> dict[str, Any]:
    return {"metrics": {"accuracy": ACCURACY}, "items": [], **measured(folder, name)}


def speed(folder: Path, name: str) -> dict[str, Any]:
    row = {"tokens_per_second": 10.0, "latency_p50_ms": 30.0}
    faster = {"tokens_per_second": 40.0, "latency_p50_ms": 90.0}
    return {"rows": [row, faster], **measured(folder, name)}


def test_a_row_has_quality_speed_and_verdict(tmp_path: Path) -> None:
    runs = [
        {"valid": True, "tokens_per_second": 70.0, "latency_ms": {"p50": 20.0}},
        {"valid": False, "tokens_per_second": 900.0, "latency_ms": {"p50": 1.0}},
    ]
    of_bf16 = measured(tmp_path, "bf16")
    member = rung(
        tmp_path,
        "bf16",
        tasks={"lambada": task(tmp_path, "bf16")},
        harness={"tasks": {"piqa": {"metrics": {"acc": ACCURACY}}}, **of_bf16},
        speed=speed(tmp_path, "bf16"),
        load={"runs": runs, **of_bf16},
    )
    (Path(member.report_dir) / "verdict.json").write_text('{"verdict": "NO-GO"}')
    row = read_row(member, 7)
    assert list(row.metrics) == ["lambada.accuracy", "harness.piqa.acc"]
    assert (row.bytes, row.verdict, row.failure) == (7, "NO-GO", None)
    assert (row.tokens_per_second, row.latency_p50_ms) == (70.0, 30.0)


def test_the_report_of_another_run_is_no_report_and_the_log_says_why(tmp_path: Path) -> None:
    old = {"lambada": task(tmp_path, "fp32")}
    member = rung(tmp_path, "bf16", tasks=old)
    (Path(member.report_dir) / "verdict.json").write_text('{"verdict": "GO"}')
    row = read_row(member, None)
    assert (row.metrics, row.verdict) == ({}, None)
    assert row.failure == f"there is no report of this run, see {member.jobs[0]}"
    log = Path(member.jobs[0]) / "log-deploy_7.out"
    log.write_text("error: first\nwords\nerror: the port is in use\nmore\n")
    assert read_row(member, None).failure == f"error: the port is in use ({log})"


def test_what_an_earlier_run_left_to_this_one_counts_once_this_one_has_written_it(
    tmp_path: Path,
) -> None:
    earlier = task(tmp_path, "fp32")
    earlier["measured_on"]["runs"] = ["2026-01-01", "2026-01-02"]
    member = rung(tmp_path, "bf16", tasks={"lambada": earlier})
    report, record = (
        Path(member.report_dir) / "report.json",
        Path(member.jobs[0]) / "job.json",
    )
    assert read_row(member, None).failure
    record.write_text("{}")
    os.utime(record, (report.stat().st_mtime + 10,) * 2)
    assert read_row(member, None).failure
    os.utime(report, (record.stat().st_mtime + 10,) * 2)
    assert read_row(member, None).failure is None


def row(name: str, size: int | None, verdict: str | None, speed: float = 1.0) -> LadderRow:
    return LadderRow(name, {}, size, speed, 1.0, verdict, "report.json")


@pytest.mark.parametrize(
    ("rows", "chosen", "why"),
    [
        ([row("fp32", 4, None)], None, "evaluate.policy"),
        ([row("fp32", 4, "GO"), row("bf16", 2, "NO-GO")], "fp32", "the only rung that is GO"),
        ([row("fp32", 4, "GO"), row("int8", 1, "GO")], "int8", "fewest bytes.*: fp32, int8"),
        ([row("bf16", 2, "GO"), row("fp16", 2, "GO", 3.0)], "fp16", "fewest bytes"),
        ([row("x", None, "GO"), row("fp32", 4, "GO")], "fp32", "fewest bytes"),
        (
            [row("fp32", 4, "INCONCLUSIVE"), row("bf16", 2, "NO-GO")],
            None,
            "No rung is GO: fp32 INCONCLUSIVE, bf16 NO-GO",
        ),
    ],
)
def test_the_cheapest_that_is_go_is_taken(
    rows: list[LadderRow], chosen: str | None, why: str
) -> None:
    found, said = choose_rung(rows)
    assert found == chosen
    assert re.search(why, said)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([None], 0),
        (["GO", "NO-GO", "INCONCLUSIVE"], 0),
        (["NO-GO", "INCONCLUSIVE", None], 2),
        (["NO-GO", None], 1),
    ],
)
def test_a_ladder_ends_with_its_best_verdict(verdicts: list[str | None], code: int) -> None:
    assert exit_code([row("fp32", 4, verdict) for verdict in verdicts]) == code


@pytest.mark.parametrize("rung", ["int8", "fp8"])
def test_matrices_are_counted_as_they_are_served(tmp_path: Path, rung: str) -> None:
    layer = FileEntry("model.layers.0.mlp.weight.0.bin", 24, "0", shape=(4, 3), dtype="float16")
    norm = FileEntry("model.layers.0.norm.weight.bin", 8, "0", shape=(4,), dtype="float16")
    head = FileEntry("model.wte.bin", 80, "0", shape=(10, 4), dtype="float16")
    config = FileEntry("config.ini", 1000, "0")
    Manifest("GPT", 1, "fp16", (layer, norm, head, config)).write(tmp_path)
    assert precision_bytes(LadderPrecision("fp16", "", str(tmp_path))) == 24 + 8 + 80
    assert precision_bytes(LadderPrecision(rung, "", str(tmp_path))) == 4 * 3 + 4 * 3 + 8 + 80
    assert precision_bytes(LadderPrecision("int8", "", str(tmp_path / "none"))) is None
    assert precision_bytes(LadderPrecision(rung, "")) is None


def test_the_step_writes_the_report_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = rung(
        tmp_path,
        "fp32",
        tasks={"lambada": task(tmp_path, "fp32")},
        speed=speed(tmp_path, "fp32"),
    )
    (Path(good.report_dir) / "verdict.json").write_text('{"verdict": "GO"}')
    failed = rung(tmp_path, "bf16")
    assert write_ladder(LadderSettings(str(tmp_path / "ladder"), "tiny", (good, failed))) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == [
        *("rung", "lambada.accuracy", "MB", "tokens/s"),
        *said[0].split()[4:],
    ]
    assert said[1].split()[0] == "fp32"
    assert said[1].split()[-3:] == ["40.0", "30.0", "GO"]
    assert said[2].split()[-1] == "failed"
    assert said[3].startswith("bf16: there is no report of this run")
    assert "fp32 is the only rung that is GO." in said
    section = json.loads((tmp_path / "ladder" / "report.json").read_text())["ladder"]
    assert (section["chosen"], len(section["rows"])) == ("fp32", 2)
    assert section["rows"][0]["metrics"] == {"lambada.accuracy": ACCURACY}
    page = (tmp_path / "ladder" / "report.html").read_text()
    assert "<strong>Take fp32.</strong>" in page
    assert "50.0 %<br>" in page and "40.0 % to 60.0 %" in page
    assert "failed</span> there is no report" in page


def test_a_ladder_of_which_nothing_was_evaluated_fails(tmp_path: Path) -> None:
    settings = LadderSettings(str(tmp_path / "ladder"), "tiny", (rung(tmp_path, "fp32"),))
    with pytest.raises(ServerError, match="no rung of the ladder was evaluated"):
        write_ladder(settings)
    assert (tmp_path / "ladder" / "report.json").exists()


@pytest.mark.slow
def test_a_whole_ladder_and_its_exports_again(tmp_path: Path) -> None:
    options = {
        "evaluate.ladder": "[fp32,int8]",
        "export.triton_deployment.data_type": "bf16",
    }
    kept = []
    for _ in range(2):
        report = run_whole_job(tmp_path, Path(sys.executable), options=options, report="ladder")
        rows = report["ladder"]["rows"]
        assert [each["rung"] for each in rows] == ["fp32", "int8"]
        assert [each["failure"] for each in rows] == [None, None]
        assert rows[0]["bytes"] > 2 * rows[1]["bytes"]
        likely = [each["metrics"]["lambada.perplexity"]["value"] for each in rows]
        assert likely[0] == pytest.approx(likely[1], rel=0.1)
        assert likely[0] != likely[1]
        weights = (tmp_path / "results").rglob("*-gpu/*.weight.0.bin")
        kept.append({path: path.stat().st_mtime_ns for path in weights})
    assert kept[0]
    assert kept[0] == kept[1]
